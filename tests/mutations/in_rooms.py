"""Changes around the steps: config/, data/, checkpoint/, storage/, launch/, run/, telemetry/, tools/, cli/."""

from __future__ import annotations

from tests.mutations.change import Change

CHANGES: list[Change] = []
