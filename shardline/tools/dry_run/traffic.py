"""The collectives of one step of a dry run: the real step, as rank 0 of a fake group, on tensors without memory.

What a step sends grows linearly with the layers and with the micro-batches. So a deep model runs with a few layers, and
many micro-batches are replaced by two, and the numbers are extrapolated.
"""

from __future__ import annotations

import math
from collections import Counter

import torch

from shardline.comm.fake import Collectives, count_collectives, fake_group, fake_tensors
from shardline.comm.mesh import Mesh
from shardline.config.architecture import Architecture
from shardline.config.layout import Layout
from shardline.config.schema import Config
from shardline.data.batch import Batch
from shardline.data.order import one_pass
from shardline.models.decoder import Decoder
from shardline.parallel.apply import make_model
from shardline.parallel.tensor.tensor import vocabulary_rows
from shardline.precision.mixed import Precision
from shardline.training.loss import choose_chunk_tokens
from shardline.training.pairs import Reference, reference_kind
from shardline.training.step import Stepper

FEW_LAYERS = 3  # the first, the last and one in between


def step_collectives(
    arch: Architecture,
    config: Config,
    layout: Layout,
    precision: Precision,
    micro_batches: int,
    by_phase: bool = False,
) -> Collectives:
    """Return what the first rank sends in one optimizer step; with `by_phase`, also when."""

    def sent(layers: int, config: Config = config) -> Collectives:
        """Return what a step of all micro-batches with this many layers sends."""
        one = _step(arch, config, layout, precision, layers, 1, by_phase)
        if micro_batches == 1:
            return one
        return _extended(one, _step(arch, config, layout, precision, layers, 2, by_phase), micro_batches - 1)

    if layout.world_size == 1:
        return {}
    if layout.pp == 1:
        few, period = _layers(config, layout, arch)
        if few == arch.n_layers:
            return sent(few)
        return _extended(sent(few), sent(few + period), (arch.n_layers - few) // period)
    # A pipeline: all layers of the first rank, with one and with two pipeline micro-batches.
    size = config.parallelism.pipeline_parallel_microbatch_size
    count = config.training.local_batch_size // size
    if config.parallelism.pipeline_parallel_schedule_csv or count <= 2:
        return sent(arch.n_layers)
    one, two = (one_pass(config, few * size) for few in (1, 2))
    return _extended(sent(arch.n_layers, one), sent(arch.n_layers, two), count - 1)


def _layers(config: Config, layout: Layout, arch: Architecture) -> tuple[int, int]:
    """Return (layers to run, layers after which the pattern repeats).

    DDP needs all layers, because its buckets span layers; so do keys that name the trained layers.
    """
    layers = arch.n_layers
    dense, every = (0, 1) if arch.moe is None else (arch.moe.first_dense, arch.moe.every)
    plain_replicas = layout.dp_replicate > 1 and layout.dp_shard * layout.cp == 1
    section = config.activation_checkpoint
    option = section.selective_ac_option
    period = int(option) if section.mode == "selective" and option.isdecimal() and int(option) > 0 else 1
    period = math.lcm(period, every)
    few = FEW_LAYERS * period + (layers - dense) % period + dense
    lora = config.lora
    of_layers = lora.layers is not None or bool(lora.rank_pattern or lora.alpha_pattern)
    named = bool(config.training.unfrozen_parameters) or (lora.enable and of_layers)
    all_layers = plain_replicas or named or arch.foreign is not None or layers <= few + period
    return (layers, period) if all_layers else (few, period)


def _extended(one: Collectives, two: Collectives, times: int) -> Collectives:
    """Return one + times x (two - one)."""
    found: Collectives = {}
    for key, numbers in two.items():
        before = one.get(key, Counter())
        found[key] = Counter({name: before[name] + times * (numbers[name] - before[name]) for name in numbers})
    return found


def _step(
    arch: Architecture,
    config: Config,
    layout: Layout,
    precision: Precision,
    layers: int,
    micro_batches: int,
    by_phase: bool = False,
) -> Collectives:
    # Kernels, windows, compilation and offloading do not change what is sent (except windows in a ring), and some of
    # them cannot run without values.
    of_layers = {"sliding_window_layers": None, "rope_layers": None}
    plain = {"attn_backend": "auto", "sliding_window": None, **of_layers, "n_layers": layers}
    arch = arch.with_overrides(plain) if arch.foreign is None else arch
    config = _without_memory(config, arch, layout, precision)
    training = config.training
    with fake_group(0, layout.world_size):
        mesh = Mesh(layout, "cpu", apart=config.parallelism.data_parallel_mode != "sync")
        model, applied = make_model(arch, config, mesh, precision)
        with fake_tensors():
            if arch.foreign is not None:
                model.to_empty(device="cpu")
            for module in model.modules():  # each once: a router belongs to two modules if ranks share experts
                if arch.foreign is None:
                    module.to_empty(device="cpu", recurse=False)
            model.train()
            model.frozen = frozenset()  # frozen rows send nothing, and finding them needs values
            stepper = Stepper(
                config,
                model,
                torch.optim.SGD(model.parameters(), lr=0.0),
                mesh,
                applied,
                torch.device("cpu"),
                _reference(config, model),
            )
            if stepper.workers is not None:  # count a step between two synchronizations
                stepper.workers.outer.fragments.clear()
            rows = training.local_batch_size * training.rows_of_a_sample
            tokens = torch.zeros(rows, training.seq_len, dtype=torch.int64)
            batch = Batch(tokens, tokens, None, torch.zeros(training.local_batch_size, dtype=torch.int64))
            return count_collectives(lambda: stepper.step([batch] * micro_batches, 0.0, 1), by_phase)


def _reference(config: Config, model: Decoder) -> Reference | None:
    """Return DPO's reference; a copy sends what the model itself sends in a forward pass, so the model stands in."""
    kind = reference_kind(config, model.adaptation)
    return None if kind is None else Reference(kind, model if kind == "copy" else None)


def _without_memory(config: Config, arch: Architecture, layout: Layout, precision: Precision) -> Config:
    changes = {
        "compile.enable": False,
        "training.enable_cpu_offload": False,
        "activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns": [],  # may name layers left out here
    }
    if config.activation_checkpoint.mode in ("memory_budget", "offload"):  # the compiler's; copies of values
        changes["activation_checkpoint.mode"] = "none"
    if not config.training.loss_chunk_tokens:
        section = config.training
        tokens = section.local_batch_size * section.rows_of_a_sample * section.seq_len // layout.cp
        rows = len(vocabulary_rows(arch.vocab_size, layout.tp, 0))
        with fake_tensors():
            hidden = torch.empty(tokens, arch.dim, dtype=precision.compute, device="cuda")
            changes["training.loss_chunk_tokens"] = choose_chunk_tokens(hidden, rows)
    return config.replace(changes)
