"""`--dry-run`: what a run would build, from the config alone, on the meta device."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

import torch

from shardline import registry
from shardline.config.rules import check, notes, pending
from shardline.config.schema import Config
from shardline.data.order import resolve_global_batch
from shardline.errors import UserError
from shardline.models.decoder import Decoder
from shardline.models.flavors import resolve


def describe(config: Config, world_size: int) -> str:
    """Shapes and sizes of the parameters, and of a step; keys whose feature is not built yet are marked."""
    if world_size != 1:
        raise UserError("--dry-run for more than one rank is not built yet: leave out --world-size")
    registry.import_custom(config.experimental.custom_import)
    check(config)
    missing = pending(config)
    lines = [f"{config.model.name} {config.model.flavor} on 1 rank"]
    if not any(item.key in ("model.name", "model.flavor") for item in missing):
        lines += _model_lines(config)
    lines += _step_lines(config)
    lines += [f"not built yet: {item.key} = {item.value!r} ({item.feature})" for item in missing]
    lines += [f"note: {line}" for line in (*config.alias_notes, *notes(config))]
    return "\n".join(lines)


def _model_lines(config: Config) -> Iterator[str]:
    """One line for each kind of parameter, those of the layers together."""
    with torch.device("meta"):
        model = Decoder(resolve(config.model))
    kinds = Counter(
        (re.sub(r"^layers\.\d+", "layers.*", name), tuple(parameter.shape))
        for name, parameter in model.named_parameters()
    )
    total = 0
    for (name, shape), count in kinds.items():
        size = count * torch.Size(shape).numel()
        total += size
        yield f"  {name:<36} {count:>4} x {shape!s:<18} {size:>17,}"
    gib = total * (2 if config.training.dtype == "bfloat16" else 4) / 2**30
    yield f"{total:,} parameters: weights {gib:.2f} GiB, gradients {gib:.2f} GiB, AdamW state {2 * gib:.2f} GiB"


def _step_lines(config: Config) -> Iterator[str]:
    training = config.training
    tokens = training.local_batch_size * training.seq_len
    yield f"micro-batch: {training.local_batch_size} x {training.seq_len} = {tokens:,} tokens"
    whole = resolve_global_batch(training.global_batch_size, training.local_batch_size, 1)
    yield f"step: {whole // training.local_batch_size} x micro-batch = {whole * training.seq_len:,} tokens"
