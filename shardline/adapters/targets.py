"""Finds the weights that a config names: by our names or Hugging Face's, by suffix or by regular expression."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from shardline.config.architecture import Architecture
from shardline.errors import ConfigError
from shardline.models.fused_weights import layers_name, logical_shapes
from shardline.models.huggingface.stored import stored_as
from shardline.registry import nearest

ALL_LINEAR = ("all-linear", "linear")
EXPERTS = ".moe.experts."


def adaptable(arch: Architecture) -> dict[str, tuple[int, ...]]:
    """Every module that can have low-rank matrices, and the shape of its weight.

    These are the linear layers of blocks, the experts (gate and up in one, as in `peft`), the embedding and the output
    layer. In a model of transformers, they are its linear layers and its embedding.
    """
    if arch.foreign is not None:
        shapes, turned = arch.foreign.shapes, set(arch.foreign.transposed)
        return {name: shapes[f"{name}.weight"][:: -1 if name in turned else 1] for name in arch.foreign.adaptable}
    found: dict[str, tuple[int, ...]] = {}
    for name, shape in logical_shapes(arch).items():
        module = name.removesuffix(".weight")
        if module == name or len(shape) < 2 or ".router." in name:
            continue
        if module.endswith(f"{EXPERTS}w1"):
            found[module.removesuffix("w1") + "w13"] = (shape[0], 2, *shape[1:])
        elif not module.endswith(f"{EXPERTS}w3"):
            found[module] = shape
    return found


def spellings(arch: Architecture, module: str) -> list[str]:
    """The full names of a module: ours, and Hugging Face's."""
    if arch.foreign is not None:
        return [module]
    if EXPERTS in module:
        place, _, which = module.rpartition(".")
        layer = re.match(r"layers\.(\d+)\.", module)
        assert layer is not None
        parts = {"w13": ("w13", "gate_up_proj"), "w2": ("w2", "down_proj")}[which]
        theirs = f"model.layers.{layer[1]}.mlp.experts"
        return [f"{place}.{parts[0]}", place, f"{theirs}.{parts[1]}", theirs]
    stored = stored_as(f"{module}.weight", arch.family)
    if stored is None:
        return [module]
    theirs = stored.name.removesuffix(".weight")
    if not theirs.startswith("model."):
        return [module, theirs]
    return [module, theirs.replace("model.", "model.language_model.", 1), theirs]  # also in its multimodal form


def layer_of(arch: Architecture, module: str) -> int | None:
    """The number of the layer that contains a module; None outside the layers."""
    place = f"{layers_name(arch)}."
    return int(module.removeprefix(place).partition(".")[0]) if module.startswith(place) else None


def tied_names(arch: Architecture) -> dict[str, str]:
    """Additional names in files for weights that belong to two modules, and their logical names."""
    if arch.foreign is not None:
        return arch.foreign.ties
    return {"lm_head.weight": "tok_embeddings.weight"} if arch.tie_word_embeddings else {}


def chosen_targets(arch: Architecture, given: Sequence[str] | str, layers: Sequence[int] | None) -> list[str]:
    """The modules that get low-rank matrices; with an empty `given`, all linear layers of the blocks except experts."""
    known = adaptable(arch)
    _check_layers(arch, layers)
    if isinstance(given, str) and given not in ALL_LINEAR and given:
        named = _by_expression(arch, given, list(known))
    elif not given or given in ALL_LINEAR or set(given) & set(ALL_LINEAR):
        rest = [] if isinstance(given, str) else [name for name in given if name not in ALL_LINEAR]
        linear = [module for module in known if layer_of(arch, module) is not None and EXPERTS not in module]
        named = [*linear, *named_modules(arch, rest, list(known), "lora.target_modules")]
    else:
        named = named_modules(arch, given, list(known), "lora.target_modules")
    wanted = [module for module in known if module in named]
    if not wanted:
        raise ConfigError("lora.target_modules: the layers of this model have no linear layers that can be targets")
    found = [one for one in wanted if layers is None or layer_of(arch, one) is None or layer_of(arch, one) in layers]
    if not found:
        raise ConfigError("lora.layers: none of the targets is in these layers")
    return found


