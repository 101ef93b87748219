"""Paths as users write them: files, folders, globs and comma lists -> a sorted list of files that can be read."""

from __future__ import annotations

import glob
import importlib.util
import re
from pathlib import Path

from shardline.config.names import CARD, DATA_FILES, LINE_FILES, TEXT_FILES
from shardline.errors import UserError
from shardline.hub import local_path, place_on_hub
from shardline.storage.progress import say
from shardline.words import counted

SPLITS = {
    "train": "train",
    "training": "train",
    "validation": "validation",
    "valid": "validation",
    "val": "validation",
    "dev": "validation",
    "test": "test",
}


def file_kind(file: Path) -> str:
    """The suffix that gives the format, without `.gz`; "parquet" for Parquet, "" where the format is unknown."""
    suffix = file.with_suffix("").suffix if file.suffix == ".gz" else file.suffix
    if suffix == ".parquet" and file.suffix != ".gz":
        return "parquet"
    return suffix if suffix in (*TEXT_FILES, *LINE_FILES) else ""


def find_files(path: str, split: str) -> list[Path]:
    """All files that `path` names, each once, sorted within each comma-separated item."""
    found: dict[Path, None] = {}
    for item in filter(None, (item.strip() for item in path.split(","))):
        for file in _expand(item, split):
            found[file] = None
    if not found:
        raise UserError(f"{path!r} names no file")
    return list(found)


def file_mark(file: Path) -> tuple[str, int, int]:
    """What identifies a file: its path, size and date; for a file of the Hub its place there, which never changes."""
    known = place_on_hub(file)
    stat = file.stat()
    return (known, stat.st_size, 0) if known else (str(file.resolve()), stat.st_size, stat.st_mtime_ns)


def _expand(item: str, split: str) -> list[Path]:
    place = Path(local_path(item)).expanduser()
    if place.is_dir():
        return _in_folder(place, split)
    if place.is_file():
        files = [place]
    else:
        files = sorted(Path(name) for name in glob.glob(str(place), recursive=True) if Path(name).is_file())
    if not files:
        what = "no file matches" if glob.has_magic(item) else "there is no file or folder"
        where = "" if place.is_absolute() else f" in {Path.cwd()}"
        raise UserError(
            f"{what} {item!r}{where} (on the Hub: dataset = 'owner/name', or hf://datasets/owner/name/path)"
        )
    unknown = [str(file) for file in files if not file_kind(file)]
    if unknown:
        raise UserError(
            f"{unknown[0]!r}: unknown format; files end in {', '.join(DATA_FILES)} (text and JSONL also .gz)"
        )
    return files


def readable_files(folder: Path) -> list[Path]:
    """The files below a folder that can be read; a dataset's card is not among them."""
    files = [file for file in _all_files(folder) if file_kind(file)]
    is_dataset = any(file_kind(file) not in TEXT_FILES or place_on_hub(file) for file in files)
    return [file for file in files if file.name != CARD or not is_dataset]


def leave_to_datasets(folder: Path) -> None:
    """Raise an error for a folder without readable files that the package `datasets` cannot read either."""
    if _all_files(folder) and importlib.util.find_spec("datasets") is not None:
        return
    more = "; pip install 'shardline[datasets]' to read more kinds" if _all_files(folder) else ""
    raise UserError(_without_data(folder) + more)


def _without_data(folder: Path) -> str:
    files = _all_files(folder)
    if not files:
        return f"the folder {str(folder)!r} is empty"
    others = f"{counted(len(files), 'other file')}, such as {files[0].name!r}"
    return f"the folder {str(folder)!r} holds no file that can be read ({', '.join(DATA_FILES)}), but {others}"


def _all_files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.rglob("*") if file.is_file() and not _hidden(file.relative_to(folder)))


def _in_folder(folder: Path, split: str) -> list[Path]:
    """Readable files below a folder; where every file names its split (train-0.parquet), only those of `split`."""
    files = readable_files(folder)
    if not files:
        raise UserError(_without_data(folder))
    splits = [_split_of(file.relative_to(folder)) for file in files]
    if None in splits:
        return files
    wanted = SPLITS.get(split, split)
    chosen = [file for file, of in zip(files, splits, strict=True) if of == wanted]
    if not chosen:
        there = ", ".join(sorted({str(of) for of in splits}))
        raise UserError(f"{str(folder)!r} has no files of the split {split!r}; its splits: {there} (dataset_split)")
    if len(chosen) < len(files):
        say(f"{folder}: reading the {len(chosen)} files of the split {split!r} out of {len(files)}")
    return chosen


def _split_of(file: Path) -> str | None:
    """The split in a data file's name or folder; text files, which are one document each, have none."""
    if file_kind(file) in TEXT_FILES:
        return None
    words = re.split(r"[-_./\s]+", str(file).lower())
    return next((SPLITS[word] for word in words if word in SPLITS), None)


def _hidden(file: Path) -> bool:
    return any(part.startswith((".", "_")) for part in file.parts)
