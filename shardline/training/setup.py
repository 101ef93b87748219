"""Turns a config into a run that is ready for its next step, after setting process-wide switches."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist

from shardline import registry
from shardline.adapters.lora import NOTHING, Adaptation, more_flops
from shardline.checkpoint.assets import write_tokenizer
from shardline.checkpoint.fetch import fetch_to_resume
from shardline.checkpoint.format import Found, list_folder
from shardline.checkpoint.lora.base import Base, base_of
from shardline.checkpoint.mirror import Mirror, check_free, open_mirror
from shardline.checkpoint.reader import ShardFiles
from shardline.checkpoint.replicas.compression_state import CompressionState
from shardline.checkpoint.replicas.worker_state import LocalState, WorkerState
from shardline.checkpoint.resume import DataIdentity, Start, resumable_step
from shardline.checkpoint.resume_batch import batch_to_keep, keep_batch
from shardline.checkpoint.saver import Saver
from shardline.checkpoint.shards import HeldTensor
from shardline.comm import watchdog
from shardline.comm.mesh import (
    Mesh,
    crossing_lines,
    sharing_lines,
    start_process_group,
    stop_process_group,
    world_size,
)
from shardline.comm.store import connect_store, gather_ranks, ranks_from_environment
from shardline.config.architecture import Architecture
from shardline.config.check import (
    check_architecture,
    checked_layout,
    expert_notes,
    notes,
    refuse_pending,
    schedule_notes,
    with_data_named,
)
from shardline.config.layout import check_cuda_graphs, check_experts, with_degrees
from shardline.config.schema import Config, Job
from shardline.config.write import to_toml
from shardline.data.formats.prompts import check_prompts
from shardline.data.loader import Loader, build_loader, fitted, steps_for_epochs
from shardline.data.order import global_batch
from shardline.data.prepare import cache_folder
from shardline.data.tokenizer import check_vocabulary, choose_tokenizer
from shardline.errors import UserError, blame
from shardline.models.attention import check_attention
from shardline.models.decoder import Decoder
from shardline.models.flavors import check_weights, resolve
from shardline.models.fused_weights import parameter_count
from shardline.models.huggingface.foreign_notes import check_lengths, foreign_line, foreign_notes
from shardline.models.products.narrow import keep_narrow
from shardline.optim.gpu_adam import GPUAdam
from shardline.optim.optimizer import build_optimizer, scaled_lr
from shardline.parallel.apply import Applied, make_model
from shardline.parallel.data.fsdp import reshard
from shardline.parallel.expert import deepep
from shardline.parallel.expert.choose import choose_carrier
from shardline.parallel.pipeline.schedules import warnings
from shardline.parallel.pipeline.stages import plan_pipeline
from shardline.parallel.replica_check import check_replicas
from shardline.parallel.replicas.groups import ReplicaGroups
from shardline.parallel.tensor import async_tp
from shardline.plan.check import Verdict, before_start
from shardline.precision.convert import check_device
from shardline.precision.mixed import Precision, choose_precision
from shardline.run import attempt
from shardline.run.device import check_memory, choose_device, device_identity, flops_per_token, supports_bf16
from shardline.run.downloads import downloaded
from shardline.run.folder import RunFolder, open_run_folder
from shardline.run.numa import prepare_rank
from shardline.run.options import TrainOptions
from shardline.run.output import keep_output
from shardline.run.previous_run import changed_keys
from shardline.run.stop import Requests
from shardline.storage.atomic import forbid_others_to_write, write_atomically
from shardline.storage.compiler_cache import load_compiler, separate_caches
from shardline.telemetry.engaged import StepObserver
from shardline.telemetry.log import hold_log, log_table, passing_line, setup_logging
from shardline.telemetry.metrics import Meter, check_wandb
from shardline.telemetry.telemetry import Telemetry
from shardline.training.async_steps import AsyncSteps
from shardline.training.overview import overview, overview_notes, overview_warnings
from shardline.training.pairs import Reference, reference_kind
from shardline.training.replica_groups import for_groups, join_groups
from shardline.training.step import Stepper

log = logging.getLogger("shardline")


class Setup:
    """Everything a run needs, in the order in which it is checked, opened, built and filled.

    `closing` collects what must be closed at the end of the run, or if the set-up fails halfway.
    """

    def __init__(self, config: Config, options: TrainOptions, closing: contextlib.ExitStack) -> None:
        hold_log()
        self.config, self.options = attempt.continued(config, options)
        self.closing = closing
        closing.callback(os.umask, forbid_others_to_write())
        self._check()
        self._join()
        self._keep_batch()
        self._open_data()
        self._open_folder()
        self._open_log()
        self._build()
        self._start()
        if not self.finished and self.mesh.rank == 0:
            self._record()

    # ---- before ranks connect ----------------------------------------------------------------------------------------

    def _check(self) -> None:
        """Choose device, layout and model, and refuse what cannot run, on each rank by itself."""
        config = self.config
        for line in prepare_rank(config):  # before CUDA or NCCL is initialised
            log.info("%s", line)
        registry.import_custom(config.experimental.custom_import)
        refuse_pending(config)
        self.config = config = downloaded(config)
        arch = resolve(config.model)
        check_architecture(config, arch)
        check_weights(config, arch)
        refuse_pending(with_data_named(config, parameter_count(arch)))
        check_wandb(config)
        self.device = choose_device()
        self.layout = checked_layout(config, world_size())
        if config.fault_tolerance.enable:
            self.config = config = for_groups(config, self.layout, arch)
        set_determinism(config, self.device)  # first: kernel choices depend on it
        if config.compile.enable:
            separate_caches()  # before the first kernel
        self.tokenizer = choose_tokenizer(config)
        self.arch = fitted(arch, config, self.tokenizer)
        check_experts(self.arch, self.layout)
        check_cuda_graphs(config, self.arch, self.layout, self.device.type)
        check_vocabulary(self.tokenizer, self.arch)
        check_prompts(config, self.tokenizer)
        self.precision = choose_precision(config, self.device, supports_bf16(self.device))
        check_device(config, self.device, self.precision.compute)
        if self.arch.foreign is not None:
            check_lengths(self.arch, config)
            self.kernel = "transformers"
        else:
            self.kernel = check_attention(self.arch, self.device, self.precision.compute, config.training.seq_len)
        self.pipeline = plan_pipeline(config, self.arch, self.layout)
        self.verdict = self._foresee()

    def _foresee(self) -> Verdict | None:
        """Plan the fullest rank's memory, on rank 0: a trace for several ranks is possible only before they connect."""
        if os.environ.get("RANK", "0") != "0" or dist.is_initialized() or self.arch.foreign is not None:
            return None
        try:
            return before_start(self.config, self.arch, self.layout, self.device)
        except UserError:  # the run itself will say what is wrong with it
            return None

    # ---- ranks, data and folder --------------------------------------------------------------------------------------

    def _join(self) -> None:
        """Connect to the other ranks, if there are any."""
        offload = self.config.training.enable_cpu_offload
        self.owns_group = start_process_group(self.device, self.config.comm.init_timeout_seconds, offload)
        attempt.note("joined")
        if self.owns_group:
            self.closing.callback(stop_process_group)
        apart = self.config.parallelism.data_parallel_mode != "sync"
        self.mesh = Mesh(self.layout, self.device.type, offload, apart)
        if self.layout.ep > 1 and self.config.parallelism.expert_parallel_comm_backend == "deepep":
            deepep.start(self.arch.dim, self.precision.compute, self.device)

    def _keep_batch(self) -> None:
        """Keep the checkpoint's global batch on another number of ranks by adapting gradient accumulation."""
        config, ranks = self.config, self.layout.data_ranks
        resume, overwrite = self.options.resume, self.options.overwrite
        saved = None if overwrite else self.mesh.from_rank_0(lambda: batch_to_keep(config, self.arch, resume))
        if saved is not None and saved.size != global_batch(config.training, ranks):
            self.config = keep_batch(config, saved, ranks, lambda other: plan_pipeline(other, self.arch, self.layout))
            checked_layout(self.config, self.mesh.world_size)

    def _open_data(self) -> None:
        config = self.config
        several = self.mesh.world_size > 1
        # Another machine may have its data prepared already, and this one may have to tokenize for hours.
        with watchdog.patiently("preparing data") if several else contextlib.nullcontext():
            self.loader = self._loader("training")
            self.validation = self._loader("validation") if config.validation.enable else None
        self.total_steps = config.training.steps
        if config.training.epochs is not None:
            self.total_steps = steps_for_epochs(self.loader, config.training.epochs)

    def _loader(self, section: Literal["training", "validation"]) -> Loader:
        """Build the loader of this rank's share; tensor-parallel ranks read the same samples."""
        rank, ranks = self.mesh.data_rank, self.layout.data_ranks
        loader = build_loader(
            self.config, section, self.arch, self.tokenizer, rank=rank, ranks=ranks, device=self.device
        )
        self.closing.callback(loader.close)
        return loader

    def _open_folder(self) -> None:
        """Let rank 0 take the folder; all ranks learn where it is or why it is refused."""
        self.mirror: Mirror | None = None  # only on rank 0
        self.found: list[Found] | None = None  # checkpoints in the folder, listed once by rank 0
        self.changed: list[tuple[str, Any, Any]] = []  # for a resumed run, on rank 0: key, value before, value now
        fetches = self.options.resume and self.config.checkpoint.mirror is not None
        with watchdog.patiently("fetching a checkpoint") if fetches else contextlib.nullcontext():
            path, resume_step = self.mesh.from_rank_0(self._take_folder)
        if self.mesh.rank != 0:
            self.folder = RunFolder(path, self.config.checkpoint.folder, resume_step)
        attempt.note("opened", folder=str(path))
        self.config = self.config.replace({"job.dump_folder": str(path)})

    def _take_folder(self) -> tuple[Path, int | None]:
        config, options = self.config, self.options
        if options.overwrite and config.checkpoint.mirror is not None:
            check_free(config.checkpoint.mirror)  # before anything is moved aside
        self.folder = open_run_folder(
            config, resume=options.resume, overwrite=options.overwrite, has_good_checkpoint=self._good_step
        )
        self.closing.callback(self.folder.close)
        if self.folder.resume:
            self.changed = changed_keys(self.folder.path, config)
        self.mirror = open_mirror(config, self.folder, checked=options.overwrite)
        return self.folder.path, self.folder.resume_step

    def _good_step(self, path: Path) -> int | None:
        """The step from which a run in this folder could resume."""
        mirror = self.config.checkpoint.mirror
        if self.options.resume and mirror is not None:
            fetch_to_resume(mirror, path / self.config.checkpoint.folder)
        self.found = list_folder(path / self.config.checkpoint.folder)
        return resumable_step(path, self.config, self.arch, self.total_steps, self.found)

    # ---- what is logged first ----------------------------------------------------------------------------------------

    def _open_log(self) -> None:
        """Open the log; it starts with the lines that the set-up has logged so far."""
        config, mesh = self.config, self.mesh
        if self.owns_group and mesh.world_size > 1:
            keep_output(self.folder.path / "log")
            rows = gather_ranks(connect_store(), mesh.rank, mesh.world_size)
            if mesh.rank == 0:
                self.folder.write_ranks(rows)
            if config.comm.trace_buf_size:
                traces = self.folder.path / config.comm.save_traces_folder
                watchdog.keep_flights(config.comm.trace_buf_size, traces, config.comm.save_traces_file_prefix)
        setup_logging(self.folder, rank=mesh.rank, color=not config.metrics.disable_color_printing)
        if config.job.description != Job().description:
            log.info("%s", config.job.description)
        if config.job.print_config:
            log.info("%s", to_toml(config))

    def _announce(self) -> None:
        """Log what runs where, what was adjusted and what has no effect; the model has no memory yet."""
        mesh, again = self.mesh, self.folder.again  # after a restart: the table was already shown
        log_table(overview(self), file_only=again)
        if again and mesh.world_size > 1:
            log.info("%d ranks: %s", mesh.world_size, self.layout)
        if self.arch.foreign is not None:
            log.info("%s", foreign_line(self.arch, asked=self.config.model.implementation == "transformers"))
        if mesh.world_size > 1:
            for line in crossing_lines(self.layout, ranks_from_environment("LOCAL_WORLD_SIZE", mesh.world_size)):
                log.info("%s", line)
            for line in sharing_lines(self.device):
                log.warning("%s", line)
        for line in self._notes():
            log.info("note: %s", line)
        pipelined = () if self.pipeline is None else warnings(self.pipeline.schedule)
        for line in (*pipelined, *overview_warnings(self)):
            log.warning("%s", line)

    def _notes(self) -> Iterator[str]:
        config = self.config
        yield from (*config.alias_notes, *notes(with_degrees(config, self.layout)), *self.precision.notes)
        yield from overview_notes(self)
        yield from expert_notes(config, self.arch)
        yield from () if self.arch.foreign is None else foreign_notes(self.arch)
        if config.training.tf32 and self.device.type != "cuda":
            yield f"training.tf32 has no effect on {self.device.type}"
        if config.training.epochs is not None:
            yield from schedule_notes(config, self.total_steps)
        length, longest = config.training.seq_len, self.arch.max_seq_len
        if length > longest:
            yield (
                f"training.seq_len = {length} is longer than the model's max_seq_len, {longest}, which exports"
                " will state; model.overrides.max_seq_len changes it"
            )

    # ---- model, optimizer and weights --------------------------------------------------------------------------------

    def _build(self) -> None:
        """Build everything that trains, saves and observes; the parameters have no values yet."""
        config, mesh, device, dtype = self.config, self.mesh, self.device, self.precision.compute
        batch, seq_len = self.loader.global_batch_size, config.training.seq_len
        registry.run_hooks("before_build", config)
        self.requests = Requests.of_rank(config, mesh.rank)
        self.model, applied = make_model(self.arch, config, mesh, self.precision)
        self._announce()
        give_memory(self.model, device, config)
        self.optimizer = build_optimizer(config, self.model)
        self._keep_narrow_weights()
        self.base_lr = scaled_lr(config, batch)
        if config.optimizer.lr_scaling != "none":
            log.info("learning rate %g for a global batch of %d", self.base_lr, batch)
        cache = cache_folder(config.training.cache_folder)
        with passing_line() as tell:
            self.async_tensor = async_tp.prepare(
                config,
                self.arch,
                mesh,
                applied.tensor,
                dtype,
                device,
                cache,
                applied.recipes,
                tell,
                again=self.options.measure_again,
            )
        report_choices(self.async_tensor)
        carried = choose_carrier(config, self.arch, mesh, dtype, device)
        if carried is not None:
            log.info("%s", carried)
        self.reference = self._build_reference()
        self.stepper = Stepper(config, self.model, self.optimizer, mesh, applied, device, self.reference)
        if config.parallelism.data_parallel_mode == "async":
            self.stepper.asynchronous = AsyncSteps(config, mesh, self.loader, self.stepper)
            self.closing.callback(self.stepper.asynchronous.close)
        self.groups: ReplicaGroups | None = None
        self.identity = DataIdentity(
            seed=seed_of(config),
            dataset=self.loader.samples.store.source_fingerprint,
            seq_len=seq_len,
            global_batch_size=batch,
            tokenizer=self.tokenizer.fingerprint,
        )
        lora, self.copy = config.lora.enable, None if self.reference is None else self.reference.copy
        needed = lora or self.copy is not None
        self.base = self.mesh.from_rank_0(self._base_of) if needed else None
        passes, workers = self.stepper.passes, self.stepper.workers
        self.compression = CompressionState(passes.replicas, self.model, mesh, self.stepper.summed_over_tp)
        self.worker_state = WorkerState(None if workers is None else workers.outer, self.model, self.optimizer, mesh)
        served = self.stepper.asynchronous
        if served is not None and served.local_steps > 1:
            self.worker_state = LocalState(served.local_momenta(), self.model, self.optimizer, mesh)
        self.saver = Saver(
            config,
            self.folder.checkpoint_folder,
            self.model,
            self.optimizer,
            self.identity,
            mesh,
            self.mirror,
            self.base,
            extra=self.compression.held,
            weights=self.worker_state.weights,
            state=self._held_state,
        )
        self.closing.callback(self.saver.close)
        devices = len(set(mesh.from_everyone(device_identity(device, mesh.rank))))
        self.telemetry = Telemetry(
            config,
            self.folder,
            mesh,
            device,
            Meter(self.arch, seq_len, device, dtype, devices, more_flops=self._more_flops()),
            step_tokens=batch * seq_len,
            pipeline=self.stepper.passes.pipeline,
            applied=applied,
            observer=StepObserver(self.model, self.optimizer, applied, self.stepper.asynchronous is not None),
        )
        self.telemetry.watch(self.model, self.optimizer, self.stepper.experts)

    def _base_of(self) -> Base:
        return base_of(self.config, seed_of(self.config), self.folder.checkpoint_folder if self.folder.resume else None)

    def _held_state(self) -> list[HeldTensor]:
        """The optimizer state on this rank."""
        served = self.stepper.asynchronous
        return self.worker_state.held() if served is None or served.local_steps > 1 else served.held()

    def _build_reference(self) -> Reference | None:
        """Build the reference for preference pairs; a copy of the model is frozen, and stored in its compute type."""
        kind = reference_kind(self.config, self.model.adaptation)
        if kind is None:
            return None
        words = {"base": "the frozen weights", "copy": "a frozen copy of the initial weights", "none": "none"}
        log.info("reference of pairs: %s", words[kind])
        if kind != "copy":
            return Reference(kind)
        copy, _ = build_model(self.arch, self.device, self.precision, self.mesh, self.config, NOTHING)
        return Reference(kind, copy.eval())

    def _more_flops(self) -> float:
        """FLOPs per token that LoRA and a reference's forward pass add."""
        passes = 0 if self.reference is None or self.reference.kind == "none" else 1
        return more_flops(self.model) + passes * flops_per_token(self.arch, self.config.training.seq_len) / 3

    def _keep_narrow_weights(self) -> None:
        """Also keep the blocks' matrices in the compute type if only this rank's optimizer changes them."""
        config, compute = self.config, self.precision.compute
        alone = self.mesh.world_size == 1 and not config.training.enable_cpu_offload
        alone = alone and not config.fault_tolerance.enable  # a group that rejoins receives weights, not copies
        once = self.loader.global_batch_size == config.training.local_batch_size * self.layout.data_ranks
        if alone and once and isinstance(self.optimizer, GPUAdam) and compute == torch.bfloat16:
            held = [parameter for block in self.model.blocks() for parameter in block.module.parameters()]
            matrices = [parameter for parameter in held if parameter.ndim > 1 and parameter.requires_grad]
            for parameter in matrices:
                keep_narrow(parameter, compute)
            log.info("the blocks' matrices are also kept in bfloat16, and their gradients only in bfloat16")

    def _start(self) -> None:
        """Resume, load or draw the weights, and move to the run's position."""
        start = Start(
            self.config,
            self.folder.checkpoint_folder,
            self.model,
            self.optimizer,
            self.identity,
            self.total_steps,
            self.mesh,
            self._load_more,
            self.base,
            self.found,
            self.copy,
            functools.partial(load_compiler, self.config.compile),
        )
        self.progress, self.finished = start.run(self.folder.resume, seed_of(self.config))
        self.worker_state.begin()
        if not self.finished:
            self.total_steps = start.last_step(self.progress)
            self._note_validation()
        if self.stepper.asynchronous is not None and not self.finished:
            self.stepper.asynchronous.begin(self.progress.step, self.progress.samples)
        self.saver.resumed(self.progress.step if self.folder.resume else 0)
        self.stepper.loss_scale.load(self.progress.loss_scale)
        self.loader.seek(self.progress.samples)
        registry.run_hooks("after_build", self.model, self.config)
        if self.config.model.print_after_conversion:
            log.info("%s", self.model)
        if not self.finished:  # the weights of a run that had finished are not loaded
            check_replicas(self.model, self.progress.step)
            self.model.check_masks(self.device)
            reshard(self.model)
        if self.config.fault_tolerance.enable and not self.finished:
            self.groups = self.stepper.groups = join_groups(self.config, self.mesh, self.model, self.optimizer)
            self.telemetry.observer.groups = self.groups
            self.closing.callback(self.groups.close)
        attempt.note("loaded", step=self.progress.step)

    def _load_more(self, shards: ShardFiles) -> None:
        """Load what a checkpoint holds besides weights and optimizer state."""
        self.compression.load(shards)
        if "model" not in self.config.checkpoint.exclude_from_loading:
            self.worker_state.load(shards)

    def _note_validation(self) -> None:
        """Warn if a resumed run validates on another number of samples: validation.steps counts batches per rank."""
        before, now = self.progress.validated, 0
        if self.validation is not None:
            now = self.validation.samples_in(self.config.validation.steps)
        if before and now and before != now:
            log.warning("validation reads %d samples, but %d before this start: losses are not comparable", now, before)
        self.progress.validated = now

    def _record(self) -> None:
        """Store the config with the run, once it is certain that the run takes place."""
        self.folder.begin()
        text = to_toml(self.config)
        self.folder.write_config(text)
        write_tokenizer(self.config, self.tokenizer)
        if self.async_tensor.measured:
            self.async_tensor.save(self.folder.path)
        if self.config.job.save_config_file:
            with blame("job.save_config_file"):
                write_atomically(Path(self.config.job.save_config_file), text)


