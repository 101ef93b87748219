"""Refusals that a launcher makes before it starts ranks: what the config, its files and the number of ranks decide.

A rank checks the same again, since another launcher may have started it.
"""

from __future__ import annotations

from shardline.config.architecture import Architecture
from shardline.config.check import checked_layout
from shardline.config.layout import Layout
from shardline.config.names import is_demo, is_foreign, is_store
from shardline.config.schema import Config
from shardline.config.sources import SOURCE_LISTS, source_tables
from shardline.errors import blame
from shardline.run.options import TrainOptions


def fitting_layout(config: Config, ranks: int) -> Layout:
    """The layout of this many ranks; refuse it if the batch or the model cannot be split that way."""
    from shardline.data.order import global_batch

    layout = checked_layout(config, ranks)
    global_batch(config.training, layout.data_ranks)
    if max(layout.pp, layout.cp, layout.tp, layout.ep) > 1 or config.model.converters:
        from shardline.data.loader import fitted
        from shardline.models.flavors import resolve
        from shardline.parallel.apply import check_layout
        from shardline.parallel.pipeline.stages import plan_pipeline

        arch = fitted(resolve(config.model), config)
        check_layout(config, arch, layout)
        plan_pipeline(config, arch, layout)
    return layout


def check_start(config: Config, options: TrainOptions, alone: bool) -> None:
    """Refuse files and names with which no rank could start; the run's folder only where no other machine has it."""
    from shardline.data.formats.prompts import check_prompts
    from shardline.data.loader import fitted
    from shardline.data.tokenizer import check_vocabulary, choose_tokenizer
    from shardline.models.flavors import resolve
    from shardline.run.folder import check_folder
    from shardline.telemetry.metrics import check_wandb

    check_wandb(config)
    if alone:
        check_folder(config, resume=options.resume, overwrite=options.overwrite)
    tokenizer = choose_tokenizer(config)
    check_prompts(config, tokenizer)
    if not is_foreign(config):  # transformers takes seconds to build a model: the ranks check it
        arch = resolve(config.model)
        check_vocabulary(tokenizer, fitted(arch, config, tokenizer))
        _check_trained(config, arch)
    if config.compile.enable and config.compile.backend != "inductor":
        from shardline.parallel.apply import check_backend

        check_backend(config.compile.backend)


def _check_trained(config: Config, arch: Architecture) -> None:
    """Refuse names of weights and modules that the model does not have."""
    if config.lora.enable:
        from shardline.adapters.peft_files import adaptation_of

        adaptation_of(config, arch)
    elif config.training.unfrozen_parameters:
        from shardline.adapters.freeze import trained_names

        trained_names(arch, config.training.unfrozen_parameters)


def check_data(config: Config) -> None:
    """Refuse data that does not exist."""
    from shardline.data.prepare import section_source
    from shardline.data.records import record_source

    parts = ("training", "validation") if config.validation.enable else ("training",)
    for part, key in zip(parts, SOURCE_LISTS, strict=False):
        for number, table in enumerate(source_tables(config.value(key))):
            with blame(f"{key}[{number}]"):
                record_source(table)
        if not config.data.sources and not is_demo(config.value(part)) and not is_store(config.value(part)):
            section_source(config, part)
