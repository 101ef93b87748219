"""`checkpoint.mirror`: copies finished checkpoints to any fsspec URL in the background.

    step-200 renamed --> nudge --> thread: step-200/*.safetensors --> sizes right? --> step-200/manifest.json --> prune

A checkpoint without its manifest does not count, so the manifest goes last when one is copied and first when one is
removed. `mirror.json` beside the checkpoints records what this run has copied: nothing else at the URL is replaced or
removed. A copy that fails is logged once and tried again with the next save; it never stops training.
"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from shardline.checkpoint.format import MANIFEST, Saved, look_at, step_names
from shardline.config.schema import Config
from shardline.errors import UserError, blame
from shardline.json_text import parse_json
from shardline.run.folder import RunFolder
from shardline.run.stop import why_not_saved
from shardline.storage.atomic import read_plain, write_atomically
from shardline.storage.blocks import copy_file
from shardline.storage.location import Location, locate
from shardline.words import listed, sized

log = logging.getLogger("shardline")
RECORD = "mirror.json"
PATIENCE_SECONDS = 10.0  # at the end of the run, how often the wait is logged


class Gone(Exception):
    """The checkpoint was pruned here before it could be copied."""


class Taken(Exception):
    """A checkpoint that this run did not put there has the same name."""


class Mirror:
    """Copies the checkpoints in `folder` to `url` and keeps `keep` of them there (0: all). Only one process uses it."""

    def __init__(self, url: str, folder: Path, keep: int) -> None:
        self.url, self.folder, self.keep = url, folder, keep
        with blame("checkpoint.mirror"):
            self.place = locate(url)
        local = self.place.local
        if local is not None and _overlap(local.resolve(), folder.resolve()):
            raise UserError(f"checkpoint.mirror = {url} overlaps {folder}: use a folder outside the run's")
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._again = self._closed = self._last = False
        self._copying: int | None = None
        self._taken: set[str] = set()
        self._logged = ""

    # ---- from the run ------------------------------------------------------------------------------------------------

    def nudge(self) -> None:
        """Start copying new checkpoints in the background."""
        with self._lock:
            self._again = True
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._run, name="shardline-mirror", daemon=True)
                self._thread.start()

    def protected(self) -> set[int]:
        """Steps that pruning must leave here for now: the one that is being copied."""
        copying = self._copying
        return set() if copying is None else {copying}

    def finish(self, late: Callable[[], str] = str) -> None:
        """Wait for the last copy; one that failed is tried once more.

        `late` returns why the run cannot wait any longer, or "" as long as it can.
        """
        self._last = True
        self.nudge()
        began = logged = time.monotonic()
        while (thread := self._thread) is not None:
            thread.join(0.2)
            if thread.is_alive() and (why := late()):
                return self._give_up(why)
            if time.monotonic() - logged > PATIENCE_SECONDS:
                logged = time.monotonic()
                log.info("copying step %s to %s, %.0f s so far", self._copying, self.url, logged - began)

    def close(self) -> None:
        """Stop copying; a copy that is cut short has no manifest."""
        self._closed = True

    def _give_up(self, why: str) -> None:
        self.close()
        if names := [saved.place.base for saved in self._missing()][::-1]:
            them = "it" if len(names) == 1 else "them"
            text = "%s in %s: not copied to %s %s; the next start of this run copies %s"
            log.warning(text, listed(names), self.folder, self.url, why, them)

    # ---- in the thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._again or self._closed:
                    self._thread = None
                    return
                self._again = False
            try:
                self._sync()
            except BaseException as error:  # training goes on, whatever a file system raises: asyncio.CancelledError
                log.warning("%s: %s; %s", self.url, _reason(error), self._prospect())

    def _prospect(self) -> str:
        return "the run ends without it" if self._last else "the next save tries again"

    def _sync(self) -> None:
        while not self._closed and (saved := self._newest_missing()) is not None:
            began = time.monotonic()
            try:
                self._copy(saved)
            except Gone:
                continue
            except Taken:
                name = saved.place.base
                self._taken.add(name)
                log.warning("%s is not copied: %s belongs to another run", saved.place, self.place / name)
                continue
            except Exception as error:
                line = f"{saved.place} was not copied to {self.url}: {_reason(error)}; {self._prospect()}"
                if not self._last or line != self._logged:  # the last one is tried twice
                    log.warning("%s", line)
                self._logged = line
                return
            finally:
                self._copying = None
            if not self._closed:
                seconds = time.monotonic() - began
                log.info("copied %s to %s (%s, %.1f s)", saved.place.base, self.url, sized(saved.size), seconds)
        if not self._closed:
            self._prune()

    def _missing(self) -> Iterator[Saved]:
        """The checkpoints here that are not copied yet, newest first."""
        copied = read_record(self.folder, self.url)
        here = locate(self.folder)
        for name in (name for name in reversed(step_names(here)) if name not in self._taken):
            saved = look_at(here / name).saved
            if saved is not None and copied.get(name, {}).get("sha256") != digest_of(saved.place):
                yield saved

    def _newest_missing(self) -> Saved | None:
        for saved in self._missing():
            self._copying = saved.step
            if (saved.path / MANIFEST).is_file():  # protected from now on, and not pruned before that
                return saved
        self._copying = None
        return None

    def _copy(self, saved: Saved) -> None:
        name, target = saved.place.base, self.place / saved.place.base
        digest, there, copied = digest_of(saved.place), digest_of(target), read_record(self.folder, self.url)
        if there not in (None, digest) and name not in copied:
            raise Taken
        row = {"sha256": "", "kind": saved.kind}
        write_record(self.folder, self.url, {**copied, name: row})  # a copy that is cut short belongs to this run, too
        if there != digest or look_at(target).check():
            self._copy_files(saved, target)
        if not self._closed:
            write_record(self.folder, self.url, {**copied, name: {**row, "sha256": digest}})

    def _copy_files(self, saved: Saved, target: Location) -> None:
        (target / MANIFEST).remove()
        names = [name for name in saved.place.names() if name != MANIFEST]
        for extra in set(target.names()) - set(names):
            (target / extra).remove()
        target.make_folder()
        for name in (*names, MANIFEST):
            try:
                size = copy_file(saved.place / name, target / name, saved.files.get(name))
            except FileNotFoundError:
                if not saved.place.exists():
                    raise Gone from None
                raise
            self.place.fs.invalidate_cache()
            written = (target / name).size()
            if written != size:
                raise OSError(f"{target / name} has {written} bytes, but {size} were sent")
            if self._closed:
                return

    def _prune(self) -> None:
        """Apply `keep_latest_k` to the mirror, and drop steps after the newest local one: they were trained again.

        A copy that was cut short is removed if its checkpoint no longer exists locally.
        """
        copied = read_record(self.folder, self.url)
        steps = {_step(name): name for name in copied}
        newest = max((_step(name) for name in step_names(locate(self.folder))), default=-1)
        current = sorted(step for step in steps if step <= newest and copied[steps[step]]["sha256"])
        kept = set(current[-self.keep :])
        kept |= set([step for step in current if copied[steps[step]]["kind"] == "full"][-1:])
        for step in sorted(set(steps) - kept):
            gone = self.place / steps[step]
            (gone / MANIFEST).remove()  # first, so that a removal that is cut short leaves no checkpoint
            gone.remove()
            del copied[steps[step]]
            write_record(self.folder, self.url, copied)


def open_mirror(config: Config, run: RunFolder, checked: bool = False) -> Mirror | None:
    """Open the mirror of a run that may save; a new run must find it empty, unless that was `checked` before."""
    section = config.checkpoint
    if why_not_saved(config) is not None or section.mirror is None:
        return None
    mirror = Mirror(section.mirror, run.checkpoint_folder, section.keep_latest_k)
    if not run.resume and not checked:
        check_free(section.mirror)
    return mirror


def check_free(url: str) -> None:
    """Refuse a URL that already holds another run's checkpoints, which would be mixed with the new run's."""
    try:
        with blame("checkpoint.mirror"):
            there = step_names(locate(url))
    except UserError:
        raise
    except Exception as error:
        reason = _reason(error)
        log.warning("checkpoint.mirror = %s cannot be listed now (%s); every save will try to copy there", url, reason)
        return
    if there:
        raise UserError(
            f"checkpoint.mirror = {url} already holds {there[-1]} of another run: continue that run with --resume and"
            " an empty folder, or set another URL for a new run"
        )


def read_record(folder: Path, url: str) -> dict[str, Any]:
    try:
        content = parse_json(read_plain(folder / RECORD))
        return dict(content["steps"]) if content["url"] == url else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def write_record(folder: Path, url: str, steps: dict[str, Any]) -> None:
    write_atomically(folder / RECORD, json.dumps({"url": url, "steps": steps}, indent=1) + "\n")


def digest_of(folder: Location) -> str | None:
    """The SHA-256 of a checkpoint's manifest, which has the checksums of all other files; None if there is none."""
    try:
        with (folder / MANIFEST).open() as file:
            return hashlib.sha256(file.read()).hexdigest()
    except FileNotFoundError:
        return None


def _step(name: str) -> int:
    return int(name.removeprefix("step-"))


def _overlap(a: Path, b: Path) -> bool:
    return a == b or a in b.parents or b in a.parents


def _reason(error: BaseException) -> str:
    text = str(error) or type(error).__name__
    return (error.strerror or text) if isinstance(error, OSError) else text
