"""Worker processes that live as long as the test session: torch is imported once per process, not once per case.

A case asks for N ranks and gets the first N workers, joined in a fresh gloo group (SHARDLINE_PARITY_BACKEND=nccl: an
NCCL one for tensors of a GPU that all ranks share; each is given a host of its own, or NCCL would refuse the GPU):

    pool.run(4, function, *arguments)  ->  [what rank 0 returned, ..., what rank 3 returned]

`function` lives in a module and travels by name. A rank that raises, dies or hangs ends the case with `CaseFailed`,
which says what happened to the rank that failed first; workers that did not come back are replaced.

A worker is `python -m tests.parity.pool DESCRIPTOR LOG`, which tests/prefork.py forks where it can.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import multiprocessing
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[2]
MOST_RANKS = 8
TIMEOUT_SECONDS = 120.0
GRACE_SECONDS = 10.0  # for the other ranks to notice a failed one
JOIN_SECONDS = 30.0  # for the ranks of a case to connect
LOG_LINES = 30
BACKEND = os.environ.get("SHARDLINE_PARITY_BACKEND", "gloo")
LEAST_FREE = 0.25  # of the machine's memory: with less, workers that wait for a case are ended


class NotJoined(Exception):
    """The ranks of a case did not connect, which says nothing of the case: it is tried again."""


class CaseFailed(Exception):
    """A case did not come to its end on every rank; `rank` is the one that failed first."""

    def __init__(self, rank: int, reason: str) -> None:
        super().__init__(f"rank {rank} {reason}")
        self.rank, self.reason = rank, reason


@dataclass(frozen=True)
class Job:
    """What one worker does for one case."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    rank: int
    ranks: int
    store: str  # file through which the ranks find each other
    timeout: float

    def environment(self) -> dict[str, str]:
        """What torchrun would set. A single rank gets nothing: it is a plain process."""
        if self.ranks == 1:
            return {}
        hosts = {"NCCL_HOSTID": f"host-{self.rank}", "NCCL_SOCKET_IFNAME": "lo"} if BACKEND == "nccl" else {}
        return {
            "RANK": str(self.rank),
            "LOCAL_RANK": str(self.rank),
            "WORLD_SIZE": str(self.ranks),
            "LOCAL_WORLD_SIZE": str(self.ranks),
            "MASTER_ADDR": "127.0.0.1",
            **hosts,
        }


@dataclass(frozen=True)
class Report:
    """A worker's answer: a pickled value, or the traceback of an error and when it came (the clock is one for all)."""

    value: bytes = b""
    error: str | None = None
    at: float = 0.0


# ---- inside a worker -------------------------------------------------------------------------------------------------


def main(descriptor: str, log: str) -> None:
    """Do jobs until the other end of the pipe is closed."""
    connection = Connection(int(descriptor))
    _write_output_to(log)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the session, which ends its workers
    torch.set_num_threads(1)
    while True:
        try:
            message = connection.recv_bytes()
        except (EOFError, OSError):
            return
        connection.send_bytes(pickle.dumps(_perform(message)))


def _write_output_to(path: str) -> None:
    file = open(path, "a", buffering=1)  # noqa: SIM115 - stays open as long as the process
    os.dup2(file.fileno(), 1)
    os.dup2(file.fileno(), 2)
    sys.stdout = sys.stderr = file
    faulthandler.enable(file)
    faulthandler.register(signal.SIGUSR2, file)  # a hung worker is asked where it is


def _perform(message: bytes) -> Report:
    environment = dict(os.environ)
    try:
        job: Job = pickle.loads(message)
        os.environ.update(job.environment())
        with _group(job):
            report = Report(pickle.dumps(job.function(*job.arguments)))
    except BaseException:
        report = Report(error=traceback.format_exc(), at=time.monotonic())
    _leave_no_trace(environment)
    return report


@contextlib.contextmanager
def _group(job: Job) -> Iterator[None]:
    """The default process group of this case; the barrier keeps a fast rank from closing connections others use."""
    if job.ranks == 1:
        yield
        return
    import torch.distributed as dist

    try:
        server = _join(job)
    except Exception as error:
        raise NotJoined(str(error)) from error
    yield
    dist.barrier(device_ids=[0] if BACKEND == "nccl" else None)
    del server


