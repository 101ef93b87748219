"""Hugging Face folders: read lazily under our logical names, written in shards with an index. Bit-exact both ways."""

from __future__ import annotations

import json
import logging
import math
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from shardline.config.architecture import Architecture
from shardline.errors import UserError
from shardline.models.fused_weights import logical_shapes
from shardline.models.hf_config import architecture_from_hf, export_family, hf_config, read_config
from shardline.storage.overflow import Converter

logger = logging.getLogger("shardline")
MOST_MAPPED = 64 << 20
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
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_ARITHMETIC = (
    "n_heads",
    "n_kv_heads",
    "rope_theta",
    "rope_scaling",
    "norm_eps",
    "sliding_window",
    "sliding_window_layers",
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


class HFTensors(Mapping[str, Tensor]):
    """The tensors of a Hugging Face folder by logical name, each read from its file when asked for."""

    def __init__(self, arch: Architecture, places: dict[str, tuple[Path, str]]) -> None:
        self.arch = arch
        self._places = places
        self._files: dict[Path, Any] = {}
        self._mapped = 0

    def __getitem__(self, name: str) -> Tensor:
        path, stored = self._places[name]
        tensor: Tensor = self._file(path).get_tensor(stored)
        self._mapped += tensor.nbytes
        if self._mapped > MOST_MAPPED:  # pages that were read count as resident memory until their file is closed
            self._files.clear()
            self._mapped = 0
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def dtype(self, name: str) -> torch.dtype:
        """The type a tensor is stored in, without reading it."""
        path, stored = self._places[name]
        return _DTYPES[self._file(path).get_slice(stored).get_dtype()]

    def _file(self, path: Path) -> Any:
        if path not in self._files:
            self._files[path] = _open(path)
        return self._files[path]


def read_hf(folder: Path | str, arch: Architecture | None = None) -> HFTensors:
    """Open a Hugging Face folder; its tensors must be exactly those of `arch` (default: of its own config.json)."""
    folder = Path(folder)
    if arch is None:
        arch = architecture_from_hf(folder)
    elif (folder / "config.json").is_file():
        _warn_of_differences(folder, architecture_from_hf(folder), arch)
    wanted = {hf_name(name): (name, shape) for name, shape in logical_shapes(arch).items()}
    stored = {name: path for name, path in _stored(folder).items() if not name.endswith("rotary_emb.inv_freq")}
    if arch.tie_word_embeddings and "lm_head.weight" in stored:
        _check_tied(folder, stored)
        del stored["lm_head.weight"]
    problems = _problems(wanted, stored)
    if problems:
        more = [f"and {len(problems) - 8} more"] if len(problems) > 8 else []
        raise UserError("\n  ".join([f"{folder}: the tensors do not fit the model", *problems[:8], *more]))
    return HFTensors(arch, {name: (stored[outside], outside) for outside, (name, _) in wanted.items()})


def _problems(wanted: Mapping[str, tuple[str, tuple[int, ...]]], stored: Mapping[str, Path]) -> list[str]:
    """The differences between the stored tensors and the wanted ones, a line each."""
    problems = [f"missing: {name}" for name in wanted if name not in stored]
    problems += [f"unexpected: {name}" for name in stored if name not in wanted]
    opened = {path: _open(path) for path in set(stored.values())}
    for name in (name for name in wanted if name in stored):
        entry = opened[stored[name]].get_slice(name)
        shape, found, dtype = wanted[name][1], tuple(entry.get_shape()), entry.get_dtype()
        if found != shape:
            problems.append(f"wrong shape: {name} is {list(found)}, but the model needs {list(shape)}")
        if dtype not in _DTYPES:
            problems.append(f"wrong type: {name} is {dtype}, only {', '.join(_DTYPES)} are read")
    return problems


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


def _stored(folder: Path) -> dict[str, Path]:
    """Every stored tensor's name and file."""
    index, single = folder / INDEX, folder / "model.safetensors"
    if index.is_file():
        return _indexed(folder, index)
    if single.is_file():
        return dict.fromkeys(_open(single).keys(), single)
    if list(folder.glob("*.bin")):
        raise UserError(f"{folder} holds pickled weights (*.bin); only safetensors are read: save it as safetensors")
    raise UserError(f"{folder}: there is no model.safetensors and no {INDEX}")


def _indexed(folder: Path, index: Path) -> dict[str, Path]:
    try:
        table = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        places = {str(name): folder / str(file) for name, file in table.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{index}: cannot be read ({error})") from None
    for path in sorted(set(places.values())):
        if path.parent != folder or not path.is_file():
            raise UserError(f"{index} names {path.name!r}, which is not in {folder}")
        present = set(_open(path).keys())
        absent = [name for name, place in places.items() if place == path and name not in present]
        if absent:
            raise UserError(f"{path}: {absent[0]} is in the index but not in the file")
    return places


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path}: cannot be read ({error})") from None


def _check_tied(folder: Path, stored: dict[str, Path]) -> None:
    """A tied model's file may repeat the embedding as lm_head; a different lm_head would be lost silently."""
    embedding = _OUTSIDE["tok_embeddings.weight"]
    if embedding not in stored:
        return
    head = _open(stored["lm_head.weight"]).get_tensor("lm_head.weight")
    if not torch.equal(head, _open(stored[embedding]).get_tensor(embedding)):
        raise UserError(
            f"{folder}: tie_word_embeddings is true but lm_head.weight differs from model.embed_tokens.weight; "
            "set tie_word_embeddings to false in config.json to keep both"
        )


def write_hf(
    tensors: Iterable[tuple[str, Tensor]],
    arch: Architecture,
    out: Path | str,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 5 * 10**9,
    assets_from: Path | str | None = None,
    special_tokens: Mapping[str, Any] | None = None,
) -> Path:
    """Write logical tensors as a folder that transformers opens, one at a time: none is held when the next is read.

    `dtype` None keeps each tensor's own. Everything is written beside `out` and renamed at the end; `out` must be
    absent or empty. Tokenizer files come from `assets_from`, and so do `bos_token_id` and `eos_token_id` where it has a
    config.json; otherwise `special_tokens` gives them.
    """
    out = Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} exists and is not empty; choose another folder or remove it")
    export_family(arch)  # before anything is written: refuses what no Hugging Face model computes
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.parent / f".{out.name}.partial-{os.getpid()}"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        shards, first_dtype = _write_shards(tensors, arch, partial, dtype, max_shard_bytes)
        _name_shards(partial, shards)
        if assets_from is not None:
            copy_assets(assets_from, partial)
        special = _special_tokens(assets_from) or special_tokens or {}
        _write_json(partial / "config.json", hf_config(arch, _type_name(dtype or first_dtype), **special))
        os.replace(partial, out)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return out


