"""One safetensors file, written tensor by tensor with checksums, and verified block by block.

Written by hand so that no second copy of the state exists while it is saved: each tensor goes to the host alone.
"""

from __future__ import annotations

import functools
import json
import math
import os
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch

from shardline.errors import UserError
from shardline.storage.crash_points import reach
from shardline.storage.overflow import Converter

BLOCK_BYTES = 4 << 20
TYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
TYPES = {name: dtype for dtype, name in TYPE_NAMES.items()}


class Damaged(UserError):
    """A file is not what was written."""


class Entry(NamedTuple):
    """A tensor to write: `read` is called when its turn comes, so only one copy exists at a time.

    It gives the tensor, or some rows after the other; what it gave may be overwritten when the next is asked for.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], torch.Tensor | Iterable[torch.Tensor]]


@functools.cache
def helpers() -> ThreadPoolExecutor:
    """Threads for checksums and reads, which do not hold Python up."""
    return ThreadPoolExecutor(min(4, os.cpu_count() or 1), thread_name_prefix="shardline-blocks")


class _ChecksumWriter:
    """Writes through to a file and keeps one CRC32 per block of `BLOCK_BYTES`, computed beside the writing."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.size = file, 0
        self._whole: list[Future[int]] = []
        self._checksums: list[int] = []
        self._begun = 0  # checksum of what is written of the last block

    def write(self, data: memoryview) -> None:
        while data:
            room = BLOCK_BYTES - self.size % BLOCK_BYTES
            piece, data = data[:room], data[room:]
            self.size += len(piece)
            if self.size % BLOCK_BYTES == 0:
                self._whole.append(helpers().submit(zlib.crc32, piece, self._begun))
                self._begun = 0
            else:
                self._begun = zlib.crc32(piece, self._begun)
            self.file.write(piece)

    def settle(self) -> None:
        """What was given to `write` is no longer needed."""
        self._checksums += [one.result() for one in self._whole]
        self._whole = []

    def finish(self) -> list[int]:
        self.settle()
        return self._checksums + ([self._begun] if self.size % BLOCK_BYTES else [])


def write_tensors(path: Path, entries: Sequence[Entry]) -> dict[str, Any]:
    """Write `entries` in this order and make the file durable; returns what a manifest records of it."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for entry in entries:
        size = math.prod(entry.shape) * entry.dtype.itemsize
        header[entry.name] = {
            "dtype": TYPE_NAMES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [offset, offset + size],
        }
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        reach("shard-opened", path)
        writer = _ChecksumWriter(file)
        writer.write(memoryview(len(text).to_bytes(8, "little") + text))
        convert = Converter()
        for entry in entries:
            _write_entry(writer, entry, convert)
            reach("tensor-written", path)
        file.flush()
        reach("shard-written", path)
        os.fsync(file.fileno())
    reach("shard-synced", path)
    convert.warn()
    return {"size": writer.size, "block_bytes": BLOCK_BYTES, "crc32": writer.finish()}


def _write_entry(writer: _ChecksumWriter, entry: Entry, convert: Converter) -> None:
    """A function of its own, so that nothing of this tensor is held when the next is read."""
    read = entry.read()
    for rows in (read,) if isinstance(read, torch.Tensor) else read:
        writer.write(_bytes(convert(entry.name, rows, entry.dtype)))
        writer.settle()


def describe_file(path: Path) -> dict[str, Any]:
    """What a manifest records of a file that something else wrote; makes the file durable."""
    checksums, size = [], 0
    with open(path, "rb") as file:
        while block := file.read(BLOCK_BYTES):
            checksums.append(zlib.crc32(block))
            size += len(block)
        os.fsync(file.fileno())
    return {"size": size, "block_bytes": BLOCK_BYTES, "crc32": checksums}


def check_size(path: Path, recorded: Mapping[str, Any]) -> None:
    """What can be seen without reading: the file is there, with the size that was recorded when it was written."""
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        raise Damaged(f"{path} is missing") from None
    if size != recorded["size"]:
        raise Damaged(f"{path} has {size} bytes, {recorded['size']} were written: it is torn or was changed")


def check_block(path: Path, recorded: Mapping[str, Any], index: int, block: Any) -> None:
    """Compare a block, read from the file, with its checksum."""
    if zlib.crc32(block) != recorded["crc32"][index]:
        start = index * recorded["block_bytes"]
        end = min(start + recorded["block_bytes"], recorded["size"])
        raise Damaged(f"{path} is damaged: bytes {start} to {end} fail their checksum")


def verify_file(path: Path, recorded: Mapping[str, Any]) -> None:
    """Compare size and every block's checksum with what was recorded when the file was written."""
    check_size(path, recorded)
    with open(path, "rb") as file:
        for index in range(len(recorded["crc32"])):
            check_block(path, recorded, index, file.read(recorded["block_bytes"]))


def _bytes(tensor: torch.Tensor) -> memoryview:
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")
