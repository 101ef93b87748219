"""Which of several failures is the cause, and how it is shown."""

from __future__ import annotations

import os
import re
import sys

import torch.distributed as dist

from shardline.errors import UserError
from shardline.report import Report, report_of
from shardline.words import printable, to_stderr

# What a rank did: the words before its report's text. Other kinds of reports need none.
HAPPENED = {
    "user": "failed:",
    "error": "failed:",
    "lost_peer": "lost another rank:",
    "signal": "was killed by",
    "exit": "ended with exit code",
}


def choose_cause(reports: list[Report]) -> Report:
    """Return the failure that the others most likely followed from.

    A rank that was killed from outside is never a consequence of another failure; a lost connection most likely is.
    """
    order = {"user": 1, "error": 1, "hang": 1, "signal": 2, "exit": 2, "machine": 2, "lost_peer": 3}

    def key(report: Report) -> tuple[int, float]:
        killed = report.kind == "signal" and report.text == "SIGKILL"
        return (0 if killed else order[report.kind], report.at)

    return min(reports, key=key)


def explain(error: RuntimeError) -> str | None:
    """One line for an error that another rank or machine caused, else None; our own launcher needs none.

    Other launchers do not compare the errors of all ranks.
    """
    report = report_of(error)
    why = str(error).strip().partition("\n")[0]
    meeting = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    if isinstance(error, dist.DistStoreError) and "waiting for clients" in why:
        return f"{report.who}: not every rank connected to {meeting}: {why}"
    if isinstance(error, dist.DistNetworkError) and "EADDRINUSE" in why:
        port = os.environ.get("MASTER_PORT")
        return f"{report.who}: port {port} of this machine is taken: set MASTER_PORT to a free one, for all ranks"
    if isinstance(error, dist.DistNetworkError) and "trying to connect" in why:
        return f"{report.who} cannot reach rank 0 at {meeting}: {why}"
    if report.kind == "lost_peer":
        text = re.sub(r"^\[\S+\] ", "", why).partition(". ")[0]  # gloo names a line of its source and gives advice
        return f"{report.who} lost another rank, whose own error is the cause: {text}"
    return None


def in_a_line(cause: Report) -> str:
    """Describe a failure in a few words, for the line about a restart."""
    what = printable(cause.text.strip()).partition("\n")[0]
    if cause.kind not in HAPPENED:
        return what
    return f"rank {cause.rank} on host {cause.host} {HAPPENED[cause.kind]} {what}"


def show(cause: Report, debug: bool = False) -> int:
    """Print the failure of one rank and return the exit code. Raises a UserError where a user can fix it."""
    if sys.stderr.isatty():
        sys.stderr.write("\r\x1b[K\x1b[?25h")  # erase a progress bar, and show the cursor that it hid
    if cause.kind == "user":
        if debug:
            print(printable(f"{cause.who}:\n{cause.details.rstrip()}"), file=sys.stderr)
        raise UserError(cause.text)
    if cause.kind in ("hang", "machine"):
        to_stderr(printable(f"error: {cause.text}"))
        return 1
    if cause.kind in ("error", "lost_peer"):
        message = f"{cause.who} failed:\n{cause.details.rstrip()}"
    else:
        hint = " (out of memory?)" if cause.text == "SIGKILL" else ""
        output = f"\nits last output:\n{cause.details.rstrip()}" if cause.details else ""
        message = f"{cause.who} {HAPPENED[cause.kind]} {cause.text}{hint}{output}"
    print(printable(f"error: {message}"), file=sys.stderr)
    return 1
