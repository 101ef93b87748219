"""Experts on ranks with GPUs, whatever sends rows to them, give one process's numbers.

    SHARDLINE_PARITY_DEVICE=cuda benchmarks/one_gpu.sh 4 python -m pytest tests/parity/test_experts_gpu.py

(Four ranks are the most that a case has; with a GPU for each, without the script.)
"""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import pytest

from shardline.comm.job import job
from shardline.parallel.expert.all_to_all import AllToAll
from shardline.parallel.expert.symmetric import SharedMemory
from tests.parity.cases import BF16, COMPILE, ZBV, Case, case, ep, layers
from tests.parity.harness import BFLOAT16, DEVICE, FLOAT32, Harness, compare
from tests.parity.test_experts import DEEPSEEK, FULL, MIXTRAL, OP, an_expert_without_tokens, everything_to_one_expert

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE != "cuda", reason="SHARDLINE_PARITY_DEVICE is not cuda"),
]
CARRIERS = {"symmetric": SharedMemory, "all_to_all": AllToAll}
CASES = [
    case("fsdp2-ep2", DEEPSEEK, ep(2), fsdp=2),
    case("fsdp2-ep2-bf16", MIXTRAL, ep(2), BF16, fsdp=2),
    case("fsdp2-ep2-full", DEEPSEEK, ep(2), FULL, fsdp=2),
    case("fsdp2-ep2-op", DEEPSEEK, ep(2), OP, fsdp=2),
    case("fsdp2-ep2-compile", DEEPSEEK, ep(2), COMPILE, fsdp=2),
    case("tp2-ep2", DEEPSEEK, ep(2), tp=2),
    case("fsdp2-tp2-ep4", DEEPSEEK, ep(4), fsdp=2, tp=2),
    case("pp2-zbv-fsdp2-ep2", DEEPSEEK, layers(4), ep(2), ZBV, pp=2, fsdp=2),
]


@contextlib.contextmanager
def carried_by(trainer: Any, carrier: str, skew: Any = None) -> Iterator[None]:
    assert type(job.carrier) is CARRIERS[carrier]
    with contextlib.nullcontext() if skew is None else skew(trainer):
        yield
    assert not job.rows_under_way
    row = trainer.telemetry.row
    assert row["ep_comm_seconds"] > 0
    assert 0 <= row["ep_hidden_fraction"] <= 1


def asked(one: Case, carrier: str) -> dict[str, Any]:
    return {**one.overrides, "parallelism.expert_parallel_comm_backend": carrier}


@pytest.mark.parametrize("carrier", CARRIERS)
@pytest.mark.parametrize("case", CASES, ids=lambda one: one.name)
def test_training_is_that_of_one_process(harness: Harness, case: Case, carrier: str) -> None:
    overrides = asked(case, carrier)
    reference = harness.reference(overrides, case.timeout)
    seen = harness.run(overrides, case.ranks, functools.partial(carried_by, carrier=carrier), timeout=case.timeout)
    compare(reference, seen, BFLOAT16 if "bf16" in case.name else FLOAT32)


@pytest.mark.parametrize("skew", [everything_to_one_expert, an_expert_without_tokens])
def test_skew(harness: Harness, skew: Any) -> None:
    overrides = asked(CASES[0], "symmetric")
    alone = {key: value for key, value in overrides.items() if not key.startswith("parallelism.")}
    watched = functools.partial(carried_by, carrier="symmetric", skew=skew)
    compare(harness.run(alone, 1, skew), harness.run(overrides, 2, watched), FLOAT32)
