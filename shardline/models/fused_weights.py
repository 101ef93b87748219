"""The row order of fused weights, and conversion between fused and logical tensors (one per projection).

    wqkv, rows by KV head        w13, rows in blocks of b = gcd(ffn_dim, 8); w1 alone where there is no gate
    | q q q q k v | q q q q k v |      | gate b | up b | gate b | up b | ...

    w13 of experts: (experts, 2, width, dim), gate and up each a half of the second dimension

Neither order depends on how many ranks share a weight: cutting the rows into equal parts gives each rank whole heads
and matching gate and up rows. Biases and optimizer state have the order of their weight.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from shardline.config.architecture import Architecture, MixtureOfExperts

if TYPE_CHECKING:  # the sizes of a model are computed without torch
    from torch import Tensor


def gate_block(width: int) -> int:
    """Rows of gate, then of up, in the fused weight of a feed-forward part of this width."""
    return math.gcd(width, 8)


def logical_names(arch: Architecture, name: str) -> list[str]:
    """The logical names of a parameter: its own, or those of the parts of a fused one."""
    return _halves(name) or list(fused_runs(arch, name)) or [name]


def unfuse(arch: Architecture, name: str, tensor: Tensor) -> dict[str, Tensor]:
    """Split the parameter `name`, or rows of it that hold whole groups, into logical tensors."""
    if _halves(name):
        return views(name, tensor)
    runs = fused_runs(arch, name)
    if not runs:
        return {name: tensor}
    groups = tensor.unflatten(0, (-1, sum(runs.values())))  # (groups, rows of a group, ...)
    parts = groups.split(list(runs.values()), dim=1)
    return {part: rows.flatten(0, 1) for part, rows in zip(runs, parts, strict=True)}


def fuse(arch: Architecture, name: str, parts: Mapping[str, Tensor]) -> Tensor:
    """Build the parameter `name` from its logical tensors: the inverse of `unfuse`."""
    import torch

    if _halves(name):
        return torch.stack([parts[half] for half in _halves(name)], dim=1)
    runs = fused_runs(arch, name)
    if not runs:
        return parts[name]
    groups = [parts[part].unflatten(0, (-1, rows)) for part, rows in runs.items()]  # (groups, rows of a group, ...)
    return torch.cat(groups, dim=1).flatten(0, 1)


def views(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """Views of the parameter `name`, of a shard or of its state, whose rows are rows of logical tensors.

    The fused weight of experts has two views; any other parameter has one, under its own name.
    """
    halves = _halves(name)
    return dict(zip(halves, tensor.unbind(1), strict=True)) if halves else {name: tensor}


class LogicalRows(NamedTuple):
    """Rows [start, stop) of the logical tensor `name` of `size` rows, and their places in a parameter's shard."""

    name: str
    size: int
    start: int
    stop: int
    places: Tensor  # (stop - start,) of int64


def logical_rows(arch: Architecture, name: str, size: int, held: slice) -> list[LogicalRows]:
    """Map rows `held` of the parameter `name`, which has `size` rows, to rows of its logical tensors."""
    import torch

    ends = torch.tensor([held.start, held.stop], device="cpu")
    found = []
    for part, order in unfuse(arch, name, torch.arange(size, device="cpu")).items():  # where each logical row is
        start, stop = torch.searchsorted(order.contiguous(), ends).tolist()
        found.append(LogicalRows(part, len(order), start, stop, order[start:stop] - held.start))
    return found


def logical_shapes(arch: Architecture) -> dict[str, tuple[int, ...]]:
    """Every logical tensor's shape, in model order; the output layer's only when it is not tied."""
    if arch.foreign is not None:
        return dict(arch.foreign.shapes)
    shapes: dict[str, tuple[int, ...]] = {"tok_embeddings.weight": (arch.vocab_size, arch.dim)}
    for layer in range(arch.n_layers):
        for name, shape in _layer_shapes(arch, layer).items():
            shapes[f"layers.{layer}.{name}"] = shape
    shapes["norm.weight"] = (arch.dim,)
    if arch.norm_bias:
        shapes["norm.bias"] = (arch.dim,)
    if not arch.tie_word_embeddings:
        shapes["output.weight"] = (arch.vocab_size, arch.dim)
    return shapes


