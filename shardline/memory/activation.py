"""Activation checkpointing: what a block keeps for backward, and what it recomputes.

    none            keep everything
    full            keep each block's input, recompute the block
    selective "2"   every 2nd block as in `full`, the others as in `none`
    selective "op"  keep the outputs of attention and of every other matrix product, and rows that were sent to experts;
                    recompute the rest, including the experts' products
    memory_budget   the compiler chooses what to keep within a share of `none`'s memory
    offload         keep everything, in host memory (offload.py, around the compiled function)

The wrapper is around the block's pure function, so a compiled block has it inside its graph.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from shardline.config.schema import ActivationCheckpoint
from shardline.errors import ConfigError
from shardline.models.decoder import Decoder
from shardline.models.dtensor import local
from shardline.models.fused_weights import logical_names, logical_shapes
from shardline.models.products.cpu_product import onednn

log = logging.getLogger("shardline")
Function = Callable[..., Any]

_ATTENTION_OPS = (
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_attention_math",
)

_TRAVEL_OPS = {f"shardline::expert_{name}" for name in ("plan", "put", "land", "put_back", "gather")}
_TRAVEL_OPS |= {f"shardline::deepep_{name}" for name in ("put", "land", "put_back", "gather")}


def apply_activation_checkpoint(model: Decoder, section: ActivationCheckpoint, *, compiled: bool) -> None:
    """Wrap each block's function as `section` says, and log which blocks were wrapped."""
    _set_memory_budget(section, compiled)
    if section.mode in ("none", "offload"):
        return
    if section.mode == "memory_budget":
        kept = f"the compiler keeps {section.memory_budget:.0%} of activations"
        log.info("activation checkpointing (memory_budget): %s", kept)
        return
    selective = section.selective_ac_option if section.mode == "selective" else "1"
    per_op = selective == "op"
    every = 1 if per_op else int(selective)
    recompute_shapes = _forced_recompute(model, section) if per_op else frozenset()
    context = functools.partial(_per_op_contexts, recompute_shapes) if per_op else None
    wrapped: dict[Function, Function] = {}  # one wrapper per function, so that equal blocks share a compiled graph
    chosen = [block for layer, block in zip(model.layers, model.blocks(), strict=True) if int(layer) % every == 0]
    for block in chosen:
        if block.function not in wrapped:
            wrapped[block.function] = _checkpointed(block.function, section, context, compiled)
        block.function = wrapped[block.function]
    kept = "attention and every other matrix product kept" if per_op else "block inputs kept"
    blocks = f"{len(chosen)} of {len(model.layers)} blocks"
    log.info("activation checkpointing (%s): %s, %s", section.mode, blocks, kept)


def _checkpointed(
    function: Function, section: ActivationCheckpoint, context: Function | None, compiled: bool
) -> Function:
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": section.preserve_rng_state}
    if context is not None:
        options["context_fn"] = context
    if not compiled:  # the compiler decides these itself
        options |= {
            "determinism_check": section.determinism_check,
            "early_stop": section.early_stop,
            "debug": section.debug,
        }

    def run(*arguments: Any) -> Any:
        return checkpoint(function, *arguments, **options)

    return run


def _per_op_contexts(recompute_shapes: frozenset[tuple[int, ...]]) -> Any:
    """Make new policy state for each block and forward, so that forward and recomputation count products equally."""
    seen = {"forward": 0, "recompute": 0}

    def policy(context: Any, op: Any, *arguments: Any, **keywords: Any) -> CheckpointPolicy:
        decided = decide(context, op, *arguments)
        if decided is CheckpointPolicy.MUST_SAVE and not context.is_recompute:
            kept_results.note(getattr(context, "op_output", None))  # older releases do not provide it
        return decided

    def decide(context: Any, op: Any, *arguments: Any) -> CheckpointPolicy:
        if op in kept_attention_ops() or travels(op):
            return CheckpointPolicy.MUST_SAVE
        shape = product_shape(op, arguments)
        if shape is not None:
            if shape in recompute_shapes:
                return CheckpointPolicy.PREFER_RECOMPUTE
            phase = "recompute" if context.is_recompute else "forward"
            seen[phase] += 1
            return CheckpointPolicy.PREFER_RECOMPUTE if seen[phase] % 2 == 0 else CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