def _join(job: Job) -> Any:
    """Connect the ranks. Rank 0 gets what the launcher keeps at MASTER_PORT, for those that want a connection of
    their own; the system finds a free port."""
    import torch.distributed as dist

    limit, joining = (timedelta(seconds=seconds) for seconds in (job.timeout, min(job.timeout, JOIN_SECONDS)))
    store = dist.FileStore(job.store, job.ranks)
    store.set_timeout(joining)
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if job.rank == 0 else None
    if server is not None:
        store.set("master port", str(server.port))
    os.environ["MASTER_PORT"] = store.get("master port").decode()
    backend = "cpu:gloo,cuda:nccl" if BACKEND == "nccl" else "gloo"
    dist.init_process_group(backend, store=store, rank=job.rank, world_size=job.ranks, timeout=joining)
    dist.distributed_c10d._set_pg_timeout(limit)
    store.set_timeout(limit)
    return server


def _leave_no_trace(environment: dict[str, str]) -> None:
    import torch.distributed as dist

    if "shardline.comm.mesh" in sys.modules:
        # Memory shared with the ranks of this case would be taken for that of the next one's group of the same name.
        from shardline.comm.mesh import stop_process_group

        stop_process_group()
    if dist.is_initialized():
        dist.destroy_process_group()
    # Where a rank raises while another one still joins, torch has counted the group of that one all the same, and would
    # call the next one by another name than its peers.
    dist.distributed_c10d._world.group_count = 0
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None:
        dynamo.reset()  # graphs of one case must not serve another
    _forget_meshes()
    _collect_garbage()
    os.environ.clear()
    os.environ.update(environment)


def _forget_meshes() -> None:
    """Equal meshes of two cases have different groups, but torch's cache of DTensor layouts takes one for the other.

    Its other caches would keep the groups of every case alive, with a thread of each that looks for messages.
    """
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor import _collective_utils, _redistribute, debug

        debug._clear_sharding_prop_cache()
        _collective_utils.MeshTopoInfo.build_from_mesh.cache_clear()
        _redistribute._gen_transform_infos.cache_clear()
        getattr(_redistribute, "clear_redistribute_planner_cache", lambda: None)()  # since 2.13


def _collect_garbage() -> None:
    """Free the models and groups of a case. Modules that it imported stay: later collections leave them out."""
    global _modules
    gc.collect()
    if len(sys.modules) > _modules:
        _modules = len(sys.modules)
        gc.freeze()


_modules = 0  # that were imported when objects were last left out


# ---- in the session --------------------------------------------------------------------------------------------------


@dataclass
class Worker:
    process: subprocess.Popen[bytes]
    connection: Connection
    log: Path

    def last_lines(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        return "\n".join(lines[-LOG_LINES:])

    def where(self) -> str:
        """The stacks of a worker that does not answer."""
        before = self.log.stat().st_size if self.log.exists() else 0
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGUSR2)
        time.sleep(0.5)
        text = self.log.read_bytes()[before:].decode(errors="replace") if self.log.exists() else ""
        return "\n".join(text.splitlines()[:LOG_LINES])

    def end(self) -> None:
        self.connection.close()
        self.process.kill()
        self.process.wait()


_pools: list[Pool] = []


def free_memory() -> None:
    """End waiting workers, which grow with every case, if memory is short."""
    if _pools and _free_share() < LEAST_FREE:
        for pool in _pools:
            pool.let_go()


def _free_share() -> float:
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    found = {name: int(size) for name, size, *_ in lines}
    return found["MemAvailable:"] / found["MemTotal:"]