def report_choices(found: async_tp.AsyncTensor) -> None:
    """Log how each product runs: a line on the console, a table in the log file."""
    if found.measured:
        log_table(found.table(), "Async TP: how each product runs", file_only=True)
    for line in found.lines:
        log.info("%s", line)


# ---- parts that other programs use -----------------------------------------------------------------------------------


def seed_of(config: Config) -> int:
    return config.debug.seed or 0


def set_determinism(config: Config, device: torch.device) -> None:
    """Seed every random generator; with `debug.deterministic`, also refuse operations whose result may vary."""
    seed = seed_of(config)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    deterministic = config.debug.deterministic
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when it creates its first handle
    torch.use_deterministic_algorithms(deterministic, warn_only=config.debug.deterministic_warn_only)
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high" if config.training.tf32 else "highest")
        torch.backends.cudnn.deterministic = deterministic
        torch.backends.cudnn.benchmark = False
        torch.backends.cuda.enable_cudnn_sdp(False)  # PyTorch would choose it for lengths where it gives NaN


def build_model(
    arch: Architecture,
    device: torch.device,
    precision: Precision,
    mesh: Mesh | None = None,
    config: Config | None = None,
    how: Adaptation | None = None,
) -> tuple[Decoder, Applied]:
    """Build a model, split and transformed for this run, whose parameters have memory on `device` but no values yet.

    `how` says what is trained besides frozen weights, if the config does not.
    """
    model, applied = make_model(arch, config, mesh, precision, how)
    give_memory(model, device, config)
    return model, applied


def give_memory(model: Decoder, device: torch.device, config: Config | None) -> None:
    """Allocate memory for the parameters where they are kept, without values."""
    offloaded = config is not None and config.training.enable_cpu_offload
    place = torch.device("cpu") if offloaded else device
    check_memory([*model.parameters(), *model.buffers()], place)
    model.to_empty(device=place)
    model.train()
