"""What lies in a folder of checkpoints, told without torch: whole steps, broken ones, and what crashes left behind.

checkpoint/step-100/            whole, or broken (a file is missing or has another size than its manifest says)
checkpoint/step-200.partial/    a save that did not end, or is under way
checkpoint/step-200.damaged/    failed its checksums when a run wanted to resume it
checkpoint/step-300.abandoned/  belongs to steps that were trained again
checkpoint/step-100.replaced/   the older of two saves of one step
checkpoint/step-50.removed/     its removal was cut short
"""

from __future__ import annotations

import json
import math
import re
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from shardline.errors import UserError
from shardline.storage.location import Location
from shardline.storage.progress import say

FORMAT, VERSION = "shardline-checkpoint", 2  # version 1 is still read
MANIFEST = "manifest.json"
LEFTOVERS = {
    "partial": "a save that did not end, or is under way",
    "damaged": "set aside: it failed its checksums",
    "abandoned": "set aside: its steps were trained again",
    "replaced": "the older of two saves of this step",
    "removed": "its removal was cut short",
}
PROGRESS_SECONDS = 5.0
_PLAIN_BYTES = 4 << 20
_LEAST_SHOWN = 1 << 30  # bytes that pass without a word
_ITEM_BYTES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2, "I64": 8, "I32": 4, "U8": 1, "BOOL": 1}


class Problem(NamedTuple):
    """What is wrong with a file; `start` and `end` are the bytes that fail, None where the whole file does."""

    file: str
    what: str
    start: int | None = None
    end: int | None = None

    def __str__(self) -> str:
        where = "" if self.start is None else f"bytes {self.start} to {self.end} "
        return f"{self.file}: {where}{self.what}"


