"""Converts a config to a workload: what its keys mean for speed and memory."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch

from shardline.config.architecture import Architecture
from shardline.config.layout import Layout
from shardline.config.names import FLOAT8_EXPERTS, FLOAT8_LINEAR, MOMENTS
from shardline.config.schema import Config
from shardline.data.order import global_batch
from shardline.errors import ConfigError
from shardline.parallel.pipeline.schedules import stages_per_rank_of
from shardline.parallel.pipeline.stages import requested_stages_per_rank
from shardline.plan.memory import KeptOf, Table
from shardline.plan.trace import trace_layers
from shardline.plan.traits import SHARDLINE, Traits
from shardline.plan.work import Workload
from shardline.precision.mixed import Precision, choose_precision

KEPT_NUMBERS = {**MOMENTS, "Adafactor": 0, "Muon": 1}  # for each number of a matrix, which nearly all parameters are
STATE_BYTES = {"parameter": None, "bfloat16": 2.0, "int8": 1.016}
BASE_BYTES = {"same": None, "nf4": 0.5 + 1 / 64, "int8": 1.0}


def workload_of(config: Config, arch: Architecture, layout: Layout, device: str = "cuda") -> Workload:
    """Return the workload of a checked config on this layout."""
    section, training, ac = config.parallelism, config.training, config.activation_checkpoint
    precision = precision_on(config, device)
    batch = global_batch(training, layout.data_ranks) // layout.data_ranks
    micro = section.pipeline_parallel_microbatch_size if layout.pp > 1 else training.local_batch_size
    count = max(1, batch // micro)
    compiled = config.compile.enable and "model" in config.compile.components
    storage, compute = (str(kind).removeprefix("torch.") for kind in (precision.storage, precision.compute))
    moment = STATE_BYTES[config.optimizer.state_dtype] or precision.storage.itemsize
    alone = layout.world_size == 1 and count == 1 and device == "cuda" and compute == "bfloat16"
    fused = config.optimizer.name == "AdamW" and not config.optimizer.early_step_in_backward
    alone = alone and not training.enable_cpu_offload
    return Workload(
        arch=arch,
        layout=layout,
        seq_len=training.seq_len,
        micro_batch=micro * training.rows_of_a_sample,
        micro_batches=count,
        zero=3 if layout.dp_shard * layout.cp > 1 else 0,
        schedule=section.pipeline_parallel_schedule if layout.pp > 1 else "1F1B",
        stages_per_rank=_stages_per_rank(config, arch, layout),
        recompute=_recompute(config),
        compute="float8" if FLOAT8_LINEAR in config.model.converters else compute,
        experts_compute="float8" if FLOAT8_EXPERTS in config.model.converters else compute,
        storage=storage,
        activations=compute,
        keeps_narrow=alone and fused and not config.lora.enable,
        offload_every=ac.offload_every,
        sequence_parallel=section.enable_sequence_parallel and layout.tp > 1,
        async_tp=section.enable_async_tensor_parallel and layout.tp > 1,
        compiled=compiled,
        reshard=_reshards(config, layout),
        ring=section.context_parallel_rotate_method != "allgather",
        reduce_each=section.accumulation_sync == "micro_batch",
        cpu_offload=training.enable_cpu_offload,
        early_step=config.optimizer.early_step_in_backward,
        state_bytes=KEPT_NUMBERS.get(config.optimizer.name, 2) * moment,
        lora_rank=config.lora.rank if config.lora.enable else 0,
        base_bytes=BASE_BYTES[config.lora.base_dtype] or precision.compute.itemsize,
        layers_of_stages=_cut(config, arch, layout),
    )


def precision_on(config: Config, device: str) -> Precision:
    return choose_precision(config, torch.device(device), has_bfloat16=True)


def _recompute(config: Config) -> str:
    section = config.activation_checkpoint
    if section.mode == "selective":
        return section.selective_ac_option
    if section.mode == "memory_budget":
        return "op" if section.memory_budget < 1 else "none"
    return section.mode


def _reshards(config: Config, layout: Layout) -> bool:
    mode = config.parallelism.fsdp_reshard_after_forward
    return layout.pp == 1 if mode == "default" else mode == "always"


def _stages_per_rank(config: Config, arch: Architecture, layout: Layout) -> int:
    if layout.pp == 1:
        return 1
    asked = requested_stages_per_rank(config, arch, layout.pp)
    return asked or stages_per_rank_of(config.parallelism.pipeline_parallel_schedule).low


def _cut(config: Config, arch: Architecture, layout: Layout) -> tuple[int, ...]:
    """Return the number of layers of each stage; empty without a pipeline."""
    from shardline.parallel.pipeline.stages import plan_pipeline

    if layout.pp == 1:
        return ()
    plan = plan_pipeline(config, arch, layout)
    return () if plan is None else tuple(len(stage.layers) for stage in plan.stages)


def traits_for(workload: Workload, device: str = "cuda") -> Traits:
    """Return the traits with which this trainer runs a workload: compiled or not, overlapped or not."""
    changes: dict[str, Any] = {}
    if not workload.compiled:
        changes |= {"moved": SHARDLINE.moved * 1.6, "host_layer": EAGER_LAYER}
    if workload.async_tp:
        changes["tp_hidden"] = ASYNC_HIDDEN
    if device == "cpu":
        changes |= ON_CPU
    return replace(SHARDLINE, **changes)


EAGER_LAYER = 1.1e-3  # host seconds for a layer that is not compiled, forward and backward
# Set with four runs of one rank (docs/planner.md): operations between products take new memory and compute exponentials
# on the same core. The ranks of a host send with the cores that compute, so nothing is hidden.
ON_CPU = {
    "attention": "cpu",
    "attention_rate": 1.3,
    "moved": 12.0,
    "logit_bytes": 100.0,
    "optimizer_bytes": 150.0,
    "host_layer": 0.0,
    "gather_bytes": 4.0,
    "gather_hidden": False,
    "dp_hidden": (),
    "cp_hidden": 0.0,
}
ASYNC_HIDDEN = 0.5  # docs/async-tp.md: 50 % and 46 % of the collectives' own time with two ranks on an H200


def kept_by(config: Config, arch: Architecture, device: str = "cuda") -> KeptOf:
    """Return a function that says what layers keep, traced once for each tensor-parallel degree."""
    precision = precision_on(config, device)
    # Weights are traced in the compute type, in which FSDP provides them. The memory of casts counts with the weights.
    plain = Precision(precision.compute, precision.compute, precision.reduce)

    @functools.cache
    def table(tp: int) -> Table:
        alike = _plain(config, tp)
        try:
            return trace_layers(_alike(arch, _kinds(arch)), alike, tp, plain)
        except ConfigError:  # some keys name layers that the small model lacks
            return trace_layers(_alike(arch, arch.n_layers), alike, tp, plain)

    return table


def _kinds(arch: Architecture) -> int:
    """Return the smallest number of layers that includes one of each kind."""
    return 1 if arch.moe is None else min(arch.n_layers, arch.moe.first_dense + arch.moe.every)


def _alike(arch: Architecture, layers: int) -> Architecture:
    """Return the architecture with this many layers, without sliding windows, which change no sizes."""
    if arch.foreign is not None:
        return arch
    changes = {"sliding_window": None, "sliding_window_layers": None, "rope_layers": None, "attn_backend": "auto"}
    return arch.with_overrides({**changes, "n_layers": max(1, layers)})


def _plain(config: Config, tp: int) -> Config:
    """Return the config for a trace: this tensor-parallel degree and nothing else that changes how a block is built."""
    degrees = {
        "parallelism.tensor_parallel_degree": tp,
        "parallelism.data_parallel_shard_degree": 1,
        "parallelism.data_parallel_replicate_degree": 1,
        "parallelism.pipeline_parallel_degree": 1,
        "parallelism.context_parallel_degree": 1,
        "parallelism.expert_parallel_degree": 1,
        "parallelism.expert_tensor_parallel_degree": 1,
        "parallelism.enable_async_tensor_parallel": False,
        "training.enable_cpu_offload": False,
        "training.unfrozen_parameters": [],
        "lora.layers": None,
        "lora.adapter_path": None,
        "model.converters": [],
    }
    return config.replace({key: value for key, value in degrees.items() if config.value(key) != value})
