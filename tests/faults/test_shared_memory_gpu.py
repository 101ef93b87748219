"""A rank that ends or stops while another's kernel waits for its rows, in real training of two ranks.

They may share a GPU (benchmarks/one_gpu.sh 2 ...). A killed client leaves an MPS server that serves no others: then
each test needs a server of its own.
"""

import os
import re
import signal

import pytest

from tests.faults.test_ranks import wait_until
from tests.faults.test_trainer import Run

pytestmark = pytest.mark.gpu

KEYS = {
    "model.overrides.dim": 256,
    "training.seq_len": 256,
    "parallelism.tensor_parallel_degree": 2,
    "parallelism.enable_async_tensor_parallel": "true",
    "comm.train_timeout_seconds": 5,
}


@pytest.fixture
def start(tmp_path):
    runs = []

    def start(backend):
        run = Run(tmp_path, **KEYS, **{"parallelism.async_tensor_parallel_backend": backend})
        runs.append(run)
        wait_until(lambda: run.process.poll() is not None or run.step() >= 20, 180)  # kernels are compiled
        assert run.process.poll() is None, run.process.communicate()[1]
        assert f": {backend}" in (tmp_path / "run" / "log" / "rank-0.log").read_text()
        return run

    yield start
    for run in runs:
        run.close()


@pytest.mark.parametrize("backend", ["symmetric", "fused"])
def test_a_killed_rank_is_named(start, backend):
    run = start(backend)
    pid = run.pid(1)
    os.kill(pid, signal.SIGKILL)
    code, _, error = run.end(60)
    assert code == 1
    assert re.search(rf"rank 1 \(host \S+, pid {pid}\) was killed by SIGKILL", error), error


@pytest.mark.parametrize("backend", ["symmetric", "fused"])
def test_a_stopped_rank_is_named_with_the_operation(start, backend):
    run = start(backend)
    os.kill(run.pid(1), signal.SIGSTOP)
    code, _, error = run.end(60)
    assert code == 1, error
    assert re.search(r"no progress for \d+ s: rank 0 waits in \w+ over \w+.* where rank 1 did not arrive", error), error
    assert f"pid {run.pid(1)}) has not been heard of" in error
