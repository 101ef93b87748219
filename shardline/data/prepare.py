"""Tokenize a source once into a token store, in parallel and resumably; an unfinished store never passes as finished.

Each finished part leaves a note (part-00003.json) with its checksums and the number of chunks read so far. An
interrupted run continues after the last finished part that is still as it was written. `store.json` is written last
and makes the folder a store. A store that is being replaced stays intact until then: the new parts have numbers that it
does not use.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from shardline import registry
from shardline.data import token_store
from shardline.data.chunks import CONTEXT_BYTES, chunks_of_texts
from shardline.data.demo import demo_store, documents
from shardline.data.files import file_kind
from shardline.data.sources import C4_NAMES, Source, fingerprint_of, open_source
from shardline.data.token_store import (
    END_TYPE,
    StorePart,
    TokenStore,
    checksum_text,
    is_store,
    manifest_checksum,
    part_files,
    token_type,
)
from shardline.data.tokenize_workers import Encoded, Encoder, RecordEncoder, TextEncoder, encode_all
from shardline.data.tokenizer import Tokenizer, load_tokenizer
from shardline.errors import UserError, blame
from shardline.hub import local_path
from shardline.json_text import parse_json
from shardline.storage.atomic import read_plain, write_atomically
from shardline.storage.blocks import BlockWriter, find_damage
from shardline.storage.exclusive import exclusive
from shardline.storage.location import locate
from shardline.storage.progress import Progress, say
from shardline.words import counted, sized

PART_TOKENS = 64 * 2**20
CACHE_VERSION = 1  # of the names of folders in the cache: stores of older versions there are still read
OURS = re.compile(r"(part-\d+\.(tokens|ends|trained|json)|prepare\.json|store\.json)(\.tmp)?")
LOCKS = re.compile(r"\.lock(\.\d+)?")


def prepare(
    source: Source,
    tokenizer: Tokenizer | RecordEncoder,
    out: str | Path,
    *,
    workers: int | None = None,
    progress: bool = True,
    overwrite: bool = False,
    part_tokens: int = PART_TOKENS,
) -> TokenStore:
    """Tokenize `source` into the folder `out`: continue an interrupted call, or return the store if it is finished.

    A tokenizer turns texts into documents; an encoder turns records into what their format says.
    """
    out = Path(out)
    encoder: Encoder = tokenizer if isinstance(tokenizer, RecordEncoder) else TextEncoder(tokenizer)
    job = _job(source, encoder.tokenizer, encoder.mark)
    workers = workers or len(os.sched_getaffinity(0))
    try:
        _check_folder(out)
        if _done(out, job) and not overwrite:  # needs neither the lock nor write permission
            return _finished(out, job)
        out.mkdir(parents=True, exist_ok=True)
        with exclusive(out / ".lock", lambda: say(f"another process is preparing {out}; waiting for it")):
            if overwrite:
                _remove_ours(out, _kept(out))
            elif _done(out, job):  # by the process that held the lock
                return _finished(out, job)
            first, notes = _start(out, job)
            try:
                _write_parts(out, source, encoder, first, notes, workers, progress, part_tokens)
                _finish(out, job, notes)
            except Exception:
                if is_store(out) and not any(note["tokens"] for note in notes):  # nothing to continue from
                    _remove_ours(out, _kept(out))
                raise
    except OSError as error:
        raise UserError(f"cannot write the token store {str(out)!r}: {error.strerror or error}") from error
    return TokenStore.open(out)


def command(
    source: str,
    out: str,
    *,
    tokenizer: str,
    text_field: str = "text",
    split: str = "train",
    workers: int | None = None,
    overwrite: bool = False,
) -> int:
    """`shardline data prepare SRC OUT`: SRC is files, a folder, a glob, a known name or a Hub name."""
    chosen = load_tokenizer(tokenizer)
    texts = named_source(source, text_field, split)
    done_before = _done(Path(out), _job(texts, chosen)) and not overwrite
    store = prepare(texts, chosen, out, workers=workers, overwrite=overwrite)
    if done_before:
        print("already prepared; use --overwrite to prepare it again")
    print(f"{out}: {store.documents:,} documents, {store.tokens:,} tokens ({store.dtype.name})")
    print(f"train on it with --training.dataset_path={out} --model.tokenizer_path={tokenizer}")
    return 0


def named_source(name: str, text_field: str, split: str) -> Source:
    """The source that a command line names: "demo", a known name, or paths."""
    if name == "demo":
        section = "validation" if split == "validation" else "training"
        texts = documents(section)
        return Source("demo", fingerprint_of("demo", section), sum(map(len, texts)), lambda: chunks_of_texts(texts))
    path = Path(name)
    is_path = path.exists() or file_kind(path) or any(sign in name for sign in ",*?[") or name[0] in "./~"
    if not is_path and "/" not in name and name not in (*C4_NAMES, *registry.sources):
        close = registry.nearest(name, os.listdir())
        raise UserError(f"there is no file or folder {name!r}{close}; a dataset of the Hub is named 'owner/name'")
    return open_source(name, name if is_path else None, text_field=text_field, split=split)


def store_for(config: Any, section: str, tokenizer: Tokenizer) -> TokenStore:
    """The store of `[training]` or `[validation]`: the demo, a prepared store, or raw data prepared into the cache."""
    settings = getattr(config, section)
    path = settings.dataset_path
    if settings.dataset == "demo" and not path:
        return demo_store(section, tokenizer)
    if path and is_store(local_path(path)):
        store = _check_tokenizer(TokenStore.open(local_path(path)), path, tokenizer)
        store.verifies = config.training.verify_data
        return store
    source = section_source(config, section)
    with blame(f"{section}.{'dataset_path' if path else 'dataset'}"):
        return store_in_cache(config, source, tokenizer)


def section_source(config: Any, section: str) -> Source:
    """The raw data that `[training]` or `[validation]` names."""
    given = getattr(config, section)
    with blame(f"{section}.{'dataset_path' if given.dataset_path else 'dataset'}"):
        return open_source(
            given.dataset or "", given.dataset_path, text_field=given.dataset_text_field, split=given.dataset_split
        )


def store_in_cache(config: Any, source: Source, tokenizer: Tokenizer | RecordEncoder) -> TokenStore:
    """The store of a source in the cache, prepared there the first time."""
    if isinstance(tokenizer, RecordEncoder):
        mark = f"{tokenizer.tokenizer.fingerprint} {tokenizer.mark}"
    else:
        mark = tokenizer.fingerprint
    marks = f"{CACHE_VERSION} {source.fingerprint} {mark}"
    key = hashlib.sha256(marks.encode()).hexdigest()[:20]
    out = cache_folder(config.training.cache_folder) / "tokens" / key
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"training.cache_folder: cannot write {out.parent}: {error.strerror or error}; set another folder there"
            " or in $SHARDLINE_CACHE"
        ) from error
    if not is_store(out):
        say(f"preparing {source.name} into {out} (once; later runs read it there)")
    store = prepare(source, tokenizer, out)
    store.verifies = config.training.verify_data
    return store


def cache_folder(setting: str | None) -> Path:
    return Path(setting or os.environ.get("SHARDLINE_CACHE") or "~/.cache/shardline").expanduser()


def _check_tokenizer(store: TokenStore, path: str, tokenizer: Tokenizer) -> TokenStore:
    if store.tokenizer_fingerprint != tokenizer.fingerprint:
        made_with = store.manifest["tokenizer"]["name"]
        raise UserError(
            f"the token store {path!r} was prepared with the tokenizer {made_with!r}, not with {tokenizer.name!r}:"
            f" set --model.tokenizer_path={made_with}, or prepare it again with this one"
        )
    return store


def _write_parts(
    out: Path,
    source: Source,
    encoder: Encoder,
    first_part: int,
    notes: list[dict[str, Any]],
    workers: int,
    progress: bool,
    part_tokens: int,
) -> None:
    """Append parts until the source ends; each gets its note when it is durable."""
    done = notes[-1]["chunks"] if notes else 0
    chunks = source.chunks()
    skipped = sum(chunk.size for chunk in itertools.islice(chunks, done))
    with Progress(f"preparing {Path(source.name).name}", source.size, skipped, progress, unit="tokens") as bar:
        results = _compared(encode_all(chunks, encoder, workers), source.name)
        try:
            for first in results:
                note = _write_part(out, first_part + len(notes), itertools.chain([first], results), part_tokens, bar)
                note["chunks"] += notes[-1]["chunks"] if notes else 0
                notes.append(note)
                _write_json(out / f"{note['name']}.json", note)
        finally:
            results.close()  # type: ignore[attr-defined]  # a generator; this ends the processes


def _compared(results: Iterator[Encoded], name: str) -> Iterator[Encoded]:
    """Say once if pieces of a large document do not agree on the tokens where it was cut."""
    before, said = b"", False
    try:
        for result in results:
            if before and result.seams[0] and before != result.seams[0] and not said:
                said = True
                say(
                    f"note: {name}: with this tokenizer, tokens depend on text that is more than"
                    f" {sized(CONTEXT_BYTES)} away; where a large text was cut they may differ from those of the whole"
                )
            before = result.seams[1]
            yield result
    finally:
        results.close()  # type: ignore[attr-defined]  # a generator; this ends the processes


def _write_part(out: Path, number: int, results: Iterator[Any], part_tokens: int, bar: Progress) -> dict[str, Any]:
    name = f"part-{number:05d}"
    writers = [
        BlockWriter(out / f"{name}.{kind}.tmp", token_store.BLOCK_BYTES) for kind in ("tokens", "ends", "trained")
    ]
    tokens, ends, trained = writers
    bits = np.empty(0, bool)  # fewer than 8 that are not written yet
    count = documents = chunks = empty = 0
    has_trained = False
    with tokens, ends, trained:
        while count < part_tokens and (result := next(results, None)) is not None:
            tokens.write(_bytes(result.tokens))
            ends.write(_bytes((result.ends + count).astype(END_TYPE)))
            if result.trained is not None:
                bits = np.concatenate([bits, result.trained])
                whole = len(bits) // 8 * 8
                trained.write(_bytes(np.packbits(bits[:whole])))
                bits, has_trained = bits[whole:], True
            count, documents = count + len(result.tokens), documents + len(result.ends)
            chunks, empty = chunks + 1, empty + result.empty
            bar.advance(result.size, len(result.tokens))
        trained.write(_bytes(np.packbits(bits)))
        checksums = [checksum_text(writer.finish()["crc32"]) for writer in writers]
    if not has_trained:
        (out / f"{name}.trained.tmp").unlink()
    part = StorePart(
        name=name,
        tokens=count,
        documents=documents,
        token_checksums=checksums[0],
        end_checksums=checksums[1],
        trained_checksums=checksums[2] if has_trained else None,
    )
    for file in out.glob(f"{name}.*.tmp"):
        file.replace(file.with_suffix(""))
    return part.model_dump() | {"chunks": chunks, "empty": empty}


def _bytes(array: np.ndarray) -> memoryview:
    return np.ascontiguousarray(array).view(np.uint8).data


def _write_json(file: Path, value: dict[str, Any]) -> None:
    """Write a table with its checksum."""
    write_atomically(file, json.dumps(value | {"checksum": manifest_checksum(value)}, indent=1))


def _read_note(file: Path) -> dict[str, Any] | None:
    """A table of `_write_json`, without its checksum; None if it is not what was written."""
    try:
        value = parse_json(read_plain(file))
    except ValueError:
        return None
    if not isinstance(value, dict) or value.pop("checksum", None) != manifest_checksum(value):
        return None
    return value


def _job(source: Source, tokenizer: Tokenizer, mark: str = "") -> dict[str, Any]:
    """The inputs of a store; equal jobs give equal stores. `mark` stands for the format of records."""
    records = {"records": mark} if mark else {}
    return records | {
        "format": token_store.FORMAT,
        "version": token_store.VERSION,
        "dtype": token_type(tokenizer).name,
        "vocab_size": tokenizer.vocab_size,
        "tokenizer": {"name": tokenizer.name, "fingerprint": tokenizer.fingerprint},
        "source": {"name": source.name, "fingerprint": source.fingerprint},
        "block_bytes": token_store.BLOCK_BYTES,
    }


def _begun(out: Path) -> tuple[dict[str, Any], int] | None:
    """The job of an unfinished preparation, and the number of its first part; None also where its note is damaged."""
    try:
        job = _read_note(out / "prepare.json")
    except OSError:
        return None
    return None if job is None else (job, job.pop("first_part"))


def _done(out: Path, job: dict[str, Any]) -> bool:
    """Whether the folder has a finished store that this job has not begun to replace."""
    if not is_store(out):
        return False
    begun = _begun(out)
    return begun is None or begun[0] != job


def _start(out: Path, job: dict[str, Any]) -> tuple[int, list[dict[str, Any]]]:
    """The number of the first part, and the notes of the parts that an interrupted run of the same job finished."""
    begun = _begun(out)
    if begun is None:
        if (out / "prepare.json").exists():
            say(f"{out / 'prepare.json'} is damaged or of an older version: preparing starts over")
        _remove_ours(out, _kept(out))  # notes may come from the job of another source: none is trusted
        first = 1 + max(map(_part_number, out.glob("part-*")), default=-1)
        _write_json(out / "prepare.json", job | {"first_part": first})
        return first, []
    if begun[0] != job:
        raise UserError(
            f"{str(out)!r} holds an unfinished store of another source or tokenizer: --overwrite replaces it"
        )
    first, notes = begun[1], list[dict[str, Any]]()
    for file in sorted(out.glob("part-*.json")):
        note = _read_note(file)
        expected = f"part-{first + len(notes):05d}"
        if file.stem == expected and (problem := _problem(file, note, job)):
            say(f"{problem}: this part and those after it are prepared again")
        elif file.stem == expected and note is not None:
            notes.append(note)
            continue
        file.unlink()
    if notes:
        say(f"continuing after {counted(len(notes), 'finished part')} in {out}")
    return first, notes


def _part_number(file: Path) -> int:
    return int(file.name.removeprefix("part-").split(".")[0])


def _problem(file: Path, note: dict[str, Any] | None, job: dict[str, Any]) -> str:
    """What is wrong with a part that its note calls finished: a damaged note, or a file that has changed since."""
    if note is None:
        return f"{file} is damaged"
    fields = {key: note[key] for key in StorePart.model_fields}
    token_bytes = np.dtype(job["dtype"]).itemsize
    for path, recorded in part_files(file.parent, StorePart(**fields), token_bytes, job["block_bytes"]):
        for problem in find_damage(locate(path), recorded):
            return str(problem)
    return ""


def _finish(out: Path, job: dict[str, Any], notes: list[dict[str, Any]]) -> None:
    manifest = job | {
        "tokens": sum(note["tokens"] for note in notes),
        "documents": sum(note["documents"] for note in notes),
        "empty_documents": sum(note["empty"] for note in notes),
        "parts": [{key: note[key] for key in StorePart.model_fields} for note in notes],
    }
    if not manifest["documents"]:
        empty = counted(manifest["empty_documents"], "empty document")
        raise UserError(f"{job['source']['name']!r} holds no text ({empty})")
    if manifest["empty_documents"]:
        say(f"left out {counted(manifest['empty_documents'], 'empty document')}")
    _write_json(out / "store.json", manifest)
    _remove_ours(out, _kept(out))


def _finished(out: Path, job: dict[str, Any]) -> TokenStore:
    """The finished store of the folder, which must be this job's."""
    store = TokenStore.open(out)
    same = store.source_fingerprint == job["source"]["fingerprint"]
    same &= store.manifest.get("records") == job.get("records")
    if not same or store.tokenizer_fingerprint != job["tokenizer"]["fingerprint"]:
        raise UserError(f"{str(out)!r} already holds a store of another source or tokenizer: --overwrite replaces it")
    return store


