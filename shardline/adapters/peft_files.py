"""Adapters in the format of `peft`: adapter_config.json and adapter_model.safetensors, read and written.

layers.0.attention.wq.lora.a    base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight   (rank, columns)
layers.0.attention.wq.lora.b    ...lora_B.weight                                                 (rows, rank)
...magnitude                    ...lora_magnitude_vector                                         (rows,)
tok_embeddings.lora.a, b        base_model.model.model.embed_tokens.lora_embedding_A, _B
modules_to_save                 base_model.model.lm_head.weight
experts                         one tensor for all of them, (experts x rank, columns) and (rows, rank x experts)
"""

from __future__ import annotations

import functools
import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardline.adapters.lora import Adaptation, adaptation
from shardline.adapters.targets import EXPERTS, adaptable, fitting, layer_of, named_modules, spellings, tied_names
from shardline.config.architecture import WIDTH, Architecture
from shardline.config.schema import Config
from shardline.config.types import show
from shardline.errors import UserError, blame
from shardline.json_text import parse_json
from shardline.models.fused_weights import embedding_name, is_transposed, logical_shapes
from shardline.models.huggingface.files import map_file
from shardline.models.huggingface.stored import Stored, stored_as
from shardline.storage.safetensors import Entry, write_tensors
from shardline.words import listed

log = logging.getLogger("shardline")
CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
_ENDINGS = {"a": "lora_A.weight", "b": "lora_B.weight", "magnitude": "lora_magnitude_vector"}
_OF_EMBEDDING = {"a": "lora_embedding_A", "b": "lora_embedding_B"}
# Settings that we do not support, and the value that has no effect.
_OTHER: dict[str, Any] = {
    "lora_bias": False,
    "layer_replication": None,
    "trainable_token_indices": None,
    "alora_invocation_tokens": None,
    "exclude_modules": None,
}


class PeftTensor(NamedTuple):
    """A stored tensor, and the logical tensor that it represents."""

    name: str
    logical: str
    shape: tuple[int, ...]  # of the logical tensor

    @property
    def of_experts(self) -> bool:
        return EXPERTS in self.logical

    def store(self, tensor: Tensor) -> Tensor:
        if not self.of_experts:
            return tensor
        if self.logical.endswith(".a"):
            return tensor.flatten(0, 1)
        return tensor.flatten(1, -2).permute(1, 2, 0).flatten(1)  # (rows, rank, experts)

    def load(self, stored: Tensor) -> Tensor:
        if not self.of_experts:
            return stored.reshape(self.shape)
        if self.logical.endswith(".a"):
            return stored.unflatten(0, self.shape[:2])
        return stored.unflatten(1, (self.shape[-1], self.shape[0])).permute(2, 0, 1).reshape(self.shape)

    @property
    def stored_shape(self) -> tuple[int, ...]:
        return tuple(self.store(torch.empty(self.shape, device="meta")).shape)


def tensors_of(how: Adaptation, arch: Architecture) -> list[PeftTensor]:
    """Every tensor of an adapter."""
    return list(_tensors(how, arch))


def _tensors(how: Adaptation, arch: Architecture) -> Iterator[PeftTensor]:
    for logical, shape in how.shapes(arch).items():
        module, _, which = logical.partition(".lora.")
        if not which:
            name = _stored_name(logical, arch)
            if logical.endswith(".bias") and module.removesuffix(".bias") in how.targets:
                name = name.removesuffix("bias") + "base_layer.bias"
            yield PeftTensor(PREFIX + name, logical, shape)
        elif EXPERTS in logical:
            layer = layer_of(arch, module)
            like = stored_as(f"layers.{layer}{EXPERTS}w1.weight", arch.family)
            if like is None or like.transposed:
                raise UserError(f"adapters of {arch.family}'s experts have no counterpart in the format of peft")
            inner = "base_layer." if module.endswith(".w13") and f"{module.removesuffix('13')}2" in how.targets else ""
            place = f"{PREFIX}model.layers.{layer}.mlp.experts.{inner}"
            yield PeftTensor(place + _ENDINGS[which], logical, shape)
        else:
            endings = _OF_EMBEDDING if module == embedding_name(arch) else _ENDINGS
            place = _stored_name(f"{module}.weight", arch).removesuffix("weight")
            yield PeftTensor(PREFIX + place + endings[which], logical, shape)
    for other, logical in _saved_ties(how, arch).items():
        yield PeftTensor(PREFIX + other, logical, logical_shapes(arch)[logical])


