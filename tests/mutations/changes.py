"""All changes, by room of the package."""

from __future__ import annotations

from tests.mutations import in_async, in_clusters, in_figures, in_keys, in_rooms, in_steps, in_watching

CHANGES = [
    *in_steps.CHANGES,
    *in_rooms.CHANGES,
    *in_watching.CHANGES,
    *in_clusters.CHANGES,
    *in_async.ASYNCHRONOUS,
    *in_keys.CHANGES,
    *in_figures.CHANGES,
]
