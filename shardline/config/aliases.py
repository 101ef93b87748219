"""Keys of older TorchTitan versions: their current names, and those without a successor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shardline.config.names import FLOAT8_LINEAR as FLOAT8

CONVERTER_NAMES = {"float8": FLOAT8, "mx": "quantize.linear.mx"}


@dataclass(frozen=True)
class Alias:
    """An older key. If it was a switch and the new key is not, `values` has the new key's values for on and off."""

    new: str
    values: Mapping[bool, Any] | None = None


ALIASES: dict[str, Alias] = {
    "job.print_args": Alias("job.print_config"),
    "optimizer.fused": Alias("optimizer.implementation", {True: "fused", False: "foreach"}),
    "lr_scheduler.lr_min": Alias("lr_scheduler.min_lr_factor"),
    "training.compile": Alias("compile.enable"),
    "training.batch_size": Alias("training.local_batch_size"),
    "training.warmup_steps": Alias("lr_scheduler.warmup_steps"),
    "training.seed": Alias("debug.seed"),
    "training.deterministic": Alias("debug.deterministic"),
    "training.debug_moe_force_load_balance": Alias("debug.moe_force_load_balance"),
    "training.data_parallel_replicate_degree": Alias("parallelism.data_parallel_replicate_degree"),
    "training.data_parallel_shard_degree": Alias("parallelism.data_parallel_shard_degree"),
    "training.tensor_parallel_degree": Alias("parallelism.tensor_parallel_degree"),
    "training.disable_loss_parallel": Alias("parallelism.disable_loss_parallel"),
    "training.fsdp_reshard_after_forward": Alias("parallelism.fsdp_reshard_after_forward"),
    "experimental.context_parallel_degree": Alias("parallelism.context_parallel_degree"),
    "experimental.context_parallel_rotate_method": Alias("parallelism.context_parallel_rotate_method"),
    "experimental.enable_async_tensor_parallel": Alias("parallelism.enable_async_tensor_parallel"),
    "experimental.pipeline_parallel_degree": Alias("parallelism.pipeline_parallel_degree"),
    "experimental.pipeline_parallel_schedule": Alias("parallelism.pipeline_parallel_schedule"),
    "experimental.pipeline_parallel_schedule_csv": Alias("parallelism.pipeline_parallel_schedule_csv"),
    "checkpoint.enable_checkpoint": Alias("checkpoint.enable"),
    "checkpoint.model_weights_only": Alias("checkpoint.last_save_model_only"),
    "checkpoint.initial_load_model_weights_only": Alias("checkpoint.initial_load_model_only"),
    "checkpoint.last_save_model_weights_only": Alias("checkpoint.last_save_model_only"),
    "memory_estimation.enabled": Alias("memory_estimation.enable"),
    "float8.enable_float8_linear": Alias("model.converters", {True: [FLOAT8], False: []}),
    "float8.enable_fsdp_float8_all_gather": Alias(f"{FLOAT8}.enable_fsdp_float8_all_gather"),
    "float8.precompute_float8_dynamic_scale_for_fsdp": Alias(f"{FLOAT8}.precompute_float8_dynamic_scale_for_fsdp"),
    "float8.recipe_name": Alias(f"{FLOAT8}.recipe_name"),
    "float8.filter_fqns": Alias(f"{FLOAT8}.filter_fqns"),
    "float8.emulate": Alias(f"{FLOAT8}.emulate"),
    "mx.use_fp8_dim1_cast_triton_kernel": Alias(
        "quantize.linear.mx.mxfp8_dim1_cast_kernel_choice", {True: "triton", False: "torch"}
    ),
    "mx.recipe_name": Alias("quantize.linear.mx.recipe_name"),
    "mx.filter_fqns": Alias("quantize.linear.mx.filter_fqns"),
}

# Accepted with a note that they have no effect: key -> type of its value.
NO_EFFECT: dict[str, Any] = {
    "job.use_for_integration_test": bool,
    "model.norm_type": str,
    "parallelism.enable_compiled_autograd": bool,
    "parallelism.pipeline_parallel_split_points": list[str],
    "experimental.enable_compiled_autograd": bool,
    "experimental.pipeline_parallel_split_points": list[str],
    "experimental.pipeline_parallel_microbatches": int,
    "float8.force_recompute_fp8_weight_in_bwd": bool,
}

OLD_TABLES = sorted({key.rpartition(".")[0] for key in (*ALIASES, *NO_EFFECT)})
