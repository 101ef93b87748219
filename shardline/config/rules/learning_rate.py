"""Rules of the learning rate: its schedule, and the parts of it that do not fit into the steps."""

from __future__ import annotations

from shardline.config.rules.rule import Rule, below, idle, idle_if, idle_unless, note, refuse
from shardline.config.schema import Config, LRScheduler


def lr_notes(section: LRScheduler, total: int) -> dict[str, str]:
    """The parts of a schedule of `total` steps that do not fit: key -> sentence."""
    found, warmup = {}, section.warmup(total)
    rises = "the learning rate rises until the last step"
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
    """The notes that are known before the data: with `training.epochs`, the data decides the length."""
    total = config.lr_scheduler.total_steps or (config.training.steps if config.training.epochs is None else None)
    return lr_notes(config.lr_scheduler, total) if total is not None else {}


def _lr_rule(key: str) -> Rule:
    return note(key, lambda config: key in _lr_notes(config), lambda config: _lr_notes(config)[key])


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


REFUSED: list[Rule] = [
    refuse(
        "lr_scheduler.decay_steps",
        lambda c: c.lr_scheduler.decay_steps is not None and c.lr_scheduler.decay_ratio is not None,
        lambda c: f"conflicts with lr_scheduler.decay_ratio = {c.lr_scheduler.decay_ratio}",
        remedy="set only one of them",
    ),
    refuse(
        "lr_scheduler.momentum_range",
        lambda c: c.lr_scheduler.momentum_range is not None and c.optimizer.name == "Adafactor",
        "Adafactor has no momentum that a schedule could change",
        remedy="leave it unset",
    ),
]

IDLE: list[Rule] = [
    idle_if(
        "lr_scheduler.decay_type",
        ["constant"],
        *below("lr_scheduler", "decay_ratio decay_steps decay_end_ratio min_lr_factor"),
    ),
    idle_if("lr_scheduler.decay_type", ["constant", "inverse_sqrt"], "lr_scheduler.cycles"),
    idle_unless("lr_scheduler.decay_type", ["polynomial"], "lr_scheduler.decay_power"),
    idle_unless("lr_scheduler.decay_type", ["inverse_sqrt"], "lr_scheduler.timescale"),
    idle(
        "lr_scheduler.momentum_range sets it",
        lambda c: c.lr_scheduler.momentum_range is not None,
        *below("optimizer", "beta1 muon_momentum"),
    ),
]

NOTES: list[Rule] = [
    _lr_rule("lr_scheduler.warmup_steps"),
    _lr_rule("lr_scheduler.warmup_ratio"),
    note("lr_scheduler.total_steps", _schedule_too_short, _too_short_words),
    _lr_rule("lr_scheduler.decay_ratio"),
    _lr_rule("lr_scheduler.decay_steps"),
]
