"""Files with checksums: one CRC32 for each block, so that a part of a file can be verified without reading the rest.

A manifest records a file as `{"size": bytes, "block_bytes": 4194304, "crc32": [checksum of each block]}`. Torch-free.
"""

from __future__ import annotations

import functools
import os
import zlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from shardline.errors import UserError
from shardline.storage.atomic import plain_file
from shardline.storage.location import Location

BLOCK_BYTES = 4 << 20
Record = Mapping[str, Any]
Advance = Callable[[int], object]  # called with the number of bytes that were read


class Damaged(UserError):
    """A file is not what was written."""


class Problem(NamedTuple):
    """What is wrong with a file. `start` and `end` delimit the bytes that fail; None means the whole file."""

    file: str
    what: str
    start: int | None = None
    end: int | None = None

    def __str__(self) -> str:
        where = "" if self.start is None else f"is damaged: bytes {self.start} to {self.end} "
        return f"{self.file} {where}{self.what}"


@functools.cache
def helpers() -> ThreadPoolExecutor:
    """Threads for checksums and reads, which release the GIL."""
    return ThreadPoolExecutor(min(4, os.cpu_count() or 1), thread_name_prefix="shardline-blocks")


class BlockWriter:
    """Writes a new file and computes its checksums; threads compute those of whole blocks while the file is written."""

    def __init__(self, path: Path, block_bytes: int | None = None) -> None:
        self.file = open(path, "wb", opener=plain_file)  # noqa: SIM115
        self.block_bytes, self.size = block_bytes or BLOCK_BYTES, 0
        self._checksums: list[int] = []
        self._begun = 0  # the checksum so far of the last, unfinished block

    def __enter__(self) -> BlockWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        self.file.close()

    def write(self, data: memoryview) -> None:
        """Append bytes; the caller may reuse their memory when this returns."""
        whole: list[Future[int]] = []
        while data:
            piece = data[: self.block_bytes - self.size % self.block_bytes]
            data = data[len(piece) :]
            self.size += len(piece)
            if len(piece) == self.block_bytes:
                whole.append(helpers().submit(zlib.crc32, piece))
            else:
                self._checksums += [checksum.result() for checksum in whole]
                whole = []
                self._begun = zlib.crc32(piece, self._begun)
                if self.size % self.block_bytes == 0:
                    self._end_block()
            self.file.write(piece)
        self._checksums += [checksum.result() for checksum in whole]

    def finish(self) -> dict[str, Any]:
        """Make the file durable and return its record."""
        self.file.flush()
        os.fsync(self.file.fileno())
        if self.size % self.block_bytes:
            self._end_block()
        return {"size": self.size, "block_bytes": self.block_bytes, "crc32": self._checksums}

    def _end_block(self) -> None:
        self._checksums.append(self._begun)
        self._begun = 0


def record_file(path: Path) -> dict[str, Any]:
    """Compute the record of a file written elsewhere, and make the file durable."""
    with path.open("rb") as file:
        checksums = [zlib.crc32(block) for block in iter(functools.partial(file.read, BLOCK_BYTES), b"")]
        os.fsync(file.fileno())
        return {"size": file.tell(), "block_bytes": BLOCK_BYTES, "crc32": checksums}


def check_size(file: Location, recorded: Record) -> Problem | None:
    """Check without reading that the file exists and has the size it was written with."""
    size = file.size()
    return Problem(str(file), "is missing") if size is None else _compare_sizes(file, recorded, size)


def _compare_sizes(file: Location, recorded: Record, size: int) -> Problem | None:
    if size == recorded["size"]:
        return None
    return Problem(str(file), f"has {size} bytes, but {recorded['size']} were written: it is torn or was changed")


def check_block(file: Location | Path, recorded: Record, index: int, block: Any) -> None:
    """Compare one block of the file with its checksum."""
    if zlib.crc32(block) != recorded["crc32"][index]:
        start = index * recorded["block_bytes"]
        end = min(start + recorded["block_bytes"], recorded["size"])
        raise Damaged(str(Problem(str(file), "fail their checksum", start, end)))


def checked_blocks(file: Location, recorded: Record | None) -> Iterator[bytes]:
    """Yield a file block by block, each verified against the record if there is one."""
    size = 0
    for index, block in enumerate(file.blocks(BLOCK_BYTES if recorded is None else recorded["block_bytes"])):
        if recorded is not None and index < len(recorded["crc32"]):
            check_block(file, recorded, index, block)
        size += len(block)
        yield block
    problem = None if recorded is None else _compare_sizes(file, recorded, size)
    if problem is not None:
        raise Damaged(str(problem))


def copy_file(source: Location, target: Location, recorded: Record | None, advance: Advance = int) -> int:
    """Copy a file, verifying each block if there is a record; returns the size. A local copy is made durable."""
    size = 0
    with target.open("wb") as file:
        for block in checked_blocks(source, recorded):
            file.write(block)
            size += len(block)
            advance(len(block))
        if target.local is not None:
            file.flush()
            os.fsync(file.fileno())
    return size


def find_damage(file: Location, recorded: Record, advance: Advance = int) -> list[Problem]:
    """Read a whole file and return every range of bytes that fails; neighbouring blocks form one range."""
    wrong = check_size(file, recorded)
    if wrong is not None:
        return [wrong]
    block_bytes, ranges = recorded["block_bytes"], list[list[int]]()
    blocks = file.blocks(block_bytes)
    for index, expected in enumerate(recorded["crc32"]):
        block, start = next(blocks, b""), index * block_bytes
        advance(len(block))
        if zlib.crc32(block) != expected:
            if not ranges or ranges[-1][1] != start:
                ranges.append([start, start])
            ranges[-1][1] = min(start + block_bytes, recorded["size"])
    return [Problem(str(file), "fail their checksum", start, end) for start, end in ranges]
