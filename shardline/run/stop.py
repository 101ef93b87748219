"""Requests to stop before the last step, or to save between two saves: by signals, and by the end of a job's time.

    SIGINT (Ctrl-C)   finish the step, save, exit 130; the second one interrupts at once
    SIGTERM, SIGHUP   finish the step, save, exit with checkpoint.preempted_exit_code; the second one as above
    a time limit      the same, early enough to finish before it
    SIGUSR1           finish the step, save, go on

A signal may reach any rank (signals.py), and the clock is rank 0's. So each rank has requests, which are summed in the
collective that ends every step anyway: all ranks stop, or save, after the same step. Ranks also agree between the
batches of a validation, which is left out when one is to stop.

    begin  ---- step ---- step ---- ... ---- step |- two steps -|-- save --|- margin -| limit
                                                  ^ the last moment to stop: limit - reserve
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import NamedTuple

from shardline.config.schema import Config
from shardline.config.types import seconds_of
from shardline.run.signals import STARTED_VARIABLE

log = logging.getLogger("shardline")

TIME_LIMIT = "time limit"
STOPS = ("SIGINT", "SIGTERM", "SIGHUP", TIME_LIMIT)  # reasons to stop; of several the first one here counts
STEPS_REMEMBERED = 100
SCONTROL_SECONDS = 10
LAST_SECONDS = 30.0  # before a time limit, for a process to end in


class Request(NamedTuple):
    """What some rank was asked for, which all ranks do after this step."""

    stop: str | None = None  # why: one of STOPS
    save: bool = False  # now, before the next step
    due: bool = False  # the time between two checkpoints is over

    @property
    def waits(self) -> bool:
        """Whether the run waits for the save."""
        return self.stop is not None or self.save

    def and_then(self, later: Request) -> Request:
        return Request(self.stop or later.stop, self.save or later.save, self.due or later.due)


def no_requests() -> tuple[float, ...]:
    """The numbers of a rank that was asked for nothing."""
    return (0.0,) * (len(STOPS) + 2)


def request_of(sums: Sequence[float]) -> Request:
    """What the numbers of all ranks, summed, ask for."""
    *stops, save, due = (total > 0 for total in sums)
    return Request(next((name for name, asked in zip(STOPS, stops, strict=True) if asked), None), save, due)


def why_not_saved(config: Config) -> str | None:
    """The key that keeps a run from saving anything, if there is one."""
    if not config.checkpoint.enable:
        return "checkpoint.enable is false"
    return "checkpoint.load_only is true" if config.checkpoint.load_only else None


def exit_code(stopped_by: str | None, config: Config) -> int:
    """The exit code of a run that finished or was stopped at a step boundary; without a save, SIGTERM is no success."""
    if stopped_by is None:
        return 0
    if stopped_by == "SIGINT":
        return 128 + signal.SIGINT
    return config.checkpoint.preempted_exit_code if why_not_saved(config) is None else 128 + signal.SIGTERM


# ---- the time limit --------------------------------------------------------------------------------------------------


def reserve(limit: float, longest_save: float | None, longest_step: float, another_save: bool = False) -> float:
    """Seconds to keep before the end: a save, two steps (the one under way, the one until ranks agree) and a margin.

    With another save, one that is due now or still goes on in the background, there must be time for two. The margin is
    5 % of the limit, at most five minutes, but at least half a save: the next one may be slower. Before a save was seen
    it is taken to last a minute, or a tenth of the limit where that is less.
    """
    save = min(60.0, limit / 10) if longest_save is None else longest_save
    return save * (1 + another_save) + 2 * longest_step + max(min(limit / 20, 300.0), save / 2)


class TimeLimit:
    """The moment by which a run has to end. It learns how long steps and saves take."""

    def __init__(self, ends: float, begun: float, name: str, clock: Callable[[], float] = time.time) -> None:
        self.ends, self.length, self.name, self.clock = ends, ends - begun, name, clock
        self.longest_save: float | None = None
        self._first_step: float | None = None  # compiles and warms up: the others are shorter
        self._steps: deque[float] = deque(maxlen=STEPS_REMEMBERED)
        self._asked_at, self._saving = clock(), 0.0

    def is_here(self, another_save: bool = False) -> bool:
        """Whether there is no time for anything but to stop; for use between two steps."""
        return self.clock() >= self.ends - self.reserve(another_save)

    def is_near(self, another_save: bool = False) -> bool:
        """Whether this step must be the last one; called once a step, by one rank, when ranks agree."""
        now = self.clock()
        took = max(0.0, now - self._asked_at - self._saving)
        self._asked_at, self._saving = now, 0.0
        if self._first_step is None:
            self._first_step = took
        else:
            self._steps.append(took)
        return self.is_here(another_save)

    def is_over(self) -> bool:
        """Whether there is only time for the process to end."""
        return self.clock() >= self.ends - min(self.length / 20, LAST_SECONDS)

    @property
    def longest_step(self) -> float:
        return max(self._steps, default=self._first_step or 0.0)

    def reserve(self, another_save: bool = False) -> float:
        return reserve(max(self.length, 0.0), self.longest_save, self.longest_step, another_save)

    def saw_save(self, stall: float, whole: float = 0.0) -> None:
        """Note a save that held up the run for `stall`; one in the background takes `whole` seconds altogether."""
        self._saving += stall
        self.longest_save = max(stall, whole, self.longest_save or 0.0)

    def stop_line(self) -> str:
        save = "no save was seen" if self.longest_save is None else f"a save took up to {_span(self.longest_save)}"
        return (
            f"stopping after this step: {_span(self.ends - self.clock())} are left until {self.end_words()};"
            f" {save}, a step {_span(self.longest_step)}"
        )

    def end_words(self) -> str:
        return f"{_moment(self.ends)} ({self.name})"


def steady_clock() -> Callable[[], float]:
    """Seconds since 1970 by the machine's clock now, counted on by a clock that nobody can set."""
    offset = time.time() - time.monotonic()
    return lambda: time.monotonic() + offset


