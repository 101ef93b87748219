"""Transforms a model for its layout, in the one order that works.

    (make_model has already cut the pipeline stages and added the LoRA matrices)
    context -> expert -> tensor parallel -> float8 -> activation checkpointing -> compile -> activation offload
    -> data parallel

All steps run before the parameters have memory, and each logs a line about what it did.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardline.adapters.base_weights import hold_quantized
from shardline.adapters.freeze import freeze_except
from shardline.adapters.lora import Adaptation, attach
from shardline.adapters.peft_files import adaptation_of
from shardline.adapters.targets import EXPERTS
from shardline.comm.mesh import Mesh
from shardline.config.architecture import Architecture
from shardline.config.layout import Layout, check_cuda_graphs, check_experts, routes_together
from shardline.config.schema import Config
from shardline.data.order import global_batch
from shardline.errors import ConfigError
from shardline.memory.activation import apply_activation_checkpoint
from shardline.memory.offload import Offload, offload_activations
from shardline.models.decoder import Adaptable, Decoder, Stage
from shardline.models.experts.moe import RouterRun
from shardline.parallel.compiled_graphs import Operations, noting
from shardline.parallel.context.context import check_context_parallel, context_plan, describe
from shardline.parallel.data.ddp import replicate_parameters
from shardline.parallel.data.fsdp import apply_fsdp
from shardline.parallel.expert.expert import apply_experts
from shardline.parallel.pipeline.stages import PipelinePlan, plan_pipeline
from shardline.parallel.tensor.tensor import (
    TensorParallel,
    apply_tensor_parallel,
    batch_shapes,
    check_rows,
    check_shared_rows,
    check_tensor_parallel,
    needs_split_kv,
    parallel_products,
)
from shardline.precision.convert import check_rows as check_float8_rows
from shardline.precision.convert import choose_recipes, converted_modules, products_here
from shardline.precision.convert import describe as describe_float8
from shardline.precision.float8 import Recipe
from shardline.precision.float8_experts import expert_products
from shardline.precision.mixed import Precision, apply_precision
from shardline.registry import nearest

log = logging.getLogger("shardline")


@dataclass
class Applied:
    """What was done to a model, as far as the training loop needs to know it."""

    tensor: TensorParallel | None = None
    pipeline: PipelinePlan | None = None
    recipes: frozenset[Recipe | None] = frozenset([None])  # float8 recipes of the blocks' products
    float8_modules: Sequence[str] = ()  # modules whose weights are used only in float8
    offload: Offload | None = None
    graphs: list[Operations] | None = None  # graphs compiled so far; None if the run compiles nothing
    cuda_graphs: int = 0  # number recorded so far


def tensor_plan(config: Config, layout: Layout) -> TensorParallel | None:
    section = config.parallelism
    if layout.tp == 1:
        return None
    return TensorParallel(
        layout.tp,
        section.enable_sequence_parallel,
        not section.disable_loss_parallel,
        section.enable_async_tensor_parallel,
    )


def check_layout(config: Config, arch: Architecture, layout: Layout) -> None:
    """Raise for a model that cannot be cut for this layout; the launcher checks this before it starts ranks."""
    check_experts(arch, layout)
    check_cuda_graphs(config, arch, layout)
    plan = tensor_plan(config, layout)
    if layout.cp > 1:
        check_context_parallel(context_plan(config, layout.cp, 0), config, arch, layout.tp)
    if plan is not None:
        check_tensor_parallel(arch, plan.degree)
        if layout.cp == 1:  # otherwise check_context_parallel has checked the rows
            check_rows(config, plan)
        if arch.moe is not None and layout.ep > 1 and not routes_together(layout) and not plan.sequence_parallel:
            check_shared_rows(config, layout)
    for _, batch, length in batch_shapes(config) if config.model.converters else ():
        check_float8_rows(config, batch * length // layout.cp)


def make_model(
    arch: Architecture,
    config: Config | None,
    mesh: Mesh | None,
    precision: Precision,
    how: Adaptation | None = None,
) -> tuple[Decoder, Applied]:
    """Return this rank's part of the model, without memory, transformed for this run's layout."""
    plan = None if mesh is None or config is None else plan_pipeline(config, arch, mesh.layout)
    stages = None if plan is None or mesh is None else plan.held(mesh.coordinates["pp"])
    if arch.foreign is not None:
        from shardline.models.huggingface.foreign import ForeignDecoder

        model: Decoder = ForeignDecoder(arch)
    else:
        split_kv = needs_split_kv(arch, 1 if mesh is None else mesh.layout.tp)
        with torch.device("meta"):
            model = Decoder(arch, split_kv=split_kv, stages=stages)
    apply_precision(model, precision)
    how = how or (None if config is None else adaptation_of(config, arch))
    if how is not None:
        attach(model, how, precision.storage, frozen=precision.compute)
        if config is not None:
            hold_quantized(model, config.lora, 1 if mesh is None else mesh.layout.tp)
        model.renew_blocks()
    if how is None and config is not None and config.training.unfrozen_parameters:
        freeze_except(model, config.training.unfrozen_parameters)
    if mesh is None or config is None:
        return model, Applied()
    if stages is not None:
        _check_trained(model, stages)
    if plan is not None:
        log.info("%s", plan.describe())
    done = apply(model, config, mesh, precision)
    done.pipeline = plan
    return model, done


def _check_trained(model: Decoder, stages: Sequence[Stage]) -> None:
    """Refuse a pipeline rank, or a first stage, in which every weight is frozen: nothing would run backward there."""
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    for stage in stages:
        starts = tuple(f"layers.{layer}." for layer in stage.layers) + (("tok_embeddings.",) if stage.first else ())
        alone = stage.first and not any(name.startswith(starts) for name in trained)
        if alone or not trained:
            held = f"layers {min(stage.layers)} to {max(stage.layers)}" if stage.layers else "only the embedding"
            raise ConfigError(
                f"a pipeline stage ({held}) has no weight to train: let lora.layers or training.unfrozen_parameters"
                " name some there, cut the stages elsewhere with parallelism.module_fqns_per_model_part, or set"
                " parallelism.pipeline_parallel_degree = 1"
            )


def _check_dropout(model: Decoder, tensor: TensorParallel | None, layout: Layout) -> None:
    """Refuse dropout by which tensor-parallel ranks would change their copies of latent projections differently.

    How many random numbers the experts of a rank draw depends on the tokens that it receives.
    """
    how: Adaptation | None = model.adaptation
    if how is None or not how.dropout or model.arch.latent is None or tensor is None or tensor.sequence_parallel:
        return
    latent = any(target.endswith((".wq_a", ".wkv_a")) for target in how.targets)
    experts = any(EXPERTS in target for target in how.targets)
    if latent and experts and layout.ep > 1 and not routes_together(layout):
        raise ConfigError(
            f"lora.dropout = {how.dropout:g}: tensor-parallel ranks with experts of their own would drop different"
            " elements before the same latent projections; set it to 0, or set"
            " parallelism.enable_sequence_parallel = true"
        )


def batches_of_step(config: Config, mesh: Mesh) -> int:
    """The batches with a loss of their own that the samples of a step are cut into: by worker, and by local step."""
    apart = config.parallelism.data_parallel_mode == "async"
    return mesh.workers * (config.fault_tolerance.async_steps if apart else 1)


def router_run(config: Config, mesh: Mesh) -> RouterRun:
    """Return what the routers need to know about this run."""
    section = config.training
    batch = global_batch(section, mesh.layout.data_ranks) * section.rows_of_a_sample // batches_of_step(config, mesh)
    return RouterRun(config.debug.moe_force_load_balance, batch, section.seq_len)


def apply(model: Decoder, config: Config, mesh: Mesh, precision: Precision) -> Applied:
    """Transform `model`, which has no memory yet, for this run's layout."""
    check_layout(config, model.arch, mesh.layout)
    done = Applied(tensor_plan(config, mesh.layout))
    _check_dropout(model, done.tensor, mesh.layout)
    if mesh.layout.cp > 1:
        model.context = context_plan(config, mesh.layout.cp, mesh.coordinates["cp"])
        log.info("%s", describe(model.context, config.training.seq_len))
    if model.arch.moe is not None:
        sequence_parallel = done.tensor is not None and done.tensor.sequence_parallel
        narrow = config.parallelism.expert_parallel_dispatch_dtype == "float8"
        by_deepep = config.parallelism.expert_parallel_comm_backend == "deepep"
        apply_experts(model, mesh, sequence_parallel, router_run(config, mesh), narrow, by_deepep)
        if mesh.layout.ep > 1:
            log.info("%d experts over %d ranks", model.arch.moe.n_experts, mesh.layout.ep)
    if done.tensor is not None:
        apply_tensor_parallel(model, mesh, done.tensor)
        kind = "sequence parallel" if done.tensor.sequence_parallel else "without sequence parallel"
        log.info("tensor parallel over %d ranks, %s", done.tensor.degree, kind)
    _convert(model, config, done)
    compiled = config.compile.enable and "model" in config.compile.components
    apply_activation_checkpoint(model, config.activation_checkpoint, compiled=compiled)
    if compiled:
        done.graphs = []
        _compile_blocks(model, config.compile.backend, done.graphs, rows_travel=mesh.layout.ep > 1)
    if config.activation_checkpoint.mode == "offload":  # the hooks around compiled functions see what these save
        done.offload = offload_activations(model, config.activation_checkpoint.offload_every)
    if mesh.axis("fsdp") is not None:
        apply_fsdp(model, mesh, config, precision)
        if mesh.size("fsdp") > 1:
            several = mesh.layout.dp_replicate > 1 and not mesh.apart
            copies = f", {mesh.layout.dp_replicate} copies" if several else ""
            log.info("parameters sharded over %d ranks%s", mesh.size("fsdp"), copies)
        if config.training.enable_cpu_offload:
            log.info("parameters, gradients and optimizer state are kept in host memory")
    elif mesh.has_plain_replicas:
        replicate_parameters(model, mesh)
        log.info("%d copies of the model (DDP)", mesh.layout.dp_replicate)
    return done


