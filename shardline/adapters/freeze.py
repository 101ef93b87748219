"""Trains only some weights of a model, without adapters: all others are frozen.

Frozen weights have no gradient and no optimizer state; a checkpoint holds them like the others.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from shardline.config.architecture import Architecture
from shardline.errors import ConfigError
from shardline.models.decoder import Decoder
from shardline.models.fused_weights import logical_names, logical_shapes
from shardline.models.huggingface.stored import stored_as

KEY = "training.unfrozen_parameters"


def freeze_except(model: Decoder, patterns: Sequence[str]) -> None:
    """Freeze every weight unless some pattern matches one of its names from the start.

    Names are ours and Hugging Face's, the latter also in their multimodal form. If several weights are fused in one
    tensor here (queries, keys and values), some of them may be frozen: `optim/frozen_rows.py` keeps them unchanged.
    """
    if model.arch.foreign is not None:
        raise ConfigError(f"{KEY}: a model with the code of transformers can only be trained whole; remove the key")
    trained = trained_names(model.arch, patterns)
    for name, parameter in model.named_parameters():
        wanted = any(part in trained for part in logical_names(model.arch, name))
        parameter.requires_grad_(wanted and parameter.requires_grad)
    model.frozen = frozenset(logical_shapes(model.arch)) - trained


def trained_names(arch: Architecture, patterns: Sequence[str]) -> frozenset[str]:
    """The logical names of the weights that the patterns match; each pattern must match some."""
    found: set[str] = set()
    for pattern in patterns:
        expression = _compiled(pattern)
        these = {name for name in logical_shapes(arch) if _matches(expression, arch, name)}
        if not these:
            known = ", ".join(_names(arch, name)[-1] for name in list(logical_shapes(arch))[:3])
            raise ConfigError(f"{KEY}: {pattern!r} matches no weight of this model; its names: {known}, ...")
        found |= these
    return frozenset(found)


def _compiled(pattern: str) -> re.Pattern[str]:
    if re.search(r"\[\d*:\d*\]$", pattern):
        raise ConfigError(f"{KEY}: {pattern!r} names rows of a weight, but a weight is trained whole or not at all")
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ConfigError(f"{KEY}: {pattern!r} is not a regular expression ({error})") from None


def _matches(expression: re.Pattern[str], arch: Architecture, name: str) -> bool:
    """Whether a pattern matches a weight; for experts, it must match all of them."""
    experts = range(arch.moe.n_experts if arch.moe is not None else 1)
    for full in _names(arch, name):
        numbered = [full.format(expert) for expert in experts] if "{}" in full else [full]
        matching = [one for one in numbered if expression.match(one)]
        if matching and len(matching) < len(numbered):
            raise ConfigError(f"{KEY}: {expression.pattern!r} names only some experts of a layer: they are one weight")
        if matching:
            return True
    return False


def _names(arch: Architecture, name: str) -> list[str]:
    """The names of a weight: ours, then Hugging Face's."""
    return [name, *_stored_names(arch, name)]


def _stored_names(arch: Architecture, name: str) -> Iterator[str]:
    stored = stored_as(name, arch.family)
    if stored is None:
        return
    if stored.name.startswith("model."):
        yield stored.name.replace("model.", "model.language_model.", 1)
    if name == "tok_embeddings.weight" and arch.tie_word_embeddings:
        yield "lm_head.weight"
    yield stored.name
