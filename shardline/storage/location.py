"""One interface to files and folders on this machine or at any fsspec URL (s3://, gs://, memory://, file://, ...)."""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from shardline.errors import UserError
from shardline.storage.atomic import plain_file
from shardline.words import password_problem


def is_url(text: str | Path) -> bool:
    """Whether a path is an fsspec URL: `s3://bucket/run`, `simplecache::s3://bucket/run`."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]*(://|::)", str(text)) is not None


@dataclass(frozen=True)
class Location:
    """A file or folder: an fsspec file system and a path in it; `name` is what the user wrote."""

    fs: Any
    path: str
    name: str

    def __str__(self) -> str:
        return self.name

    def __truediv__(self, child: str) -> Location:
        return Location(self.fs, f"{self.path.rstrip('/')}/{child}", f"{self.name.rstrip('/')}/{child}")

    @property
    def base(self) -> str:
        return self.name.rstrip("/").rsplit("/", 1)[-1]

    @property
    def local(self) -> Path | None:
        """The same place as a path, if it is on this machine."""
        from fsspec.implementations.local import LocalFileSystem

        if type(self.fs) is not LocalFileSystem:  # a subclass may do more than read the local disk
            return None
        return Path(self.path if is_url(self.name) else self.name)

    def names(self) -> list[str]:
        """The names in this folder, sorted; [] if it does not exist. Never taken from an fsspec cache."""
        self.fs.invalidate_cache(self.path)
        try:
            rows = self.fs.ls(self.path, detail=False)
        except (FileNotFoundError, NotADirectoryError):
            return []
        found = {str(row).rstrip("/").rsplit("/", 1)[-1] for row in rows}
        return sorted(found - {self.path.rstrip("/").rsplit("/", 1)[-1]})  # some list a folder, or a file, in itself

    def is_file(self) -> bool:
        return bool(self.fs.isfile(self.path))

    def exists(self) -> bool:
        return bool(self.fs.exists(self.path))

    def size(self) -> int | None:
        """The size of a file in bytes; None if there is no such file."""
        try:
            info = self.fs.info(self.path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        return int(info["size"]) if info["type"] == "file" else None

    def written(self) -> datetime.datetime | None:
        """When a file was last modified, in local time; None if the file system does not know."""
        try:
            changed: datetime.datetime = self.fs.modified(self.path)
        except NotImplementedError:
            return None
        return changed.astimezone()

    def open(self, mode: str = "rb") -> BinaryIO:
        if self.local is not None:
            return cast(BinaryIO, open(self.path, mode, opener=plain_file))
        return cast(BinaryIO, self.fs.open(self.path, mode))

    def text(self) -> str:
        with self.open() as file:
            return file.read().decode()

    def blocks(self, size: int) -> Iterator[bytes]:
        with self.open() as file:
            while block := file.read(size):
                yield block

    def make_folder(self) -> None:
        self.fs.makedirs(self.path, exist_ok=True)

    def remove(self) -> None:
        """Remove a file, or a folder with its contents, if it exists."""
        try:
            info = self.fs.info(self.path)
        except FileNotFoundError:
            return
        self.fs.rm(self.path, recursive=info["type"] != "file")
        self.fs.invalidate_cache()


def locate(where: str | Path) -> Location:
    """Resolve a path or URL; a URL with a password, or one that no installed file system understands, is refused."""
    from fsspec.core import url_to_fs
    from fsspec.implementations.local import LocalFileSystem

    text = str(where)
    if problem := password_problem(text):
        raise UserError(problem)
    if not is_url(text):
        return Location(LocalFileSystem(), str(Path(text).absolute()), text)
    try:
        fs, path = url_to_fs(text)
    except (ValueError, ImportError) as error:
        raise UserError(f"{text} cannot be opened: {error}") from error
    return Location(fs, path, text)
