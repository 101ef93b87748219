"""Which of several failures to show, how, and what launchers on other machines know of them."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
import time
from datetime import timedelta

import torch.distributed as dist

from shardline.errors import UserError
from shardline.report import Report, decode, encode, report_of

OTHER_HOST_GRACE = 5.0  # seconds to wait for word from another machine, where the cause seems to lie there
STORE_PERIOD = 1.0


class Others:
    """The launchers on other machines: what failed there, and whether they are done."""

    def __init__(self, address: str, port: int, nodes: int) -> None:
        self.nodes = nodes
        timeout = timedelta(seconds=60)
        client = dist.TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=timeout)
        self.store = dist.PrefixStore("shardline/launchers", client)
        self.failure: Report | None = None
        self.done = False
        self.finished = False
        self.cut_off = False  # the store does not answer
        self.closed = threading.Event()
        self.thread = threading.Thread(target=self._watch, name="shardline-launchers", daemon=True)
        self.thread.start()

    def close(self) -> None:
        """A thread that comes back from the store while the interpreter ends would abort the process."""
        self.closed.set()
        if not self.cut_off:
            self.thread.join(2 * STORE_PERIOD)
            self.cut_off = self.thread.is_alive()

    def _watch(self) -> None:
        """In a thread: where the network is cut, an answer may never come."""
        told = False
        while not self.closed.wait(STORE_PERIOD / 4 if self.finished else STORE_PERIOD):
            try:
                if self.finished and not told:
                    told = bool(self.store.add("done", 1))
                if self.store.check(["failure"]):
                    self.failure = decode(self.store.get("failure").decode())
                if told:
                    self.done = self.store.add("done", 0) >= self.nodes
            except (RuntimeError, ValueError):
                continue

    def all_done(self) -> bool:
        self.finished = True
        return self.done

    def tell(self, cause: Report) -> Report:
        """Make a failure known; the one that was told first counts. Gives up soon where the network is cut."""
        answer = [cause]

        def ask() -> None:
            with contextlib.suppress(RuntimeError, ValueError):
                answer[0] = decode(self.store.compare_set("failure", "", encode(cause)).decode())

        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        thread.join(OTHER_HOST_GRACE)
        self.cut_off = thread.is_alive()
        return answer[0]

    def linger(self) -> None:
        """The store may live in this process: stay until the others have read it, or for a few seconds."""
        if self.cut_off:
            return
        deadline = time.monotonic() + 2 * STORE_PERIOD + 1

        def wait() -> None:
            with contextlib.suppress(RuntimeError, ValueError):
                self.store.add("read", 1)
                while self.store.add("read", 0) < self.nodes and time.monotonic() < deadline:
                    time.sleep(0.2)

        thread = threading.Thread(target=wait, daemon=True)
        thread.start()
        thread.join(deadline - time.monotonic() + 1)


def choose_cause(reports: list[Report]) -> Report:
    """Of several failures the one that the others followed from.

    Only a rank that was killed from outside cannot be a consequence; a lost connection most likely is one.
    """
    order = {"user": 1, "error": 1, "hang": 1, "signal": 2, "exit": 2, "machine": 2, "lost_peer": 3}

    def key(report: Report) -> tuple[int, float]:
        killed = report.kind == "signal" and report.text == "SIGKILL"
        return (0 if killed else order[report.kind], report.at)

    return min(reports, key=key)


def explain(error: RuntimeError) -> str | None:
    """Where another launcher started this rank, and so nobody compares errors: one whose cause is not this rank."""
    report = report_of(error)
    why = str(error).strip().partition("\n")[0]
    meeting = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    if isinstance(error, dist.DistStoreError) and "waiting for clients" in why:
        return f"{report.who}: not every rank came to {meeting}: {why}"
    if isinstance(error, dist.DistNetworkError) and "EADDRINUSE" in why:
        port = os.environ.get("MASTER_PORT")
        return f"{report.who}: port {port} of this machine is taken: set MASTER_PORT to a free one, for all ranks"
    if isinstance(error, dist.DistNetworkError) and "trying to connect" in why:
        return f"{report.who} cannot reach rank 0 at {meeting}: {why}"
    if report.kind == "lost_peer":
        said = re.sub(r"^\[\S+\] ", "", why).partition(". ")[0]  # gloo names a line of its own and gives advice
        return f"{report.who} lost another rank, whose own error is the cause: {said}"
    return None


def in_a_line(cause: Report) -> str:
    """What happened, for the line about a restart."""
    who, what = f"rank {cause.rank} on host {cause.host}", cause.text.strip().partition("\n")[0]
    if cause.kind in ("machine", "regroup", "leave", "stop", "hang"):
        return what
    if cause.kind == "signal":
        return f"{who} was killed by {what}"
    if cause.kind == "exit":
        return f"{who} ended with exit code {what}"
    return f"{who} lost another rank: {what}" if cause.kind == "lost_peer" else f"{who} failed: {what}"


def show(cause: Report, debug: bool = False) -> int:
    """Print the failure of one rank; the exit code. What a user can mend is raised."""
    if sys.stderr.isatty():
        sys.stderr.write("\r\x1b[K\x1b[?25h")  # a bar may have been there: its line and the hidden cursor
    if cause.kind == "user":
        if debug:
            print(f"{cause.who}:\n{cause.details.rstrip()}", file=sys.stderr)
        raise UserError(cause.text)
    if cause.kind in ("hang", "machine"):
        print(f"error: {cause.text}", file=sys.stderr)
        return 1
    if cause.kind in ("error", "lost_peer"):
        print(f"error: {cause.who} failed:\n{cause.details.rstrip()}", file=sys.stderr)
        return 1
    if cause.kind == "signal":
        hint = " (out of memory?)" if cause.text == "SIGKILL" else ""
        print(f"error: {cause.who} was killed by {cause.text}{hint}", file=sys.stderr)
    else:
        print(f"error: {cause.who} ended with exit code {cause.text}", file=sys.stderr)
    if cause.details:
        print(f"its last output:\n{cause.details.rstrip()}", file=sys.stderr)
    return 1
