"""Rules of number formats: float16, the types of moments, float8."""

from __future__ import annotations

from shardline.config.names import CONVERTERS, FLOAT8_EXPERTS, FLOAT8_LINEAR
from shardline.config.rules.optimizer import steps_early
from shardline.config.rules.parallelism import shards
from shardline.config.rules.rule import Rule, below, idle, idle_without, refuse
from shardline.config.schema import Config


def _computes_in_float16(config: Config) -> bool:
    return config.training.mixed_precision_param == "float16"


def _gathers_float8(config: Config) -> bool:
    return FLOAT8_LINEAR in config.model.converters and config.quantize.linear.float8.enable_fsdp_float8_all_gather


TYPES: list[Rule] = [
    refuse(
        "training.mixed_precision_param",
        lambda c: _computes_in_float16(c) and steps_early(c),
        "with float16 a step may have to be skipped, and a step in backward cannot be undone",
        remedy="set optimizer.early_step_in_backward = false, or compute in bfloat16",
    ),
    refuse(
        "parallelism.gradient_compression",
        lambda c: _computes_in_float16(c) and c.parallelism.gradient_compression in ("powersgd", "int8", "topk"),
        "what is left out of a step would be added to gradients with another loss scale",
        remedy='set it to "bfloat16" or "none", or compute in bfloat16',
    ),
    refuse(
        "training.mixed_precision_param",
        lambda c: _computes_in_float16(c) and c.training.dtype != "float32",
        lambda c: f"float16 needs weights in float32, not in {c.training.dtype}",
        remedy="set training.dtype = 'float32'",
    ),
    refuse(
        "optimizer.state_dtype",
        lambda c: c.optimizer.state_dtype != "parameter" and c.optimizer.name not in ("AdamW", "Adam"),
        lambda c: f"only AdamW and Adam can keep their moments in {c.optimizer.state_dtype}",
        remedy='set it to "parameter"',
    ),
]

GATHERED: list[Rule] = [
    refuse(
        f"{FLOAT8_LINEAR}.enable_fsdp_float8_all_gather",
        lambda c: _gathers_float8(c) and c.training.enable_cpu_offload,
        "weights that are kept in host memory are gathered as they are",
        remedy="set it or training.enable_cpu_offload to false",
    ),
    refuse(
        f"{FLOAT8_LINEAR}.enable_fsdp_float8_all_gather",
        lambda c: _gathers_float8(c) and c.quantize.linear.float8.recipe_name not in (None, "tensorwise"),
        "weights that were rounded with one scale cannot be scaled row by row",
        remedy="set recipe_name = 'tensorwise'",
    ),
]

CONVERTED_EXPERTS: list[Rule] = [
    refuse(
        f"{FLOAT8_EXPERTS}.fqns",
        lambda c: FLOAT8_EXPERTS in c.model.converters and not c.quantize.grouped_mm.float8.fqns,
        "no module is named, so nothing would be converted",
        remedy="set it to ['experts']",
    ),
]

IDLE: list[Rule] = [
    *(
        idle(f"model.converters has no {name!r}", lambda c, name=name: name not in c.model.converters, f"{name}.")  # type: ignore[misc]
        for name in CONVERTERS
    ),
    idle_without(
        f"{FLOAT8_LINEAR}.enable_fsdp_float8_all_gather", f"{FLOAT8_LINEAR}.precompute_float8_dynamic_scale_for_fsdp"
    ),
    idle(
        "nothing is sharded over data-parallel ranks",
        lambda c: not shards(c),
        *below(FLOAT8_LINEAR, "enable_fsdp_float8_all_gather precompute_float8_dynamic_scale_for_fsdp"),
    ),
]
