"""What the data and model keys of a config name, as far as it can be told before anything is read."""

from __future__ import annotations

import glob
import os
from collections.abc import Mapping
from typing import Any

from shardline import registry
from shardline.config.schema import Config

# Files that data is read from, as data/files.py knows them; text and lines may also end in .gz.
TEXT_FILES = (".txt", ".text", ".md")
DATA_FILES = (*TEXT_FILES, ".jsonl", ".json", ".ndjson", ".parquet")


# ---- data: of the section [training] or [validation] -----------------------------------------------------------------


def is_demo(section: Any) -> bool:
    return bool(section.dataset == "demo" and not section.dataset_path)


def is_store(section: Any) -> bool:
    return bool(section.dataset_path) and os.path.isfile(os.path.join(section.dataset_path, "store.json"))


def is_registered(section: Any) -> bool:
    return section.dataset in registry.sources and not is_store(section)


def names_files(section: Any) -> bool:
    """Whether data is read from files and globs alone, no folder among them."""
    return bool(_endings(section))


def names_texts(section: Any) -> bool:
    """Whether all of those are plain text."""
    endings = _endings(section)
    return bool(endings) and all(end in TEXT_FILES for end in endings)


def _endings(section: Any) -> list[str]:
    """Of the files and globs that are named; none where something else is."""
    path = section.dataset_path or (section.dataset if os.path.isfile(section.dataset) else "")
    names = [os.path.expanduser(name.strip()) for name in path.split(",") if name.strip()]
    endings = [os.path.splitext(name.removesuffix(".gz"))[1] for name in names]
    known = [end in DATA_FILES or glob.has_magic(name) for name, end in zip(names, endings, strict=True)]
    other = is_registered(section) or any(map(os.path.isdir, (path, *names))) or not all(known)
    return [] if other else endings


# ---- the model -------------------------------------------------------------------------------------------------------


def has_window(config: Config) -> bool:
    """Whether the model has a sliding window, or may have one; of the named flavors none has."""
    given = config.model.overrides
    if "sliding_window" in given:
        return given["sliding_window"] is not None
    return config.model.name == "auto" or _of_flavor(config, "sliding_window") is not None


def scaling_type(config: Config) -> str | None:
    """How rotary frequencies are stretched, None where it is not known; named flavors that do it do it as llama3."""
    given = config.model.overrides.get("rope_scaling")
    for scaling in (given, _of_flavor(config, "rope_scaling")):
        found = scaling.get("type") if isinstance(scaling, Mapping) else getattr(scaling, "type", None)
        if found is not None:
            return str(found)
    return None if config.model.name == "auto" else "llama3"


def _of_flavor(config: Config, field: str) -> Any:
    """An architecture field as a registered flavor has it, None elsewhere."""
    flavor = registry.flavors.get(config.model.name, {}).get(config.model.flavor)
    return flavor.get(field) if isinstance(flavor, Mapping) else getattr(flavor, field, None)
