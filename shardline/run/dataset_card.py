"""The card of a dataset on the Hub: which of its files belong to a configuration and a split.

---
configs:
- config_name: en
  data_files:
  - split: train
    path: en/train-*.jsonl
---
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shardline.errors import UserError
from shardline.registry import nearest

LONGEST = 1 << 16  # characters of a card that are read; the rest is text


def named_files(card: Path, config: str | None, split: str) -> list[str] | None:
    """The patterns of a configuration's split; None where the card does not say, or names files outside."""
    rows = _configs(card)
    if not rows:
        return None
    splits = _splits(_chosen(rows, config).get("data_files"))
    if not splits:
        return None
    if split not in splits:
        raise UserError(f"there is no split {split!r}{nearest(split, splits)}; splits: {', '.join(splits)}")
    patterns = splits[split]
    return patterns if all(map(_is_inside, patterns)) else None


def _configs(card: Path) -> list[dict[str, Any]]:
    """The configurations in the table at the beginning of a card."""
    import yaml

    text = card.read_text(encoding="utf-8", errors="replace")[:LONGEST] if card.is_file() else ""
    found = re.match(r"---\s*\n(.*?)\n---\s*(?:\n|$)", text, re.DOTALL)
    try:
        content = yaml.safe_load(found[1]) if found else None
    except (yaml.YAMLError, ValueError, RecursionError):
        return []
    rows = content.get("configs") if isinstance(content, Mapping) else None
    return [dict(row) for row in rows if isinstance(row, Mapping)] if isinstance(rows, list) else []


def _chosen(rows: Sequence[dict[str, Any]], config: str | None) -> dict[str, Any]:
    """The configuration of a name; without one the default, or the only one."""
    named = {str(row.get("config_name", "default")): row for row in rows}
    defaults = [row for name, row in named.items() if row.get("default") is True or name == "default"]
    if config is None and (defaults or len(named) == 1):
        return (defaults or list(named.values()))[0]
    if config is None or config not in named:
        what = "it has several configurations" if config is None else f"there is no configuration {config!r}"
        raise UserError(
            f"{what}{nearest(config or '', named)}; name one of {', '.join(named)}: dataset = 'owner/name:CONFIG', or"
            " `name` in data.sources"
        )
    return named[config]


def _splits(files: Any) -> dict[str, list[str]]:
    """Split -> patterns; files without a split are for training."""
    found: dict[str, list[str]] = {}
    for row in files if isinstance(files, list) else [files]:
        split, path = (row.get("split", "train"), row.get("path")) if isinstance(row, Mapping) else ("train", row)
        paths = path if isinstance(path, list) else [path]
        found.setdefault(str(split), []).extend(one for one in paths if isinstance(one, str))
    return {split: paths for split, paths in found.items() if paths}


def _is_inside(pattern: str) -> bool:
    """Whether a pattern stays in the repository: a stranger wrote it."""
    return "://" not in pattern and not pattern.startswith("/") and ".." not in Path(pattern).parts
