"""The rules applied to a config: what is refused, what is not built yet, and what has no effect."""

from __future__ import annotations

from collections.abc import Iterator

from shardline.config.architecture import PARAMETERS, Architecture
from shardline.config.assemble import line
from shardline.config.axolotl import sizes
from shardline.config.features import refusals
from shardline.config.layout import Layout, resolve_layout, with_degrees
from shardline.config.names import LARGEST_ON_DEMO, is_demo
from shardline.config.rules.learning_rate import lr_notes
from shardline.config.rules.parallelism import LESS_LAYERS
from shardline.config.rules.rule import Kind, Rule, differs
from shardline.config.rules.table import RULES
from shardline.config.schema import Config, leaves
from shardline.errors import ConfigError


def check(config: Config) -> None:
    """Raise one ConfigError that lists every combination that cannot work.

    Rules that depend on the number of ranks need a config that has all degrees (`layout.with_degrees`), as in `notes`.
    """
    problems = [line(config.origin(key), key, rule.sentence(config)) for rule, key in _matches(config, "refused")]
    problems += [f"{a} with {b}: {refusal.reason}; {refusal.remedy}" for a, b, refusal in refusals(config)]
    if problems:
        raise ConfigError("\n".join(problems))


def checked_layout(config: Config, ranks: int) -> Layout:
    """Return the layout of this many ranks, or raise a ConfigError. A config is checked once per number of ranks."""
    try:
        layout = resolve_layout(config.parallelism, ranks)
    except ConfigError as error:
        if str(error).startswith("parallelism: ") and sizes.is_translated(config):
            raise ConfigError(sizes.mismatch(config, ranks)) from None
        raise
    if config._checked_for != ranks:
        check(with_degrees(config, layout))
        config._checked_for = ranks
    return layout


def pending(config: Config) -> dict[str, str]:
    """Keys that request a feature that is not built yet: key -> feature."""
    found: dict[str, str] = {}
    for rule, key in _matches(config, "pending"):
        found.setdefault(key, rule.sentence(config))
    return found


def missing(config: Config) -> dict[str, str]:
    """Keys whose value needs a package that is not installed here, and data that is not named: key -> what it needs."""
    return {key: rule.sentence(config) for rule, key in _matches(config, "missing")}


def with_data_named(config: Config, parameters: int) -> Config:
    """Unset `training.dataset` where it is a default and a model of this size needs its data named."""
    defaulted = is_demo(config.training) and not config.is_set("training.dataset") and not config.data.sources
    if not defaulted or parameters <= LARGEST_ON_DEMO:
        return config
    return config.replace({"training.dataset": None}, origin=None)


def refuse_pending(config: Config) -> None:
    """Raise a ConfigError that names the keys that `train` cannot run: not built yet, or something is missing."""
    rows = [
        line(config.origin(key), key, f"{config.value(key)!r} is not built yet ({feature})")
        for key, feature in pending(config).items()
    ]
    rows += [line(config.origin(key), key, sentence) for key, sentence in missing(config).items()]
    if rows:
        raise ConfigError("\n".join(rows))


def notes(config: Config) -> list[str]:
    """Lines to log: set keys that have no effect, or not the full one. Keys with the same reason share a line."""
    found: dict[str, list[str]] = {}
    seen: set[str] = set()
    for rule, key in (*_matches(config, "idle"), *_matches(config, "note")):
        if key not in seen:  # the first reason is enough
            found.setdefault(rule.sentence(config), []).append(key)
        seen.add(key)
    return [_about(keys, sentence) for sentence, keys in found.items()]


def check_architecture(config: Config, arch: Architecture) -> None:
    """Refuse what this model cannot do: a name alone does not tell whether it has experts."""
    if arch.moe is not None and config.training.mixed_precision_param == "float16":
        raise ConfigError(
            "training.mixed_precision_param = 'float16': the losses that balance experts are not scaled; compute in"
            " bfloat16 or float32"
        )
    if arch.foreign is not None and config.training.neftune_alpha is not None:
        raise ConfigError("training.neftune_alpha: a model that transformers computes takes no noise on embeddings")


def check_parameters(config: Config, parameters: int) -> None:
    """Refuse a model that is too large to exist before anything is loaded or built for it."""
    if parameters > PARAMETERS:
        key, remedy = ("model.flavor", "a smaller one, or set model.overrides")
        if config.model.name == "auto":
            key, remedy = "model.hf_assets_path", "another folder, whose config.json has smaller sizes"
        elif config.model.overrides:
            key, remedy = "model.overrides", "smaller sizes"
        raise ConfigError(
            f"{key}: the model would have {parameters:,} parameters; at most {PARAMETERS:,} are allowed: use {remedy}"
        )


def expert_notes(config: Config, arch: Architecture) -> list[str]:
    """Lines about keys for experts that have no effect on this model."""
    if arch.moe is None:
        forced = config.debug.moe_force_load_balance
        return ["debug.moe_force_load_balance has no effect: the model has no experts"] if forced else []
    given = config.model.overrides.get("moe") or {}
    idle = [name for name in ("top_groups", "group_score") if name in given and arch.moe.n_groups == 1]
    return [f"model.overrides.moe.{name} has no effect: n_groups is 1" for name in idle]


def schedule_notes(config: Config, steps: int) -> list[str]:
    """Lines about a learning-rate schedule whose length the data decides (`training.epochs`)."""
    found = lr_notes(config.lr_scheduler, config.lr_scheduler.total_steps or steps)
    return [f"{key} {sentence}" for key, sentence in found.items()]


def _about(keys: list[str], sentence: str) -> str:
    return f"{', '.join(keys)} {sentence if len(keys) == 1 else sentence.replace('has no', 'have no', 1)}"


def _matches(config: Config, kind: Kind) -> Iterator[tuple[Rule, str]]:
    for rule in RULES:
        if rule.kind == kind:
            keys = [key for given in rule.keys for key in _expanded(given) if _applies(config, kind, key)]
            if keys and rule.when(config):
                yield from ((rule, key) for key in keys)


def _expanded(key: str) -> list[str]:
    return [known for known in leaves() if known.startswith(key)] if key.endswith(".") else [key]


def _applies(config: Config, kind: Kind, key: str) -> bool:
    """Whether a key of the rule counts: for idle and pending rules it must differ from its default."""
    if kind not in ("idle", "pending"):
        return True
    return differs(config, key) or (key in LESS_LAYERS and config.is_set(key))
