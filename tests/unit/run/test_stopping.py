"""Durations, the rule that says when to stop, what signals ask for, and how ranks agree."""

import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardline.checkpoint.saver import Saver
from shardline.config.check import check
from shardline.config.load import load_config
from shardline.config.types import seconds_of
from shardline.errors import ConfigError
from shardline.run import signals, stop
from shardline.run.stop import TIME_LIMIT, Request, Requests, TimeLimit, exit_code, find_limit, request_of, reserve
from tests.e2e.tiny import tiny_config

# ---- durations -------------------------------------------------------------------------------------------------------

PART = st.none() | st.integers(0, 10**6)


@given(st.tuples(PART, PART, PART, PART))
def test_a_duration_is_the_sum_of_its_parts(parts):
    text = "".join(f"{part}{unit}" for part, unit in zip(parts, "dhms", strict=True) if part is not None)
    expected = sum((part or 0) * size for part, size in zip(parts, (86400, 3600, 60, 1), strict=True))
    assert seconds_of(text) == (expected if text else None)


@given(st.integers(0, 10**9))
def test_a_plain_number_is_seconds(number):
    assert seconds_of(str(number)) == number
    assert load_config(overrides={"checkpoint.save_before": number}).checkpoint.save_before == str(number)


@given(st.text(alphabet="0123456789dhms .-+:x٣", max_size=8))
def test_what_is_read_as_a_duration_is_one(text):
    """No sign, no fraction, no unit twice or out of order, no digits of other scripts."""
    seconds = seconds_of(text)
    if seconds is not None:
        units = [letter for letter in text if letter in "dhms"]
        assert units == sorted(units, key="dhms".index)
        assert len(set(units)) == len(units)
        assert set(text.strip()) <= set("0123456789dhms")


@pytest.mark.parametrize("value", ["4 hours", "h", "-4h", "1.5h", "4h4h", "30m4h", "", "soon", True, -1, 1.5, "9" * 30])
def test_other_texts_are_refused_with_examples(value):
    with pytest.raises(ConfigError, match=r'save_before: expected a duration such as "90s", "30m", "4h", "1d12h"'):
        load_config(overrides={"checkpoint.save_before": value})


def test_flags_give_durations_too():
    for words, expected in (
        (["--checkpoint.save_before", "1d12h"], "1d12h"),
        (["--checkpoint.save_before=90"], "90"),
        (["--checkpoint.save_before=false"], "0"),
        (["--checkpoint.save_before", "none"], None),
    ):
        assert load_config(overrides=words).checkpoint.save_before == expected


def test_exit_codes_that_mean_errors_are_refused():
    for code in (1, 2, -1, 256):
        with pytest.raises(ConfigError, match="0 or a whole number from 3 to 255"):
            load_config(overrides={"checkpoint.preempted_exit_code": code})


# ---- the rule --------------------------------------------------------------------------------------------------------


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@given(
    limit=st.floats(1, 1e6),
    step=st.floats(0.002, 0.05),
    first_step=st.floats(0, 0.1),
    rest=st.floats(0, 1),
    save=st.floats(0, 0.1),
    last_save=st.floats(0, 1.5),
    interval=st.integers(1, 50),
    seen=st.booleans(),
)
def test_a_run_is_through_before_its_limit(limit, step, first_step, rest, save, last_save, interval, seen):
    """Times are shares of the limit. The last save is up to half as long again as the longest one before.

    One that nobody has seen is no longer than the rule takes it for.
    """
    clock = Clock()
    watch = TimeLimit(limit, 0.0, "a limit", clock)
    step, save, done = step * limit, save * limit, 1
    if seen:
        watch.saw_save(save)
    else:
        save = min(save, 60.0)
    clock.now = first_step * limit
    while not watch.is_near(another_save=done % interval == 0):
        clock.now += rest * step  # after ranks have agreed, and before the save
        if done % interval == 0:
            clock.now += save
            watch.saw_save(save)
        clock.now += (1 - rest) * step
        done += 1
    expected = min(60.0, limit / 10) if watch.longest_save is None else save
    assert clock.now + rest * step + last_save * expected <= limit * (1 + 1e-9)


