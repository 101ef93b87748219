"""The report that a rank leaves for its launcher when it fails: one small file, written before the rank exits."""

from __future__ import annotations

import json
import os
import re
import socket
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from shardline.errors import UserError

# How a rank ended. The last four are about machines: one was lost; or, without a failure, they join, leave or stop.
Kind = Literal["user", "error", "lost_peer", "hang", "signal", "exit", "machine", "regroup", "leave", "stop"]

REPORT_VARIABLE = "SHARDLINE_REPORT"  # where the launcher wants the report of this rank
HANG_CODE = 75  # exit code of a rank that the watchdog ended

# Errors of gloo, NCCL and the store when the other side went away: most likely another rank's failure is the cause.
_LOST_PEER = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|broken pipe|socket (closed|timeout)|timed out waiting"
    r"|remote process exited|failed to (recv|send)|gloo/transport|nccl (error|communicator)|(recv|send)value failed"
    r"|peer (closed|has)|no route to host",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Report:
    """How one rank ended. `at` is seconds since the epoch; `details` holds a traceback or the rank's last output."""

    kind: Kind
    rank: int
    host: str
    pid: int
    text: str
    details: str = ""
    at: float = 0.0

    @property
    def who(self) -> str:
        return f"rank {self.rank} (host {self.host}, pid {self.pid})"


def this_report(kind: Kind, text: str, details: str = "") -> Report:
    """Make a report about this process. A launcher has no rank: -1."""
    rank = int(os.environ.get("RANK", "-1"))
    return Report(kind, rank, socket.gethostname(), os.getpid(), text, details, time.time())


def report_of(error: BaseException) -> Report:
    """Make a report about an error that nobody handled, without the first frame, which called the rank's program."""
    frames = error.__traceback__.tb_next if error.__traceback__ is not None else None
    details = "".join(traceback.format_exception(type(error), error, frames))
    if isinstance(error, UserError):
        return this_report("user", str(error), details)
    text = f"{type(error).__name__}: {error}"
    return this_report("lost_peer" if _LOST_PEER.search(text) else "error", text, details)


def write_report(report: Report) -> bool:
    """Write the report where the launcher looks for it; False where no launcher of ours asked for one."""
    place = os.environ.get(REPORT_VARIABLE)
    if not place:
        return False
    part = Path(f"{place}.part")
    try:
        part.write_text(json.dumps(asdict(report)), encoding="utf-8")
        os.replace(part, place)
    except OSError:
        return False
    return True


def read_report(path: Path) -> Report | None:
    try:
        return Report(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