class KeptResults:
    """Bytes of results that "op" keeps; in eager code, no saved-tensor hook sees these."""

    def __init__(self) -> None:
        self.size: int | None = None  # None: not counting

    def note(self, result: Any) -> None:
        if self.size is not None:
            tensors = (
                one for one in tree_leaves(result) if isinstance(one, Tensor) and not isinstance(one, FakeTensor)
            )
            self.size += sum(one.untyped_storage().nbytes() for one in tensors)


kept_results = KeptResults()


def travels(op: Any) -> bool:
    """Whether `op` sends tokens to their experts or back: recomputing it would send them again."""
    return op.name() in _TRAVEL_OPS


def product_shape(op: Any, arguments: tuple[Any, ...]) -> tuple[int, ...] | None:
    """Return (in, out) of the weight of a matrix product, None if `op` is not one."""
    if op is torch.ops.aten._scaled_mm.default:
        return tuple(arguments[1].shape)
    if op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
        return tuple(arguments[-1].shape)
    if op is onednn():
        return tuple(reversed(arguments[1].shape))
    if getattr(op, "namespace", "") == "shardline" and "linear" in op.name() and "backward" not in op.name():
        weight = arguments[1][0] if isinstance(arguments[1], (list, tuple)) else arguments[1]
        return tuple(weight.transpose(-2, -1).shape)
    return None


@functools.cache
def kept_attention_ops() -> frozenset[Any]:
    ops = {getattr(torch.ops.aten, name).default for name in _ATTENTION_OPS if hasattr(torch.ops.aten, name)}
    ops.add(torch.ops.higher_order.flex_attention)
    if hasattr(torch.ops, "torch_attn") and hasattr(torch.ops.torch_attn, "_varlen_attn"):
        ops.add(torch.ops.torch_attn._varlen_attn.default)
    if hasattr(torch.ops.shardline, "shared_attention"):  # attention over other ranks' keys (parallel/context/ring.py)
        ops.add(torch.ops.shardline.shared_attention.default)
    return frozenset(ops)


def _forced_recompute(model: Decoder, section: ActivationCheckpoint) -> frozenset[tuple[int, ...]]:
    """Return the shapes (in, out), on this rank, of the named modules' weights, whose products are recomputed."""
    names = section.per_op_sac_force_recompute_mm_shapes_by_fqns
    shapes: set[tuple[int, ...]] = set()
    for wanted in names:
        found = [
            tuple(reversed(local(parameter).shape))  # a tensor-parallel rank multiplies with its shard
            for name, parameter in model.named_parameters()
            if parameter.ndim == 2 and any(wanted in part for part in (name, *logical_names(model.arch, name)))
        ]
        if not found and not _elsewhere(model, wanted) and wanted != "moe.router.gate":  # the default, for MoE models
            raise ConfigError(
                f"activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns: no module is named {wanted!r}"
            )
        shapes.update(found)
    return frozenset(shapes)


def _elsewhere(model: Decoder, wanted: str) -> bool:
    """Whether another pipeline stage has the named module."""
    if len(model.layers) == model.arch.n_layers:
        return False
    of_layer = {re.sub(r"^layers\.\d+", "layers.{}", name) for name, _ in model.named_parameters()}
    names = {name.format(layer) for name in of_layer for layer in range(model.arch.n_layers)}
    return any(wanted in name for name in (*names, *logical_shapes(model.arch)))


def _set_memory_budget(section: ActivationCheckpoint, compiled: bool) -> None:
    """Set what the compiler keeps. The setting is process-wide, so every build sets it, also back to keep everything.

    The compiler may also recompute in backward a product's input that takes one pass over kept tensors, such as
    SwiGLU's output: for Llama 3 8B that saves a tenth of the memory for less than a hundredth of the time.
    """
    wanted = section.mode == "memory_budget"
    if compiled:
        import torch._functorch.config as functorch

        functorch.ban_recompute_materialized_backward = False
        functorch.activation_memory_budget = section.memory_budget if wanted else 1.0
        functorch.visualize_memory_budget_pareto = wanted and section.visualize_memory_budget_pareto
