"""Learning-rate factors against TorchTitan's numbers, and the edges."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim.lr_scheduler import OneCycleLR
from transformers.optimization import get_scheduler

from shardline.config.check import schedule_notes
from shardline.config.schema import LRScheduler
from shardline.optim.lr_schedule import lr_factor, momentum, set_lr


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
        "lr_scheduler.warmup_steps = 200 is longer than the schedule: cut to 10, the learning rate rises until the last"
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


def theirs(make, count: int) -> tuple[list[float], list[float]]:
    """The learning rates, with a peak of 1, and betas of a scheduler of torch or transformers."""
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=1.0, betas=(0.9, 0.99))
    scheduler, rates, momenta = make(optimizer), [], []
    for _ in range(count):
        rates.append(optimizer.param_groups[0]["lr"])
        momenta.append(optimizer.param_groups[0]["betas"][0])
        optimizer.step()
        scheduler.step()
    return rates, momenta


@pytest.mark.parametrize("warmup", [0, 2, 6])
@pytest.mark.parametrize(("shape", "strategy"), [("cosine", "cos"), ("linear", "linear")])
def test_one_cycle_is_that_of_torch(warmup, shape, strategy):
    """A share of warmup of 0.3 of 20 steps is what OneCycleLR has by itself."""
    rates, momenta = theirs(
        lambda optimizer: OneCycleLR(
            optimizer, max_lr=1.0, total_steps=20, pct_start=warmup / 20, anneal_strategy=strategy
        ),
        count=20,
    )
    ours = config(
        steps=20,
        warmup=warmup,
        warmup_type=shape,
        warmup_start_factor=1 / 25,
        decay=shape,
        floor=1 / 25e4,
        include_ends=True,
        momentum_range=[0.85, 0.95],
    )
    assert [lr_factor(step, ours) for step in range(20)] == pytest.approx(rates, rel=1e-12)
    assert [momentum(step, ours) for step in range(20)] == pytest.approx(momenta, rel=1e-12)


# name and options of transformers -> ours
OF_TRANSFORMERS = [
    ("cosine_with_restarts", {"num_cycles": 3}, {"decay": "cosine", "cycles": 3}),
    ("cosine_with_restarts", {}, {"decay": "cosine"}),
    ("polynomial", {"power": 2.0, "lr_end": 0.01}, {"decay": "polynomial", "decay_power": 2.0, "floor": 0.01}),
    ("inverse_sqrt", {}, {"decay": "inverse_sqrt"}),
    ("inverse_sqrt", {"timescale": 7}, {"decay": "inverse_sqrt", "timescale": 7}),
    (
        "warmup_stable_decay",
        {"num_decay_steps": 8, "min_lr_ratio": 0.1, "warmup_type": "cosine"},
        {"decay": "cosine", "decay_steps": 8, "floor": 0.1, "warmup_type": "cosine", "warmup_start_factor": 0.1},
    ),
    (
        "warmup_stable_decay",
        {"num_decay_steps": 8, "warmup_type": "1-sqrt", "decay_type": "1-sqrt"},
        {"decay": "sqrt", "decay_steps": 8, "warmup_type": "sqrt"},
    ),
]


@pytest.mark.parametrize(("name", "options", "ours"), OF_TRANSFORMERS)
@pytest.mark.parametrize("warmup", [0, 4])
def test_schedules_are_those_of_transformers(name, options, ours, warmup):
    """After the warmup step by step; in the warmup a step ahead, since their first step does not learn."""
    rates, _ = theirs(
        lambda optimizer: get_scheduler(name, optimizer, warmup, 30, scheduler_specific_kwargs=options), count=30
    )
    made = factors(steps=30, warmup=warmup, **ours)
    assert made[warmup:] == pytest.approx(rates[warmup:], rel=1e-9, abs=1e-12)
    assert made[: max(0, warmup - 1)] == pytest.approx(rates[1 : max(1, warmup)], rel=1e-9)


@pytest.mark.parametrize("rate", [None, 0.05])
def test_a_cosine_whose_warmup_has_a_start_is_that_of_transformers(rate):
    options = {"min_lr_rate": 0.1, **({} if rate is None else {"warmup_lr_rate": rate})}
    rates, _ = theirs(
        lambda optimizer: get_scheduler(
            "cosine_warmup_with_min_lr", optimizer, 5, 30, scheduler_specific_kwargs=options
        ),
        count=30,
    )
    start = 1 / 5 if rate is None else rate
    ours = factors(steps=30, warmup=5, decay="cosine", floor=0.1, warmup_start_factor=start, include_ends=True)
    assert ours == pytest.approx(rates, rel=1e-9)


def test_set_lr_gives_momentum_to_what_has_one():
    one, other = (torch.nn.Parameter(torch.zeros(1)) for _ in range(2))
    adam = torch.optim.AdamW([one], lr=1.0, betas=(0.9, 0.95))
    sgd = torch.optim.SGD([other], lr=1.0)
    for optimizer in (adam, sgd):
        set_lr(optimizer, 0.5, 0.87)
    assert adam.param_groups[0]["betas"] == (0.87, 0.95)
    assert sgd.param_groups[0]["momentum"] == 0.87


def test_set_lr_reaches_every_group():
    first, second = (torch.nn.Parameter(torch.zeros(1)) for _ in range(2))
    optimizer = torch.optim.AdamW([{"params": [first]}, {"params": [second]}], lr=1.0)
    set_lr(optimizer, 0.25)
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.25]