def find_limit(
    config: Config, environment: Mapping[str, str], clock: Callable[[], float] | None = None
) -> TimeLimit | None:
    """The limit of this run, the nearer one of config and SLURM; logs which it is, or why SLURM's is not known."""
    clock = clock or steady_clock()
    given = config.checkpoint.save_before
    seconds = None if given is None else seconds_of(given)
    if why_not_saved(config) is not None or seconds == 0:
        return None
    begun = float(environment.get(STARTED_VARIABLE, clock()))
    limits = []
    if seconds is not None:
        limits.append(TimeLimit(begun + seconds, begun, f'checkpoint.save_before = "{given}"', clock))
    job = environment.get("SLURM_JOB_ID")
    if job is not None:
        ends, problem = slurm_end(job, environment)
        if ends is not None:
            limits.append(TimeLimit(ends, begun, f"the end of SLURM job {job}", clock))
        elif seconds is None:
            log.info(
                "note: the end of SLURM job %s is not known (%s), so nothing is saved before it;"
                ' checkpoint.save_before = "4h" sets a limit',
                job,
                problem,
            )
    nearest = min(limits, key=lambda limit: limit.ends, default=None)
    if nearest is not None:
        log.info("this run saves and stops before %s: %s", _moment(nearest.ends), nearest.name)
    return nearest


def slurm_end(job: str, environment: Mapping[str, str]) -> tuple[float | None, str]:
    """When a SLURM job ends, in seconds since 1970; otherwise None and why it is not known."""
    given = environment.get("SLURM_JOB_END_TIME", "")
    if given.isascii() and given.isdigit():
        return float(given), ""
    try:
        answer = subprocess.run(
            ["scontrol", "show", "job", job],
            capture_output=True,
            text=True,
            timeout=SCONTROL_SECONDS,
            stdin=subprocess.DEVNULL,
            env=dict(environment),
        )
    except FileNotFoundError:
        return None, "SLURM_JOB_END_TIME is not set and there is no scontrol"
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, f"SLURM_JOB_END_TIME is not set and scontrol failed: {error}"
    fields = dict(word.partition("=")[::2] for word in answer.stdout.split())
    try:
        return datetime.fromisoformat(fields.get("EndTime", "")).timestamp(), ""  # in this machine's time zone
    except ValueError:
        problem = answer.stderr.strip() or f"EndTime={fields.get('EndTime', '')}"
        return None, f"SLURM_JOB_END_TIME is not set and scontrol answers {problem}"


