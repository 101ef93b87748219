"""Mixtures of experts under every layout give one process's numbers."""

import contextlib
import itertools
import shutil
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch

from shardline.comm.job import job
from shardline.config.layout import resolve_layout
from shardline.config.load import load_config
from shardline.models import decoder, feed_forward
from shardline.models.dtensor import local
from shardline.models.experts import moe, rows
from shardline.models.flavors import resolve
from shardline.parallel.expert import dispatch
from shardline.precision.float8 import quantize
from shardline.precision.mixed import Precision
from shardline.tools.dry_run.traffic import step_collectives
from tests.parity.cases import (
    COMPILE,
    DUAL_PIPE,
    EARLY,
    FORCED,
    INTERLEAVED,
    LAMB,
    LARS,
    NO_SEQUENCE,
    SMALL_BATCHES,
    TWO_PASSES,
    ZBV,
    Case,
    case,
    ep,
    layers,
    marked,
    model,
)
from tests.parity.harness import Harness, compare, complete

MIXTRAL = model(moe={"n_experts": 8, "top_k": 2, "expert_dim": 32, "normalize": True})
FULL = {"activation_checkpoint.mode": "full"}
OP = {"activation_checkpoint.mode": "selective", "activation_checkpoint.selective_ac_option": "op"}
DEEPSEEK = model(
    moe={
        "n_experts": 8,
        "top_k": 3,
        "expert_dim": 24,
        "shared_dim": 48,
        "first_dense": 1,
        "score": "sigmoid",
        "normalize": True,
        "scale": 1.5,
        "n_groups": 4,
        "top_groups": 2,
        "group_score": "top2",
        "balance_coeff": 0.01,
    }
)
# So much weight that a loss counted twice, or not at all, changes every gradient of a router.
LOSSES = model(moe=DEEPSEEK["model.overrides"]["moe"] | {"aux_loss_coeff": 0.5, "z_loss_coeff": 0.1})
SOFT_LOSSES = model(moe=MIXTRAL["model.overrides"]["moe"] | {"aux_loss_coeff": 0.5, "z_loss_coeff": 0.1})


