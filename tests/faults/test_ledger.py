"""Runs that are interrupted at random and resumed on other ranks train on each sample once, in order."""

import json

import pytest

from tests.faults.ledger import GLOBAL_BATCH, INTERVAL, LAYOUTS, STEPS, Book, Leg, random_legs, saved_by, write_corpus

PACKED = {"model.overrides": {"attn_mask_type": "block_causal"}}


@pytest.fixture(scope="module")
def runs(nursery, tmp_path_factory):
    return Runs(nursery, tmp_path_factory.mktemp("ledger"))


class Runs:
    """Interrupted runs, and uninterrupted ones to compare with, each made once."""

    def __init__(self, nursery, folder):
        self.nursery, self.folder, self.whole, self.count = nursery, folder, {}, 0
        self.corpora = {name: write_corpus(folder / f"{name}.jsonl", size) for name, size in SIZES.items()}

    def book(self, corpus, **more):
        self.count += 1
        data = {"training.dataset_path": str(self.corpora[corpus]), "training.cache_folder": str(self.folder / "cache")}
        return Book(self.nursery, self.folder / f"run-{self.count}", {"training.steps": STEPS, **data, **more})

    def uninterrupted(self, layout, corpus, **more):
        name = json.dumps([layout, corpus, more], sort_keys=True)
        if name not in self.whole:
            self.whole[name] = self.book(corpus, **more).run([Leg(layout)])
        return self.whole[name]


SIZES = {"large": 12_000, "small": 1_300}


def check(runs, legs, corpus="large", **more):
    book = runs.book(corpus, **more)
    ledger, whole = book.run(legs), runs.uninterrupted("1", corpus, **more)
    saved, expected = 0, [1]
    for leg in legs[:-1]:
        saved = saved_by(leg, saved)
        expected.append(saved + 1)
    assert book.firsts == expected, "a leg begins after the last save, and a stop at a step boundary loses nothing"
    assert list(ledger) == list(whole) == list(range(1, len(whole) + 1))
    read = [number for entry in ledger.values() for number in entry.samples]
    assert read == list(range(len(whole) * GLOBAL_BATCH))
    assert [entry.contents for entry in ledger.values()] == [entry.contents for entry in whole.values()]
    for step, entry in ledger.items():
        assert entry.loss == pytest.approx(whole[step].loss, rel=1e-4), f"step {step}"
    rows = [json.loads(line) for line in (book.folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [(row["step"], row["loss"]) for row in rows] == [(step, entry.loss) for step, entry in ledger.items()]
    return book, ledger


def test_on_the_same_layout_losses_are_bitwise_those_of_the_uninterrupted_run(runs):
    legs = [Leg("fsdp2", "SIGTERM", 2, 1), Leg("fsdp2", "SIGKILL", 6, 0), Leg("fsdp2", "SIGINT", 7, 1), Leg("fsdp2")]
    _, ledger = check(runs, legs)
    assert ledger == runs.uninterrupted("fsdp2", "large")


def test_over_epochs_no_window_comes_twice_in_one(runs):
    epochs = {"training.epochs": 3}
    legs = [Leg("1", "SIGTERM", 2), Leg("ddp2", "SIGKILL", 8, 1, late=True), Leg("1 in parts")]
    book, ledger = check(runs, legs, "small", **epochs)
    size = book.samples_per_epoch
    assert size % GLOBAL_BATCH != 0  # an epoch ends in the middle of a step
    contents = [content for entry in ledger.values() for content in entry.contents]
    first, second, third = (contents[size * epoch : size * (epoch + 1)] for epoch in range(3))
    assert len(set(first)) == len(set(second)) == len(set(third)) == size
    assert first != second != third


def test_with_packed_documents_on_changing_ranks(runs):
    legs = [Leg("tp2", "SIGINT", 4, 1), Leg("fsdp2 in parts", "SIGTERM", 6, 0), Leg("1", "SIGKILL", 8), Leg("pp2")]
    check(runs, legs, **PACKED)


def test_a_stop_waits_for_a_save_that_goes_on_behind(runs):
    """One that is due at the step of the stop, and one that is not."""
    legs = [Leg("ddp2", "SIGTERM", 2 * INTERVAL, 1), Leg("1", "SIGINT", 2 * INTERVAL + 1), Leg("1 in parts")]
    check(runs, legs, **{"checkpoint.async_mode": "async"})


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 16))])
def test_random_interruptions_and_layouts(runs, seed):
    check(runs, random_legs(seed, STEPS), **(PACKED if seed % 4 == 3 else {}))


@pytest.mark.slow
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "fsdp2"])
def test_every_layout_resumes_bitwise_on_itself(runs, layout):
    last = LAYOUTS[layout][0] - 1
    legs = [Leg(layout, "SIGTERM", 4, last), Leg(layout, "SIGKILL", 8, last), Leg(layout)]
    _, ledger = check(runs, legs)
    assert ledger == runs.uninterrupted(layout, "large")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_random_interruptions_over_epochs(runs, seed):
    check(runs, random_legs(100 + seed, 13), "small", **{"training.epochs": 3})


def test_random_legs_can_be_run():
    """None is killed before its first save, none ends after the last step, all kinds come up."""
    seen = set()
    for seed in range(200):
        saved = 0
        *legs, last = random_legs(seed, STEPS)
        assert last.end is None
        for leg in legs:
            assert saved < leg.at < STEPS
            assert leg.rank < LAYOUTS[leg.layout][0]
            saved = saved_by(leg, saved)
            assert saved >= 1
            assert saved % INTERVAL == 0 or leg.end != "SIGKILL" or saved < leg.at
            seen.add((leg.layout, leg.end, leg.late))
    assert {layout for layout, _, _ in seen} == set(LAYOUTS)
    assert {(end, late) for _, end, late in seen} == {
        ("SIGTERM", False),
        ("SIGINT", False),
        ("SIGKILL", False),
        ("SIGKILL", True),
    }