class _Shard:
    """A safetensors file that grows tensor by tensor; `room` bytes at its start are kept free for the header."""

    def __init__(self, path: Path, room: int) -> None:
        self.file, self.room, self.size = path.open("wb"), room, 0
        self.header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        self.file.seek(8 + room)

    def add(self, name: str, tensor: Tensor) -> None:
        data = tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy().data
        self.header[name] = _header_entry(tensor.dtype, tuple(tensor.shape), self.size, self.size + tensor.nbytes)
        self.file.write(data)
        self.size += tensor.nbytes

    def close(self) -> dict[str, int]:
        """Write the header and make the file durable; returns each tensor's name and bytes."""
        text = json.dumps(self.header).encode()
        self.file.seek(0)
        self.file.write(self.room.to_bytes(8, "little") + text + b" " * (self.room - len(text)))
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()
        del self.header["__metadata__"]
        return {name: entry["data_offsets"][1] - entry["data_offsets"][0] for name, entry in self.header.items()}


def _write_shards(
    tensors: Iterable[tuple[str, Tensor]], arch: Architecture, folder: Path, dtype: torch.dtype | None, limit: int
) -> tuple[list[dict[str, int]], torch.dtype]:
    """Write `shard-N` files; return each shard's tensor names with their bytes, and the first tensor's type."""
    wanted = logical_shapes(arch)
    room = _header_room(wanted)
    shards: list[dict[str, int]] = []
    shard, first = _Shard(folder / "shard-0", room), None
    convert = Converter()
    try:
        for name, tensor in tensors:
            if name == "output.weight" and arch.tie_word_embeddings:
                continue
            if wanted.pop(name, None) != tuple(tensor.shape):
                raise ValueError(f"{name} {tuple(tensor.shape)} is not a tensor of this model, or was given twice")
            tensor = convert(name, tensor, dtype or tensor.dtype)
            first = first or tensor.dtype
            if shard.size and shard.size + tensor.nbytes > limit:
                shards.append(shard.close())
                shard = _Shard(folder / f"shard-{len(shards)}", room)
            shard.add(hf_name(name), tensor)
            del tensor
        if wanted:
            raise ValueError(f"tensors were not given: {', '.join(wanted)}")
        shards.append(shard.close())
    finally:
        shard.file.close()
    convert.warn()
    assert first is not None
    return shards, first


def _header_entry(dtype: torch.dtype, shape: tuple[int, ...], start: int, end: int) -> dict[str, Any]:
    return {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}


def _header_room(shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Bytes enough for the header of any shard: that of all tensors together, with the longest numbers."""
    longest = 8 * sum(math.prod(shape) for shape in shapes.values())
    entries = {hf_name(name): _header_entry(torch.bfloat16, shape, longest, longest) for name, shape in shapes.items()}
    text = json.dumps({"__metadata__": {"format": "pt"}, **entries})
    return len(text) + -len(text) % 8


def _name_shards(folder: Path, shards: list[dict[str, int]]) -> None:
    """Give the shards their final names, which count them, and write the index."""
    if len(shards) == 1:
        (folder / "shard-0").rename(folder / "model.safetensors")
        return
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards):
        file = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        (folder / f"shard-{number}").rename(folder / file)
        weight_map.update(dict.fromkeys(names, file))
    total = sum(size for names in shards for size in names.values())
    _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))})


def _special_tokens(folder: Path | str | None) -> dict[str, Any]:
    if folder is None or not (Path(folder) / "config.json").is_file():
        return {}
    given = read_config(Path(folder))
    return {key: given[key] for key in ("bos_token_id", "eos_token_id") if given.get(key) is not None}


def _type_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def copy_assets(source: Path | str, target: Path | str) -> None:
    """Copy the tokenizer files that exist; a `source` that is a file becomes the tokenizer.json."""
    if Path(source).is_file():
        shutil.copyfile(source, Path(target) / "tokenizer.json")
    for name in TOKENIZER_FILES:
        if (Path(source) / name).is_file():
            shutil.copyfile(Path(source) / name, Path(target) / name)


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
