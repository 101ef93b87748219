"""Where a Hugging Face folder keeps each logical tensor: a table of names for every family.

Most logical tensors are one stored tensor under another name. A tensor of experts (E, rows, columns) is not:

    one for each expert    mlp.experts.0.gate_proj.weight (rows, columns), mlp.experts.1..., ...
    gate and up fused      experts.gate_up_proj (E, columns, 2 rows), an expert's matrix transposed:
                           | gate | up |  or, alternating,  | gate 0 | up 0 | gate 1 | up 1 | ...

Matrices of a layer may be joined by rows, too: qkv_proj is | wq | wk | wv |, gate_up_proj | w1 | w3 |.

`_NAMES` says which family has what, for both directions.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

OUTSIDE = {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "norm.bias": "model.norm.bias",
    "output.weight": "lm_head.weight",
}


class Stored(NamedTuple):
    """How a logical tensor lies in a folder."""

    name: str  # with `{}` for the number of the expert where each has a tensor of its own
    half: int | None = None  # which half of a tensor that holds gate (0) and up (1)
    alternating: bool = False  # gate and up take turns; otherwise all of gate comes first
    transposed: bool = False  # the matrix of an expert has its columns first
    joined: tuple[str, ...] = ()  # logical tensors whose rows it holds, one after the other
    by_head: bool = False  # two dimensions, heads and head_dim, in place of one

    @property
    def each(self) -> bool:
        return "{}" in self.name

    def names(self, experts: int) -> list[str]:
        return [self.name.replace("{}", str(expert)) for expert in range(experts)] if self.each else [self.name]

    def shape(self, logical: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of a stored tensor."""
        if self.each:
            return logical[1:]
        joined = logical if self.half is None else (logical[0], 2 * logical[1], *logical[2:])
        return (joined[0], joined[2], joined[1]) if self.transposed else joined

    def take(self, tensor: Tensor) -> Tensor:
        """The logical tensor, or some experts of it, as a view of the stored one."""
        if self.transposed:
            tensor = tensor.transpose(1, 2)
        if self.half is None:
            return tensor
        if self.alternating:
            return tensor.unflatten(1, (-1, 2)).select(2, self.half)
        return tensor.unflatten(1, (2, -1)).select(1, self.half)

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """The stored tensor, or some experts of it, from the logical ones that it holds: the inverse of `take`."""
        tensor = parts[0]
        if self.half is not None:
            tensor = torch.stack(list(parts), dim=2 if self.alternating else 1).flatten(1, 2)
        return tensor.transpose(1, 2) if self.transposed else tensor


def _each(place: str, w1: str, w2: str, w3: str) -> dict[str, str | Stored]:
    """Every expert has three matrices under `place`."""
    names = {"w1": w1, "w2": w2, "w3": w3}
    return {f"moe.experts.{ours}.weight": Stored(f"{place}.{{}}.{theirs}.weight") for ours, theirs in names.items()}


def _fused(place: str, alternating: bool) -> dict[str, str | Stored]:
    """Two tensors under `place` hold all experts, two more their biases."""
    names: dict[str, str | Stored] = {}
    for ending, suffix, transposed in ((".weight", "", True), (".bias", "_bias", False)):
        for half, part in enumerate(("w1", "w3")):
            stored = Stored(f"{place}.gate_up_proj{suffix}", half, alternating, transposed)
            names[f"moe.experts.{part}{ending}"] = stored
        names[f"moe.experts.w2{ending}"] = Stored(f"{place}.down_proj{suffix}", transposed=transposed)
    return names


def _joined(theirs: str, place: str, *ours: str) -> dict[str, str | Stored]:
    """Matrices of a layer, and their biases, that are one stored tensor."""
    return {
        f"{place}.{name}.{ending}": Stored(
            f"{theirs}.{ending}", joined=tuple(f"{place}.{other}.{ending}" for other in ours)
        )
        for name in ours
        for ending in ("weight", "bias")
    }


def _gated(ours: str, theirs: str) -> dict[str, str | Stored]:
    return {f"{ours}.w1": f"{theirs}.gate_proj", f"{ours}.w2": f"{theirs}.down_proj", f"{ours}.w3": f"{theirs}.up_proj"}