saves = st.none() | st.just(0.0) | st.floats(1e-6, 1e4)  # what a clock can tell


@given(st.floats(1, 1e6), saves, st.floats(0, 1e4), st.floats(0, 1e4))
def test_longer_steps_and_saves_only_make_it_earlier(limit, save, step, more):
    assert reserve(limit, save, step + more) >= reserve(limit, save, step)
    assert reserve(limit, (save or 0) + more, step) >= reserve(limit, save or 0, step)
    assert reserve(limit, save, step) > 2 * step + (save or 0)
    assert reserve(limit, save, step, another_save=True) >= reserve(limit, save, step) + (save or 0) * 0.999


def test_the_rule_in_numbers():
    hours = 4 * 3600
    assert reserve(hours, None, 2.0) == 60 + 4 + 300
    assert reserve(hours, 900.0, 2.0) == 900 + 4 + 450
    assert reserve(100, None, 1.0) == 10 + 2 + 5


def test_the_first_step_and_old_ones_are_forgotten_and_saves_are_no_steps():
    clock = Clock()
    watch = TimeLimit(1e9, 0.0, "a limit", clock)
    clock.now += 300
    watch.is_near()
    assert watch.longest_step == 300
    for seconds in (2, 9, *[2] * 100):
        clock.now += seconds
        watch.saw_save(50.0)
        clock.now += 50
        watch.is_near()
        assert watch.longest_step == (9 if seconds == 9 else watch.longest_step)
    assert watch.longest_step == 2


# ---- where the limit comes from --------------------------------------------------------------------------------------


@pytest.fixture
def limit_of(caplog):
    """Finds the limit of a run: (limit, what was logged)."""
    caplog.set_level(logging.INFO, logger="shardline")

    def find(environment=(), **overrides):
        caplog.clear()
        config = tiny_config("unused", **{"checkpoint__enable": True, **overrides})
        variables = {signals.STARTED_VARIABLE: "1000", "PATH": "/nowhere", **dict(environment)}
        return find_limit(config, variables, Clock()), [record.getMessage() for record in caplog.records]

    return find


def test_a_clock_that_is_set_is_not_time_that_has_passed(monkeypatch):
    config = tiny_config("unused", checkpoint__enable=True, checkpoint__save_before="1h")
    wall, jumps = time.time(), [0]
    monkeypatch.setattr(time, "time", lambda: wall + jumps[-1])
    limit = find_limit(config, {signals.STARTED_VARIABLE: str(wall)})
    for jump in (86400, -86400):
        jumps.append(jump)
        assert not limit.is_near()
        assert abs(limit.clock() - wall) < 600
        assert limit.longest_step < 600


SLURM = {"SLURM_JOB_ID": "77", "SLURM_JOB_END_TIME": "5000"}


def test_the_nearer_limit_counts(limit_of):
    limit, lines = limit_of(checkpoint__save_before="1h")
    assert (limit.ends, limit.length) == (4600, 3600)
    (line,) = lines
    assert line.startswith("this run saves and stops before ")
    assert line.endswith(': checkpoint.save_before = "1h"')
    assert limit_of(SLURM)[0].ends == 5000
    assert "the end of SLURM job 77" in limit_of(SLURM)[1][0]
    assert limit_of(SLURM, checkpoint__save_before="1h")[0].ends == 4600
    assert limit_of(SLURM, checkpoint__save_before="2h")[0].ends == 5000


def test_no_limit(limit_of):
    assert limit_of() == (None, [])
    for off in ("0", False):
        assert limit_of(SLURM, checkpoint__save_before=off) == (None, [])
    assert limit_of(SLURM, checkpoint__enable=False) == (None, [])
    assert limit_of(SLURM, checkpoint__load_only=True) == (None, [])


