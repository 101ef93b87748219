"""Start Python programs by forking a process that has imported torch: a tenth of a second of a core instead of four.

    P, a test process --request--> S, its server --fork--> A --fork--> B, the program
                      <---pid-----                A ends at once, and B becomes a child of P

`install` makes `subprocess.Popen` do this for the programs in `PROGRAMS`; others are executed as always. B is a real
child of P: P waits for it, signals it and reads its exit status, and B sees P as its parent (P is a "subreaper" of
orphaned descendants while it asks). B has a server of its own, so that the ranks which a launcher starts come from a
fork as well; that server is one more child of B.

SHARDLINE_TEST_STARTS=exec turns this off: `make test-all` executes every program. So does a GPU, which no fork can use.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import inspect
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests import leftovers

ROOT = Path(__file__).parents[1]
# Modules that are run with `python -m`, and the first words for which it pays.
PROGRAMS: dict[str, tuple[str, ...]] = {
    "shardline": ("train", "bench", "generate"),
    "shardline.train": (),
    "shardline.launch.rank_main": (),
    "tests.faults.nursery": (),
    "tests.faults.programs": (),
    "tests.faults.wire": (),
    "tests.parity.pool": (),
    "tests.unit.house.forked_program": (),
    "tests.unit.checkpoint.titan": (),
    "torch.distributed.run": (),
}
LEAVES = ("shardline.launch.rank_main", "tests.faults.nursery", "tests.parity.pool")  # start no programs themselves
# What programs import sooner or later.
IMPORTS = (
    "torch._dynamo",
    "torch.distributed.run",
    "shardline.cli.main",
    "shardline.launch.agent",
    "shardline.training.trainer",
    "tests.faults.ledger",
    "tests.faults.nursery",
    "tests.parity.harness",
)
# Variables of Python that a fork can follow; with others, such as PYTHONIOENCODING, a program is executed.
VARIABLES = ("PYTHONPATH", "PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE", "PYTHONHASHSEED", "PYTHONSAFEPATH")
PR_SET_PDEATHSIG, PR_SET_NAME, PR_SET_CHILD_SUBREAPER = 1, 15, 36
SERVER = "prefork"  # the name of its process
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class Program:
    """A Python program to start; `numbers` are the file descriptors under which it finds those that come with this."""

    module: str
    words: list[str]
    safe_path: bool
    folder: str
    environment: dict[str, str]
    numbers: list[int]
    new_session: bool
    blocked: list[int]  # signals


def program_of(args: Any) -> tuple[str, list[str], bool] | None:
    """Module, words and whether `-P` is given, of a command that a fork can stand for."""
    if not isinstance(args, (list, tuple)):
        return None
    args = [os.fsdecode(word) for word in args]
    before = list(args[1 : args.index("-m")]) if "-m" in args else ["-c"]
    if args[0] != sys.executable or any(word != "-P" for word in before) or len(args) < len(before) + 3:
        return None
    module, words = args[len(before) + 2], list(args[len(before) + 3 :])
    if module not in PROGRAMS or (PROGRAMS[module] and words[:1] not in [[word] for word in PROGRAMS[module]]):
        return None
    return module, words, bool(before)


def children(pid: int) -> list[int]:
    """The processes that a process has started, without its server."""
    found = map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
    return [child for child in found if Path(f"/proc/{child}/comm").read_text().strip() != SERVER]


def _prctl(option: int, value: int | bytes) -> None:
    ctypes.CDLL(None).prctl(option, value)


# ---- in the process that starts programs -----------------------------------------------------------------------------


class Server:
    """The other end, in a process that starts programs."""

    def __init__(self, connection: socket.socket, process: subprocess.Popen[bytes] | None = None) -> None:
        self.connection, self.process = connection, process
        self.lock, self.owner = threading.Lock(), os.getpid()

    def start(self, program: Program, descriptors: Sequence[int]) -> int:
        """The pid of a new child of this process."""
        text = json.dumps(asdict(program)).encode()
        with self.lock:
            _prctl(PR_SET_CHILD_SUBREAPER, 1)
            try:
                socket.send_fds(self.connection, [len(text).to_bytes(8, "big")], list(descriptors))
                self.connection.sendall(text)
                answer = self.connection.recv(8)
            finally:
                _prctl(PR_SET_CHILD_SUBREAPER, 0)
        if not answer:
            raise RuntimeError("the server that forks programs has died")
        return int.from_bytes(answer, "big")


_server: Server | None = None
_execute = subprocess.Popen._execute_child  # type: ignore[attr-defined]
_parameters = inspect.signature(_execute)


def wanted() -> bool:
    import torch

    return os.environ.get("SHARDLINE_TEST_STARTS", "fork") == "fork" and not torch.cuda.is_available()


def install() -> None:
    """Let the programs that this process starts come from forks. The server is started with the first of them."""
    subprocess.Popen._execute_child = _execute_or_fork  # type: ignore[attr-defined]


def close() -> None:
    """End the server; programs that run stay."""
    global _server
    server, _server = _server, None
    if server is not None and server.owner == os.getpid():
        server.connection.close()
        if server.process is not None:
            server.process.wait(30)


def _server_of_this_process() -> Server | None:
    global _server
    if _server is None:
        if threading.current_thread() is not threading.main_thread():
            return None  # the server ends with the thread that started it
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", "tests.prefork", str(theirs.fileno())]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        options: dict[str, Any] = {"cwd": ROOT, "env": environment, "stdin": subprocess.DEVNULL}
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()], **options)
        theirs.close()
        _server = Server(ours, process)
    return _server if _server.owner == os.getpid() else None


def _execute_or_fork(self: Any, *given: Any) -> None:
    call = _parameters.bind(self, *given).arguments
    found = program_of(call["args"])
    unusual = ("executable", "preexec_fn", "shell", "gid", "gids", "uid")
    usual = not any(call[name] for name in unusual) and call["umask"] < 0 and call["process_group"] < 0
    environment = dict(os.environ if call["env"] is None else call["env"])
    of_python = [name for name in environment if name.startswith("PYTHON") and name != "PYTHON"]  # which make exports
    usual = usual and set(of_python) <= set(VARIABLES) and "LD_PRELOAD" not in environment  # the loader reads that
    folder = os.path.abspath(call["cwd"] or ".")
    server = _server_of_this_process() if found and usual and os.path.isdir(folder) else None
    if server is None or found is None:
        _execute(self, *given)
        return
    ends = (call["p2cread"], call["c2pwrite"], call["errwrite"])
    descriptors = {number: number if end == -1 else end for number, end in enumerate(ends)}
    descriptors |= {number: number for number in call["pass_fds"]}
    module, words, safe_path = found
    program = Program(
        module,
        words,
        safe_path,
        folder,
        environment,
        numbers=list(descriptors),
        new_session=bool(call["start_new_session"]),
        blocked=[int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
    )
    self.pid = server.start(program, list(descriptors.values()))
    self._child_created = True
    leftovers.note_started(self.pid, call["args"])
    pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
    self._close_pipe_fds(*(call[name] for name in pipes))


# ---- the server ------------------------------------------------------------------------------------------------------


def serve(connection: socket.socket) -> tuple[Program, list[int]]:
    """Fork programs until the other end is closed; returns only in a program, with the descriptors that came for it."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    _prctl(PR_SET_NAME, SERVER.encode())
    # The terminal's signals are for the programs. What comes to one that is not ready waits until it is.
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    while True:
        size, descriptors, _, _ = socket.recv_fds(connection, 8, 64)
        if not size:
            os._exit(0)
        text = b""
        while len(text) < int.from_bytes(size, "big"):
            text += connection.recv(1 << 16)
        adopted, go = os.pipe()
        pids, tell = os.pipe()
        between = os.fork()
        if between == 0:
            child = os.fork()
            if child:
                os.write(tell, child.to_bytes(8, "big"))
                os._exit(0)
            os.close(go)
            os.read(adopted, 1)  # until this process is a child of the one that asked for it
            _prctl(PR_SET_NAME, b"python")
            return Program(**json.loads(text)), descriptors
        os.waitpid(between, 0)
        answer = os.read(pids, 8)
        for descriptor in (*descriptors, adopted, go, pids, tell):
            os.close(descriptor)
        connection.sendall(answer)


