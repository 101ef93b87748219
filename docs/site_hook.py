"""What `make site` does beside mkdocs: the README becomes the first page, and files outside of docs/ are not linked."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]


def on_files(files: Files, config: Any) -> Files:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    files.append(File.generated(config, "index.md", content=re.sub(r"\]\(docs/", "](", text)))
    files.remove(files.src_uris["site_hook.py"])
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Sources, tests and configs are not part of the site: their names stay, their links go."""
    markdown = re.sub(r"\]\(\.\./README\.md", "](index.md", markdown)
    return re.sub(r"\[([^\]]+)\]\(\.\./([^)]+)\)", r"\1 (`\2`)", markdown)


def on_post_page(output: str, page: Any, config: Any) -> str:
    """The theme takes this script from another host."""
    return re.sub(r'<script src="https://[^"]*worker[^"]*">', '<script src="file_worker.js">', output)


def on_post_template(output: str, template_name: str, config: Any) -> str:
    """Page 404 is a template."""
    return on_post_page(output, None, config)
