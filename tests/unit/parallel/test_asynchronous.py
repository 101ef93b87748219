"""Workers that do not wait for each other: their tickets, their bound, what a step is made of."""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from shardline.comm.store import SignedStore
from shardline.optim.lion import Sgd
from shardline.optim.lr_schedule import set_lr
from shardline.parallel.data.asynchronous.server import (
    Contribution,
    ParameterServer,
    freshness,
    share_out,
    weights_of,
)
from shardline.parallel.data.asynchronous.tickets import Tickets, may_take
from shardline.training.trainer import Trainer
from tests.e2e.tiny import tiny_config

ASKS, NOTHING = (1.0, 0.0), (0.0, 0.0)


def books(workers: int, store=None) -> list[Tickets]:
    store = store or dist.HashStore()
    return [Tickets(SignedStore(store, "async", b"key"), worker, workers, 0) for worker in range(workers)]


def report(ticket: int, version: int, worker: int = 0, targets: float = 10.0) -> Contribution:
    return Contribution(ticket, worker, version, targets, 1.0, (targets,))


def at_rate(found: ParameterServer, lr: float):
    def give(step: int, share: float) -> float:
        set_lr(found.optimizer, lr * share)
        return lr * share

    return give


def server(workers: int, power: float = 0.5, lr: float = 0.1) -> tuple[nn.Parameter, ParameterServer]:
    parameter = nn.Parameter(torch.zeros(3))
    found = ParameterServer(torch.optim.SGD([parameter], lr=1.0), [parameter], workers, power, 0)
    found.set_rate = at_rate(found, lr)
    return parameter, found


# ---- a random schedule -----------------------------------------------------------------------------------------------


class Play:
    """All workers, in any order: each looks, takes a ticket if it may, and is through with it at some later turn."""

    def __init__(self, workers: int, staleness: int, ends=lambda step: False) -> None:
        self.books, self.staleness, self.ends = books(workers), staleness, ends
        _, self.server = server(workers)
        self.made = [0] * workers  # the steps that each worker's loop has counted
        self.held: dict[int, tuple[int, int]] = {}  # worker -> ticket, version that it reads
        self.through: list[int] = []

    def turn(self, worker: int) -> None:
        if worker in self.held:
            ticket, version = self.held.pop(worker)
            self.server.add(report(ticket, version, worker), [torch.ones(3)])
            self.through.append(ticket)
            return
        book, version = self.books[worker], self.server.version
        if version > self.made[worker]:
            self.made[worker] += 1
        if self.ends(self.made[worker]):
            return  # it waits for the others there
        book.look()
        if may_take(book.step, version, self.made[worker], self.staleness, self.ends):
            ticket = book.take(NOTHING)
            assert ticket is not None
            self.held[worker] = ticket, version


@settings(max_examples=25, deadline=None)
@given(
    workers=st.integers(1, 4),
    staleness=st.integers(0, 3),
    turns=st.lists(st.integers(0, 3), max_size=80),
    end=st.integers(1, 8),
)
def test_under_any_schedule_the_bound_holds_and_each_ticket_is_made_once(workers, staleness, turns, end):
    play = Play(workers, staleness, lambda step: step == end)
    for turn in turns:
        play.turn(turn % workers)
    while play.server.version < end:  # nobody is stuck: whoever's turn it is
        for worker in range(workers):
            play.turn(worker)
    assert sorted(play.through) == list(range(end * workers))
    assert play.server.version == end
    assert not play.held
    for step in range(1, end + 1):
        late = play.server.made[step].staleness(workers)
        assert all(0 <= one <= staleness for one in late)


def test_a_slow_worker_makes_fewer_and_all_are_made_once():
    play = Play(2, 2, lambda step: step == 40)
    order = random.Random(0)
    while play.server.version < 40:
        play.turn(0 if order.random() < 0.8 else 1)
    of_workers = [0, 0]
    for made in play.server.made.values():
        for one in made.reports:
            of_workers[one.worker] += 1
    assert sorted(play.through) == list(range(80))
    assert of_workers[0] > 1.5 * of_workers[1] > 0


def test_without_staleness_nothing_of_a_later_step_is_taken():
    play = Play(2, 0)
    for _ in range(5):
        play.turn(0)
    assert play.through == [0, 1]
    assert all(late == 0 for made in play.server.made.values() for late in made.staleness(2))
    assert [may_take(1, 0, 0, staleness, lambda step: False) for staleness in (0, 1)] == [False, True]


def test_nothing_of_a_later_step_is_begun_before_a_meeting():
    assert not may_take(3, 3, 2, 2, lambda step: step == 3)
    assert may_take(2, 2, 2, 2, lambda step: step == 3)
    assert may_take(3, 3, 3, 2, lambda step: step == 3)  # who has met there goes on


# ---- tickets in the store --------------------------------------------------------------------------------------------


def test_whoever_takes_a_ticket_knows_what_was_asked_before():
    one, other = books(2)
    assert one.take(ASKS) == 0
    other.look()
    assert other.take(NOTHING) == 1
    assert [one.take(NOTHING) for _ in range(2)] == [None, 2]
    assert one.asked == other.asked == {0: [1.0, 0.0]}


def test_a_strangers_ticket_is_ignored():
    store = dist.HashStore()
    one, _ = books(2, store)
    dist.PrefixStore("async", store).set("ticket/0", '{"worker": 1, "asks": [1, 1]}')
    one.look()
    assert one.next == 0
    assert one.take(NOTHING) == 0
    assert one.asked == {}


