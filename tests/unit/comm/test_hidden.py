"""What a sampled step on a GPU counts as communication and as exposed, by events whose time the test moves."""

import pytest
import torch

from shardline.comm import collectives
from shardline.comm.hidden_time import Alone, DeviceClock, RowClock
from shardline.comm.job import job
from shardline.comm.kernel_clock import LATE, times_of
from shardline.parallel.tensor import backend_table, overlap
from shardline.parallel.tensor.backend_table import Choice, choices, product_of
from shardline.parallel.tensor.serial_and_ring import Needs

ALONE = Alone(inputs=2.0, weights=1.0, comm=0.5)


@pytest.fixture
def now(monkeypatch):
    """[seconds]: what the device has come to."""
    now = [0.0]

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at = now[0]

        def elapsed_time(self, other):
            return 1e3 * (other.at - self.at)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    return now


def test_a_collective_is_exposed_for_all_its_time(now):
    clock = DeviceClock(axis="tp")
    with clock.around("tp"):
        now[0] += 3.0
    with clock.around("dp"):
        now[0] += 5.0
    assert clock.take() == pytest.approx((3.0, 3.0))
    assert clock.take() == (0.0, 0.0)


@pytest.mark.parametrize(("took", "exposed"), [(1.5, 0.0), (2.25, 0.25), (2.5, 0.5), (7.0, 0.5)])
def test_a_product_is_exposed_for_what_it_takes_beyond_its_own(now, took, exposed):
    clock = DeviceClock(axis="tp")
    with clock.around("tp", ALONE):
        now[0] += took
    assert clock.take() == pytest.approx((0.5, exposed))


@pytest.mark.parametrize("pace", [0.9, 1.0, 1.25])
def test_weight_gradients_tell_the_pace_of_a_step(now, pace):
    """Also that of a product without any."""
    clock = DeviceClock(axis="tp")
    with clock.around("tp", ALONE, with_weights=True):
        now[0] += pace * 2.0 + 0.2
        with clock.weight_gradients():
            now[0] += pace * 1.0
    with clock.around("tp", ALONE):
        now[0] += pace * 2.0 + 0.1
    assert clock.take() == pytest.approx((1.0, 0.3))


def test_one_slow_weight_gradient_does_not_set_the_pace(now):
    """It may have waited for memory."""
    clock = DeviceClock(axis="tp")
    for waited in (0.0, 9.0, 0.0):
        with clock.around("tp", ALONE, with_weights=True):
            now[0] += 1.1 * 2.0 + 0.25
            with clock.weight_gradients():
                now[0] += 1.1 * 1.0 + waited
    assert clock.take() == pytest.approx((1.5, 0.75))


def test_weight_gradients_amid_the_communication_count_as_computing(now):
    clock = DeviceClock(axis="tp")
    with clock.around("tp", ALONE, with_weights=True):
        now[0] += 2.0 + 1.0 + 0.25
    assert clock.take() == pytest.approx((0.5, 0.25))


# What a kernel writes of itself, in nanoseconds: it began at 1 s, ran for 2.1 s, its 4 programs waited 0.8 s together
# for rows and 0.4 s for what they sent, from 1.5 s to 2.5 s.
NOTED = [LATE - 10**9, 31 * 10**8, 8 * 10**8, 4 * 10**8, LATE - 15 * 10**8, 25 * 10**8]


def test_the_words_of_a_kernel():
    assert times_of(torch.tensor(NOTED), 4) == (pytest.approx(2.1), pytest.approx(0.3), pytest.approx((0.5, 1.5)))
    assert times_of(torch.tensor([*NOTED[:4], 0, 0]), 2) == (pytest.approx(2.1), pytest.approx(0.6), None)


@pytest.mark.parametrize("apart", [True, False])
def test_kernels_that_note_their_waits_are_exposed_for_these(now, apart):
    """However long the operation takes beside the products at the start."""
    clock = DeviceClock(axis="tp")
    with clock.around("tp", ALONE, with_weights=True):
        clock.words("gather_matmul", torch.device("cpu"), 4).copy_(torch.tensor(NOTED))
        now[0] += 2.1 + 0.15
        if apart:
            with clock.weight_gradients():
                now[0] += 1.7
        else:
            now[0] += 1.0
    assert clock.take() == pytest.approx((0.5, 0.3))


def test_waits_beyond_the_communication_alone_are_for_a_slower_rank(now):
    clock = DeviceClock(axis="tp", traced=[])
    with clock.around("tp", ALONE):
        clock.words("gather_matmul", torch.device("cpu"), 1).copy_(torch.tensor(NOTED))
    assert clock.traced[0].times().waited == 0.5
    assert clock.take() == pytest.approx((0.5, 0.5))


