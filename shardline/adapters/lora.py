"""LoRA on a decoder: which matrices are trained beside which frozen weights, and what is frozen.

    frozen     every weight of the model but those of `modules_to_save`, in the type that products compute in: no
               gradient, no optimizer state, no second copy in float32
    trained    a (rank, columns) and b (rows, rank) of each target, in the type that a run stores parameters in

Names of matrices are those of the projection, whichever weights are fused: `layers.0.attention.wq.lora.a`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from shardline.adapters.targets import EXPERTS, adaptable, chosen_targets, saved_modules
from shardline.config.architecture import Architecture
from shardline.config.schema import Lora
from shardline.errors import ConfigError
from shardline.models.adapted.low_rank import LowRank, LowRankSpec
from shardline.models.decoder import Adaptable, Decoder
from shardline.models.fused_weights import (
    embedding_name,
    fused_runs,
    is_low_rank,
    layers_name,
    logical_names,
    logical_shapes,
    output_name,
    used_by_a_token,
)
from shardline.models.state import SomeParameters


@dataclass(frozen=True)
class Adaptation:
    """What a run trains of a model whose other weights are frozen."""

    rank: int
    alpha: float
    dropout: float
    use_rslora: bool
    use_dora: bool
    targets: tuple[str, ...]
    saved: tuple[str, ...]  # modules that are trained whole

    @property
    def scale(self) -> float:
        return self.alpha / (math.sqrt(self.rank) if self.use_rslora else self.rank)

    def shapes(self, arch: Architecture) -> dict[str, tuple[int, ...]]:
        """Every trained tensor of the whole model under its logical name."""
        sizes, found = adaptable(arch), dict[str, tuple[int, ...]]()
        for module in self.targets:
            *rows, columns = sizes[module]
            experts = rows[:1] if len(rows) > 1 else []
            found[f"{module}.lora.a"] = (*experts, self.rank, columns)
            found[f"{module}.lora.b"] = (*rows, self.rank)
            if module == embedding_name(arch):  # its rows are the columns of a
                found[f"{module}.lora.a"], found[f"{module}.lora.b"] = (self.rank, rows[0]), (columns, self.rank)
            if self.use_dora:
                found[f"{module}.lora.magnitude"] = tuple(rows)
        whole = logical_shapes(arch).items()
        return {**{name: shape for name, shape in whole if name.rpartition(".")[0] in self.saved}, **found}

    def added(self, arch: Architecture) -> int:
        """How many parameters the matrices have."""
        return sum(math.prod(shape) for name, shape in self.shapes(arch).items() if is_low_rank(name))

    def described(self) -> dict[str, Any]:
        return asdict(self)


NOTHING = Adaptation(1, 1.0, 0.0, False, False, (), ())  # of a model that is frozen as a whole


def adaptation(section: Lora, arch: Architecture) -> Adaptation:
    targets = chosen_targets(arch, section.target_modules, section.layers)
    saved = saved_modules(arch, section.modules_to_save)
    both = [module for module in targets if module in saved]
    if both:
        raise ConfigError(f"lora.modules_to_save: {both[0]} is among lora.target_modules, too: name it in one of them")
    if section.use_dora and (odd := [one for one in targets if not _can_have_magnitude(arch, one)]):
        raise ConfigError(f"lora.use_dora: {odd[0]} cannot have a magnitude; leave it out of lora.target_modules")
    options = (section.rank, section.alpha, section.dropout, section.use_rslora, section.use_dora)
    return Adaptation(*options, tuple(targets), tuple(saved))


def _can_have_magnitude(arch: Architecture, module: str) -> bool:
    ends = (embedding_name(arch), output_name(arch))
    return module not in ends and (arch.foreign is not None or EXPERTS not in module)


def attach(model: Decoder, how: Adaptation, storage: torch.dtype, frozen: torch.dtype) -> None:
    """Add the trained matrices to a model without memory, and freeze the rest of it."""
    kept = model.whole_parameters()  # neither trained nor cast
    model.make_adaptable()
    for name, parameter in list(model.named_parameters()):
        if parameter in kept:
            continue
        modules = [part.rpartition(".")[0] for part in logical_names(model.arch, name)]
        trained = [module for module in modules if module in how.saved]
        if trained and len(trained) < len(modules):
            missing = ", ".join(module for module in modules if module not in how.saved)
            raise ConfigError(f"lora.modules_to_save: {trained[0]} is one weight with {missing}: name these, too")
        parameter.requires_grad_(bool(trained))
        if not trained:
            replace_parameter(model, name, parameter.detach().to(frozen), trained=False)
    if model.arch.tie_word_embeddings and not any(stage.first for stage in model.stages):
        targets = [module for module in how.targets if module != "tok_embeddings"]  # here it is only the output
    else:
        targets = list(how.targets)
    sizes = adaptable(model.arch)
    with torch.device("meta"):
        for name, module in list(model.named_modules()):
            if isinstance(module, Adaptable):
                _adapt(model.arch, name, module, how, targets, sizes, storage)
    model.adaptation = how


def replace_parameter(model: nn.Module, name: str, value: torch.Tensor, trained: bool) -> None:
    path, _, last = name.rpartition(".")
    setattr(model.get_submodule(path), last, nn.Parameter(value, requires_grad=trained))


def _adapt(
    arch: Architecture,
    name: str,
    module: Adaptable,
    how: Adaptation,
    targets: list[str],
    sizes: dict[str, tuple[int, ...]],
    storage: torch.dtype,
) -> None:
    """Give a module the matrices of the projections that its weight holds."""
    runs = projections(arch, name)
    wanted = [full for full, _ in runs if full in targets]
    if not wanted:
        return
    matrices: dict[str, nn.Module] = {}
    for full in wanted:
        shape = sizes[full] if full != embedding_name(arch) else sizes[full][::-1]
        matrices[full.rpartition(".")[2]] = LowRank(shape, how.rank, how.use_dora).to(storage)
    module.lora = nn.ModuleDict(matrices)
    module.low_rank = LowRankSpec(how.scale, how.dropout, tuple((full.rpartition(".")[2], rows) for full, rows in runs))


def projections(arch: Architecture, name: str) -> list[tuple[str, int]]:
    """The projections in the weight of the module `name`, and the rows of each in a group of it."""
    if ".experts." in f"{name}.":
        return [(name, 1)]
    runs = fused_runs(arch, f"{name}.weight")
    return [(full.removesuffix(".weight"), rows) for full, rows in runs.items()] or [(name, 1)]


def more_flops(model: Decoder) -> float:
    """FLOPs for a token: 6 for each number of the matrices, less 2 for each frozen one, which has no gradient."""
    how: Adaptation | None = model.adaptation
    if how is None:
        frozen = {name: logical_shapes(model.arch)[name] for name in model.frozen - {"tok_embeddings.weight"}}
        return -2.0 * sum(used_by_a_token(model.arch, name, math.prod(shape)) for name, shape in frozen.items())
    arch, shapes = model.arch, {**logical_shapes(model.arch), **how.shapes(model.arch)}
    embedding, output = embedding_name(arch), output_name(arch)
    if arch.tie_word_embeddings and embedding not in how.saved:
        shapes[f"{output}.weight"] = (arch.vocab_size, arch.dim)
    counted = (f"{layers_name(arch)}.", f"{output}.", "norm.")  # as `flops_per_token` does
    found = 0.0
    for name, shape in shapes.items():
        if name.startswith(counted) and name.rpartition(".")[0] not in how.saved:
            factor = 6.0 if is_low_rank(name) else -2.0
            found += factor * used_by_a_token(arch, name, math.prod(shape))
    return found


@contextmanager
def frozen_alone(model: Decoder) -> Iterator[None]:
    """Inside, the model computes with its frozen weights alone, as it would without LoRA."""
    modules = [module for module in model.computing_modules() if isinstance(module, Adaptable)]
    for module in modules:
        module.bare = True
    try:
        yield
    finally:
        for module in modules:
            module.bare = False


def trained_parameters(model: Decoder) -> SomeParameters:
    """What a checkpoint of a run holds: of a model with LoRA, what is trained."""
    how: Adaptation | None = model.adaptation

    def is_trained(name: str) -> bool:
        if how is None or is_low_rank(name):
            return True
        return any(part.rpartition(".")[0] in how.saved for part in logical_names(model.arch, name))

    return SomeParameters(model, is_trained)


def own_parameters(model: Decoder) -> SomeParameters:
    """The parameters that the model has without LoRA; those in 4 or 8 bits are filled apart."""
    return SomeParameters(model, lambda name: not is_low_rank(name) and ".stored." not in name)


def trained_shapes(model: Decoder) -> dict[str, tuple[int, ...]]:
    """Every tensor that a checkpoint holds of the whole model, on whichever ranks."""
    how: Adaptation | None = model.adaptation
    return logical_shapes(model.arch) if how is None else how.shapes(model.arch)
