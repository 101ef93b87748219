"""Hugging Face folders: read lazily under our logical names, written in shards with an index. Bit-exact both ways."""

from __future__ import annotations

import functools
import json
import logging
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from shardline.config.architecture import TRAINING_FIELDS, Architecture
from shardline.errors import UserError
from shardline.json_text import parse_json
from shardline.models.fused_weights import keeps_type, logical_shapes
from shardline.models.huggingface.config import CLASSES, architecture_from_hf, export_family, hf_config, read_config
from shardline.models.huggingface.mxfp4 import dequantize
from shardline.models.huggingface.stored import OUTSIDE, Stored, stored_as
from shardline.storage.safetensors import Converter, Entry, HeaderRow, LazyTensors, header_of, torch_type, write_tensors
from shardline.words import listed

logger = logging.getLogger("shardline")
INDEX = "model.safetensors.index.json"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)
_TYPES = ("F64", "F32", "F16", "BF16")
_ARITHMETIC = (
    "n_heads",
    "n_kv_heads",
    "rope_theta",
    "rope_scaling",
    "rope_pairs",
    "norm_eps",
    "sliding_window",
    "sliding_window_layers",
    "window_kind",
    "rope_layers",
    "query_scale",
    "query_scale_step",
    "rotated_norm",
    "rope_fraction",
    "window_rope_theta",
    "norm_kind",
    "norm_places",
    "parallel_block",
    "residual_scale",
    "embedding_scale",
    "logit_scale",
    "logit_cap",
    "attention_scale",
    "score_cap",
    "activation",
    "qk_norm_over",
)


class Located(NamedTuple):
    """Where files hold a logical tensor of this shape."""

    how: Stored | None  # None: not stored, it is zero
    shape: tuple[int, ...]
    rows: list[Row]  # one for each expert, or a single one
    first: int = 0  # row of a stored tensor that holds others before it


class HFTensors(LazyTensors):
    """The tensors of a Hugging Face folder, mapped from their files: a rank that uses some rows reads only these."""

    def __init__(self, arch: Architecture, rows: dict[str, Located]) -> None:
        self.arch, self._rows = arch, rows

    def __getitem__(self, name: str) -> Tensor:
        return self.part(name, (slice(None),))

    def part(self, name: str, place: tuple[slice, ...]) -> Tensor:
        how, shape, rows, first = self._rows[name]
        if how is None:
            return torch.zeros(shape)[place]
        if how.joined:
            start, stop, _ = place[0].indices(shape[0])
            (path, row), held = rows[0], slice(first + start, first + stop)
            return map_tensor(path, row, held)[(slice(None), *place[1:])]
        if how.by_head:
            return map_tensor(*rows[0]).reshape(shape)[place]
        if how.each:
            return torch.stack([map_tensor(*row)[place[1:]] for row in rows[place[0]]])
        ((path, row),) = rows
        if not shape:
            return map_tensor(path, row)
        return how.take(map_tensor(path, row, place[0]))[(slice(None), *place[1:])]

    def dtype(self, name: str) -> torch.dtype:
        how, _, rows, _ = self._rows[name]
        return torch.float32 if how is None else torch_type(rows[0][1].dtype)


def read_hf(folder: Path | str, arch: Architecture | None = None) -> HFTensors:
    """Open a Hugging Face folder; its tensors must be exactly those of `arch` (default: of its own config.json)."""
    folder = Path(folder)
    if arch is not None and arch.foreign is not None:
        return _read_foreign(folder, arch)
    theirs = architecture_from_hf(folder) if arch is None or (folder / "config.json").is_file() else arch
    if theirs.foreign is not None:
        if arch is not None:
            raise UserError(
                f"{folder} holds another model, of type {theirs.foreign.config['model_type']!r}: set another folder"
            )
        return _read_foreign(folder, theirs)
    arch = arch or theirs
    _compare(folder, theirs, arch)
    wanted = stored_shapes(arch, theirs.family)
    beside = _beside(folder)
    stored = {name: row for name, row in stored_rows(folder).items() if not beside.search(name)}
    if arch.tie_word_embeddings and "lm_head.weight" in stored:
        _check_tied(folder, stored)
        del stored["lm_head.weight"]
    problems = shape_problems({name: row.shape for name, (_, row) in stored.items()}, wanted)
    strange = [(name, row.dtype) for name, (_, row) in stored.items() if name in wanted and row.dtype not in _TYPES]
    problems += [f"wrong type: {name} is {dtype}, only {', '.join(_TYPES)} are read" for name, dtype in strange]
    if not problems:
        found = find_tensors(arch, theirs.family, stored)
        kinds = {name: sorted({row.dtype for _, row in place.rows}) for name, place in found.items()}
        problems = [f"wrong type: experts of {name} are {' and '.join(k)}" for name, k in kinds.items() if len(k) > 1]
    if problems:
        raise UserError(f"{folder}: the tensors do not fit the model\n  " + listed(problems, 8, "\n  "))
    return HFTensors(arch, found)


