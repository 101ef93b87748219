"""Decides which products of a model compute in float8, by the names and sizes of their weights."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from shardline.config.architecture import Architecture
from shardline.config.names import FLOAT8_EXPERTS, FLOAT8_LINEAR
from shardline.config.schema import Config
from shardline.errors import ConfigError
from shardline.models.adapted.low_rank import Adapted, Weight, add_low_rank, factors, plain_weight, squared_norms
from shardline.models.decoder import Block, Decoder
from shardline.models.dtensor import local
from shardline.models.feed_forward import Biases, Products, Weights
from shardline.models.fused_weights import logical_names, logical_shapes
from shardline.models.products.linear import linear as plain_linear
from shardline.precision import float8
from shardline.precision.float8 import MULTIPLE, Recipe, keeps_float8
from shardline.registry import nearest

log = logging.getLogger("shardline")

AUTOMATIC = "auto_filter_small_kn"  # a filter that excludes small weights
CAPABLE = (8, 9)  # the lowest compute capability of GPUs that multiply float8


class BlockRecipes(NamedTuple):
    """The recipe of each kind of product in a block; None if it computes in the type of the activations."""

    into_heads: Recipe | None = None
    out_of_heads: Recipe | None = None
    widen: Recipe | None = None  # in the feed-forward layer or the shared expert
    narrow: Recipe | None = None
    experts: Recipe | None = None


# Modules whose weights each kind of product uses; the rest of a model is never converted.
MODULES = {
    "into_heads": ("attention.wqkv", "attention.wq", "attention.wkv", "attention.wq_b", "attention.wkv_b"),
    "out_of_heads": ("attention.wo",),
    "widen": ("feed_forward.w13", "feed_forward.w1", "moe.shared_experts.w13"),
    "narrow": ("feed_forward.w2", "moe.shared_experts.w2"),
}


def recipe_of(config: Config) -> Recipe | None:
    if FLOAT8_LINEAR not in config.model.converters:
        return None
    section = config.quantize.linear.float8
    return Recipe(section.recipe_name or "tensorwise", section.emulate)


def recipe_of_experts(config: Config) -> Recipe | None:
    if FLOAT8_EXPERTS not in config.model.converters:
        return None
    return Recipe("rowwise", config.quantize.grouped_mm.float8.emulate)


def check_device(config: Config, device: torch.device, compute: torch.dtype) -> None:
    """Raise if this device cannot multiply float8 and emulation was not requested."""
    for recipe, section in ((recipe_of(config), FLOAT8_LINEAR), (recipe_of_experts(config), FLOAT8_EXPERTS)):
        if recipe is None or recipe.emulate:
            continue
        how = f"--{section}.emulate multiplies the rounded numbers in the type of the activations instead"
        if device.type != "cuda" or torch.cuda.get_device_capability(device) < CAPABLE:
            raise ConfigError(
                f"{section}: {device.type} has no float8 products (GPUs of compute capability 8.9 or more have); {how}"
            )
        if compute != torch.bfloat16:
            kind = str(compute).removeprefix("torch.")
            raise ConfigError(f"{section}: float8 products return bfloat16, but activations are {kind}; {how}")


def check_rows(config: Config, rows: int) -> None:
    """Raise if weight gradients would be sums over a number of tokens that the kernels do not support."""
    recipe = recipe_of(config)
    if recipe is not None and not recipe.emulate and rows % MULTIPLE:
        raise ConfigError(
            f"{FLOAT8_LINEAR}: a rank multiplies {rows} tokens at a time, which is not a multiple of {MULTIPLE}; change"
            " training.seq_len or training.local_batch_size"
        )


def choose_recipes(model: Decoder, config: Config) -> dict[Block, BlockRecipes]:
    """Return the recipes of each block; raise if a filter names no module of the model."""
    recipe, of_experts, section = recipe_of(config), recipe_of_experts(config), config.quantize
    filters = [name for name in section.linear.float8.filter_fqns if name != AUTOMATIC]
    wanted = section.grouped_mm.float8.fqns
    wanted = [wanted] if isinstance(wanted, str) else list(wanted)
    if recipe is not None:
        _check_names(model.arch, f"{FLOAT8_LINEAR}.filter_fqns", filters)
    if of_experts is not None and model.arch.moe is None:
        raise ConfigError(f"model.converters: {FLOAT8_EXPERTS} has nothing to convert: the model has no experts")
    if of_experts is not None:
        _check_names(model.arch, f"{FLOAT8_EXPERTS}.fqns", wanted)
    small = AUTOMATIC in section.linear.float8.filter_fqns
    found = {}
    for layer, block in zip(model.layers, model.blocks(), strict=True):
        chosen: dict[str, Recipe | None] = {}
        for kind, modules in MODULES.items():
            weights = list(_weights(model.arch, block, f"layers.{layer}", modules))
            fits = recipe is not None and all(_suits(*one, filters, recipe, small) for one in weights)
            chosen[kind] = recipe if weights and fits else None
        if block.spec.kv_heads is not None:
            chosen["into_heads"] = None  # key and value gradients are summed over ranks: they would be rounded before
        name = f"layers.{layer}.moe.experts"
        if block.moe is not None and any(part in name for part in wanted):
            chosen["experts"] = of_experts
        found[block] = BlockRecipes(**chosen)
    return found


def _weights(
    arch: Architecture, block: Block, place: str, modules: tuple[str, ...]
) -> Iterator[tuple[list[str], Tensor]]:
    """Yield for each weight of some modules the names that a config may use, and this rank's shard."""
    for name, parameter in block.named_parameters():
        module = name.removesuffix(".weight")
        if module in modules and name != module:
            whole = f"{place}.{name}"
            names = [one.removesuffix(".weight") for one in (whole, *logical_names(arch, whole))]
            yield names, local(parameter)