CASES = [
    case("moe-fsdp2", MIXTRAL, fsdp=2),
    case("moe-tp2", DEEPSEEK, tp=2),
    case("moe-tp2-whole", DEEPSEEK, NO_SEQUENCE, tp=2),
    case("moe-fsdp2-ep2", DEEPSEEK, ep(2), fsdp=2),
    case("moe-fsdp4-ep2", DEEPSEEK, ep(2), fsdp=4),
    case("moe-tp2-ep2", DEEPSEEK, ep(2), tp=2),
    case("moe-tp2-ep2-whole", DEEPSEEK, NO_SEQUENCE, ep(2), tp=2),
    case("moe-fsdp2-tp2-ep4", DEEPSEEK, ep(4), fsdp=2, tp=2),
    case("moe-fsdp2-tp2-ep2-etp2", DEEPSEEK, ep(2, 2), fsdp=2, tp=2),
    case("moe-ddp2-fsdp2-ep2", MIXTRAL, ep(2), ddp=2, fsdp=2),
    case("moe-cp2-ep2", MIXTRAL, ep(2), cp=2),
    case("moe-pp2-fsdp2-ep2", DEEPSEEK, ep(2), pp=2, fsdp=2),
    case("moe-pp2-zbv-fsdp2-ep2", DEEPSEEK, layers(4), ep(2), ZBV, pp=2, fsdp=2),
    case("moe-pp2-dualpipe-fsdp2-ep2", DEEPSEEK, layers(4), ep(2), DUAL_PIPE, pp=2, fsdp=2),
    case("moe-pp2-interleaved-tp2-ep2", DEEPSEEK, layers(4), ep(2), INTERLEAVED, pp=2, tp=2),
    case("moe-fsdp2-ep2-full", DEEPSEEK, ep(2), FULL, fsdp=2),
    case("moe-fsdp2-ep2-op", DEEPSEEK, ep(2), OP, fsdp=2),
    case("moe-fsdp2-ep2-compile", DEEPSEEK, ep(2), COMPILE, fsdp=2),
    case("moe-fsdp2-ep2-early", DEEPSEEK, ep(2), EARLY, TWO_PASSES, fsdp=2),
    case("moe-fsdp2-ep2-accumulate", DEEPSEEK, ep(2), SMALL_BATCHES, fsdp=2),
    case("moe-ddp2-tp2-ep2", DEEPSEEK, ep(2), ddp=2, tp=2),
    case("moe-fsdp4-ep2-many", model(moe={"n_experts": 2, "top_k": 1, "expert_dim": 32}), ep(2), fsdp=4),
    case("moe-tp4-ep2", MIXTRAL, ep(2), tp=4),
    # one trust ratio for each of the three matrices of a layer's experts, wherever they are
    case("moe-lamb-fsdp2-ep2", MIXTRAL, LAMB, ep(2), fsdp=2),
    case("moe-lars-fsdp2-tp2-ep2-etp2", MIXTRAL, LARS, ep(2, 2), fsdp=2, tp=2),
    # losses of the router: tokens of a sequence on other ranks, in other micro-batches, counted twice
    case("losses-fsdp2", LOSSES, fsdp=2),
    case("losses-tp2", LOSSES, tp=2),
    case("losses-tp2-whole", LOSSES, NO_SEQUENCE, tp=2),
    case("losses-tp2-ep2", LOSSES, ep(2), tp=2),
    case("losses-tp2-ep2-whole", LOSSES, NO_SEQUENCE, ep(2), SMALL_BATCHES, tp=2),
    case("losses-cp2", SOFT_LOSSES, cp=2),
    case("losses-cp2-tp2-ep4", LOSSES, ep(4), cp=2, tp=2),
    case("losses-fsdp2-ep2", LOSSES, ep(2), fsdp=2),
    case("losses-ddp2", SOFT_LOSSES, ddp=2),
    case("losses-pp2", LOSSES, pp=2),
    case("losses-pp2-zbv-ep2", LOSSES, layers(4), ep(2), ZBV, pp=2, fsdp=2),
    case("losses-accumulate", LOSSES, SMALL_BATCHES),
    case("losses-fsdp2-ep2-full", LOSSES, ep(2), FULL, fsdp=2),
    case("losses-tp2-ep2-compile", LOSSES, ep(2), COMPILE, tp=2),
    case("losses-fsdp2-early", LOSSES, EARLY, TWO_PASSES, fsdp=2),
    # the same number of tokens for every expert
    case("forced-fsdp2", MIXTRAL, FORCED, fsdp=2),
    case("forced-tp2", DEEPSEEK, FORCED, tp=2),
    case("forced-tp2-whole", DEEPSEEK, FORCED, NO_SEQUENCE, tp=2),
    case("forced-cp2", MIXTRAL, FORCED, cp=2),
    case("forced-fsdp2-ep2", DEEPSEEK, FORCED, ep(2), fsdp=2),
    case("forced-pp2-accumulate", DEEPSEEK, FORCED, SMALL_BATCHES, pp=2),
]


FAST = {
    *("moe-fsdp2-ep2", "moe-tp2-ep2-whole", "moe-fsdp2-tp2-ep2-etp2"),
    *("moe-cp2-ep2", "moe-pp2-zbv-fsdp2-ep2", "moe-fsdp2-ep2-compile"),
    *("losses-accumulate", "forced-tp2"),
}


@pytest.mark.parametrize("case", marked(CASES, FAST))
def test_layout(harness: Harness, case: Case) -> None:
    reference = harness.reference(case.overrides, case.timeout)
    compare(reference, harness.run(case.overrides, case.ranks, timeout=case.timeout), case.tolerances)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="the compiler of torch needs one for C++")
@pytest.mark.parametrize("model", [DEEPSEEK, LOSSES], ids=["deepseek", "losses"])
def test_blocks_that_work_while_rows_travel(harness: Harness, model: dict[str, Any]) -> None:
    """As inductor orders them: see compiled_order.py."""
    inductor = case("inductor", model, ep(2), {"compile.enable": True}, fsdp=2)
    compare(harness.reference(inductor.overrides), harness.run(inductor.overrides, inductor.ranks, timeout=300))