# Names within a layer, of modules (str) and of single tensors: those of every family, and what a family has besides.
_COMMON: dict[str, str | Stored] = {
    "attention_norm": "input_layernorm",
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    **_gated("feed_forward", "mlp"),
}
_DEEPSEEK: dict[str, str | Stored] = {
    "attention.wq_a": "self_attn.q_a_proj",
    "attention.q_norm": "self_attn.q_a_layernorm",
    "attention.wq_b": "self_attn.q_b_proj",
    "attention.wkv_a": "self_attn.kv_a_proj_with_mqa",
    "attention.kv_norm": "self_attn.kv_a_layernorm",
    "attention.wkv_b": "self_attn.kv_b_proj",
    "moe.router.gate": "mlp.gate",
    **_gated("moe.shared_experts", "mlp.shared_experts"),
    **_each("mlp.experts", "gate_proj", "down_proj", "up_proj"),
}
_BOTH_NORMS: dict[str, str | Stored] = {
    "attention_post_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "ffn_post_norm": "post_feedforward_layernorm",
}
_JOINED_GATE = _joined("mlp.gate_up_proj", "feed_forward", "w1", "w3")
_NAMES: dict[str, dict[str, str | Stored]] = {
    "mixtral": {"moe.router.gate": "block_sparse_moe.gate", **_each("block_sparse_moe.experts", "w1", "w2", "w3")},
    "qwen3_moe": {"moe.router.gate": "mlp.gate", **_each("mlp.experts", "gate_proj", "down_proj", "up_proj")},
    "deepseek_v2": _DEEPSEEK,
    "deepseek_v3": {**_DEEPSEEK, "moe.router.balance": Stored("mlp.gate.e_score_correction_bias")},
    "llama4_text": {
        **_gated("feed_forward", "feed_forward"),
        "moe.router.gate": "feed_forward.router",
        **_gated("moe.shared_experts", "feed_forward.shared_expert"),
        **_fused("feed_forward.experts", alternating=False),
    },
    "gemma2": _BOTH_NORMS,
    "gemma3_text": _BOTH_NORMS,
    "phi3": {**_joined("self_attn.qkv_proj", "attention", "wq", "wk", "wv"), **_JOINED_GATE},
    "olmo2": _BOTH_NORMS,
    "olmo3": _BOTH_NORMS,
    "glm": _JOINED_GATE,
    "glm4": {
        "attention_post_norm": "post_self_attn_layernorm",
        "ffn_post_norm": "post_mlp_layernorm",
        **_JOINED_GATE,
    },
    "starcoder2": {"feed_forward.w1": "mlp.c_fc", "feed_forward.w2": "mlp.c_proj"},
    "cohere": {
        "attention.q_norm.weight": Stored("self_attn.q_norm.weight", by_head=True),
        "attention.k_norm.weight": Stored("self_attn.k_norm.weight", by_head=True),
    },
    "gpt_oss": {
        "attention.sinks": Stored("self_attn.sinks"),
        "moe.router.gate": "mlp.router",
        **_fused("mlp.experts", alternating=True),
    },
}
_LAYER = re.compile(r"layers\.(\d+)\.(.+)")


def stored_as(name: str, family: str) -> Stored | None:
    """How the model of a family stores a logical tensor; None if it has no such tensor."""
    if name in OUTSIDE:
        return Stored(OUTSIDE[name])
    layer = _LAYER.fullmatch(name)
    if layer is None:
        return None
    names, place = {**_COMMON, **_NAMES.get(family, {})}, f"model.layers.{layer[1]}."
    module, _, ending = layer[2].rpartition(".")
    tensor, renamed = names.get(layer[2]), names.get(module)
    if isinstance(tensor, Stored):
        joined = tuple(f"layers.{layer[1]}.{other}" for other in tensor.joined)
        return tensor._replace(name=place + tensor.name, joined=joined)
    if isinstance(renamed, str) and ending in ("weight", "bias"):
        return Stored(f"{place}{renamed}.{ending}")
    return None


def is_logical(name: str) -> bool:
    """Whether the model of any family has a logical tensor of this name."""
    return any(stored_as(name, family) for family in ("llama", *_NAMES))
