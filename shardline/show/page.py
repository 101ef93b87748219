"""Renders a page as one HTML file with its styles, scripts and data, which opens from disk without a network."""

from __future__ import annotations

import html
import json
from importlib.resources import files
from pathlib import Path
from typing import Any

from shardline.errors import UserError
from shardline.storage.atomic import write_atomically
from shardline.words import sized

# Scripts of each page, in the order in which they run; the first is uPlot, which draws charts with axes.
SCRIPTS = {
    "report": ("vendor/uPlot.iife.min.js", "base.js", "charts.js", "drawings.js", "report.js"),
    "explain": ("base.js", "drawings.js", "explain.js"),
}
STYLES = {"report": ("vendor/uPlot.min.css", "page.css"), "explain": ("page.css",)}
POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; connect-src 'self'"


def render(kind: str, title: str, data: dict[str, Any]) -> str:
    styles = "\n".join(_asset(name) for name in STYLES[kind])
    scripts = "\n".join(f"<script>\n{_asset(name)}\n</script>" for name in SCRIPTS[kind])
    return f"""\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="color-scheme" content="light dark">
<title>{html.escape(title)} - Shardline {kind}</title>
<link rel="icon" href="data:,">
<style>
{styles}
</style>
</head>
<body class="{kind}">
<main id="page"><noscript>This page draws its charts with JavaScript, which is switched off.</noscript></main>
<script type="application/json" id="data">{to_json(data)}</script>
{scripts}
</body>
</html>
"""


def write_page(path: Path, text: str) -> None:
    """Write a page and print where it is."""
    if path.is_dir():
        raise UserError(f"--out {path}: is a folder; name a file")
    write_atomically(path, text)
    print(f"wrote {path}, {sized(len(text.encode()))}: open it in a browser")


def to_json(data: Any) -> str:
    """JSON that is safe inside a script element: no value can end the element."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"), ensure_ascii=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _asset(name: str) -> str:
    return files("shardline.show").joinpath("assets", *name.split("/")).read_text(encoding="utf-8")
