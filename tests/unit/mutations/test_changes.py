"""Promises that are switched off are noticed: every change still fits the code, and a sample of them is tried.

The sample differs from commit to commit; `make test-mutations` tries them all.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.mutations.change import ROOT, Change
from tests.mutations.changes import CHANGES
from tests.mutations.trees import Tree

SAMPLE = 10


def this_commit() -> str:
    """What the sample is drawn by; anything where there is no repository."""
    try:
        head = (ROOT / ".git" / "HEAD").read_text()
        return (ROOT / ".git" / head.split()[-1]).read_text() if head.startswith("ref:") else head
    except OSError:
        return ""


def files_of(change: Change) -> list[str]:
    return [test.partition("::")[0] for test in change.tests.split()]


def sample() -> list[Change]:
    """Those whose tests start no ranks: they take seconds."""
    texts = {file: (ROOT / file).read_text(encoding="utf-8") for one in CHANGES for file in files_of(one)}
    starts = re.compile("pool|subprocess|machines|processes")
    alone = {file for file, text in texts.items() if file.startswith("tests/unit/") and not starts.search(text)}
    quick = [one for one in CHANGES if alone >= set(files_of(one))]
    return random.Random(this_commit()).sample(quick, min(SAMPLE, len(quick)))


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tree]:
    tree = Tree(tmp_path_factory.mktemp("tree"))
    yield tree
    tree.close()


def test_each_change_fits_the_code_once() -> None:
    for change in CHANGES:
        assert change.applied_to(change.path(ROOT).read_text(encoding="utf-8"))
    assert [name for name, times in Counter(one.name for one in CHANGES).items() if times > 1] == []


def test_the_page_names_each_room_that_has_some() -> None:
    page = (ROOT / "docs" / "proof.md").read_text(encoding="utf-8")
    rooms = re.findall(r"^\| `(\w+)/` \|", page, re.MULTILINE)
    assert sorted(rooms) == sorted({change.file.partition("/")[0] for change in CHANGES})


def test_each_change_names_tests_that_exist_and_are_not_slow() -> None:
    for change in CHANGES:
        for test in change.tests.split():
            file, *names = test.split("::")
            text = (ROOT / file).read_text(encoding="utf-8")
            if names:
                function = re.sub(r"\[.*", "", names[-1])
                assert re.search(rf"def {re.escape(function)}\(", text), f"{change.name}: {test}"


@pytest.mark.parametrize("change", sample(), ids=lambda change: change.name.replace(" ", "-"))
def test_a_change_is_caught(change: Change, tree: Tree) -> None:
    word, printed = tree.verdict(change)
    assert word == "caught", printed[-3000:]
