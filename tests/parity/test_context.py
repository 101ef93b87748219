"""Attention over ranks that share sequences: PyTorch's over the whole sequence, and bytes of the closed form."""

from __future__ import annotations

import random
import time
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from shardline.comm import collectives
from shardline.comm.job import job
from shardline.comm.transfers import Exchange
from shardline.config.architecture import Architecture
from shardline.config.load import load_config
from shardline.models.attention import attention
from shardline.models.flavors import resolve
from shardline.parallel.context.context import ContextParallel
from shardline.parallel.context.slices import Slices
from tests.parity.harness import DEVICE
from tests.parity.pool import Pool

BATCH, LENGTH, HEADS, KV_HEADS, DIM = 2, 48, 12, 6, 8
MASKS = ("causal", "window", "documents", "window and documents")
METHODS = [("ring", 2), ("ring", 1), ("allgather", 2), ("allgather", 1), ("ulysses", 1)]
DOUBLE = 8  # bytes


def join_cp() -> tuple[int, int]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    job.set_axes({name: collectives.Axis(name, dist.group.WORLD, ranks, rank) for name in ("cp", "world")})
    return rank, ranks


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def packed() -> Tensor:
    """Documents of which one covers several ranks, some lie inside one, and some cross from one to the next."""
    first = torch.zeros(BATCH, LENGTH, dtype=torch.int32)
    first[0, [5, 6, 19, 40]] = 1
    first[1, [1, 47]] = 1
    return first.cumsum(1).to(torch.int32)


def architecture(mask: str) -> Architecture:
    overrides = {"n_heads": HEADS, "n_kv_heads": KV_HEADS, "head_dim": DIM, "dim": 96, "n_layers": 1}
    if "window" in mask:
        overrides["sliding_window"] = 13
    if "documents" in mask:
        overrides["attn_mask_type"] = "block_causal"
    return resolve(load_config(overrides={"model.flavor": "debugmodel", "model.overrides": overrides}).model)


def whole(mask: str) -> tuple[list[Tensor], Tensor]:
    """q, k, v with their gradients, and the output, by PyTorch in one process."""
    q, k, v = (drawn(BATCH, LENGTH, h, DIM, seed=s).requires_grad_() for s, h in enumerate((HEADS, KV_HEADS, KV_HEADS)))
    places = torch.arange(LENGTH)
    seen = places[:, None] >= places[None, :]
    if "window" in mask:
        seen = seen & (places[:, None] - places[None, :] < 13)
    seen = seen[None].expand(BATCH, -1, -1)
    if "documents" in mask:
        seen = seen & (packed()[:, :, None] == packed()[:, None, :])
    heads = (x.transpose(1, 2) for x in (q, k.repeat_interleave(2, 2), v.repeat_interleave(2, 2)))
    out = F.scaled_dot_product_attention(*heads, attn_mask=seen[:, None].to(DEVICE)).transpose(1, 2)
    out.backward(drawn(BATCH, LENGTH, HEADS, DIM, seed=7))
    return [q, k, v], out.detach()


def attend(method: str, each: int, mask: str, slow: bool = False) -> tuple[float, dict[str, float]]:
    """The largest error of this rank's part of output and gradients, and the bytes it sent."""
    rank, ranks = join_cp()
    plan = ContextParallel(Slices(ranks, each), rank, method)
    places = plan.positions(LENGTH, torch.device(DEVICE))
    inputs, expected = whole(mask)
    q, k, v = (x.detach()[:, places].clone().requires_grad_() for x in inputs)
    tokens = torch.zeros(BATCH, LENGTH // ranks, dtype=torch.int64, device=DEVICE)
    masks = plan.masks(architecture(mask), tokens, q.dtype, packed())
    job.traffic.take()
    send = Exchange.swap

    def late(self: Exchange, *arguments: object) -> object:
        time.sleep(random.random() / 50)
        return send(self, *arguments)

    with patch.object(Exchange, "swap", late if slow else send):
        out = attention(q, k, v, masks[max(masks)])
        out.backward(drawn(BATCH, LENGTH, HEADS, DIM, seed=7)[:, places])
    sent = dict(job.traffic.bytes)
    pairs = [(out.detach(), expected[:, places])]
    pairs += [(mine.grad, x.grad[:, places]) for mine, x in zip((q, k, v), inputs, strict=True)]
    return max(float((a - b).norm() / b.norm()) for a, b in pairs), sent


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("method", "each"), METHODS)
@pytest.mark.parametrize("ranks", [2, 3])
def test_attention_is_that_of_one_process(pool: Pool, ranks: int, method: str, each: int, mask: str) -> None:
    assert max(error for error, _ in pool.run(ranks, attend, method, each, mask)) < 1e-12


@pytest.mark.parametrize("each", [1, 2])
def test_ranks_that_are_late_change_nothing(pool: Pool, each: int) -> None:
    """Transfers of forward and backward meet in any order: what belongs together is matched by rank and turn."""
    assert max(error for error, _ in pool.run(4, attend, "ring", each, "window and documents", True)) < 1e-12


# ---- bytes -----------------------------------------------------------------------------------------------------------

BLOCK = 2 * BATCH * LENGTH * KV_HEADS * DIM * DOUBLE  # keys and values of all ranks


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_ring_sends_slices_to_those_who_see_them(pool: Pool, ranks: int) -> None:
    """With headtail later ranks see the first slice of a rank, earlier ones both; gradients go the other way."""
    part = BLOCK / ranks / 2
    for rank, (_, sent) in enumerate(pool.run(ranks, attend, "ring", 2, "causal")):
        later, earlier = ranks - 1 - rank, rank
        keys = (later + 2 * earlier) * part  # forward, and again backward
        gradients = (2 * later + earlier) * part  # of the slices of others that this rank saw
        assert sent == {"cp": 2 * keys + gradients}


def test_in_one_piece_keys_go_to_later_ranks_alone(pool: Pool) -> None:
    part = BLOCK / 3
    found = [sent["cp"] for _, sent in pool.run(3, attend, "ring", 1, "causal")]
    assert found == [(2 * (2 - rank) + rank) * part for rank in range(3)]


def test_windows_and_documents_keep_keys_at_home(pool: Pool) -> None:
    """3 ranks in one piece of 16 tokens, a window of 13: each sends to the next alone."""
    part = BLOCK / 3
    found = [sent.get("cp", 0) for _, sent in pool.run(3, attend, "ring", 1, "window")]
    assert found == [2 * part, 2 * part + part, part]


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_gather_sends_everything_to_everybody(pool: Pool, ranks: int) -> None:
    """Twice the keys and values, once their gradients."""
    for _, sent in pool.run(ranks, attend, "allgather", 2, "documents"):
        assert sent == {"cp": 3 * (ranks - 1) * BLOCK / ranks}


@pytest.mark.parametrize("ranks", [2, 3])
def test_ulysses_sends_each_tensor_once(pool: Pool, ranks: int) -> None:
    """q, k, v and the output, forward and backward, each rank its share less what it keeps."""
    size = BATCH * LENGTH * (2 * HEADS + 2 * KV_HEADS) * DIM * DOUBLE / ranks
    for _, sent in pool.run(ranks, attend, "ulysses", 1, "documents"):
        assert sent["cp"] == pytest.approx(2 * (ranks - 1) / ranks * size)
