"""Hugging Face folders: read lazily under our logical names, written in shards with an index. Bit-exact both ways."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from shardline.config.architecture import Architecture
from shardline.errors import UserError
from shardline.models.fused_weights import logical_shapes
from shardline.models.hf_config import architecture_from_hf, export_family, hf_config, read_config
from shardline.models.mxfp4 import dequantize
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
_OUTSIDE = {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_INSIDE = {
    "attention_norm": "input_layernorm",
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
}
_TYPES = ("F64", "F32", "F16", "BF16")
_ARITHMETIC = (
    "n_heads",
    "n_kv_heads",
    "rope_theta",
    "rope_scaling",
    "norm_eps",
    "sliding_window",
    "sliding_window_layers",
    "window_kind",
    "rope_layers",
    "query_scale",
    "query_scale_step",
    "rotated_norm",
)
_LAYER = re.compile(r"layers\.(\d+)\.(.+)\.(weight|bias)")


def hf_name(name: str) -> str:
    """Hugging Face's name of a logical tensor."""
    if name in _OUTSIDE:
        return _OUTSIDE[name]
    match = _LAYER.fullmatch(name)
    if match is None or match[2] not in _INSIDE:
        raise KeyError(name)
    return f"model.layers.{match[1]}.{_INSIDE[match[2]]}.{match[3]}"


class HFTensors(LazyTensors):
    """The tensors of a Hugging Face folder, mapped from their files: a rank that uses some rows reads only these."""

    def __init__(self, arch: Architecture, rows: dict[str, Row]) -> None:
        self.arch, self._rows = arch, rows

    def __getitem__(self, name: str) -> Tensor:
        return _map_tensor(*self._rows[name])

    def dtype(self, name: str) -> torch.dtype:
        return torch_type(self._rows[name][1].dtype)


def read_hf(folder: Path | str, arch: Architecture | None = None) -> HFTensors:
    """Open a Hugging Face folder; its tensors must be exactly those of `arch` (default: of its own config.json)."""
    folder = Path(folder)
    if arch is None:
        arch = architecture_from_hf(folder)
    elif (folder / "config.json").is_file():
        _warn_of_differences(folder, architecture_from_hf(folder), arch)
    wanted = {hf_name(name): (name, shape) for name, shape in logical_shapes(arch).items()}
    stored = {name: row for name, row in _stored(folder).items() if not name.endswith("rotary_emb.inv_freq")}
    if arch.tie_word_embeddings and "lm_head.weight" in stored:
        _check_tied(folder, stored)
        del stored["lm_head.weight"]
    shapes = {name: row.shape for name, (_, row) in stored.items()}
    problems = shape_problems(shapes, {name: shape for name, (_, shape) in wanted.items()})
    strange = [(name, row.dtype) for name, (_, row) in stored.items() if name in wanted and row.dtype not in _TYPES]
    problems += [f"wrong type: {name} is {dtype}, only {', '.join(_TYPES)} are read" for name, dtype in strange]
    if problems:
        raise UserError(f"{folder}: the tensors do not fit the model\n  " + listed(problems, 8, "\n  "))
    return HFTensors(arch, {name: stored[outside] for outside, (name, _) in wanted.items()})


def shape_problems(stored: Mapping[str, tuple[int, ...]], wanted: Mapping[str, tuple[int, ...]]) -> list[str]:
    """The differences between the stored tensors and the wanted ones, a line each."""
    differing = [name for name in wanted if name in stored and stored[name] != wanted[name]]
    return [
        *(f"wrong shape: {n} is {list(stored[n])}, but the model needs {list(wanted[n])}" for n in differing),
        *(f"missing: {name}" for name in wanted if name not in stored),
        *(f"unexpected: {name}" for name in stored if name not in wanted),
    ]


def _warn_of_differences(folder: Path, theirs: Architecture, ours: Architecture) -> None:
    """Warn where the weights fit but this model computes differently from theirs."""
    pairs = [(name, getattr(theirs, name), getattr(ours, name)) for name in _ARITHMETIC]
    changes = [f"{name}: {one!r}, here {two!r}" for name, one, two in pairs if one != two]
    if changes:
        logger.warning(
            '%s: the model computes differently from its config.json (%s); model.name = "auto" follows that file',
            folder,
            ", ".join(changes),
        )


class Packed(NamedTuple):
    """Experts in MXFP4: two stored tensors that are read as the one that a folder without it would have."""

    blocks: HeaderRow
    scales_path: Path
    scales: HeaderRow
    dtype: str = "BF16"

    @property
    def shape(self) -> tuple[int, ...]:
        experts, rows, groups, _ = self.blocks.shape
        return experts, 32 * groups, rows  # each expert's matrix is transposed

    def read(self, path: Path, first: slice) -> Tensor:
        blocks, scales = _map_tensor(path, self.blocks, first), _map_tensor(self.scales_path, self.scales, first)
        return dequantize(blocks, scales).transpose(1, 2)


Row = tuple[Path, HeaderRow | Packed]


