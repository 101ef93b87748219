"""Adds a rank's communication to the trace that torch has written, so that one file shows everything the rank did."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from shardline.comm.collectives import Axis
from shardline.comm.spans import Span
from shardline.storage.atomic import plain_file

log = logging.getLogger("shardline")
# Where torch's file begins its list of events, which is never empty.
EVENTS = re.compile(r'"traceEvents"\s*:\s*\[(?=\s*\{)')
BASE = re.compile(r'"baseTimeNanoseconds"\s*:\s*(\d+)')


def add_spans(
    path: Path,
    rank: int,
    first_step: int,
    axes: Mapping[str, Axis],
    spans: Iterable[Span],
    kernels: Sequence[dict[str, Any]] = (),
) -> None:
    """Add an event for each span, and a key `shardline`: this rank, and the process group of each axis.

    `first_step` is the step of the run that the profiler counts as 0. `kernels` are those that communicate, in launch
    order, with the times that they measured themselves. A trace may be large, so text is inserted and the rest of the
    file is not parsed.
    """
    text = path.read_text(encoding="utf-8")
    found, base = EVENTS.search(text), BASE.search(text)
    if found is None or base is None:
        log.warning("communication is missing in %s: this torch writes traces in another format", path)
        return
    ranks = {name: dist.get_process_group_ranks(over.group) for name, over in axes.items()}
    known = {name: {"ranks": ranks[name], "group": over.group.group_name} for name, over in axes.items()}
    header = json.dumps({"rank": rank, "first_step": first_step, "axes": known, "kernels": kernels})
    events = "".join(f"{json.dumps(event)},\n" for event in span_events(spans, int(base[1]), ranks))
    part = path.with_name(f"{path.name}.tmp")
    part.unlink(missing_ok=True)
    with open(part, "x", encoding="utf-8", opener=plain_file) as file:
        file.write(f'{text[: found.start()]}"shardline": {header},\n{found[0]}\n{events}')
        file.write(text[found.end() :])
    os.replace(part, path)


def span_events(spans: Iterable[Span], base: int, ranks: Mapping[str, list[int]]) -> list[dict[str, Any]]:
    """Trace events for the spans; the trace's clock counts microseconds from `base`, given in nanoseconds since 1970.

    Viewers draw overlapping events of one track wrong, so spans that overlap get tracks of their own.
    """
    events: list[dict[str, Any]] = []
    ends: dict[str, list[int]] = {}
    for span in sorted(spans, key=lambda span: span.start):
        kind = "communication_wait" if span.waiting else "communication"
        name = f"{'waiting for' if span.waiting else 'communication'} {span.axis}"
        tracks = ends.setdefault(name, [])
        track = next((index for index, end in enumerate(tracks) if end <= span.start), len(tracks))
        tracks[track : track + 1] = [span.end]
        events.append(
            {
                "ph": "X",
                "cat": kind,
                "name": span.what,
                "pid": os.getpid(),
                "tid": name if track == 0 else f"{name} {track + 1}",
                "ts": (span.start - base) / 1000,
                "dur": (span.end - span.start) / 1000,
                "args": {"axis": span.axis, "ranks": ranks.get(span.axis, [])},
            }
        )
    return events