def test_what_a_late_worker_brings_is_dropped():
    fast, late, third = books(3)
    assert late.take(NOTHING) == 0
    fast.look()
    assert not late.take_again(0)  # its own
    assert [one.take_again(0) for one in (fast, third)] == [True, False]
    assert not fast.is_through(0)
    assert fast.is_first(0)
    assert fast.is_through(0)
    assert not late.is_first(0)


# ---- a step ----------------------------------------------------------------------------------------------------------


def test_a_step_is_the_mean_over_targets():
    parameter, served = server(2)
    served.add(report(1, 0, targets=30.0), [torch.full((3,), 2.0)])
    assert served.version == 0
    served.add(report(0, 0, targets=10.0), [torch.full((3,), 6.0)])
    assert served.wait(1, 0)
    assert served.read(1)[1][0].tolist() == pytest.approx([-0.3] * 3)
    assert parameter.tolist() == [0.0] * 3  # the model's own is only changed by pulling
    assert served.made[1].lr == pytest.approx(0.1)


def test_a_late_contribution_has_a_smaller_learning_rate():
    _, served = server(2, power=1.0)
    for ticket in (0, 1):
        served.add(report(ticket, 0), [torch.zeros(3)])
    served.add(report(2, 1), [torch.full((3,), 4.0)])
    served.add(report(3, 0), [torch.full((3,), 8.0)])  # one step late: half of its rate
    assert served.read(2)[1][0].tolist() == pytest.approx([-0.1 * (4 / 2 + 8 / 2 / 2)] * 3)
    assert served.made[2].lr == pytest.approx(0.1 * 0.75)
    assert [freshness(*late) for late in ((0, 0.5), (3, 0.5), (3, 0.0))] == [1.0, 0.5, 1.0]


def test_a_contribution_without_targets_counts_for_nothing():
    assert weights_of([report(0, 0, targets=0.0), report(1, 0)], 2, 0.5) == ([0.0, 1.0], 1.0)
    assert weights_of([report(0, 0, targets=0.0)], 1, 0.5) == ([0.0], 0.0)


def test_biases_of_routers_move_once_a_step_by_the_counts_of_all():
    """They are as old as the weights that are read with them; a step that counts for nothing does not move them."""
    _, served = server(2)
    served.biases, moves = [torch.zeros(2)], []

    def balance(biases, sums):
        moves.append(sums)
        biases[0] += 1.0

    served.balance = balance
    for ticket, counts in enumerate([(6.0, 2.0), (1.0, 7.0)]):
        served.add(report(ticket, 0)._replace(sums=(9.0, *counts)), [torch.zeros(3)])
    assert moves == [[18.0, 7.0, 9.0]]
    before = served.read(1, biases=True)[1][1]
    assert len(served.read(1)[1]) == 1
    for ticket in (2, 3):
        served.add(report(ticket, 1, targets=0.0), [torch.zeros(3)])
    assert served.read(2, biases=True)[1][1].tolist() == before.tolist() == [1.0, 1.0]
    for ticket in (4, 5):
        served.add(report(ticket, 2), [torch.zeros(3)])
    assert before.tolist() == [1.0, 1.0]
    assert served.biases[0].tolist() == [2.0, 2.0]


def test_a_ticket_cannot_be_contributed_twice():
    _, served = server(2)
    served.add(report(0, 0), [torch.zeros(3)])
    with pytest.raises(RuntimeError, match="twice"):
        served.add(report(0, 0), [torch.zeros(3)])


def test_tensors_are_shared_out_evenly():
    shares = share_out([100, 1, 60, 50, 2], 2)
    assert shares == [[0, 1, 4], [2, 3]]


def test_the_state_stays_with_who_serves():
    served, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([served, other], lr=1.0, momentum=0.9)
    for parameter in (served, other):
        optimizer.state[parameter]["momentum_buffer"] = torch.full((2,), 3.0)
    found = ParameterServer(optimizer, [served], 1, 0.5, 0)
    assert other not in optimizer.state
    found.set_rate = at_rate(found, 1.0)
    found.add(report(0, 0), [torch.ones(2)])
    assert found.read(1)[1][0].tolist() == pytest.approx([1 - 3.7] * 2)
    with found.as_of_model():
        assert [group["params"] for group in optimizer.param_groups] == [[served]]
        assert optimizer.state[served]["momentum_buffer"].tolist() == pytest.approx([3.7] * 2)
    assert optimizer.param_groups[0]["params"] == found.values


def test_state_that_the_first_step_makes_is_saved():
    parameter = nn.Parameter(torch.ones(2))
    optimizer = Sgd([{"params": [parameter], "weight_decay": 0.0}], {"lr": 1.0, "momentum": 0.9})
    found = ParameterServer(optimizer, [parameter], 1, 0.5, 0)
    found.set_rate = at_rate(found, 1.0)
    for ticket in range(2):
        found.add(report(ticket, ticket), [torch.ones(2)])
        with found.as_of_model():
            state = optimizer.state[parameter]["momentum_buffer"].tolist()
    assert state == pytest.approx([1.9] * 2)


def test_the_power_of_the_config_reaches_the_server(tmp_path):
    keys = {"parallelism__data_parallel_mode": "async", "fault_tolerance__async_lr_power": 0.25}
    trainer = Trainer(tiny_config(tmp_path / "run", **keys))
    found = trainer.stepper.asynchronous.server
    found.version, found.set_rate = 15, lambda step, share: share
    found.add(report(ticket=15, version=0), [torch.zeros_like(value) for value in found.values])
    trainer.close()
    assert found.made[16].lr == 16**-0.25
