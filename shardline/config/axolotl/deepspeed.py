"""Translates ZeRO settings of a DeepSpeed JSON file, or of a table in the YAML file, into FSDP settings.

    stage 0       every rank has a copy (DDP)
    stage 1, 2    parameters stay gathered between forward and backward: fsdp_reshard_after_forward = "never"
    stage 3       they are freed after forward: "always"

Stage 1 also keeps whole gradients until the end of a step; here they are always scattered, as in stage 2.
"""

from __future__ import annotations

import os
from typing import Any

from shardline.config.axolotl.reader import Reader, number, table, text, whole
from shardline.json_text import parse_json
from shardline.registry import nearest

AUTO = "auto"
_BUCKETS = "buckets and overlap are FSDP's own"
_OPTIMIZER = "the YAML file sets it"
IDLE = {
    **dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), _OPTIMIZER),
    **dict.fromkeys(("steps_per_print", "wall_clock_breakdown", "dump_state"), "metrics are logged here"),
    **dict.fromkeys(("memory_breakdown", "csv_monitor", "monitor_config"), "metrics are logged here"),
    "aio": "nothing is kept on a disk",
    **dict.fromkeys(("zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer"), "every optimizer is sharded"),
    **dict.fromkeys(("communication_data_type", "prescale_gradients"), "gradients are summed in float32"),
    **dict.fromkeys(("gradient_predivide_factor", "fp32_allreduce"), "gradients are summed in float32"),
    **dict.fromkeys(("data_types", "amp", "sparse_gradients", "disable_allgather"), "gradients are summed in float32"),
    **dict.fromkeys(("compile", "comms_logger", "flops_profiler", "tensorboard", "wandb"), "the YAML file sets it"),
    **dict.fromkeys(("activation_checkpointing", "tensor_parallel", "checkpoint"), "the YAML file sets it"),
}
_BUCKET_KEYS = (
    *("overlap_comm", "contiguous_gradients", "sub_group_size", "reduce_bucket_size", "allgather_bucket_size"),
    *("reduce_scatter", "allgather_partitions", "round_robin_gradients", "stage3_prefetch_bucket_size"),
    *("stage3_param_persistence_threshold", "stage3_max_live_parameters", "stage3_max_reuse_distance"),
    "stage3_model_persistence_threshold",
    *("stage3_module_granularity_threshold", "load_from_fp32_weights", "memory_efficient_linear"),
    *("ignore_unused_parameters", "use_all_reduce_for_fetch_params", "stage3_use_all_reduce_for_fetch_params"),
)
ZERO_IDLE = {
    **dict.fromkeys(_BUCKET_KEYS, _BUCKETS),
    **dict.fromkeys(("stage3_gather_16bit_weights_on_model_save", "elastic_checkpoint"), "checkpoints have one format"),
    **dict.fromkeys(("stage3_gather_fp16_weights_on_model_save",), "checkpoints have one format"),
}
NOT_BUILT = {
    "zero_hpz_partition_size": "dp_replicate_size sets the copies of a sharded model",
    "zero_quantized_weights": "weights are sent in their own type",
    "zero_quantized_nontrainable_weights": "weights are sent in their own type",
    "zero_quantized_gradients": "gradients are summed in float32",
    "mics_shard_size": "dp_replicate_size sets the copies of a sharded model",
}
# Files that come with Axolotl: name -> ZeRO stage, whether parameters and optimizer are in host memory
SHIPPED = {
    "zero1": (1, False),
    "zero1_torch_compile": (1, False),
    "zero2": (2, False),
    "zero2_torch_compile": (2, False),
    "zero3": (3, False),
    "zero3_bf16": (3, False),
    "zero3_bf16_cpuoffload_all": (3, True),
    "zero3_bf16_cpuoffload_params": (3, True),
}


