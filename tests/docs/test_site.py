"""The site that `make site` builds: complete, and nothing in it is loaded from another host."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.docs.fences import ROOT

LOADED = re.compile(r"<(?:link|script|img|iframe|source)\b[^>]*\b(?:src|href)=[\"']?((?:https?:)?//[^\"'\s>]+)")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if find_spec("mkdocs") is None:
        pytest.skip("needs the extra docs (make test-docs installs it)")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    return folder


@pytest.mark.slow
def test_every_page_is_there_and_found_by_the_search(site: Path) -> None:
    pages = {"index.html", *(f"{page.stem}.html" for page in (ROOT / "docs").glob("*.md"))}
    assert pages <= {page.name for page in site.glob("*.html")}
    index = (site / "search" / "search_index.js").read_text(encoding="utf-8")  # a script: opens from disk, too
    assert [page for page in pages if f'"{page}' not in index] == []


@pytest.mark.slow
def test_links_to_the_readme_lead_to_the_first_page(site: Path) -> None:
    assert 'href="index.html#why-believe-it"' in (site / "benchmarks.html").read_text(encoding="utf-8")


@pytest.mark.slow
def test_nothing_is_loaded_from_another_host(site: Path) -> None:
    found = [(page.name, one) for page in site.rglob("*.html") for one in LOADED.findall(page.read_text("utf-8"))]
    styles = [
        one for file in site.rglob("*.css") for one in re.findall(r"url\(\s*[\"']?https?:[^)]*", file.read_text())
    ]
    assert (found, styles) == ([], [])
