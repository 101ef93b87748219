"""Safetensors files: reads their header, and writes tensors one after another with checksums.

    8 bytes: length of the header | header, JSON: name -> dtype, shape, data_offsets | bytes of the tensors

This module writes files itself so that no second copy of the state exists during a save: tensors are copied to the host
one at a time. Torch is imported only where tensors are handled, so that listing a checkpoint does not wait for it.
"""

from __future__ import annotations

import abc
import functools
import json
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

from shardline.errors import UserError
from shardline.json_text import parse_json
from shardline.storage.blocks import BlockWriter
from shardline.storage.crash_points import reach
from shardline.words import listed

if TYPE_CHECKING:
    import torch

log = logging.getLogger("shardline")
TYPES = {  # the format's name -> torch's name, bytes of an element
    "F64": ("float64", 8),
    "F32": ("float32", 4),
    "BF16": ("bfloat16", 2),
    "F16": ("float16", 2),
    "I64": ("int64", 8),
    "I32": ("int32", 4),
    "U8": ("uint8", 1),
    "I8": ("int8", 1),
    "BOOL": ("bool", 1),
}
_NAMES = {torch_name: name for name, (torch_name, _) in TYPES.items()}


def torch_type(type_name: str) -> torch.dtype:
    import torch

    found: torch.dtype = getattr(torch, TYPES[type_name][0])
    return found


def name_of_type(dtype: torch.dtype) -> str | None:
    """The format's name of a type, `F32` for torch.float32; None for a type that cannot be stored."""
    return _NAMES.get(str(dtype).removeprefix("torch."))


class HeaderRow(NamedTuple):
    """A tensor in a file: its type, its shape and where its bytes begin in the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


def read_header(read: Callable[[int, int], bytes | memoryview], size: int) -> dict[str, HeaderRow]:
    """Parse the header of a file of `size` bytes, which `read(start, end)` reads; ValueError if it is invalid."""
    length = int.from_bytes(read(0, min(8, size)), "little")
    if not 2 <= length <= size - 8:
        raise ValueError(f"its header would have {length} bytes, but the file has {size}")
    rows = parse_json(bytes(read(8, 8 + length)))
    if not isinstance(rows, dict):
        raise ValueError("its header is not a table of tensors")
    header: dict[str, HeaderRow] = {}
    ranges: list[tuple[int, int]] = []
    for name, row in rows.items():
        if name == "__metadata__":
            continue
        try:
            first, last = row["data_offsets"]
            header[name] = entry = HeaderRow(row["dtype"], tuple(row["shape"]), 8 + length + first)
            wanted = entry.elements * TYPES[entry.dtype][1] if entry.dtype in TYPES else last - first
            if not all(type(number) is int and number >= 0 for number in (first, last, *entry.shape)):
                raise ValueError
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"its header does not describe {name}") from error
        if not 0 <= first <= last <= size - 8 - length or wanted != last - first:
            raise ValueError(f"bytes {first} to {last} of its data cannot be {name}, {entry.dtype} {list(entry.shape)}")
        ranges.append((first, last))
    _check_ranges(sorted(ranges), size - 8 - length)
    return header


def _check_ranges(ranges: Sequence[tuple[int, int]], size: int) -> None:
    """Check that every byte of data belongs to one tensor: tensors that share bytes would load without an error."""
    end = 0
    for first, last in ranges:
        if first != end:
            raise ValueError(f"its tensors {'overlap' if first < end else 'leave a hole'} at byte {min(first, end)}")
        end = last
    if end != size:
        raise ValueError(f"its last {size - end} bytes belong to no tensor")


def header_of(file: BinaryIO, size: int) -> dict[str, HeaderRow]:
    """Read the header of a file that has just been opened."""
    return read_header(lambda start, end: file.read(end - start), size)


class LazyTensors(Mapping[str, "torch.Tensor"]):
    """Tensors by name, each read when it is asked for; `_rows` has what is known of each before it is read."""

    _rows: dict[str, Any]

    @abc.abstractmethod
    def dtype(self, name: str) -> torch.dtype:
        """The type a tensor is stored in, without reading it."""

    def part(self, name: str, place: tuple[slice, ...]) -> torch.Tensor:
        """A part of a tensor; subclasses that can read it alone do so."""
        return self[name][place]

    def __contains__(self, name: object) -> bool:
        return name in self._rows  # the method of Mapping would read the tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)


class Entry(NamedTuple):
    """A tensor to write. `read` is called when its turn comes, so that only one copy exists at a time.

    It returns the tensor, or yields some of its rows at a time; the next rows may overwrite those yielded before.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], torch.Tensor | Iterable[torch.Tensor]]
    read_part: Callable[[tuple[slice, ...]], torch.Tensor] | None = None  # reads only a part, if possible

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def part(self, rows: slice) -> torch.Tensor:
        """Read some rows of a tensor that `read` returns whole."""
        if self.read_part is not None:
            return self.read_part((rows,))
        whole: Any = self.read()
        part: torch.Tensor = whole[rows]
        return part


