"""The memory that training needs on one rank: exact for weights and optimizer state, the rest from the planner.

`plan/memory.py` finds the moment of peak memory in a step, and the size of gradients, activations and buffers then.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shardline.adapters.lora import trained_shapes
from shardline.config.layout import Layout
from shardline.config.names import MOMENTS
from shardline.config.schema import Config
from shardline.models.decoder import Decoder
from shardline.models.dtensor import local
from shardline.models.fused_weights import is_low_rank
from shardline.optim import adafactor
from shardline.optim.int8_moments import int8_bytes
from shardline.optim.matrices import is_block_matrix
from shardline.plan.memory import Memory
from shardline.precision.mixed import Precision
from shardline.training.pairs import reference_kind
from shardline.words import roughly


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes by purpose at a step's peak; None: unknown. `peak` is that of the pipeline rank that needs the most."""

    weights: int
    gradients: int
    state: int | None
    activations: int | None
    peak: int

    def words(self, optimizer: str) -> str:
        parts = {
            "weights": self.weights,
            "gradients": self.gradients,
            f"{optimizer} state": self.state,
            "activations": self.activations,
        }
        return ", ".join(f"{name} {roughly(size) if size is not None else 'unknown'}" for name, size in parts.items())


def memory_need(
    model: Decoder, config: Config, layout: Layout, precision: Precision, device_type: str, planned: Memory | None
) -> MemoryNeed:
    """Compute what this rank needs from a model that may be on the meta device."""
    held = [(name, parameter, local(parameter)) for name, parameter in model.named_parameters()]
    weights = sum(shard.numel() * shard.element_size() for _, _, shard in held)
    trained = [(name, whole, shard) for name, whole, shard in held if whole.requires_grad]
    state = sum(state_bytes(config, name, shard.shape, whole.shape, precision) for name, whole, shard in trained)
    if reference_kind(config, model.adaptation) == "copy":
        weights += sum(shard.numel() for name, _, shard in held if not is_low_rank(name)) * precision.compute.itemsize
    if config.training.enable_cpu_offload and device_type == "cuda":  # both are in host memory
        weights = state = 0
    known = state if config.optimizer.name in MOMENTS else None
    if planned is None:
        gradients = sum(shard.numel() for _, _, shard in trained) * precision.storage.itemsize
        return MemoryNeed(weights, gradients, known, None, weights + gradients + state)
    rest = int(planned.total - planned.weights - planned.optimizer)
    peak = weights + state + rest if layout.pp == 1 else int(planned.total)
    return MemoryNeed(weights, int(planned.gradients), known, rest - int(planned.gradients), peak)


def state_bytes(config: Config, name: str, shard: Sequence[int], whole: Sequence[int], precision: Precision) -> int:
    """The bytes of state that a built-in optimizer keeps for one parameter's shard."""
    section, elements, wide = config.optimizer, math.prod(shard), precision.storage
    if section.name == "Muon" and is_block_matrix(name, shard):
        return elements * wide.itemsize
    if section.name == "Adafactor":
        return adafactor.state_bytes(name, tuple(shard), section.adafactor_momentum > 0)
    if section.state_dtype == "int8" and wide != torch.bfloat16 and len(shard) > 1:
        return 2 * int8_bytes(shard, whole[-1])
    size = torch.bfloat16.itemsize if section.state_dtype == "bfloat16" else wide.itemsize
    return MOMENTS.get(section.name, 0) * elements * size


def save_bytes(model: Decoder, config: Config, precision: Precision) -> int:
    """Estimate the bytes of a save: saved weights and optimizer state, each shard counted once over all ranks."""
    trained = [(name, whole) for name, whole in model.named_parameters() if whole.requires_grad]
    here = sum(whole.numel() for _, whole in trained)
    state = sum(state_bytes(config, name, whole.shape, whole.shape, precision) for name, whole in trained)
    shapes = trained_shapes(model)
    saved = sum(math.prod(shape) for shape in shapes.values())
    frozen = sum(math.prod(shapes[name]) for name in model.frozen)
    return saved * precision.storage.itemsize + (saved - frozen) * state // max(here, 1)
