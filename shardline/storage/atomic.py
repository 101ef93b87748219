"""Files that are replaced whole: a reader or a crash sees the old content or the new one, never a part."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from shardline.errors import UserError


def write_atomically(path: Path, text: str) -> None:
    """Replace `path` by a file with this text, which is on disk when this returns."""
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise UserError(f"cannot write {path}: {error.strerror or error}") from error


def sync_folder(folder: Path) -> None:
    """Make renames in `folder` durable: they reach the disk with the folder that holds them."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
