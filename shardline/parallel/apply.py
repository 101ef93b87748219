"""The one place that fixes the order in which a model is transformed: activation checkpointing, then compile."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from shardline.config.schema import Config
from shardline.errors import ConfigError
from shardline.memory.activation import apply_activation_checkpoint
from shardline.models.decoder import Decoder
from shardline.registry import nearest


def apply(model: Decoder, config: Config) -> list[str]:
    """Transform `model` in place for this run; the returned lines say what was done."""
    compiled = config.compile.enable and "model" in config.compile.components
    lines = apply_activation_checkpoint(model, config.activation_checkpoint, compiled=compiled)
    if compiled:
        lines.append(_compile_blocks(model, config.compile.backend))
    return lines


def _compile_blocks(model: Decoder, backend: str) -> str:
    """Compile each block's function, once for all blocks that share it."""
    known = torch._dynamo.list_backends(exclude_tags=())
    if backend not in known:
        raise ConfigError(
            f"compile.backend: expected one of {', '.join(known)}, got {backend!r}{nearest(backend, known)}"
        )
    torch._dynamo.reset()  # graphs of an earlier run in this process count against the limit of recompilations
    compile_once = functools.cache(functools.partial(_compile, backend=backend))
    for block in model.blocks():
        block.function = compile_once(block.function)
    return f"compiling {len(model.layers)} blocks with {backend} (the first step takes longer)"


def _compile(function: Callable[..., Any], *, backend: str) -> Callable[..., Any]:
    compiled: Callable[..., Any] = torch.compile(function, backend=backend, fullgraph=True)
    return compiled
