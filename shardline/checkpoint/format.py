"""The checkpoint format on disk: safetensors shards, each written by a rank, and a JSON manifest. No pickle.

    checkpoint/step-200/manifest.json                        format, step, kind, architecture, trainer state, tables
    checkpoint/step-200/shard-00000-of-00004.safetensors     pieces of model/<name> and optimizer/<kind>/<name>

A folder is written as `step-200.partial` and renamed when everything in it is on disk, so a crash leaves either a whole
checkpoint or one that is recognised as broken; `LEFTOVERS` lists the suffixes of such folders. `kind` is "full" (can be
resumed) or "model" (weights only). Names are unfused; the key of a piece that is only part of its tensor includes its
place. The manifest has the checksums of the shards and, at its end, its own. docs/checkpoints.md describes every field.

Nothing here imports torch before a tensor is read: `shardline checkpoint ls` answers at once.
"""

from __future__ import annotations

import functools
import json
import math
import re
import shutil
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from shardline.config.architecture import Architecture, build
from shardline.errors import ConfigError, UserError
from shardline.json_text import parse_json
from shardline.storage.blocks import Advance, Damaged, Problem, check_size, find_damage
from shardline.storage.crash_points import reach
from shardline.storage.location import Location, locate
from shardline.storage.manifest import check_manifest
from shardline.storage.safetensors import Entry, HeaderRow, header_of, name_of_type, write_tensors
from shardline.words import listed

if TYPE_CHECKING:
    from shardline.checkpoint.reader import ShardFiles, TensorView
    from shardline.models.huggingface.files import HFTensors

FORMAT, VERSION = "shardline-checkpoint", 2
MANIFEST = "manifest.json"
LEFTOVERS = {
    "partial": "a save that is under way or was cut short",
    "damaged": "set aside: it failed its checksums",
    "abandoned": "set aside: its steps were trained again",
    "replaced": "the older of two saves of this step",
    "removed": "its removal was cut short",
}
Kind = Literal["full", "model"]
_NAME = re.compile(rf"step-(\d+)(?:\.({'|'.join(LEFTOVERS)}))?")