def scontrol(folder, text):
    program = folder / "scontrol"
    program.write_text(f'#!/bin/sh\n[ "$*" = "show job 77" ] || exit 3\n{text}\n')
    program.chmod(0o755)
    return {"SLURM_JOB_ID": "77", "PATH": f"{folder}:/usr/bin:/bin", "TZ": "UTC"}


def test_slurm_is_asked_where_no_variable_has_the_end(tmp_path, monkeypatch, limit_of):
    answer = "echo '   StartTime=2026-11-15T10:00:00 EndTime=2026-11-15T14:00:00 Deadline=N/A'"
    limit, _ = limit_of(scontrol(tmp_path, answer))
    assert limit.ends == stop.datetime(2026, 11, 15, 14).timestamp()
    for answer, said in (
        ("echo EndTime=Unknown", "scontrol answers EndTime=Unknown"),
        ("echo 'Invalid job id specified' >&2; exit 1", "scontrol answers Invalid job id specified"),
        ("sleep 5", "scontrol failed: .*timed out"),
    ):
        monkeypatch.setattr(stop, "SCONTROL_SECONDS", 0.5)
        limit, (line,) = limit_of(scontrol(tmp_path, answer))
        assert limit is None
        assert re.search(said, line)
        assert 'checkpoint.save_before = "4h" sets a limit' in line
    limit, (line,) = limit_of({"SLURM_JOB_ID": "77"})
    assert (limit, "SLURM_JOB_END_TIME is not set and there is no scontrol" in line) == (None, True)
    assert limit_of({"SLURM_JOB_ID": "77"}, checkpoint__save_before="1h")[0].ends == 4600


# ---- what ranks ask for ----------------------------------------------------------------------------------------------


def test_ranks_agree_on_the_first_reason_and_on_saving():
    requests = [Requests() for _ in range(3)]

    def summed():
        return request_of([sum(numbers) for numbers in zip(*(rank.numbers() for rank in requests), strict=True)])

    assert summed() == Request()
    requests[2].saves += 1
    assert summed() == Request(None, True)
    requests[0].stop, requests[1].stop = TIME_LIMIT, "SIGTERM"
    assert summed() == Request("SIGTERM", False)
    requests[2].stop = "SIGINT"
    assert summed().stop == "SIGINT"


def test_checkpoints_by_the_clock_are_due_once_in_each_interval():
    clock = Clock()
    clock.now = 5.0
    requests = [Requests(save_seconds=60.0, clock=clock), Requests(clock=clock)]
    found = []
    for clock.now in range(10, 200, 10):
        assert not request_of(requests[0].numbers(between_steps=True)).due
        numbers = [sum(pair) for pair in zip(*(rank.numbers() for rank in requests), strict=True)]
        request = request_of(numbers)
        assert request == Request(due=request.due)
        assert not request.waits
        found += [clock.now] * request.due
    assert found == [70, 130, 190]
    assert Request(due=True).and_then(Request("SIGTERM")) == Request("SIGTERM", due=True)


def test_only_rank_0_watches_the_clock_of_checkpoints():
    config = load_config(overrides={"checkpoint.interval": 90, "checkpoint.interval_type": "seconds"})
    assert [Requests.of_rank(config, rank).save_seconds for rank in range(2)] == [90, None]
    steps = load_config(overrides={"checkpoint.interval": 90})
    assert Requests.of_rank(steps, 0).save_seconds is None


def test_seconds_between_checkpoints_are_no_steps():
    saver = object.__new__(Saver)
    saver._saves = True
    for kind, due in (("steps", [2, 4, 6, 7]), ("seconds", [7])):
        keys = {"checkpoint.interval": 2, "checkpoint.interval_type": kind}
        saver.section = load_config(overrides=keys).checkpoint
        assert [step for step in range(1, 8) if saver.is_due(step, 7)] == due


