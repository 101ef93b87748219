"""Rules of adapters: LoRA."""

from __future__ import annotations

from shardline.config.names import FLOAT8_LINEAR
from shardline.config.rules.rule import Rule, below, idle, idle_unless, idle_without, refuse
from shardline.config.schema import Config


def _keeps_codes(config: Config) -> bool:
    """Whether frozen weights are kept in 4 or 8 bits."""
    return config.lora.enable and config.lora.base_dtype != "same"


REFUSED: list[Rule] = [
    refuse(
        "lora.base_dtype",
        lambda c: _keeps_codes(c) and FLOAT8_LINEAR in c.model.converters,
        "weights in 4 or 8 bits are not rounded to float8 again",
        remedy=f'set it to "same", or leave {FLOAT8_LINEAR} out of model.converters',
    ),
    refuse(
        "lora.base_dtype",
        lambda c: _keeps_codes(c) and c.parallelism.enable_async_tensor_parallel,
        "overlapped products would keep the dequantized weights until backward",
        remedy='set it to "same", or parallelism.enable_async_tensor_parallel = false',
    ),
    refuse(
        "training.unfrozen_parameters",
        lambda c: c.lora.enable and bool(c.training.unfrozen_parameters),
        "LoRA freezes every weight that it does not name",
        remedy="name weights to train in full in lora.modules_to_save, or set lora.enable = false",
    ),
]

IDLE: list[Rule] = [
    idle_without("lora.enable", "lora."),
    idle_unless("lora.base_dtype", ["nf4"], "lora.double_quantization"),
    idle(
        "the adapter in lora.adapter_path decides what is trained",
        lambda c: c.lora.adapter_path is not None,
        *below("lora", "rank alpha rank_pattern alpha_pattern bias use_rslora use_dora"),
        *below("lora", "target_modules modules_to_save layers"),
    ),
]
