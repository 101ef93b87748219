"""The memory that training needs on one rank: exact for what is kept of parameters, an estimate for activations.

    weights, optimizer state     there from the first step on
    activations                  what blocks keep for backward; largest when forward has ended
    gradients                    there when backward has ended; by then activations are gone

Without accumulation, gradients grow where activations were, so the larger of the two counts, not their sum.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shardline.adapters.lora import trained_shapes
from shardline.config.architecture import Architecture
from shardline.config.layout import Layout
from shardline.config.names import MOMENTS
from shardline.config.schema import Config
from shardline.data.order import global_batch
from shardline.models.decoder import Decoder
from shardline.models.dtensor import local
from shardline.models.fused_weights import is_low_rank, layers_name
from shardline.optim import adafactor
from shardline.optim.int8_moments import int8_bytes
from shardline.optim.matrices import is_block_matrix
from shardline.parallel.tensor.tensor import batch_shapes
from shardline.precision.mixed import Precision
from shardline.training.loss import CHUNK_BYTES
from shardline.training.pairs import reference_kind
from shardline.words import roughly

GATHERED_BLOCKS = 2  # that FSDP holds whole: the one that computes and the next


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes by purpose; None: not known. `accumulates`: gradients stay while the next micro-batch runs forward."""

    weights: int
    gradients: int
    state: int | None
    activations: int | None
    accumulates: bool = False

    @property
    def peak(self) -> int:
        activations = self.activations or 0
        both = self.gradients + activations if self.accumulates else max(self.gradients, activations)
        return self.weights + (self.state or 0) + both

    def words(self, optimizer: str) -> str:
        parts = {
            "weights": self.weights,
            "gradients": self.gradients,
            f"{optimizer} state": self.state,
            "activations": self.activations,
        }
        return ", ".join(f"{name} {roughly(size) if size is not None else 'unknown'}" for name, size in parts.items())


def memory_need(model: Decoder, config: Config, layout: Layout, precision: Precision, device_type: str) -> MemoryNeed:
    """What this rank needs, from a model that may be on the meta device."""
    held = [(name, parameter, local(parameter)) for name, parameter in model.named_parameters()]
    weights = sum(shard.numel() * shard.element_size() for _, _, shard in held)
    trained = [(name, whole, shard) for name, whole, shard in held if whole.requires_grad]
    gradients = sum(shard.numel() for _, _, shard in trained) * precision.storage.itemsize
    known = config.optimizer.name in MOMENTS
    state = sum(state_bytes(config, name, shard.shape, whole.shape, precision) for name, whole, shard in trained)
    if reference_kind(config, model.adaptation) == "copy":
        weights += sum(shard.numel() for name, _, shard in held if not is_low_rank(name)) * precision.compute.itemsize
    activations = activation_bytes(model, config, layout, precision, device_type)
    if config.training.enable_cpu_offload and device_type == "cuda":  # the rest is in host memory
        return MemoryNeed(0, 0, 0, activations)
    if config.optimizer.early_step_in_backward:
        gradients = max((shard.numel() for _, _, shard in trained), default=0) * precision.storage.itemsize
    section, ranks = config.training, layout.data_ranks
    accumulates = global_batch(section, ranks) > section.local_batch_size * ranks
    return MemoryNeed(weights, gradients, state if known else None, activations, accumulates)


def state_bytes(config: Config, name: str, shard: Sequence[int], whole: Sequence[int], precision: Precision) -> int:
    """The bytes of what a built-in optimizer keeps of one parameter's shard."""
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
    """About the bytes of a save: the weights that a checkpoint holds, and the optimizer's state, of all ranks once."""
    trained = [(name, whole) for name, whole in model.named_parameters() if whole.requires_grad]
    here = sum(whole.numel() for _, whole in trained)
    state = sum(state_bytes(config, name, whole.shape, whole.shape, precision) for name, whole in trained)
    shapes = trained_shapes(model)
    saved = sum(math.prod(shape) for shape in shapes.values())
    frozen = sum(math.prod(shapes[name]) for name in model.frozen)
    return saved * precision.storage.itemsize + (saved - frozen) * state // max(here, 1)