@contextlib.contextmanager
def noted_transfers(trainer: Any) -> Iterator[list[str]]:
    """What happens in a run, in its order: transfers start and land, and what is computed in between."""
    events: list[str] = []

    def noted(name: str, function: Any) -> Any:
        def run(*arguments: Any, **options: Any) -> Any:
            events.append(name)
            return function(*arguments, **options)

        return run

    def widen(*arguments: Any) -> torch.Tensor:
        product = feed_forward.widen(*arguments)
        product.register_hook(lambda gradient: events.append("shared"))
        return product

    with (
        patch.object(dispatch, "_ticket", noted("start", dispatch._ticket)),
        patch.object(dispatch, "_transfer", noted("land", dispatch._transfer)),
        patch.object(rows, "multiply", noted("experts", rows.multiply)),
        patch.object(decoder, "widen", noted("shared", widen)),
        patch.object(decoder, "narrow", noted("shared", decoder.narrow)),
    ):
        yield events
    assert events.count("start") == events.count("land") > 0
    assert not job.rows_under_way
    row = trainer.telemetry.row
    assert row["ep_comm_seconds"] > 0
    assert 0 <= row["ep_hidden_fraction"] <= 1


@contextlib.contextmanager
def hidden_behind_the_other_part(trainer: Any) -> Iterator[None]:
    with noted_transfers(trainer) as events:
        yield
    first = events.index("land")
    assert events[:first].count("start") == 2, "both parts are under way before one is waited for"
    computed = [at for at, event in enumerate(events) if event == "experts"]
    assert any("start" in events[a:b] and "land" in events[a:b] for a, b in itertools.pairwise(computed))


@contextlib.contextmanager
def hidden_behind_the_shared_expert(trainer: Any) -> Iterator[None]:
    """Half of it runs during each transfer of forward; the gradients of its second half during the first of backward.

    The gradients of the first half run during the other one, after what is noted here.
    """
    with noted_transfers(trainer) as events:
        yield
    way = ["start", "shared", "land", "experts", "experts", "start", "shared", "land"]
    assert events[: len(way)] == way
    back = ["start", "shared", "land", "start", "land"]  # the products of the experts' gradients are not noted
    assert back in [events[at : at + len(back)] for at in range(len(events))]


@pytest.mark.parametrize(
    ("moe", "watched"), [(MIXTRAL, hidden_behind_the_other_part), (DEEPSEEK, hidden_behind_the_shared_expert)]
)
def test_rows_travel_while_something_computes(harness: Harness, moe: Any, watched: Any) -> None:
    layout = case("moe-fsdp2-ep2", moe, ep(2), fsdp=2)
    result = harness.run(layout.overrides, 2, watched)
    compare(harness.reference(layout.overrides), result, layout.tolerances)


def test_a_dry_run_counts_the_bytes_that_travel(harness: Harness) -> None:
    """Where every expert gets the same number of tokens, as a dry run has it."""
    forced = case("forced", DEEPSEEK, FORCED, ep(4), fsdp=2, tp=2)
    config = load_config(overrides=complete(forced.overrides, forced.ranks))
    layout, precision = resolve_layout(config.parallelism, forced.ranks), Precision(*[torch.float32] * 3)
    collectives = step_collectives(resolve(config.model), config, layout, precision, 1)
    planned = sum(row["bytes"] for (axis, _), row in collectives.items() if axis == "ep")
    assert {row["ep"] for row in harness.run(forced.overrides, forced.ranks).comm_bytes} == {planned}


# ---- float8: tokens are rounded on their way to experts, results and gradients are not -------------------------------

FLOAT8 = {"parallelism.expert_parallel_dispatch_dtype": "float8"}


@contextlib.contextmanager
def rounded_tokens(trainer: Any) -> Iterator[None]:
    """One process whose experts see tokens as float8 gives them."""
    compute = moe._compute_here

    def rounded(x: torch.Tensor, *arguments: Any) -> torch.Tensor:
        return compute(x + (quantize(x).wide(x.dtype) - x).detach(), *arguments)

    with patch.object(moe, "_compute_here", rounded):
        yield


