"""Whole runs whose tokens travel by DeepEP's interface, over gloo, give one process's numbers."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from shardline.comm.job import job
from shardline.config.layout import resolve_layout
from shardline.config.load import load_config
from shardline.models.flavors import resolve
from shardline.parallel.expert.deepep import Journey
from shardline.precision.mixed import Precision
from shardline.tools.dry_run.traffic import step_collectives
from tests import deep_ep_over_gloo as stand_in
from tests.parity.cases import BF16, COMPILE, SMALL_BATCHES, VALIDATION, ZBV, Case, case, ep, layers, marked, model
from tests.parity.harness import BFLOAT16, Harness, compare, complete
from tests.parity.test_experts import (
    DEEPSEEK,
    FULL,
    LOSSES,
    MIXTRAL,
    ONE_EACH,
    OP,
    an_expert_without_tokens,
    everything_to_one_expert,
)

THREE = model(moe=MIXTRAL["model.overrides"]["moe"] | {"top_k": 3})
DEEPEP = {"parallelism.expert_parallel_comm_backend": "deepep"}
CASES = [
    case("deepep-fsdp2-ep2", DEEPSEEK, ep(2), DEEPEP, VALIDATION, fsdp=2),
    case("deepep-fsdp2-ep2-full", LOSSES, ep(2), DEEPEP, FULL, SMALL_BATCHES, fsdp=2),
    case("deepep-fsdp2-ep2-compile", DEEPSEEK, ep(2), DEEPEP, COMPILE, fsdp=2),
    case("deepep-fsdp2-ep2-compile-full", DEEPSEEK, ep(2), DEEPEP, COMPILE, FULL, fsdp=2),
    case("deepep-fsdp2-tp2-ep4", DEEPSEEK, ep(4), DEEPEP, fsdp=2, tp=2),
    case("deepep-fsdp2-tp2-ep2-etp2", DEEPSEEK, ep(2, 2), DEEPEP, fsdp=2, tp=2),
    case("deepep-pp2-zbv-fsdp2-ep2", DEEPSEEK, layers(4), ep(2), DEEPEP, ZBV, pp=2, fsdp=2),
]
FAST = {"deepep-fsdp2-ep2", "deepep-fsdp2-tp2-ep2-etp2"}


@contextlib.contextmanager
def by_deepep() -> Iterator[None]:
    """Tokens travel by the stand-in, there and back, in both directions of every step; nothing of them is left."""
    with stand_in.installed():
        yield
    assert stand_in.calls["Buffer"] == 1
    assert min(stand_in.calls[name] for name in ("dispatch", "cached dispatch", "combine")) >= 10
    assert not job.rows_under_way
    gc.collect()
    job.carrier.keep(Journey(None, 0, 0, 0, 0), torch.device("cpu"))
    assert len(job.carrier.journeys) == 1


@pytest.mark.parametrize("case", marked(CASES, FAST))
def test_layout(harness: Harness, case: Case) -> None:
    reference = harness.reference(case.overrides, case.timeout)
    result = harness.run(case.overrides, case.ranks, timeout=case.timeout, around=by_deepep)
    compare(reference, result, case.tolerances)


@pytest.mark.parametrize(
    ("skew", "case"),
    [
        pytest.param(
            *(everything_to_one_expert, case("one", ONE_EACH, ep(4), DEEPEP, fsdp=4)),
            id="one-fsdp4-ep4",
            marks=pytest.mark.slow,
        ),
        pytest.param(an_expert_without_tokens, case("none", DEEPSEEK, ep(2), DEEPEP, fsdp=2), id="none-fsdp2-ep2"),
    ],
)
def test_skew(harness: Harness, skew: Any, case: Case) -> None:
    alone = {key: value for key, value in case.overrides.items() if not key.startswith("parallelism.")}
    compare(harness.run(alone, 1, skew), harness.run(case.overrides, case.ranks, skew, around=by_deepep))


@contextlib.contextmanager
def by_deepep_once() -> Iterator[None]:
    with by_deepep():
        yield
    assert stand_in.calls["dispatch"] == 1 + stand_in.calls["cached dispatch"], "one when it was tried out"


def test_tokens_that_have_travelled_are_kept(harness: Harness) -> None:
    """With checkpointing of single operations, what is computed again sends nothing again."""
    run = case("deepep-fsdp2-ep2-op", DEEPSEEK, ep(2), DEEPEP, OP, fsdp=2)
    compare(harness.reference(run.overrides), harness.run(run.overrides, 2, around=by_deepep_once))


@pytest.mark.slow
def test_bfloat16(harness: Harness) -> None:
    """The numbers of an all-to-all, up to the order of sums. One process may choose other experts: its sums round."""
    run = case("deepep-bfloat16", THREE, ep(2), DEEPEP, BF16, fsdp=2)
    by_all_to_all = run.overrides | {"parallelism.expert_parallel_comm_backend": "all_to_all"}
    reference, result = harness.run(by_all_to_all, 2), harness.run(run.overrides, 2, around=by_deepep)
    compare(reference, result, BFLOAT16)
    assert result.comm_bytes[0]["ep"] < 0.8 * reference.comm_bytes[0]["ep"], "a token is sent once to a rank"


@pytest.mark.slow
def test_a_dry_run_knows_about_how_much_is_sent(harness: Harness) -> None:
    """It takes experts as drawn at random; a router that has not learned much is near that."""
    run = case("deepep-bytes", MIXTRAL, ep(4), DEEPEP, {"training.steps": 2}, fsdp=4)
    config = load_config(overrides=complete(run.overrides, run.ranks))
    layout, precision = resolve_layout(config.parallelism, run.ranks), Precision(*[torch.float32] * 3)
    collectives = step_collectives(resolve(config.model), config, layout, precision, 1)
    planned = sum(row["bytes"] for (axis, _), row in collectives.items() if axis == "ep")
    sent = harness.run(run.overrides, run.ranks, around=by_deepep_briefly).comm_bytes
    assert [row["ep"] for row in sent] == pytest.approx([planned] * 2, rel=0.1)


@contextlib.contextmanager
def by_deepep_briefly() -> Iterator[None]:
    with stand_in.installed():
        yield
