"""The model's state under its logical names: what checkpoints and Hugging Face files see."""

from __future__ import annotations

from collections.abc import Mapping, Set

import torch
from torch import Tensor

from shardline.config.architecture import Architecture
from shardline.errors import UserError
from shardline.models.decoder import Decoder
from shardline.models.dtensor import copy_into
from shardline.models.fused_weights import fuse, logical_names, logical_shapes, unfuse
from shardline.words import listed


def load_logical_state(model: Decoder, tensors: Mapping[str, Tensor], strict: bool = True) -> None:
    """Copy logical tensors into the model, one parameter at a time; `tensors` may read lazily.

    With `strict` the names must be exactly those of the model; without it parameters whose tensors are absent keep
    their values, but a fused weight is never filled in part.
    """
    wanted = {name: logical_names(model.arch, name) for name, _ in model.named_parameters()}
    present = set(tensors)
    if strict:
        check_names(model.arch, present)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            found = [part for part in wanted[name] if part in present]
            if not found:
                continue
            if len(found) < len(wanted[name]):
                raise UserError(f"{name} needs {', '.join(wanted[name])}; only {', '.join(found)} is there")
            _copy(model, name, parameter, {part: tensors[part] for part in found})


def check_names(arch: Architecture, present: Set[str]) -> None:
    """Refuse names that are not those of the whole model, even where this rank holds a part of it."""
    expected = logical_shapes(arch)
    missing = [part for part in expected if part not in present]
    unexpected = sorted(present - expected.keys())
    problems = [
        f"{word}: {listed(names, most=8)}"
        for word, names in (("missing", missing), ("unexpected", unexpected))
        if names
    ]
    if problems:
        raise UserError(f"the tensors do not fit the model; {'; '.join(problems)}")


def _copy(model: Decoder, name: str, parameter: Tensor, parts: dict[str, Tensor]) -> None:
    empty = torch.empty(parameter.shape, device="meta")
    shapes = {part: tuple(tensor.shape) for part, tensor in unfuse(model.arch, name, empty).items()}
    for part, tensor in parts.items():
        if tuple(tensor.shape) != shapes[part]:
            raise UserError(f"{part} has shape {tuple(tensor.shape)}, but the model needs {shapes[part]}")
    copy_into(parameter, fuse(model.arch, name, parts))
