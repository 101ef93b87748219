"""When ranks communicate and wait: who reads it, what collectives leave, and how it gets into a trace."""

from __future__ import annotations

import json
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from shardline.comm import collectives
from shardline.comm.job import job
from shardline.comm.kernel_clock import LATE
from shardline.comm.mesh import Mesh
from shardline.comm.observe import Observed, Started, labelled, runs_on_host
from shardline.comm.spans import Span, Spans, now
from shardline.config.layout import Layout
from shardline.config.schema import Config
from shardline.telemetry.profile import Profiler
from shardline.telemetry.trace_file import add_spans, span_events
from tests.parity.pool import Pool

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def pool():
    workers = Pool()
    yield workers
    workers.close()


@pytest.fixture(autouse=True)
def nobody_reads():
    yield
    assert not job.spans.enabled


# ---- readers ---------------------------------------------------------------------------------------------------------


def test_every_reader_gets_every_span_since_it_last_took():
    log = Spans()
    log.add("tp", "lost", 0, 1, waiting=False)
    log.record()
    log.add("tp", "first", 1, 2, waiting=False)
    log.record("trace")
    log.record("trace")  # goes on
    log.add("tp", "second", 2, 3, waiting=True)
    assert [span.what for span in log.take()] == ["first", "second"]
    assert log.take("trace") == [Span("tp", "second", 2, 3, True)]
    assert log.take() == log.take("trace") == []


def test_spans_are_enabled_while_anybody_reads():
    log = Spans()
    assert not log.enabled
    log.record("a")
    log.record("b")
    log.add("tp", "x", 0, 1, waiting=False)
    log.stop("a")
    assert log.enabled
    assert log.take("a") == []
    log.stop("b")
    assert not log.enabled
    log.stop("b")


def test_adding_from_other_threads_loses_nothing():
    log, taken = Spans(), []
    log.record()
    with ThreadPoolExecutor(4) as threads:
        jobs = [
            threads.submit(lambda: [log.add("tp", "x", i, i + 1, waiting=False) for i in range(500)]) for _ in range(4)
        ]
        while not all(job.done() for job in jobs):
            taken += log.take()
    assert len(taken + log.take()) == 2000


@pytest.fixture
def recorded():
    job.spans.record("test")
    yield lambda: job.spans.take("test")
    job.spans.stop("test")


def in_background(what, get_future):
    work = SimpleNamespace(get_future=get_future, wait=lambda timeout: True)
    return Started(now(), work, Observed("tp", what, what, 0, on_host=True, background=True))


def test_background_work_ends_once_when_its_future_does(recorded):
    future = torch.futures.Future()
    started = in_background("all_reduce", lambda: future)
    assert recorded() == []
    future.set_result(None)
    started.wait()
    ended, waited = recorded()
    assert (ended.axis, ended.what, ended.waiting, waited.waiting) == ("tp", "all_reduce", False, True)


def test_background_work_that_cannot_tell_ends_when_it_was_waited_for(recorded):
    def none():
        raise RuntimeError("not implemented")

    started = in_background("send", none)
    assert recorded() == []
    started.wait()
    assert [span.waiting for span in recorded()] == [True, False]


# ---- collectives -----------------------------------------------------------------------------------------------------


def each_collective():
    """What each collective leaves, and what is left when nobody reads."""
    mesh = Mesh(Layout(tp=2), "cpu")
    x = torch.ones(4, 2)
    collectives.sum_in_place(x.clone(), "tp")
    assert job.spans.take() == []
    began = now()
    job.spans.record()
    collectives.all_gather(x, "tp")
    collectives.reduce_scatter(x, "tp")
    collectives.max_in_place(x.clone(), "world")
    found = job.spans.take()
    started = collectives.start_sum(x.clone(), "tp")
    while mesh.rank == 0 and len(found) == 6:  # on this rank the sum is complete before it is waited for
        time.sleep(0.01)
        found += job.spans.take()
    started.wait()
    found += job.spans.take()
    job.spans.stop()
    return began, found, now()


def test_collectives_leave_what_they_did_and_what_was_waited_for(pool):
    blocking = [("tp", "all_gather"), ("tp", "reduce_scatter"), ("world", "all_reduce")]
    for rank, (began, found, ended) in enumerate(pool.run(2, each_collective)):
        assert all(began <= span.start <= span.end <= ended for span in found)
        assert [(span.axis, span.what) for span in found[:6]] == [name for name in blocking for _ in range(2)]
        for talking, waiting in zip(found[0:6:2], found[1:6:2], strict=True):
            assert (talking.waiting, waiting.waiting) == (False, True)
            assert (talking.start, talking.end) == (waiting.start, waiting.end)
        background, wait = sorted(found[6:], key=lambda span: span.waiting)
        assert (background.what, background.waiting, wait.waiting) == ("all_reduce", False, True)
        assert background.start <= wait.start
        assert rank == 1 or background.end < wait.start


def backends():
    group = dist.group.WORLD
    return runs_on_host(group, CPU), runs_on_host(group, torch.device("cuda"))


def test_gloo_runs_on_the_host_also_for_tensors_of_a_gpu(pool):
    assert pool.run(2, backends) == [(True, True)] * 2


def test_nccl_does_not(monkeypatch):
    monkeypatch.setattr(dist, "get_backend_config", lambda group: "cpu:gloo,cuda:nccl")
    assert runs_on_host(None, CPU)
    assert not runs_on_host(None, torch.device("cuda"))


