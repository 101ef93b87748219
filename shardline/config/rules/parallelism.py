"""Rules of how a model is split: over pipelines, shards, replicas, tensors and context."""

from __future__ import annotations

from shardline.config.features import is_context_parallel, is_pipelined, is_tensor_parallel
from shardline.config.layout import KEYS
from shardline.config.names import find_schedule
from shardline.config.rules.experts import splits_experts
from shardline.config.rules.optimizer import steps_early
from shardline.config.rules.rule import Rule, below, differs, idle, idle_unless, idle_without, note, refuse
from shardline.config.rules.workers import has_workers
from shardline.config.schema import Config

# ---- ranks: a degree of -1 may become any number ---------------------------------------------------------------------


def one_rank(config: Config) -> bool:
    return all(getattr(config.parallelism, key) == 1 for key in (*KEYS.values(), "expert_parallel_degree"))


def has_replicas(config: Config) -> bool:
    """Whether copies of the model sum their gradients."""
    return config.parallelism.data_parallel_replicate_degree != 1 and not has_workers(config)


def shards(config: Config) -> bool:
    """Whether parameters are sharded over data-parallel or context-parallel ranks."""
    return config.parallelism.data_parallel_shard_degree != 1 or is_context_parallel(config)


def _may_be_ddp(config: Config) -> bool:
    """Replicas without sharding."""
    alone = config.parallelism.data_parallel_shard_degree in (-1, 1) and not is_context_parallel(config)
    return has_replicas(config) and alone


def _has_copies(config: Config) -> bool:
    """Whether ranks may hold the same weights. The two ends of a pipeline share tied embeddings."""
    may_be_tied = config.model.overrides.get("tie_word_embeddings") is not False
    ties = is_pipelined(config) and may_be_tied
    return has_replicas(config) or is_tensor_parallel(config) or ties


# ---- pipelines -------------------------------------------------------------------------------------------------------

EXPERTS_WAIT = "tokens are sent to their experts and back within their own micro-batch"
# An explicit 1 is a request too: TorchTitan counts layers with it.
LESS_LAYERS = below("parallelism", "pipeline_parallel_first_stage_less_layers pipeline_parallel_last_stage_less_layers")


def _splits_by_weights(config: Config) -> bool:
    by_count = config.parallelism.pipeline_parallel_layers_per_stage is not None
    return not by_count and not any(differs(config, key) for key in LESS_LAYERS)


def _asks_for_overlap(config: Config) -> bool:
    """Whether the schedule is one in which other trainers overlap a micro-batch's experts with another's."""
    section = config.parallelism
    overlaps = find_schedule(section.pipeline_parallel_schedule) == "DualPipeV" and is_pipelined(config)
    return overlaps and splits_experts(config) and section.pipeline_parallel_expert_parallel_overlap


PIPELINE: list[Rule] = [
    idle(EXPERTS_WAIT, splits_experts, "parallelism.pipeline_parallel_expert_parallel_overlap"),
    idle_without(
        "parallelism.pipeline_parallel_degree",
        "parallelism.module_fqns_per_model_part",
        *LESS_LAYERS,
        *below("parallelism", "pipeline_parallel_layers_per_stage pipeline_parallel_schedule"),
        *below("parallelism", "pipeline_parallel_schedule_csv pipeline_parallel_microbatch_size"),
    ),
    idle(
        "parallelism.module_fqns_per_model_part names the modules of each stage",
        lambda c: c.parallelism.module_fqns_per_model_part is not None,
        *LESS_LAYERS,
        "parallelism.pipeline_parallel_layers_per_stage",
    ),
    idle("1 for both ends of the pipeline splits stages by weights", _splits_by_weights, *LESS_LAYERS),
    idle(
        "parallelism.pipeline_parallel_schedule_csv defines the schedule",
        lambda c: bool(c.parallelism.pipeline_parallel_schedule_csv),
        "parallelism.pipeline_parallel_schedule",
    ),
]

