"""The token store: all documents as one long row of token ids on disk, read through memory maps.

FOLDER/store.json          contents, sizes and checksums; written last, so a folder with it is complete
FOLDER/part-00000.tokens   token ids, uint16 or uint32, little endian
FOLDER/part-00000.ends     where documents end: int64, counted in tokens from the start of the part
FOLDER/part-00000.trained  of records: one bit per token, the first in the highest bit of a byte; 1 where it is trained

Every file has a checksum for each of its blocks. A process verifies a block when it first reads from it.
"""

from __future__ import annotations

import bisect
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from pydantic import Field, ValidationError

from shardline.config.types import Section
from shardline.data.tokenizer import Tokenizer
from shardline.errors import UserError
from shardline.json_text import parse_json
from shardline.storage.blocks import Advance, Damaged, Problem, Record, check_block, check_size, find_damage
from shardline.storage.location import locate
from shardline.storage.progress import say
from shardline.words import sized

FORMAT = "shardline token store"
VERSION = 2
READABLE = (1, 2)  # the first version has blocks of 8 MiB, and their checksums as numbers
BLOCK_BYTES = 2**16  # a sample of a large store, read for the first time, costs about one such block
AGAIN = "prepare it again (--overwrite, or delete the folder first)"
END_TYPE = np.dtype("<i8")
Checksums = str | list[int]  # eight hexadecimal digits a block


class StorePart(Section):
    """One pair of files: the number of tokens and document ends in them, and the CRC-32 of each block."""

    name: str = Field(pattern=r"^(part-\d{5,9}|memory)$")
    tokens: int = Field(ge=0)
    documents: int = Field(ge=0)
    token_checksums: Checksums = ""
    end_checksums: Checksums = ""
    trained_checksums: Checksums | None = None  # None: every token is trained, and there is no file


class Origin(Section):
    """What a store was made of or with."""

    name: str
    fingerprint: str


class StoreManifest(Section):
    """The content of store.json."""

    format: str
    version: int
    dtype: Literal["uint16", "uint32"]
    vocab_size: int = Field(ge=1)
    tokenizer: Origin
    source: Origin
    records: str = ""
    block_bytes: int = Field(ge=1)
    tokens: int = Field(ge=0)
    documents: int = Field(ge=0)
    empty_documents: int = Field(ge=0)
    parts: list[StorePart]
    checksum: str


