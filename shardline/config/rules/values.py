"""Rules of single values: unknown names, more tokens than a step can have, and values that are not built yet."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shardline import registry
from shardline.config.features import is_context_parallel
from shardline.config.names import (
    CONVERTERS,
    LOADABLE,
    MOMENTS,
    MX_CONVERTERS,
    NOT_BUILT,
    find_schedule,
    unknown_schedule,
)
from shardline.config.rules.rule import Rule, below, not_built, refuse
from shardline.config.schema import Config

MOST_TOKENS = 2**34  # of one step: a hundred times the largest batches that models were trained with
BATCH_KEYS = (
    *below("training", "seq_len local_batch_size global_batch_size gradient_accumulation_steps"),
    *below("validation", "seq_len local_batch_size"),
)


def _known(key: str, names: Callable[[], Sequence[str]]) -> Rule:
    """The value, or every item of a list, must be a known name."""

    def unknown(config: Config) -> list[str]:
        value = config.value(key)
        given = [value] if isinstance(value, str) else value
        return [name for name in given if name not in names()]

    def words(config: Config) -> str:
        name, kind = unknown(config)[0], "one" if isinstance(config.value(key), str) else "some"
        return f"expected {kind} of {', '.join(names())}, got {name!r}{registry.nearest(name, names())}"

    return refuse(key, lambda config: bool(unknown(config)), words)


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


def _tokens_asked(config: Config, key: str) -> int:
    """Return the tokens of a step or a validation batch that this key asks for; other factors count as 1."""
    section = config.value(key.partition(".")[0])
    if not key.endswith("seq_len") and section.seq_len > MOST_TOKENS:
        return 0  # the length is reported alone
    number = 1 if key.endswith("seq_len") else config.value(key) or 0
    passes = section.local_batch_size if key.endswith("accumulation_steps") else 1
    return int(section.seq_len * number * passes)


def _too_many_tokens(key: str) -> Rule:
    """Refuse a number with which a step would never end, or its list of samples would take all memory."""
    return refuse(
        key,
        lambda c: _tokens_asked(c, key) > MOST_TOKENS,
        lambda c: (
            f"{c.value(key):,} asks for {_tokens_asked(c, key):,} tokens at once; at most {MOST_TOKENS:,} are allowed"
        ),
        remedy="lower it",
    )


REFUSED: list[Rule] = [
    _known("optimizer.name", lambda: [*MOMENTS, *registry.optimizers]),
    _known("model.converters", lambda: CONVERTERS),
    refuse(
        "model.flavor",
        lambda c: bool(_flavors_not_built(c)) and c.model.flavor not in _flavors_not_built(c),
        _flavor_words,
    ),
    refuse(
        "parallelism.pipeline_parallel_schedule",
        _unknown_schedule,
        lambda c: unknown_schedule(c.parallelism.pipeline_parallel_schedule),
    ),
    _known("checkpoint.exclude_from_loading", lambda: LOADABLE),
    *(_too_many_tokens(key) for key in BATCH_KEYS),
]

PENDING: list[Rule] = [
    not_built(_model_feature, "model.name", when=lambda c: bool(_flavors_not_built(c))),
    not_built("MX formats", "model.converters", when=lambda c: bool(set(MX_CONVERTERS) & set(c.model.converters))),
    not_built("quantized weights", "checkpoint.initial_load_in_hf_quantized"),
    not_built("simulated communication", "comm.mode"),
    not_built(
        "load balancing by ptrr",
        "parallelism.context_parallel_load_balancer",
        when=lambda c: is_context_parallel(c) and c.parallelism.context_parallel_load_balancer == "ptrr",
    ),
    not_built("memory estimation", "memory_estimation.enable"),
]