@pytest.mark.parametrize(
    "case",
    marked(
        [
            case("float8-fsdp2-ep2", DEEPSEEK, ep(2), FLOAT8, fsdp=2),
            case("float8-tp2-ep2-full", MIXTRAL, ep(2), FLOAT8, FULL, tp=2),
            case("float8-cp2-ep2-op", MIXTRAL, ep(2), FLOAT8, OP, cp=2),
            case("float8-fsdp4-ep4-compile", DEEPSEEK, ep(4), FLOAT8, COMPILE, fsdp=4),
        ],
        {"float8-fsdp2-ep2"},
    ),
)
def test_tokens_travel_in_float8(harness: Harness, case: Case) -> None:
    alone = {key: value for key, value in case.overrides.items() if not key.startswith(("parallelism.", "compile."))}
    reference, result = harness.run(alone, 1, rounded_tokens), harness.run(case.overrides, case.ranks)
    compare(reference, result, case.tolerances)
    plain = harness.run({**case.overrides, "parallelism.expert_parallel_dispatch_dtype": "same"}, case.ranks)
    # The first step, as later ones choose other experts: one of four transfers has a quarter of the bytes, and scales.
    assert result.comm_bytes[0]["ep"] < 0.9 * plain.comm_bytes[0]["ep"]


# ---- skew: the numbers of one process, and no rank waits for rows that nobody sends ----------------------------------


@contextlib.contextmanager
def everything_to_one_expert(trainer: Any) -> Iterator[None]:
    for block in trainer.model.blocks():
        if block.moe is not None:
            local(block.moe.router.balance)[0] += 10
    yield


@contextlib.contextmanager
def an_expert_without_tokens(trainer: Any) -> Iterator[None]:
    for block in trainer.model.blocks():
        if block.moe is not None:
            local(block.moe.router.balance)[3] -= 10
    yield


@contextlib.contextmanager
def equal_scores(trainer: Any) -> Iterator[None]:
    with torch.no_grad():
        for block in trainer.model.blocks():
            if block.moe is not None:
                local(block.moe.router.gate.weight).zero_()
    yield


ONE_EACH = model(moe={"n_experts": 4, "top_k": 1, "expert_dim": 32, "balance_coeff": 0.01})
ONE_TOKEN = {"training.seq_len": 1, "training.global_batch_size": 2}
FAST_SKEW = {"one-fsdp4-ep4", "none-fsdp2-ep2", "ties-fsdp2-ep2"}
SKEWED = [
    (everything_to_one_expert, case("one-fsdp4-ep4", ONE_EACH, ep(4), fsdp=4), 4.0),
    (everything_to_one_expert, case("one-tp2-ep2", ONE_EACH, ep(2), tp=2), 4.0),
    (everything_to_one_expert, case("one-fsdp2-tp2-ep2-etp2", ONE_EACH, ep(2, 2), fsdp=2, tp=2), 4.0),
    (everything_to_one_expert, case("one-token-fsdp2-ep2", ONE_EACH, ep(2), ONE_TOKEN, fsdp=2), 4.0),
    (an_expert_without_tokens, case("none-fsdp2-ep2", DEEPSEEK, ep(2), fsdp=2), None),
    (an_expert_without_tokens, case("none-fsdp4-ep4", ONE_EACH, ep(4), fsdp=4), None),
    (equal_scores, case("ties-fsdp2-ep2", DEEPSEEK, ep(2), {"training.steps": 1}, fsdp=2), None),
]


@pytest.mark.parametrize(
    ("skew", "case", "load"),
    [
        pytest.param(*row, id=row[1].name, marks=[] if row[1].name in FAST_SKEW else [pytest.mark.slow])
        for row in SKEWED
    ],
)
def test_skew(harness: Harness, skew: Any, case: Case, load: float | None) -> None:
    alone = {key: value for key, value in case.overrides.items() if not key.startswith("parallelism.")}
    reference, result = harness.run(alone, 1, skew), harness.run(case.overrides, case.ranks, skew)
    compare(reference, result)
    assert load is None or {row["expert_load"] for row in result.routers} == {load}
