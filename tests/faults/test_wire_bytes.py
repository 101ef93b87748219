"""`comm_bytes` against the counters of the interfaces: two ranks on two hosts, what is counted and what leaves.

`comm_bytes` counts what a ring sends. Gloo carries the collectives here; its own reduce-scatter would send as much as a
sum of the whole tensor, so ours goes point to point. What leaves is what is counted:

    all_reduce 1    all_gather 1    reduce_scatter 1    gloo's own reduce-scatter 2

Of what the interface counts, the headers of its packets are taken off. What is left may exceed these factors a little:
messages have headers of their own, and the watchdog's signs of life pass by.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.wire import BEGINNING, COMMON, LAYOUTS, REPEATS, SIZE, STEPS, TOKENS
from tests.hosts import two_hosts

ROOT = Path(__file__).parents[2]
FACTORS = {
    "all_reduce": 1,
    "all_reduce_in_background": 1,
    "all_gather": 1,
    "reduce_scatter": 1,
    "reduce_scatter_of_gloo": 2,
}
HEADERS = 14 + 20 + 32  # bytes of a packet: Ethernet, IP, TCP with its time stamp
TOLERANCE = 0.01  # measured: at most 0.0003 for a collective, 0.0017 for a run
FLOAT = 4
MEASURED_STEPS = STEPS - BEGINNING


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """What each rank found, from one pair of processes."""
    folder = tmp_path_factory.mktemp("wire")
    with two_hosts(rate="1gbit") as (a, b):
        jobs = []
        for rank, host in enumerate((a, b)):
            variables = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": a.address, "MASTER_PORT": "29871"}
            command = [sys.executable, "-m", "tests.faults.wire", str(folder)]
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
            jobs.append(host.start(command, variables, cwd=ROOT, **pipes))
        outputs = [job.communicate(timeout=180)[0] for job in jobs]
        assert [job.returncode for job in jobs] == [0, 0], "\n".join(outputs)
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in (0, 1)]


def payload(found):
    size, packets = found["sent"]
    return size - HEADERS * packets


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("kind", FACTORS)
def test_a_collective_alone(measured, kind, rank):
    found = measured[rank]["collectives"][kind]
    counted = REPEATS * SIZE if kind.startswith("all_reduce") else REPEATS * SIZE // 2
    assert found["counted"] == counted
    assert payload(found) == pytest.approx(FACTORS[kind] * counted, rel=TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_training(measured, layout, rank):
    assert COMMON["training.seq_len"] * COMMON["training.global_batch_size"] == TOKENS
    found = measured[rank]["training"][layout]
    assert found["counted"] > MEASURED_STEPS * 4 * 2**20  # enough that what is not training does not show
    assert payload(found) == pytest.approx(found["counted"], rel=TOLERANCE)