class TensorSummary(NamedTuple):
    """A tensor as the manifest lists it; `pieces` is the number of pieces in the files."""

    dtype: str
    shape: tuple[int, ...]
    pieces: int

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Saved:
    """A checkpoint whose manifest is good; its tensors are verified when they are read."""

    place: Location
    architecture: Architecture
    manifest: dict[str, Any] = field(repr=False)

    @property
    def path(self) -> Path:
        local = self.place.local
        assert local is not None, f"{self.place} must be fetched before it is read"
        return local

    @property
    def step(self) -> int:
        return self.manifest["step"]

    @property
    def kind(self) -> Kind:
        return self.manifest["kind"]

    @property
    def trainer(self) -> dict[str, Any]:
        return self.manifest["trainer"]

    @property
    def files(self) -> dict[str, dict[str, Any]]:
        return self.manifest["files"]

    @property
    def size(self) -> int:
        return sum(int(recorded["size"]) for recorded in self.files.values())

    # ---- is it whole? ------------------------------------------------------------------------------------------------

    def check_sizes(self) -> list[Problem]:
        """Check that every file exists and has the recorded size; nothing is read."""
        found = (check_size(self.place / name, recorded) for name, recorded in self.files.items())
        return [problem for problem in found if problem is not None]

    def find_damage(self, advance: Advance = int) -> list[Problem]:
        """Read every block of every file, and compare the files' headers with the manifest."""
        files = self.files.items()
        problems = [one for name, recorded in files for one in find_damage(self.place / name, recorded, advance)]
        return problems or self.compare_headers()

    def verify(self) -> None:
        """Raise `Damaged` if any file is not what was written."""
        for problem in self.find_damage():
            raise Damaged(str(problem))

    def compare_headers(self) -> list[Problem]:
        """Compare the tensors of the manifest with those in the files' own headers."""
        stored: dict[str, tuple[str, int]] = {}  # type, elements of all pieces
        try:
            for key, row in self._headers():
                name = re.sub(r"\[[\d:,]*\]$", "", key)
                dtype, before = stored.get(name, (row.dtype, 0))
                if dtype != row.dtype:
                    raise ValueError(f"{name} is {dtype} and {row.dtype}")
                stored[name] = (dtype, before + row.elements)
            listed = {name: (row.dtype, row.elements) for name, row in self.summaries().items()}
            wrong = [name for name in stored.keys() | listed.keys() if stored.get(name) != listed.get(name)]
            if wrong:
                raise ValueError(min(wrong))
        except (OSError, ValueError, KeyError, TypeError) as error:
            return [Problem(str(self.place / MANIFEST), f"does not fit the files: {error}")]
        return []

    def _headers(self) -> Iterator[tuple[str, HeaderRow]]:
        for name in (name for name in self.files if name.endswith(".safetensors")):
            with (self.place / name).open() as file:
                yield from header_of(file, self.files[name]["size"]).items()

    # ---- what is in it -----------------------------------------------------------------------------------------------

    @property
    def is_hf(self) -> bool:
        """Whether this is a Hugging Face folder with a manifest, as the last save of a run may be."""
        return not self.manifest["tensors"]

    def summaries(self) -> dict[str, TensorSummary]:
        """Every tensor by name, from the manifest or, for a Hugging Face folder, from the files' headers."""
        if self.is_hf:
            return {name: TensorSummary(row.dtype, row.shape, 1) for name, row in self._headers()}
        rows = self.manifest["tensors"].items()
        return {name: TensorSummary(row["dtype"], tuple(row["shape"]), len(row["pieces"])) for name, row in rows}

    @functools.cached_property
    def shards(self) -> ShardFiles:
        from shardline.checkpoint.reader import ShardFiles

        return ShardFiles(self.path, self.files, self.manifest["tensors"])

    def tensors(self, prefix: str) -> TensorView:
        from shardline.checkpoint.reader import TensorView

        return TensorView(self.shards, prefix)

    def weights(self) -> TensorView | HFTensors:
        """The model's weights under unfused names, each read when it is asked for."""
        from shardline.models.huggingface.files import read_hf

        return read_hf(self.path, self.architecture) if self.is_hf else self.tensors("model/")


# ---- manifests -------------------------------------------------------------------------------------------------------


def manifest(
    step: int,
    kind: Kind,
    architecture: Architecture,
    trainer: dict[str, Any],
    files: dict[str, Any],
    tensors: dict[str, Any] | None = None,
    world_size: int = 1,
    layout: dict[str, int] | None = None,
) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "version": VERSION,
        "step": step,
        "kind": kind,
        "architecture": architecture.model_dump(mode="json"),
        "trainer": trainer,
        "world_size": world_size,
        "layout": layout,
        "files": files,
        "tensors": tensors or {},
    }


def manifest_text(content: dict[str, Any]) -> str:
    """A manifest as JSON with its checksum: a line for each key, each file and each tensor."""

    def lines(value: dict[str, Any]) -> str:
        return "{\n" + ",\n".join(f"  {json.dumps(key)}: {json.dumps(item)}" for key, item in value.items()) + "\n }"

    rows = [
        f" {json.dumps(key)}: {lines(value) if key in ('files', 'tensors') and value else json.dumps(value)}"
        for key, value in {**content, "crc32": manifest_checksum(content)}.items()
    ]
    return "{\n" + ",\n".join(rows) + "\n}\n"


def manifest_checksum(content: Mapping[str, Any]) -> int:
    """The checksum of everything in a manifest: otherwise a flipped bit in a number would go unnoticed."""
    text = json.dumps({key: value for key, value in content.items() if key != "crc32"}, sort_keys=True)
    return zlib.crc32(text.encode())


class _Unreadable(Exception):
    """What is wrong with a manifest, as a predicate to follow its name: `is damaged: it fails its checksum`."""