class Pool:
    """Up to eight workers, started when a case first needs them."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="parity-pool-"))
        self.workers: list[Worker | None] = [None] * MOST_RANKS
        self.started = 0  # workers over the pool's life: shows reuse and replacement
        self.cases = 0
        self.together = 0  # ranks of the last case that had several
        _pools.append(self)
        atexit.register(self.close)  # a process waits for its children at exit, and these wait for it

    def run(
        self, ranks: int, function: Callable[..., Any], *arguments: Any, timeout: float = TIMEOUT_SECONDS
    ) -> list[Any]:
        """Call `function(*arguments)` on every rank; what each returned, by rank."""
        if not 1 <= ranks <= MOST_RANKS:
            raise ValueError(f"a case has 1 to {MOST_RANKS} ranks, got {ranks}")
        try:
            return self._run(ranks, function, arguments, timeout)
        except CaseFailed as failure:
            if NotJoined.__name__ not in failure.reason:
                raise
        for rank in range(ranks):
            self._drop(rank)
        return self._run(ranks, function, arguments, timeout)

    def _run(self, ranks: int, function: Callable[..., Any], arguments: tuple[Any, ...], timeout: float) -> list[Any]:
        self.cases += 1
        self._part_from_other_counts(ranks)
        store = str(self.folder / f"store-{self.cases}")
        messages = [pickle.dumps(Job(function, arguments, rank, ranks, store, timeout)) for rank in range(ranks)]
        workers = [self._worker(rank) for rank in range(ranks)]
        for worker, message in zip(workers, messages, strict=True):
            with contextlib.suppress(OSError):  # already dead: found out below
                worker.connection.send_bytes(message)
        reports, dead = _collect(workers, timeout)
        failure = _failure(workers, reports, dead, timeout)
        for rank in range(ranks):
            if rank not in reports:
                self._drop(rank)
        if failure is not None:
            raise failure
        return [pickle.loads(reports[rank].value) for rank in range(ranks)]

    def let_go(self) -> None:
        """End the workers; the next case starts new ones."""
        for rank in range(MOST_RANKS):
            self._drop(rank)

    def close(self) -> None:
        atexit.unregister(self.close)
        _pools.remove(self)
        self.let_go()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _part_from_other_counts(self, ranks: int) -> None:
        """Ranks that share GPU memory must have done so as often before: torch names each time by its number in a
        process, so one that was there for two ranks' cases would wait for ever for one that was not."""
        if ranks == 1:
            return
        if self.together not in (0, ranks) and torch.cuda.is_available():
            self.let_go()
        self.together = ranks

    def _worker(self, rank: int) -> Worker:
        worker = self.workers[rank]
        if worker is None or worker.process.poll() is not None:
            self._drop(rank)
            worker = self.workers[rank] = self._start(rank)
        return worker

    def _start(self, rank: int) -> Worker:
        ours, theirs = multiprocessing.Pipe()
        log = self.folder / f"worker-{rank}-{self.started}.log"
        self.started += 1
        words = [sys.executable, "-m", "tests.parity.pool", str(theirs.fileno()), str(log)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        process = subprocess.Popen(words, cwd=ROOT, env=environment, pass_fds=[theirs.fileno()])
        theirs.close()  # so that the pipe ends with the worker
        return Worker(process, ours, log)

    def _drop(self, rank: int) -> None:
        worker, self.workers[rank] = self.workers[rank], None
        if worker is not None:
            worker.end()


def _collect(workers: list[Worker], timeout: float) -> tuple[dict[int, Report], list[int]]:
    """Reports by rank, and the ranks whose process ended without one. Ranks in neither did not answer in time."""
    waiting = {worker.connection: rank for rank, worker in enumerate(workers)}
    reports: dict[int, Report] = {}
    dead: list[int] = []
    deadline = time.monotonic() + timeout
    while waiting:
        ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for connection in ready:
            rank = waiting.pop(connection)  # type: ignore[call-overload]
            try:
                reports[rank] = pickle.loads(connection.recv_bytes())  # type: ignore[union-attr]
            except (EOFError, OSError):
                dead.append(rank)
            if rank in dead or reports[rank].error is not None:
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
    return reports, dead


def _failure(workers: list[Worker], reports: dict[int, Report], dead: list[int], timeout: float) -> CaseFailed | None:
    """What went wrong first: a death explains the errors of others, an error explains why others hang."""
    if dead:
        rank = dead[0]
        code = workers[rank].process.wait(5)
        return CaseFailed(rank, f"died, exit code {code}\n{workers[rank].last_lines()}")
    errors = {rank: report for rank, report in reports.items() if report.error is not None}
    if errors:
        rank = min(errors, key=lambda rank: errors[rank].at)
        return CaseFailed(rank, f"raised\n{errors[rank].error}")
    missing = [rank for rank in range(len(workers)) if rank not in reports]
    if missing:
        text = "\n".join(f"rank {rank} is at\n{workers[rank].where()}" for rank in missing)
        return CaseFailed(missing[0], f"did not finish in {timeout:g} s (ranks that did not: {missing})\n{text}")
    return None


if __name__ == "__main__":
    from tests.parity import pool  # what jobs are unpickled as

    pool.main(*sys.argv[1:])
