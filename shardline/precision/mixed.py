"""Mixed precision: the types in which parameters are stored, blocks compute and gradients are summed.

The three types mean the same on one device and on many: a weight is stored and updated in `storage`, rounded to
`compute` at each use, and its gradient is converted to `storage` before anything is summed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from shardline.config import names
from shardline.config.schema import Config

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in names.DTYPES}


@dataclass(frozen=True)
class Precision:
    storage: torch.dtype
    compute: torch.dtype
    reduce: torch.dtype
    notes: tuple[str, ...] = ()


def choose_precision(config: Config, device: torch.device, has_bfloat16: bool) -> Precision:
    """Return the types that this run uses on this device; `notes` explain differences from the config."""
    storage = DTYPES[config.training.dtype]
    compute = DTYPES[config.training.mixed_precision_param]
    notes = []
    if not config.is_set("training.mixed_precision_param") and device.type == "cpu" and compute != storage:
        compute = storage
        in_type = f"computing in {config.training.dtype} on CPU"
        notes.append(f"{in_type}; --training.mixed_precision_param=bfloat16 changes that (slower)")
    if not has_bfloat16 and torch.bfloat16 in (storage, compute):
        storage = compute = torch.float32
        notes.append(f"{device} has no bfloat16: storing and computing in float32 instead")
    return Precision(storage, compute, DTYPES[config.training.mixed_precision_reduce], tuple(notes))


def apply_precision(model: nn.Module, precision: Precision) -> None:
    """Store parameters in `storage`; blocks compute in the type of the embedding's output, which is `compute`."""
    biases = [one for name, one in model.named_parameters() if name.endswith("router.balance")]
    before = [bias.dtype for bias in biases]
    model.to(dtype=precision.storage)
    for bias, dtype in zip(biases, before, strict=True):
        bias.data = bias.data.to(dtype)  # it changes in steps of 0.001
    model.compute_dtype = precision.compute  # type: ignore[assignment]