def _parse(place: Location) -> Saved:
    try:
        content = parse_json((place / MANIFEST).text())
        if (content["format"], content["version"]) != (FORMAT, VERSION):
            form = f"format {content['format']!r} version {content['version']!r}"
            raise _Unreadable(f"has {form}, but this program reads only version {VERSION}")
        if content["crc32"] != manifest_checksum(content):
            raise _Unreadable("is damaged: it fails its checksum")
        check_manifest(content)
        return Saved(place, build(dict(content["architecture"])), content)
    except (FileNotFoundError, NotADirectoryError):
        raise _Unreadable("is missing") from None
    except ConfigError as error:
        raise _Unreadable(
            f"cannot be read: {str(error).splitlines()[0].replace('model.overrides', 'architecture')}"
        ) from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        missing = f"it has no {error}" if isinstance(error, KeyError) else str(error)
        raise _Unreadable(f"cannot be read: {missing}") from error


# ---- folders of checkpoints ------------------------------------------------------------------------------------------


class Found(NamedTuple):
    """A step's folder as a listing finds it: a checkpoint, or the reason why it is not one."""

    place: Location
    step: int
    leftover: str  # "" or a key of LEFTOVERS
    saved: Saved | None
    problem: str = ""  # what is wrong with its manifest

    def check(self) -> list[Problem]:
        """Find the problems that show without reading files: each must exist and have its size."""
        if self.saved is None:
            return [Problem(str(self.place / MANIFEST), self.problem)]
        return self.saved.check_sizes()

    @property
    def error(self) -> UserError:
        return UserError(f"{self.place / MANIFEST} {self.problem}")


def look_at(place: Location, any_step: bool = False) -> Found:
    """Read the manifest of a step's folder, if possible; its step must be the one in the folder's name."""
    name = _NAME.fullmatch(place.base)
    step, leftover = (-1, "") if name is None else (int(name[1]), name[2] or "")
    try:
        saved = _parse(place)
        if not any_step and step not in (-1, saved.step):
            raise _Unreadable(f"is of step {saved.step}")
        return Found(place, saved.step, leftover, saved)
    except _Unreadable as error:
        return Found(place, step, leftover, None, str(error))


def list_folder(folder: Location | Path, leftovers: bool = False) -> list[Found]:
    """List every step in a folder, oldest first, including broken ones; with `leftovers` also what crashes left."""
    place = folder if isinstance(folder, Location) else locate(folder)
    names, found = set(place.names()), list[Found]()
    for name in (name for text in names if (name := _NAME.fullmatch(text)) is not None):
        # A `.replaced` folder still counts if the rename of its replacement was cut short.
        current = name[2] is None or (name[2] == "replaced" and f"step-{name[1]}" not in names)
        if current or leftovers:
            one = look_at(place / name[0])
            found.append(one._replace(leftover="") if current else one)
    return sorted(found, key=lambda one: (one.step, one.leftover))


def list_checkpoints(folder: Location | Path) -> list[Saved]:
    """Every whole checkpoint under `folder`, oldest first."""
    return [found.saved for found in list_folder(folder) if found.saved is not None]


def find(where: Location) -> tuple[Location, list[Found]]:
    """The folder that `where` means (a run, its checkpoints, one step) and what is in it, leftovers included."""
    if (where / MANIFEST).is_file():
        return where, [look_at(where, any_step=True)]
    for folder in (where / "checkpoint", where):
        found = list_folder(folder, leftovers=True)
        if found:
            return folder, found
    if not where.exists():
        raise UserError(f"{where} does not exist")
    runs = [] if where.local is None else sorted(str(folder.parent) for folder in where.local.glob("*/checkpoint"))
    raise UserError(f"{where} holds no checkpoint" + (f" itself; name a run: {listed(runs, 3)}" if runs else ""))


def find_checkpoint(where: Location | Path, step: int = -1) -> Saved:
    """Find the checkpoint that `where` means: a step's folder, or the newest one (or `step`) of a run."""
    folder, every = find(where if isinstance(where, Location) else locate(where))
    if len(every) == 1 and every[0].place == folder:  # the caller named this folder, even if it was set aside
        every = [every[0]._replace(leftover="")]
    return choose(folder, every, step)


