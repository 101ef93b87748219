"""`--dry-run`: what a run would build and send, from the config alone, without allocating memory or other ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch

from shardline import registry
from shardline.adapters.peft_files import adaptation_of
from shardline.comm.mesh import crossing_lines
from shardline.config.architecture import Architecture
from shardline.config.check import checked_layout, expert_notes, missing, notes, pending
from shardline.config.layout import AXES, EXPERT_AXES, Layout, fewest_ranks, with_degrees
from shardline.config.names import MOMENTS
from shardline.config.schema import Config
from shardline.data.loader import fitted
from shardline.data.order import global_batch
from shardline.models.flavors import model_label, resolve
from shardline.models.fused_weights import active_words, is_low_rank, parameter_count
from shardline.models.huggingface.foreign_notes import foreign_line
from shardline.parallel.context.context import context_plan, slices_line
from shardline.parallel.pipeline.schedules import warnings
from shardline.parallel.pipeline.stages import plan_pipeline
from shardline.precision.mixed import Precision, choose_precision
from shardline.tools.dry_run.shapes import (
    Built,
    ParameterKind,
    build_rank,
    chosen_ranks,
    held,
    same_shapes,
    shapes,
    stage_ranks,
)
from shardline.tools.dry_run.traffic import step_collectives
from shardline.training.memory_need import state_bytes
from shardline.training.pairs import reference_kind
from shardline.words import sized

MOST_BUILT = 4  # ranks that are really built; the placements give the shards of the others


def describe(config: Config, world_size: int | None = None, ranks_per_node: int | None = None) -> str:
    """Return the mesh, parameters and collectives of a run; mark keys whose feature is not implemented yet.

    `world_size = None` takes as many ranks as the degrees need.
    """
    registry.import_custom(config.experimental.custom_import)
    unbuilt = pending(config)
    layout = checked_layout(config, world_size or fewest_ranks(config.parallelism))
    ranks = f"{layout.world_size} ranks: {layout}" if layout.world_size > 1 else "1 rank"
    lines = [f"{model_label(config.model)} on {ranks}"]
    lines += _mesh_lines(layout, ranks_per_node)
    if not unbuilt.keys() & {"model.name", "model.flavor"}:
        # The dtypes of a run on GPUs; on CPU the default is float32.
        precision = choose_precision(config, torch.device("cuda"), has_bfloat16=True)
        arch = fitted(resolve(config.model), config)
        lines += _model_lines(config, arch, layout, precision)
        lines += _step_lines(config, layout, _pipeline_lines(config, arch, layout))
        lines += _context_lines(config, layout)
        lines += _collective_lines(config, arch, layout, precision)
        lines += [f"note: {line}" for line in expert_notes(config, arch)]
        if arch.foreign is not None:
            lines.append(foreign_line(arch, asked=config.model.implementation == "transformers"))
    else:
        lines += _step_lines(config, layout)
    lines += [f"not built yet: {key} = {config.value(key)!r} ({feature})" for key, feature in unbuilt.items()]
    lines += [f"note: {key}: {sentence}" for key, sentence in missing(config).items()]
    lines += [f"note: {line}" for line in (*config.alias_notes, *notes(with_degrees(config, layout)))]
    return "\n".join(lines)


# ---- mesh ------------------------------------------------------------------------------------------------------------


def _mesh_lines(layout: Layout, ranks_per_node: int | None) -> Iterator[str]:
    if layout.world_size == 1:
        return
    yield "mesh, ranks of the last axis are neighbours:"
    stride = layout.world_size
    for axis, degree in zip(AXES, layout.degrees, strict=True):
        stride //= degree
        if degree > 1:
            yield f"  {axis:<12} {degree:>5} ranks, the first group: {_ranks(range(0, degree * stride, stride))}"
    stride = layout.dp_shard * layout.cp * layout.tp
    for axis in EXPERT_AXES if layout.ep > 1 else ():
        degree = getattr(layout, axis)
        stride //= degree
        if degree > 1:
            yield f"  {axis:<12} {degree:>5} ranks, the first group: {_ranks(range(0, degree * stride, stride))}"
    if ranks_per_node is not None:
        yield from (f"  {line}" for line in crossing_lines(layout, ranks_per_node))


def _ranks(ranks: range) -> str:
    if len(ranks) <= 4:
        return ", ".join(map(str, ranks))
    return f"{ranks[0]}, {ranks[1]}, {ranks[2]}, ... {ranks[-1]}"


# ---- parameters ------------------------------------------------------------------------------------------------------


def _model_lines(config: Config, arch: Architecture, layout: Layout, precision: Precision) -> Iterator[str]:
    """Yield a line for each kind of parameter, over all layers; then the differences on other ranks."""
    first = build_rank(arch, config, layout, precision, 0)
    if layout.world_size == 1:
        yield from _whole_lines(config, arch, first, precision)
        yield from _reference_lines(config, arch, first, precision)
        return
    kinds, alike = list(first.counts), same_shapes(first, layout)
    yield "parameters on rank 0 (how many x whole shape, placement, shard, elements):"
    yield from (_row(first, kind) for kind in kinds)
    yield f"rank 0 holds {_sizes(config, first, precision)}"
    yield from _reference_lines(config, arch, first, precision)
    chosen = chosen_ranks(alike, MOST_BUILT)
    for rank in chosen[1:]:
        built = build_rank(arch, config, layout, precision, rank)
        if shapes(kinds, layout, rank) != tuple(built.shards.values()):
            raise RuntimeError(f"rank {rank} was built with shards that differ from its placements")
        yield from _other_rank(config, first, built, precision)
    stages = [build_rank(arch, config, layout, precision, stage_ranks(layout, p)[0]) for p in range(1, layout.pp)]
    for built in stages:
        yield f"rank {built.rank}, {built.layers}, holds {_sizes(config, built, precision)}"
    yield from _total_lines(arch, config, [first, *stages], layout, len(chosen) + len(stages))


def _row(built: Built, kind: ParameterKind) -> str:
    shard, count = built.shards[kind], built.counts[kind]
    size = count * math.prod(shard)
    return f"  {kind.name:<36} {count:>4} x {kind.whole!s:<18} {kind.placement:<36} {shard!s:<16} {size:>17,}"


def _whole_lines(config: Config, arch: Architecture, built: Built, precision: Precision) -> Iterator[str]:
    for kind, count in built.counts.items():
        yield f"  {kind.name:<36} {count:>4} x {kind.whole!s:<18} {count * math.prod(kind.whole):>17,}"
    yield _sizes(config, built, precision) + active_words(arch)


def _other_rank(config: Config, first: Built, built: Built, precision: Precision) -> Iterator[str]:
    different = [kind for kind in first.counts if first.shards[kind] != built.shards[kind]]
    if not different:
        yield f"rank {built.rank} holds the same"
        return
    yield f"rank {built.rank} holds {_sizes(config, built, precision)}; other shards than rank 0:"
    yield from (_row(built, kind) for kind in different)


def _sizes(config: Config, built: Built, precision: Precision) -> str:
    """Return the bytes that training keeps for a rank's parameters; gradients have the dtype of their parameters."""
    sizes = {kind: count * math.prod(built.shards[kind]) for kind, count in built.counts.items()}
    weights = sum(size * kind.dtype.itemsize for kind, size in sizes.items())
    trained = {kind: size for kind, size in sizes.items() if kind.trained}
    gradients = sum(trained.values()) * precision.storage.itemsize
    what = f"{sum(trained.values()):,} trained of {built.elements:,}" if config.lora.enable else f"{built.elements:,}"
    words = f"{what} parameters: weights {sized(weights)}, gradients {sized(gradients)}"
    name = config.optimizer.name
    if name not in MOMENTS:
        return f"{words}, and the state of {name}"
    states = (
        built.counts[kind] * state_bytes(config, kind.name, built.shards[kind], kind.whole, precision)
        for kind in trained
    )
    return f"{words}, {name} state {sized(sum(states))}"


