"""Draws a pipeline schedule as a self-contained SVG file."""

from __future__ import annotations

from collections.abc import Iterator
from xml.sax.saxutils import escape

from shardline.parallel.pipeline.timeline import ACTION_KINDS, Schedule, TimedAction, Timeline

# Fill of each kind; a rank's second, fourth, ... stage has the paler one.
FILLS = {
    "F": ("#6fa8dc", "#b7d3ee"),
    "B": ("#7cba7c", "#bfe0bf"),
    "I": ("#5bb5b0", "#ade0dc"),
    "W": ("#e6b455", "#f3dcae"),
}
LEFT, TOP, ROW, BOX, MARGIN = 64, 64, 28, 22, 16  # pixels
CHARACTER = 6.2  # width of a digit at the size of the numbers in boxes


def draw(schedule: Schedule, timeline: Timeline, title: str, subtitle: str) -> str:
    """Draw a row of boxes for each rank; a box shows its micro-batch if it fits, and the whole action on hover."""
    unit = min(28.0, max(6.0, 1400 / timeline.total))
    width = max(LEFT + unit * timeline.total + MARGIN, 980)  # the legend needs this much
    bottom = TOP + ROW * schedule.ranks
    height = bottom + 48
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height}" '
        f'viewBox="0 0 {width:g} {height}" font-family="sans-serif" font-size="12" fill="#222">',
        f"<title>{escape(title)}</title>",
        f'<rect class="paper" width="{width:g}" height="{height}" fill="#fff"/>',
        f'<text x="{MARGIN}" y="26" font-size="16" font-weight="bold">{escape(title)}</text>',
        f'<text x="{MARGIN}" y="46" fill="#555">{escape(subtitle)}</text>',
    ]
    for rank, spans in enumerate(timeline.spans):
        y = TOP + ROW * rank
        parts.append(f'<text x="{MARGIN}" y="{y + 15}">rank {rank}</text>')
        parts.append(
            f'<rect class="idle" x="{LEFT}" y="{y}" width="{unit * timeline.total:g}" height="{BOX}" fill="#f1f1f1"/>'
        )
        own = schedule.stages_of(rank)
        for span in spans:
            parts += _box(span, own.index(span.action.stage), unit, y)
    parts += _legend(schedule, bottom + 14)
    return "\n".join([*parts, "</svg>", ""])


def _box(span: TimedAction, later: int, unit: float, y: int) -> Iterator[str]:
    action, start, end = span
    x, width = LEFT + unit * start, unit * (end - start)
    number = str(action.microbatch)
    yield (
        f'<rect class="{action.kind}" x="{x:g}" y="{y}" width="{width:g}" height="{BOX}" '
        f'fill="{FILLS[action.kind][later % 2]}" stroke="#fff" stroke-width="0.5">'
        f"<title>{action}: {start:g} to {end:g}</title></rect>"
    )
    if width >= CHARACTER * len(number) + 1:
        yield (
            f'<text x="{x + width / 2:g}" y="{y + 15}" font-size="10" text-anchor="middle" '
            f'pointer-events="none">{number}</text>'
        )


def _legend(schedule: Schedule, y: int) -> Iterator[str]:
    there = {action.kind for order in schedule.orders for action in order}
    x = float(LEFT)
    items = [(FILLS[kind][0], f"{kind} {words}") for kind, words in ACTION_KINDS.items() if kind in there]
    for fill, words in [*items, ("#f1f1f1", "idle")]:
        yield f'<rect class="legend" x="{x:g}" y="{y}" width="14" height="14" fill="{fill}"/>'
        yield f'<text x="{x + 20:g}" y="{y + 12}">{words}</text>'
        x += 44 + 7 * len(words)
    if schedule.stages > schedule.ranks:
        yield f'<text x="{x:g}" y="{y + 12}" fill="#555">paler: the rank\'s second stage, and so on in turn</text>'
