"""LoRA on a decoder: which weights get low-rank matrices, which of them are trained, and what is frozen.

    frozen     every weight of the model except those of `modules_to_save`, in the compute type: no gradient, no
               optimizer state, no second copy in float32
    trained    a (rank, columns) and b (rows, rank) of each target, in the run's parameter type

Matrices are named after their projection, even if its weight is fused with others: `layers.0.attention.wq.lora.a`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn

from shardline.adapters.targets import EXPERTS, adaptable, by_pattern, chosen_targets, saved_modules
from shardline.config.architecture import Architecture
from shardline.config.schema import Lora
from shardline.errors import ConfigError
from shardline.models.adapted.low_rank import LowRank, LowRankSpec, Projection
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
from shardline.models.huggingface.stored import Stored, stored_as
from shardline.models.state import SomeParameters

log = logging.getLogger("shardline")


@dataclass(frozen=True)
class Adaptation:
    """What a run trains in a model whose other weights are frozen."""

    rank: int
    alpha: float
    dropout: float
    use_rslora: bool
    use_dora: bool
    targets: tuple[str, ...]
    saved: tuple[str, ...]  # modules that are trained themselves
    ranks: Mapping[str, int] = field(default_factory=dict)  # for targets whose rank differs
    alphas: Mapping[str, float] = field(default_factory=dict)
    bias: str = "none"  # which biases of the model are trained: none, all, lora_only

    def rank_of(self, module: str) -> int:
        return self.ranks.get(module, self.rank)

    def scale_of(self, module: str) -> float:
        rank = self.rank_of(module)
        return self.alphas.get(module, self.alpha) / (math.sqrt(rank) if self.use_rslora else rank)

    @property
    def changes_model(self) -> bool:
        """Whether the model's own weights are trained, too."""
        return bool(self.saved) or self.bias != "none"

    def whole(self, arch: Architecture) -> dict[str, tuple[int, ...]]:
        """The model's own tensors that are trained, under their logical names."""
        every = logical_shapes(arch)
        return {name: every[name] for name in every if name.rpartition(".")[0] in self.saved or self._bias(arch, name)}

    def _bias(self, arch: Architecture, name: str) -> bool:
        module, _, last = name.rpartition(".")
        if last != "bias" or self.bias == "none":
            return False
        stored = Stored(name) if arch.foreign is not None else stored_as(name, arch.family)
        known = stored is not None and stored.name.endswith(".bias")  # what `peft` considers a bias
        return known and (self.bias == "all" or module in self.targets)

    def shapes(self, arch: Architecture) -> dict[str, tuple[int, ...]]:
        """Every trained tensor of the whole model under its logical name."""
        sizes, found = adaptable(arch), dict[str, tuple[int, ...]]()
        for module in self.targets:
            *rows, columns = sizes[module]
            experts, rank = rows[:1] if len(rows) > 1 else [], self.rank_of(module)
            found[f"{module}.lora.a"] = (*experts, rank, columns)
            found[f"{module}.lora.b"] = (*rows, rank)
            if module == embedding_name(arch):  # a has a column for each of its rows
                found[f"{module}.lora.a"], found[f"{module}.lora.b"] = (rank, rows[0]), (columns, rank)
            if self.use_dora:
                found[f"{module}.lora.magnitude"] = tuple(rows)
        return {**self.whole(arch), **found}

    def added(self, arch: Architecture) -> int:
        """The number of parameters in the low-rank matrices."""
        return sum(math.prod(shape) for name, shape in self.shapes(arch).items() if is_low_rank(name))

    def described(self) -> dict[str, Any]:
        return asdict(self)


NOTHING = Adaptation(1, 1.0, 0.0, False, False, (), ())  # for a model that is entirely frozen


def adaptation(section: Lora, arch: Architecture) -> Adaptation:
    targets = chosen_targets(arch, section.target_modules, section.layers)
    saved = saved_modules(arch, section.modules_to_save)
    both = [module for module in targets if module in saved]
    if both:
        raise ConfigError(f"lora.modules_to_save: {both[0]} is also in lora.target_modules; name it in one of them")
    if section.use_dora and (odd := [one for one in targets if not _can_have_magnitude(arch, one)]):
        raise ConfigError(f"lora.use_dora: {odd[0]} cannot have a magnitude; leave it out of lora.target_modules")
    ranks = by_pattern(arch, targets, section.rank_pattern, "lora.rank_pattern")
    alphas = by_pattern(arch, targets, section.alpha_pattern, "lora.alpha_pattern")
    how = Adaptation(
        section.rank,
        section.alpha,
        section.dropout,
        section.use_rslora,
        section.use_dora,
        tuple(targets),
        tuple(saved),
        {module: int(rank) for module, rank in ranks.items() if rank != section.rank},
        {module: alpha for module, alpha in alphas.items() if alpha != section.alpha},
        section.bias,
    )
    if section.bias != "none" and not any(name.endswith(".bias") for name in how.whole(arch)):
        owner = "the model has" if section.bias == "all" else "the targets have"
        raise ConfigError(f"lora.bias = {section.bias!r}: {owner} no biases; set it to 'none'")
    return how