def translate(reader: Reader) -> int | None:
    """Set the keys that the file stands for; return its ZeRO stage, or None if it cannot be read."""
    given = _read(reader)
    if given is None:
        return None
    config = reader.below("deepspeed", given)
    for name, value in config.values.items():
        if name in IDLE:
            if value not in (AUTO, False, {}) and not isinstance(value, dict):
                config.idle(name, IDLE[name])
        elif name == "gradient_clipping":
            if value != AUTO and not reader.has("max_grad_norm"):
                config.set("training.max_norm", config.get(name, number), name)
        elif name in ("bf16", "bfloat16", "fp16"):
            _precision(reader, config, name)
        elif name in ("optimizer", "scheduler"):
            _only_auto(config, name)
        elif name != "zero_optimization":
            known = (*IDLE, "gradient_clipping", "bf16", "fp16", "optimizer", "scheduler", "zero_optimization")
            config.problem(name, f"there is no such key{nearest(name, known)}")
    return _zero(reader, config)


def _read(reader: Reader) -> dict[str, Any] | None:
    given = reader.get("deepspeed")
    if isinstance(given, dict):
        return table(given)
    path = text(given)
    stem = os.path.splitext(os.path.basename(path))[0]
    beside = os.path.join(os.path.dirname(reader.file.path), path)
    found = next((name for name in (path, beside) if os.path.isfile(name)), None)
    if found is None and stem in SHIPPED:
        stage, offloads = SHIPPED[stem]
        reader.note("deepspeed", f"{path} does not exist; Axolotl's file of that name is ZeRO stage {stage}")
        offload = {"device": "cpu"} if offloads else None
        return {"zero_optimization": {"stage": stage, "offload_param": offload}}
    try:
        with open(found or path, "rb") as file:
            return table(parse_json(file.read()))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or f"not a JSON file: {error}"
        reader.problem("deepspeed", f"{path}: {reason}; files that come with Axolotl: {', '.join(SHIPPED)}")
        return None


def _precision(reader: Reader, config: Reader, name: str) -> None:
    enabled = (config.get(name, table, {})).get("enabled", False)
    native = "training.mixed_precision_param"
    if enabled is True and native not in reader.out.values and not (reader.has("bf16") or reader.has("fp16")):
        config.set(native, "float16" if name == "fp16" else "bfloat16", name)


def _only_auto(config: Reader, name: str) -> None:
    """The optimizer and the schedule are the YAML file's, unless this file sets numbers for them."""
    options = config.below(name, config.get(name, table, {})).get("params", table, {})
    fixed = [option for option, value in options.items() if value != AUTO]
    if fixed:
        config.problem(name, f"{', '.join(fixed)}: set numbers in the YAML file; here only 'auto' is read")
    else:
        config.idle(name, _OPTIMIZER)


def _zero(reader: Reader, config: Reader) -> int:
    zero = config.below("zero_optimization", config.get("zero_optimization", table, {}))
    stage = zero.get("stage", whole, 0)
    if stage not in (0, 1, 2, 3):
        zero.problem("stage", f"expected 0, 1, 2 or 3, got {stage}")
    for name, value in zero.values.items():
        if name in ("offload_param", "offload_optimizer", "cpu_offload"):
            _offload(zero, name)
        elif name in NOT_BUILT:
            if value is True or value not in (0, 1, -1):
                zero.problem(name, f"{value!r} is not built: {NOT_BUILT[name]}")
        elif name in ZERO_IDLE:
            zero.idle(name, ZERO_IDLE[name])
        elif name != "stage":
            known = (*ZERO_IDLE, *NOT_BUILT, "stage", "offload_param", "offload_optimizer")
            zero.problem(name, f"there is no such key{nearest(name, known)}")
    if stage:
        reader.set("parallelism.fsdp_reshard_after_forward", "always" if stage == 3 else "never", "deepspeed")
    return int(stage)


def _offload(zero: Reader, name: str) -> None:
    given = zero.values[name]
    device = ("cpu" if given else "none") if isinstance(given, bool) else zero.get(name, table, {}).get("device", "cpu")
    if device == "nvme":
        zero.note(name, "weights and state go to host memory, not to a disk")
    elif name == "offload_optimizer" and device == "cpu":
        zero.note(name, "weights are kept in host memory too")
    if device in ("cpu", "nvme"):
        zero.set("training.enable_cpu_offload", True, name)
    elif device != "none":
        zero.problem(name, f"expected the device cpu, nvme or none, got {device!r}")
