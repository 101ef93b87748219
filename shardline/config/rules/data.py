"""Rules of data: text, records, pairs of answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardline.config.names import (
    LARGEST_ON_DEMO,
    data_paths,
    holds_parquet,
    is_demo,
    is_registered,
    is_saved_dataset,
    is_store,
    names_files,
    names_text,
    names_texts,
)
from shardline.config.rules.rule import Rule, Test, below, idle, idle_unless, idle_without, missing, note, refuse
from shardline.config.schema import Config
from shardline.config.sources import SOURCE_LISTS

TEXT_KEYS = "dataset_text_field dataset_split"
# Keys that need data.sources: how its records are mixed and cut, and which parts of them are read.
MIXING = "validation_sources held_out mixture packing excess_length min_length shuffle default_system_message"
READING = "chat_template chat_template_jinja train_on_inputs eot_tokens temperature"


def trains_on_pairs(config: Config) -> bool:
    return config.training.objective == "dpo"


def _reads_base(config: Config) -> bool:
    return trains_on_pairs(config) and config.dpo.reference == "base"


def _validates_records(config: Config) -> bool:
    return config.data.held_out > 0 or bool(config.data.validation_sources)


def _prepares(config: Config) -> bool:
    """Whether raw data may be prepared into the cache."""
    return bool(config.data.sources) or not all(
        is_demo(section) or is_store(section) for section in _read_sections(config)
    )


def _reads_files(config: Config) -> bool:
    """Whether a token store on disk is read; the demo is in memory."""
    return bool(config.data.sources) or not all(is_demo(section) for section in _read_sections(config))


def _read_sections(config: Config) -> list[Any]:
    """The sections whose data is read."""
    return [config.training, config.validation] if config.validation.enable else [config.training]


def _missing_reader(package: str, extra: str, needs: Callable[[str], bool]) -> list[Rule]:
    """Rules for data whose paths need a package."""

    def paths(config: Config, key: str) -> list[str]:
        return [path for path in data_paths(config, key) if needs(path)]

    return [
        missing(
            package,
            key,
            lambda config, key=key: bool(paths(config, key)),  # type: ignore[misc]
            f"pip install 'shardline[{extra}]'",
            lambda config, key=key: paths(config, key)[0],  # type: ignore[misc]
        )
        for key in ("training.dataset_path", "validation.dataset_path", *SOURCE_LISTS)
    ]


def _source_keys(part: str) -> list[Rule]:
    """Keys of [training] or [validation] that not every kind of data reads."""

    def when(test: Callable[[Any], bool]) -> Test:
        return lambda config: test(config.value(part))

    split, field = f"{part}.dataset_split", f"{part}.dataset_text_field"
    return [
        idle(f"{part}.dataset is 'demo'", when(is_demo), field, split),
        idle(f"{part}.dataset_path is a prepared store", when(is_store), field, split),
        idle(f"{part}.dataset is a registered source, which yields whole texts", when(is_registered), field, split),
        idle("every named file is read", when(names_files), split),
        idle("plain text has no fields", when(names_texts), field),
        idle_without(
            f"{part}.dataloader.num_workers",
            *below(f"{part}.dataloader", "persistent_workers prefetch_factor"),
        ),
    ]


DEMO: list[Rule] = [
    refuse(
        "validation.dataset",
        lambda c: c.validation.enable and is_demo(c.validation) and names_text(c.training),
        "'demo' is generated text, and the training data is not",
        remedy="set validation.dataset_path, or validation.enable = false",
    ),
]

NOISE: list[Rule] = [
    refuse(
        "training.neftune_alpha",
        lambda c: trains_on_pairs(c) and c.training.neftune_alpha is not None,
        "the reference model would see embeddings without noise",
        remedy="remove the key",
    ),
]

REFUSED: list[Rule] = [
    # `data.sources` takes the place of `training.dataset`, and the keys beside it need it.
    refuse(
        "data.sources",
        lambda c: bool(c.data.sources) and names_text(c.training),
        "it replaces training.dataset and training.dataset_path",
        remedy="remove those, or name their data in data.sources",
    ),
    refuse(
        "data.held_out",
        lambda c: c.data.held_out >= 1 and c.data.held_out != int(c.data.held_out),
        lambda c: f"expected a fraction below 1 or a whole number of records, got {c.data.held_out:g}",
    ),
    refuse(
        "data.held_out",
        lambda c: c.data.held_out > 0 and bool(c.data.validation_sources),
        "data.validation_sources already names the records to validate on",
        remedy="remove one of the two",
    ),
    refuse(
        "data.sources",
        lambda c: bool(c.data.sources) and c.validation.enable and not _validates_records(c),
        "no records are named for validation, and validation.dataset is other data",
        remedy="set data.held_out or data.validation_sources, or validation.enable = false",
    ),
    refuse(
        "data.shuffle",
        lambda c: not c.data.shuffle and c.data.mixture == "weights",
        "data.mixture = 'weights' draws samples at random",
        remedy="set data.shuffle = true, or data.mixture = 'concatenate'",
    ),
    # Pairs of answers.
    refuse(
        "training.objective",
        lambda c: trains_on_pairs(c) and not c.data.sources,
        "'dpo' compares the two answers of a pair, and plain text has none",
        remedy="name records with pairs in data.sources, such as type = 'chat_template.default'",
    ),
    refuse(
        "dpo.reference",
        lambda c: _reads_base(c) and not c.lora.enable,
        "only LoRA has frozen weights beside the trained ones",
        remedy="set it to 'copy', or lora.enable = true",
    ),
    refuse(
        "dpo.reference",
        lambda c: _reads_base(c) and bool(c.lora.modules_to_save),
        lambda c: f"lora.modules_to_save = {c.lora.modules_to_save} are trained in full, so they change",
        remedy="set it to 'copy', or leave lora.modules_to_save empty",
    ),
    refuse(
        "dpo.reference",
        lambda c: _reads_base(c) and c.lora.bias != "none",
        lambda c: f"lora.bias = {c.lora.bias!r} trains weights of the base model, so they change",
        remedy="set it to 'copy', or lora.bias = 'none'",
    ),
    refuse(
        "dpo.label_smoothing",
        lambda c: trains_on_pairs(c) and c.dpo.loss == "robust" and c.dpo.label_smoothing >= 0.5,
        lambda c: f"'robust' divides by 1 - 2 x label_smoothing, which is {1 - 2 * c.dpo.label_smoothing:g}",
        remedy="set it below 0.5",
    ),
]

MISSING: list[Rule] = [
    *_missing_reader("pyarrow", "parquet", holds_parquet),
    *_missing_reader("datasets", "datasets", is_saved_dataset),
    Rule(
        "missing",
        ("training.dataset",),
        lambda c: c.training.dataset is None and not c.training.dataset_path and not c.data.sources,
        "no data is named, and generated text is only for demos and models of up to"
        f" {LARGEST_ON_DEMO // 10**6}M parameters, unless it is asked for; pass --training.dataset_path=PATH, or add"
        " two lines:\n  [training]\n"
        '  dataset_path = "data/*.jsonl"\n'
        '(text, JSONL, Parquet, a prepared store or a dataset; dataset = "demo" asks for generated text)',
    ),
]

IDLE: list[Rule] = [
    idle("data.sources is empty", lambda c: not c.data.sources, *below("data", f"{MIXING} {READING}")),
    idle_unless("data.mixture", ["weights"], "data.temperature"),
    idle("data.sources names the records", lambda c: bool(c.data.sources), *below("training", TEXT_KEYS)),
    idle("data.sources names the records", _validates_records, *below("validation", f"dataset {TEXT_KEYS}")),
    idle_unless("training.objective", ["dpo"], "dpo."),
    idle_unless("dpo.loss", ["sigmoid", "robust"], "dpo.label_smoothing"),
    idle("every answer of a pair has a row of its own", trains_on_pairs, "data.packing"),
    idle("only the answers of a pair are trained", trains_on_pairs, "data.train_on_inputs"),
    *_source_keys("training"),
    *_source_keys("validation"),
    idle("no raw data is prepared", lambda c: not _prepares(c), "training.cache_folder"),
    idle("no prepared data is read", lambda c: not _reads_files(c), "training.verify_data"),
]

NOTES: list[Rule] = [
    note(
        "data.held_out",
        lambda c: c.data.held_out > 0 and bool(c.data.sources) and not c.validation.enable,
        "keeps records out of training, but validation.enable is false, so they are not used",
    ),
]
