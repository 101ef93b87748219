"""Stopping before the last step, and saving between two saves: signals, and the end of the time a job has.

    SIGINT (Ctrl-C)   finish the step, save, exit 130; the second one interrupts at once
    SIGTERM           finish the step, save, exit with checkpoint.preempted_exit_code; the second one as above
    SIGHUP            the same: its terminal was closed; ignored where it was, as under nohup
    a time limit      the same, early enough to be through before it
    SIGUSR1           finish the step, save, go on

A signal may reach any rank, and the clock is rank 0's. So each rank has wishes, which are summed in the collective that
ends every step anyway: all ranks stop, or save, after the same step. They are also asked between the batches of a
validation, which is left when one is to stop.

    begin  ---- step ---- step ---- ... ---- step |- two steps -|-- save --|- margin -| limit
                                                  ^ the last moment to stop: limit - reserve
"""

from __future__ import annotations

import _thread
import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from types import FrameType
from typing import NamedTuple, NoReturn

from shardline.config.schema import Config
from shardline.config.types import seconds_of
from shardline.run import own_process
from shardline.run.terminal import let_go

log = logging.getLogger("shardline")

TIME_LIMIT = "time limit"
WISHES = ("SIGINT", "SIGTERM", TIME_LIMIT, "SIGUSR1")  # reasons to stop, the first of them counts; then one to save
STARTED_VARIABLE = "SHARDLINE_STARTED"  # when the launcher started, in seconds since 1970
STEPS_REMEMBERED = 100
SCONTROL_SECONDS = 10


class Asked(NamedTuple):
    """What some rank has asked for and all ranks do after this step."""

    stop: str | None = None  # why: one of WISHES
    save: bool = False

    def and_then(self, later: Asked) -> Asked:
        return Asked(self.stop or later.stop, self.save or later.save)


def no_wishes() -> tuple[float, ...]:
    return (0.0,) * len(WISHES)


def agreed(sums: Sequence[float]) -> Asked:
    """What the wishes of all ranks, summed, come to."""
    *stops, save = (total > 0 for total in sums)
    return Asked(next((name for name, wished in zip(WISHES, stops, strict=False) if wished), None), save)


def why_not_saved(config: Config) -> str | None:
    """The key that keeps a run from saving anything, if there is one."""
    if not config.checkpoint.enable:
        return "checkpoint.enable is false"
    return "checkpoint.load_only is true" if config.checkpoint.load_only else None


def exit_code(stopped_by: str | None, config: Config) -> int:
    """Of a run that ended well or was stopped at a step boundary; where nothing was saved, SIGTERM is no good end."""
    if stopped_by is None:
        return 0
    if stopped_by == "SIGINT":
        return 128 + signal.SIGINT
    return config.checkpoint.preempted_exit_code if why_not_saved(config) is None else 128 + signal.SIGTERM


# ---- the time limit --------------------------------------------------------------------------------------------------


def reserve(limit: float, longest_save: float | None, longest_step: float, another_save: bool = False) -> float:
    """Seconds to keep before the end: a save, two steps (the one under way, the one until ranks agree) and a margin.

    With another save, one that is due now or still goes on behind, there must be time for two. The margin is 5 % of the
    limit, at most five minutes, but at least half a save: the next one may be slower. Before a save was seen it is
    taken to last a minute, or a tenth of the limit where that is less.
    """
    save = min(60.0, limit / 10) if longest_save is None else longest_save
    return save * (1 + another_save) + 2 * longest_step + max(min(limit / 20, 300.0), save / 2)


