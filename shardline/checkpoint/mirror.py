"""`checkpoint.mirror`: finished checkpoints copied to any fsspec URL, behind the run's back, and fetched from there.

    step-200 renamed --> nudge --> thread: step-200/*.safetensors --> sizes right? --> step-200/manifest.json --> prune

A checkpoint without its manifest does not count, so the manifest goes last when one is copied and first when one is
removed. What this run has copied is written down in `mirror.json` beside the checkpoints: nothing else is replaced or
removed there. A copy that fails is said once and tried again with the next save; it never stops the training.
"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
import time
from pathlib import Path
from typing import Any

from shardline.checkpoint.folders import MANIFEST, Found, checked_blocks, describe, in_words, steps_in
from shardline.config.schema import Config
from shardline.errors import UserError, blame
from shardline.run.folder import RunFolder
from shardline.storage.location import Location, locate

log = logging.getLogger("shardline")
RECORD = "mirror.json"
PATIENCE_SECONDS = 10.0  # at the end, before the wait is spoken of


class Gone(Exception):
    """The checkpoint was pruned here before it could be copied."""


class Taken(Exception):
    """A checkpoint that this run did not put there has the same name."""


class Mirror:
    """Copies the checkpoints in `folder` to `url` and keeps `keep` of them there (0: all). One process uses it."""

    def __init__(self, url: str, folder: Path, keep: int) -> None:
        self.url, self.folder, self.keep = url, folder, keep
        with blame("checkpoint.mirror"):
            self.place = locate(url)
        local = self.place.local
        if local is not None and _overlap(local.resolve(), folder.resolve()):
            raise UserError(f"checkpoint.mirror = {url} overlaps {folder}: name a folder apart from the run's")
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._again = self._closed = self._last = False
        self._copying: int | None = None
        self._taken: set[str] = set()
        self._said = ""

    # ---- from the run ------------------------------------------------------------------------------------------------

    def nudge(self) -> None:
        """There is something new to copy."""
        with self._lock:
            self._again = True
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._run, name="shardline-mirror", daemon=True)
                self._thread.start()

    def protected(self) -> set[int]:
        """Steps that pruning must leave here for now: the one that is being copied."""
        copying = self._copying
        return set() if copying is None else {copying}

    def finish(self) -> None:
        """Wait for the last copy; one that had failed is tried once more."""
        self._last = True
        self.nudge()
        began = told = time.monotonic()
        while (thread := self._thread) is not None:
            thread.join(0.2)
            if time.monotonic() - told > PATIENCE_SECONDS:
                told = time.monotonic()
                log.info("copying step %s to %s, %.0f s so far", self._copying, self.url, told - began)

    def close(self) -> None:
        """Copy nothing more; what is half there has no manifest."""
        self._closed = True

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
            except Exception as error:  # whatever a file system raises: training goes on
                log.warning("%s: %s; %s", self.url, _words(error), self._prospect())

    def _prospect(self) -> str:
        return "the run ends without it" if self._last else "tried again with the next save"

    def _sync(self) -> None:
        while not self._closed and (found := self._newest_missing()) is not None:
            began = time.monotonic()
            try:
                self._copy(found)
            except Gone:
                continue
            except Taken:
                self._taken.add(found.place.base)
                log.warning(
                    "%s is not copied: %s is another run's, and left alone", found.place, self.place / found.place.base
                )
                continue
            except Exception as error:
                line = f"{found.place} was not copied to {self.url}: {_words(error)}; {self._prospect()}"
                if not self._last or line != self._said:  # the last one is tried twice
                    log.warning("%s", line)
                self._said = line
                return
            finally:
                self._copying = None
            if not self._closed:
                seconds = time.monotonic() - began
                log.info("copied %s to %s (%s, %.1f s)", found.place.base, self.url, in_words(found.size), seconds)
        if not self._closed:
            self._prune()

    def _newest_missing(self) -> Found | None:
        copied = self._record()
        here = locate(self.folder)
        for name in (name for name in reversed(steps_in(here)) if name not in self._taken):
            found = describe(here / name)
            if found.manifest is None or copied.get(name, {}).get("sha256") == _digest(found.place):
                continue
            self._copying = found.step
            if (self.folder / name / MANIFEST).is_file():  # it is protected from now on, and was not pruned before
                return found
        self._copying = None
        return None

    def _copy(self, found: Found) -> None:
        name, target = found.place.base, self.place / found.place.base
        digest, there, copied = _digest(found.place), _digest(target), self._record()
        if there not in (None, digest) and name not in copied:
            raise Taken
        row = {"sha256": "", "kind": found.manifest and found.manifest["kind"]}
        self._write_record({**copied, name: row})  # what is half there is ours, too
        if there != digest or describe(target).check():
            self._copy_files(found, target)
        if not self._closed:
            self._write_record({**copied, name: {**row, "sha256": digest}})

    def _copy_files(self, found: Found, target: Location) -> None:
        (target / MANIFEST).remove()
        names = [name for name in found.place.names() if name != MANIFEST]
        for extra in set(target.names()) - set(names):
            (target / extra).remove()
        target.make_folder()
        for name in (*names, MANIFEST):
            try:
                size = copy_file(found.place / name, target / name, found.files.get(name))
            except FileNotFoundError:
                if not found.place.exists():
                    raise Gone from None
                raise
            self.place.fs.invalidate_cache()
            written = (target / name).size()
            if written != size:
                raise OSError(f"{target / name} has {written} bytes there, {size} were sent")
            if self._closed:
                return

    def _prune(self) -> None:
        """Keep there what `keep_latest_k` keeps here; steps after the newest here were trained again.

        What was not copied to its end, and is not here any more, goes.
        """
        copied = self._record()
        steps = {_step(name): name for name in copied}
        newest = max((_step(name) for name in steps_in(locate(self.folder))), default=-1)
        current = sorted(step for step in steps if step <= newest and copied[steps[step]]["sha256"])
        kept = set(current[-self.keep :])
        kept |= set([step for step in current if copied[steps[step]]["kind"] == "full"][-1:])
        for step in sorted(set(steps) - kept):
            remove_checkpoint(self.place / steps[step])
            del copied[steps[step]]
            self._write_record(copied)

    # ---- what this run has copied ------------------------------------------------------------------------------------

    def _record(self) -> dict[str, Any]:
        return read_record(self.folder, self.url)

    def _write_record(self, steps: dict[str, Any]) -> None:
        write_record(self.folder, self.url, steps)


def open_mirror(config: Config, run: RunFolder) -> Mirror | None:
    """The mirror of a run that may save; a new run must find it empty."""
    section = config.checkpoint
    if not section.enable or section.load_only or section.mirror is None:
        return None
    mirror = Mirror(section.mirror, run.checkpoint_folder, section.keep_latest_k)
    if not run.resume:
        for line in check_free(section.mirror):
            log.info("%s", line)
    return mirror


def check_free(url: str) -> list[str]:
    """For a new run: checkpoints of another one there would be mixed with its own. What is to be said, if anything.

    A file system that does not answer now may do so at the first save.
    """
    try:
        with blame("checkpoint.mirror"):
            there = steps_in(locate(url))
    except UserError:
        raise
    except Exception as error:
        return [f"checkpoint.mirror = {url} cannot be listed now ({_words(error)}); saves are copied if it can be"]
    if there:
        raise UserError(
            f"checkpoint.mirror = {url} already holds {there[-1]} of another run: --resume into an empty folder goes on"
            " from it; a new run needs a URL of its own"
        )
    return []


def read_record(folder: Path, url: str) -> dict[str, Any]:
    try:
        content = json.loads((folder / RECORD).read_text())
        return dict(content["steps"]) if content["url"] == url else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def write_record(folder: Path, url: str, steps: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f".{RECORD}"
    partial.write_text(json.dumps({"url": url, "steps": steps}, indent=1) + "\n")
    partial.replace(folder / RECORD)


def remove_checkpoint(folder: Location) -> None:
    """The manifest first: what is left of a removal that was cut short does not look like a checkpoint."""
    (folder / MANIFEST).remove()
    folder.remove()


def copy_file(source: Location, target: Location, recorded: dict[str, Any] | None) -> int:
    """Copy, comparing each block with its checksum where there is one; the number of bytes."""
    size = 0
    with target.open("wb") as file:
        for block in checked_blocks(source, recorded):
            file.write(block)
            size += len(block)
    return size


def _digest(folder: Location) -> str | None:
    try:
        with (folder / MANIFEST).open() as file:
            return hashlib.sha256(file.read()).hexdigest()
    except FileNotFoundError:
        return None


def _step(name: str) -> int:
    return int(name.removeprefix("step-"))


def _overlap(a: Path, b: Path) -> bool:
    return a == b or a in b.parents or b in a.parents


def _words(error: Exception) -> str:
    text = str(error) or type(error).__name__
    return (error.strerror or text) if isinstance(error, OSError) else text
