"""A small decoder as TorchTitan has it, written down independently: its names, and rotations of neighbouring pairs.

    python -m tests.unit.checkpoint.titan FOLDER RANK RANKS

writes the weights of one of several ranks with torch.distributed.checkpoint.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

DIM, HEADS, KV_HEADS, HEAD_DIM, FFN, VOCAB, LAYERS, THETA, EPS = 48, 6, 2, 10, 56, 77, 3, 7000.0, 1e-4
EXPERTS, TOP_K, WIDTH = 6, 2, 20


class Attention(nn.Module):
    def __init__(self, qk_norm: bool) -> None:
        super().__init__()
        self.wq = nn.Linear(DIM, HEADS * HEAD_DIM, bias=False)
        self.wk = nn.Linear(DIM, KV_HEADS * HEAD_DIM, bias=False)
        self.wv = nn.Linear(DIM, KV_HEADS * HEAD_DIM, bias=False)
        self.wo = nn.Linear(HEADS * HEAD_DIM, DIM, bias=False)
        self.qk_norm = qk_norm
        if qk_norm:
            self.q_norm, self.k_norm = nn.RMSNorm(HEAD_DIM, eps=EPS), nn.RMSNorm(HEAD_DIM, eps=EPS)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (layer(x).view(batch, length, -1, HEAD_DIM) for layer in (self.wq, self.wk, self.wv))
        if self.qk_norm:
            q, k = turn_halves(self.q_norm(q)), turn_halves(self.k_norm(k))
        else:
            q, k = turn_pairs(q), turn_pairs(k)
        k, v = (each.repeat_interleave(HEADS // KV_HEADS, dim=2) for each in (k, v))
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / HEAD_DIM**0.5
        scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), float("-inf"))
        return self.wo(torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v).flatten(2))


def angles(length: int) -> Tensor:
    frequencies = THETA ** (-torch.arange(0, HEAD_DIM, 2).double() / HEAD_DIM)
    return torch.arange(length).double()[:, None] * frequencies  # (S, D/2)


def turn_pairs(x: Tensor) -> Tensor:
    """Llama: (x[2i], x[2i + 1]) is a complex number, multiplied by e^(i angle)."""
    turns = torch.polar(torch.ones(x.shape[1], HEAD_DIM // 2).double(), angles(x.shape[1]))[:, None]
    numbers = torch.view_as_complex(x.double().unflatten(-1, (-1, 2)))
    return torch.view_as_real(numbers * turns).flatten(-2).float()


def turn_halves(x: Tensor) -> Tensor:
    """Qwen3: x[i] turns with x[i + D/2]."""
    cos, sin = angles(x.shape[1]).cos()[:, None], angles(x.shape[1]).sin()[:, None]
    a, b = x.double().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).float()


class FeedForward(nn.Module):
    def __init__(self, width: int = FFN) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(DIM, width, bias=False), nn.Linear(DIM, width, bias=False)
        self.w2 = nn.Linear(width, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Experts(nn.Module):
    """The weights of all experts are three tensors without `.weight`."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Parameter(torch.randn(EXPERTS, WIDTH, DIM) * 0.1) for _ in range(2))
        self.w2 = nn.Parameter(torch.randn(EXPERTS, DIM, WIDTH) * 0.1)


class Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(DIM, EXPERTS, bias=False)


class MoE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts, self.router, self.shared_experts = Experts(), Router(), FeedForward(2 * WIDTH)
        self.register_buffer("expert_bias", torch.linspace(-0.4, 0.4, EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router.gate(x).softmax(-1)
        chosen = (scores + self.expert_bias).topk(TOP_K, dim=-1).indices  # the bias only chooses
        weights = torch.zeros_like(scores).scatter(-1, chosen, scores.gather(-1, chosen))
        weights = weights / weights.sum(-1, keepdim=True)
        out = self.shared_experts(x)
        for expert in range(EXPERTS):
            w1, w2, w3 = (getattr(self.experts, name)[expert] for name in ("w1", "w2", "w3"))
            out = out + weights[..., expert, None] * (F.silu(x @ w1.T) * (x @ w3.T) @ w2.T)
        return out


class Block(nn.Module):
    def __init__(self, qk_norm: bool, experts: bool) -> None:
        super().__init__()
        self.attention = Attention(qk_norm)
        if experts:
            self.moe = MoE()
        else:
            self.feed_forward = FeedForward()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(DIM, eps=EPS), nn.RMSNorm(DIM, eps=EPS)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        after = self.moe if hasattr(self, "moe") else self.feed_forward
        return x + after(self.ffn_norm(x))


class Titan(nn.Module):
    """With `experts`, all layers but the first one have them."""

    def __init__(self, qk_norm: bool = False, experts: bool = False) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.tok_embeddings = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleDict({str(layer): Block(qk_norm, experts and layer > 0) for layer in range(LAYERS)})
        self.norm = nn.RMSNorm(DIM, eps=EPS)
        self.output = nn.Linear(DIM, VOCAB, bias=False)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.2)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            x = layer(x)
        return self.output(self.norm(x))


def full_state(model: nn.Module, prefix: str = "") -> dict[str, Any]:
    """Weights and what else a full checkpoint of TorchTitan holds."""
    weights = {prefix + name: tensor for name, tensor in model.state_dict().items()}
    moments = {f"optimizer.state.{name}.exp_avg": torch.ones_like(tensor) for name, tensor in weights.items()}
    return {**weights, **moments, "train_state": {"step": 7, "ntokens_seen": 99}, "dataloader": {"dp_rank_0": b"x"}}


def main(folder: str, rank: str, ranks: str) -> None:
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    os.environ.update(RANK=rank, WORLD_SIZE=ranks)
    dist.init_process_group("gloo", init_method=f"file://{folder}.meet", rank=int(rank), world_size=int(ranks))
    mesh, state = init_device_mesh("cpu", (int(ranks),)), full_state(Titan())
    for name, value in state.items():
        if isinstance(value, Tensor):  # rows (77 and 48 among them), columns and replicas
            cut = Shard(1) if name.endswith(("wo.weight", "w2.weight")) else Shard(0)
            state[name] = distribute_tensor(value, mesh, [Replicate() if "norm" in name else cut])
    dcp.save(state, checkpoint_id=folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
