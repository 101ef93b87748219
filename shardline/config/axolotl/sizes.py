"""Axolotl's keys of distribution: how many ranks replicate and shard the model, and what sharding frees or offloads.

Axolotl's rule for the ranks: tensor, context and expert sizes are divided out first, then the two data sizes; what is
left over shards or, where `dp_shard_size` is set, replicates. Without any size, FSDP and ZeRO shard over all ranks;
without those, every rank has a copy (DDP). Its expert axis is separate from dp_shard_size, Shardline's is a part of it:

    expert_parallel_size 4, dp_shard_size 2   ->   data_parallel_shard_degree 8, expert_parallel_degree 4
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from shardline.config.axolotl import deepspeed
from shardline.config.axolotl.reader import Reader, choice, source_of, switch, table, texts, whole
from shardline.config.layout import AXES, KEYS, Layout, suggestions
from shardline.registry import nearest

if TYPE_CHECKING:
    from shardline.config.schema import Config

NAMES = {
    "dp_replicate": "dp_replicate_size",
    "dp_shard": "dp_shard_size",
    "cp": "context_parallel_size",
    "tp": "tensor_parallel_size",
}
STRATEGIES = {  # FSDP1's sharding strategies, by name and number -> fsdp_reshard_after_forward
    "FULL_SHARD": "always",
    "SHARD_GRAD_OP": "never",
    "1": "always",
    "2": "never",
}
_WRAP = "each decoder layer is sharded by itself"
_FORMAT = "checkpoints have one format, which every layout reads"
_OVERLAP = "gathering ahead is parallelism.fsdp_prefetch"
FSDP_IDLE = {
    "version": "sharding is always FSDP2",
    "sync_module_states": "each rank reads only its own rows",
    "cpu_ram_efficient_loading": "each rank reads only its own rows",
    "cpu_offload_pin_memory": "host memory is page-locked where there is a GPU",
    "use_orig_params": "parameters are never flattened",
    "state_dict_type": _FORMAT,
    "final_state_dict_type": _FORMAT,
    "save_optimizer_state": _FORMAT,
    "auto_wrap_policy": _WRAP,
    "transformer_layer_cls_to_wrap": _WRAP,
    "min_num_params": _WRAP,
    "limit_all_gathers": _OVERLAP,
    "forward_prefetch": _OVERLAP,
    "backward_prefetch": _OVERLAP,
    "backward_prefetch_policy": _OVERLAP,
}
FSDP_KEYS = (
    *FSDP_IDLE,
    *("reshard_after_forward", "sharding_strategy", "offload_params", "activation_checkpointing"),
    "mixed_precision_policy",
)


def distribution(reader: Reader) -> None:
    """Whether ranks shard or replicate, and how many do."""
    fsdp = reader.has("fsdp_config") or bool(reader.get("fsdp"))
    version = reader.get("fsdp_version", whole)
    if version is not None:
        if version not in (1, 2):
            reader.problem("fsdp_version", f"expected 1 or 2, got {version}")
        reader.idle("fsdp_version", FSDP_IDLE["version"])
    if reader.has("fsdp_config"):
        _fsdp_config(reader, version)
    if reader.get("fsdp"):
        _fsdp_list(reader)
    stage = None
    if reader.get("deepspeed"):
        if fsdp:
            reader.problem("deepspeed", "conflicts with FSDP (fsdp, fsdp_config); set only one of them")
        stage = deepspeed.translate(reader)
    _degrees(reader, shards=fsdp or version is not None or bool(stage))


def _degrees(reader: Reader, shards: bool) -> None:
    sizes = {name: reader.get(name, whole) for name in (*NAMES.values(), "expert_parallel_size")}
    if reader.has("context_parallel"):
        sizes["context_parallel_size"] = _context_table(reader)
    if (older := reader.get("sequence_parallel_degree", whole)) is not None:
        if sizes["context_parallel_size"] not in (None, older):
            reader.together("sequence_parallel_degree", "context_parallel_size")
        sizes["context_parallel_size"] = older
        reader.set("parallelism.context_parallel_degree", older, "sequence_parallel_degree")
    for name, size in sizes.items():
        if size is not None and size < 1:
            reader.problem(name, f"expected a whole number, 1 or more, got {size}")
            return
    for axis in ("cp", "tp"):
        if reader.has(NAMES[axis]):
            reader.set(f"parallelism.{KEYS[axis]}", sizes[NAMES[axis]], NAMES[axis])
    experts = sizes["expert_parallel_size"] or 1
    if experts > 1:
        reader.set("parallelism.expert_parallel_degree", experts, "expert_parallel_size")
    backends = {"auto": "standard", "torch": "all_to_all", "deep_ep": "deepep"}
    if (backend := reader.get("expert_parallel_backend", choice(*backends))) is not None:
        reader.set("parallelism.expert_parallel_comm_backend", backends[backend], "expert_parallel_backend")
    split = any((sizes[name] or 1) > 1 for name in ("tensor_parallel_size", "context_parallel_size")) or experts > 1
    replicas, shard = sizes["dp_replicate_size"], sizes["dp_shard_size"]
    name = "dp_shard_size" if shard is not None else "dp_replicate_size"
    if shard is not None:
        _set_degree(reader, "dp_shard", shard * experts, "dp_shard_size")
        _set_degree(reader, "dp_replicate", -1 if replicas is None else replicas, "dp_replicate_size")
    elif replicas is not None:
        _set_degree(reader, "dp_replicate", replicas, name)
        _set_degree(reader, "dp_shard", -1 if shards or experts > 1 else 1, name)
    elif shards or split:
        _set_degree(reader, "dp_shard", -1, name)
    else:
        _set_degree(reader, "dp_replicate", -1, name)
        _set_degree(reader, "dp_shard", 1, name)
    if reader.get("ring_attn_func", choice("varlen_llama3", "batch_ring")) == "batch_ring":
        reader.problem("ring_attn_func", "it mixes packed documents; remove the key")


def _context_table(reader: Reader) -> int | None:
    """`context_parallel` as a table: its size, and how ranks see the other slices of a sequence."""
    reader.together("context_parallel", "context_parallel_size")
    given = reader.below("context_parallel", reader.get("context_parallel", table, {}))
    for name in given.values:
        if name not in ("size", "backend"):
            given.idle(name, "slices are balanced, and Shardline chooses the attention kernel")
    backend = given.get("backend", choice("auto", "ulysses", "ring"))
    if backend in ("ulysses", "ring"):
        given.set("parallelism.context_parallel_rotate_method", backend, "backend")
    size = given.get("size", whole)
    if size is not None:
        given.set("parallelism.context_parallel_degree", size, "size")
    return None if size is None else int(size)


def _set_degree(reader: Reader, axis: str, degree: int, name: str) -> None:
    reader.set(f"parallelism.{KEYS[axis]}", degree, name)


# ---- fsdp and fsdp_config --------------------------------------------------------------------------------------------


def _fsdp_list(reader: Reader) -> None:
    """FSDP1's words; `reshard_after_forward` in fsdp_config, which is FSDP2's, takes precedence over them."""
    given = reader.get("fsdp_config", table, {})
    decided = "reshard_after_forward" in {name.removeprefix("fsdp_") for name in given}
    words = [word for item in reader.get("fsdp", texts, []) for word in item.split()]
    for word in words:
        if word in ("full_shard", "shard_grad_op"):
            when = STRATEGIES[word.upper()]
            if not decided:
                reader.set("parallelism.fsdp_reshard_after_forward", when, "fsdp")
        elif word == "offload":
            reader.set("training.enable_cpu_offload", True, "fsdp")
        elif word != "auto_wrap":
            reader.problem("fsdp", f"{word!r}: expected full_shard, shard_grad_op, offload or auto_wrap;"
                           " dp_replicate_size sets the copies of a sharded model")  # fmt: skip


def _fsdp_config(reader: Reader, version: int | None) -> None:
    """The sub-keys, with and without the prefix `fsdp_` of FSDP1."""
    config = reader.below("fsdp_config", reader.get("fsdp_config", table, {}))
    if version is None and not {"version", "fsdp_version"} & config.values.keys():
        reader.note("fsdp_config", "it has no version, which Axolotl reads as FSDP1; here sharding is always FSDP2")
    for name in config.values:
        plain = name.removeprefix("fsdp_")
        if plain not in FSDP_KEYS:
            config.problem(
                name, f"there is no such key{nearest(plain, FSDP_KEYS) or '; keys: ' + ', '.join(FSDP_KEYS)}"
            )
        elif plain in FSDP_IDLE:
            config.idle(name, FSDP_IDLE[plain])
        elif plain == "offload_params":
            if config.on(name):
                config.set("training.enable_cpu_offload", True, name)
        elif plain == "activation_checkpointing":
            if config.on(name):
                config.set("activation_checkpoint.mode", "full", name)
        elif plain == "mixed_precision_policy":
            _mixed_precision(reader, config, name)
        else:
            _reshard(config, name)


def _mixed_precision(reader: Reader, config: Reader, name: str) -> None:
    """The policy names a type that bf16 or fp16 may name too."""
    types = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "no": "float32"}
    given = config.get(name, choice(*types, False))
    if given and "training.mixed_precision_param" not in reader.out.values:
        config.set("training.mixed_precision_param", types[given], name)


def _reshard(config: Reader, name: str) -> None:
    def read(value: Any) -> str:
        if str(value).upper() in STRATEGIES:
            return STRATEGIES[str(value).upper()]
        if name.endswith("sharding_strategy"):
            raise ValueError("FULL_SHARD or SHARD_GRAD_OP (dp_replicate_size: copies of a sharded model)")
        return "always" if switch(value) else "never"

    if (when := config.get(name, read)) is not None:
        config.set("parallelism.fsdp_reshard_after_forward", when, name)


# ---- the number of ranks ---------------------------------------------------------------------------------------------


def is_translated(config: Config) -> bool:
    """Whether the sizes of this config come from an Axolotl file."""
    return any(source_of(config.origin(f"parallelism.{key}")) for key in KEYS.values())


def mismatch(config: Config, ranks: int) -> str:
    """What is wrong with the sizes on this many ranks, in Axolotl's names, and two sets of sizes that fit."""
    section = config.parallelism
    degrees = {axis: getattr(section, key) for axis, key in KEYS.items()}
    experts = section.expert_parallel_degree
    fixed = {axis: degree for axis, degree in degrees.items() if degree != -1}
    given = {NAMES[axis]: degree for axis, degree in fixed.items() if degree > 1 and axis in NAMES}
    if experts > 1:
        given = {"expert_parallel_size": experts} | given
        if "dp_shard_size" in given:
            given["dp_shard_size"] //= experts
    product = math.prod(fixed.values())
    equation = " x ".join(f"{name} {size}" for name, size in given.items()) or "one rank"
    rest = "must be the number of ranks" if len(fixed) == len(degrees) else "must divide the number of ranks"
    places = (config.origin(f"parallelism.{KEYS[axis]}") for axis in AXES)
    where = next((place.rpartition(": ")[0] for place in places if source_of(place).startswith("from")), "")
    wanted = {axis: 0 if degree == -1 else degree for axis, degree in degrees.items()}
    good = [_settings(layout, experts) for layout in suggestions(wanted, ranks)]
    if ranks == 1:
        good.append(f"these sizes on {product} ranks: --nproc {product}")
    message = f"{equation} = {product} {rest}, which is {ranks}; write {'; or '.join(good)}"
    return f"{where}: {message}" if where else message


def _settings(layout: Layout, experts: int) -> str:
    sizes = {NAMES[axis]: getattr(layout, axis) for axis in NAMES}
    if experts > 1 and sizes["dp_shard_size"] % experts == 0:
        sizes = {"expert_parallel_size": experts} | sizes | {"dp_shard_size": sizes["dp_shard_size"] // experts}
    named = {name: size for name, size in sizes.items() if size > 1 or name == "dp_shard_size"}
    return ", ".join(f"{name}: {size}" for name, size in named.items())


HANDLERS = (distribution,)