def test_a_fraction_of_the_steps_is_not_counted_in_seconds():
    given = {"checkpoint.enable": True, "checkpoint.interval_ratio": 0.5, "checkpoint.interval_type": "seconds"}
    with pytest.raises(ConfigError, match=r"interval_ratio: is a fraction of the steps.*; set checkpoint.interval$"):
        check(load_config(overrides=given))


def test_what_ends_the_wait_for_the_last_copy():
    clock = Clock()
    requests = Requests(TimeLimit(1000.0, 0.0, "a limit", clock), clock=clock)
    late = requests.lateness(None, 30)
    clock.now = 969.0
    assert late() == ""  # nothing has asked the run to stop
    assert requests.lateness(TIME_LIMIT, 0)() == ""  # which leaves more than this for a save
    clock.now = 970.0  # the last 30 seconds are for the process to end in
    assert late().endswith(" (a limit)")
    requests.limit, requests.stop, requests.asked_at = None, "SIGTERM", 960.0
    clock.now = 989.0
    assert late() == ""
    clock.now = 990.0
    assert late() == "within 30 s after SIGTERM (comm.stop_timeout_seconds gives more time)"
    assert requests.lateness("SIGTERM", 30)() == ""  # the step and the save took this long
    requests.stop = None
    assert late() == ""
    assert requests.lateness("SIGINT", 0)().startswith("within 0 s after SIGINT")  # another rank was asked


def test_a_limit_is_a_request_of_its_own():
    clock = Clock()
    requests = Requests(TimeLimit(100.0, 0.0, "a limit", clock))
    clock.now = 1.0
    assert request_of(requests.numbers()).stop is None
    with requests.saving():
        pass
    stall = requests.limit.longest_save
    assert stall is not None
    requests.saved_in_background(0.0)
    assert requests.limit.longest_save == stall
    requests.saved_in_background(20.0)
    assert requests.limit.longest_save == 20.0
    clock.now = 99.0
    assert request_of(requests.numbers()).stop == TIME_LIMIT


def test_between_steps_the_limit_is_watched_and_nothing_learnt_of_steps():
    clock = Clock()
    requests = Requests(TimeLimit(1000.0, 0.0, "a limit", clock))
    for clock.now in (1.0, 11.0, 21.0):
        requests.numbers()
    for clock.now in range(22, 222):
        assert request_of(requests.numbers(between_steps=True)) == Request()
    assert requests.limit.longest_step == 10.0
    clock.now = 1000.0 - requests.limit.reserve() - 0.1
    assert request_of(requests.numbers(between_steps=True)) == Request()
    clock.now += 0.2
    assert request_of(requests.numbers(between_steps=True)) == Request(TIME_LIMIT)


def test_what_is_asked_later_adds_to_what_was():
    assert Request("SIGINT").and_then(Request("SIGTERM", save=True)) == Request("SIGINT", save=True)
    assert Request(save=True).and_then(Request(TIME_LIMIT)) == Request(TIME_LIMIT, save=True)
    assert Request().and_then(Request()) == Request()


def test_signals_become_requests_and_a_second_stop_interrupts():
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)]
    requests = Requests()
    with signals.listening(requests):
        os.kill(os.getpid(), signal.SIGUSR1)
        assert request_of(requests.numbers()) == Request(None, True)
        assert request_of(requests.numbers()) == Request(None, False)
        os.kill(os.getpid(), signal.SIGTERM)
        assert request_of(requests.numbers()).stop == "SIGTERM"
        os.kill(os.getpid(), signal.SIGUSR1)  # no reason to hurry
        with pytest.raises(KeyboardInterrupt) as interrupt:
            os.kill(os.getpid(), signal.SIGTERM)
        assert interrupt.value.args == (signal.SIGTERM,)
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)] == before