def _read_foreign(folder: Path, arch: Architecture) -> HFTensors:
    from shardline.models.huggingface.foreign_files import read_foreign

    return read_foreign(folder, arch)


def stored_shapes(arch: Architecture, family: str) -> dict[str, tuple[int, ...]]:
    """The names and shapes of the tensors in a folder of a family."""
    shapes, logical = {}, logical_shapes(arch)
    for name, shape in logical.items():
        if (how := stored_as(name, family)) is not None:
            shapes.update(dict.fromkeys(how.names(shape[0]), _stored_shape(arch, how, logical, shape)))
        elif not keeps_type(name):  # a family may lack the balancing bias, which belongs to training
            raise UserError(f"{CLASSES[family]} has no {name}")
    return shapes


def _stored_shape(
    arch: Architecture, how: Stored, logical: Mapping[str, tuple[int, ...]], shape: tuple[int, ...]
) -> tuple[int, ...]:
    """The shape of the stored tensor that holds a logical one of this shape."""
    if how.joined:
        return (sum(logical[name][0] for name in how.joined), *shape[1:])
    return (shape[0] // arch.head_dim, arch.head_dim) if how.by_head else how.shape(shape)


def find_tensors(arch: Architecture, family: str, stored: Mapping[str, Row]) -> dict[str, Located]:
    """Locate each logical tensor among the stored ones."""
    found, logical = {}, logical_shapes(arch)
    for name, shape in logical.items():
        how = stored_as(name, family)
        rows = [] if how is None else [stored[key] for key in how.names(shape[0])]
        before = how.joined[: how.joined.index(name)] if how is not None and how.joined else ()
        found[name] = Located(how, shape, rows, sum(logical[other][0] for other in before))
    return found


def _beside(folder: Path) -> re.Pattern[str]:
    """A pattern of stored names that are not the model's: rotary tables, and layers of multi-token prediction."""
    config = read_config(folder) if (folder / "config.json").is_file() else {}
    layers, further = config.get("num_hidden_layers") or 0, config.get("num_nextn_predict_layers") or 0
    numbers = "".join(rf"|^model\.layers\.{layer}\." for layer in range(layers, layers + further))
    return re.compile(r"rotary_emb\.inv_freq$" + numbers)


def shape_problems(stored: Mapping[str, tuple[int, ...]], wanted: Mapping[str, tuple[int, ...]]) -> list[str]:
    """The differences between the stored tensors and the wanted ones, a line each."""
    differing = [name for name in wanted if name in stored and stored[name] != wanted[name]]
    return [
        *(f"wrong shape: {n} is {list(stored[n])}, but the model needs {list(wanted[n])}" for n in differing),
        *(f"missing: {name}" for name in wanted if name not in stored),
        *(f"unexpected: {name}" for name in stored if name not in wanted),
    ]


def _compare(folder: Path, theirs: Architecture, ours: Architecture) -> None:
    """Refuse another number of experts; warn where the weights fit but this model computes differently from theirs."""
    has, needs = (0 if arch.moe is None else arch.moe.n_experts for arch in (theirs, ours))
    if has != needs:
        raise UserError(
            f"{folder} has {has} experts in a layer, but the model has {needs}: set another folder,"
            ' or model.name = "auto", which uses the folder\'s model'
        )
    changes = [f"{name}: {one!r}, here {two!r}" for name, one, two in _arithmetic(theirs, ours) if one != two]
    if changes:
        logger.warning(
            '%s: the model computes differently from its config.json (%s); model.name = "auto" follows that file',
            folder,
            ", ".join(changes),
        )


def _arithmetic(*archs: Architecture) -> list[tuple[str, Any, Any]]:
    """The fields that change the arithmetic, with their values in two models."""
    tables = [{name: getattr(arch, name) for name in _ARITHMETIC} for arch in archs]
    for table, arch in zip(tables, archs, strict=True):
        experts = {} if arch.moe is None else arch.moe.model_dump(exclude=set(TRAINING_FIELDS))
        table.update({f"moe.{name}": value for name, value in experts.items()})
    return [(name, tables[0][name], tables[1][name]) for name in tables[0]]


class Packed(NamedTuple):
    """Experts in MXFP4: two stored tensors, read as the single one that a folder without MXFP4 would have."""

    blocks: HeaderRow
    scales_path: Path
    scales: HeaderRow
    dtype: str = "BF16"

    @property
    def shape(self) -> tuple[int, ...]:
        experts, rows, groups, _ = self.blocks.shape
        return experts, 32 * groups, rows  # each expert's matrix is transposed

    def read(self, path: Path, first: slice) -> Tensor:
        blocks, scales = map_tensor(path, self.blocks, first), map_tensor(self.scales_path, self.scales, first)
        return dequantize(blocks, scales).transpose(1, 2)


Row = tuple[Path, HeaderRow | Packed]


def _readable(stored: Mapping[str, tuple[Path, HeaderRow]]) -> dict[str, Row]:
    """The tensors of the text model, with each pair of MXFP4 tensors as one."""
    for text, place in (("language_model.", ""), ("model.language_model.", "model.")):  # beside an image model
        if any(name.startswith(text) for name in stored):
            kept = {place + name.removeprefix(text): row for name, row in stored.items() if name.startswith(text)}
            head = {name: row for name, row in stored.items() if name == OUTSIDE["output.weight"]}
            stored = {**head, **kept}
            break
    found: dict[str, Row] = {}
    for name, (path, row) in stored.items():
        base = name.removesuffix("_blocks")
        if base != name and f"{base}_scales" in stored and len(row.shape) == 4:
            found[base] = path, Packed(row, *stored[f"{base}_scales"])
        elif f"{name.removesuffix('_scales')}_blocks" not in stored:
            found[name] = path, row
    return found


def stored_rows(folder: Path, readable: bool = True) -> dict[str, Row]:
    """Every stored tensor's name, file and place in it; `readable` means as native families read them."""
    index, single = folder / INDEX, folder / "model.safetensors"
    found = None
    if index.is_file():
        found = _indexed(folder, index)
    elif single.is_file():
        found = {name: (single, row) for name, row in _header(single).items()}
    if found is not None:
        return _readable(found) if readable else {**found}
    if list(folder.glob("*.bin")):
        raise UserError(f"{folder} holds pickled weights (*.bin); only safetensors are read: save them as safetensors")
    raise UserError(f"{folder}: there is no model.safetensors and no {INDEX}")


def _indexed(folder: Path, index: Path) -> dict[str, tuple[Path, HeaderRow]]:
    try:
        table = parse_json(index.read_bytes())["weight_map"]
        odd = [name for name, file in table.items() if not isinstance(file, str) or not file or "\0" in file]
        if odd:
            raise ValueError(f"weight_map names no file for {odd[0]}")
        places = {name: folder / file for name, file in table.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{index}: cannot be read ({error})") from None
    headers: dict[Path, dict[str, HeaderRow]] = {}
    for path in sorted(set(places.values())):
        if path.parent != folder or not path.is_file():
            raise UserError(f"{index} names {path.name[:200]!r}, which is not in {folder}")
        headers[path] = _header(path)
        absent = [name for name, place in places.items() if place == path and name not in headers[path]]
        if absent:
            raise UserError(f"{path}: {absent[0]} is in the index but not in the file")
    return {name: (path, headers[path][name]) for name, path in places.items()}


def _header(path: Path) -> dict[str, HeaderRow]:
    try:
        with path.open("rb") as file:
            return header_of(file, path.stat().st_size)
    except (ValueError, OSError) as error:
        raise UserError(f"{path}: cannot be read ({error})") from None


def map_file(path: Path) -> dict[str, Tensor]:
    """Every tensor of a safetensors file, memory-mapped."""
    return {name: map_tensor(path, row) for name, row in _header(path).items()}


def map_tensor(path: Path, row: HeaderRow | Packed, first: slice = slice(None)) -> Tensor:
    """A tensor, or some of its rows, memory-mapped; writing to it changes a private copy."""
    if isinstance(row, Packed):
        return row.read(path, first)
    dtype = torch_type(row.dtype)
    size = row.elements * dtype.itemsize
    if size == 0:  # nothing can be mapped
        return torch.empty(row.shape, dtype=dtype)[first]
    try:
        raw = np.memmap(path, np.uint8, mode="c", offset=row.start, shape=(size,))
    except ValueError:
        raise UserError(f"{path}: the file ends within a tensor of {size} bytes at byte {row.start}") from None
    # Most writers pad headers to 8 bytes; elements that are not aligned are copied to where a CPU can load them.
    aligned = raw if row.start % dtype.itemsize == 0 else np.array(raw)
    whole = torch.from_numpy(aligned).view(dtype).view(row.shape)
    return whole[first] if row.shape else whole


def _check_tied(folder: Path, stored: dict[str, Row]) -> None:
    """A tied model's file may repeat the embedding as lm_head; a different lm_head would be lost silently."""
    embedding = OUTSIDE["tok_embeddings.weight"]
    if embedding not in stored:
        return
    if not torch.equal(map_tensor(*stored["lm_head.weight"]), map_tensor(*stored[embedding])):
        raise UserError(
            f"{folder}: tie_word_embeddings is true but lm_head.weight differs from model.embed_tokens.weight; "
            "set tie_word_embeddings to false in config.json to keep both"
        )


def write_hf(
    entries: Sequence[Entry],
    arch: Architecture,
    out: Path | str,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 5 * 10**9,
    assets_from: Path | str | None = None,
    special_tokens: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Write logical tensors as a folder that transformers opens, one at a time: each is freed before the next is read.

    `dtype` None keeps each tensor's own. Everything is written beside `out` and renamed at the end; `out` must be
    absent or empty. Tokenizer files come from `assets_from`, and so do the ids of special tokens where it has a
    config.json; otherwise `special_tokens` gives them. Returns the checksums of the tensors' files by name.
    """
    out = Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} exists and is not empty; choose another folder or remove it")
    if arch.foreign is None:
        family = export_family(arch)  # before anything is written: refuses what no Hugging Face model computes
        stored = stored_entries(entries, arch, family, dtype)
    else:
        stored = [entry if dtype is None else entry._replace(dtype=dtype) for entry in entries]
    shards = _plan_shards(stored, max_shard_bytes)
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.parent / f".{out.name}.partial-{os.getpid()}"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        convert = Converter()
        records = {name: write_tensors(partial / name, shard, convert) for name, shard in shards.items()}
        convert.warn()
        if len(shards) > 1:
            weight_map = {entry.name: name for name, shard in shards.items() for entry in shard}
            total = sum(entry.bytes for shard in shards.values() for entry in shard)
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
            _write_json(partial / INDEX, index)
        if assets_from is not None:
            copy_assets(assets_from, partial)
        special = _special_tokens(assets_from) or special_tokens or {}
        type_name = str(dtype or entries[0].dtype).removeprefix("torch.")
        if arch.foreign is None:
            _write_json(partial / "config.json", hf_config(arch, type_name, **special))
        else:
            _write_json(partial / "config.json", {**arch.foreign.config, "dtype": type_name, "torch_dtype": type_name})
        os.replace(partial, out)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return records


def stored_entries(
    entries: Sequence[Entry], arch: Architecture, family: str, dtype: torch.dtype | None = None
) -> list[Entry]:
    """The model's tensors as a family stores them; `entries` must hold every tensor of the model once."""
    wanted, given = logical_shapes(arch), dict[str, Entry]()
    for entry in entries:
        if entry.name == "output.weight" and arch.tie_word_embeddings:
            continue
        if wanted.pop(entry.name, None) != entry.shape:
            raise ValueError(f"{entry.name} {entry.shape} is not a tensor of this model, or was given twice")
        given[entry.name] = entry if dtype is None or keeps_type(entry.name) else entry._replace(dtype=dtype)
    if wanted:
        raise ValueError(f"tensors were not given: {', '.join(wanted)}")
    stored_shapes(arch, family)  # refuses what the family has no place for
    _warn_of_balance([entry for name, entry in given.items() if stored_as(name, family) is None], family)
    return [entry for name in given for entry in _as_stored(arch, given, name, stored_as(name, family))]


def _as_stored(arch: Architecture, given: Mapping[str, Entry], name: str, how: Stored | None) -> Iterator[Entry]:
    """The stored tensors of a logical one. Where one stored tensor holds several, only the first of them yields it."""
    entry = given[name]
    if how is None or how.half == 1 or (how.joined and how.joined[0] != name):
        return
    shape = _stored_shape(arch, how, {other: given[other].shape for other in how.joined}, entry.shape)
    if how.joined:
        yield Entry(how.name, shape, _widest(parts := [given[other] for other in how.joined]), lambda: _in_turn(parts))
    elif how.by_head:
        yield Entry(how.name, shape, entry.dtype, lambda: entry.part(slice(None)).reshape(shape))
    elif how.each:
        for expert, stored in enumerate(how.names(entry.shape[0])):
            yield Entry(stored, shape, entry.dtype, functools.partial(entry.part, slice(expert, expert + 1)))
    elif how.half is None and not how.transposed:
        yield entry._replace(name=how.name)
    else:
        parts = [entry] if how.half is None else [entry, given[name.replace(".w1.", ".w3.")]]
        yield Entry(how.name, shape, _widest(parts), functools.partial(_joined, how, parts))


def _widest(parts: Sequence[Entry]) -> torch.dtype:
    return functools.reduce(torch.promote_types, [part.dtype for part in parts])


def _in_turn(parts: Sequence[Entry]) -> Iterator[Tensor]:
    """Yield the rows of each tensor in turn."""
    for part in parts:
        yield part.part(slice(None))


def _joined(how: Stored, parts: Sequence[Entry]) -> Iterator[Tensor]:
    """Yield a stored tensor from its logical ones, one expert at a time."""
    for expert in range(parts[0].shape[0]):
        yield how.join([part.part(slice(expert, expert + 1)) for part in parts])


def _warn_of_balance(left_out: Sequence[Entry], family: str) -> None:
    """Say that a family's model chooses experts without the bias that balanced them."""
    moved = [entry.name for entry in left_out if entry.part(slice(None)).any()]
    if moved:
        logger.warning(
            "%s has no balancing bias: %s is left out, so it sends some tokens to other experts than this model does",
            CLASSES[family],
            listed(moved, 1),
        )


def _plan_shards(entries: Sequence[Entry], limit: int) -> dict[str, list[Entry]]:
    """File names and what goes into each: at most `limit` bytes, or one tensor that is larger."""
    shards: list[list[Entry]] = [[]]
    size = 0
    for entry in entries:
        if shards[-1] and size + entry.bytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(entry)
        size += entry.bytes
    if len(shards) == 1:
        return {"model.safetensors": shards[0]}
    return {f"model-{number:05d}-of-{len(shards):05d}.safetensors": shard for number, shard in enumerate(shards, 1)}


def _special_tokens(folder: Path | str | None) -> dict[str, Any]:
    if folder is None or not (Path(folder) / "config.json").is_file():
        return {}
    given = read_config(Path(folder))
    return {key: given[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if given.get(key) is not None}


def copy_assets(source: Path | str, target: Path | str) -> None:
    """Copy the tokenizer files that exist; a `source` that is a file becomes the tokenizer.json."""
    if Path(source).is_file():
        shutil.copyfile(source, Path(target) / "tokenizer.json")
    for name in TOKENIZER_FILES:
        if (Path(source) / name).is_file():
            shutil.copyfile(Path(source) / name, Path(target) / name)


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
