"""Sources of documents: files, Hugging Face datasets, and functions that a user's module registers."""

from __future__ import annotations

import hashlib
import inspect
import itertools
import json
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardline import registry
from shardline.data.chunks import BATCH_ROWS, Chunk, chunks_of_rows, chunks_of_texts, fields_there, file_chunks
from shardline.data.files import file_mark, find_files, leave_to_datasets, readable_files
from shardline.errors import UserError
from shardline.hub import local_path

C4_NAMES = ("c4", "c4_test", "c4_validation")


@dataclass(frozen=True)
class Source:
    """`chunks()` returns the same chunks each time; `size` is their total size in bytes or rows, None if unknown."""

    name: str
    fingerprint: str
    size: int | None
    make: Callable[[], Iterable[Chunk]]

    def chunks(self) -> Iterator[Chunk]:
        try:
            yield from self.make()
        except (OSError, EOFError, zlib.error) as error:
            raise UserError(f"{self.name!r} cannot be read: {error}") from error


def open_source(dataset: str, path: str | None, *, text_field: str = "text", split: str = "train") -> Source:
    """The source of a config: `dataset` is a known name, a Hub name "owner/name", or any label when `path` is given."""
    if dataset in registry.sources:
        return _registered(dataset, path)
    if path:
        return _local(path, text_field, split)
    if dataset in C4_NAMES:
        raise UserError(
            f"dataset {dataset!r} needs a path: set dataset_path to the folder or files (JSONL, .gz too), or dataset"
            " to the Hub's copy, 'allenai/c4:en'"
        )
    if Path(dataset).exists():
        return _local(dataset, text_field, split)
    if "/" in dataset:
        return _hub(dataset, text_field, split)
    known = ["demo", *C4_NAMES, *registry.sources]
    raise UserError(
        f"unknown dataset {dataset!r}{registry.nearest(dataset, known) or '.'} Known: {', '.join(known)}; or set"
        " dataset_path (files, folder, glob), or name a Hub dataset as 'owner/name'"
    )


def fingerprint_of(*values: Any) -> str:
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:32]


def _local(path: str, field: str, split: str) -> Source:
    folder = Path(local_path(path))
    if (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():
        return _dataset_source(path, load_datasets(path).load_from_disk(path), field, split)
    if folder.is_dir() and not readable_files(folder):
        leave_to_datasets(folder)
        return _hub(path, field, split)
    files = find_files(path, split)
    stats = [file_mark(file) for file in files]
    return Source(
        path,
        fingerprint_of("files", stats, field),
        sum(size for _, size, _ in stats),
        lambda: itertools.chain.from_iterable(file_chunks(file, field) for file in files),
    )


def _registered(name: str, path: str | None) -> Source:
    """A source from a user's module; a change of its code or of the path's date makes it a different source."""
    function = registry.sources[name]
    try:
        code = inspect.getsource(function)
    except (OSError, TypeError):
        code = repr(function)
    stat = Path(path).stat() if path and Path(path).exists() else None
    marks = (stat.st_size, stat.st_mtime_ns) if stat else ()

    def chunks() -> Iterator[Chunk]:
        return chunks_of_texts(_checked(name, text) for text in function(path))

    return Source(name, fingerprint_of("registered", name, path, marks, code), None, chunks)


def _checked(name: str, text: Any) -> str:
    if not isinstance(text, str):
        raise UserError(f"the data source {name!r} yielded {type(text).__name__}, expected text")
    return text


def _hub(name: str, field: str, split: str) -> Source:
    """A dataset the `datasets` library loads by itself: "owner/name", "owner/name:config" or a folder."""
    library = load_datasets(name)
    place, _, config = (name, "", "") if Path(name).exists() else name.partition(":")
    try:
        data = library.load_dataset(place, config or None, split=split)
    except Exception as error:  # of many types: network, missing, private, wrong config or split
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"the dataset {name!r} cannot be loaded with `datasets` (split {split!r}): {reason}") from error
    return _dataset_source(name, data, field, split)


def load_datasets(name: str) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise UserError(f"{name!r} needs the library `datasets`: pip install shardline[datasets]") from error
    return datasets


def _dataset_source(name: str, data: Any, field: str, split: str) -> Source:
    if isinstance(data, dict):  # a DatasetDict
        if split not in data:
            raise UserError(f"{name!r} has no split {split!r}; its splits: {', '.join(data)} (dataset_split, --split)")
        data = data[split]
    if field not in data.column_names:
        raise UserError(f"{name!r}: no field {field!r}; {fields_there(data.column_names)}")

    def chunks() -> Iterator[Chunk]:
        batches = (data[start : start + BATCH_ROWS][field] for start in range(0, len(data), BATCH_ROWS))
        return chunks_of_rows(batches, name, field, 1)

    return Source(name, fingerprint_of("datasets", name, split, field, str(data._fingerprint)), len(data), chunks)