def _reference_lines(config: Config, arch: Architecture, built: Built, precision: Precision) -> Iterator[str]:
    """Yield the memory of a frozen copy, which is sharded as the model is."""
    if reference_kind(config, adaptation_of(config, arch)) == "copy":
        own = [kind for kind in built.counts if not is_low_rank(kind.name)]
        size = sum(built.counts[kind] * math.prod(built.shards[kind]) for kind in own) * precision.compute.itemsize
        yield f"reference of pairs: a frozen copy, {sized(size)}"


def _total_lines(arch: Architecture, config: Config, stages: list[Built], layout: Layout, built: int) -> Iterator[str]:
    """`stages`: the first rank of each pipeline position; a single one without a pipeline."""
    alike = [same_shapes(stage, layout) for stage in stages]
    counted = [held(stage, layout, shards) for stage, shards in zip(stages, alike, strict=True)]
    total, once = (sum(numbers) for numbers in zip(*counted, strict=True))
    plan = plan_pipeline(config, arch, layout)
    if plan is not None and arch.tie_word_embeddings and len(set(plan.ends)) > 1:
        once -= arch.vocab_size * arch.dim  # the first and the last stage both hold them
    how = adaptation_of(config, arch)
    whole = parameter_count(arch) + (0 if how is None else how.added(arch))
    quantized = how is not None and config.lora.base_dtype != "same"  # codes are not parameters
    if once != whole and not quantized:
        raise RuntimeError(f"the shards hold {once:,} parameters, the model has {whole:,}")
    count = sum(map(len, alike))
    sets = f"{count} different sets of shards" if count > 1 else "all the same shards"
    yield f"{layout.world_size} ranks, {sets} ({built} ranks were built): {total:,} elements"
    if not quantized:
        yield f"with copies counted once: {once:,}, the parameters of the model{active_words(arch)}"