class Tensor(NamedTuple):
    """`pieces` is how many parts of it lie in the files."""

    dtype: str
    shape: tuple[int, ...]
    pieces: int

    @property
    def numbers(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.numbers * _ITEM_BYTES.get(self.dtype, 0)


@dataclass(frozen=True)
class Found:
    """A folder `step-N...`; `manifest` is None where `problem` says why it cannot be read."""

    place: Location
    step: int
    left: str  # "" or one of LEFTOVERS
    manifest: dict[str, Any] | None
    problem: str = ""

    @property
    def files(self) -> dict[str, dict[str, Any]]:
        return {} if self.manifest is None else self.manifest["files"]

    @property
    def size(self) -> int:
        return sum(int(recorded["size"]) for recorded in self.files.values())

    def check(self) -> list[Problem]:
        """What can be seen without reading the files: each must be there, with its size."""
        if self.manifest is None:
            return [Problem(str(self.place / MANIFEST), self.problem)]
        return [problem for name in self.files if (problem := self._check_file(name)) is not None]

    def _check_file(self, name: str) -> Problem | None:
        file, recorded = self.place / name, self.files[name]
        size = file.size()
        if size is None:
            return Problem(str(file), "is missing")
        if size != recorded["size"]:
            return Problem(str(file), f"has {size} bytes, {recorded['size']} were written: it is torn or was changed")
        return None

    def verify(self, advance: Callable[[int], None]) -> list[Problem]:
        """Read every block of every file; `advance` is told how many bytes were read."""
        problems = []
        if self.manifest is None:
            return self.check()
        for name, recorded in self.files.items():
            wrong = self._check_file(name)
            if wrong is not None:
                problems.append(wrong)
                continue
            ranges = failing_blocks(self.place / name, recorded, advance)
            problems += [Problem(str(self.place / name), "fail their checksum", *one) for one in ranges]
        return problems or self._headers()

    def _headers(self) -> list[Problem]:
        """Whether the files hold what the manifest says."""
        try:
            stored = _stored_pieces(self)
        except (OSError, ValueError, KeyError, TypeError) as error:
            return [Problem(str(self.place / MANIFEST), f"does not fit the files: {error}")]
        wrong = [name for name, tensor in self.tensors().items() if stored.get(name) != (tensor.dtype, tensor.numbers)]
        wrong += [name for name in stored if name not in self.tensors()]
        return [Problem(str(self.place / MANIFEST), f"does not fit the files: {wrong[0]}")] if wrong else []

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor by name, from the manifest, or from the files' headers where it has no list of them."""
        assert self.manifest is not None
        if self.manifest.get("tensors"):
            rows = self.manifest["tensors"].items()
            return {name: Tensor(row["dtype"], tuple(row["shape"]), len(row["pieces"])) for name, row in rows}
        found = {}
        for file in self.tensor_files():
            for name, row in read_header(self.place / file).items():
                found[name] = Tensor(row["dtype"], tuple(row["shape"]), 1)
        return found

    def tensor_files(self) -> list[str]:
        return [name for name in self.files if name.endswith(".safetensors")]


def _stored_pieces(found: Found) -> dict[str, tuple[str, int]]:
    """Of each tensor the type and the sum of its pieces' elements, as the files' own headers tell."""
    stored: dict[str, tuple[str, int]] = {}
    for file in found.tensor_files():
        for key, row in read_header(found.place / file).items():
            name = re.sub(r"\[[\d:,]*\]$", "", key)
            dtype, before = stored.get(name, (row["dtype"], 0))
            if dtype != row["dtype"]:
                raise ValueError(f"{name} is {dtype} and {row['dtype']}")
            stored[name] = (dtype, before + math.prod(row["shape"]))
    return stored


def read_header(file: Location) -> dict[str, Any]:
    """The header of a safetensors file: type, shape and place of each tensor."""
    with file.open() as opened:
        header = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
    header.pop("__metadata__", None)
    return dict(header)


def failing_blocks(
    file: Location, recorded: Mapping[str, Any], advance: Callable[[int], None]
) -> Iterator[tuple[int, int]]:
    """(first byte, byte after the last) of what fails its checksum; neighbouring blocks are told as one."""
    start = end = 0
    block_bytes, size = recorded["block_bytes"], recorded["size"]
    blocks = file.blocks(block_bytes)
    for index, expected in enumerate(recorded["crc32"]):
        block = next(blocks, b"")
        advance(len(block))
        if zlib.crc32(block) == expected:
            continue
        if end != index * block_bytes and end > start:
            yield start, end
        if end != index * block_bytes or start == end:
            start = index * block_bytes
        end = min((index + 1) * block_bytes, size)
    if end > start:
        yield start, end


class Unreadable(Exception):
    """What is wrong with a manifest, as what follows its name: `is damaged: it fails its checksum`."""


def parse_manifest(text: str) -> dict[str, Any]:
    """A manifest that is whole, of a version that is readable here, with the keys that every one has."""
    try:
        content = json.loads(text)
        if content["format"] != FORMAT or content["version"] not in (1, VERSION):
            form = f"format {content['format']!r} version {content['version']!r}"
            raise Unreadable(f"has {form}, which is not readable here")
        if content["version"] > 1 and content["crc32"] != manifest_checksum(content):
            raise Unreadable("is damaged: it fails its checksum")
        _ = [(row["size"], row["block_bytes"], row["crc32"]) for row in content["files"].values()]
        _ = content["step"], content["kind"], content["architecture"], content["trainer"]
        return dict(content)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        missing = f"it has no {error}" if isinstance(error, KeyError) else str(error)
        raise Unreadable(f"cannot be read: {missing}") from error


def manifest_checksum(content: Mapping[str, Any]) -> int:
    """Of everything a manifest says: a flipped bit in a number would otherwise be believed."""
    text = json.dumps({key: value for key, value in content.items() if key != "crc32"}, sort_keys=True)
    return zlib.crc32(text.encode())


def checked_blocks(file: Location, recorded: Mapping[str, Any] | None) -> Iterator[bytes]:
    """The file in blocks, each compared with its checksum before it is given; plainly where nothing is recorded."""
    if recorded is None:
        yield from file.blocks(_PLAIN_BYTES)
        return
    size, count = 0, len(recorded["crc32"])
    for index, block in enumerate(file.blocks(recorded["block_bytes"])):
        if index >= count or zlib.crc32(block) != recorded["crc32"][index]:
            raise UserError(f"{file} is damaged: bytes {size} to {size + len(block)} fail their checksum")
        size += len(block)
        yield block
    if size != recorded["size"]:
        raise UserError(f"{file} has {size} bytes, {recorded['size']} were written: it is torn or was changed")


def steps_in(folder: Location) -> list[str]:
    """`step-2`, `step-10`, ... that have a manifest, oldest first."""
    names = [name for name in folder.names() if re.fullmatch(r"step-\d+", name)]
    return sorted((name for name in names if (folder / name / MANIFEST).is_file()), key=lambda name: int(name[5:]))


def find(where: Location) -> tuple[Location, list[Found]]:
    """The folder that `where` means (a run, its checkpoints, one step) and what is in it, oldest step first."""
    if (where / MANIFEST).is_file():
        return where, [describe(where, *_step_of(where.base))]
    for folder in (where / "checkpoint", where):
        names = [name for name in folder.names() if _NAME.fullmatch(name)]
        found = [describe(folder / name, *_step_of(name)) for name in names]
        # a rename that was cut short: what was to be replaced still counts
        found = [replace(o, left="") if o.left == "replaced" and f"step-{o.step}" not in names else o for o in found]
        if found:
            return folder, sorted(found, key=lambda one: (one.step, one.left))
    raise UserError(f"{where} holds no checkpoint" if where.exists() else f"{where} does not exist")


_NAME = re.compile(rf"step-(\d+)(?:\.({'|'.join(LEFTOVERS)}))?")


def _step_of(name: str) -> tuple[int, str]:
    match = _NAME.fullmatch(name)
    return (-1, "") if match is None else (int(match[1]), match[2] or "")


def describe(folder: Location, step: int = -1, left: str = "") -> Found:
    """Read a step folder's manifest."""
    try:
        manifest = parse_manifest((folder / MANIFEST).text())
        if step not in (-1, manifest["step"]):
            raise Unreadable(f"is of step {manifest['step']}")
        return Found(folder, manifest["step"], left, manifest)
    except (FileNotFoundError, NotADirectoryError):
        return Found(folder, step, left, None, "is missing")
    except (OSError, UnicodeDecodeError) as error:
        return Found(folder, step, left, None, f"cannot be read: {error}")
    except Unreadable as error:
        return Found(folder, step, left, None, str(error))


def in_words(size: int) -> str:
    """`1.50 GiB`."""
    for unit, bytes_of_it in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= bytes_of_it:
            return f"{size / bytes_of_it:.2f} {unit}"
    return f"{size} bytes"


class Progress:
    """Says how far a long reading is, every few seconds."""

    def __init__(self, what: str, total: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.what, self.total, self.done, self.clock = what, total, 0, clock
        self.last = clock()

    def advance(self, size: int) -> None:
        self.done += size
        if self.total >= _LEAST_SHOWN and self.clock() - self.last >= PROGRESS_SECONDS:
            self.last = self.clock()
            share = 100 * self.done / self.total
            say(f"{self.what}: {in_words(self.done)} of {in_words(self.total)} ({share:.0f} %)")