def _check_layers(arch: Architecture, layers: Sequence[int] | None) -> None:
    wrong = [layer for layer in layers or () if not 0 <= layer < arch.n_layers]
    if wrong or layers == []:
        raise ConfigError(f"lora.layers: expected numbers from 0 to {arch.n_layers - 1}, got {wrong or '[]'}")


def _by_expression(arch: Architecture, given: str, known: list[str]) -> list[str]:
    try:
        expression = re.compile(given)
    except re.error as error:
        raise ConfigError(f"lora.target_modules: {given!r} is not a regular expression ({error})") from None
    found = [one for one in known if any(expression.fullmatch(name) for name in spellings(arch, one))]
    return found or named_modules(arch, [given], known, "lora.target_modules")


def named_modules(arch: Architecture, names: Sequence[str], known: Sequence[str], key: str) -> list[str]:
    """The modules that `names` match; each is a full name or its end, and must match some module."""
    found: list[str] = []
    for name in names:
        these = [one for one in known if any(_ends(full, name) for full in spellings(arch, one))]
        if not these:
            endings = sorted(set(_endings(arch, known)))
            what = f"no module of this model is named {name!r}{nearest(name.rpartition('.')[2], endings)}"
            if arch.foreign is not None and any(f".{name}." in f".{full}." for full in arch.foreign.shapes):
                what = f"{name!r} is not a linear layer, the only kind that can have LoRA matrices in this model"
            raise ConfigError(f"{key}: {what}; there are {', '.join(endings)}")
        found += these
    return found


def _ends(full: str, name: str) -> bool:
    return full == name or full.endswith(f".{name}")


def _endings(arch: Architecture, known: Sequence[str]) -> Iterator[str]:
    for module in known:
        yield from (full.rpartition(".")[2] for full in spellings(arch, module))


def fitting(arch: Architecture, module: str, patterns: Mapping[str, float]) -> str | None:
    """The first pattern that matches the end of a module's name after a dot, as `peft` compares them.

    Matrices of experts are named after their weights, not after the module that has both weights.
    """
    names = spellings(arch, module)[::2] if EXPERTS in module else spellings(arch, module)
    return next((one for one in patterns if any(re.match(rf"(.*\.)?({one})$", name) for name in names)), None)


def by_pattern(arch: Architecture, targets: Sequence[str], patterns: Mapping[str, float], key: str) -> dict[str, float]:
    """The numbers that a config's patterns assign to targets; each pattern must match one."""
    try:
        found = {module: fitting(arch, module, patterns) for module in targets}
    except re.error as error:
        raise ConfigError(f"{key}: a pattern is not a regular expression ({error})") from None
    for pattern in patterns:
        if not any(fitting(arch, module, {pattern: 0}) for module in targets):
            endings = sorted(set(_endings(arch, targets)))
            close = nearest(pattern.rpartition(".")[2], endings)
            raise ConfigError(f"{key}: no target ends with {pattern!r}{close}; targets are {', '.join(endings)}")
    return {module: patterns[pattern] for module, pattern in found.items() if pattern is not None}


def saved_modules(arch: Architecture, names: Sequence[str]) -> list[str]:
    """The modules of `lora.modules_to_save`, whose weights are trained themselves."""
    known = list(
        dict.fromkeys(name.rpartition(".")[0] for name in logical_shapes(arch) if not name.endswith(".balance"))
    )
    ties = {other.rpartition(".")[0]: name.rpartition(".")[0] for other, name in tied_names(arch).items()}
    if arch.foreign is None and ties:
        ties["output"] = ties["lm_head"]
    both = {name: ties[other] for name in names for other in ties if _ends(other, name)}  # both share one weight
    found = named_modules(arch, [name for name in names if name not in both], known, "lora.modules_to_save")
    return [module for module in known if module in {*found, *both.values()}]
