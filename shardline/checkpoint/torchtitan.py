"""TorchTitan's checkpoints in: folders of torch.distributed.checkpoint, read tensor by tensor.

    step-1000/.metadata        a Python pickle: which tensors there are, and which file holds which part of them
    step-1000/__0_0.distcp     parts of tensors, one file or more for each rank that wrote

A pickle can run any code while it is read, so this happens only where the user says the folder is to be trusted. The
parts themselves are read by torch with `weights_only`. The format has no checksums: a flipped bit is not noticed.

Queries and keys of TorchTitan's Llama turn neighbouring rows (2i with 2i + 1), ours and its Qwen3 those half a head
apart (i with i + D/2); rows are put in our order on the way:

    theirs  a0 b0 a1 b1 a2 b2 ...      ours  a0 a1 a2 ... b0 b1 b2 ...
"""

from __future__ import annotations

import math
import pickle
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from shardline.config.architecture import Architecture, build
from shardline.config.schema import Config
from shardline.errors import ConfigError, UserError
from shardline.models.flavors import FLAVORS, resolve
from shardline.models.fused_weights import logical_shapes
from shardline.models.hf import hf_name
from shardline.storage.safetensors import TYPES

METADATA = ".metadata"
Shapes = Mapping[str, tuple[int, ...]]
# What a full checkpoint holds beside the model, and what models once saved of their rotary tables.
_NOT_WEIGHTS = re.compile(r"(optimizer|optim|lr_scheduler|dataloader|train_state|ft_dataloader)\b.*|.*freqs_cis")
_UNSEEN = ("rope_theta", "norm_eps")  # shapes do not tell them


class _Reader(dcp.FileSystemReader):
    """Reads the metadata once: every load asks for it anew, and it is large."""

    known: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self.known is None:
            self.known = super().read_metadata(*args, **kwargs)
        return self.known


class DCPTensors(Mapping[str, Tensor]):
    """The weights in a folder by our names, each read when asked for; `arch` decides about the order of rows."""

    def __init__(self, folder: Path, rows: dict[str, tuple[str, TensorStorageMetadata]], reader: _Reader) -> None:
        self.folder, self._rows, self._reader = folder, rows, reader
        self.arch: Architecture | None = None

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(row.size) for name, (_, row) in self._rows.items()}

    def dtype(self, name: str) -> torch.dtype:
        return self._rows[name][1].properties.dtype

    def drop(self, name: str) -> None:
        del self._rows[name]

    def __getitem__(self, name: str) -> Tensor:
        assert self.arch is not None
        tensor = self.stored(name)
        if self.arch.family == "llama" and re.search(r"\.attention\.w[qk]\.", name):
            return halves_from_pairs(tensor, self.arch.head_dim)
        return tensor

    def stored(self, name: str) -> Tensor:
        """A tensor as it lies in the files."""
        key, row = self._rows[name]
        tensor = torch.empty(row.size, dtype=row.properties.dtype)
        try:
            dcp.load({key: tensor}, storage_reader=self._reader, no_dist=True)
        except CheckpointException as error:  # no Exception, but a BaseException
            causes = [f"{type(cause).__name__}: {cause}" for cause, _ in error.failures.values()]
            raise UserError(f"{self.folder}: {key} cannot be read ({'; '.join(causes)})") from error
        return tensor

    def __contains__(self, name: object) -> bool:
        return name in self._rows  # Mapping's own would read the tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)


