"""Names on the Hugging Face Hub, and where its cache has their files. Nothing here uses the network.

    owner/name@revision                           a model, where a config expects a Hugging Face folder
    hf://datasets/owner/name@revision/data/*.jsonl  files of a dataset

A file or folder of that name comes first. `run/downloads.py` downloads what a config names and gives each name the
commit that it stands for, so that a written config always means the same files.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from typing import Literal, NamedTuple

_REPO = r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)"
_REVISION = r"(?:@(?P<revision>refs/\w+/[\w.-]+|[\w.-]+))?"
_MODEL = re.compile(rf"(?:hf://)?{_REPO}{_REVISION}")
_DATASET = re.compile(rf"hf://datasets/{_REPO}{_REVISION}(?:/(?P<path>.*))?")
_FILES = (".json", ".model", ".txt", ".jinja")  # a name that ends so is a file, not a model
COMMIT = re.compile(r"[0-9a-f]{40}")


class HubName(NamedTuple):
    """A repository on the Hub, at a revision; for a dataset, also a file, folder or glob in it."""

    kind: Literal["model", "dataset"]
    repo: str
    revision: str  # branch, tag or commit
    path: str = ""

    def __str__(self) -> str:
        at = f"{self.repo}@{self.revision}" if self.revision != "main" else self.repo
        return at if self.kind == "model" else f"hf://datasets/{at}{'/' if self.path else ''}{self.path}"

    @property
    def folder(self) -> Path | None:
        """Where the cache has this revision; None if it does not."""
        cache = cache_folder()
        if cache is None:
            return None
        place, commit = cache / f"{self.kind}s--{self.repo.replace('/', '--')}", self.revision
        if not COMMIT.fullmatch(commit):
            with contextlib.suppress(OSError):
                commit = (place / "refs" / self.revision).read_text().strip()
        found = place / "snapshots" / commit
        return found if found.is_dir() else None


def cache_folder() -> Path | None:
    """The cache of `huggingface_hub`; None where that is not installed."""
    try:
        from huggingface_hub import constants
    except ImportError:
        return None
    return Path(constants.HF_HUB_CACHE)


def model_name(text: str) -> HubName | None:
    """The model that a text names; None for a path, and for what exists on this machine."""
    found = _MODEL.fullmatch(text)
    if found is None or text.endswith(_FILES) or os.path.exists(text):
        return None
    return HubName("model", found["repo"], found["revision"] or "main")


def dataset_name(text: str) -> HubName | None:
    """The files of a dataset that a text names with `hf://datasets/`."""
    found = _DATASET.fullmatch(text)
    if found is None:
        return None
    return HubName("dataset", found["repo"], found["revision"] or "main", found["path"] or "")


def local_path(text: str) -> str:
    """Where a path, or a name whose files were downloaded, is on this machine; the text itself where it is not."""
    name = dataset_name(text) or model_name(text)
    folder = None if name is None else name.folder
    return text if name is None or folder is None else str(folder / name.path)


def repo_of_snapshot(folder: Path) -> str:
    """`owner/name` of a model's folder in a cache of the Hub (models--owner--name/snapshots/COMMIT); "" for others."""
    kind, _, repo = folder.parent.parent.name.partition("--")
    return repo.replace("--", "/") if kind == "models" and folder.parent.name == "snapshots" else ""


def place_on_hub(file: Path) -> str | None:
    """The place of a file of the cache, the same on every machine: `datasets--owner--name/snapshots/COMMIT/file`."""
    cache = cache_folder() if "snapshots" in file.parts else None
    if cache is None or not file.is_relative_to(cache):
        return None
    return file.relative_to(cache).as_posix()