def become(program: Program, descriptors: Sequence[int]) -> None:
    """Make this process what it would be had it been executed: its files, folder, environment and session."""
    import torch

    kept = {
        number: os.dup2(descriptor, 500 + number, inheritable=False)
        for number, descriptor in zip(program.numbers, descriptors, strict=True)
    }
    os.closerange(3, 500)
    for number, copy in kept.items():
        os.dup2(copy, number)
    os.closerange(500, 600)
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # a test process that is killed leaves no program behind
    if program.new_session:
        os.setsid()
    signal.pthread_sigmask(signal.SIG_SETMASK, program.blocked)
    os.chdir(program.folder)
    os.environ.clear()
    os.environ.update(program.environment)
    before = [] if program.safe_path else [program.folder]
    before += [path for path in program.environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = [*before, *(path for path in sys.path if path not in before)]
    sys.argv = [program.module, *program.words]
    unbuffered = bool(program.environment.get("PYTHONUNBUFFERED"))
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # type: ignore[misc]  # noqa: SIM115
    for number, name in ((1, "stdout"), (2, "stderr")):
        lines = number == 2 or os.isatty(number)
        errors = "backslashreplace" if number == 2 else None
        stream = open(number, "w", buffering=1 if lines else -1, errors=errors, closefd=False)  # noqa: SIM115
        stream.reconfigure(write_through=unbuffered)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    # While there is one thread: torch replaces the pool of a forked process, and two threads of autograd that find it
    # so at the same time end the process.
    torch.set_num_threads(1)


def be_served() -> None:
    """Give this process a server of its own."""
    global _server
    ours, theirs = socket.socketpair()
    if os.fork() == 0:
        ours.close()
        run(*serve(theirs))
        sys.exit()
    theirs.close()
    _server = Server(ours)
    install()


def run(program: Program, descriptors: Sequence[int]) -> None:
    become(program, descriptors)
    if program.module not in LEAVES:
        be_served()
    warnings.filterwarnings("ignore", category=RuntimeWarning, module="runpy")  # of modules that are imported already
    runpy.run_module(program.module, run_name="__main__", alter_sys=True)


def main() -> None:
    for name in IMPORTS:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a collection in a program would copy the pages it shares
    assert len(os.listdir("/proc/self/task")) == 1, "a thread does not survive a fork, nor does what it has locked"
    run(*serve(socket.socket(fileno=int(sys.argv[1]))))


if __name__ == "__main__":
    main()
