"""Learning-rate factors against TorchTitan's numbers, and the edges."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardline.config.rules import schedule_notes
from shardline.config.schema import LRScheduler
from shardline.optim.lr_schedule import lr_factor, set_lr


def config(steps=10, warmup=0, total=None, ratio=None, decay="linear", floor=0.0, **others):
    section = LRScheduler(
        warmup_steps=warmup, total_steps=total, decay_ratio=ratio, decay_type=decay, min_lr_factor=floor, **others
    )
    return SimpleNamespace(lr_scheduler=section, training=SimpleNamespace(steps=steps))


def factors(count=None, **options):
    made = config(**options)
    return [lr_factor(step, made) for step in range(count or made.training.steps)]


# options -> the factor of each step, as TorchTitan 0.2 gives them (rounded to 4 digits)
TABLE = [
    ({"warmup": 4}, [0.25, 0.5, 0.75, 1, 1, 0.8333, 0.6667, 0.5, 0.3333, 0.1667]),
    ({"warmup": 0}, [1, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1]),
    ({"warmup": 2, "ratio": 0.4}, [0.5, 1, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25]),
    ({"warmup": 2, "ratio": 0.4, "decay": "sqrt"}, [0.5, 1, 1, 1, 1, 1, 1, 0.5, 0.2929, 0.134]),
    ({"warmup": 2, "ratio": 0.4, "decay": "cosine"}, [0.5, 1, 1, 1, 1, 1, 1, 0.8536, 0.5, 0.1464]),
    ({"warmup": 2, "ratio": 0.4, "floor": 0.1}, [0.5, 1, 1, 1, 1, 1, 1, 0.775, 0.55, 0.325]),
    ({"warmup": 2, "ratio": 0.4, "decay": "cosine", "floor": 0.2}, [0.5, 1, 1, 1, 1, 1, 1, 0.8828, 0.6, 0.3172]),
    ({"warmup": 3, "ratio": 0.0}, [0.3333, 0.6667, 1, 1, 1, 1, 1, 1, 1, 1]),
    ({"warmup": 5, "ratio": 0.8}, [0.2, 0.4, 0.6, 0.8, 1, 1, 0.8, 0.6, 0.4, 0.2]),
    ({"warmup": 2, "total": 20}, [0.5, 1, 1, 0.9444, 0.8889, 0.8333, 0.7778, 0.7222, 0.6667, 0.6111]),
    ({"warmup": 200}, [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1]),
    # Keys that TorchTitan does not have
    ({"warmup_ratio": 0.4}, [0.25, 0.5, 0.75, 1, 1, 0.8333, 0.6667, 0.5, 0.3333, 0.1667]),
    ({"warmup": 2, "decay": "constant"}, [0.5, 1, 1, 1, 1, 1, 1, 1, 1, 1]),
    ({"decay": "linear", "decay_end_ratio": 0.5, "floor": 0.5}, [1, 0.9, 0.8, 0.7, 0.6, 0.5, 0.5, 0.5, 0.5, 0.5]),
    ({"warmup": 2, "ratio": 0.2, "decay_end_ratio": 0.6}, [0.5, 1, 1, 1, 1, 0.5, 0, 0, 0, 0]),
    ({"decay": "rex"}, [1, 0.989, 0.9756, 0.9589, 0.9375, 0.9091, 0.8696, 0.8108, 0.7143, 0.5263]),
    ({"decay": "rex", "floor": 0.5, "total": 2}, [1, 0.9545, *[0.5] * 8]),
    ({"warmup": 4, "warmup_type": "quadratic", "decay": "constant"}, [0.0625, 0.25, 0.5625, *[1] * 7]),
]


@pytest.mark.parametrize(("options", "expected"), TABLE)
def test_factors(options, expected):
    assert factors(**options) == pytest.approx(expected, abs=5e-5)


@pytest.mark.parametrize("decay", ["linear", "sqrt", "cosine", "rex"])
def test_after_the_end_the_floor_holds(decay):
    past = factors(count=40, total=10, warmup=2, decay=decay, floor=0.1)[10:]
    assert past == pytest.approx([0.1] * 30)


def test_given_steps_stand_in_for_training_steps_but_not_for_total_steps():
    assert lr_factor(5, config(steps=10), 50) == pytest.approx(0.9)
    assert lr_factor(5, config(steps=10, total=20), 50) == pytest.approx(0.75)


def test_what_was_shortened_is_said():
    assert schedule_notes(config(warmup=4, ratio=0.2), 10) == []
    assert schedule_notes(config(warmup=200), 10) == [
        "lr_scheduler.warmup_steps = 200 is longer than the schedule: cut to 10, the learning rate rises to the last"
        " step"
    ]
    (note,) = schedule_notes(config(warmup=5, ratio=0.8), 10)
    assert "0.8 is 8 of 10 steps" in note
    assert "the decay takes 5" in note


@given(
    steps=st.integers(1, 60),
    warmup=st.integers(0, 80),
    ratio=st.none() | st.floats(0, 1),
    decay=st.sampled_from(["linear", "sqrt", "cosine"]),
    floor=st.floats(0, 1),
)
def test_every_step_learns_and_the_curve_rises_then_falls(steps, warmup, ratio, decay, floor):
    values = factors(count=steps + 5, steps=steps, warmup=warmup, ratio=ratio, decay=decay, floor=floor)
    assert all(0 < value <= 1 for value in values[:steps])
    top = min(warmup, steps)
    assert all(a <= b for a, b in pairwise(values[:top]))
    assert all(a >= b - 1e-12 for a, b in pairwise(values[top:]))


def test_set_lr_reaches_every_group():
    first, second = (torch.nn.Parameter(torch.zeros(1)) for _ in range(2))
    optimizer = torch.optim.AdamW([{"params": [first]}, {"params": [second]}], lr=1.0)
    set_lr(optimizer, 0.25)
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.25]