def _saved_ties(how: Adaptation, arch: Architecture) -> dict[str, str]:
    """Tied weights that are trained themselves: to `peft`, each belongs to two modules."""
    return {other: name for other, name in tied_names(arch).items() if name.rpartition(".")[0] in how.saved}


def _stored_name(logical: str, arch: Architecture) -> str:
    if arch.foreign is not None:
        return logical
    stored = stored_as(logical, arch.family)
    if stored is None or stored.each or stored.transposed:
        raise UserError(f"{logical} of a {arch.family} model has no counterpart in the format of peft")
    return stored.name


def peft_config(how: Adaptation, arch: Architecture, base: str | None) -> dict[str, Any]:
    """The content of adapter_config.json."""
    experts = sorted({spellings(arch, one)[2].split(".", 3)[3] for one in how.targets if EXPERTS in one})
    modules = [one for one in how.targets if EXPERTS not in one]
    saved = sorted(_saved_name(arch, module, how.saved) for module in how.saved)
    saved += dict.fromkeys(other.rpartition(".")[0] for other in _saved_ties(how, arch))
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": how.rank,
        "lora_alpha": how.alpha,
        "rank_pattern": _patterns(arch, how, {module: how.rank_of(module) for module in how.targets}, how.rank),
        "alpha_pattern": _patterns(arch, how, {one: how.alphas.get(one, how.alpha) for one in how.targets}, how.alpha),
        "bias": how.bias,
        "lora_dropout": how.dropout,
        "use_rslora": how.use_rslora,
        "use_dora": how.use_dora,
        "target_modules": _shortest(arch, modules),
        "target_parameters": experts or None,
        "modules_to_save": saved or None,
        "inference_mode": True,
        "init_lora_weights": True,
        "fan_in_fan_out": any(is_transposed(arch, module) for module in how.targets),
        **_OTHER,
    }


def _patterns(arch: Architecture, how: Adaptation, values: dict[str, Any], usual: Any) -> dict[str, Any]:
    """Values by the names of targets with an unusual one: by a shared ending if all its targets agree, else by name."""
    names = {module: spellings(arch, module)[2 if EXPERTS in module else -1] for module in how.targets}
    found: dict[str, Any] = {}
    for ending in dict.fromkeys(name.rpartition(".")[2] for name in names.values()):
        alike = {names[one]: value for one, value in values.items() if names[one].rpartition(".")[2] == ending}
        if len(set(alike.values())) == 1:
            alike = {ending: next(iter(alike.values()))}
        found |= {name: value for name, value in alike.items() if value != usual}
    return found


def _saved_name(arch: Architecture, module: str, saved: tuple[str, ...]) -> str:
    """The last word of a name, unless other names end with it, too: `peft` compares suffixes, not words."""
    full = spellings(arch, module)[-1]
    last = full.rpartition(".")[2]
    others = {spellings(arch, name.rpartition(".")[0])[-1] for name in _saved_names(arch)}
    alike = {other for other in others if other.endswith(last)}
    return last if alike <= {spellings(arch, one)[-1] for one in saved} else full


def _shortest(arch: Architecture, modules: list[str]) -> list[str]:
    """The endings of the modules' names if these match no other modules, else full names."""
    endings = sorted({spellings(arch, one)[-1].rpartition(".")[2] for one in modules})
    known = [one for one in adaptable(arch) if EXPERTS not in one]
    if arch.foreign is not None:  # `peft` would match modules of other kinds, too
        known = list(dict.fromkeys(name.rpartition(".")[0] for name in logical_shapes(arch)))
    if endings and set(named_modules(arch, endings, known, "")) == set(modules):
        return endings
    return sorted(spellings(arch, one)[-1] for one in modules)