# ---- a step ----------------------------------------------------------------------------------------------------------


def _pipeline_lines(config: Config, arch: Architecture, layout: Layout) -> Iterator[str]:
    plan = plan_pipeline(config, arch, layout)
    if plan is not None:
        yield plan.describe()
        yield from (f"warning: {line}" for line in warnings(plan.schedule))


def _step_lines(config: Config, layout: Layout, pipeline: Iterable[str] = ()) -> Iterator[str]:
    training = config.training
    each = training.rows_of_a_sample
    tokens = training.local_batch_size * each * training.seq_len
    words = "" if each == 1 else " pairs x 2"
    unit = "micro-batch" if layout.pp == 1 else "batch"  # the pipeline splits it into its own micro-batches
    yield f"{unit}: {training.local_batch_size}{words} x {training.seq_len} = {tokens:,} tokens"
    yield from pipeline
    whole = global_batch(training, layout.data_ranks)
    ranks = f" x {layout.data_ranks} data ranks" if layout.data_ranks > 1 else ""
    yield f"step: {micro_batches_of(config, layout)} x {unit}{ranks} = {whole * each * training.seq_len:,} tokens"


def _context_lines(config: Config, layout: Layout) -> Iterator[str]:
    if layout.cp > 1:
        plan = context_plan(config, layout.cp, 0)
        yield slices_line(plan, config.training.seq_len)
        share = layout.cp * (layout.tp if config.parallelism.enable_sequence_parallel else 1)
        section = config.parallelism
        local = config.training.local_batch_size * config.training.rows_of_a_sample
        rows = local if layout.pp == 1 else section.pipeline_parallel_microbatch_size
        tokens = rows * config.training.seq_len // share
        yield f"a rank has {tokens:,} tokens of a micro-batch between its products"


def micro_batches_of(config: Config, layout: Layout) -> int:
    local, ranks = config.training.local_batch_size, layout.data_ranks
    return global_batch(config.training, ranks) // (local * ranks)


def _collective_lines(config: Config, arch: Architecture, layout: Layout, precision: Precision) -> Iterator[str]:
    if layout.world_size == 1:
        return
    names = [str(kind).removeprefix("torch.") for kind in (precision.compute, precision.reduce)]
    yield f"collectives of one step, bytes that rank 0 sends (computing in {names[0]}, summing in {names[1]}):"
    counted = step_collectives(arch, config, layout, precision, micro_batches_of(config, layout))
    if ("world", "all-reduce") not in counted:  # every step ends with one
        yield "  (not known: the model's code reads values, which tensors without memory do not have)"
        return
    for (axis, kind), numbers in sorted(counted.items(), key=lambda item: -item[1]["bytes"]):
        size = numbers["bytes"]
        yield f"  {axis:<12} {kind:<14} {numbers['calls']:>8,} x {size:>22,} bytes  {sized(size):>12}"
    if precision.compute != precision.storage and not config.is_set("training.mixed_precision_param"):
        yield "  (on GPUs; on CPU training computes in the stored type unless training.mixed_precision_param is given)"
    if config.optimizer.name not in ("AdamW", "Adam"):
        yield f"  (without the sums over ranks in the update of {config.optimizer.name})"
    if ("cp", "ring") in counted and (arch.attn_mask_type == "block_causal" or arch.sliding_window):
        yield "  (the ring sends less: blocks outside of windows and documents are not sent)"
    if config.activation_checkpoint.mode == "memory_budget":
        yield "  (without collectives that the compiler repeats for activation_checkpoint.memory_budget)"
