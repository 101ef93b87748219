"""Hugging Face folders: read lazily under our logical names, written in shards with an index. Bit-exact both ways."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from shardline.config.architecture import Architecture
from shardline.errors import UserError
from shardline.models.fused import logical_shapes
from shardline.models.hf_config import architecture_from_hf, export_family, hf_config, read_config

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
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
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

    def __getitem__(self, name: str) -> Tensor:
        path, stored = self._places[name]
        return self._file(path).get_tensor(stored)

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
    """Open a Hugging Face folder; its tensors must be exactly those of `arch` (None: of its own config.json)."""
    folder = Path(folder)
    if arch is None:
        arch = architecture_from_hf(folder)
    elif (folder / "config.json").is_file():
        _warn_of_differences(folder, architecture_from_hf(folder), arch)
    wanted = {hf_name(name): (name, shape) for name, shape in logical_shapes(arch).items()}
    stored = {name: path for name, path in _stored(folder).items() if not name.endswith("rotary_emb.inv_freq")}
    if arch.tie_word_embeddings and "lm_head.weight" in stored:
        _check_tied(stored)
        del stored["lm_head.weight"]
    problems = _problems(wanted, stored)
    if problems:
        more = f"\n  and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise UserError(f"{folder}: the tensors do not fit the model\n  " + "\n  ".join(problems[:8]) + more)
    return HFTensors(arch, {name: (stored[outside], outside) for outside, (name, _) in wanted.items()})


def _problems(wanted: Mapping[str, tuple[str, tuple[int, ...]]], stored: Mapping[str, Path]) -> list[str]:
    """What keeps the stored tensors from being the wanted ones, a line each."""
    problems = [f"missing: {name}" for name in wanted if name not in stored]
    problems += [f"unexpected: {name}" for name in stored if name not in wanted]
    for name in (name for name in wanted if name in stored):
        shape, (found, dtype) = wanted[name][1], _header(stored[name], name)
        if found != shape:
            problems.append(f"wrong shape: {name} is {list(found)}, the model wants {list(shape)}")
        if dtype not in _DTYPES:
            problems.append(f"wrong type: {name} is {dtype}, only {', '.join(_DTYPES)} are read")
    return problems


def _warn_of_differences(folder: Path, theirs: Architecture, ours: Architecture) -> None:
    """Weights can fit a model that computes otherwise than theirs did: say so."""
    pairs = [(name, getattr(theirs, name), getattr(ours, name)) for name in _ARITHMETIC]
    changes = [f"{name}: {one!r}, here {two!r}" for name, one, two in pairs if one != two]
    if changes:
        logger.warning(
            '%s: the model computes otherwise than its config.json says (%s); model.name = "auto" follows it',
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
    except (ValueError, KeyError, TypeError, AttributeError) as error:
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


def _header(path: Path, name: str) -> tuple[tuple[int, ...], str]:
    """Shape and type of a stored tensor."""
    stored = _open(path).get_slice(name)
    return tuple(stored.get_shape()), stored.get_dtype()


def _check_tied(stored: dict[str, Path]) -> None:
    """A tied model's file may repeat the embedding as lm_head; another lm_head would be lost without a word."""
    embedding = _OUTSIDE["tok_embeddings.weight"]
    if embedding not in stored:
        return
    head = _open(stored["lm_head.weight"]).get_tensor("lm_head.weight")
    if not torch.equal(head, _open(stored[embedding]).get_tensor(embedding)):
        raise UserError(
            "tie_word_embeddings is true but lm_head.weight differs from model.embed_tokens.weight; "
            "set tie_word_embeddings to false in config.json to keep both"
        )


def write_hf(
    tensors: Iterable[tuple[str, Tensor]],
    arch: Architecture,
    out: Path | str,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 5 * 10**9,
    assets_from: Path | str | None = None,
) -> Path:
    """Write logical tensors as a folder that transformers opens; at most one shard is held in memory.

    `dtype` None keeps each tensor's own. Everything is written beside `out` and renamed at the end; `out` must not
    exist or be empty. Tokenizer files and the special tokens' numbers come from `assets_from`.
    """
    out = Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} exists and is not empty; choose another folder or remove it")
    export_family(arch)  # refuses what no Hugging Face model computes before anything is written
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.parent / f".{out.name}.partial-{os.getpid()}"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        shards, first_dtype = _write_shards(tensors, arch, partial, dtype, max_shard_bytes)
        _name_shards(partial, shards)
        _write_config(arch, partial, dtype or first_dtype, assets_from)
        os.replace(partial, out)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return out


def _write_shards(
    tensors: Iterable[tuple[str, Tensor]], arch: Architecture, folder: Path, dtype: torch.dtype | None, limit: int
) -> tuple[list[dict[str, int]], torch.dtype]:
    """Write `shard-N` files; return each shard's tensor names with their bytes, and the first tensor's type."""
    shards: list[dict[str, int]] = []
    held: dict[str, Tensor] = {}
    first: torch.dtype | None = None

    def flush() -> None:
        path = folder / f"shard-{len(shards)}"
        save_file(held, path, metadata={"format": "pt"})
        with path.open("rb") as file:
            os.fsync(file.fileno())
        shards.append({name: tensor.nbytes for name, tensor in held.items()})
        held.clear()

    wanted = logical_shapes(arch)
    for name, tensor in tensors:
        if name == "output.weight" and arch.tie_word_embeddings:
            continue
        if wanted.pop(name, None) != tuple(tensor.shape):
            raise ValueError(f"{name} {tuple(tensor.shape)} is not a tensor of this model, or was given twice")
        plain = _plain(tensor, dtype)
        first = first or plain.dtype
        if held and sum(other.nbytes for other in held.values()) + plain.nbytes > limit:
            flush()
        held[hf_name(name)] = plain
    if wanted:
        raise ValueError(f"tensors were not given: {', '.join(wanted)}")
    flush()
    assert first is not None
    return shards, first


def _plain(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """On the CPU, contiguous, in memory of its own: the file format refuses shared memory."""
    plain = tensor.detach().to("cpu", dtype or tensor.dtype).contiguous()
    return plain if plain.untyped_storage().nbytes() == plain.nbytes else plain.clone()


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


def _write_config(arch: Architecture, folder: Path, dtype: torch.dtype, assets_from: Path | str | None) -> None:
    special: dict[str, Any] = {}
    if assets_from is not None:
        copy_assets(assets_from, folder)
        if (Path(assets_from) / "config.json").is_file():
            given = read_config(Path(assets_from))
            special = {key: given.get(key) for key in ("bos_token_id", "eos_token_id")}
    _write_json(folder / "config.json", hf_config(arch, str(dtype).removeprefix("torch."), **special))


def copy_assets(source: Path | str, target: Path | str) -> None:
    """Copy the tokenizer's files, those that are there."""
    for name in TOKENIZER_FILES:
        if (Path(source) / name).is_file():
            shutil.copyfile(Path(source) / name, Path(target) / name)


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