def is_low_rank(name: str) -> bool:
    """Whether a name is that of a low-rank matrix, trained beside a frozen weight."""
    return ".lora." in name


def low_rank_name(name: str) -> str:
    """The logical name: it does not depend on which weights are fused.

    layers.0.attention.wqkv.lora.wq.a -> layers.0.attention.wq.lora.a
    """
    module, _, inner = name.partition(".lora.")
    projection, _, ending = inner.rpartition(".")
    return ".".join([*module.split(".")[:-1], projection, "lora", ending]) if projection else name


def keeps_type(name: str) -> bool:
    """Whether a tensor is stored in float32 whatever the weights' type: a balancing bias, whose updates are tiny."""
    return name.endswith(".router.balance")


def parameter_count(arch: Architecture) -> int:
    return sum(math.prod(shape) for shape in logical_shapes(arch).values())


def active_parameter_count(arch: Architecture) -> int:
    """The number of parameters that one token uses: of a layer's experts, only those it is routed to."""
    return sum(used_by_a_token(arch, name, math.prod(shape)) for name, shape in logical_shapes(arch).items())


def layer_sizes(arch: Architecture) -> list[tuple[int, int]]:
    """(parameters, parameters that one token uses) of each layer."""
    held, used = [0] * arch.n_layers, [0] * arch.n_layers
    place = f"{layers_name(arch)}."
    for name, shape in logical_shapes(arch).items():
        if name.startswith(place):
            layer, size = int(name.removeprefix(place).split(".")[0]), math.prod(shape)
            held[layer] += size
            used[layer] += used_by_a_token(arch, name, size)
    return list(zip(held, used, strict=True))


def layers_name(arch: Architecture) -> str:
    """The name of the list of layers in the model."""
    return "layers" if arch.foreign is None else arch.foreign.blocks


def embedding_name(arch: Architecture) -> str:
    """The name of the module that turns tokens into vectors."""
    return "tok_embeddings" if arch.foreign is None else arch.foreign.embedding


def output_name(arch: Architecture) -> str:
    """The name of the output layer."""
    return "output" if arch.foreign is None else arch.foreign.output


def upright(arch: Architecture, module: str, weight: Tensor) -> Tensor:
    """Convert a linear layer's weight from the stored layout to (rows, columns), or back.

    GPT-2 and similar models store columns first.
    """
    return weight.t() if is_transposed(arch, module) else weight


def is_transposed(arch: Architecture, module: str) -> bool:
    return arch.foreign is not None and module in arch.foreign.transposed


def active_words(arch: Architecture) -> str:
    """` (1,234 for each token)`, to follow the number of all parameters; empty for a model without experts."""
    return "" if arch.moe is None else f" ({active_parameter_count(arch):,} for each token)"


def used_by_a_token(arch: Architecture, name: str, size: int) -> int:
    """How many of the `size` parameters of a logical tensor one token uses."""
    return size if arch.moe is None or ".experts." not in name else size // arch.moe.n_experts * arch.moe.top_k


def _layer_shapes(arch: Architecture, layer: int) -> dict[str, tuple[int, ...]]:
    moe = arch.moe if arch.moe is not None and arch.moe.holds(layer) else None
    ffn, width = ("feed_forward", arch.ffn_dim) if moe is None else ("moe.shared_experts", moe.shared_dim)
    matrices = _attention_matrices(arch)
    if width:
        into = ("w1", "w3") if arch.gated else ("w1",)
        matrices += [(f"{ffn}.{name}", width, arch.dim, arch.mlp_bias) for name in into]
        matrices.append((f"{ffn}.w2", arch.dim, width, arch.mlp_bias))
    endings = ("weight", "bias") if arch.norm_bias else ("weight",)
    shapes: dict[str, tuple[int, ...]] = {
        f"{name}.{ending}": (arch.dim,) for name in block_norms(arch) for ending in endings
    }
    for name, rows, columns, bias in matrices:
        shapes[f"{name}.weight"] = (rows, columns)
        if bias:
            shapes[f"{name}.bias"] = (rows,)
    if arch.qk_norm:
        for name, heads in (("q_norm", arch.n_heads), ("k_norm", arch.n_kv_heads)):
            shapes[f"attention.{name}.weight"] = (qk_norm_width(arch, heads),)
    if arch.latent is not None:
        shapes["attention.kv_norm.weight"] = (arch.latent.kv_rank,)
    if arch.latent is not None and arch.latent.q_rank is not None:
        shapes["attention.q_norm.weight"] = (arch.latent.q_rank,)
    if arch.sinks:
        shapes["attention.sinks"] = (arch.n_heads,)
    return shapes if moe is None else {**shapes, **_expert_shapes(arch, moe)}