def _readable(stored: Mapping[str, tuple[Path, HeaderRow]]) -> dict[str, Row]:
    """The tensors of the text model, with those of MXFP4 put together."""
    text = "language_model."
    if any(name.startswith(text) for name in stored):  # beside a model of images
        stored = {name.removeprefix(text): place for name, place in stored.items() if name.startswith(text)}
    found: dict[str, Row] = {}
    for name, (path, row) in stored.items():
        base = name.removesuffix("_blocks")
        if base != name and f"{base}_scales" in stored and len(row.shape) == 4:
            found[base] = path, Packed(row, *stored[f"{base}_scales"])
        elif f"{name.removesuffix('_scales')}_blocks" not in stored:
            found[name] = path, row
    return found


def _stored(folder: Path) -> dict[str, Row]:
    """Every stored tensor's name, file and place in it."""
    index, single = folder / INDEX, folder / "model.safetensors"
    if index.is_file():
        return _readable(_indexed(folder, index))
    if single.is_file():
        return _readable({name: (single, row) for name, row in _header(single).items()})
    if list(folder.glob("*.bin")):
        raise UserError(f"{folder} holds pickled weights (*.bin); only safetensors are read: save it as safetensors")
    raise UserError(f"{folder}: there is no model.safetensors and no {INDEX}")


def _indexed(folder: Path, index: Path) -> dict[str, tuple[Path, HeaderRow]]:
    try:
        table = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        places = {str(name): folder / str(file) for name, file in table.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{index}: cannot be read ({error})") from None
    headers: dict[Path, dict[str, HeaderRow]] = {}
    for path in sorted(set(places.values())):
        if path.parent != folder or not path.is_file():
            raise UserError(f"{index} names {path.name!r}, which is not in {folder}")
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


def _map_tensor(path: Path, row: HeaderRow | Packed, first: slice = slice(None)) -> Tensor:
    """A tensor, or some of its rows, over the file itself; writing to it changes a copy."""
    if isinstance(row, Packed):
        return row.read(path, first)
    dtype = torch_type(row.dtype)
    size = row.elements * dtype.itemsize
    if size == 0:  # nothing can be mapped
        return torch.empty(row.shape, dtype=dtype)[first]
    try:
        raw = np.memmap(path, np.uint8, mode="c", offset=row.start, shape=(size,))
    except ValueError:
        raise UserError(f"{path}: it ends within a tensor of {size} bytes at byte {row.start}") from None
    # Headers are padded to 8 bytes by most writers; elements at other places are copied to where a CPU can load them.
    aligned = raw if row.start % dtype.itemsize == 0 else np.array(raw)
    return torch.from_numpy(aligned).view(dtype).view(row.shape)[first]


def _check_tied(folder: Path, stored: dict[str, Row]) -> None:
    """A tied model's file may repeat the embedding as lm_head; a different lm_head would be lost silently."""
    embedding = _OUTSIDE["tok_embeddings.weight"]
    if embedding not in stored:
        return
    if not torch.equal(_map_tensor(*stored["lm_head.weight"]), _map_tensor(*stored[embedding])):
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
    """Write logical tensors as a folder that transformers opens, one at a time: none is held when the next is read.

    `dtype` None keeps each tensor's own. Everything is written beside `out` and renamed at the end; `out` must be
    absent or empty. Tokenizer files come from `assets_from`, and so do `bos_token_id` and `eos_token_id` where it has a
    config.json; otherwise `special_tokens` gives them. Returns the checksums of the tensors' files by name.
    """
    out = Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} exists and is not empty; choose another folder or remove it")
    export_family(arch)  # before anything is written: refuses what no Hugging Face model computes
    shards = _plan_shards(_outside(entries, arch, dtype), max_shard_bytes)
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
        _write_json(partial / "config.json", hf_config(arch, type_name, **special))
        os.replace(partial, out)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return records


def _outside(entries: Sequence[Entry], arch: Architecture, dtype: torch.dtype | None) -> list[Entry]:
    """The model's tensors under Hugging Face's names; they must be all of the model's, each once."""
    wanted, renamed = logical_shapes(arch), list[Entry]()
    for entry in entries:
        if entry.name == "output.weight" and arch.tie_word_embeddings:
            continue
        if wanted.pop(entry.name, None) != entry.shape:
            raise ValueError(f"{entry.name} {entry.shape} is not a tensor of this model, or was given twice")
        renamed.append(entry._replace(name=hf_name(entry.name), dtype=dtype or entry.dtype))
    if wanted:
        raise ValueError(f"tensors were not given: {', '.join(wanted)}")
    return renamed


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
    return {key: given[key] for key in ("bos_token_id", "eos_token_id") if given.get(key) is not None}


def copy_assets(source: Path | str, target: Path | str) -> None:
    """Copy the tokenizer files that exist; a `source` that is a file becomes the tokenizer.json."""
    if Path(source).is_file():
        shutil.copyfile(source, Path(target) / "tokenizer.json")
    for name in TOKENIZER_FILES:
        if (Path(source) / name).is_file():
            shutil.copyfile(Path(source) / name, Path(target) / name)


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
