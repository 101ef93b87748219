"""One line that says how far a run of many processes is: `1234/2709 passed, 0 failed, 3 skipped, 3m12s`.

On a terminal the line is written anew every second, elsewhere a line comes every half minute. A failed test is named at
once.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest


class Progress:
    """Takes the place of the dots; registered where pytest-xdist hands tests to other processes."""

    def __init__(self, reporter: Any) -> None:
        self.reporter, self.started = reporter, time.monotonic()
        self.terminal = bool(reporter._tw._file.isatty())
        reporter._show_progress_info = False  # a percentage behind the dots
        self.total, self.counts = 0, {"passed": 0, "failed": 0, "skipped": 0}
        self.lock, self.ended = threading.Lock(), threading.Event()
        self.thread = threading.Thread(target=self._repeat, name="progress", daemon=True)

    def line(self) -> str:
        seconds = int(time.monotonic() - self.started)
        skipped = f", {self.counts['skipped']} skipped" if self.counts["skipped"] else ""
        done = f"{self.counts['passed']}/{self.total} passed, {self.counts['failed']} failed{skipped}"
        return f"{done}, {seconds // 60}m{seconds % 60:02d}s"

    def _repeat(self) -> None:
        while not self.ended.wait(1 if self.terminal else 30):
            with self.lock:
                self._write()

    def _write(self) -> None:
        if self.terminal:
            self.reporter._tw.write(f"\r\x1b[2K{self.line()}", flush=True)
        else:
            self.reporter.write_line(self.line(), flush=True)

    # ---- hooks of pytest and pytest-xdist ----------------------------------------------------------------------------

    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        self.total = len(ids)
        if not self.thread.is_alive() and not self.ended.is_set():
            self.thread.start()

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(self, report: Any) -> tuple[str, str, str] | None:
        """Without a letter the reporter counts a test and prints nothing."""
        if not isinstance(report, pytest.TestReport) or hasattr(report, "wasxfail"):
            return None
        if report.when == "call" or not report.passed:
            category = "error" if report.failed and report.when != "call" else report.outcome
            return category, "", category.upper() if report.failed else ""
        return None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.passed:
            return
        with self.lock:
            self.counts[report.outcome] += 1
            if report.failed:
                before = "\r\x1b[2K" if self.terminal else ""
                self.reporter.write_line(f"{before}FAILED {report.nodeid}", flush=True)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self) -> None:
        self.ended.set()
        with self.lock:
            self._write()
            if self.terminal:
                self.reporter.write_line("")
