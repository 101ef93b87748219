"""Changes of what a step does: parallel/, comm/, memory/, models/, precision/, training/, optim/, adapters/."""

from __future__ import annotations

from tests.mutations.change import Change

CHANGES = [
    Change(
        "blocks are never compiled",
        "parallel/apply.py",
        "block.function = compile_once(block.function)",
        "compile_once(block.function)",
        "tests/unit/telemetry/test_engaged.py",
    ),
]