def _moment(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))


def _span(seconds: float) -> str:
    if abs(seconds) < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if abs(seconds) < 7200 else f"{seconds / 3600:.1f} h"


# ---- requests --------------------------------------------------------------------------------------------------------


class Requests:
    """What this rank was asked for: by signals, and by the clock where it watches one."""

    def __init__(
        self,
        limit: TimeLimit | None = None,
        save_seconds: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`save_seconds`: the time between two checkpoints, where it is this rank that watches it."""
        self.limit, self.save_seconds, self.clock = limit, save_seconds, clock
        self._last_due = clock()
        self.stop: str | None = None
        self.final_code: int | None = None  # the exit code, once everything is done that a signal could prevent
        self.asked_at = 0.0  # when a signal asked this rank to stop, by `clock`
        self.saves = self._saves_passed_on = 0  # two counts, so that a signal between two lines is not lost

    @property
    def is_stopping(self) -> bool:
        """Whether a signal has asked to stop."""
        return self.stop not in (None, TIME_LIMIT)

    @classmethod
    def of_rank(cls, config: Config, rank: int) -> Requests:
        """The requests of one rank; rank 0 watches the clock for all."""
        if rank != 0:
            return cls()
        section = config.checkpoint
        return cls(find_limit(config, os.environ), section.interval if section.interval_type == "seconds" else None)

    def numbers(self, another_save: bool = False, between_steps: bool = False) -> tuple[float, ...]:
        """The requests as numbers to be summed over ranks; called once in a step, and at will between two.

        `another_save`: one is due after the step, or still goes on in the background.
        """
        saves, before = self.saves, self._saves_passed_on
        self._saves_passed_on = saves
        if self.limit is not None:
            ends = self.limit.is_here(another_save) if between_steps else self.limit.is_near(another_save)
            if ends and self.stop is None:
                self.stop = TIME_LIMIT
                log.info("%s", self.limit.stop_line())
        due = not between_steps and self._is_due()
        return (*(float(self.stop == name) for name in STOPS), float(saves > before), float(due))

    def _is_due(self) -> bool:
        """Whether a checkpoint is due by the clock; asked once in a step, and true once in `save_seconds`."""
        now = self.clock()
        if self.save_seconds is None or now - self._last_due < self.save_seconds:
            return False
        self._last_due = now
        return True

    def lateness(self, stopped_by: str | None, seconds: float) -> Callable[[], str]:
        """Return a function that says why a wait that begins now must end, "" as long as it may go on.

        A signal that stops the run leaves it `seconds`, from now on or from the signal on, if that comes later. A time
        limit leaves it what is left.
        """
        began, by_signal = self.clock(), stopped_by not in (None, TIME_LIMIT)

        def late() -> str:
            if self.limit is not None and self.limit.is_over():
                return f"before {self.limit.end_words()}"
            since = max(began, self.asked_at)
            if (by_signal or self.is_stopping) and self.clock() - since >= seconds:
                name = self.stop if self.is_stopping else stopped_by
                return f"within {seconds:g} s after {name} (comm.stop_timeout_seconds gives more time)"
            return ""

        return late

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """Around a save, so that its time is known."""
        began = time.perf_counter()
        yield
        if self.limit is not None:
            self.limit.saw_save(time.perf_counter() - began)

    def saved_in_background(self, seconds: float) -> None:
        """Note how long the last save in the background took, if there was one."""
        if self.limit is not None and seconds > 0:
            self.limit.saw_save(0.0, seconds)
