"""The table of rules: combinations that are refused, keys whose feature is not built, keys without effect."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from shardline import registry
from shardline.config.architecture import SCALING_FIELDS, RopeScaling
from shardline.config.features import is_context_parallel, is_pipelined, is_tensor_parallel
from shardline.config.layout import KEYS
from shardline.config.names import (
    ALTERNATIVES,
    CONVERTERS,
    FLOAT8_EXPERTS,
    FLOAT8_LINEAR,
    LARGEST_ON_DEMO,
    LAYERWISE,
    LOADABLE,
    MOMENTS,
    MX_CONVERTERS,
    NOT_BUILT,
    data_paths,
    find_schedule,
    has_window,
    holds_parquet,
    is_demo,
    is_registered,
    is_saved_dataset,
    is_store,
    names_files,
    names_text,
    names_texts,
    scaling_type,
    unknown_schedule,
)
from shardline.config.schema import Config, LRScheduler, leaves
from shardline.config.sources import SOURCE_LISTS
from shardline.config.types import show

Kind = Literal["refused", "pending", "missing", "idle", "note"]
Test = Callable[[Config], bool]
Words = str | Callable[[Config], str]


@dataclass(frozen=True)
class Rule:
    """A row: where the test holds, its keys are refused, not built yet, in need of a package that is missing, without
    effect (idle), or worth a note.

    A key that ends in `.` stands for every key below it. `words` is the reason, or the feature that is missing.
    """

    kind: Kind
    keys: tuple[str, ...]
    when: Test
    words: Words
    remedy: str = ""

    def sentence(self, config: Config) -> str:
        words = self.words if isinstance(self.words, str) else self.words(config)
        return words + (f"; {self.remedy}" if self.remedy else "")


OUTER_KEYS = (
    *("semi_sync_method", "sync_steps", "num_fragments", "fragment_sync_delay", "fragment_update_alpha"),
    *("should_quantize", "quantized_dtype", "outer_lr", "outer_momentum"),
)
EARLY_STEP, COMPRESSION = "optimizer.early_step_in_backward", "parallelism.gradient_compression"


ASYNC_KEYS = ("async_staleness", "async_lr_power", "async_late", "async_late_seconds")
SERVED_OPTIMIZERS = ("AdamW", "Adam", "SGD", "Lion")  # whose update of an element needs no other element


def _in_async(test: Callable[[Config], Any]) -> Test:
    """A test that holds for workers that do not wait for each other alone."""
    return lambda config: config.parallelism.data_parallel_mode == "async" and bool(test(config))


def _in_groups(test: Callable[[Config], Any]) -> Test:
    """A test that holds for replica groups alone."""
    return lambda config: config.fault_tolerance.enable and bool(test(config))


def differs(config: Config, key: str) -> bool:
    return bool(config.value(key) != leaves()[key].default)


# ---- kinds of rows ---------------------------------------------------------------------------------------------------


def _refuse(key: str, when: Test, words: Words, remedy: str = "") -> Rule:
    return Rule("refused", (key,), when, words, remedy)


def _not_built(feature: Words, *keys: str, when: Test = lambda config: True) -> Rule:
    return Rule("pending", keys, when, feature)


def _missing(package: str, key: str, when: Test, instead: str, of: Callable[[Config], Any] | None = None) -> Rule:
    """A key that needs a package where the test holds: `train` refuses it if that is not installed.

    `of` is what needs it, where that is not the value.
    """

    def is_missing(config: Config) -> bool:
        return importlib.util.find_spec(package) is None and when(config)

    def words(config: Config) -> str:
        return f"{show(of(config) if of else config.value(key))} needs the package {package}, which is not installed"

    return Rule("missing", (key,), is_missing, words, instead)


def _missing_reader(package: str, extra: str, needs: Callable[[str], bool]) -> list[Rule]:
    """Data whose paths need a package."""

    def paths(config: Config, key: str) -> list[str]:
        return [path for path in data_paths(config, key) if needs(path)]

    return [
        _missing(
            package,
            key,
            lambda config, key=key: bool(paths(config, key)),  # type: ignore[misc]
            f"pip install 'shardline[{extra}]'",
            lambda config, key=key: paths(config, key)[0],  # type: ignore[misc]
        )
        for key in ("training.dataset_path", "validation.dataset_path", *SOURCE_LISTS)
    ]


def _idle(reason: str, when: Test, *keys: str) -> Rule:
    """Keys that have no effect where the test holds."""
    return Rule("idle", keys, when, f"has no effect: {reason}")


def _idle_if(key: str, values: Sequence[Any], *keys: str) -> Rule:
    """Keys that have no effect while another key has one of these values."""
    reason = f"{key} is {' or '.join(map(show, values))}"
    return _idle(reason, lambda config: config.value(key) in values, *keys)


def _idle_unless(key: str, values: Sequence[Any], *keys: str) -> Rule:
    """Keys that have an effect only while another key has one of these values."""
    names = " nor ".join(map(show, values))
    reason = f"{key} is {f'not {names}' if len(values) == 1 else f'neither {names}'}"
    return _idle(reason, lambda config: config.value(key) not in values, *keys)


def _idle_without(switch: str, *keys: str) -> Rule:
    """Keys that have no effect while a switch has its default: off, a degree of 1, no workers."""
    return _idle_if(switch, [leaves()[switch].default], *keys)


def _below(section: str, names: str) -> tuple[str, ...]:
    """The keys of a section with these names, separated by spaces."""
    return tuple(f"{section}.{name}" for name in names.split())


def _instead(key: str, other: str) -> Rule:
    """Two keys that say the same thing in different ways: only one may be given."""
    return _refuse(
        key,
        lambda config: config.value(key) is not None and config.is_set(other),
        lambda config: f"given together with {other} = {config.value(other)}",
        remedy="give one of them",
    )


# ---- names -----------------------------------------------------------------------------------------------------------


def _known(key: str, names: Callable[[], Sequence[str]]) -> Rule:
    """The value, or every item of a list, must be a known name."""

    def unknown(config: Config) -> list[str]:
        value = config.value(key)
        given = [value] if isinstance(value, str) else value
        return [name for name in given if name not in names()]

    def words(config: Config) -> str:
        name, kind = unknown(config)[0], "one" if isinstance(config.value(key), str) else "some"
        return f"expected {kind} of {', '.join(names())}, got {name!r}{registry.nearest(name, names())}"

    return _refuse(key, lambda config: bool(unknown(config)), words)


def _unknown_schedule(config: Config) -> bool:
    """A schedule from a file takes precedence over the name."""
    section = config.parallelism
    return not section.pipeline_parallel_schedule_csv and find_schedule(section.pipeline_parallel_schedule) is None


def _flavors_not_built(config: Config) -> list[str]:
    """Flavors of the named model that are not built, unless a custom module registered the model."""
    name = config.model.name
    return [] if name in registry.flavors else [flavor for model, flavor in NOT_BUILT if model == name]


def _flavor_words(config: Config) -> str:
    known, flavor = _flavors_not_built(config), config.model.flavor
    return f"{config.model.name} has no flavor {flavor!r}{registry.nearest(flavor, known)} ({', '.join(known)})"


def _model_feature(config: Config) -> str:
    return NOT_BUILT.get((config.model.name, config.model.flavor), "mixture of experts")


# ---- ranks: a degree of -1 may come to any number --------------------------------------------------------------------


def _one_rank(config: Config) -> bool:
    return all(getattr(config.parallelism, key) == 1 for key in (*KEYS.values(), "expert_parallel_degree"))


def has_replicas(config: Config) -> bool:
    """Whether copies of the model sum their gradients."""
    return config.parallelism.data_parallel_replicate_degree != 1 and not has_workers(config)


def has_workers(config: Config) -> bool:
    """Whether the copies of the model are workers that train apart."""
    return config.parallelism.data_parallel_mode != "sync"


def _averages_now_and_then(config: Config) -> bool:
    return config.parallelism.data_parallel_mode == "diloco"


def _worker_rules() -> list[Rule]:
    mode, section = "parallelism.data_parallel_mode", "fault_tolerance"
    return [
        _refuse(
            mode,
            lambda c: _averages_now_and_then(c) and c.parallelism.data_parallel_replicate_degree == 1,
            "workers are copies of the model, and there is one",
            "set parallelism.data_parallel_replicate_degree to the number of workers",
        ),
        _refuse(
            mode,
            lambda c: has_workers(c) and c.optimizer.early_step_in_backward,
            "a worker's gradient norm is known only after its backward",
            "set optimizer.early_step_in_backward = false",
        ),
        _refuse(
            f"{section}.num_fragments",
            lambda c: _averages_now_and_then(c) and c.fault_tolerance.sync_steps % c.fault_tolerance.num_fragments != 0,
            lambda c: f"fault_tolerance.sync_steps = {c.fault_tolerance.sync_steps} is no multiple of it",
            "fragments follow each other at even distances: change one of the two",
        ),
        _refuse(
            f"{section}.fragment_sync_delay",
            lambda c: (
                _averages_now_and_then(c)
                and c.fault_tolerance.sync_steps % c.fault_tolerance.num_fragments == 0
                and c.fault_tolerance.fragment_sync_delay
                >= c.fault_tolerance.sync_steps // c.fault_tolerance.num_fragments
            ),
            lambda c: (
                "the next fragment is sent"
                f" {c.fault_tolerance.sync_steps // c.fault_tolerance.num_fragments} steps later (sync_steps /"
                " num_fragments)"
            ),
            "give fewer steps of delay",
        ),
    ]


def _idle_worker_rules() -> list[Rule]:
    section = "fault_tolerance"
    return [
        _idle(
            "neither fault_tolerance.enable is true nor parallelism.data_parallel_mode 'diloco'",
            lambda c: not _averages_now_and_then(c) and not c.fault_tolerance.enable,
            *(f"{section}.{name}" for name in OUTER_KEYS),
        ),
        _idle(
            "parallelism.data_parallel_mode is not 'async'",
            lambda c: c.parallelism.data_parallel_mode != "async",
            *(f"{section}.{name}" for name in ASYNC_KEYS),
        ),
        _idle_if(f"{section}.async_late", ["wait"], f"{section}.async_late_seconds"),
        _idle_unless(f"{section}.should_quantize", [True], f"{section}.quantized_dtype"),
        _idle_if(f"{section}.semi_sync_method", ["local_sgd"], *_below(section, "outer_lr outer_momentum")),
    ]


def _shards(config: Config) -> bool:
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


# ---- the learning rate -----------------------------------------------------------------------------------------------


def lr_notes(section: LRScheduler, total: int) -> dict[str, str]:
    """The parts of a schedule of `total` steps that do not fit: key -> sentence."""
    found, warmup = {}, section.warmup(total)
    rises = "the learning rate rises to the last step"
    if section.warmup_ratio is None and section.warmup_steps > total:
        given = section.warmup_steps
        found["lr_scheduler.warmup_steps"] = f"= {given} is longer than the schedule: cut to {total}, {rises}"
    elif warmup == total > 1:
        key = "warmup_steps" if section.warmup_ratio is None else "warmup_ratio"
        found[f"lr_scheduler.{key}"] = f"= {getattr(section, key):g} lasts for the whole schedule: {rises}"
    decay = section.decay(total, rest=0)
    if decay > total - warmup:
        share = "" if section.decay_steps is not None else f"{section.decay_ratio} is "
        found[f"lr_scheduler.{'decay_ratio' if share else 'decay_steps'}"] = (
            f"= {share}{decay} of {total} steps, which do not fit after {warmup} of warmup:"
            f" the decay takes {total - warmup}"
        )
    return found


def _lr_notes(config: Config) -> dict[str, str]:
    """What is known before the data is: with `training.epochs`, the data decides the length."""
    total = config.lr_scheduler.total_steps or (config.training.steps if config.training.epochs is None else None)
    return lr_notes(config.lr_scheduler, total) if total is not None else {}


def _lr_rule(key: str) -> Rule:
    return Rule("note", (key,), lambda config: key in _lr_notes(config), lambda config: _lr_notes(config)[key])


def _tokens_asked(config: Config, key: str) -> int:
    """The tokens of one step, or of one pass over validation data, that a key asks for; others count as 1."""
    section = config.value(key.partition(".")[0])
    if not key.endswith("seq_len") and section.seq_len > MOST_TOKENS:
        return 0  # the length is reported alone
    number = 1 if key.endswith("seq_len") else config.value(key) or 0
    passes = section.local_batch_size if key.endswith("accumulation_steps") else 1
    return int(section.seq_len * number * passes)


def _too_many_tokens(key: str) -> Rule:
    """Numbers with which a step would never end, or its list of samples would take all memory."""
    return _refuse(
        key,
        lambda c: _tokens_asked(c, key) > MOST_TOKENS,
        lambda c: (
            f"{c.value(key):,} asks for {_tokens_asked(c, key):,} tokens at once; at most {MOST_TOKENS:,} are allowed"
        ),
        remedy="lower it",
    )


def _schedule_too_short(config: Config) -> bool:
    length, section = config.lr_scheduler.total_steps, config.training
    ends = config.lr_scheduler.decay_type != "inverse_sqrt"
    return length is not None and section.epochs is None and length < section.steps and ends


def _too_short_words(config: Config) -> str:
    section, length = config.lr_scheduler, config.lr_scheduler.total_steps or 0
    has_decay = section.decay(length, rest=1) > 0
    decays = section.warmup(length) < length and has_decay and section.decay_type != "constant"
    return (
        f"= {length} is shorter than training.steps = {config.training.steps}: from step {length + 1} on the learning"
        f" rate stays at {section.min_lr_factor if decays else 1:g} of its peak"
    )


# ---- data and model --------------------------------------------------------------------------------------------------


def _source_rules(part: str) -> list[Rule]:
    """Keys of [training] or [validation] that not every kind of data reads."""

    def when(test: Callable[[Any], bool]) -> Test:
        return lambda config: test(config.value(part))

    split, field = f"{part}.dataset_split", f"{part}.dataset_text_field"
    return [
        _idle(f"{part}.dataset is 'demo'", when(is_demo), field, split),
        _idle(f"{part}.dataset_path is a prepared store", when(is_store), field, split),
        _idle(f"{part}.dataset is a registered source, which gives whole texts", when(is_registered), field, split),
        _idle("every named file is read", when(names_files), split),
        _idle("plain text has no fields", when(names_texts), field),
        _idle_without(
            f"{part}.dataloader.num_workers",
            *_below(f"{part}.dataloader", "persistent_workers prefetch_factor"),
        ),
    ]


def _validates_records(config: Config) -> bool:
    return config.data.held_out > 0 or bool(config.data.validation_sources)


def _data_rules() -> list[Rule]:
    """`data.sources` takes the place of `training.dataset`, and the keys beside it need it."""
    read_once = "validation_sources held_out mixture packing excess_length min_length shuffle default_system_message"
    of_formats = "chat_template chat_template_jinja train_on_inputs eot_tokens temperature"
    return [
        _refuse(
            "data.sources",
            lambda c: bool(c.data.sources) and names_text(c.training),
            "the records of data.sources take the place of training.dataset and training.dataset_path",
            remedy="remove those, or make them a table of data.sources",
        ),
        _refuse(
            "data.held_out",
            lambda c: c.data.held_out >= 1 and c.data.held_out != int(c.data.held_out),
            lambda c: f"expected a fraction below 1 or a whole number of records, got {c.data.held_out:g}",
        ),
        _refuse(
            "data.held_out",
            lambda c: c.data.held_out > 0 and bool(c.data.validation_sources),
            "data.validation_sources already names the records to validate on",
            remedy="remove one of the two",
        ),
        Rule(
            "note",
            ("data.held_out",),
            lambda c: c.data.held_out > 0 and bool(c.data.sources) and not c.validation.enable,
            "keeps records out of training, and validation.enable is false: they are not used",
        ),
        _refuse(
            "data.sources",
            lambda c: bool(c.data.sources) and c.validation.enable and not _validates_records(c),
            "no record is named for validation, and validation.dataset is other data",
            remedy="set data.held_out or data.validation_sources, or validation.enable = false",
        ),
        _refuse(
            "data.shuffle",
            lambda c: not c.data.shuffle and c.data.mixture == "weights",
            "with data.mixture = 'weights' samples are drawn",
            remedy="set data.shuffle = true, or data.mixture = 'concatenate'",
        ),
        _idle("data.sources is empty", lambda c: not c.data.sources, *_below("data", f"{read_once} {of_formats}")),
        _idle_unless("data.mixture", ["weights"], "data.temperature"),
        _idle("data.sources names the records", lambda c: bool(c.data.sources), *_below("training", TEXT_KEYS)),
        _idle("data.sources names the records", _validates_records, *_below("validation", f"dataset {TEXT_KEYS}")),
    ]


TEXT_KEYS = "dataset_text_field dataset_split"


def _trains_on_pairs(config: Config) -> bool:
    return config.training.objective == "dpo"


def _dpo_rules() -> list[Rule]:
    """Training on pairs of answers: what it needs, and what it does not read."""
    return [
        _refuse(
            "training.objective",
            lambda c: _trains_on_pairs(c) and not c.data.sources,
            "'dpo' compares the two answers of a pair, and text has none",
            remedy="name records with pairs in data.sources, such as type = 'chat_template.default'",
        ),
        _refuse(
            "dpo.reference",
            lambda c: _trains_on_pairs(c) and c.dpo.reference == "base" and not c.lora.enable,
            "only LoRA has frozen weights beside those that are trained",
            remedy="set it to 'copy', or lora.enable = true",
        ),
        _refuse(
            "dpo.reference",
            lambda c: _trains_on_pairs(c) and c.dpo.reference == "base" and bool(c.lora.modules_to_save),
            lambda c: f"lora.modules_to_save = {c.lora.modules_to_save} are trained whole, and change",
            remedy="set it to 'copy', or leave lora.modules_to_save empty",
        ),
        _refuse(
            "dpo.reference",
            lambda c: _trains_on_pairs(c) and c.dpo.reference == "base" and c.lora.bias != "none",
            lambda c: f"lora.bias = {c.lora.bias!r} trains weights of the model, which change",
            remedy="set it to 'copy', or lora.bias = 'none'",
        ),
        _refuse(
            "dpo.label_smoothing",
            lambda c: _trains_on_pairs(c) and c.dpo.loss == "robust" and c.dpo.label_smoothing >= 0.5,
            lambda c: f"'robust' divides by 1 - 2 x label_smoothing, which is {1 - 2 * c.dpo.label_smoothing:g}",
            remedy="set it below 0.5",
        ),
        _idle_unless("training.objective", ["dpo"], "dpo."),
        _idle_unless("dpo.loss", ["sigmoid", "robust"], "dpo.label_smoothing"),
        _idle("every answer of a pair has a row of its own", _trains_on_pairs, "data.packing"),
        _idle("of a pair the answers are trained", _trains_on_pairs, "data.train_on_inputs"),
    ]


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


def _uses_assets(config: Config) -> bool:
    loads = config.checkpoint.initial_load_in_hf and config.checkpoint.initial_load_path is None
    return config.model.tokenizer_path is None or config.model.name == "auto" or loads


def _override_rules() -> list[Rule]:
    """Architecture fields that are overridden although the model does not read them."""

    def window_is_idle(field: str) -> Test:
        return lambda config: config.model.overrides.get(field) is not None and not has_window(config)

    def scale_is_idle(config: Config) -> bool:
        overrides = config.model.overrides
        idle = overrides.get("rope_layers") is None and config.model.name != "auto"
        return bool(overrides.get("query_scale")) and idle and not config.model.flavor.endswith("_irope")

    def norm_is_idle(config: Config) -> bool:
        overrides = config.model.overrides
        without = config.model.name in ("llama3", "llama4", "mixtral", "gpt_oss", "gemma2", "phi3", "phi4")
        return "qk_norm_over" in overrides and not overrides.get("qk_norm") and without

    def scaling_is_idle(field: str) -> Test:
        default = RopeScaling.model_fields[field].default

        def test(config: Config) -> bool:
            given, kind = config.model.overrides.get("rope_scaling"), scaling_type(config)
            given_field = isinstance(given, Mapping) and given.get(field, default) != default
            return given_field and kind in SCALING_FIELDS and field not in SCALING_FIELDS[kind]

        return test

    def words(config: Config) -> str:
        return f"has no effect: rope_scaling.type is {scaling_type(config)!r}"

    scaling, scale, norm = _below("model.overrides", "rope_scaling query_scale qk_norm_over")
    of_window, no_window = (
        ("sliding_window_layers", "window_kind", "window_rope_theta"),
        "has no effect: the model has no sliding_window",
    )
    fields = dict.fromkeys(field for fields in SCALING_FIELDS.values() for field in fields)
    return [
        *(Rule("note", (f"model.overrides.{field}",), window_is_idle(field), no_window) for field in of_window),
        Rule("note", (norm,), norm_is_idle, "has no effect: the model has no norm of queries and keys (qk_norm)"),
        Rule("note", (scale,), scale_is_idle, "has no effect: every layer has rotary positions (rope_layers)"),
        *(Rule("note", (f"{scaling}.{field}",), scaling_is_idle(field), words) for field in fields),
    ]


# ---- other tests -----------------------------------------------------------------------------------------------------


def _steps_early(config: Config) -> bool:
    return config.optimizer.early_step_in_backward


def _compiles_model(config: Config) -> bool:
    return config.compile.enable and "model" in config.compile.components


# What a CUDA graph of a pass would leave out.
NOT_RECORDED: dict[str, Test] = {
    "a step in backward": _steps_early,
    "training.enable_cpu_offload": lambda c: c.training.enable_cpu_offload,
    'activation_checkpoint.mode = "offload"': lambda c: c.activation_checkpoint.mode == "offload",
    "the objective of pairs": lambda c: c.training.objective == "dpo",
    "training.neftune_alpha": lambda c: c.training.neftune_alpha is not None,
    "lora.dropout": lambda c: c.lora.enable and c.lora.dropout > 0,
}


def _recorded_and(holds: Test) -> Test:
    return lambda config: config.compile.enable and config.compile.cuda_graphs and holds(config)


def _splits_by_weights(config: Config) -> bool:
    by_count = config.parallelism.pipeline_parallel_layers_per_stage is not None
    return not by_count and not any(differs(config, key) for key in LESS_LAYERS)


def _recomputes(config: Config) -> bool:
    return config.activation_checkpoint.mode in ("full", "selective")


def _gathers_float8(config: Config) -> bool:
    return FLOAT8_LINEAR in config.model.converters and config.quantize.linear.float8.enable_fsdp_float8_all_gather


def _splits_experts(config: Config) -> bool:
    return config.parallelism.expert_parallel_degree > 1


def _asks_for_overlap(config: Config) -> bool:
    """Whether the schedule is one in which other trainers overlap a micro-batch's experts with another's."""
    section = config.parallelism
    overlaps = find_schedule(section.pipeline_parallel_schedule) == "DualPipeV" and is_pipelined(config)
    return overlaps and _splits_experts(config) and section.pipeline_parallel_expert_parallel_overlap


def _sends_by_deepep(config: Config) -> bool:
    return _splits_experts(config) and config.parallelism.expert_parallel_comm_backend == "deepep"


BALANCERS = ("headtail", "ptrr")  # of which the second one is not built yet
MOST_TOKENS = 2**34  # of one step: a hundred times the largest batches that models were trained with
BATCH_KEYS = (
    *_below("training", "seq_len local_batch_size global_batch_size gradient_accumulation_steps"),
    *_below("validation", "seq_len local_batch_size"),
)
EXPERTS_WAIT = "tokens travel to their experts and back inside their own micro-batch"
# A 1 that was given is a request too: TorchTitan counts layers with it.
LESS_LAYERS = _below(
    "parallelism", "pipeline_parallel_first_stage_less_layers pipeline_parallel_last_stage_less_layers"
)
EXPERT_DEGREE = "parallelism.expert_parallel_degree"
EXPERT_BACKEND = "parallelism.expert_parallel_comm_backend"
EXPERT_KEYS = (
    "parallelism.expert_tensor_parallel_degree",
    EXPERT_BACKEND,
    "parallelism.expert_parallel_dispatch_dtype",
    "parallelism.pipeline_parallel_expert_parallel_overlap",
)

RULES: list[Rule] = [
    # Refused: values and combinations that cannot work.
    _known("optimizer.name", lambda: [*MOMENTS, *registry.optimizers]),
    _known("model.converters", lambda: CONVERTERS),
    _refuse(
        "model.flavor",
        lambda c: bool(_flavors_not_built(c)) and c.model.flavor not in _flavors_not_built(c),
        _flavor_words,
    ),
    _refuse(
        "parallelism.pipeline_parallel_schedule",
        _unknown_schedule,
        lambda c: unknown_schedule(c.parallelism.pipeline_parallel_schedule),
    ),
    _known("checkpoint.exclude_from_loading", lambda: LOADABLE),
    *(_too_many_tokens(key) for key in BATCH_KEYS),
    _refuse(
        "model.implementation",
        lambda c: c.model.implementation == "transformers" and c.model.name != "auto",
        lambda c: f"transformers builds models from a config.json, and {c.model.name!r} is a family of ours",
        remedy='set model.name = "auto" and model.hf_assets_path to a folder with a config.json',
    ),
    *(_instead(alternative, key) for key, alternative in ALTERNATIVES.items()),
    _refuse(
        "profiling.profile_freq",
        lambda c: (
            c.profiling.enable_profiling
            and c.profiling.profile_freq < c.profiling.profiler_active + c.profiling.profiler_warmup
        ),
        lambda c: (
            f"{c.profiling.profile_freq} steps are fewer than profiler_warmup ({c.profiling.profiler_warmup})"
            f" and profiler_active ({c.profiling.profiler_active}) together"
        ),
        remedy="raise it, or lower those",
    ),
    _refuse(
        "checkpoint.initial_load_in_hf",
        lambda c: c.checkpoint.initial_load_in_hf and not c.checkpoint.initial_load_model_only,
        "a Hugging Face folder holds weights only",
        remedy="set checkpoint.initial_load_model_only = true",
    ),
    _refuse(
        "checkpoint.create_seed_checkpoint",
        lambda c: c.checkpoint.create_seed_checkpoint and (not c.checkpoint.enable or c.checkpoint.load_only),
        "a run that saves nothing cannot save its initial weights",
        remedy="set checkpoint.enable = true and checkpoint.load_only = false",
    ),
    *(
        _refuse(
            key,
            lambda c, key=key: not c.checkpoint.enable and differs(c, key),  # type: ignore[misc]
            "weights are loaded only with checkpoint.enable = true",
            remedy="set that, or remove this key",
        )
        for key in _below("checkpoint", "initial_load_path initial_load_in_hf")
    ),
    _refuse(
        "activation_checkpoint.mode",
        lambda c: c.activation_checkpoint.mode == "memory_budget" and not _compiles_model(c),
        "memory_budget is a setting of the compiler",
        remedy="set compile.enable = true with 'model' in compile.components, or choose 'selective'",
    ),
    *(
        _refuse(
            "compile.cuda_graphs",
            _recorded_and(holds),
            f"{what} needs the host in each pass, and a recorded pass runs without it",
            remedy="set compile.cuda_graphs = false",
        )
        for what, holds in NOT_RECORDED.items()
    ),
    _refuse(
        "validation.dataset",
        lambda c: c.validation.enable and is_demo(c.validation) and names_text(c.training),
        "'demo' is generated text, and the training data is not",
        remedy="set validation.dataset_path, or validation.enable = false",
    ),
    _refuse(
        "optimizer.early_step_in_backward",
        lambda c: _steps_early(c) and c.training.max_norm > 0 and c.optimizer.early_step_clipping == "refuse",
        "clipping needs the norm of all gradients before the first step",
        remedy='set optimizer.early_step_clipping = "two_pass" (forward and backward twice) or training.max_norm = 0',
    ),
    _refuse(
        "training.nonfinite",
        lambda c: _steps_early(c) and c.training.nonfinite == "skip" and c.training.max_norm == 0,
        "a step in backward cannot be undone",
        remedy='set training.nonfinite = "stop", or clip with optimizer.early_step_clipping = "two_pass"',
    ),
    _refuse(
        "training.mixed_precision_param",
        lambda c: c.training.mixed_precision_param == "float16" and _steps_early(c),
        "with float16 a step may have to be skipped, and a step in backward cannot be undone",
        remedy="set optimizer.early_step_in_backward = false, or compute in bfloat16",
    ),
    _refuse(
        "training.mixed_precision_param",
        lambda c: c.training.mixed_precision_param == "float16" and c.training.dtype != "float32",
        lambda c: f"float16 needs weights in float32, not in {c.training.dtype}",
        remedy="set training.dtype = 'float32'",
    ),
    _refuse(
        "optimizer.state_dtype",
        lambda c: c.optimizer.state_dtype != "parameter" and c.optimizer.name not in ("AdamW", "Adam"),
        lambda c: f"only AdamW and Adam can keep their moments in {c.optimizer.state_dtype}",
        remedy='set it to "parameter"',
    ),
    _refuse(
        "lr_scheduler.decay_steps",
        lambda c: c.lr_scheduler.decay_steps is not None and c.lr_scheduler.decay_ratio is not None,
        lambda c: f"given together with lr_scheduler.decay_ratio = {c.lr_scheduler.decay_ratio}",
        remedy="give one of them",
    ),
    _refuse(
        "lr_scheduler.momentum_range",
        lambda c: c.lr_scheduler.momentum_range is not None and c.optimizer.name == "Adafactor",
        "Adafactor has no momentum that a schedule could change",
        remedy="leave it unset",
    ),
    _refuse(
        "parallelism.context_parallel_load_balancer",
        lambda c: is_context_parallel(c) and c.parallelism.context_parallel_load_balancer not in (None, *BALANCERS),
        lambda c: f"expected 'headtail' or 'none', got {c.parallelism.context_parallel_load_balancer!r}",
        remedy="'headtail' balances causal masks",
    ),
    _refuse(
        "parallelism.expert_parallel_dispatch_dtype",
        lambda c: _sends_by_deepep(c) and c.parallelism.expert_parallel_dispatch_dtype == "float8",
        f"float8 is not built with {EXPERT_BACKEND} = 'deepep'",
        remedy="set it to 'same', or the backend to 'standard'",
    ),
    _refuse(
        "debug.deterministic",
        lambda c: _sends_by_deepep(c) and c.debug.deterministic,
        "new memory is filled first, which DeepEP's kernels do not wait for before they write to it",
        remedy=f"set {EXPERT_BACKEND} = 'standard'",
    ),
    _refuse(
        f"{FLOAT8_LINEAR}.enable_fsdp_float8_all_gather",
        lambda c: _gathers_float8(c) and c.quantize.linear.float8.recipe_name not in (None, "tensorwise"),
        "weights that were rounded with one factor cannot be given one for each row",
        remedy="set recipe_name = 'tensorwise'",
    ),
    _refuse(
        "lora.base_dtype",
        lambda c: c.lora.enable and c.lora.base_dtype != "same" and FLOAT8_LINEAR in c.model.converters,
        "weights in 4 or 8 bits are not rounded to float8 again",
        remedy=f'set it to "same", or leave {FLOAT8_LINEAR} out of model.converters',
    ),
    _refuse(
        "lora.base_dtype",
        lambda c: c.lora.enable and c.lora.base_dtype != "same" and c.parallelism.enable_async_tensor_parallel,
        "products that overlap their communication would keep the weights that codes stand for until backward",
        remedy='set it to "same", or parallelism.enable_async_tensor_parallel = false',
    ),
    _refuse(
        "training.unfrozen_parameters",
        lambda c: c.lora.enable and bool(c.training.unfrozen_parameters),
        "LoRA freezes every weight that it does not name",
        remedy="name weights that are trained whole in lora.modules_to_save, or set lora.enable = false",
    ),
    _refuse(
        "training.neftune_alpha",
        lambda c: c.training.objective == "dpo" and c.training.neftune_alpha is not None,
        "the reference of a pair would read embeddings without noise",
        remedy="remove the key",
    ),
    _refuse(
        f"{FLOAT8_EXPERTS}.fqns",
        lambda c: FLOAT8_EXPERTS in c.model.converters and not c.quantize.grouped_mm.float8.fqns,
        "no module is named, so nothing would be converted",
        remedy="set it to ['experts']",
    ),
    _refuse(
        "checkpoint.interval_ratio",
        lambda c: c.checkpoint.interval_type == "seconds" and c.checkpoint.interval_ratio is not None,
        "is a fraction of the steps, and checkpoint.interval_type is 'seconds'",
        "give checkpoint.interval",
    ),
    *_worker_rules(),
    # Pending: features that are not built yet.
    *(
        _not_built(f"asynchronous data parallel with {what}", key, when=_in_async(test))
        for what, key, test in (
            ("saves in the background", "checkpoint.async_mode", lambda c: c.checkpoint.async_mode != "disabled"),
            ("this optimizer", "optimizer.name", lambda c: c.optimizer.name not in SERVED_OPTIMIZERS),
            ("narrow state", "optimizer.state_dtype", lambda c: c.optimizer.state_dtype != "parameter"),
            ("pairs of answers", "training.objective", lambda c: c.training.objective == "dpo"),
            ("CUDA graphs", "compile.cuda_graphs", lambda c: c.compile.enable and c.compile.cuda_graphs),
            ("weights on the host", "training.enable_cpu_offload", lambda c: c.training.enable_cpu_offload),
        )
    ),
    _not_built(_model_feature, "model.name", when=lambda c: bool(_flavors_not_built(c))),
    _not_built("MX formats", "model.converters", when=lambda c: bool(set(MX_CONVERTERS) & set(c.model.converters))),
    _not_built("quantized weights", "checkpoint.initial_load_in_hf_quantized"),
    _not_built("simulated communication", "comm.mode"),
    _not_built(
        "load balancing by ptrr",
        "parallelism.context_parallel_load_balancer",
        when=lambda c: is_context_parallel(c) and c.parallelism.context_parallel_load_balancer == "ptrr",
    ),
    _not_built("memory estimation", "memory_estimation.enable"),
    _not_built(
        "replica groups of workers that train apart",
        "parallelism.data_parallel_mode",
        when=lambda c: c.fault_tolerance.enable and has_workers(c),
    ),
    _not_built(
        "semi-synchronous training of replica groups",
        "fault_tolerance.semi_sync_method",
        when=lambda c: c.fault_tolerance.enable and c.fault_tolerance.semi_sync_method is not None,
    ),
    _not_built(
        "replica groups connected by anything but gloo",
        "fault_tolerance.process_group",
        when=lambda c: c.fault_tolerance.enable and c.fault_tolerance.process_group != "gloo",
    ),
    *(
        _not_built(f"replica groups with {what}", key, when=_in_groups(test))
        for what, key, test in (
            ("pairs of answers", "training.objective", lambda c: c.training.objective == "dpo"),
            ("updates in backward", EARLY_STEP, lambda c: c.value(EARLY_STEP)),
            ("CUDA graphs", "compile.cuda_graphs", lambda c: c.compile.enable and c.compile.cuda_graphs),
            ("compressed gradients", COMPRESSION, lambda c: c.value(COMPRESSION) != "none"),
        )
    ),
    _not_built("custom config keys", "job.custom_config_module", "experimental.custom_args_module"),
    # Missing: packages that are not installed, and data that nobody named.
    _missing(
        "torchft",
        "fault_tolerance.enable",
        lambda c: c.fault_tolerance.enable,
        "pip install 'shardline[ft]'",
        lambda c: True,
    ),
    _missing("deep_ep", EXPERT_BACKEND, _sends_by_deepep, instead="'standard' sends tokens without it"),
    *(
        _missing(
            package,
            f"metrics.enable_{package}",
            lambda c, package=package: bool(c.value(f"metrics.enable_{package}")),  # type: ignore[misc]
            f"pip install 'shardline[{package}]'",
        )
        for package in ("wandb", "tensorboard")
    ),
    *_missing_reader("pyarrow", "parquet", holds_parquet),
    *_missing_reader("datasets", "datasets", is_saved_dataset),
    Rule(
        "missing",
        ("training.dataset",),
        lambda c: c.training.dataset is None and not c.training.dataset_path and not c.data.sources,
        "no data is named, and generated text is only for demos and models of up to"
        f" {LARGEST_ON_DEMO // 10**6}M parameters, unless it is asked for; add two lines:\n  [training]\n"
        '  dataset_path = "data/*.jsonl"\n'
        '(text, JSONL, Parquet, a prepared store or a dataset; dataset = "demo" asks for generated text)',
    ),
    # Idle: keys that are given and have no effect. Of several reasons the first is reported.
    _idle_without(EXPERT_DEGREE, *EXPERT_KEYS),
    _idle(
        "comm.trace_buf_size = 0: there is no flight recorder",
        lambda c: c.comm.trace_buf_size == 0,
        *_below("comm", "save_traces_folder save_traces_file_prefix"),
    ),
    _idle(EXPERTS_WAIT, _splits_experts, "parallelism.pipeline_parallel_expert_parallel_overlap"),
    _idle_without(
        "parallelism.pipeline_parallel_degree",
        "parallelism.module_fqns_per_model_part",
        *LESS_LAYERS,
        *_below("parallelism", "pipeline_parallel_layers_per_stage pipeline_parallel_schedule"),
        *_below("parallelism", "pipeline_parallel_schedule_csv pipeline_parallel_microbatch_size"),
    ),
    _idle(
        "parallelism.module_fqns_per_model_part names the modules of each stage",
        lambda c: c.parallelism.module_fqns_per_model_part is not None,
        *LESS_LAYERS,
        "parallelism.pipeline_parallel_layers_per_stage",
    ),
    _idle("1 for both ends of the pipeline splits stages by weights", _splits_by_weights, *LESS_LAYERS),
    _idle(
        "parallelism.pipeline_parallel_schedule_csv gives the schedule",
        lambda c: bool(c.parallelism.pipeline_parallel_schedule_csv),
        "parallelism.pipeline_parallel_schedule",
    ),
    _idle_without("checkpoint.enable", "checkpoint."),
    _idle_if(
        "checkpoint.load_only",
        [True],
        *_below("checkpoint", "interval interval_ratio interval_type keep_latest_k async_mode"),
        *_below("checkpoint", "save_timeout_seconds save_before"),
        *_below(
            "checkpoint",
            "last_save_model_only last_save_in_hf enable_first_step_checkpoint preempted_exit_code save_before",
        ),
    ),
    _idle(
        "checkpoint.last_save_model_only and checkpoint.last_save_in_hf are false",
        lambda c: not c.checkpoint.last_save_model_only and not c.checkpoint.last_save_in_hf,
        "checkpoint.export_dtype",
    ),
    _idle(
        "checkpoint.initial_load_path is not given",
        lambda c: c.checkpoint.initial_load_path is None,
        "checkpoint.initial_load_model_only",
    ),
    *_idle_worker_rules(),
    *(_idle_without(f"{part}.enable", f"{part}.") for part in ("validation", "compile")),
    _idle_without(
        "fault_tolerance.enable",
        *_below("fault_tolerance", "process_group process_group_timeout_ms replica_id group_size min_replica_size"),
    ),
    _idle_without("memory_estimation.enable", "memory_estimation."),
    _idle("generation.prompts is empty", lambda c: not c.generation.prompts, "generation."),
    _idle(
        "generation.temperature is 0", lambda c: c.generation.temperature == 0, "generation.top_k", "generation.seed"
    ),
    _idle_without("lora.enable", "lora."),
    _idle_unless("lora.base_dtype", ["nf4"], "lora.double_quantization"),
    _idle(
        "lora.adapter_path says what is trained",
        lambda c: c.lora.adapter_path is not None,
        *_below("lora", "rank alpha rank_pattern alpha_pattern bias use_rslora use_dora"),
        *_below("lora", "target_modules modules_to_save layers"),
    ),
    _idle_without("fault_tolerance.enable", "checkpoint.enable_ft_dataloader_checkpoints"),
    *(
        _idle(f"model.converters has no {name!r}", lambda c, name=name: name not in c.model.converters, f"{name}.")  # type: ignore[misc]
        for name in CONVERTERS
    ),
    _idle_without(
        f"{FLOAT8_LINEAR}.enable_fsdp_float8_all_gather", f"{FLOAT8_LINEAR}.precompute_float8_dynamic_scale_for_fsdp"
    ),
    _idle(
        "nothing is sharded over data-parallel ranks",
        lambda c: not _shards(c) and not is_context_parallel(c),
        *_below(FLOAT8_LINEAR, "enable_fsdp_float8_all_gather precompute_float8_dynamic_scale_for_fsdp"),
    ),
    _idle_without(
        "profiling.enable_profiling",
        *_below("profiling", "save_traces_folder profiler_active profiler_warmup"),
        *_below("profiling", "record_shapes with_stack top_ops"),
    ),
    _idle(
        "neither profiling.enable_profiling nor profiling.enable_memory_snapshot is true",
        lambda c: not c.profiling.enable_profiling and not c.profiling.enable_memory_snapshot,
        "profiling.profile_freq",
    ),
    _idle_without("profiling.enable_memory_snapshot", "profiling.save_memory_snapshot_folder"),
    _idle_without("metrics.enable_tensorboard", "metrics.save_tb_folder"),
    _idle(
        "the layout has one rank",
        _one_rank,
        *("comm.init_timeout_seconds", "comm.train_timeout_seconds", "metrics.save_for_all_ranks"),
    ),
    _idle(
        "neither metrics.enable_tensorboard nor metrics.enable_wandb is true",
        lambda c: not c.metrics.enable_tensorboard and not c.metrics.enable_wandb,
        "metrics.save_for_all_ranks",
    ),
    _idle_if("model.name", ["auto"], "model.flavor"),
    _idle("model.name is not 'transformers_modeling_backend'", lambda c: True, "hf_transformers.model"),
    _idle("a flavor is always native", lambda c: c.model.name != "auto", "model.implementation"),
    _idle(
        "model.tokenizer_path is given, and no weights are read from there",
        lambda c: not _uses_assets(c),
        "model.hf_assets_path",
    ),
    *_data_rules(),
    *_dpo_rules(),
    *_source_rules("training"),
    *_source_rules("validation"),
    _idle("no raw data is prepared", lambda c: not _prepares(c), "training.cache_folder"),
    _idle("no prepared data is read", lambda c: not _reads_files(c), "training.verify_data"),
    _idle("training.gc_debug collects every step", lambda c: c.training.gc_debug, "training.gc_freq"),
    _idle("compile.components is empty", lambda c: not c.compile.components, "compile.enable"),
    _idle(
        "the compiler decides what is recomputed",
        lambda c: _recomputes(c) and _compiles_model(c),
        *_below("activation_checkpoint", "early_stop determinism_check debug"),
    ),
    _idle_unless(
        "activation_checkpoint.mode",
        ["full", "selective"],
        *_below("activation_checkpoint", "early_stop preserve_rng_state determinism_check debug"),
    ),
    _idle_unless("activation_checkpoint.mode", ["selective"], "activation_checkpoint.selective_ac_option"),
    _idle_unless("activation_checkpoint.mode", ["offload"], "activation_checkpoint.offload_every"),
    _idle(
        "only mode 'selective' with selective_ac_option 'op' reads it",
        lambda c: c.activation_checkpoint.mode != "selective" or c.activation_checkpoint.selective_ac_option != "op",
        "activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns",
    ),
    _idle_unless(
        "activation_checkpoint.mode",
        ["memory_budget"],
        *_below("activation_checkpoint", "memory_budget visualize_memory_budget_pareto"),
    ),
    _idle_if("optimizer.name", LAYERWISE, *_below("optimizer", "implementation decay_norms")),
    _idle_if("optimizer.name", ["SGD", "Lion", "Adafactor"], "optimizer.implementation"),
    _idle_if("optimizer.name", ["LARS", "SGD", "Adafactor"], *_below("optimizer", "beta2 eps")),
    _idle_if("optimizer.name", ["Adafactor"], *_below("optimizer", "beta1")),
    _idle_unless("optimizer.name", ["Adafactor"], *(key for key in leaves() if key.startswith("optimizer.adafactor_"))),
    _idle_without("optimizer.adafactor_relative_step", "optimizer.adafactor_warmup_init"),
    _idle(
        "optimizer.adafactor_relative_step gives the learning rate",
        lambda c: c.optimizer.name == "Adafactor" and c.optimizer.adafactor_relative_step,
        *_below("optimizer", "lr lr_scaling lr_scaling_base_batch"),
        *(key for key in leaves() if key.startswith("lr_scheduler.")),
    ),
    _idle_if("optimizer.name", ["Lion"], "optimizer.eps"),
    _idle_if(
        "lr_scheduler.decay_type",
        ["constant"],
        *_below("lr_scheduler", "decay_ratio decay_steps decay_end_ratio min_lr_factor"),
    ),
    _idle_if("lr_scheduler.decay_type", ["constant", "inverse_sqrt"], "lr_scheduler.cycles"),
    _idle_unless("lr_scheduler.decay_type", ["polynomial"], "lr_scheduler.decay_power"),
    _idle_unless("lr_scheduler.decay_type", ["inverse_sqrt"], "lr_scheduler.timescale"),
    _idle(
        "lr_scheduler.momentum_range gives it",
        lambda c: c.lr_scheduler.momentum_range is not None,
        *_below("optimizer", "beta1 muon_momentum"),
    ),
    _idle_without("training.max_loss", "training.max_loss_steps"),
    _idle_without("metrics.enable_wandb", *(key for key in leaves() if key.startswith("metrics.wandb_"))),
    _idle_unless("optimizer.name", ["LARS"], "optimizer.trust_coefficient"),
    _idle_unless(
        "optimizer.name", ["Muon"], *_below("optimizer", "muon_lr_factor muon_momentum muon_ns_steps muon_adjust_lr")
    ),
    _idle_without("optimizer.lr_scaling", "optimizer.lr_scaling_base_batch"),
    _idle(
        "it is for clipping with optimizer.early_step_in_backward",
        lambda c: not _steps_early(c) or c.training.max_norm == 0,
        "optimizer.early_step_clipping",
    ),
    _idle_if("training.dtype", ["bfloat16"], "optimizer.state_dtype"),
    _idle(
        "gradients are not summed over data-parallel ranks",
        lambda c: not has_replicas(c) and not _shards(c),
        "parallelism.accumulation_sync",
    ),
    _idle(
        "only HSDP (both data parallel degrees above 1) has sums between replicas to postpone",
        lambda c: c.parallelism.accumulation_sync == "scatter" and not (has_replicas(c) and _shards(c)),
        "parallelism.accumulation_sync",
    ),
    _idle_without(
        "parallelism.enable_async_tensor_parallel",
        *_below("parallelism", "async_tensor_parallel_backend async_tensor_parallel_compare_freq"),
    ),
    _idle_unless("parallelism.gradient_compression", ["powersgd"], "parallelism.powersgd_rank"),
    _idle_unless("parallelism.gradient_compression", ["topk"], "parallelism.topk_fraction"),
    _idle(
        "there are no replicas that sum gradients",
        lambda c: not has_replicas(c),
        *_below("parallelism", "gradient_compression"),
    ),
    _idle(
        "only plain replicas (DDP) send low-rank matrices; bfloat16, int8 and topk work with shards too",
        lambda c: has_replicas(c) and not _may_be_ddp(c) and c.parallelism.gradient_compression == "powersgd",
        *_below("parallelism", "gradient_compression powersgd_rank"),
    ),
    _idle(
        "only plain replicas (DDP) sum gradients in buckets",
        lambda c: not _may_be_ddp(c),
        *_below("parallelism", "gradient_bucket_mib overlap_gradient_reduction"),
    ),
    _idle(
        "nothing is sharded over data-parallel ranks",
        lambda c: not _shards(c) and not c.training.enable_cpu_offload,
        *_below("parallelism", "fsdp_prefetch fsdp_reshard_after_forward"),
    ),
    _idle_without(
        "parallelism.tensor_parallel_degree",
        *_below("parallelism", "disable_loss_parallel enable_sequence_parallel"),
    ),
    _idle_without(
        "parallelism.context_parallel_degree",
        *_below("parallelism", "context_parallel_load_balancer context_parallel_rotate_method"),
    ),
    _idle(
        "with ulysses every rank has all tokens of its heads, and the same work",
        lambda c: c.parallelism.context_parallel_rotate_method == "ulysses",
        "parallelism.context_parallel_load_balancer",
    ),
    _idle("no two ranks hold the same weights", lambda c: not _has_copies(c), "debug.check_replicas_freq"),
    _idle_without("debug.deterministic", "debug.deterministic_warn_only"),
    # Notes: keys that do not have their full effect, and fields of the architecture that have none.
    *_override_rules(),
    Rule(
        "note",
        ("parallelism.pipeline_parallel_expert_parallel_overlap",),
        _asks_for_overlap,
        f"has no effect: {EXPERTS_WAIT}",
    ),
    _lr_rule("lr_scheduler.warmup_steps"),
    _lr_rule("lr_scheduler.warmup_ratio"),
    Rule("note", ("lr_scheduler.total_steps",), _schedule_too_short, _too_short_words),
    _lr_rule("lr_scheduler.decay_ratio"),
    _lr_rule("lr_scheduler.decay_steps"),
]
