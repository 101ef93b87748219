"""Reads a checkpoint's tensors, whole or in part: only the file blocks that are needed, each one verified.

    wanted part of a tensor -> pieces that overlap it -> rows of each piece -> bytes of its file -> checksum blocks

A range of columns is cut out of whole rows: the bytes in between are read too, since a checksum covers 4 MiB.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from shardline.checkpoint.shards import Place, place_key, tile, whole_place
from shardline.storage.blocks import Damaged, Record, check_block, check_size, helpers
from shardline.storage.location import locate
from shardline.storage.safetensors import HeaderRow, LazyTensors, name_of_type, read_header, torch_type

CHUNK_BYTES = 32 << 20  # read at a time, so that filling a large tensor takes little additional memory
MOST_OPEN = 64  # files
MOST_KEPT = 16  # blocks of which a part was needed: a neighbouring read may need the rest


class StoredTensor(NamedTuple):
    """A tensor in a checkpoint; `pieces` are file numbers and places that together cover it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: tuple[tuple[int, Place], ...]


BlockCache = dict[tuple[Path, int], memoryview]  # file and block number -> bytes, oldest first


class VerifiedFile:
    """Bytes of a safetensors file, read in whole blocks that are compared with their checksums."""

    def __init__(self, path: Path, recorded: Record, cache: BlockCache | None = None) -> None:
        problem = check_size(locate(path), recorded)
        if problem is not None:
            raise Damaged(str(problem))
        self.path, self.recorded = path, recorded
        self._cache: BlockCache = {} if cache is None else cache
        self._descriptor = os.open(path, os.O_RDONLY)

    def __del__(self) -> None:
        if hasattr(self, "_descriptor"):
            os.close(self._descriptor)

    @functools.cached_property
    def header(self) -> dict[str, HeaderRow]:
        try:
            return read_header(self.read, self.recorded["size"])
        except ValueError as error:
            raise Damaged(f"{self.path} is no safetensors file: {error}") from error

    def read(self, start: int, end: int, into: memoryview | None = None) -> memoryview:
        """Read bytes of the file into `into`, or into new memory."""
        out = np.empty(end - start, dtype=np.uint8).data if into is None else into
        size = self.recorded["block_bytes"]
        whole: list[Future[None]] = []
        for index in range(start // size, -(-end // size)):
            first, last = index * size, min((index + 1) * size, self.recorded["size"])
            low, high = max(first, start), min(last, end)
            target = out[low - start : high - start]
            if (low, high) == (first, last):
                whole.append(helpers().submit(self._fetch, index, target))
            else:
                target[:] = self._block(index, last - first)[low - first : high - first]
        wait(whole)  # for all of them, even if one fails: they write into this memory
        for one in whole:
            one.result()
        return out

    def _block(self, index: int, length: int) -> memoryview:
        """Return a block of which a part is needed; the last ones are cached."""
        block = self._cache.pop((self.path, index), None)
        if block is None:
            block = np.empty(length, dtype=np.uint8).data
            self._fetch(index, block)
        if len(self._cache) >= MOST_KEPT:
            del self._cache[next(iter(self._cache))]
        self._cache[self.path, index] = block
        return block

    def _fetch(self, index: int, into: memoryview) -> None:
        position, rest = index * self.recorded["block_bytes"], into
        while rest:
            count = os.preadv(self._descriptor, [rest], position)
            if not count:
                raise Damaged(f"{self.path} ends at byte {position} of {self.recorded['size']}: it is torn")
            position, rest = position + count, rest[count:]
        check_block(self.path, self.recorded, index, into)


class ShardFiles:
    """The tensors in a checkpoint by their names in its manifest (`model/...`, `optimizer/<kind>/...`)."""

    def __init__(self, folder: Path, files: Mapping[str, Any], tensors: Mapping[str, Any], prefix: str = "") -> None:
        """`files` and `tensors` are the manifest's tables; in the files, names have `prefix` in front."""
        self.folder, self.files, self._prefix = folder, files, prefix
        self._names = list(files)
        self._open: dict[int, VerifiedFile] = {}
        self._cache: BlockCache = {}
        self._chunk = np.empty(0, dtype=np.uint8)
        self._table = tensors
        self._stored: dict[str, StoredTensor] = {}

    def __contains__(self, name: object) -> bool:
        return name in self._table

    def __iter__(self) -> Iterator[str]:
        return iter(self._table)

    def below(self, prefix: str) -> ShardFiles:
        """The tensors whose names begin with `prefix`, by the rest of their names."""
        table = {name.removeprefix(prefix): entry for name, entry in self._table.items() if name.startswith(prefix)}
        return ShardFiles(self.folder, self.files, table, self._prefix + prefix)

    def stored(self, name: str) -> StoredTensor:
        """Return a tensor's manifest entry, after checking that its pieces lie in known files and tile the tensor."""
        if name not in self._stored:
            entry = self._table[name]
            shape, split = tuple(entry["shape"]), 1 + len(entry["shape"])
            rows = entry["pieces"]
            if not all(len(row) == 2 * split - 1 and row[0] < len(self._names) for row in rows):
                raise Damaged(f"{self.folder}/manifest.json: pieces of {name} are in no file or have other dimensions")
            places = [Place(tuple(row[1:split]), tuple(row[split:])) for row in rows]
            if not tile(shape, places):
                raise Damaged(f"{self.folder}/manifest.json: the pieces of {name} do not cover it exactly once")
            files = (row[0] for row in rows)
            self._stored[name] = StoredTensor(torch_type(entry["dtype"]), shape, tuple(zip(files, places, strict=True)))
        return self._stored[name]

    def read(self, name: str, part: tuple[slice, ...] = ()) -> torch.Tensor:
        """Read a tensor, or a part of it, into new memory."""
        stored = self.stored(name)
        wanted = whole_place(stored.shape).part(part)
        out = torch.empty(wanted.size, dtype=stored.dtype)
        for place, block in self.blocks(name, wanted):
            out[place.within(wanted).slices] = block
        return out

    def blocks(self, name: str, wanted: Place) -> Iterator[tuple[Place, torch.Tensor]]:
        """Read what `wanted` covers, some rows at a time, in no particular order; yields their place and the rows.

        Each batch of rows is read into the same memory.
        """
        stored, found = self.stored(name), 0
        for file, held in stored.pieces:
            shared = held.meet(wanted)
            if shared.elements:
                found += shared.elements
                yield from self._rows(name, stored, file, held, shared)
        if found != wanted.elements:
            raise Damaged(f"{self.folder}/manifest.json: the pieces of {name} do not cover it")

    def _rows(
        self, name: str, stored: StoredTensor, number: int, held: Place, shared: Place
    ) -> Iterator[tuple[Place, torch.Tensor]]:
        file, key = self._file(number), place_key(self._prefix + name, stored.shape, held)
        entry = file.header.get(key)
        if entry is None or (entry.shape, entry.dtype) != (held.size, name_of_type(stored.dtype)):
            raise Damaged(f"{file.path} does not hold {key} as {self.folder}/manifest.json says")
        if not stored.shape:
            data = file.read(entry.start, entry.start + stored.dtype.itemsize)
            yield shared, torch.frombuffer(data, dtype=stored.dtype).reshape(())
            return
        row_bytes = stored.dtype.itemsize * held.elements // held.size[0]
        inside, step = shared.within(held), max(1, CHUNK_BYTES // row_bytes)
        first, last = inside.start[0], inside.start[0] + inside.size[0]
        for row in range(first, last, step):
            count = min(step, last - row)
            begin, memory = entry.start + row * row_bytes, self._memory(count * row_bytes)
            data = file.read(begin, begin + count * row_bytes, memory)
            rows = torch.frombuffer(data, dtype=stored.dtype).reshape(count, *held.size[1:])
            place = Place((held.start[0] + row, *shared.start[1:]), (count, *shared.size[1:]))
            yield place, rows[(slice(None), *inside.slices[1:])]

    def _memory(self, size: int) -> memoryview:
        if len(self._chunk) < size:
            self._chunk = np.empty(max(size, min(CHUNK_BYTES, 2 * len(self._chunk))), dtype=np.uint8)
        return self._chunk[:size].data

    def _file(self, number: int) -> VerifiedFile:
        if number not in self._open:
            if len(self._open) >= MOST_OPEN:
                del self._open[next(iter(self._open))]
            name = self._names[number]
            self._open[number] = VerifiedFile(self.folder / name, self.files[name], self._cache)
        return self._open[number]


class TensorView(LazyTensors):
    """The tensors of a checkpoint whose names start with `prefix`, each read and verified when it is asked for."""

    def __init__(self, shards: ShardFiles, prefix: str) -> None:
        self.shards, self.prefix = shards, prefix
        self._rows = {name.removeprefix(prefix): None for name in shards if name.startswith(prefix)}

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.shards.read(self.prefix + name)

    def part(self, name: str, place: tuple[slice, ...]) -> torch.Tensor:
        return self.shards.read(self.prefix + name, place)

    def dtype(self, name: str) -> torch.dtype:
        return self.shards.stored(self.prefix + name).dtype