def block_norms(arch: Architecture) -> list[str]:
    """The names of a block's norms: those of its parts' inputs, and those of their outputs."""
    before = ["attention_norm"] if arch.parallel_block else ["attention_norm", "ffn_norm"]
    after = ["attention_post_norm", "ffn_post_norm"]
    return {"before": before, "after": after, "both": before + after}[arch.norm_places]


def qk_norm_width(arch: Architecture, heads: int) -> int:
    """How many weights a norm of this many query or key heads has."""
    return arch.head_dim if arch.qk_norm_over == "head" else heads * arch.head_dim


def _attention_matrices(arch: Architecture) -> list[tuple[str, int, int, bool]]:
    """(name, rows, columns, whether it has a bias) of each projection."""
    heads, kv = arch.n_heads * arch.head_dim, arch.n_kv_heads * arch.head_dim
    back = ("attention.wo", arch.dim, arch.n_heads * arch.v_dim, arch.out_bias)
    if arch.latent is None:
        return [
            ("attention.wq", heads, arch.dim, arch.qkv_bias),
            ("attention.wk", kv, arch.dim, arch.qkv_bias),
            ("attention.wv", kv, arch.dim, arch.qkv_bias),
            back,
        ]
    sizes = arch.latent
    queries = [("attention.wq", heads, arch.dim, False)]
    if sizes.q_rank is not None:
        queries = [("attention.wq_a", sizes.q_rank, arch.dim, False), ("attention.wq_b", heads, sizes.q_rank, False)]
    return [
        *queries,
        ("attention.wkv_a", sizes.kv_rank + sizes.rope_dim, arch.dim, False),
        ("attention.wkv_b", arch.n_heads * (sizes.nope_dim + sizes.v_dim), sizes.kv_rank, False),
        back,
    ]


def _expert_shapes(arch: Architecture, moe: MixtureOfExperts) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"moe.router.gate.weight": (moe.n_experts, arch.dim)}
    if moe.router_bias:
        shapes["moe.router.gate.bias"] = (moe.n_experts,)
    if moe.balance_coeff:
        shapes["moe.router.balance"] = (moe.n_experts,)
    into, back = (moe.n_experts, moe.expert_dim, arch.dim), (moe.n_experts, arch.dim, moe.expert_dim)
    for name, shape in (("w1", into), ("w3", into), ("w2", back)):
        shapes[f"moe.experts.{name}.weight"] = shape
        if arch.mlp_bias:
            shapes[f"moe.experts.{name}.bias"] = shape[:-1]
    return shapes


def is_halved(name: str) -> bool:
    return bool(_halves(name))


def _halves(name: str) -> list[str]:
    """The logical names in the fused weight or bias of experts; empty for any other parameter."""
    if is_low_rank(name):
        return []
    return [name.replace(".w13.", half) for half in (".w1.", ".w3.")] if ".experts.w13." in name else []


def fused_runs(arch: Architecture, name: str) -> dict[str, int]:
    """The logical names in a fused parameter, and how many rows each has in a group; empty for any other parameter."""
    if is_low_rank(name):
        return {low_rank_name(name): 1}
    if arch.foreign is not None:
        return {}
    head, block = arch.head_dim, gate_block(arch.ffn_dim)
    shared = gate_block(0 if arch.moe is None else arch.moe.shared_dim)
    kinds = {
        "attention.wqkv": {"wq": arch.n_heads // arch.n_kv_heads * head, "wk": head, "wv": head},
        "attention.wkv": {"wk": head, "wv": head},  # beside a separate wq, where more ranks than KV heads share them
        "feed_forward.w13": {"w1": block, "w3": block},
        "shared_experts.w13": {"w1": shared, "w3": shared},
    }
    for kind, runs in kinds.items():
        if f".{kind}." in f".{name}":
            stem, _, ending = name.rsplit(".", 2)
            return {f"{stem}.{part}.{ending}": rows for part, rows in runs.items()}
    return {}