class Numbers:
    """Numbers in a memory-mapped file. Without `recorded` nothing is verified, and there may be no file."""

    def __init__(self, array: np.ndarray, file: Path = Path("memory"), recorded: Record | None = None) -> None:
        self.array, self.file, self.recorded = array, file, recorded
        self._bytes = array.view(np.uint8).data
        self._unread = bytearray(b"\1") * (0 if recorded is None else len(recorded["crc32"]))  # by block: 1 or 0

    def read(self, begin: int, stop: int) -> np.ndarray:
        """Numbers [begin, stop); blocks that were not read before are compared with their checksums."""
        if self.recorded is not None:
            self._verify(self.recorded, begin * self.array.itemsize, stop * self.array.itemsize)
        return self.array[begin:stop]

    def all(self) -> np.ndarray:
        return self.read(0, len(self.array))

    def _verify(self, recorded: Record, start: int, end: int) -> None:
        size = recorded["block_bytes"]
        last = -(-end // size)
        index = self._unread.find(1, start // size, last)
        while index != -1:
            try:
                check_block(self.file, recorded, index, self._bytes[index * size : (index + 1) * size])
            except Damaged as error:
                raise Damaged(f"{error}: {AGAIN}") from None
            self._unread[index] = 0
            index = self._unread.find(1, index + 1, last)


class Columns(NamedTuple):
    """The files of a part."""

    tokens: Numbers
    ends: Numbers
    trained: Numbers


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
        self.verifies = True  # compare what is read with its checksums; set before the first read
        self._firsts = list(np.cumsum([0] + [part.tokens for part in parts])[:-1].tolist())
        self._columns: dict[int, Columns] = {}

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
        trained_checksums = None if trained is None else ""
        part = StorePart(name="memory", tokens=len(tokens), documents=len(ends), trained_checksums=trained_checksums)
        store = cls(None, tokens.dtype.name, [part], manifest)
        bits = np.empty(0, np.uint8) if trained is None else np.packbits(trained)
        store._columns[0] = Columns(Numbers(tokens), Numbers(ends.astype(END_TYPE)), Numbers(bits))
        return store

    @classmethod
    def open(cls, folder: str | Path) -> TokenStore:
        """Open a finished store: the manifest's checksum and every file's size are checked, contents when read."""
        folder = Path(folder)
        manifest = read_manifest(folder)
        parts = [StorePart.model_validate(entry) for entry in manifest["parts"]]
        store = cls(folder, manifest["dtype"], parts, manifest)
        for file, recorded in store.files():
            problem = check_size(locate(file), recorded)
            if problem is None and len(recorded["crc32"]) != -(-recorded["size"] // recorded["block_bytes"]):
                problem = Problem(str(folder / "store.json"), f"has no checksum for every block of {file.name}")
            if problem is not None:
                raise UserError(f"{problem}: {AGAIN}")
        if manifest["version"] != VERSION:
            size = sized(manifest["block_bytes"])
            say(f"{folder} is a store of an older version, of which {size} are verified at a time; prepare it again")
        return store

    def read(self, start: int, count: int) -> np.ndarray:
        """Tokens [start, start + count) as int64."""
        out = np.empty(count, dtype=np.int64)
        for part, begin, stop, at in self._pieces(start, count):
            out[at : at + stop - begin] = self._part(part).tokens.read(begin, stop)
        return out

    def trained(self, start: int, count: int) -> np.ndarray:
        """Whether each of these tokens is trained."""
        out = np.ones(count, dtype=bool)
        for part, begin, stop, at in self._pieces(start, count):
            if self.parts[part].trained_checksums is not None:
                bits = np.unpackbits(self._part(part).trained.read(begin // 8, -(-stop // 8)))
                out[at : at + stop - begin] = bits[begin % 8 : begin % 8 + stop - begin]
        return out

    def has_trained(self, longest: int | None = None) -> np.ndarray:
        """Whether each document has a trained token after its first; only such tokens are targets.

        Those after the first `longest` tokens do not count.
        """
        found = []
        for part, (first, sizes) in enumerate(zip(self._firsts, self.parts, strict=True)):
            ends = self._part(part).ends.all()
            if len(ends):
                begins = np.concatenate([[0], ends[:-1]])
                trained = self.trained(first, sizes.tokens)
                trained[begins] = False
                if longest is not None:
                    trained &= np.arange(len(trained)) - np.repeat(begins, ends - begins) < longest
                found.append(np.logical_or.reduceat(trained, begins))
        return np.concatenate(found) if found else np.empty(0, bool)

    def document_ends(self) -> np.ndarray:
        """Where every document ends, counted in tokens from the start of the store."""
        found = [self._part(part).ends.all() + first for part, first in enumerate(self._firsts)]
        return np.concatenate(found) if found else np.empty(0, END_TYPE)

    def document_numbers(self, start: int, count: int) -> np.ndarray:
        """The document number (int32) of each of these tokens, counted from 0 at the first token."""
        marks = np.zeros(count + 1, dtype=np.int32)
        for part, begin, stop, at in self._pieces(start, count):
            ends = self._part(part).ends.all()
            # An end at e makes e the first token of the next document; an end before the first token does not count.
            first, last = np.searchsorted(ends, [begin if at else begin + 1, stop + 1])
            marks[ends[first:last] - begin + at] = 1
        return np.cumsum(marks[:count], dtype=np.int32)

    def damaged_id(self, token: int, vocab_size: int) -> UserError:
        """The error for a token whose id lies outside the vocabulary."""
        part, begin, _, _ = next(iter(self._pieces(token, 1)))
        name = f"{self.parts[part].name}.tokens"
        return UserError(
            f"{name if self.folder is None else self.folder / name} is damaged: its token {begin} is"
            f" {int(self._part(part).tokens.array[begin])}, but the vocabulary has {vocab_size} ids: {AGAIN}"
        )

    def find_damage(self, advance: Advance = int) -> list[Problem]:
        """Read all files and compare them with their checksums."""
        return [problem for file, recorded in self.files() for problem in find_damage(locate(file), recorded, advance)]

    def __getstate__(self) -> dict[str, Any]:
        """Leave out memory maps: another process opens its own."""
        state = self.__dict__.copy()
        if self.folder is not None:
            state["_columns"] = {}
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

    def _part(self, part: int) -> Columns:
        if part not in self._columns:
            kinds = {".tokens": self.dtype, ".ends": END_TYPE, ".trained": np.dtype(np.uint8)}
            files = {file.suffix: (file, recorded) for file, recorded in self._files_of(self.parts[part])}
            found = [_mapped(files.get(suffix), kind, self.verifies) for suffix, kind in kinds.items()]
            self._columns[part] = Columns(*found)
        return self._columns[part]

    def files(self) -> Iterable[tuple[Path, Record]]:
        """Every file but the manifest, with its size and the checksums of its blocks."""
        for part in self.parts:
            yield from self._files_of(part)

    def _files_of(self, part: StorePart) -> Iterable[tuple[Path, Record]]:
        assert self.folder is not None, "a store in memory has no files"
        return part_files(self.folder, part, self.dtype.itemsize, self.manifest["block_bytes"])


def part_files(folder: Path, part: StorePart, token_bytes: int, block_bytes: int) -> Iterable[tuple[Path, Record]]:
    """The files of a part, with the size and the checksums of each."""
    rows = [
        (".tokens", part.tokens * token_bytes, part.token_checksums),
        (".ends", part.documents * END_TYPE.itemsize, part.end_checksums),
        (".trained", -(-part.tokens // 8), part.trained_checksums),
    ]
    for suffix, size, checksums in rows:
        if checksums is not None:
            recorded = {"size": size, "block_bytes": block_bytes, "crc32": checksums_of(checksums)}
            yield folder / f"{part.name}{suffix}", recorded


def checksums_of(row: Checksums) -> Sequence[int]:
    return np.frombuffer(bytes.fromhex(row), dtype=">u4") if isinstance(row, str) else row  # type: ignore[return-value]


def checksum_text(checksums: Iterable[int]) -> str:
    return "".join(f"{checksum:08x}" for checksum in checksums)


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
    """The content of store.json, after a check of its checksum and types."""
    file = folder / "store.json"
    try:
        manifest = parse_json(file.read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read: {error}: {AGAIN}") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise UserError(f"{file} is not the manifest of a token store: {AGAIN}")
    if manifest.get("version") not in READABLE:
        known = " and ".join(map(str, READABLE))
        raise UserError(f"{file} has version {manifest.get('version')}, versions {known} can be read: {AGAIN}")
    if manifest.get("checksum") != manifest_checksum(manifest):
        raise UserError(f"{file} is damaged (its checksum does not match): {AGAIN}")
    try:
        StoreManifest.model_validate(manifest)
        for part in manifest["parts"]:
            _ = [checksums_of(part[key] or "") for key in part if key.endswith("_checksums")]
    except ValidationError as error:
        row = error.errors()[0]
        raise UserError(f"{file} is damaged: {'.'.join(map(str, row['loc']))}: {row['msg']}: {AGAIN}") from None
    except ValueError as error:
        raise UserError(f"{file} is damaged: checksums: {error}: {AGAIN}") from None
    return manifest


def manifest_checksum(manifest: Mapping[str, Any]) -> str:
    content = {key: value for key, value in manifest.items() if key != "checksum"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _mapped(stored: tuple[Path, Record] | None, dtype: np.dtype[Any], verifies: bool) -> Numbers:
    if stored is None or not stored[1]["size"]:  # an empty file cannot be mapped
        return Numbers(np.empty(0, dtype=dtype))
    file, recorded = stored
    array = np.asarray(np.memmap(file, dtype=dtype, mode="r"))  # slicing a plain array is faster
    return Numbers(array, file, recorded if verifies else None)