def _check_folder(out: Path) -> None:
    """Refuse a folder that holds files of other kinds."""
    if out.exists() and not out.is_dir():
        raise UserError(f"{str(out)!r} is a file; choose a folder for the token store")
    names = [entry.name for entry in out.iterdir()] if out.exists() else []
    foreign = [name for name in names if not (OURS.fullmatch(name) or LOCKS.fullmatch(name))]
    if foreign:
        raise UserError(
            f"{str(out)!r} holds other files ({sorted(foreign)[0]!r}); choose a new folder for the token store"
        )


def _kept(out: Path) -> set[str]:
    """The files of the finished store in this folder, if there is one."""
    if not is_store(out):
        return set()
    try:
        names = [part["name"] for part in token_store.read_manifest(out)["parts"]]
    except UserError:  # a damaged manifest: its parts are those from before this job
        begun = _begun(out)
        names = [file.stem for file in out.glob("part-*.tokens") if not begun or _part_number(file) < begun[1]]
    return {"store.json", *(name + suffix for name in names for suffix in (".tokens", ".ends", ".trained"))}


def _remove_ours(out: Path, keep: Collection[str]) -> None:
    """Remove our files except `keep`; `prepare.json` last, so that an interrupted removal is completed by that job."""
    for entry in sorted(out.iterdir(), key=lambda entry: entry.name == "prepare.json"):
        if OURS.fullmatch(entry.name) and entry.name not in keep:
            entry.unlink()
