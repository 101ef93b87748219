"""One safetensors file, written tensor by tensor with checksums, and verified block by block.

Written by hand so that no second copy of the state exists while it is saved: each tensor goes to the host alone.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch

from shardline.errors import UserError
from shardline.models.overflow import Converter

BLOCK_BYTES = 8 << 20
_TYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
TYPES = {name: dtype for dtype, name in _TYPE_NAMES.items()}


class Entry(NamedTuple):
    """A tensor to write: `read` is called when its turn comes, so only one copy exists at a time."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], torch.Tensor]


class _ChecksumWriter:
    """Writes through to a file and keeps one CRC32 per block of `BLOCK_BYTES`."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.size, self.checksums, self._current = file, 0, list[int](), 0

    def write(self, data: memoryview) -> None:
        while data:
            room = BLOCK_BYTES - self.size % BLOCK_BYTES
            piece, data = data[:room], data[room:]
            self.file.write(piece)
            self._current = zlib.crc32(piece, self._current)
            self.size += len(piece)
            if self.size % BLOCK_BYTES == 0:
                self.checksums.append(self._current)
                self._current = 0

    def finish(self) -> list[int]:
        if self.size % BLOCK_BYTES:
            self.checksums.append(self._current)
        return self.checksums


def write_tensors(path: Path, entries: Sequence[Entry]) -> dict[str, Any]:
    """Write every entry in its `dtype` and fsync; returns what a manifest records of the file."""
    header: dict[str, Any] = {}
    offset = 0
    for entry in entries:
        size = math.prod(entry.shape) * entry.dtype.itemsize
        header[entry.name] = {
            "dtype": _TYPE_NAMES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [offset, offset + size],
        }
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        writer = _ChecksumWriter(file)
        writer.write(memoryview(len(text).to_bytes(8, "little") + text))
        convert = Converter()
        for entry in entries:
            writer.write(_bytes(convert(entry.name, entry.read(), entry.dtype)))
        file.flush()
        os.fsync(file.fileno())
    convert.warn()
    return {"size": writer.size, "block_bytes": BLOCK_BYTES, "crc32": writer.finish()}


def describe_file(path: Path) -> dict[str, Any]:
    """What a manifest records of a file that something else wrote; makes the file durable."""
    checksums, size = [], 0
    with open(path, "rb") as file:
        while block := file.read(BLOCK_BYTES):
            checksums.append(zlib.crc32(block))
            size += len(block)
        os.fsync(file.fileno())
    return {"size": size, "block_bytes": BLOCK_BYTES, "crc32": checksums}


def verify_file(path: Path, recorded: Mapping[str, Any]) -> None:
    """Compare size and every block's checksum with what was recorded when the file was written."""
    if not path.is_file():
        raise UserError(f"{path} is missing")
    if path.stat().st_size != recorded["size"]:
        raise UserError(
            f"{path} has {path.stat().st_size} bytes, {recorded['size']} were written: it is torn or was changed"
        )
    with open(path, "rb") as file:
        for index, expected in enumerate(recorded["crc32"]):
            if zlib.crc32(file.read(recorded["block_bytes"])) != expected:
                start = index * recorded["block_bytes"]
                raise UserError(
                    f"{path} is damaged: bytes {start} to {start + recorded['block_bytes']} fail their checksum"
                )


def _bytes(tensor: torch.Tensor) -> memoryview:
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")
