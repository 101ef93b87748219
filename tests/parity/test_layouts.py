"""Every layout gives one process's numbers: samples, losses, gradient norms, gradients, weights."""

import contextlib
import shutil
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest

from shardline.config.features import FEATURES
from shardline.training import loss
from tests.parity.cases import ASYNC, CASES, ODD_VOCABULARY, Case, case
from tests.parity.crossing import HOW, ROUNDED, allowed_pairs, crossed, pairs_of
from tests.parity.harness import Harness, compare

ALL = [*CASES, *crossed()]


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=case.name, marks=[pytest.mark.slow] if case.slow else []) for case in ALL]
)
def test_layout(harness: Harness, case: Case) -> None:
    reference = harness.reference(case.overrides, case.timeout)
    result = harness.run(case.overrides, case.ranks, timeout=case.timeout)
    compare(reference, result, case.tolerances)
    offloads = case.overrides.get("activation_checkpoint.mode") == "offload"
    assert offloads == all(result.offloaded), "bytes that each step sent to the host"


@contextlib.contextmanager
def chunks_near_a_limit(trainer: Any) -> Iterator[None]:
    """For 136 rows of the vocabulary the loss is cut into two chunks of tokens; 135 would leave it whole."""
    assert trainer.arch.vocab_size == 136 + 135
    with patch.dict(loss.CHUNK_BYTES, dict.fromkeys(loss.CHUNK_BYTES, 139_000)):
        yield


def test_ranks_with_unequal_parts_of_the_vocabulary_cut_the_loss_alike(harness: Harness) -> None:
    odd = case("tp2-odd", ODD_VOCABULARY, tp=2)
    compare(harness.reference(odd.overrides), harness.run(odd.overrides, 2, chunks_near_a_limit), odd.tolerances)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="the compiler of torch needs one for C++")
def test_blocks_that_the_compiler_of_torch_has_made(harness: Harness) -> None:
    """Other cases stop short of code generation, which takes long."""
    one = case("inductor", ASYNC, {"compile.enable": True}, tp=2)
    compare(harness.reference(one.overrides), harness.run(one.overrides, 2, timeout=300), one.tolerances)


def test_every_allowed_pair_of_features_has_a_case() -> None:
    covered = {pair for case in ALL for pair in pairs_of(case)}
    assert {tuple(sorted(pair)) for pair in allowed_pairs() - covered} == set()


def test_every_pair_that_needs_no_rounding_has_a_case_in_float32() -> None:
    exact = [pairs for case in ALL if not ROUNDED & frozenset().union(*(pairs := pairs_of(case)))]
    assert {pair for pair in allowed_pairs() if not pair & ROUNDED} <= set().union(*exact)


def test_every_feature_can_be_turned_on() -> None:
    assert set(HOW) == set(FEATURES)


def test_names_are_different() -> None:
    names = [case.name for case in ALL]
    assert len(set(names)) == len(names)
