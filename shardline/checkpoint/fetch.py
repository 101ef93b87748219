"""Checkpoints behind a URL, brought here: into a cache to be read, or into a run's folder to be resumed.

Every block is compared with its checksum on the way; what arrives appears under its name when all of it is on disk.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from shardline.checkpoint.folders import MANIFEST, Found, Progress, checked_blocks, describe, find, in_words, steps_in
from shardline.checkpoint.mirror import read_record, write_record
from shardline.data.prepare import cache_folder
from shardline.errors import UserError
from shardline.storage.location import Location, is_url, locate
from shardline.storage.progress import say


def local_path(where: str | Path, step: int = -1) -> Path:
    """A path as it is; of a URL the checkpoint it means (the newest, or `step`), copied into the cache."""
    if not is_url(where):
        return Path(where)
    place = locate(where)
    if place.local is not None:
        return place.local
    with _naming(place):
        folder, every = find(place)
        readable = [found for found in every if found.manifest is not None and not found.left]
        chosen = [found for found in readable if step in (-1, found.step)]
        if not chosen:
            wanted = "no checkpoint" if step == -1 else f"no checkpoint of step {step}"
            raise UserError(
                f"{folder} holds {wanted} (steps there: {', '.join(str(f.step) for f in readable) or 'none'})"
            )
        problems = chosen[-1].check()
        if problems:
            raise UserError(str(problems[0]))
        return _cached(chosen[-1])


def _cached(found: Found) -> Path:
    """One copy for all processes of a machine: the first that comes fetches it, the others wait."""
    parent, name = found.place.name.rstrip("/").rsplit("/", 1)
    folder = cache_folder(None) / "checkpoints" / hashlib.sha256(parent.encode()).hexdigest()[:16]
    target = folder / name
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f".{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        here = describe(locate(target))
        if here.manifest is not None and here.manifest == found.manifest and not here.check():
            say(f"{found.place}: using the copy in {target}")
        else:
            fetch(found, target)
    return target


def fetch(found: Found, target: Path) -> None:
    """Copy a checkpoint to `target`, verified; the folder gets its name when all of it is there."""
    say(f"fetching {found.place} ({in_words(found.size)}) to {target}")
    partial = target.with_name(f"{target.name}.partial")
    progress = Progress(f"fetching {found.place}", found.size)
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        for name in [*(name for name in found.place.names() if name != MANIFEST), MANIFEST]:
            with (partial / name).open("wb") as file:
                for block in checked_blocks(found.place / name, found.files.get(name)):
                    file.write(block)
                    progress.advance(len(block))
                file.flush()
                os.fsync(file.fileno())
        if json.loads((partial / MANIFEST).read_text()) != found.manifest:
            raise UserError(f"{found.place} changed while it was fetched: try again")
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def fetch_to_resume(url: str, folder: Path) -> list[str]:
    """Where `folder` holds no checkpoint: fetch the newest good one from the mirror; what to say of it.

    Weights of a run that had ended are fetched with the newest full checkpoint before them.
    """
    if steps_in(locate(folder)):
        return []
    place, notes = locate(url), list[str]()
    with _naming(place):
        names = steps_in(place)
        for name in reversed(names):
            found = describe(place / name)
            try:
                _check(found)
                fetch(found, folder / name)
            except UserError as error:
                notes.append(f"skipping a damaged checkpoint: {error}")
                continue
            assert found.manifest is not None
            notes.append(f"fetched {found.place}: {folder} held no checkpoint")
            if found.manifest["kind"] == "full":
                break
        if names:
            write_record(folder, url, {**read_record(folder, url), **_rows(place, names)})
    return notes


def _check(found: Found) -> None:
    problems = found.check()
    if problems:
        raise UserError(str(problems[0]))


def _rows(place: Location, names: list[str]) -> dict[str, dict[str, str]]:
    """The mirror's steps as this run's own from now on."""
    rows = {}
    for name in names:
        found = describe(place / name)
        if found.manifest is not None:
            digest = hashlib.sha256((place / name / MANIFEST).text().encode()).hexdigest()
            rows[name] = {"sha256": digest, "kind": found.manifest["kind"]}
    return rows


@contextlib.contextmanager
def _naming(place: Location) -> Iterator[None]:
    """Errors of a file system with its URL; a library of its own may raise anything."""
    try:
        yield
    except (UserError, KeyboardInterrupt):
        raise
    except Exception as error:
        raise UserError(f"{place} cannot be read: {type(error).__name__}: {error}") from error
