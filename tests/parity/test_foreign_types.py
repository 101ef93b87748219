"""Models of many types train through the code of transformers as in a plain loop, and export what they have."""

import re
from pathlib import Path

import pytest

pytest.importorskip("transformers")
from tests.foreign_types import BEGIN, END, PAGE, check_training

pytestmark = pytest.mark.usefixtures("on_cpu")
FAST = ("gpt2", "phi", "stablelm")


def listed() -> list[str]:
    """The types that docs/models.md says to train."""
    table = PAGE.read_text().partition(BEGIN)[2].partition(END)[0]
    line = next(line for line in table.splitlines() if "train as a plain loop does" in line)
    return re.findall(r"`([^`]+)`", line)


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind in FAST else [pytest.mark.slow]) for kind in listed()]
)
def test_a_type_trains_as_in_a_plain_loop(kind: str, tmp_path: Path) -> None:
    check_training(kind, tmp_path)


def test_the_page_lists_the_fast_ones() -> None:
    assert set(FAST) <= set(listed())
