"""Every layout gives one process's numbers: samples, losses, gradient norms, gradients, weights."""

import pytest

from shardline.config.features import FEATURES, allowed_pairs
from tests.parity.cases import CASES, Case
from tests.parity.crossing import HOW, crossed, pairs_of
from tests.parity.harness import Harness, compare

ALL = [*CASES, *crossed()]


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=case.name, marks=[pytest.mark.slow] if case.slow else []) for case in ALL]
)
def test_layout(harness: Harness, case: Case) -> None:
    reference = harness.reference(case.overrides, case.timeout)
    compare(reference, harness.run(case.overrides, case.ranks, timeout=case.timeout), case.tolerances)


def test_every_allowed_pair_of_features_has_a_case() -> None:
    covered = {pair for case in ALL for pair in pairs_of(case)}
    assert {tuple(sorted(pair)) for pair in allowed_pairs() - covered} == set()


def test_every_feature_can_be_turned_on() -> None:
    assert set(HOW) == set(FEATURES)


def test_names_are_different() -> None:
    names = [case.name for case in ALL]
    assert len(set(names)) == len(names)