def write_peft(
    folder: Path, tensors: Mapping[str, Tensor], how: Adaptation, arch: Architecture, base: str | None
) -> dict[str, Any]:
    """Write an adapter from its logical tensors; returns the record of the tensor file by its name."""
    folder.mkdir(parents=True, exist_ok=True)
    entries = []
    for one in tensors_of(how, arch):
        value = one.store(tensors[one.logical]).contiguous()
        entries.append(Entry(one.name, tuple(value.shape), value.dtype, functools.partial(torch.clone, value)))
    if alike := _like_experts(how, arch):
        log.warning("peft may mistake %s for experts; `shardline export --merge` writes a model without adapter", alike)
    (folder / CONFIG).write_text(json.dumps(peft_config(how, arch, base), indent=2) + "\n", encoding="utf-8")
    return {TENSORS: write_tensors(folder / TENSORS, entries)}


def _like_experts(how: Adaptation, arch: Architecture) -> str:
    """Targets with names that, in models of some types, `peft` takes to mean only the experts."""
    if arch.foreign is None or not any(name.endswith(".gate_up_proj") for name in arch.foreign.shapes):
        return ""
    names = ("gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
    return ", ".join(name for name in names if any(module.endswith(f".{name}") for module in how.targets))


def is_adapter(folder: Path) -> bool:
    return (folder / CONFIG).is_file()


def read_config(folder: Path) -> dict[str, Any]:
    try:
        content = parse_json((folder / CONFIG).read_bytes())
    except FileNotFoundError:
        raise UserError(f"{folder} is not an adapter: it has no {CONFIG}") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{folder / CONFIG} cannot be read ({error})") from None
    if not isinstance(content, dict) or content.get("peft_type") != "LORA":
        kind = content.get("peft_type") if isinstance(content, dict) else content
        raise UserError(f"{folder / CONFIG}: peft_type is {show(kind)}; only 'LORA' is supported")
    for name, nothing in _OTHER.items():
        value = content.get(name, nothing)
        if value != nothing and value not in (None, False):
            raise UserError(f"{folder / CONFIG}: {name} = {show(value)} is not supported; only {nothing!r} is")
    if content.get("bias") not in (None, "none", "all", "lora_only"):
        raise UserError(f"{folder / CONFIG}: bias is {show(content['bias'])}; expected 'none', 'all' or 'lora_only'")
    return content


def open_peft(folder: Path, arch: Architecture) -> tuple[Adaptation, dict[str, Tensor]]:
    """Read the adapter in a folder; returns it and its tensors under logical names."""
    content, path = read_config(folder), folder / TENSORS
    if not path.is_file():
        raise UserError(f"{folder} has no {TENSORS}: an adapter needs that file and {CONFIG}")
    try:
        bias = str(content.get("bias") or "none")
        frozen = [".base_layer.weight", *([".base_layer.bias"] if bias == "none" else [])]  # tensors that peft may add
        stored = {name: one for name, one in map_file(path).items() if not name.endswith(tuple(frozen))}
        stored = {name: one for name, one in stored.items() if ".original_module." not in name}
    except OSError as error:
        raise UserError(f"{folder}: the adapter cannot be read ({error})") from None
    described = replace(_described(content, folder / CONFIG), bias=bias)
    how = _with_modules(described, arch, set(stored), content.get("target_parameters") or [])
    how = _with_patterns(how, arch, content, folder)
    wanted = {one.name: one for one in tensors_of(how, arch)}
    problems = [f"unexpected: {name}" for name in stored if name not in wanted]
    problems += [f"missing: {name}" for name in wanted if name not in stored]
    for name, one in wanted.items():
        if name in stored and tuple(stored[name].shape) != one.stored_shape:
            problems.append(f"wrong shape: {name} is {list(stored[name].shape)}, expected {list(one.stored_shape)}")
    if problems:
        raise UserError(f"{path} does not fit the model\n  " + listed(problems, 8, "\n  "))
    return how, {one.logical: one.load(stored[name]) for name, one in wanted.items()}


def _with_patterns(how: Adaptation, arch: Architecture, content: dict[str, Any], folder: Path) -> Adaptation:
    """Apply the config's ranks and alphas for single targets; patterns that match no target have no effect."""
    found: dict[str, dict[str, Any]] = {}
    for key, read in (("rank_pattern", int), ("alpha_pattern", float)):
        try:
            patterns = {str(name): read(value) for name, value in (content.get(key) or {}).items()}
            fits = {module: fitting(arch, module, patterns) for module in how.targets}
        except (AttributeError, TypeError, ValueError, re.error) as error:
            raise UserError(f"{folder / CONFIG}: {key} cannot be read ({error})") from None
        found[key] = {module: patterns[name] for module, name in fits.items() if name is not None}
    ranks = {module: rank for module, rank in found["rank_pattern"].items() if rank != how.rank}
    alphas = {module: alpha for module, alpha in found["alpha_pattern"].items() if alpha != how.alpha}
    return replace(how, ranks=ranks, alphas=alphas)


def _described(content: Mapping[str, Any], file: Path) -> Adaptation:
    """Read the numbers and switches of an adapter's config."""
    for name, (kinds, low, high) in _NUMBERS.items():
        value = content.get(name)
        if value is None and low == 0:
            continue
        if isinstance(value, bool) or not isinstance(value, kinds) or not low <= value <= high:
            words = "a whole number" if kinds is int else "a number"
            raise UserError(f"{file}: {name} = {show(value)}: expected {words} from {low} to {high}")
    for name in ("use_rslora", "use_dora"):
        if content.get(name) not in (None, False, True):
            raise UserError(f"{file}: {name} = {show(content[name])}: expected true or false")
    named = content.get("target_parameters") or []
    if not isinstance(named, list) or not all(isinstance(name, str) for name in named):
        raise UserError(f"{file}: target_parameters = {show(named)}: expected a list of names")
    return Adaptation(
        rank=content["r"],
        alpha=float(content["lora_alpha"]),
        dropout=float(content.get("lora_dropout") or 0.0),
        use_rslora=bool(content.get("use_rslora")),
        use_dora=bool(content.get("use_dora")),
        targets=(),
        saved=(),
    )


_NUMBERS: dict[str, tuple[Any, float, float]] = {  # types, smallest and largest value
    "r": (int, 1, WIDTH),
    "lora_alpha": (int | float, -1e30, 1e30),
    "lora_dropout": (int | float, 0, 1),
}


def adaptation_of(config: Config, arch: Architecture) -> Adaptation | None:
    """What a config trains, as the adapter at `lora.adapter_path` says if it is set; None: the whole model."""
    if not config.lora.enable:
        return None
    if config.lora.adapter_path is None:
        return adaptation(config.lora, arch)
    with blame("lora.adapter_path"):
        how, _ = open_peft(Path(config.lora.adapter_path), arch)
    return replace(how, dropout=config.lora.dropout)


def _with_modules(how: Adaptation, arch: Architecture, stored: set[str], parameters: Sequence[str]) -> Adaptation:
    """Add the modules that have tensors; experts only if the config names them: their tensors do not."""
    known = [
        one
        for one in adaptable(arch)
        if EXPERTS not in one or any(spellings(arch, one)[2].endswith(f".{name}") for name in parameters)
    ]
    plain = replace(how, use_dora=False, targets=tuple(known))
    found = {one.logical.partition(".lora.")[0] for one in _tensors(plain, arch) if one.name in stored}
    names = [name for name in _saved_names(arch) if how.bias == "none" or not name.endswith(".bias")]
    saved = [name.rpartition(".")[0] for name in names if PREFIX + _stored_name(name, arch) in stored]
    targets = tuple(module for module in known if module in found)
    return replace(how, targets=targets, saved=tuple(dict.fromkeys(saved)))


def _saved_names(arch: Architecture) -> list[str]:
    found = []
    for name in logical_shapes(arch):
        stored = Stored(name) if arch.foreign is not None else stored_as(name, arch.family)
        if stored is not None and not stored.each and not stored.transposed:
            found.append(name)
    return found