class TimeLimit:
    """When a run has to end; asked once a step, it learns how long steps and saves take."""

    def __init__(self, ends: float, begun: float, name: str, clock: Callable[[], float] = time.time) -> None:
        self.ends, self.length, self.name, self.clock = ends, ends - begun, name, clock
        self.longest_save: float | None = None
        self._first_step: float | None = None  # compiles and warms up: it tells little about the others
        self._steps: deque[float] = deque(maxlen=STEPS_REMEMBERED)
        self._asked_at, self._saving = clock(), 0.0

    def is_here(self, another_save: bool = False) -> bool:
        """Between two steps: whether there is no time for anything but to stop."""
        return self.clock() >= self.ends - self.reserve(another_save)

    def is_near(self, another_save: bool = False) -> bool:
        """Called once a step, by one rank, when ranks agree: whether this step must be the last one."""
        now = self.clock()
        took = max(0.0, now - self._asked_at - self._saving)
        self._asked_at, self._saving = now, 0.0
        if self._first_step is None:
            self._first_step = took
        else:
            self._steps.append(took)
        return self.is_here(another_save)

    @property
    def longest_step(self) -> float:
        return max(self._steps, default=self._first_step or 0.0)

    def reserve(self, another_save: bool = False) -> float:
        return reserve(max(self.length, 0.0), self.longest_save, self.longest_step, another_save)

    def saw_save(self, stall: float, whole: float = 0.0) -> None:
        """A save that held up the run for `stall`; one that goes on behind takes longer in the whole."""
        self._saving += stall
        self.longest_save = max(stall, whole, self.longest_save or 0.0)

    def first_words(self) -> str:
        return f"this run saves and stops before {_moment(self.ends)}: {self.name}"

    def last_words(self) -> str:
        save = "no save was seen" if self.longest_save is None else f"a save took up to {_span(self.longest_save)}"
        return (
            f"stopping after this step: {_span(self.ends - self.clock())} are left until {_moment(self.ends)}"
            f" ({self.name}); {save}, a step {_span(self.longest_step)}"
        )


def find_limit(
    config: Config, environment: Mapping[str, str], clock: Callable[[], float] = time.time
) -> tuple[TimeLimit | None, list[str]]:
    """The limit of this run, the nearer one of config and SLURM, and lines for the log."""
    asked = config.checkpoint.save_before
    seconds = None if asked is None else seconds_of(asked)
    if why_not_saved(config) is not None or seconds == 0:
        return None, []
    begun = float(environment.get(STARTED_VARIABLE, clock()))
    limits, lines = [], []
    if seconds is not None:
        limits.append(TimeLimit(begun + seconds, begun, f'checkpoint.save_before = "{asked}"', clock))
    job = environment.get("SLURM_JOB_ID")
    if job is not None:
        ends, problem = slurm_end(job, environment)
        if ends is not None:
            limits.append(TimeLimit(ends, begun, f"the end of SLURM job {job}", clock))
        elif seconds is None:
            lines.append(
                f"note: when SLURM job {job} ends is not known ({problem}), so nothing is saved before it;"
                ' checkpoint.save_before = "4h" sets a limit'
            )
    nearest = min(limits, key=lambda limit: limit.ends, default=None)
    return nearest, [*lines, *([nearest.first_words()] if nearest is not None else [])]


def slurm_end(job: str, environment: Mapping[str, str]) -> tuple[float | None, str]:
    """When a SLURM job ends, in seconds since 1970; otherwise None and why it is not known."""
    told = environment.get("SLURM_JOB_END_TIME", "")
    if told.isascii() and told.isdigit():
        return float(told), ""
    try:
        said = subprocess.run(
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
    fields = dict(word.partition("=")[::2] for word in said.stdout.split())
    try:
        return datetime.fromisoformat(fields.get("EndTime", "")).timestamp(), ""  # in this machine's time zone
    except ValueError:
        problem = said.stderr.strip() or f"EndTime={fields.get('EndTime', '')}"
        return None, f"SLURM_JOB_END_TIME is not set and scontrol says {problem}"


def _moment(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))


def _span(seconds: float) -> str:
    if abs(seconds) < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if abs(seconds) < 7200 else f"{seconds / 3600:.1f} h"


# ---- signals ---------------------------------------------------------------------------------------------------------