def test_nohup_has_sighup_ignored():
    assert signals.ending_signals() == [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert signals.ending_signals() == [signal.SIGINT, signal.SIGTERM]
        with signals.listening(Requests()) as requests:
            os.kill(os.getpid(), signal.SIGHUP)
        assert requests.stop is None
    finally:
        signal.signal(signal.SIGHUP, before)


RANK = """
import os, signal
from shardline.run.signals import listening, starting_job
from shardline.run.stop import Requests

with starting_job(started_by_launcher=True):
    os.kill(os.getpid(), signal.SIGUSR1)
    with listening(Requests()) as requests:
        print(requests.saves)
"""
WAITING = f"""
import os, signal, subprocess, sys, threading
from shardline.run.signals import listening, starting_job
from shardline.run.stop import Requests

end = threading.Event()
with starting_job(started_by_launcher=False):
    subprocess.run([sys.executable, "-c", {RANK!r}], check=True)
    os.kill(os.getpid(), signal.SIGUSR1)
    with listening(Requests()) as requests:
        print(requests.saves)
        thread = threading.Thread(target=end.wait)  # without the mask, as those of torch
        thread.start()
    os.kill(os.getpid(), signal.SIGUSR1)
    end.set()
    thread.join()
print(signal.SIGUSR1 in signal.pthread_sigmask(signal.SIG_BLOCK, ()))
"""


def test_sigusr1_waits_until_there_are_steps_and_is_dropped_after_them():
    """In processes of their own, launcher and rank, as a run has them: none of their threads is older than the mask."""
    done = subprocess.run([sys.executable, "-c", WAITING], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "1\n1\nFalse\n"), done.stderr


def test_the_launcher_passes_on_when_the_job_started(monkeypatch):
    monkeypatch.delenv(signals.STARTED_VARIABLE, raising=False)
    with signals.starting_job(started_by_launcher=False):
        assert float(os.environ[signals.STARTED_VARIABLE]) > 1e9
    assert signals.STARTED_VARIABLE not in os.environ
    monkeypatch.setenv(signals.STARTED_VARIABLE, "5")
    with signals.starting_job(started_by_launcher=True):
        assert os.environ[signals.STARTED_VARIABLE] == "5"


def test_a_thread_cannot_listen_and_does_not_fail():
    seen = []
    thread = threading.Thread(target=lambda: seen.append(signals.listening(Requests()).__enter__().stop))
    thread.start()
    thread.join()
    assert seen == [None]


def test_exit_codes():
    saving = tiny_config("unused", checkpoint__enable=True, checkpoint__preempted_exit_code=75)
    assert [exit_code(why, saving) for why in (None, "SIGINT", "SIGTERM", "SIGHUP", TIME_LIMIT)] == [0, 130, 75, 75, 75]
    assert exit_code("SIGTERM", tiny_config("unused", checkpoint__preempted_exit_code=75)) == 143
    assert exit_code("SIGTERM", tiny_config("unused", checkpoint__enable=True)) == 0


def test_prints_after_a_closed_terminal_go_nowhere():
    """The other end of a terminal is closed: without `leave_terminal` the print fails, and with it the exit code."""
    code = (
        "import os, sys; from shardline.run.signals import leave_terminal; ours, theirs = os.openpty();"
        " os.dup2(theirs, 2); os.close(theirs); os.close(ours);"
        " leave_terminal(); print('late', file=sys.stderr, flush=True)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
    assert subprocess.run([sys.executable, "-c", code.replace("leave_terminal();", "None;")]).returncode != 0


def test_a_rank_of_a_slurm_job_hears_a_signal_twice_and_stops_once(monkeypatch):
    """Once from SLURM, which signals every process, and once from its launcher; a later one is a second request."""
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    monkeypatch.setenv(signals.LAUNCHER_VARIABLE, "1")
    with signals.listening(Requests()) as requests:
        os.kill(os.getpid(), signal.SIGTERM)
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        except KeyboardInterrupt:
            pytest.fail("the signal that came twice interrupted")
        assert requests.stop == "SIGTERM"
        monkeypatch.setattr(signals, "ECHO_SECONDS", 0.0)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
    monkeypatch.undo()
    monkeypatch.delenv(signals.LAUNCHER_VARIABLE, raising=False)
    with signals.listening(Requests()):
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
