"""Messages about a model that `transformers` computes. Neither torch nor transformers is imported."""

from __future__ import annotations

from typing import Any

from shardline.config.architecture import Architecture
from shardline.config.schema import Config
from shardline.errors import ConfigError


def foreign_line(arch: Architecture, asked: bool) -> str:
    """A line that says that transformers computes the model, and why."""
    assert arch.foreign is not None
    why = 'model.implementation = "transformers"' if asked else "it has no native implementation"
    return f"transformers computes this model of type {arch.foreign.config['model_type']!r}: {why}"


def foreign_notes(arch: Architecture) -> list[str]:
    """How the model differs from a native one, a line each."""
    assert arch.foreign is not None
    content = arch.foreign.config
    dropped = [f"{key} = {value}" for key, value in content.items() if _drops(key, value)]
    lines = []
    if dropped:
        lines.append(f"dropout as config.json says ({', '.join(dropped)}): each layout drops different numbers")
    if any("router" in key and "coef" in key and value for key, value in content.items()):
        lines.append("the auxiliary loss of its routers is off")
    return lines


def check_lengths(arch: Architecture, config: Config) -> None:
    """Refuse sequences that are longer than the positions that config.json states."""
    lengths = {"training": config.training.seq_len}
    if config.validation.enable:
        lengths["validation"] = config.validation.seq_len
    for section, length in lengths.items():
        if length > arch.max_seq_len:
            raise ConfigError(
                f"{section}.seq_len = {length} is longer than the {arch.max_seq_len} positions that config.json states;"
                " set model.overrides.max_seq_len to change that"
            )


def _drops(key: str, value: Any) -> bool:
    return "drop" in key and "classifier" not in key and isinstance(value, float) and value > 0
