"""The token store: all documents as one long row of token ids on disk, read through memory maps.

FOLDER/store.json          contents, sizes and checksums; written last, so a folder with it is complete
FOLDER/part-00000.tokens   token ids, uint16 or uint32, little endian
FOLDER/part-00000.ends     where documents end: int64, counted in tokens from the start of the part
FOLDER/part-00000.trained  of records: one bit per token, the first in the highest bit of a byte; 1 where it is trained
"""

from __future__ import annotations

import bisect
import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from shardline.data.tokenizer import Tokenizer
from shardline.errors import UserError
from shardline.storage.blocks import check_size, find_damage
from shardline.storage.location import locate

FORMAT = "shardline token store"
VERSION = 1
BLOCK_BYTES = 8 * 2**20
AGAIN = "prepare it again (--overwrite, or delete the folder first)"
END_TYPE = np.dtype("<i8")


@dataclass
class StorePart:
    """One pair of files: the number of tokens and document ends in them, and the CRC-32 of each block."""

    name: str
    tokens: int
    documents: int
    token_checksums: list[int] = field(default_factory=list)
    end_checksums: list[int] = field(default_factory=list)
    trained_checksums: list[int] | None = None  # None: every token is trained, and there is no file


class TokenStore:
    """A row of tokens with document ends, from a folder (`open`) or from memory (`from_arrays`)."""

    def __init__(self, folder: Path | None, dtype: str, parts: list[StorePart], manifest: dict[str, Any]) -> None:
        self.folder = folder
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self.parts = parts
        self.manifest = manifest
        self.tokens = sum(part.tokens for part in parts)
        self.documents = sum(part.documents for part in parts)
        self.source_fingerprint = str(manifest.get("source", {}).get("fingerprint", ""))
        self.tokenizer_fingerprint = str(manifest.get("tokenizer", {}).get("fingerprint", ""))
        self._firsts = list(np.cumsum([0] + [part.tokens for part in parts])[:-1].tolist())
        self._arrays: dict[int, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}

    @classmethod
    def from_arrays(
        cls,
        tokens: np.ndarray,
        ends: np.ndarray,
        source: str = "",
        tokenizer: Tokenizer | None = None,
        trained: np.ndarray | None = None,
    ) -> TokenStore:
        manifest: dict[str, Any] = {"source": {"name": source, "fingerprint": source}}
        if tokenizer is not None:
            manifest["tokenizer"] = {"name": tokenizer.name, "fingerprint": tokenizer.fingerprint}
        part = StorePart("memory", len(tokens), len(ends), trained_checksums=None if trained is None else [])
        store = cls(None, tokens.dtype.name, [part], manifest)
        bits = np.empty(0, np.uint8) if trained is None else np.packbits(trained)
        store._arrays[0] = (tokens, ends.astype(END_TYPE), bits)
        return store

    @classmethod
    def open(cls, folder: str | Path) -> TokenStore:
        """Open a finished store. The manifest's checksum and every file's size are checked, not the contents."""
        folder = Path(folder)
        manifest = read_manifest(folder)
        parts = [StorePart(**entry) for entry in manifest["parts"]]
        store = cls(folder, manifest["dtype"], parts, manifest)
        for file, size in store._files():
            problem = check_size(locate(file), {"size": size})
            if problem is not None:
                raise UserError(f"{problem}: {AGAIN}")
        return store

    def read(self, start: int, count: int) -> np.ndarray:
        """Tokens [start, start + count) as int64."""
        out = np.empty(count, dtype=np.int64)
        for part, begin, stop, at in self._pieces(start, count):
            out[at : at + stop - begin] = self._array(part)[0][begin:stop]
        return out

    def trained(self, start: int, count: int) -> np.ndarray:
        """Whether each of these tokens is trained."""
        out = np.ones(count, dtype=bool)
        for part, begin, stop, at in self._pieces(start, count):
            if self.parts[part].trained_checksums is not None:
                bits = np.unpackbits(self._array(part)[2][begin // 8 : -(-stop // 8)])
                out[at : at + stop - begin] = bits[begin % 8 : begin % 8 + stop - begin]
        return out

    def has_trained(self) -> np.ndarray:
        """Whether each document has a trained token after its first; only such tokens are targets."""
        found = []
        for part, (first, sizes) in enumerate(zip(self._firsts, self.parts, strict=True)):
            ends = np.asarray(self._array(part)[1])
            if len(ends):
                begins = np.concatenate([[0], ends[:-1]])
                trained = self.trained(first, sizes.tokens)
                trained[begins] = False
                found.append(np.logical_or.reduceat(trained, begins))
        return np.concatenate(found) if found else np.empty(0, bool)

    def document_ends(self) -> np.ndarray:
        """Where every document ends, counted in tokens from the start of the store."""
        found = [self._array(part)[1] + first for part, first in enumerate(self._firsts)]
        return np.concatenate(found) if found else np.empty(0, END_TYPE)

    def document_numbers(self, start: int, count: int) -> np.ndarray:
        """The document number (int32) of each of these tokens, counted from 0 at the first token."""
        marks = np.zeros(count + 1, dtype=np.int32)
        for part, begin, stop, at in self._pieces(start, count):
            ends = self._array(part)[1]
            # An end at e makes e the first token of the next document; an end before the first token does not count.
            first, last = np.searchsorted(ends, [begin if at else begin + 1, stop + 1])
            marks[np.asarray(ends[first:last]) - begin + at] = 1
        return np.cumsum(marks[:count], dtype=np.int32)

    def damaged_id(self, token: int, vocab_size: int) -> UserError:
        """The error for a token whose id lies outside the vocabulary."""
        part, begin, _, _ = next(iter(self._pieces(token, 1)))
        name = f"{self.parts[part].name}.tokens"
        return UserError(
            f"{name if self.folder is None else self.folder / name} is damaged: its token {begin} is"
            f" {int(self._array(part)[0][begin])}, but the vocabulary has {vocab_size} ids: {AGAIN}"
        )

    def verify(self) -> None:
        """Read all files and compare them with their checksums; the error names the damaged file and bytes."""
        assert self.folder is not None, "a store in memory has no files"
        checksums = (
            row
            for part in self.parts
            for row in (part.token_checksums, part.end_checksums, part.trained_checksums)
            if row is not None
        )
        for (file, size), crc32 in zip(self._files(), checksums, strict=True):
            recorded = {"size": size, "block_bytes": self.manifest["block_bytes"], "crc32": crc32}
            for problem in find_damage(locate(file), recorded):
                raise UserError(f"{problem}: {AGAIN}")

    def __getstate__(self) -> dict[str, Any]:
        """Leave out memory maps: another process opens its own."""
        state = self.__dict__.copy()
        if self.folder is not None:
            state["_arrays"] = {}
        return state

    def _pieces(self, start: int, count: int) -> Iterable[tuple[int, int, int, int]]:
        """The parts that hold tokens [start, start + count), as (part, begin, stop in it, place in the result)."""
        if start < 0 or start + count > self.tokens:
            raise IndexError(f"tokens [{start}, {start + count}) of a store with {self.tokens}")
        part = bisect.bisect_right(self._firsts, start) - 1
        at = 0
        while at < count:
            begin = start + at - self._firsts[part]
            stop = min(self.parts[part].tokens, begin + count - at)
            if stop > begin:
                yield part, begin, stop, at
            at += stop - begin
            part += 1

    def _array(self, part: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        if part not in self._arrays:
            assert self.folder is not None
            name, tokens = self.parts[part].name, self.parts[part].tokens
            bits = 0 if self.parts[part].trained_checksums is None else -(-tokens // 8)
            self._arrays[part] = (
                _map(self.folder / f"{name}.tokens", self.dtype, tokens),
                _map(self.folder / f"{name}.ends", END_TYPE, self.parts[part].documents),
                _map(self.folder / f"{name}.trained", np.dtype(np.uint8), bits),
            )
        return self._arrays[part]

    def _files(self) -> Iterable[tuple[Path, int]]:
        assert self.folder is not None
        for part in self.parts:
            yield self.folder / f"{part.name}.tokens", part.tokens * self.dtype.itemsize
            yield self.folder / f"{part.name}.ends", part.documents * END_TYPE.itemsize
            if part.trained_checksums is not None:
                yield self.folder / f"{part.name}.trained", -(-part.tokens // 8)


def token_type(tokenizer: Tokenizer) -> np.dtype[Any]:
    """The smallest type that holds every id."""
    return np.dtype("<u2" if tokenizer.vocab_size <= 2**16 else "<u4")


def join_documents(
    arrays: Sequence[np.ndarray], tokenizer: Tokenizer, opens: bool = True, closes: bool = True
) -> tuple[np.ndarray, np.ndarray]:
    """`[bos] tokens [eos]` of all documents in a row, and where each document ends.

    The first document may continue one of an earlier call (`opens` false), and the last may continue in the next call
    (`closes` false).
    """
    dtype = token_type(tokenizer)
    bos = np.array([] if tokenizer.bos_id is None else [tokenizer.bos_id], dtype=dtype)
    eos = np.array([] if tokenizer.eos_id is None else [tokenizer.eos_id], dtype=dtype)
    pieces = [piece for array in arrays for piece in (bos, array.astype(dtype), eos)]
    ends = np.cumsum([len(piece) for piece in pieces], dtype=END_TYPE)[2::3]
    if pieces and not opens:
        pieces[0], ends = pieces[0][:0], ends - len(bos)
    if pieces and not closes:
        pieces[-1], ends = pieces[-1][:0], ends[:-1]
    return (np.concatenate(pieces) if pieces else np.empty(0, dtype)), ends


def is_store(folder: str | Path) -> bool:
    return (Path(folder) / "store.json").is_file()


def read_manifest(folder: Path) -> dict[str, Any]:
    file = folder / "store.json"
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read: {error}") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise UserError(f"{file} is not the manifest of a token store")
    if manifest.get("version") != VERSION:
        raise UserError(f"{file} has version {manifest.get('version')}, only version {VERSION} can be read: {AGAIN}")
    if manifest.get("checksum") != manifest_checksum(manifest):
        raise UserError(f"{file} is damaged (its checksum does not match): {AGAIN}")
    return manifest


def manifest_checksum(manifest: dict[str, Any]) -> str:
    content = {key: value for key, value in manifest.items() if key != "checksum"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _map(file: Path, dtype: np.dtype[Any], count: int) -> np.ndarray:
    if count == 0:  # an empty file cannot be mapped
        return np.empty(0, dtype=dtype)
    return np.memmap(file, dtype=dtype, mode="r", shape=(count,))
