"""Which examples hypothesis draws: a few in `make test`, the same every time, and many new ones in `make test-all`."""

from __future__ import annotations

import os

import hypothesis

FULL = os.environ.get("HYPOTHESIS_PROFILE") == "full"


def load_profile() -> None:
    """For tests that do not say how many."""
    hypothesis.settings.register_profile("full", max_examples=100, deadline=None)
    hypothesis.settings.register_profile("fast", max_examples=30, deadline=None, derandomize=True)
    hypothesis.settings.load_profile("full" if FULL else "fast")


def examples(full: int) -> int:
    """For a test that asks for a number of its own."""
    return full if FULL else max(20, full // 4)