# ---- in a trace ------------------------------------------------------------------------------------------------------


def profiled(folder, steps, work, device=CPU, **options):
    options = {"enable_profiling": True, "profile_freq": 4, "profiler_warmup": 1} | options
    with Profiler(Config.model_validate({"profiling": options}), folder, 0, device, start_step=10) as profiler:
        for step in range(steps):
            work(step)
            profiler.step()


def read(folder, step):
    return json.loads((folder / "profile_traces" / f"iteration_{step}" / "rank0_trace.json").read_text())


def test_spans_of_the_recorded_steps_are_in_the_trace_at_their_time(tmp_path):
    enabled = []

    def work(step):
        enabled.append(job.spans.enabled)
        with torch.profiler.record_function(f"around {step}"):
            time.sleep(0.002)
            start = now()
            time.sleep(0.002)
            job.spans.add("tp", f"gather {step}", start, now(), waiting=False)
            time.sleep(0.002)

    profiled(tmp_path, 8, work, profiler_active=2)
    assert enabled == [False, False, True, True] * 2
    content = read(tmp_path, 18)
    events = {event["name"]: event for event in content["traceEvents"] if event.get("cat") == "communication"}
    assert set(events) == {"gather 6", "gather 7"}
    for step in (6, 7):
        span = events[f"gather {step}"]
        around = next(event for event in content["traceEvents"] if event["name"] == f"around {step}")
        assert around["ts"] < span["ts"] < span["ts"] + span["dur"] < around["ts"] + around["dur"]
        assert span["dur"] >= 2000
    assert content["shardline"] == {"rank": 0, "first_step": 11, "axes": {}, "kernels": []}


def test_kernels_time_themselves_in_the_steps_that_a_trace_of_a_gpu_records(tmp_path):
    def work(step):
        words = job.clock.words(f"kernel {step}", CPU, abreast=1)
        if words is not None:
            words.copy_(torch.tensor([LATE - 1000, 5000, 2000, 0, 0, 0]))

    profiled(tmp_path, 8, work, device=torch.device("cuda"))
    for step in (3, 7):
        rows = [{"name": f"kernel {step}", "lasted": 4.0, "waited": 2.0, "sent": None}]
        assert read(tmp_path, 11 + step)["shardline"]["kernels"] == rows
    assert job.clock.traced is None


def test_spans_on_one_track_do_not_overlap():
    given = [("a", 1000, 5000), ("b", 2000, 3000), ("c", 3000, 9000), ("d", 5000, 6000)]
    found = span_events([Span("tp", *span, False) for span in given], base=1000, ranks={"tp": [0, 2]})
    tracks = {event["name"]: event["tid"] for event in found}
    assert tracks == {
        "a": "communication tp",
        "b": "communication tp 2",
        "c": "communication tp 2",
        "d": "communication tp",
    }
    assert [(event["ts"], event["dur"]) for event in found] == [(0, 4), (1, 1), (2, 6), (4, 1)]
    assert found[0]["args"] == {"axis": "tp", "ranks": [0, 2]}
    (wait,) = span_events([Span("tp", "a", 0, 1, True)], base=0, ranks={})
    assert (wait["cat"], wait["tid"]) == ("communication_wait", "waiting for tp")


def axes_in_a_trace(folder):
    Mesh(Layout(dp_shard=2, tp=2), "cpu")
    path = folder / f"{dist.get_rank()}.json"
    path.write_text('{"baseTimeNanoseconds": 0, "traceEvents": [ {"ph": "M", "name": "kept"} ], "more": 1}')
    add_spans(path, dist.get_rank(), 1, job.axes, [Span("tp", "sum", 1000, 3000, False)])
    return json.loads(path.read_text()), {name: axis.group.group_name for name, axis in job.axes.items()}


def test_a_trace_tells_which_group_is_which_axis(pool, tmp_path):
    for rank, (content, groups) in enumerate(pool.run(4, axes_in_a_trace, tmp_path)):
        ranks = {"dp_shard": [rank % 2, rank % 2 + 2], "tp": [rank // 2 * 2, rank // 2 * 2 + 1], "world": [0, 1, 2, 3]}
        axes = content["shardline"]["axes"]
        assert {name: axes[name] for name in ranks} == {
            name: {"ranks": members, "group": groups[name]} for name, members in ranks.items()
        }
        assert len({axes[name]["group"] for name in ranks}) == 3
        span, kept = content["traceEvents"]
        assert (span["ts"], span["dur"], span["args"]["ranks"]) == (1, 2, ranks["tp"])
        assert (kept["name"], content["more"]) == ("kept", 1)


def test_a_trace_of_another_form_stays_as_it_is(tmp_path, caplog):
    path = tmp_path / "trace.json"
    path.write_text('{"events": []}')
    with caplog.at_level(logging.WARNING, "shardline"):
        add_spans(path, 0, 1, {}, [])
    assert "communication is missing" in caplog.text
    assert path.read_text() == '{"events": []}'


def test_labelled_ranges_are_in_recorded_steps_alone(tmp_path):
    def work(step):
        with labelled("tp", f"copy {step}"), labelled("tp", f"product {step}", copies_only=True):
            torch.ones(2)

    profiled(tmp_path, 4, work)
    names = [event["name"] for event in read(tmp_path, 14)["traceEvents"] if event.get("cat") == "user_annotation"]
    assert names[-2:] == ["communication over tp: copy 3", "communication over tp (copies): product 3"]
    assert len(names) == 3  # and the profiler's own step
