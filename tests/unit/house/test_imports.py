"""Imports point downwards only, and what must start fast does not import torch."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[3] / "shardline"
LEVELS = {
    "train": 23,
    "__main__": 23,
    "cli": 22,
    "show": 21,
    "tools": 20,
    "launch": 19,
    "training": 18,
    "plan": 17,
    "checkpoint": 16,
    "telemetry": 15,
    "run": 14,
    "optim": 13,
    "parallel": 12,
    "comm": 11,
    "memory": 10,
    "precision": 9,
    "adapters": 9,
    "data": 8,
    "models": 7,
    "storage": 6,
    "config": 5,
    "report": 2,
    "hub": 1,
    "registry": 1,
    "json_text": 0,
    "words": 0,
    "errors": 0,
}


def room(module: str) -> str | None:
    parts = module.split(".")
    return parts[1] if parts[0] == "shardline" and len(parts) > 1 else None


def imported(path: Path) -> set[str]:
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module] + [
                f"{node.module}.{alias.name}" for alias in node.names if node.module == "shardline"
            ]
        rooms |= {found for name in names if (found := room(name)) in LEVELS}
    return rooms


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_downwards(path):
    parts = path.relative_to(PACKAGE).parts
    here = parts[0].removesuffix(".py")
    if here == "__init__":
        return
    for other in imported(path) - {here}:
        assert LEVELS[other] < LEVELS[here], f"{path.name} of {here} imports {other}"


@pytest.mark.parametrize(
    "module",
    [
        *("shardline", "shardline.cli.main", "shardline.config.load", "shardline.models.flavors"),
        *("shardline.show.report", "shardline.show.serve"),
    ],
)
def test_torch_is_not_imported_before_it_is_needed(module):
    code = f"import sys, {module}; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_each_class_name_exists_once():
    seen: dict[str, str] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                assert node.name not in seen, f"{node.name} stands in {seen[node.name]} and in {path.name}"
                seen[node.name] = path.name


def test_no_room_is_crowded():
    for folder in {path.parent for path in PACKAGE.rglob("*.py")}:
        files = [path for path in folder.glob("*.py") if path.name != "__init__.py"]
        assert len(files) <= 16, f"{folder.relative_to(PACKAGE)} has {len(files)} files"
