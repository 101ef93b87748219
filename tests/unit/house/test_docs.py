"""What the pages name exists: files, config keys, commands; and the words of the glossary stand there once."""

import re
from pathlib import Path

import pytest

from shardline.cli.main import COMMANDS
from shardline.cli.page import commands_page

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FOLDERS = ("shardline", "tests", "benchmarks", "configs", "examples", "docs")


def named_files(text: str) -> set[str]:
    """Paths in backticks or links whose first folder is one of ours, or one of the package's."""
    found = set(re.findall(r"(?<![\w/.-])((?:[a-z_]+/)+[\w.-]+\.(?:py|md|toml|yaml|sh))", text))
    rooms = {path.name for path in (ROOT / "shardline").iterdir() if path.is_dir()}
    return {path for path in found if path.split("/")[0] in {*FOLDERS, *rooms}}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_a_page_names_exist(page):
    missing = [
        path for path in sorted(named_files(page.read_text()))
        if not any((place / path).exists() for place in (ROOT, ROOT / "shardline", page.parent))
    ]  # fmt: skip
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page):
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text())
    assert not [link for link in links if not (page.parent / link).exists()]


def anchors(page: Path) -> set[str]:
    """The places of a page that a link can name, as GitHub and the site call them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    titles = (re.sub(r"[`*]|\]\([^)]*\)|\[", "", title) for title in re.findall(r"^#+ (.*)$", text, re.MULTILINE))
    named = set(re.findall(r'<a (?:id|name)="([^"]+)"', text))
    return named | {re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_into_pages_name_a_place(page):
    links = re.findall(r"\]\(([^)#:\s]*\.md)?#([^)\s]+)\)", page.read_text())
    assert not [(name, place) for name, place in links if place not in anchors(page.parent / name if name else page)]


def test_every_benchmark_is_listed_and_the_page_with_its_table_names_it():
    rows = [row.split(" | ") for row in (ROOT / "docs" / "benchmarks.md").read_text().splitlines() if "`" in row]
    listed = {name for row in rows for name in re.findall(r"benchmarks/(\w+\.py)", row[-1])}
    assert listed == {file.name for file in (ROOT / "benchmarks").glob("*.py") if "__main__" in file.read_text()}
    for _, tables, command in (row for row in rows if len(row) == 3):
        pages = [(ROOT / "docs" / name).read_text() for name in re.findall(r"\]\(([^)#]+)", tables)]
        programs = re.findall(r"benchmarks/\w+\.\w+|shardline \w+ \w+", command)
        assert [name for name in programs if pages and not any(name in page for page in pages)] == []


def test_the_page_of_the_commands_is_that_of_the_code():
    assert (ROOT / "docs" / "cli.md").read_text() == commands_page(COMMANDS), "run `make docs`"


def test_every_page_stands_once_in_the_list_of_the_site():
    listed = re.findall(r"([\w-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(["index.md", *(page.name for page in PAGES[1:])])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_that_a_page_names_exist(page):
    named = set(re.findall(r"(?:^|`)shardline ([a-z]+)", page.read_text(), re.MULTILINE))
    assert named <= {str(name).split()[0] for name in COMMANDS}


def test_the_map_names_twenty_places_and_every_room():
    text = (ROOT / "docs" / "architecture.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith("| ") and ".py`" in line]
    assert len(rows) >= 20
    rooms = [path.name for path in (ROOT / "shardline").iterdir() if (path / "__init__.py").exists()]
    assert not [room for room in rooms if not re.search(rf"^ .*\b{room}\b", text, re.MULTILINE)]


def test_the_glossary_explains_each_word_once():
    words = re.findall(r"^\| \*\*([\w -]+)\*\*", (ROOT / "docs" / "glossary.md").read_text(), re.MULTILINE)
    assert len(words) >= 30
    assert len(words) == len(set(words))
