"""What is noted of a collective, and the state of a job that a run leaves behind."""

import inspect
import threading
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from shardline.comm import collectives, observe, transfers, watchdog
from shardline.comm.exposed_time import exposed
from shardline.comm.flight_recorder import FlightRecorder
from shardline.comm.job import Axis, Traffic, job
from shardline.comm.mesh import stop_process_group
from shardline.comm.observe import Observed
from shardline.comm.spans import now
from shardline.comm.watchdog import Watchdog
from shardline.parallel.pipeline import channels
from shardline.training import trainer


@pytest.fixture
def dog(monkeypatch):
    monkeypatch.setattr(job, "traffic", Traffic())
    monkeypatch.setattr(job, "watchdog", Watchdog(dist.HashStore(), 0, 2, timeout_seconds=10.0))
    return job.watchdog


@pytest.fixture
def recorded():
    job.spans.record("test")
    yield lambda: job.spans.take("test")
    job.spans.stop("test")


def test_a_collective_is_counted_numbered_and_waited_in(dog):
    call = Observed("tp", "all_gather", "a gather", 12, on_host=True)
    assert job.traffic.take() == {"tp": 12}
    assert (dog.status().counts, dog.status().wait.presumed) == ({"tp": (1, "a gather")}, True)
    for _ in range(2):  # it may be waited for in several places
        with call:
            wait = dog.status().wait
            assert (wait.axis, wait.sequence, wait.tag, wait.presumed) == ("tp", 1, "a gather", False)
        assert dog.status().wait is None
    assert job.traffic.take() == {}


def test_the_flight_recorder_knows_when_a_collective_was_issued_waited_for_and_done(dog, tmp_path):
    dog.recorder = FlightRecorder(0, 10, tmp_path, "rank_")
    dog.step(7)
    call = Observed("tp", "all_gather", "a gather", 12, on_host=True)
    (flight,) = dog.recorder.flights
    assert (flight.axis, flight.number, flight.tag, flight.size, flight.step) == ("tp", 1, "a gather", 12, 7)
    assert 0 == flight.waited == flight.done < flight.issued
    with call:
        assert flight.issued <= flight.waited
        assert flight.done == 0
    assert flight.waited <= flight.done


def test_a_wait_that_fails_is_left(dog):
    with pytest.raises(ValueError, match="cut"), Observed("tp", "all_gather", "a gather", 12, on_host=True):
        raise ValueError("cut")
    assert dog.status().wait is None


def test_a_device_that_has_failed_does_not_replace_the_first_error(dog, monkeypatch):
    def capturing():
        raise RuntimeError("the second")

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", capturing)
    with pytest.raises(RuntimeError, match="the first"), Observed("tp", "all_gather", "a gather", 12, on_host=False):
        raise RuntimeError("the first")
    with pytest.raises(RuntimeError, match="the second"), Observed("tp", "all_gather", "a gather", 12, on_host=False):
        pass
    assert dog.status().wait is None


def test_messages_of_a_channel_have_numbers_of_their_own_and_nobody_is_presumed_to_wait_in_them(dog):
    Observed("pp", "send_receive", "received", None, on_host=True, channel="pp, rank 0 to rank 1")
    assert job.traffic.take() == {}
    assert (dog.status().counts, dog.status().wait) == ({"pp, rank 0 to rank 1": (1, "received")}, None)


@pytest.mark.parametrize(("background", "kinds"), [(False, [False, True]), (True, [True])])
def test_a_wait_is_recorded_only_where_somebody_reads(recorded, background, kinds):
    call = Observed("tp", "all_gather", "a gather", 12, on_host=True, background=background)
    before = now()
    with call:
        inside = now()
    spans = recorded()
    assert [(span.axis, span.what, span.waiting) for span in spans] == [("tp", "all_gather", kind) for kind in kinds]
    assert all(before <= span.start <= inside <= span.end <= now() for span in spans)
    with Observed("tp", "all_gather", "a gather", 12, on_host=False):
        pass
    assert recorded() == []  # the profiler of the device sees it


def test_a_wait_that_began_before_somebody_read_is_not_recorded():
    call = Observed("tp", "all_gather", "a gather", 12, on_host=True)
    with call:
        job.spans.record("test")
    assert job.spans.take("test") == []
    job.spans.stop("test")


@pytest.mark.parametrize("module", [collectives, transfers, observe, channels, watchdog, threading])
def test_a_report_names_the_line_that_called_a_wrapper_of_collectives(module):
    """Its file by the module itself: a report would name the wrapper if a module moved and did not say so."""
    functions = [one for one in vars(module).values() if getattr(one, "__module__", None) == module.__name__]
    files = {inspect.unwrap(one).__code__.co_filename for one in functions if hasattr(one, "__code__")}
    assert files
    assert all(map(watchdog._is_wrapper, files))
    assert watchdog._is_wrapper(torch.distributed.__file__)
    assert not watchdog._is_wrapper(trainer.__file__)


def test_a_sum_of_host_memory_that_gloo_would_send_twice_is_scattered_by_transfers(monkeypatch):
    scattered = []
    monkeypatch.setattr(dist, "get_backend", lambda group: "gloo")
    monkeypatch.setattr(transfers, "scatter_sum", lambda out, x, name: scattered.append(name))
    monkeypatch.setattr(job, "axes", {"tp": Axis("tp", None, 2, 0)})
    collectives.scatter_rows(torch.ones(4, 2), "tp")
    assert scattered == ["tp"]


def test_a_run_that_ends_leaves_nothing_of_the_job():
    job.axes["tp"] = Axis("tp", None, 2, 0)
    job.members["tp"] = (0, 1)
    job.joined.add("tp")
    job.direct["tp"] = job.spaces["group"] = SimpleNamespace()
    job.clock.axis = "tp"
    exposed.measured = exposed.last_backward = False
    job.traffic.add("tp", 8)
    closed = SimpleNamespace(close=lambda: setattr(job, "watchdog", None))
    job.watchdog, waiter = closed, job.waiting_thread()
    stop_process_group()
    assert (job.axes, job.members, job.joined, job.direct, job.spaces) == ({}, {}, set(), {}, {})
    assert (job.clock.axis, job.traffic.take(), job.watchdog, job.waiter) == (None, {}, None, None)
    assert (exposed.measured, exposed.last_backward) == (True, True)
    with pytest.raises(RuntimeError, match="shutdown"):
        waiter.submit(print)