def test_a_traced_step_that_is_not_sampled_counts_nothing(now):
    clock = DeviceClock(traced=[])
    with clock.around("tp", ALONE):
        clock.words("k", torch.device("cpu"), 1)
    with clock.around("tp"):
        now[0] += 1.0
    assert clock.take() == (0.0, 0.0)
    assert clock.traced[0].most == ALONE.comm


def test_kernels_note_times_only_for_those_who_read_them(now):
    clock, device = DeviceClock(), torch.device("cpu")
    with clock.around("tp", ALONE):
        assert clock.words("k", device, 1) is None
    clock.axis = "tp"
    with clock.around("tp"):
        assert clock.words("k", device, 1) is None  # a separate collective: all of it is exposed
    clock.traced = []
    with clock.around("tp", ALONE):
        assert clock.words("k", device, 1) is not None
    clock.words("k", device, 1)
    assert len(clock.traced) == 2


def test_what_fails_leaves_nothing_half_timed(now, monkeypatch):
    """Nor is the device asked for an event, which would raise an error in place of the first one if it has failed."""
    clock = DeviceClock(axis="tp")

    def fail():
        monkeypatch.setattr(torch.cuda.Event, "record", lambda event: pytest.fail("the device was asked"))
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), clock.around("tp", ALONE, with_weights=True), clock.weight_gradients():
        fail()
    assert clock.take() == (0.0, 0.0)


def test_a_clock_goes_on_after_something_failed(now):
    clock = DeviceClock(axis="tp")
    with pytest.raises(ZeroDivisionError), clock.around("tp"):
        raise ZeroDivisionError
    with clock.around("tp"):
        now[0] += 3.0
    assert clock.take() == pytest.approx((3.0, 3.0))


def test_weight_gradients_outside_a_sampled_step_are_not_timed(now):
    clock = DeviceClock()
    with clock.around("tp", ALONE), clock.weight_gradients():
        now[0] += 1.0
    with clock.weight_gradients():
        now[0] += 1.0
    assert clock.take() == (0.0, 0.0)


@pytest.mark.parametrize(("took", "exposed"), [(0.4, 0.4), (0.9, 0.5)])
def test_waiting_for_a_slower_rank_is_no_communication(now, took, exposed):
    clock = DeviceClock(axis="tp")
    with clock.expecting(0.5):
        now[0] += 2.0
        with clock.around("tp"):
            now[0] += took
    with clock.around("tp"):
        now[0] += 3.0
    assert clock.take() == pytest.approx((3.0 + exposed, 3.0 + exposed))


class Slow:
    """A backend that moves the clock: 2 s beside 0.4 s of communication, and 1 s of weight gradients."""

    def __init__(self, now):
        self.now = now

    def gather_linear_backward(self, gradients, full, weights, axis, chunks, needs):
        if needs.x:
            self.now[0] += 2.0
            # Serial's collective; inside an overlapped product it is no second one.
            with job.clock.around(axis):
                self.now[0] += 0.4
        if needs.weights:
            with job.clock.weight_gradients():
                self.now[0] += 1.0
        return None, None


@pytest.mark.parametrize(
    ("backend", "needs", "expected"),
    [
        ("overlapped", Needs(), (0.5, 0.4)),
        ("overlapped", Needs(weights=False), (0.5, 0.4)),
        ("overlapped", Needs(x=False), (0.0, 0.0)),
        ("serial", Needs(), (0.4, 0.4)),
    ],
)
def test_what_a_step_counts_of_a_product(monkeypatch, now, backend, needs, expected):
    monkeypatch.setattr(collectives, "axis_size", lambda name: 2)
    monkeypatch.setattr(job.clock, "axis", "tp")
    monkeypatch.setitem(backend_table.backends, backend, Slow(now))
    weight, full, gradient = torch.ones(3, 5), torch.ones(8, 5), torch.ones(8, 3)
    product = product_of("all_gather_linear", "backward", 8, [weight], "tp", "")
    monkeypatch.setattr(choices, "chosen", {product: Choice(backend)})
    monkeypatch.setattr(choices, "alone", {product: ALONE})
    overlap.gather_backward([gradient], full, [weight], "tp", "", needs)
    assert job.clock.take() == pytest.approx(expected)


def test_rows_that_kernels_send_are_exposed_for_what_is_waited(now):
    clock = RowClock(on=True)
    for sent, waited in ((2.0, 0.5), (1.0, 0.25)):
        with clock.sending():
            now[0] += sent
        with clock.waiting():
            now[0] += waited
    times = clock.take()
    assert times == pytest.approx((3.0, 0.75))
    assert times.hidden == pytest.approx(0.75)
    assert clock.take() is None, "nothing was sent since"
    off = RowClock()
    with off.sending():
        now[0] += 1.0
    assert off.take() is None
