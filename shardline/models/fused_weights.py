"""The row order of fused weights, and conversion between fused and logical tensors (one per projection).

    wqkv, rows by KV head        w13, rows in blocks of b = gcd(ffn_dim, 8)
    | q q q q k v | q q q q k v |      | gate b | up b | gate b | up b | ...

Neither order depends on how many ranks share a weight: cutting the rows into equal parts gives each rank whole heads
and matching gate and up rows. Biases and optimizer state have the order of their weight.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from shardline.config.architecture import Architecture

PARTS = {
    "attention.wqkv": ("wq", "wk", "wv"),
    "attention.wkv": ("wk", "wv"),  # beside a separate wq, where more ranks than KV heads share the heads
    "feed_forward.w13": ("w1", "w3"),
}


def gate_block(arch: Architecture) -> int:
    return math.gcd(arch.ffn_dim, 8)


def logical_names(arch: Architecture, name: str) -> list[str]:
    """The logical names of a parameter: its own, or those of the parts of a fused one."""
    _, parts = _split(name)
    if not parts:
        return [name]
    stem, ending = name.rsplit(".", 2)[0], name.rsplit(".", 1)[1]
    return [f"{stem}.{part}.{ending}" for part in parts]


def unfuse(arch: Architecture, name: str, tensor: Tensor) -> dict[str, Tensor]:
    """The logical tensors of the parameter `name`, or of rows of it that hold whole groups."""
    names = logical_names(arch, name)
    kind, _ = _split(name)
    if kind == "attention.wqkv":
        group = arch.n_heads // arch.n_kv_heads
        rows = tensor.unflatten(0, (-1, group + 2, arch.head_dim))  # (KV, group + 2, D, ...)
        parts = (rows[:, :group].flatten(0, 2), rows[:, group].flatten(0, 1), rows[:, group + 1].flatten(0, 1))
        return dict(zip(names, parts, strict=True))
    if kind == "attention.wkv":
        rows = tensor.unflatten(0, (-1, 2, arch.head_dim))  # (KV, 2, D, ...)
        return dict(zip(names, (rows[:, 0].flatten(0, 1), rows[:, 1].flatten(0, 1)), strict=True))
    if kind == "feed_forward.w13":
        rows = tensor.unflatten(0, (-1, 2, gate_block(arch)))  # (F / block, 2, block, ...)
        return dict(zip(names, (rows[:, 0].flatten(0, 1), rows[:, 1].flatten(0, 1)), strict=True))
    return {name: tensor}


def fuse(arch: Architecture, name: str, parts: Mapping[str, Tensor]) -> Tensor:
    """The parameter `name` from its logical tensors: the inverse of `unfuse`."""
    tensors = [parts[part] for part in logical_names(arch, name)]
    kind, _ = _split(name)
    if kind == "attention.wqkv":
        group = arch.n_heads // arch.n_kv_heads
        q = tensors[0].unflatten(0, (-1, group, arch.head_dim))
        k, v = (tensor.unflatten(0, (-1, 1, arch.head_dim)) for tensor in tensors[1:])
        return torch.cat((q, k, v), dim=1).flatten(0, 2)
    if kind == "attention.wkv":
        k, v = (tensor.unflatten(0, (-1, arch.head_dim)) for tensor in tensors)
        return torch.stack((k, v), dim=1).flatten(0, 2)
    if kind == "feed_forward.w13":
        gate, up = (tensor.unflatten(0, (-1, gate_block(arch))) for tensor in tensors)
        return torch.stack((gate, up), dim=1).flatten(0, 2)
    return tensors[0]


class LogicalRows(NamedTuple):
    """Rows [start, stop) of the logical tensor `name`, which has `size`, and their places in a parameter's shard."""

    name: str
    size: int
    start: int
    stop: int
    places: Tensor  # (stop - start,) of int64


def logical_rows(arch: Architecture, name: str, size: int, held: slice) -> list[LogicalRows]:
    """Rows `held` of the parameter `name`, which has `size` rows, as rows of its logical tensors."""
    ends = torch.tensor([held.start, held.stop], device="cpu")
    found = []
    for part, order in unfuse(arch, name, torch.arange(size, device="cpu")).items():  # where each logical row is
        start, stop = torch.searchsorted(order.contiguous(), ends).tolist()
        found.append(LogicalRows(part, len(order), start, stop, order[start:stop] - held.start))
    return found


def logical_shapes(arch: Architecture) -> dict[str, tuple[int, ...]]:
    """Every logical tensor's shape, in the order of the model; `output.weight` only when it is not tied."""
    shapes: dict[str, tuple[int, ...]] = {"tok_embeddings.weight": (arch.vocab_size, arch.dim)}
    for layer in range(arch.n_layers):
        for name, shape in _layer_shapes(arch).items():
            shapes[f"layers.{layer}.{name}"] = shape
    shapes["norm.weight"] = (arch.dim,)
    if not arch.tie_word_embeddings:
        shapes["output.weight"] = (arch.vocab_size, arch.dim)
    return shapes


def parameter_count(arch: Architecture) -> int:
    return sum(math.prod(shape) for shape in logical_shapes(arch).values())


def _layer_shapes(arch: Architecture) -> dict[str, tuple[int, ...]]:
    heads, kv = arch.n_heads * arch.head_dim, arch.n_kv_heads * arch.head_dim
    matrices = (
        ("attention.wq", heads, arch.dim, arch.qkv_bias),
        ("attention.wk", kv, arch.dim, arch.qkv_bias),
        ("attention.wv", kv, arch.dim, arch.qkv_bias),
        ("attention.wo", arch.dim, heads, arch.out_bias),
        ("feed_forward.w1", arch.ffn_dim, arch.dim, arch.mlp_bias),
        ("feed_forward.w3", arch.ffn_dim, arch.dim, arch.mlp_bias),
        ("feed_forward.w2", arch.dim, arch.ffn_dim, arch.mlp_bias),
    )
    shapes: dict[str, tuple[int, ...]] = {"attention_norm.weight": (arch.dim,), "ffn_norm.weight": (arch.dim,)}
    for name, rows, columns, bias in matrices:
        shapes[f"{name}.weight"] = (rows, columns)
        if bias:
            shapes[f"{name}.bias"] = (rows,)
    if arch.qk_norm:
        shapes["attention.q_norm.weight"] = shapes["attention.k_norm.weight"] = (arch.head_dim,)
    return shapes


def _split(name: str) -> tuple[str, tuple[str, ...]]:
    """("attention.wqkv", its parts) for a fused parameter's name, ("", ()) for any other."""
    for kind, parts in PARTS.items():
        if f".{kind}." in f".{name}":
            return kind, parts
    return "", ()
