"""A run that --overwrite replaces: set aside in its folder until the new one is sure to take place, then removed.

    run's files --set_aside--> .replaced --remove--> .removing --> gone
                <---put_back--

A start that is killed in between leaves one of the two folders, which tells the next one how far it was.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from shardline.errors import UserError

ASIDE, LEAVING = ".replaced", ".removing"


def set_aside(path: Path, files: Sequence[Path]) -> None:
    for file in files:
        place = path / ASIDE / os.path.relpath(file.parent.resolve(), path.resolve()) / file.name
        place.parent.mkdir(parents=True, exist_ok=True)
        try:
            file.rename(place)
        except OSError as error:
            put_back(path)
            raise UserError(f"--overwrite: {file} cannot be replaced: {error.strerror}; remove it yourself") from error
        if file.parent != path and not any(file.parent.iterdir()):
            file.parent.rmdir()


def put_back(path: Path) -> None:
    """The run that was set aside is the folder's again; what a start that failed has written gives way to it."""
    aside = path / ASIDE
    for file in sorted(aside.rglob("*")):
        place = path / file.relative_to(aside)
        if not os.path.lexists(file) or (file.is_dir() and not file.is_symlink() and place.is_dir()):
            continue  # has moved with its folder, or its contents follow
        place.parent.mkdir(parents=True, exist_ok=True)
        file.replace(place)
    shutil.rmtree(aside, ignore_errors=True)


def remove(path: Path) -> None:
    """From the first moment on it is no run that could be put back."""
    shutil.rmtree(path / LEAVING, ignore_errors=True)
    if (path / ASIDE).is_dir():
        (path / ASIDE).rename(path / LEAVING)
        shutil.rmtree(path / LEAVING)


def tidy_up(path: Path, begun: bool) -> None:
    """After a start that was killed in between; `begun` where it is an earlier attempt of this run."""
    if (path / ASIDE).is_dir() and not begun:
        put_back(path)
    remove(path)