def choose(folder: Location | Path, every: Sequence[Found], step: int = -1) -> Saved:
    """Return the newest checkpoint of a listing, or that of `step`."""
    steps = [found for found in every if not found.leftover]
    fitting = [found for found in steps if step in (-1, found.step)]
    for found in reversed(fitting):
        if found.saved is not None:
            return found.saved
    if fitting:
        raise fitting[-1].error
    wanted = "no checkpoint" if step == -1 else f"no checkpoint of step {step}"
    raise UserError(f"{folder} holds {wanted} (steps there: {', '.join(str(one.step) for one in steps) or 'none'})")


def step_names(folder: Location) -> list[str]:
    """List the folders `step-2`, `step-10`, ... that have a manifest, oldest first; no manifest is read."""
    names = [name for name in folder.names() if re.fullmatch(r"step-\d+", name)]
    return sorted((name for name in names if (folder / name / MANIFEST).is_file()), key=lambda name: int(name[5:]))


def set_aside(saved: Saved, why: str) -> Path:
    """Rename a checkpoint that a run must not use again: `step-8.abandoned`, `step-8.damaged`."""
    aside = saved.path.with_name(f"step-{saved.step}.{why}")
    shutil.rmtree(aside, ignore_errors=True)
    return saved.path.rename(aside)


def prune(folder: Path, keep: int, protected: Collection[int] = ()) -> list[Path]:
    """Remove all but the newest `keep` checkpoints (0: keep all), never `protected` steps or the newest resumable one.

    It also removes leftovers: partial saves, and all but the newest of the damaged and of the abandoned checkpoints.
    """
    reach("before-prune", folder)
    every = list_checkpoints(folder)
    resumable = [saved for saved in every if saved.kind == "full" and not saved.check_sizes()][-1:]
    kept = {saved.path for saved in resumable} | {saved.path for saved in every if saved.step in protected}
    doomed = [saved.path for saved in every[:-keep] if saved.path not in kept] if keep > 0 else []
    for path in (*doomed, *_leftovers(folder)):
        remove(path)
        reach("pruned", path)
    return doomed


def remove(path: Path) -> None:
    """Rename a checkpoint, then remove it: one that a crash leaves half removed must not look like a checkpoint."""
    doomed = path.with_name(f"{path.name.partition('.')[0]}.removed")
    if path != doomed:
        shutil.rmtree(doomed, ignore_errors=True)
        path.rename(doomed)
    reach("removing", doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def _leftovers(folder: Path) -> list[Path]:
    """The leftovers in a folder that pruning removes."""
    found: dict[str, list[tuple[int, Path]]] = {}
    for path in folder.glob("step-*.*"):
        name = _NAME.fullmatch(path.name)
        if name and name[2]:
            found.setdefault(name[2], []).append((int(name[1]), path))
    aside = [path for kind in ("damaged", "abandoned") for _, path in sorted(found.get(kind, []))[:-1]]
    cut_short = [path for kind in ("partial", "removed") for _, path in found.get(kind, [])]
    replaced = [path for step, path in found.get("replaced", []) if (folder / f"step-{step}").exists()]
    return cut_short + replaced + aside


# ---- files -----------------------------------------------------------------------------------------------------------


def shard_name(rank: int, world_size: int) -> str:
    return f"shard-{rank:05d}-of-{world_size:05d}.safetensors"


def write_whole(partial: Path, entries: Sequence[Entry]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Write whole tensors as a single shard; returns the manifest's `files` and `tensors`."""
    name = shard_name(0, 1)
    record = write_tensors(partial / name, entries)
    tensors = {
        entry.name: {
            "dtype": name_of_type(entry.dtype),
            "shape": list(entry.shape),
            "pieces": [[0, *(0 for _ in entry.shape), *entry.shape]],
        }
        for entry in entries
    }
    return {name: record}, tensors
