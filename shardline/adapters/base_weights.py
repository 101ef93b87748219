"""QLoRA: the frozen weights of the blocks in 4 or 8 bits.

A linear layer then holds codes and factors in place of its weight, sharded as the weight would be. Its product
reconstructs the weight just before it multiplies, in forward and in backward. Every rank reads and rounds each full
weight before it keeps its part, so that the mean that double quantisation subtracts, and blocks of factors that span
several rows, are the same on every layout.
"""

from __future__ import annotations

import re

import torch
from torch import Tensor

from shardline.config.schema import Lora
from shardline.errors import ConfigError
from shardline.models.adapted.quantized import BLOCK, QuantizedWeight, dequantize, quantize, sharing
from shardline.models.decoder import CodedWeight, Decoder, Linear
from shardline.models.dtensor import local, local_slices
from shardline.models.fused_weights import fuse, layers_name, logical_names, upright
from shardline.storage.safetensors import LazyTensors

ROUTER = re.compile(r"\.(router|gate)(\.|$)")  # in models of transformers, a plain `gate` is a router


def quantized_modules(model: Decoder) -> dict[str, Linear]:
    """The linear layers of blocks with frozen weights, except routers, which are small."""
    place = f"{layers_name(model.arch)}."
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, Linear) and name.startswith(place) and not ROUTER.search(name) and not _trained(module)
    }


def _trained(module: Linear) -> bool:
    return module.weight is not None and module.weight.requires_grad


def hold_quantized(model: Decoder, section: Lora, tp: int) -> None:
    """Replace weights of linear layers by placeholders for codes, in a model without memory; `tp` ranks share them."""
    if section.base_dtype == "same":
        return
    for name, module in quantized_modules(model).items():
        rows, columns = upright(model.arch, name, module.weight).shape
        ranks = tp if name.endswith((".wo", ".w2")) else 1
        if section.base_dtype == "nf4" and columns % (BLOCK * ranks):
            by = f" by {ranks} ranks" if ranks > 1 else ""
            raise ConfigError(
                f'lora.base_dtype = "nf4": {columns} columns of {name} cannot be split{by} into blocks of {BLOCK};'
                ' set it to "int8" or "same"'
            )
        shared = sharing(columns, ranks) if section.double_quantization else None
        module.stored = CodedWeight(section.base_dtype, _empty(rows, columns, section.base_dtype, shared), shared)
        module.weight = None  # type: ignore[assignment]


def _empty(rows: int, columns: int, kind: str, shared: int | None) -> dict[str, Tensor]:
    def of(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    if kind == "int8":
        return {"codes": of(rows, columns, dtype=torch.int8), "row_factors": of(rows)}
    codes, blocks = of(rows, columns // 2, dtype=torch.uint8), columns // BLOCK
    if shared is None:
        return {"codes": codes, "factors": of(rows, blocks)}
    factors = of(rows, blocks, dtype=torch.uint8)
    return {"codes": codes, "factors": factors, "scales": of(rows, blocks // shared), "offsets": of(rows)}


def fill_quantized(model: Decoder, tensors: LazyTensors) -> None:
    """Fill this rank's part of every quantised weight."""
    for name, module in quantized_modules(model).items():
        stored: CodedWeight | None = module.stored
        if stored is None:
            continue
        whole = f"{name}.weight"
        parts = {part: rounded(model, part, stored, tensors[part]) for part in logical_names(model.arch, whole)}
        for kind, parameter in stored.named_parameters():
            fused = fuse(model.arch, whole, {part: getattr(one, kind) for part, one in parts.items()})
            with torch.no_grad():
                local(parameter).copy_(fused[local_slices(parameter)])


def rounded(model: Decoder, name: str, stored: CodedWeight, weight: Tensor) -> QuantizedWeight:
    """Quantise the full logical weight `name` to the kind of `stored`, and on its device."""
    rows = upright(model.arch, name.removesuffix(".weight"), weight).contiguous()
    on = rows.to(local(stored.codes).device).to(model.compute_dtype or weight.dtype)
    return quantize(on, stored.kind, stored.shared)


class RoundedTensors(LazyTensors):
    """The weights of a model as its products see them: quantised weights are decoded from their codes."""

    def __init__(self, model: Decoder, tensors: LazyTensors) -> None:
        self.model, self.tensors = model, tensors
        self._rows = dict.fromkeys(tensors)
        self.stored: dict[str, CodedWeight] = {}
        for name, module in quantized_modules(model).items():
            if module.stored is not None:
                self.stored |= dict.fromkeys(logical_names(model.arch, f"{name}.weight"), module.stored)

    def dtype(self, name: str) -> torch.dtype:
        return self.tensors.dtype(name)

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.stored:
            return self.tensors[name]
        found = rounded(self.model, name, self.stored[name], self.tensors[name])
        weight = dequantize(tuple(one for one in found if one is not None), self.stored[name].kind)
        return upright(self.model.arch, name.removesuffix(".weight"), weight)

    def part(self, name: str, place: tuple[slice, ...]) -> Tensor:
        return self[name][place] if name in self.stored else self.tensors.part(name, place)