def _suits(names: list[str], weight: Tensor, filters: list[str], recipe: Recipe, small: bool) -> bool:
    """Whether a weight (N, K) computes in float8."""
    if any(part in name for part in filters for name in names):
        return False
    n, k = weight.shape
    if not recipe.emulate and (n % MULTIPLE or k % MULTIPLE):
        return False
    return not (small and _is_small(n, k, recipe))


def _is_small(n: int, k: int, recipe: Recipe) -> bool:
    """Whether a product is known to be slower in float8 than in bfloat16; limits for an H100, from torchao's table."""
    if recipe.by_row:
        return n <= 2048 or k <= 1024 or (n <= 4096 and k <= 2048)
    return k <= 4096 and n <= 1024


def _check_names(arch: Architecture, key: str, names: list[str]) -> None:
    known = [name.removesuffix(".weight") for name in logical_shapes(arch)] + ["output"]
    absent = {"moe", "router", "router.gate", "experts", "shared_experts"} if arch.moe is None else set()
    for name in names:
        if name not in absent and not any(name in one for one in known):
            endings = sorted({one.rpartition(".")[2] for one in known})
            raise ConfigError(f"{key}: no module is named {name!r}{nearest(name.rpartition('.')[2], endings)}")


def converted_modules(model: Decoder, recipes: dict[Block, BlockRecipes]) -> list[str]:
    """Return the names of the modules whose weights are used only in float8."""
    found = []
    for layer, block in zip(model.layers, model.blocks(), strict=True):
        there = {name for name, _ in block.named_modules()}
        for kind, modules in MODULES.items():
            if getattr(recipes[block], kind) is not None:
                found += [f"layers.{layer}.{module}" for module in modules if module in there]
    return found


def describe(recipes: dict[Block, BlockRecipes]) -> list[str]:
    """Return log lines about what computes in float8."""
    lines = []
    every = [one for block in recipes.values() for one in block[:4]]
    in_float8 = [one for one in every if one is not None]
    if in_float8:
        how = ", emulated" if in_float8[0].emulate else ""
        lines.append(
            f"float8 ({in_float8[0].name}{how}): {len(in_float8)} of {len(every)} products of {len(recipes)} blocks;"
            " the output layer is not converted"
        )
    experts = [block.experts for block in recipes.values() if block.experts is not None]
    if experts:
        how = ", emulated" if experts[0].emulate else ""
        lines.append(f"float8 ({experts[0].name}{how}): the experts of {len(experts)} blocks")
    return lines


# ---- products of one rank --------------------------------------------------------------------------------------------


def multiplier(recipe: Recipe | None) -> Callable[[Tensor, Weight, Tensor | None], Tensor]:
    """Return a function for x times a weight, plus a bias."""
    if recipe is None:
        return plain_linear

    def multiply(x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
        product = float8.linear(x, plain_weight(weight), recipe)
        if isinstance(weight, Adapted):
            product = add_low_rank(product, x, weight)
        if isinstance(weight, Adapted) and weight.has_magnitude:
            product = product * factors(weight, squared_norms(weight)).to(x.dtype)
        return product if bias is None else product + bias.to(product.dtype)

    return multiply


@functools.cache
def products_here(into: Recipe | None, back: Recipe | None) -> Products:
    """Return products without collectives: into heads or intermediate columns, and back."""
    multiply = multiplier(into)

    def column(x: Tensor, weights: Weights, biases: Biases) -> tuple[Tensor, ...]:
        return tuple(multiply(x, weight, bias) for weight, bias in zip(weights, biases, strict=True))

    return Products(column, multiplier(back), row_keeps_float8=keeps_float8(back))