def _can_have_magnitude(arch: Architecture, module: str) -> bool:
    ends = (embedding_name(arch), output_name(arch))
    return module not in ends and (arch.foreign is not None or EXPERTS not in module)


def attach(model: Decoder, how: Adaptation, storage: torch.dtype, frozen: torch.dtype) -> None:
    """Add the trained matrices to a model without memory, and freeze the rest."""
    kept, whole = model.whole_parameters(), how.whole(model.arch)  # kept ones are neither trained nor cast
    model.make_adaptable()
    for name, parameter in list(model.named_parameters()):
        if parameter in kept:
            continue
        parts = logical_names(model.arch, name)
        trained = [part for part in parts if part in whole]
        if trained and len(trained) < len(parts):
            missing = ", ".join(part for part in parts if part not in whole)
            key = "lora.modules_to_save" if trained[0].rpartition(".")[0] in how.saved else "lora.bias"
            raise ConfigError(f"{key}: {trained[0]} shares one tensor with {missing}; name these modules, too")
        parameter.requires_grad_(bool(trained))
        if not trained:
            replace_parameter(model, name, parameter.detach().to(frozen), trained=False)
    if model.arch.tie_word_embeddings and not any(stage.first for stage in model.stages):
        targets = [module for module in how.targets if module != "tok_embeddings"]  # here it is only the output
    else:
        targets = list(how.targets)
    if how.dropout and output_name(model.arch) in targets:
        log.warning("lora.dropout has no effect on %s, whose product the loss computes", output_name(model.arch))
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
    """Give a module the low-rank matrices of the projections in its weight."""
    runs = projections(arch, name)
    wanted = [full for full, _ in runs if full in targets]
    if not wanted:
        return
    matrices: dict[str, nn.Module] = {}
    for full in wanted:
        shape = sizes[full] if full != embedding_name(arch) else sizes[full][::-1]
        matrices[full.rpartition(".")[2]] = LowRank(shape, how.rank_of(full), how.use_dora).to(storage)
    module.lora = nn.ModuleDict(matrices)
    named = tuple(Projection(full.rpartition(".")[2], rows, how.scale_of(full)) for full, rows in runs)
    module.low_rank = LowRankSpec(how.dropout, named)


def projections(arch: Architecture, name: str) -> list[tuple[str, int]]:
    """The projections in the weight of the module `name`, and the rows of each in one group of fused rows."""
    if ".experts." in f"{name}.":
        return [(name, 1)]
    runs = fused_runs(arch, f"{name}.weight")
    return [(full.removesuffix(".weight"), rows) for full, rows in runs.items()] or [(name, 1)]


def more_flops(model: Decoder) -> float:
    """The change in FLOPs per token: 6 for each element of the matrices, -2 for each frozen one without a gradient."""
    how: Adaptation | None = model.adaptation
    if how is None:
        frozen = {name: logical_shapes(model.arch)[name] for name in model.frozen - {"tok_embeddings.weight"}}
        return -2.0 * sum(used_by_a_token(model.arch, name, math.prod(shape)) for name, shape in frozen.items())
    arch, shapes = model.arch, {**logical_shapes(model.arch), **how.shapes(model.arch)}
    whole = how.whole(arch)
    embedding, output = embedding_name(arch), output_name(arch)
    if arch.tie_word_embeddings and embedding not in how.saved:
        shapes[f"{output}.weight"] = (arch.vocab_size, arch.dim)
    counted = (f"{layers_name(arch)}.", f"{output}.", "norm.")  # as `flops_per_token` does
    found = 0.0
    for name, shape in shapes.items():
        if name.startswith(counted) and name not in whole:
            factor = 6.0 if is_low_rank(name) else -2.0
            found += factor * used_by_a_token(arch, name, math.prod(shape))
    return found


@contextmanager
def frozen_alone(model: Decoder) -> Iterator[None]:
    """A context in which the model computes only with its frozen weights, as it would without LoRA."""
    modules = [module for module in model.computing_modules() if isinstance(module, Adaptable)]
    for module in modules:
        module.bare = True
    try:
        yield
    finally:
        for module in modules:
            module.bare = False


def trained_parameters(model: Decoder) -> SomeParameters:
    """The parameters that a checkpoint holds: with LoRA, the trained ones."""
    how: Adaptation | None = model.adaptation
    whole = {} if how is None else how.whole(model.arch)

    def is_trained(name: str) -> bool:
        if how is None or is_low_rank(name):
            return True
        return any(part in whole for part in logical_names(model.arch, name))

    return SomeParameters(model, is_trained)


def own_parameters(model: Decoder) -> SomeParameters:
    """The parameters that the model has without LoRA, except those in 4 or 8 bits, which are filled separately."""
    return SomeParameters(model, lambda name: not is_low_rank(name) and ".stored." not in name)


def trained_shapes(model: Decoder) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor that a checkpoint of the whole model holds, on any rank."""
    how: Adaptation | None = model.adaptation
    return logical_shapes(model.arch) if how is None else how.shapes(model.arch)
