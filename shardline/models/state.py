"""The model's state under its logical names, which checkpoints and Hugging Face files use."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Protocol

import torch
from torch import Tensor, nn

from shardline.config.architecture import Architecture
from shardline.errors import UserError
from shardline.models.decoder import Decoder
from shardline.models.dtensor import local, local_slices
from shardline.models.fused_weights import is_halved, logical_names, logical_rows, logical_shapes, views
from shardline.storage.safetensors import LazyTensors
from shardline.words import listed


class Parameters(Protocol):
    """A model, or some parameters of one."""

    arch: Architecture

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]: ...


class SomeParameters:
    """The parameters of a model whose names pass a test."""

    def __init__(self, model: Decoder, wanted: Callable[[str], bool]) -> None:
        self.arch, self.model, self.wanted = model.arch, model, wanted
        self.constants = getattr(model, "constants", {})  # initial values from the code of a transformers model

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return ((name, one) for name, one in self.model.named_parameters() if self.wanted(name))


def load_logical_state(model: Parameters, tensors: Mapping[str, Tensor], strict: bool = True) -> None:
    """Copy logical tensors into the model, one parameter at a time, using only the rows that this rank holds.

    With `strict` the names must be exactly those of the model; without it parameters whose tensors are absent keep
    their values, but a fused weight is never filled in part.
    """
    present = set(tensors)
    if strict:
        check_names(model.arch, present)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            wanted = logical_names(model.arch, name)
            found = [part for part in wanted if part in present]
            if not found:
                continue
            if len(found) < len(wanted):
                raise UserError(f"{name} needs {', '.join(wanted)}; only {', '.join(found)} is there")
            _copy(model.arch, name, parameter, tensors)


def check_names(arch: Architecture, present: Set[str]) -> None:
    """Refuse names other than those of the whole model, even where this rank holds a part of it."""
    check_shapes(logical_shapes(arch), present)


def check_shapes(expected: Mapping[str, tuple[int, ...]], present: Set[str]) -> None:
    missing = [part for part in expected if part not in present]
    unexpected = sorted(present - expected.keys())
    if missing or unexpected:
        raise UserError(f"the tensors do not fit the model; {misfits(missing, unexpected, most=8)}")


def misfits(missing: Sequence[str], unexpected: Sequence[str], most: int) -> str:
    """`missing: a, b; unexpected: c`, with at most `most` names of each."""
    kinds = {"missing": missing, "unexpected": unexpected}
    return "; ".join(f"{word}: {listed(names, most)}" for word, names in kinds.items() if names)


def _copy(arch: Architecture, name: str, parameter: Tensor, tensors: Mapping[str, Tensor]) -> None:
    held, shape = local_slices(parameter), tuple(parameter.shape)
    if not shape:  # a number that a model of transformers keeps beside its weights
        local(parameter).copy_(tensors[name])
        return
    if is_halved(name):
        held, shape = (held[0], *held[2:]), (shape[0], *shape[2:])
    for view, target in views(name, local(parameter)).items():
        for part in logical_rows(arch, view, shape[0], held[0]):
            if part.start < part.stop:
                place = (slice(part.start, part.stop), *held[1:])
                values = _read(tensors, part.name, (part.size, *shape[1:]), place)
                target.index_copy_(0, part.places.to(target.device), values.to(target))


def _read(tensors: Mapping[str, Tensor], name: str, shape: tuple[int, ...], place: tuple[slice, ...]) -> Tensor:
    """A part of a logical tensor of this shape; files were compared with the model when they were opened."""
    if isinstance(tensors, LazyTensors):
        return tensors.part(name, place)
    if tuple(tensors[name].shape) != shape:
        raise UserError(f"{name} has shape {tuple(tensors[name].shape)}, but the model needs {shape}")
    return tensors[name][place]
