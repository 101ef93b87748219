"""Runs pytest in forks of a process that has imported what tests import, the package left out: half of a trial is that.

python -m tests.mutations.server    reads [words for pytest, file for its output] as lines of JSON
                                    writes the exit code of each as a line; null: it took too long
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time

SECONDS = 1800.0  # all tests without a change take some minutes
POLL_SECONDS = 0.05


def load_libraries() -> None:
    import hypothesis  # noqa: F401
    import pydantic  # noqa: F401
    import rich.live  # noqa: F401
    import safetensors.torch  # noqa: F401
    import torch._dynamo
    import torch._inductor.compile_fx
    import torch.distributed.fsdp
    import torch.distributed.pipelining
    import torch.distributed.tensor  # noqa: F401


def run_pytest(words: list[str], output: str) -> None:
    """In a fork, which this ends."""
    import pytest

    os.setsid()
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for old, new in ((nothing, 0), (file, 1), (file, 2)):
        os.dup2(old, new)
    code = 3  # pytest's own for an internal error
    try:
        code = int(pytest.main(words))
        sys.stdout.flush()
    finally:
        os._exit(code)


def ended(pid: int) -> int | None:
    """The exit code of a fork; everything that it has started in its session ends with it."""
    deadline, code = time.monotonic() + SECONDS, None
    while code is None and time.monotonic() < deadline:
        found, status = os.waitpid(pid, os.WNOHANG)
        code = os.waitstatus_to_exitcode(status) if found else None
        time.sleep(0 if found else POLL_SECONDS)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    if code is None:
        os.waitpid(pid, 0)
    return code


def main() -> None:
    load_libraries()
    for line in sys.stdin:
        words, output = json.loads(line)
        pid = os.fork()
        if pid == 0:
            run_pytest(words, output)
        print(json.dumps(ended(pid)), flush=True)


if __name__ == "__main__":
    main()
