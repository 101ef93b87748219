"""`shardline explain`: what a config would do, in words, numbers and pictures, before anything runs."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path

import torch

from shardline import registry
from shardline.config.architecture import Architecture
from shardline.config.check import checked_layout, refuse_pending
from shardline.config.layout import Layout, fewest_ranks
from shardline.config.schema import Config
from shardline.data.loader import fitted
from shardline.data.order import global_batch
from shardline.errors import UserError
from shardline.models.flavors import model_label, resolve
from shardline.models.fused_weights import active_words, parameter_count
from shardline.plan.memory import Memory, peak_memory
from shardline.plan.of_config import kept_by, workload_of
from shardline.precision.mixed import choose_precision
from shardline.show.chapters import Subject, chapters
from shardline.show.explain_text import write_text
from shardline.show.page import render, write_page
from shardline.tools.dry_run.dry_run import micro_batches_of
from shardline.tools.dry_run.shapes import build_rank, stage_ranks
from shardline.tools.dry_run.traffic import step_collectives
from shardline.words import counted


def command(config: Config, html: bool, out: str | None, world_size: int | None) -> int:
    if out is not None and not html:
        raise UserError("shardline explain: --out names the file of --html; pass both")
    subject = read_subject(config, world_size)
    name = f"{model_label(config.model)} on {counted(subject.layout.world_size, 'rank')}"
    if html:
        path = Path(out or "explain.html")
        data = {"title": name, "facts": facts(subject), "chapters": [asdict(one) for one in chapters(subject, 100)]}
        write_page(path, render("explain", name, data))
        return 0
    write_text(name, facts(subject), lambda width: chapters(subject, width), sys.stdout)
    return 0


def read_subject(config: Config, world_size: int | None) -> Subject:
    """Derive everything from a config; with `world_size = None`, for as many ranks as the degrees need."""
    registry.import_custom(config.experimental.custom_import)
    refuse_pending(config)
    layout = checked_layout(config, world_size or fewest_ranks(config.parallelism))
    precision = choose_precision(config, torch.device("cuda"), has_bfloat16=True)  # on CPU the default is float32
    arch = fitted(resolve(config.model), config)
    planned = _planned(config, arch, layout)
    ranks = [stage_ranks(layout, position)[0] for position in range(layout.pp)]
    stages = [build_rank(arch, config, layout, precision, rank, planned) for rank in ranks]
    sent = step_collectives(arch, config, layout, precision, micro_batches_of(config, layout), by_phase=True)
    return Subject(config, arch, layout, precision, stages, sent)


def _planned(config: Config, arch: Architecture, layout: Layout) -> Memory | None:
    """What the fullest rank will need on a GPU; None if a block of the model cannot be traced."""
    if arch.foreign is not None:
        return None
    return peak_memory(workload_of(config, arch, layout), kept_by(config, arch))


def facts(subject: Subject) -> list[tuple[str, str]]:
    config, arch, layout = subject.config, subject.arch, subject.layout
    training = config.training
    batch = global_batch(training, layout.data_ranks) * training.rows_of_a_sample
    types = [str(kind).removeprefix("torch.") for kind in (subject.precision.storage, subject.precision.compute)]
    return [
        ("parameters", f"{parameter_count(arch):,}{active_words(arch)}"),
        ("layout", str(layout)),
        ("a step", f"{batch:,} x {training.seq_len:,} = {batch * training.seq_len:,} tokens"),
        ("on GPUs", f"weights stored in {types[0]}, computing in {types[1]}"),
    ]