def halves_from_pairs(rows: Tensor, head_dim: int) -> Tensor:
    """Rows (heads * D, ...) whose neighbours turn together, in the order in which i turns with i + D/2."""
    return rows.unflatten(0, (-1, head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)


def open_dcp(folder: Path, config: Config | None) -> DCPTensors:
    """Open a folder that is trusted; its tensors must be those of the model that `config` names, or of a known one."""
    tensors = _list(folder)
    tensors.arch = arch = _architecture(folder, tensors.shapes(), config)
    if arch.tie_word_embeddings and "output.weight" in tensors:
        if not torch.equal(tensors.stored("output.weight"), tensors.stored("tok_embeddings.weight")):
            raise UserError(
                f"{folder}: output.weight differs from tok_embeddings.weight, but the model ties them;"
                " give --model.overrides.tie_word_embeddings=false to keep both"
            )
        tensors.drop("output.weight")
    problems = _problems(tensors.shapes(), logical_shapes(arch))
    if problems:
        more = f"\n  and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise UserError(f"{folder}: the tensors do not fit the model\n  " + "\n  ".join(problems[:8]) + more)
    return tensors


def _list(folder: Path) -> DCPTensors:
    reader = _Reader(folder)
    try:
        metadata = reader.read_metadata()
        every = dict(metadata.state_dict_metadata)
    except (OSError, ValueError, TypeError, AttributeError, ImportError, EOFError, pickle.UnpicklingError) as error:
        raise UserError(f"{folder / METADATA} cannot be read ({type(error).__name__}: {error})") from error
    rows: dict[str, tuple[str, TensorStorageMetadata]] = {}
    strange = []
    for key, row in every.items():
        if _NOT_WEIGHTS.fullmatch(key):
            continue
        name = key.removeprefix("model.")
        if not isinstance(row, TensorStorageMetadata) or not _is_ours(name) or name in rows:
            strange.append(key)
            continue
        _check_row(folder, key, row)
        rows[name] = (key, row)
    if strange:
        more = f" and {len(strange) - 3} more" if len(strange) > 3 else ""
        raise UserError(f"{folder} holds what no model here has: {', '.join(strange[:3])}{more}")
    if not rows:
        raise UserError(
            f"{folder} holds no weights of a model (tok_embeddings.weight, layers.0.attention.wq.weight, ...)"
        )
    return DCPTensors(folder, rows, reader)


def _is_ours(name: str) -> bool:
    try:
        return bool(hf_name(name))
    except KeyError:
        return False


def _check_row(folder: Path, key: str, row: TensorStorageMetadata) -> None:
    """Elements that no part holds would be left as the memory was."""
    held = sum(math.prod(chunk.sizes) for chunk in row.chunks)
    if held != math.prod(row.size):
        raise UserError(f"{folder}: {key} has {math.prod(row.size)} elements, its parts {held}: it was not saved whole")
    if row.properties.dtype not in TYPES.values():
        raise UserError(f"{folder}: {key} is {row.properties.dtype}, which is not read")


def _problems(stored: Shapes, wanted: Shapes) -> list[str]:
    other = [name for name in wanted if name in stored and stored[name] != wanted[name]]
    problems = [f"wrong shape: {name} is {list(stored[name])}, the model wants {list(wanted[name])}" for name in other]
    problems += [f"missing: {name}" for name in wanted if name not in stored]
    return problems + [f"unexpected: {name}" for name in stored if name not in wanted]


# ---- which model it is -----------------------------------------------------------------------------------------------


def _architecture(folder: Path, shapes: Shapes, config: Config | None) -> Architecture:
    """As the config names it; else the flavor that alone has these shapes; else what shapes and overrides tell."""
    if config is not None and any(config.is_set(f"model.{key}") for key in ("name", "flavor")):
        return resolve(config.model)
    overrides = {} if config is None else dict(config.model.overrides)
    flavor = _only_flavor(shapes)
    if flavor is not None:
        name, arch = flavor[0], flavor[1].with_overrides(overrides)
        print(f"its shapes are those of {name}, which tells the rest: {_unseen(arch)}")
        return arch
    found = _from_shapes(folder, shapes)
    known = {**found, **overrides}
    missing = [name for name in _UNSEEN if name not in known]
    if "head_dim" not in known and "n_heads" not in known:
        missing.insert(0, "n_heads")
    if missing:
        seen = ", ".join(f"{name} {value}" for name, value in found.items() if name != "family")
        raise UserError(
            f"{folder}: the shapes tell {seen}\nthey do not tell {', '.join(missing)}: name the model with --model.name"
            f" and --model.flavor, or give {', '.join(f'--model.overrides.{name}=...' for name in missing)}"
        )
    arch = _completed(shapes, known)
    print(f"the model, from its shapes and --model.overrides: {_unseen(arch)}")
    return arch


def _unseen(arch: Architecture) -> str:
    names = ("n_heads", "n_kv_heads", "head_dim", *_UNSEEN, "rope_scaling", "max_seq_len")
    values = {name: getattr(arch, name) for name in names}
    words = [f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}" for name, value in values.items()]
    return ", ".join(words) + "; --model.flavor and --model.overrides say otherwise"


def _only_flavor(shapes: Shapes) -> tuple[str, Architecture] | None:
    """The one flavor with these shapes; those that differ in kernels and masks alone count as the plain one."""
    fitting: dict[str, Architecture] = {}
    for family, flavors in FLAVORS.items():
        for flavor, arch in flavors.items():
            stored = dict(shapes)
            if arch.tie_word_embeddings:
                stored.pop("output.weight", None)
            if not _problems(stored, logical_shapes(arch)) and arch.attn_mask_type == "causal":
                fitting[f"{family} {flavor}"] = arch
    return next(iter(fitting.items())) if len(fitting) == 1 else None


def _from_shapes(folder: Path, shapes: Shapes) -> dict[str, Any]:
    """The fields that shapes tell, of the first layer; whether the others are like it is checked later."""
    first = {name: f"layers.0.attention.{name}.weight" for name in ("wq", "wk", "q_norm")}
    needed = ("tok_embeddings.weight", first["wq"], first["wk"], "layers.0.feed_forward.w1.weight")
    missing = [name for name in needed if len(shapes.get(name, ())) != 2]
    if missing:
        raise UserError(f"{folder}: {missing[0]} is missing or no matrix")
    vocab_size, dim = shapes["tok_embeddings.weight"]
    layers = {int(match[1]) for name in shapes if (match := re.match(r"layers\.(\d+)\.", name))}
    fields: dict[str, Any] = {"dim": dim, "vocab_size": vocab_size, "n_layers": max(layers) + 1}
    fields["ffn_dim"] = shapes["layers.0.feed_forward.w1.weight"][0]
    fields["tie_word_embeddings"] = "output.weight" not in shapes
    fields["qkv_bias"] = "layers.0.attention.wq.bias" in shapes
    fields["out_bias"] = "layers.0.attention.wo.bias" in shapes
    fields["mlp_bias"] = "layers.0.feed_forward.w1.bias" in shapes
    fields["qk_norm"] = first["q_norm"] in shapes
    fields["family"] = "qwen3" if fields["qk_norm"] else "llama"
    if fields["qk_norm"]:
        fields["head_dim"] = shapes[first["q_norm"]][0]
    return fields


def _completed(shapes: Shapes, known: dict[str, Any]) -> Architecture:
    """The heads follow from one of n_heads and head_dim, and the rows of wq and wk."""
    queries, keys = (shapes[f"layers.0.attention.{name}.weight"][0] for name in ("wq", "wk"))
    given = {name: known[name] for name in ("n_heads", "head_dim") if name in known}
    if any(not isinstance(value, int) or value < 1 or queries % value for value in given.values()):
        words = ", ".join(f"{name} = {value}" for name, value in given.items())
        raise ConfigError(f"model.overrides: {words} does not divide the {queries} rows of attention.wq.weight")
    head_dim = known.get("head_dim") or queries // known["n_heads"]
    derived = {"head_dim": head_dim, "n_heads": queries // head_dim, "n_kv_heads": keys // head_dim}
    return build({**derived, **known})
