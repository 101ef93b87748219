"""Fetches checkpoints from a URL: into a cache to be read, or into a run's folder to be resumed.

Every block is compared with its checksum on arrival; a checkpoint gets its name when all of it is on disk.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shardline.checkpoint.format import MANIFEST, Saved, find_checkpoint, look_at, step_names
from shardline.checkpoint.mirror import digest_of, read_record, write_record
from shardline.data.prepare import cache_folder
from shardline.errors import UserError
from shardline.storage.blocks import Damaged, copy_file
from shardline.storage.exclusive import exclusive
from shardline.storage.location import Location, is_url, locate
from shardline.storage.progress import Progress, say
from shardline.words import sized

log = logging.getLogger("shardline")


def local_path(where: str | Path, step: int = -1) -> Path:
    """Return a path as it is; for a URL, copy the checkpoint it means (the newest, or `step`) into the cache."""
    if not is_url(where):
        return Path(where)
    place = locate(where)
    if place.local is not None:
        return place.local
    with _named(place):
        return _cached(_checked(find_checkpoint(place, step)))


def step_at(url: str, step: int) -> int:
    """Return the step of the checkpoint that a URL means now: the newest, or `step`."""
    place = locate(url)
    with _named(place):
        return find_checkpoint(place, step).step


def _checked(saved: Saved) -> Saved:
    for problem in saved.check_sizes():
        raise Damaged(str(problem))
    return saved


def _cached(saved: Saved) -> Path:
    """Fetch one copy for all processes of a machine: the first process fetches it while the others wait."""
    parent, name = saved.place.name.rstrip("/").rsplit("/", 1)
    folder = cache_folder(None) / "checkpoints" / hashlib.sha256(parent.encode()).hexdigest()[:16]
    target = folder / name
    folder.mkdir(parents=True, exist_ok=True)
    with exclusive(folder / f".{name}.lock", lambda: say(f"another process is fetching {saved.place}; waiting for it")):
        here = look_at(locate(target), any_step=True)
        if here.saved is not None and here.saved.manifest == saved.manifest and not here.check():
            say(f"{saved.place}: using the copy in {target}")
        else:
            fetch(saved, target)
    return target


def fetch(saved: Saved, target: Path) -> None:
    """Copy a checkpoint to `target` and verify it; the folder gets its name when all of it is there."""
    say(f"fetching {saved.place} ({sized(saved.size)}) to {target}")
    partial = target.with_name(f"{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        names = [*(name for name in saved.place.names() if name != MANIFEST), MANIFEST]
        with Progress(f"fetching {saved.place}", saved.size) as progress:
            for name in names:
                copy_file(saved.place / name, locate(partial / name), saved.files.get(name), progress.advance)
        if json.loads((partial / MANIFEST).read_text()) != saved.manifest:
            raise UserError(f"{saved.place} changed while it was fetched: try again")
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def fetch_to_resume(url: str, folder: Path) -> None:
    """Fetch the newest good checkpoint from the mirror if `folder` holds none.

    If the newest holds only a finished run's weights, the newest full checkpoint before it is fetched as well.
    """
    if step_names(locate(folder)):
        return
    place, rows = locate(url), dict[str, Any]()
    with _named(place):
        every = [look_at(place / name) for name in reversed(step_names(place))]
        for found in every:
            if found.saved is not None:  # they belong to this run from now on, also if it is killed while it fetches
                rows[found.place.base] = {"sha256": digest_of(found.place), "kind": found.saved.kind}
        if every:
            write_record(folder, url, {**read_record(folder, url), **rows})
        for found in every:
            try:
                if found.saved is None:
                    raise found.error
                fetch(_checked(found.saved), folder / found.place.base)
            except UserError as error:
                log.warning("skipping a damaged checkpoint: %s", error)
                continue
            log.info("fetched %s: %s held no checkpoint", found.place, folder)
            if found.saved.kind == "full":
                break


@contextlib.contextmanager
def _named(place: Location) -> Iterator[None]:
    """Turn whatever a file system raises into a `UserError` that names the URL."""
    try:
        yield
    except (UserError, KeyboardInterrupt):
        raise
    except Exception as error:
        raise UserError(f"{place} cannot be read: {type(error).__name__}: {error}") from error
