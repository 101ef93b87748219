"""Reads the folder of a model that `transformers` computes, under the names that its own code has for the weights."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardline.config.architecture import Architecture
from shardline.errors import UserError
from shardline.models.huggingface.files import HFTensors, Located, Row, map_tensor, shape_problems, stored_rows
from shardline.models.huggingface.foreign_config import quiet
from shardline.models.huggingface.stored import Stored
from shardline.storage.safetensors import torch_type
from shardline.words import listed

log = logging.getLogger("shardline")
# Tables that older versions of transformers stored, and that a model now computes itself.
TABLES = re.compile(r"(rotary_emb\.inv_freq|attn\.bias|attention\.bias|masked_bias)$")


class ConvertedTensors(HFTensors):
    """Tensors that transformers has renamed or joined: all of them are in memory."""

    def __init__(self, arch: Architecture, tensors: Mapping[str, Tensor]) -> None:
        super().__init__(arch, {name: Located(None, tuple(tensor.shape), []) for name, tensor in tensors.items()})
        self.tensors = tensors

    def part(self, name: str, place: tuple[slice, ...]) -> Tensor:
        return self.tensors[name][place] if self.tensors[name].ndim else self.tensors[name]

    def dtype(self, name: str) -> torch.dtype:
        return self.tensors[name].dtype


def read_foreign(folder: Path, arch: Architecture) -> HFTensors:
    """Open a folder whose tensors have the names of the model's parameters, or that transformers can convert to them.

    A folder may lack the first part of the names, repeat tied weights, and hold tables that the model computes itself.
    """
    assert arch.foreign is not None
    wanted, prefix = arch.foreign.shapes, arch.foreign.blocks.partition(".")[0] + "."
    stored: dict[str, Row] = {}
    for name, row in stored_rows(folder, readable=False).items():
        stored[name if name in wanted or prefix + name not in wanted else prefix + name] = row
    for name, other in arch.foreign.ties.items():  # a file may have a tied weight under any of its names
        if name in stored and other not in stored:
            stored[other] = stored.pop(name)
    strangers = [name for name in stored if name not in wanted and name not in arch.foreign.ties]
    if any(name not in stored for name in wanted) or not all(map(TABLES.search, strangers)):
        return _converted(folder, arch, stored)
    problems = shape_problems({name: stored[name][1].shape for name in wanted}, wanted)
    for name, other in arch.foreign.ties.items():
        if name in stored and not torch.equal(map_tensor(*stored[name]), map_tensor(*stored[other])):
            problems.append(f"{name} differs from {other}, but the model has one weight for both")
    _refuse(folder, problems)
    return HFTensors(arch, {name: Located(Stored(name), shape, [stored[name]]) for name, shape in wanted.items()})


def _converted(folder: Path, arch: Architecture, stored: Mapping[str, Row]) -> HFTensors:
    """Load the weights with transformers, which knows their other names, and experts stored one by one."""
    from transformers import AutoModelForCausalLM

    assert arch.foreign is not None
    types = [torch_type(row.dtype) for _, row in stored.values()]
    kind = next((one for one in types if one.is_floating_point), torch.float32)
    try:
        with quiet(), torch.device("cpu"):
            model, report = AutoModelForCausalLM.from_pretrained(
                folder, dtype=kind, output_loading_info=True, ignore_mismatched_sizes=True
            )
    except Exception as error:
        raise UserError(f"{folder}: transformers cannot load it: {type(error).__name__}: {error}") from error
    found: dict[str, Any] = model.state_dict()
    missing = {*report["missing_keys"], *(name for name in arch.foreign.shapes if name not in found)}
    problems = shape_problems({name: tuple(tensor.shape) for name, tensor in found.items()}, arch.foreign.shapes)
    problems = [line for line in problems if line.startswith("wrong shape")]
    problems += [f"missing: {name}" for name in sorted(missing - arch.foreign.ties.keys())]
    problems += [f"unexpected: {name}" for name in sorted(report["unexpected_keys"])]
    _refuse(folder, problems)
    log.info("%s: its tensors have other names than the model's; transformers converts them in memory", folder)
    return ConvertedTensors(arch, {name: found[name] for name in arch.foreign.shapes})


def _refuse(folder: Path, problems: list[str]) -> None:
    if problems:
        raise UserError(f"{folder}: the tensors do not fit the model\n  " + listed(problems, 8, "\n  "))