NOTES: list[Rule] = [
    note("parallelism.pipeline_parallel_expert_parallel_overlap", _asks_for_overlap, f"has no effect: {EXPERTS_WAIT}"),
]

# ---- other axes ------------------------------------------------------------------------------------------------------

BALANCERS = ("headtail", "ptrr")  # of which the second one is not built yet

REFUSED: list[Rule] = [
    refuse(
        "parallelism.context_parallel_load_balancer",
        lambda c: is_context_parallel(c) and c.parallelism.context_parallel_load_balancer not in (None, *BALANCERS),
        lambda c: f"expected 'headtail' or 'none', got {c.parallelism.context_parallel_load_balancer!r}",
        remedy="'headtail' balances causal masks",
    ),
    refuse(
        "parallelism.gradient_compression",
        lambda c: (
            steps_early(c)
            and c.training.max_norm > 0
            and has_replicas(c)
            and c.parallelism.gradient_compression in ("int8", "topk")
        ),
        "the pass that measures the norm would use up what earlier steps have left out",
        remedy='set it to "bfloat16" or "none", training.max_norm = 0, or optimizer.early_step_in_backward = false',
    ),
    refuse(
        "parallelism.gradient_compression",
        lambda c: (
            is_tensor_parallel(c)
            and not c.parallelism.enable_sequence_parallel
            and has_replicas(c)
            and c.parallelism.gradient_compression in ("int8", "topk")
        ),
        "tensor-parallel ranks would round the gradients of norms, which all of them hold, in different ways",
        remedy='set it to "bfloat16" or "none", or parallelism.enable_sequence_parallel = true',
    ),
]

IDLE: list[Rule] = [
    idle(
        "gradients are not summed over data-parallel ranks",
        lambda c: not has_replicas(c) and not shards(c),
        "parallelism.accumulation_sync",
    ),
    idle(
        "only HSDP (both data parallel degrees above 1) has reductions between replicas to postpone",
        lambda c: c.parallelism.accumulation_sync == "scatter" and not (has_replicas(c) and shards(c)),
        "parallelism.accumulation_sync",
    ),
    idle_without(
        "parallelism.enable_async_tensor_parallel",
        *below("parallelism", "async_tensor_parallel_backend async_tensor_parallel_compare_freq"),
    ),
    idle_unless("parallelism.gradient_compression", ["powersgd"], "parallelism.powersgd_rank"),
    idle_unless("parallelism.gradient_compression", ["topk"], "parallelism.topk_fraction"),
    idle(
        "there are no replicas that sum gradients",
        lambda c: not has_replicas(c),
        "parallelism.gradient_compression",
    ),
    idle(
        "only plain replicas (DDP) send low-rank matrices; bfloat16, int8 and topk work with shards too",
        lambda c: has_replicas(c) and not _may_be_ddp(c) and c.parallelism.gradient_compression == "powersgd",
        *below("parallelism", "gradient_compression powersgd_rank"),
    ),
    idle(
        "only plain replicas (DDP) sum gradients in buckets",
        lambda c: not _may_be_ddp(c),
        *below("parallelism", "gradient_bucket_mib overlap_gradient_reduction"),
    ),
    idle(
        "nothing is sharded over data-parallel ranks",
        lambda c: not shards(c) and not c.training.enable_cpu_offload,
        *below("parallelism", "fsdp_prefetch fsdp_reshard_after_forward"),
    ),
    idle_without(
        "parallelism.tensor_parallel_degree",
        *below("parallelism", "disable_loss_parallel enable_sequence_parallel"),
    ),
    idle_without(
        "parallelism.context_parallel_degree",
        *below("parallelism", "context_parallel_load_balancer context_parallel_rotate_method"),
    ),
    idle(
        "with ulysses every rank has all tokens of its heads, so the work is even",
        lambda c: c.parallelism.context_parallel_rotate_method == "ulysses",
        "parallelism.context_parallel_load_balancer",
    ),
    idle("no two ranks hold the same weights", lambda c: not _has_copies(c), "debug.check_replicas_freq"),
]