class Requests:
    """What this rank was asked for: by signals, and by the clock where it watches one."""

    def __init__(self, limit: TimeLimit | None = None) -> None:
        self.limit = limit
        self.stop: str | None = None
        self.verdict: int | None = None  # the exit code, once all is done that a signal could keep from being done
        self.saves = self._saves_passed_on = 0  # two counts, so that a signal between two lines is not lost

    def wishes(self, another_save: bool = False, between_steps: bool = False) -> tuple[float, ...]:
        """To be summed over ranks; called once in a step, and at will between two.

        `another_save`: one is due after the step, or still goes on behind.
        """
        saves, before = self.saves, self._saves_passed_on
        self._saves_passed_on = saves
        if self.limit is not None:
            ends = self.limit.is_here(another_save) if between_steps else self.limit.is_near(another_save)
            if ends and self.stop is None:
                self.stop = TIME_LIMIT
                log.info("%s", self.limit.last_words())
        return (*(float(self.stop == name) for name in WISHES[:-1]), float(saves > before))

    @classmethod
    def of_rank(cls, config: Config, rank: int) -> Requests:
        """Rank 0 watches the clock for all, and says so."""
        limit, lines = find_limit(config, os.environ) if rank == 0 else (None, [])
        for line in lines:
            log.info("%s", line)
        return cls(limit)

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """Around a save, so that its time is known."""
        began = time.perf_counter()
        yield
        if self.limit is not None:
            self.limit.saw_save(time.perf_counter() - began)

    def saved_behind(self, seconds: float) -> None:
        """How long the last save took that went on behind, if one did."""
        if self.limit is not None and seconds > 0:
            self.limit.saw_save(0.0, seconds)


def ending_signals() -> list[signal.Signals]:
    """Those that ask a run to stop; nohup has SIGHUP ignored."""
    hangs_up = [signal.SIGHUP] if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN else []
    return [signal.SIGINT, signal.SIGTERM, *hangs_up]


@contextlib.contextmanager
def listening(requests: Requests) -> Iterator[Requests]:
    """Signals become requests; a second one of those that stop a run interrupts it at once.

    Where there is a verdict, one of them ends the process at once and does not change how it ends.
    """
    if not _in_main_thread():
        yield requests
        return

    def ask(number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if number == signal.SIGUSR1:
            requests.saves += 1
            text = "%s: saving after this step"
        else:
            if requests.verdict is not None and own_process.ends_with_run:
                _end_at_once(requests.verdict)
            if requests.stop not in (None, TIME_LIMIT):
                raise KeyboardInterrupt(number)
            if number == signal.SIGHUP:
                let_go()
            requests.stop = "SIGTERM" if number == signal.SIGHUP else name
            text = "%s: stopping after this step (again: at once)"
        # From a thread: the signal may have come in the middle of a print, and one inside another repeats its text.
        _thread.start_new_thread(log.info, (text, name))

    previous = {number: signal.signal(number, ask) for number in (*ending_signals(), signal.SIGUSR1)}
    blocked = signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})
    try:
        yield requests
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        ends = requests.verdict is not None and own_process.ends_with_run
        for number, handler in previous.items():
            if number == signal.SIGUSR1 or not ends:
                signal.signal(number, handler)


def _end_at_once(code: int) -> NoReturn:
    with contextlib.suppress(Exception):  # the signal may have come in the middle of a print
        sys.stdout.flush()
    os._exit(code)


@contextlib.contextmanager
def starting_job(started_by_launcher: bool) -> Iterator[None]:
    """Around a whole run, from before torch is imported: note the time, and let SIGUSR1 wait until there are steps.

    Its default would end the process. A blocked signal stays pending, in ranks too, which inherit the mask. It is also
    ignored, for threads that are made while there are steps, and so do not have the mask.
    """
    before = os.environ.get(STARTED_VARIABLE)
    if not started_by_launcher:
        os.environ[STARTED_VARIABLE] = repr(time.time())
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    ignores = signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL and _in_main_thread()
    if ignores:  # not once more in a rank: what is pending would be dropped
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.sigtimedwait({signal.SIGUSR1}, 0)  # one that came too late
        if ignores:
            signal.signal(signal.SIGUSR1, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        if before is None:
            os.environ.pop(STARTED_VARIABLE, None)
        else:
            os.environ[STARTED_VARIABLE] = before


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
