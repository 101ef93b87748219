"""One table of what goes together: refused combinations, keys whose feature is not built, keys without effect."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from shardline import registry
from shardline.config.architecture import SCALING_FIELDS, RopeScaling
from shardline.config.assemble import line
from shardline.config.features import refusals
from shardline.config.inputs import (
    has_window,
    is_demo,
    is_registered,
    is_store,
    names_files,
    names_texts,
    scaling_type,
)
from shardline.config.schema import Config, leaves
from shardline.errors import ConfigError

Test = Callable[[Config], bool]
Words = str | Callable[[Config], str]


@dataclass(frozen=True)
class Rule:
    """A row: when the test holds, `key` is refused, not built yet, or without effect.

    `key` ending in `.` stands for every key below it that is given and differs from its default; the test is asked
    once for each. `words` is the reason (refused, note) or the feature that is missing (pending).
    """

    kind: Literal["refused", "pending", "note"]
    key: str
    when: Test
    words: Words
    remedy: str = ""


@dataclass(frozen=True)
class Pending:
    """A key whose feature is not built yet."""

    key: str
    value: Any
    feature: str


OPTIMIZERS = ("AdamW", "Adam", "LAMB", "LARS")
CONVERTERS = (
    "quantize.linear.float8",
    "quantize.linear.mx",
    "quantize.grouped_mm.float8",
    "quantize.grouped_mm.mx",
)
SCHEDULES = ("GPipe", "1F1B", "LoopedBFS", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
SCHEDULES_OF_FILES = ("PipelineScheduleSingle", "PipelineScheduleMulti")  # TorchTitan's names for what a file gives
LOADABLE = ("model", "optimizer", "lr_scheduler", "dataloader", "train_state")
# Names TorchTitan 0.2 knows whose models are not built: (model, flavor) to what they need.
NOT_BUILT: dict[tuple[str, str], str] = {
    (model, flavor): feature
    for model, feature, flavors in (
        ("qwen3", "mixture of experts", "debugmodel_moe 30B-A3B 235B-A22B"),
        (
            "llama4",
            "mixture of experts",
            "debugmodel 17bx16e 17bx128e debugmodel_irope 17bx16e_irope 17bx128e_irope",
        ),
        ("deepseek_v3", "latent attention, mixture of experts", "debugmodel debugmodel_flex_attn 16B 236B 671B"),
        ("gpt_oss", "attention sinks, mixture of experts", "debugmodel 20b 120b"),
        ("flux", "image generation", "flux-debug flux-dev flux-schnell"),
    )
    for flavor in flavors.split()
}


PIPELINE_KEYS = (
    "parallelism.module_fqns_per_model_part",
    "parallelism.pipeline_parallel_first_stage_less_layers",
    "parallelism.pipeline_parallel_last_stage_less_layers",
    "parallelism.pipeline_parallel_layers_per_stage",
    "parallelism.pipeline_parallel_schedule",
    "parallelism.pipeline_parallel_schedule_csv",
    "parallelism.pipeline_parallel_microbatch_size",
)
CONTEXT_KEYS = ("parallelism.context_parallel_load_balancer", "parallelism.context_parallel_rotate_method")
EXPERT_KEYS = (
    "parallelism.expert_tensor_parallel_degree",
    "parallelism.expert_parallel_comm_backend",
    "parallelism.pipeline_parallel_expert_parallel_overlap",
)


def check(config: Config) -> None:
    """Raise ConfigError for combinations that cannot work, all of them at once.

    What turns on the number of ranks is judged in a config that has it (`layout.with_degrees`); so it is with `notes`.
    """
    problems = [line(config.origin(key), key, _sentence(rule, config)) for rule, key in _matches(config, "refused")]
    problems += [f"{a} with {b}: {refusal.reason}; {refusal.remedy}" for a, b, refusal in refusals(config)]
    if problems:
        raise ConfigError("\n".join(problems))


def pending(config: Config) -> list[Pending]:
    """Keys that ask for a feature that is not built yet, each once."""
    found: dict[str, Pending] = {}
    for rule, key in _matches(config, "pending"):
        found.setdefault(key, Pending(key, config.value(key), _text(rule.words, config)))
    return list(found.values())


def refuse_pending(config: Config) -> None:
    """What `train` does about keys that ask for a missing feature."""
    rows = pending(config)
    if rows:
        raise ConfigError(
            "\n".join(
                line(config.origin(row.key), row.key, f"{row.value!r} is not built yet ({row.feature})") for row in rows
            )
        )


def notes(config: Config) -> list[str]:
    """Lines to log: keys that are given but change nothing here, or not all they say; one line per reason."""
    found: dict[str, list[str]] = {}
    for rule, key in _matches(config, "note"):
        keys = found.setdefault(_sentence(rule, config), [])
        if key not in keys:
            keys.append(key)
    return [_about(keys, sentence) for sentence, keys in found.items()]


def _about(keys: list[str], sentence: str) -> str:
    return f"{', '.join(keys)} {sentence if len(keys) == 1 else sentence.replace('has no', 'have no', 1)}"


def _matches(config: Config, kind: str) -> Iterator[tuple[Rule, str]]:
    for rule in RULES:
        if rule.kind != kind:
            continue
        keys = _given_below(config, rule.key) if rule.key.endswith(".") else [rule.key]
        if keys and rule.when(config):
            yield from ((rule, key) for key in keys)


def _given_below(config: Config, prefix: str) -> list[str]:
    return [key for key in leaves() if key.startswith(prefix) and config.is_set(key) and _differs(key)(config)]


def _text(words: Words, config: Config) -> str:
    return words if isinstance(words, str) else words(config)


def _sentence(rule: Rule, config: Config) -> str:
    return _text(rule.words, config) + (f"; {rule.remedy}" if rule.remedy else "")


def _differs(key: str) -> Test:
    return lambda config: bool(config.value(key) != leaves()[key].default)


def _given(config: Config, key: str) -> bool:
    return config.is_set(key) and _differs(key)(config)


def _needs(need: str, test: Test, *keys: str) -> list[Rule]:
    """Keys that do nothing unless the test holds."""

    def idle(key: str) -> Test:
        return lambda config: (key.endswith(".") or _given(config, key)) and not test(config)

    return [Rule("note", key, idle(key), f"has no effect: {need}") for key in keys]


def _not_built(feature: Words, *keys: str, when: Test | None = None) -> list[Rule]:
    """Keys that ask for a missing feature, by default as soon as they differ from the default."""
    return [Rule("pending", key, when or _differs(key), feature) for key in keys]


def _degree_not_built(feature: str, degree: str, *keys: str) -> list[Rule]:
    """A degree that is not built, and keys that speak of it: without effect where the degree is 1."""

    def asked(config: Config) -> bool:
        return bool(config.value(degree) != 1)

    def asked_and_differs(key: str) -> Test:
        return lambda config: asked(config) and _differs(key)(config)

    rows = _not_built(feature, degree)
    for key in keys:
        rows += _not_built(feature, key, when=asked_and_differs(key))
    return [*rows, *_needs(f"{degree} is 1", asked, *keys)]


def _one_rank(config: Config) -> bool:
    part = config.parallelism
    degrees = (
        part.data_parallel_replicate_degree,
        part.tensor_parallel_degree,
        part.pipeline_parallel_degree,
        part.context_parallel_degree,
        part.expert_parallel_degree,
    )
    return max(degrees) == 1 and part.data_parallel_shard_degree == 1


def _schedule_length(config: Config) -> int | None:
    """Steps of the learning-rate schedule, None when the data decides (epochs)."""
    if config.lr_scheduler.total_steps is not None:
        return config.lr_scheduler.total_steps
    return None if config.training.epochs is not None else config.training.steps


def _warmup_too_long(config: Config) -> bool:
    length = _schedule_length(config)
    return length is not None and config.lr_scheduler.warmup_steps > length


def _schedule_too_short(config: Config) -> bool:
    length, section = config.lr_scheduler.total_steps, config.training
    return length is not None and section.epochs is None and length < section.steps


def _rest_words(config: Config) -> str:
    length = config.lr_scheduler.total_steps or 0
    return (
        f"= {length} is shorter than training.steps = {config.training.steps}: from step {length + 1} on the learning"
        f" rate stays at {_last_factor(config):g} of its peak"
    )


def _last_factor(config: Config) -> float:
    """Share of the peak learning rate once a schedule of a given length is over."""
    section, length = config.lr_scheduler, config.lr_scheduler.total_steps or 0
    decays = section.warmup_steps < length and (section.decay_ratio is None or round(length * section.decay_ratio) > 0)
    return section.min_lr_factor if decays else 1.0


def _decay_too_long(config: Config) -> bool:
    length, ratio = _schedule_length(config), config.lr_scheduler.decay_ratio
    if length is None or ratio is None or _warmup_too_long(config):
        return False
    return config.lr_scheduler.warmup_steps + round(length * ratio) > length


def _shares_context(config: Config) -> bool:
    return config.parallelism.context_parallel_degree > 1


def _shards(config: Config) -> bool:
    """Over data-parallel ranks, or those that share a sequence; with a degree of -1 it may be."""
    return config.parallelism.data_parallel_shard_degree != 1 or _shares_context(config)


def _data_parallel(config: Config) -> bool:
    return config.parallelism.data_parallel_replicate_degree > 1 or _shards(config)


def _is_hsdp(config: Config) -> bool:
    """Replicas of shards; what shares a sequence shards the parameters too. With a degree of -1 it may be."""
    return config.parallelism.data_parallel_replicate_degree > 1 and _shards(config)


def _is_ddp(config: Config) -> bool:
    """Replicas without sharding; with a degree of -1 it may be."""
    part = config.parallelism
    alone = part.data_parallel_shard_degree in (-1, 1) and not _shares_context(config)
    return part.data_parallel_replicate_degree > 1 and alone


def _steps_early(config: Config) -> bool:
    return config.optimizer.early_step_in_backward


def _source_rules(part: str) -> list[Rule]:
    """Keys that not every kind of data reads, in [training] or [validation]."""

    def reads(is_without: Callable[[Any], bool]) -> Test:
        return lambda c: not getattr(c.value(part), "enable", True) or not is_without(c.value(part))

    split, field = f"{part}.dataset_split", f"{part}.dataset_text_field"
    return [
        *_needs(f"{part}.dataset is 'demo'", reads(is_demo), field, split),
        *_needs(f"{part}.dataset_path is a prepared store", reads(is_store), field, split),
        *_needs(f"{part}.dataset is a registered source, which gives whole texts", reads(is_registered), field, split),
        *_needs("files that are named are all read", reads(names_files), split),
        *_needs("plain text has no fields", reads(names_texts), field),
    ]


def _prepares(config: Config) -> bool:
    """Whether raw data may be prepared into the cache."""
    sections = [config.training, config.validation] if config.validation.enable else [config.training]
    return not all(is_demo(section) or is_store(section) for section in sections)


def _uses_assets(config: Config) -> bool:
    loads = config.checkpoint.initial_load_in_hf and config.checkpoint.initial_load_path is None
    return config.model.tokenizer_path is None or config.model.name == "auto" or loads


def _unknown_optimizer(config: Config) -> bool:
    return config.optimizer.name not in (*OPTIMIZERS, *registry.optimizers)


def _optimizer_words(config: Config) -> str:
    names = [*OPTIMIZERS, *registry.optimizers]
    name = config.optimizer.name
    same = [known for known in names if known.lower() == name.lower()]
    close = f", did you mean {same[0]!r}?" if same else registry.nearest(name, names)
    return f"expected one of {', '.join(names)}, got {name!r}{close}"


def _some_of(key: str, known: Sequence[str]) -> Rule:
    """For a list of names."""

    def unknown(config: Config) -> list[str]:
        return [name for name in config.value(key) if name not in known]

    def words(config: Config) -> str:
        name = unknown(config)[0]
        return f"expected some of {', '.join(known)}, got {name!r}{registry.nearest(name, known)}"

    return Rule("refused", key, lambda config: bool(unknown(config)), words)


def _unknown_schedule(config: Config) -> bool:
    """Case does not matter; a file goes before the name."""
    section = config.parallelism
    known = [name.lower() for name in (*SCHEDULES, *SCHEDULES_OF_FILES)]
    return not section.pipeline_parallel_schedule_csv and section.pipeline_parallel_schedule.lower() not in known


def _schedule_words(config: Config) -> str:
    name = config.parallelism.pipeline_parallel_schedule
    return f"there is no schedule {name!r}{registry.nearest(name, SCHEDULES)} ({', '.join(SCHEDULES)})"


def _flavors_not_built(config: Config) -> list[str]:
    """Flavors of the named model that are not built, unless a custom module brought the model."""
    name = config.model.name
    return [] if name in registry.flavors else [flavor for model, flavor in NOT_BUILT if model == name]


def _unknown_flavor(config: Config) -> bool:
    known = _flavors_not_built(config)
    return bool(known) and config.model.name != "qwen3" and config.model.flavor not in known


def _flavor_words(config: Config) -> str:
    known, flavor = _flavors_not_built(config), config.model.flavor
    return f"{config.model.name} has no flavor {flavor!r}{registry.nearest(flavor, known)} ({', '.join(known)})"


def _feature(config: Config) -> str:
    return NOT_BUILT.get((config.model.name, config.model.flavor), "mixture of experts")


def _model_not_built(config: Config) -> bool:
    return config.model.name != "qwen3" and bool(_flavors_not_built(config))


def _compiles_model(config: Config) -> bool:
    return config.compile.enable and "model" in config.compile.components


def _recomputes(config: Config) -> bool:
    return config.activation_checkpoint.mode in ("full", "selective")


def _has_converter(name: str) -> Test:
    return lambda config: name in config.model.converters


def _has_copies(config: Config) -> bool:
    """Whether ranks hold the same weights; between the ends of a pipeline tied embeddings are, and may be there."""
    part = config.parallelism
    may_be_tied = config.model.overrides.get("tie_word_embeddings") is not False
    ties = part.pipeline_parallel_degree > 1 and may_be_tied
    return part.data_parallel_replicate_degree > 1 or part.tensor_parallel_degree > 1 or ties


def _override_rules() -> list[Rule]:
    """Architecture fields that are overridden and that the model does not read."""

    def window_is_idle(config: Config) -> bool:
        return config.model.overrides.get("sliding_window_layers") is not None and not has_window(config)

    def scaling_is_idle(field: str) -> Test:
        default = RopeScaling.model_fields[field].default

        def test(config: Config) -> bool:
            given, kind = config.model.overrides.get("rope_scaling"), scaling_type(config)
            differs = isinstance(given, Mapping) and given.get(field, default) != default
            return differs and kind in SCALING_FIELDS and field not in SCALING_FIELDS[kind]

        return test

    def words(config: Config) -> str:
        return f"has no effect: rope_scaling.type is {scaling_type(config)!r}"

    layers, scaling = (f"model.overrides.{name}" for name in ("sliding_window_layers", "rope_scaling"))
    fields = dict.fromkeys(field for fields in SCALING_FIELDS.values() for field in fields)
    return [
        Rule("note", layers, window_is_idle, "has no effect: the model has no sliding_window"),
        *(Rule("note", f"{scaling}.{field}", scaling_is_idle(field), words) for field in fields),
    ]


def _has_workers(section: str) -> Test:
    return lambda config: bool(config.value(f"{section}.dataloader.num_workers"))


RULES: list[Rule] = [
    # Refused: what cannot work together.
    Rule("refused", "optimizer.name", _unknown_optimizer, _optimizer_words),
    _some_of("model.converters", CONVERTERS),
    Rule("refused", "model.flavor", _unknown_flavor, _flavor_words),
    Rule("refused", "parallelism.pipeline_parallel_schedule", _unknown_schedule, _schedule_words),
    _some_of("checkpoint.exclude_from_loading", LOADABLE),
    Rule(
        "refused",
        "training.epochs",
        lambda c: c.training.epochs is not None and c.is_set("training.steps"),
        lambda c: f"given together with training.steps = {c.training.steps}",
        remedy="give one of them",
    ),
    Rule(
        "refused",
        "profiling.profile_freq",
        lambda c: (
            c.profiling.enable_profiling
            and c.profiling.profile_freq < c.profiling.profiler_active + c.profiling.profiler_warmup
        ),
        lambda c: (
            f"{c.profiling.profile_freq} steps are fewer than profiler_warmup ({c.profiling.profiler_warmup})"
            f" and profiler_active ({c.profiling.profiler_active}) together"
        ),
        remedy="raise it or lower those",
    ),
    Rule(
        "refused",
        "checkpoint.last_save_in_hf",
        lambda c: c.checkpoint.last_save_in_hf and not c.checkpoint.last_save_model_only,
        "a Hugging Face folder holds weights only",
        remedy="set checkpoint.last_save_model_only = true",
    ),
    Rule(
        "refused",
        "checkpoint.initial_load_in_hf",
        lambda c: c.checkpoint.initial_load_in_hf and not c.checkpoint.initial_load_model_only,
        "a Hugging Face folder holds weights only",
        remedy="set checkpoint.initial_load_model_only = true",
    ),
    Rule(
        "refused",
        "checkpoint.create_seed_checkpoint",
        lambda c: c.checkpoint.create_seed_checkpoint and (not c.checkpoint.enable or c.checkpoint.load_only),
        "a run that saves nothing cannot save its first weights",
        remedy="set checkpoint.enable = true and checkpoint.load_only = false",
    ),
    Rule(
        "refused",
        "activation_checkpoint.mode",
        lambda c: c.activation_checkpoint.mode == "memory_budget" and not _compiles_model(c),
        "memory_budget is a setting of the compiler",
        remedy="set compile.enable = true with 'model' in compile.components",
    ),
    *(
        Rule(
            "refused",
            f"checkpoint.{name}",
            lambda c, name=name: not c.checkpoint.enable and _given(c, f"checkpoint.{name}"),  # type: ignore[misc]
            "weights are loaded only with checkpoint.enable = true",
            remedy="set that, or leave this out",
        )
        for name in ("initial_load_path", "initial_load_in_hf")
    ),
    Rule(
        "refused",
        "validation.dataset",
        lambda c: c.validation.enable and is_demo(c.validation) and not is_demo(c.training),
        "'demo' is generated text, and the training data is not",
        remedy="give validation.dataset_path, or set validation.enable = false",
    ),
    Rule(
        "refused",
        "optimizer.early_step_in_backward",
        lambda c: _steps_early(c) and c.training.max_norm > 0 and c.optimizer.early_step_clipping == "refuse",
        "clipping needs the norm of all gradients before the first step",
        remedy='set optimizer.early_step_clipping = "two_pass" (forward and backward twice) or training.max_norm = 0',
    ),
    Rule(
        "refused",
        "training.nonfinite",
        lambda c: _steps_early(c) and c.training.nonfinite == "skip" and c.training.max_norm == 0,
        "a step in backward cannot be taken back",
        remedy='set training.nonfinite = "stop", or clip with optimizer.early_step_clipping = "two_pass"',
    ),
    Rule(
        "refused",
        "optimizer.state_dtype",
        lambda c: c.optimizer.state_dtype == "bfloat16" and c.optimizer.name not in ("AdamW", "Adam"),
        "only AdamW and Adam keep narrow moments",
        remedy='set it to "parameter"',
    ),
    Rule(
        "refused",
        "parallelism.context_parallel_load_balancer",
        lambda c: _shares_context(c) and c.parallelism.context_parallel_load_balancer not in (None, "headtail"),
        lambda c: f"expected 'headtail' or 'none', got {c.parallelism.context_parallel_load_balancer!r}",
        remedy="'headtail' balances causal masks",
    ),
    # Pending: features that are not built yet.
    *_not_built(_feature, "model.name", when=_model_not_built),
    *_not_built(
        _feature, "model.flavor", when=lambda c: not _model_not_built(c) and c.model.flavor in _flavors_not_built(c)
    ),
    *_not_built("low precision", "model.converters"),
    *_degree_not_built("expert parallel", "parallelism.expert_parallel_degree", *EXPERT_KEYS),
    *_not_built("quantized weights", "checkpoint.initial_load_in_hf_quantized"),
    *_not_built("simulated communication", "comm.mode"),
    *_not_built("flight recorder", "comm.trace_buf_size", "comm.save_traces_folder", "comm.save_traces_file_prefix"),
    *_not_built("memory estimation", "memory_estimation.enable"),
    *_not_built("replica groups", "fault_tolerance.enable"),
    *_not_built("mixture of experts", "debug.moe_force_load_balance"),
    *_not_built("keys of one's own", "job.custom_config_module", "experimental.custom_args_module"),
    # Notes: given, but without effect here.
    *_needs(
        "parallelism.pipeline_parallel_degree is 1",
        lambda c: c.parallelism.pipeline_parallel_degree > 1,
        *PIPELINE_KEYS,
    ),
    *_needs(
        "parallelism.module_fqns_per_model_part names the modules of each stage",
        lambda c: c.parallelism.module_fqns_per_model_part is None or c.parallelism.pipeline_parallel_degree == 1,
        "parallelism.pipeline_parallel_first_stage_less_layers",
        "parallelism.pipeline_parallel_last_stage_less_layers",
        "parallelism.pipeline_parallel_layers_per_stage",
    ),
    *_needs(
        "parallelism.pipeline_parallel_schedule_csv gives the schedule",
        lambda c: not c.parallelism.pipeline_parallel_schedule_csv or c.parallelism.pipeline_parallel_degree == 1,
        "parallelism.pipeline_parallel_schedule",
    ),
    *_needs("checkpoint.enable is false", lambda c: c.checkpoint.enable, "checkpoint."),
    *_needs(
        "checkpoint.load_only is true",
        lambda c: not c.checkpoint.load_only or not c.checkpoint.enable,
        "checkpoint.interval",
        "checkpoint.keep_latest_k",
        "checkpoint.async_mode",
        "checkpoint.save_timeout_seconds",
        "checkpoint.last_save_model_only",
        "checkpoint.last_save_in_hf",
        "checkpoint.enable_first_step_checkpoint",
        "checkpoint.preempted_exit_code",
        "checkpoint.save_before",
    ),
    *_needs(
        "checkpoint.last_save_model_only is false",
        lambda c: c.checkpoint.last_save_model_only or not c.checkpoint.enable,
        "checkpoint.export_dtype",
    ),
    *_needs(
        "checkpoint.initial_load_path is not given",
        lambda c: c.checkpoint.initial_load_path is not None or not c.checkpoint.enable,
        "checkpoint.initial_load_model_only",
    ),
    *_needs("validation.enable is false", lambda c: c.validation.enable, "validation."),
    *_needs("compile.enable is false", lambda c: c.compile.enable, "compile."),
    *_needs("fault_tolerance.enable is false", lambda c: c.fault_tolerance.enable, "fault_tolerance."),
    *_needs("memory_estimation.enable is false", lambda c: c.memory_estimation.enable, "memory_estimation."),
    *(
        row
        for name in CONVERTERS
        for row in _needs(f"model.converters has no {name!r}", _has_converter(name), f"{name}.")
    ),
    *_needs(
        "profiling.enable_profiling is false",
        lambda c: c.profiling.enable_profiling,
        *(f"profiling.{name}" for name in ("save_traces_folder", "profiler_active", "profiler_warmup")),
        *(f"profiling.{name}" for name in ("record_shapes", "with_stack", "top_ops")),
    ),
    *_needs(
        "neither profiling.enable_profiling nor profiling.enable_memory_snapshot is true",
        lambda c: c.profiling.enable_profiling or c.profiling.enable_memory_snapshot,
        "profiling.profile_freq",
    ),
    *_needs(
        "profiling.enable_memory_snapshot is false",
        lambda c: c.profiling.enable_memory_snapshot,
        "profiling.save_memory_snapshot_folder",
    ),
    *_needs("metrics.enable_tensorboard is false", lambda c: c.metrics.enable_tensorboard, "metrics.save_tb_folder"),
    *_needs(
        "neither metrics.enable_tensorboard nor metrics.enable_wandb is true",
        lambda c: c.metrics.enable_tensorboard or c.metrics.enable_wandb or _one_rank(c),
        "metrics.save_for_all_ranks",
    ),
    *_needs(
        "fault_tolerance.enable is false",
        lambda c: c.fault_tolerance.enable,
        "checkpoint.enable_ft_dataloader_checkpoints",
    ),
    *_needs(
        "the compiler decides what is computed again",
        lambda c: not (_recomputes(c) and _compiles_model(c)),
        *(f"activation_checkpoint.{name}" for name in ("early_stop", "determinism_check", "debug")),
    ),
    *_needs("model.name is 'auto'", lambda c: c.model.name != "auto", "model.flavor"),
    *_needs("model.tokenizer_path is given, and no weights are read from there", _uses_assets, "model.hf_assets_path"),
    *_source_rules("training"),
    *_source_rules("validation"),
    *_override_rules(),
    *_needs("no raw data is prepared", _prepares, "training.cache_folder"),
    *_needs("training.gc_debug collects every step", lambda c: not c.training.gc_debug, "training.gc_freq"),
    *_needs("compile.components is empty", lambda c: bool(c.compile.components), "compile.enable"),
    *(
        row
        for part in ("training", "validation")
        for row in _needs(
            f"{part}.dataloader.num_workers is 0",
            _has_workers(part),
            f"{part}.dataloader.persistent_workers",
            f"{part}.dataloader.prefetch_factor",
        )
    ),
    *_needs(
        "the layout has one rank",
        lambda c: not _one_rank(c),
        "comm.init_timeout_seconds",
        "comm.train_timeout_seconds",
        "metrics.save_for_all_ranks",
    ),
    *_needs(
        "activation_checkpoint.mode is not 'selective'",
        lambda c: c.activation_checkpoint.mode == "selective",
        "activation_checkpoint.selective_ac_option",
    ),
    *_needs(
        "only mode 'selective' with selective_ac_option 'op' reads it",
        lambda c: c.activation_checkpoint.mode == "selective" and c.activation_checkpoint.selective_ac_option == "op",
        "activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns",
    ),
    *_needs(
        "activation_checkpoint.mode is not 'memory_budget'",
        lambda c: c.activation_checkpoint.mode == "memory_budget",
        "activation_checkpoint.memory_budget",
        "activation_checkpoint.visualize_memory_budget_pareto",
    ),
    *_needs(
        "activation_checkpoint.mode is neither 'full' nor 'selective'",
        _recomputes,
        *(
            f"activation_checkpoint.{name}"
            for name in ("early_stop", "preserve_rng_state", "determinism_check", "debug")
        ),
    ),
    *_needs(
        "optimizer.name is LAMB or LARS",
        lambda c: c.optimizer.name not in ("LAMB", "LARS"),
        "optimizer.implementation",
        "optimizer.decay_norms",
    ),
    *_needs("optimizer.name is LARS", lambda c: c.optimizer.name != "LARS", "optimizer.beta2", "optimizer.eps"),
    *_needs("optimizer.name is not LARS", lambda c: c.optimizer.name == "LARS", "optimizer.trust_coefficient"),
    *_needs(
        "optimizer.lr_scaling is 'none'",
        lambda c: c.optimizer.lr_scaling != "none",
        "optimizer.lr_scaling_base_batch",
    ),
    *_needs(
        "it is for clipping with optimizer.early_step_in_backward",
        lambda c: _steps_early(c) and c.training.max_norm > 0,
        "optimizer.early_step_clipping",
    ),
    *_needs("training.dtype is 'bfloat16'", lambda c: c.training.dtype != "bfloat16", "optimizer.state_dtype"),
    *_needs(
        "gradients are not summed over data-parallel ranks",
        _data_parallel,
        "parallelism.accumulation_sync",
    ),
    *_needs(
        "only HSDP (both data parallel degrees above 1) has sums between replicas to put off",
        lambda c: c.parallelism.accumulation_sync != "scatter" or _is_hsdp(c) or not _data_parallel(c),
        "parallelism.accumulation_sync",
    ),
    *_needs(
        "parallelism.enable_async_tensor_parallel is false",
        lambda c: c.parallelism.enable_async_tensor_parallel,
        "parallelism.async_tensor_parallel_backend",
    ),
    *_needs(
        "parallelism.gradient_compression is not 'powersgd'",
        lambda c: c.parallelism.gradient_compression == "powersgd",
        "parallelism.powersgd_rank",
    ),
    *_needs(
        "only plain replicas (DDP) sum gradients in buckets",
        _is_ddp,
        *(f"parallelism.{name}" for name in ("gradient_compression", "gradient_bucket_mib")),
        "parallelism.overlap_gradient_reduction",
    ),
    *_needs(
        "nothing is sharded over data-parallel ranks",
        lambda c: _shards(c) or c.training.enable_cpu_offload,
        "parallelism.fsdp_prefetch",
        "parallelism.fsdp_reshard_after_forward",
    ),
    *_needs(
        "parallelism.tensor_parallel_degree is 1",
        lambda c: c.parallelism.tensor_parallel_degree > 1,
        "parallelism.disable_loss_parallel",
        "parallelism.enable_sequence_parallel",
    ),
    *_needs("parallelism.context_parallel_degree is 1", _shares_context, *CONTEXT_KEYS),
    *_needs(
        "with ulysses every rank has all tokens of its heads, and the same work",
        lambda c: not _shares_context(c) or c.parallelism.context_parallel_rotate_method != "ulysses",
        "parallelism.context_parallel_load_balancer",
    ),
    *_needs("no two ranks hold the same weights", _has_copies, "debug.check_replicas_freq"),
    *_needs("debug.deterministic is false", lambda c: c.debug.deterministic, "debug.deterministic_warn_only"),
    Rule(
        "note",
        "lr_scheduler.warmup_steps",
        _warmup_too_long,
        lambda c: f"= {c.lr_scheduler.warmup_steps} is longer than the schedule: cut to {_schedule_length(c)}",
    ),
    Rule("note", "lr_scheduler.total_steps", _schedule_too_short, _rest_words),
    Rule(
        "note",
        "lr_scheduler.decay_ratio",
        _decay_too_long,
        lambda c: (
            f"= {c.lr_scheduler.decay_ratio} with {c.lr_scheduler.warmup_steps} steps of warmup is longer than"
            " the schedule: decay starts right after warmup"
        ),
    ),
]
