"""What the tests of a session have proven: layouts, faults and model families, counted where they are checked.

A note belongs to the test that runs; it counts if the test passes. Notes travel with the reports of tests, so that they
are summed over the processes of pytest-xdist.
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest

KINDS = {"layout": "layouts", "fault": "faults", "family": "model families"}
_current: list[pytest.Item] = []


def note(kind: str, name: str) -> None:
    """The running test has checked this; a name counts once in a session."""
    assert kind in KINDS
    if _current:
        _current[0].user_properties.append((kind, name))


class Tally:
    """Collects the notes of passed tests, and the line about them."""

    def __init__(self) -> None:
        self.names: dict[str, set[str]] = {kind: set() for kind in KINDS}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            self.add(report.user_properties)

    def add(self, notes: Iterable[tuple[str, object]]) -> None:
        for kind, name in notes:
            if kind in self.names:
                self.names[kind].add(str(name))

    def line(self) -> str:
        return "proven: " + ", ".join(f"{len(self.names[kind])} {word}" for kind, word in KINDS.items())

    @pytest.hookimpl(trylast=True)
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if any(self.names.values()):
            terminalreporter.write_line(self.line())


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    _current[:] = [item]


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    _current.clear()