def entries_from(tensors: LazyTensors, shapes: Mapping[str, tuple[int, ...]], prefix: str = "") -> list[Entry]:
    """Entries for `shapes`, read lazily, in the type they are stored in."""
    read, part = tensors.__getitem__, tensors.part
    return [
        Entry(prefix + name, shape, tensors.dtype(name), functools.partial(read, name), functools.partial(part, name))
        for name, shape in shapes.items()
    ]


def write_tensors(path: Path, entries: Sequence[Entry], convert: Converter | None = None) -> dict[str, Any]:
    """Write `entries` in this order, make the file durable and return its record for the manifest.

    A caller that writes several files passes one `Converter` for all of them, and calls its `warn` at the end.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for entry in entries:
        if name_of_type(entry.dtype) is None:
            raise UserError(f"{path}: {entry.name} is {entry.dtype}, a type that a checkpoint cannot hold")
        row = {"dtype": name_of_type(entry.dtype), "shape": entry.shape, "data_offsets": [offset, offset + entry.bytes]}
        header[entry.name] = row
        offset += entry.bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with BlockWriter(path) as writer:
        reach("shard-opened", path)
        writer.write(memoryview(len(text).to_bytes(8, "little") + text))
        converter = convert or Converter()
        for entry in entries:
            _write_entry(writer, entry, converter)
            reach("tensor-written", path)
        writer.file.flush()
        reach("shard-written", path)
        record = writer.finish()
    reach("shard-synced", path)
    if convert is None:
        converter.warn()
    return record


def _write_entry(writer: BlockWriter, entry: Entry, convert: Converter) -> None:
    """Write one tensor; a function of its own, so that the tensor is freed before the next one is read."""
    import torch

    read, end = entry.read(), writer.size + entry.bytes
    for rows in (read,) if isinstance(read, torch.Tensor) else read:
        flat = convert(entry.name, rows, entry.dtype).detach().to("cpu").contiguous().reshape(-1)
        writer.write(flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b""))
    if writer.size != end:  # every tensor after it would be read from the wrong place
        raise RuntimeError(f"{entry.name} has {writer.size - end:+,} bytes beside the {entry.bytes:,} of its header")


class Converter:
    """Converts tensors to the type they are written in and notices values that float16 cannot hold."""

    def __init__(self) -> None:
        self.seen: set[str] = set()
        self.overflowed: dict[str, None] = {}

    def __call__(self, name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        self.seen.add(name)  # a set: a large tensor may come some rows at a time
        out = tensor.to(dtype)
        if name_of_type(dtype) == "F16" and tensor.dtype != dtype and bool((out.isinf() & ~tensor.isinf()).any()):
            self.overflowed[name] = None
        return out

    def warn(self) -> None:
        """Log one line about all tensors whose values became infinite."""
        if self.overflowed:
            log.warning(
                "%d of %d tensors have values beyond float16's largest, 65504, which became inf: %s;"
                " bfloat16 and float32 can hold them",
                len(self.overflowed),
                len(self.seen),
                listed(list(self.overflowed), 3),
            )
