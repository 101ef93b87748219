"""`--dry-run`: what a run would build, from the config alone, on the meta device."""

from __future__ import annotations

import torch

from shardline import registry
from shardline.config.rules import check, notes, pending
from shardline.config.schema import Config
from shardline.errors import UserError
from shardline.models.decoder import Decoder
from shardline.models.flavors import resolve


def describe(config: Config, world_size: int) -> str:
    """Every parameter with its shape and size, and totals; keys whose feature is not built yet are marked."""
    if world_size != 1:
        raise UserError("--dry-run for more than one rank is not built yet: leave out --world-size")
    registry.import_custom(config.experimental.custom_import)
    check(config)
    with torch.device("meta"):
        model = Decoder(resolve(config.model))
    bytes_each = 2 if config.training.dtype == "bfloat16" else 4
    lines = [f"{config.model.name} {config.model.flavor} on 1 rank"]
    total = 0
    for name, parameter in model.named_parameters():
        total += parameter.numel()
        lines.append(f"  {name:<44} {tuple(parameter.shape)!s:<18} {parameter.numel():>15,}")
    gib = total * bytes_each / 2**30
    lines.append(f"{total:,} parameters: weights {gib:.2f} GiB, gradients {gib:.2f} GiB, AdamW state {2 * gib:.2f} GiB")
    tokens = config.training.local_batch_size * config.training.seq_len
    lines.append(f"micro-batch: {config.training.local_batch_size} x {config.training.seq_len} = {tokens:,} tokens")
    lines += [f"not built yet: {item.key} = {item.value!r} ({item.feature})" for item in pending(config)]
    lines += [f"note: {line}" for line in (*config.alias_notes, *notes(config))]
    return "\n".join(lines)
