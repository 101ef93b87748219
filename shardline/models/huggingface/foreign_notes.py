"""What a user is told of a model that `transformers` computes. Neither torch nor transformers is imported."""

from __future__ import annotations

from typing import Any

from shardline.config.architecture import Architecture
from shardline.config.schema import Config
from shardline.errors import ConfigError


def foreign_line(arch: Architecture, asked: bool) -> str:
    """Who computes the model, and why."""
    assert arch.foreign is not None
    why = 'model.implementation = "transformers"' if asked else "that family is not built here"
    return f"transformers computes this model of type {arch.foreign.config['model_type']!r}: {why}"


def foreign_notes(arch: Architecture) -> list[str]:
    """What differs from a native model, a line each."""
    assert arch.foreign is not None
    content = arch.foreign.config
    dropped = [f"{key} = {value}" for key, value in content.items() if _drops(key, value)]
    lines = []
    if dropped:
        lines.append(f"dropout as config.json says ({', '.join(dropped)}): each layout drops other numbers")
    if any("router" in key and "coef" in key and value for key, value in content.items()):
        lines.append("the auxiliary loss of its routers is off")
    return lines


def check_lengths(arch: Architecture, config: Config) -> None:
    """Refuse sequences for which a model may have no positions."""
    lengths = {"training": config.training.seq_len}
    if config.validation.enable:
        lengths["validation"] = config.validation.seq_len
    for section, length in lengths.items():
        if length > arch.max_seq_len:
            raise ConfigError(
                f"{section}.seq_len = {length} is longer than the {arch.max_seq_len} positions that config.json states;"
                " model.overrides.max_seq_len changes them"
            )


def _drops(key: str, value: Any) -> bool:
    return "drop" in key and "classifier" not in key and isinstance(value, float) and value > 0