# ---- activations -----------------------------------------------------------------------------------------------------


def activation_bytes(
    model: Decoder, config: Config, layout: Layout, precision: Precision, device_type: str
) -> int | None:
    """About what forward leaves for backward, copies of weights in the compute type included; None: not known."""
    arch, parallelism = model.arch, config.parallelism
    if arch.foreign is not None:
        return None
    _, rows, length = batch_shapes(config)[0]
    tokens = rows * length // layout.cp
    at_once = 1
    if layout.pp > 1:
        batches = config.training.local_batch_size // parallelism.pipeline_parallel_microbatch_size
        at_once = batches if parallelism.pipeline_parallel_schedule == "GPipe" else min(batches, layout.pp)
    layers = [_kept(arch, int(layer), layout, config) for layer in model.layers]
    in_backward = max((layer.everything for layer in layers), default=0)  # gradients inside the layer it is at
    kept = (_after_checkpointing(layers, config) * at_once + in_backward) * tokens * precision.compute.itemsize
    copies = _weight_copies(model, layout, precision)
    has_loss = any(stage.last for stage in model.stages)
    return kept + copies + (_loss_bytes(arch, tokens, layout, precision, device_type) if has_loss else 0)


@dataclass(frozen=True)
class LayerKeeps:
    """Numbers for each token that a layer keeps: its input, results of products and attention, and all of it."""

    input: int
    products: int
    everything: int


def _kept(arch: Architecture, layer: int, layout: Layout, config: Config) -> LayerKeeps:
    """Both norms keep what they read and what they give; backward makes SwiGLU's result again."""
    shared = layout.tp if config.parallelism.enable_sequence_parallel else 1
    stream, experts = arch.dim // shared, arch.moe is not None and arch.moe.holds(layer)
    heads = arch.n_heads * (arch.head_dim + arch.v_dim) + arch.n_kv_heads * (arch.head_dim + arch.v_dim)
    wide = 2 * arch.ffn_dim
    if arch.moe is not None and experts:
        wide = arch.moe.top_k * (2 * arch.moe.expert_dim + 2 * arch.dim) + 2 * arch.moe.shared_dim
    inner = (heads + wide) // layout.tp
    return LayerKeeps(stream, inner, 4 * stream + inner)


def _after_checkpointing(layers: Sequence[LayerKeeps], config: Config) -> int:
    """The most that layers keep for a token at a time, what backward has just computed again included."""
    section = config.activation_checkpoint
    if section.mode == "offload":
        return 2 * max((layer.everything for layer in layers), default=0)
    if section.mode == "memory_budget":
        return int(section.memory_budget * sum(layer.everything for layer in layers))
    if section.mode == "selective" and section.selective_ac_option == "op":
        return sum(layer.input + layer.products for layer in layers)
    every = {"full": "1", "selective": section.selective_ac_option}.get(section.mode)
    kept = most = 0
    for place, layer in enumerate(layers):
        again = every is not None and place % int(every) == 0
        kept += layer.input if again else layer.everything
        most = max(most, kept + (layer.everything if again else 0))
    return most


def _weight_copies(model: Decoder, layout: Layout, precision: Precision) -> int:
    """Blocks in the compute type: of FSDP's those that are whole at a time, else of all that are stored in another."""
    blocks = [parameter for name, parameter in model.named_parameters() if name.startswith(layers_name(model.arch))]
    size = precision.compute.itemsize
    if layout.dp_shard * layout.cp > 1:
        each = sum(parameter.numel() for parameter in blocks) // max(len(model.layers), 1) // layout.tp
        return GATHERED_BLOCKS * each * size
    return sum(local(parameter).numel() for parameter in blocks if parameter.dtype != precision.compute) * size


def _loss_bytes(arch: Architecture, tokens: int, layout: Layout, precision: Precision, device_type: str) -> int:
    """One chunk of logits, the hidden states and their gradient, and the gradient of the output's weight."""
    rows, size = arch.vocab_size // layout.tp, precision.compute.itemsize
    logits = min(tokens * rows * size, CHUNK_BYTES[device_type])
    return logits + 2 * tokens * arch.dim * size + rows * arch.dim * (precision.storage.itemsize + size)