def _convert(model: Decoder, config: Config, done: Applied) -> None:
    """Switch the blocks' products to float8 as model.converters says."""
    if not config.model.converters:
        return
    products = products_here if done.tensor is None else functools.partial(parallel_products, done.tensor)
    recipes = choose_recipes(model, config)
    for block, of in recipes.items():
        attention, ffn = products(of.into_heads, of.out_of_heads), products(of.widen, of.narrow)
        experts = expert_products(of.experts)
        block.spec = block.spec._replace(products=attention, ffn_products=ffn, expert_products=experts)
    for line in describe_float8(recipes):
        log.info("%s", line)
    done.recipes = frozenset(one for of in recipes.values() for one in of[:4])
    done.float8_modules = converted_modules(model, recipes)


def check_backend(backend: str) -> None:
    known = torch._dynamo.list_backends(exclude_tags=())
    if backend not in known:
        raise ConfigError(
            f"compile.backend: expected one of {', '.join(known)}, got {backend!r}{nearest(backend, known)}"
        )


GRAPHS_OF_A_KIND = 4  # for each kind of block: with and without gradients, for two lengths


def _kind(module: torch.nn.Module) -> tuple[Any, ...]:
    """Return a key that is equal for blocks that can share a graph: LoRA's ranks and scales may differ by layer."""
    specs = [inner.low_rank for inner in module.modules() if isinstance(inner, Adaptable)]
    return (*specs, *((name, parameter.shape) for name, parameter in module.named_parameters()))


def _compile_blocks(model: Decoder, backend: str, graphs: list[Operations], rows_travel: bool) -> None:
    """Compile each block's function, once for all blocks that share it."""
    check_backend(backend)
    torch._dynamo.reset()  # graphs of an earlier run in this process count against the limit of recompilations
    limits: Any = torch._dynamo.config
    kinds = {_kind(block.module) for block in model.blocks()}
    limits.recompile_limit = max(limits.recompile_limit, GRAPHS_OF_A_KIND * len(kinds))
    compiler: Any = backend
    if rows_travel:
        from shardline.parallel.expert.compiled_order import compiler as of_transfers

        compiler = of_transfers(backend)
    native = model.arch.foreign is None  # foreign code may break a graph where it does more than arithmetic
    compile_graph = functools.partial(torch.compile, backend=noting(compiler, graphs), fullgraph=native)
    compile_once = functools.cache(compile_graph)
    for block in model.blocks():
        block.function = compile_once(block.function)
    log.info("compiling %d blocks with %s (the first step takes longer)", len(model.layers), backend)
