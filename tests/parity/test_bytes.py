"""Bytes sent per rank and step, counted where collectives are issued, against closed forms.

Letters: T tokens of a data rank's micro-batch, M = T x dim x 4 bytes (the activations of all T tokens in float32),
P bytes of parameters, n ranks of the axis, ring(n) = (n - 1) / n: what a rank sends of a tensor that is gathered or
scattered; a sum sends twice that.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from shardline.config.architecture import Architecture
from shardline.config.load import load_config
from shardline.models.flavors import resolve
from shardline.models.fused_weights import logical_shapes, parameter_count
from tests.parity.cases import (
    ALLGATHER,
    ASYNC,
    BIASES,
    CHUNKS,
    COMPILE,
    EVERY_MICRO_BATCH,
    FLOAT8_GATHER,
    FULL_AC,
    MUON,
    NEVER,
    NO_LOSS_PARALLEL,
    NO_SEQUENCE,
    OP_AC,
    QK_NORM,
    RING,
    SCATTER,
    SHARED_FACTORS,
    SMALL_BATCHES,
    SMALL_BUCKETS,
    TENSORWISE,
    TIED,
    ULYSSES,
    Case,
    case,
)
from tests.parity.harness import BASE, GLOBAL_BATCH, MODEL, Harness, Result

FLOAT = 4  # bytes
STEPS = {"training.steps": 2}


@dataclass(frozen=True)
class Sizes:
    """What the closed forms are made of."""

    arch: Architecture
    tokens: int  # T
    micro_batches: int

    @property
    def activations(self) -> int:  # M
        return self.tokens * self.arch.dim * FLOAT

    @property
    def all(self) -> int:  # P
        return parameter_count(self.arch) * FLOAT

    @property
    def blocks(self) -> int:
        return sum(math.prod(s) for name, s in logical_shapes(self.arch).items() if name.startswith("layers.")) * FLOAT

    @property
    def root(self) -> int:
        return self.all - self.blocks

    @property
    def norms(self) -> int:
        return (2 * self.arch.n_layers + 1) * self.arch.dim * FLOAT


def sizes(overrides: Mapping[str, Any]) -> Sizes:
    settings = {**BASE, **overrides, "model.overrides": MODEL | overrides.get("model.overrides", {})}
    data_ranks = overrides["parallelism.data_parallel_replicate_degree"]
    data_ranks *= overrides["parallelism.data_parallel_shard_degree"]
    local = overrides.get("training.local_batch_size", GLOBAL_BATCH // data_ranks)
    arch = resolve(load_config(overrides=settings).model)
    return Sizes(arch, local * settings["training.seq_len"], GLOBAL_BATCH // data_ranks // local)


def ring(ranks: int) -> float:
    return (ranks - 1) / ranks


def sent(harness: Harness, entry: Case) -> dict[str, int]:
    """Bytes of a step; each step sends the same."""
    result: Result = harness.run(entry.overrides | STEPS, entry.ranks)
    first, second = result.comm_bytes
    assert first == second
    return first


# ---- tensor parallel -------------------------------------------------------------------------------------------------


def tensor_parallel_bytes(s: Sizes, n: int, extra_collectives: int = 0) -> float:
    """Per block two gathers and two scatters forward and as many backward; the same once around embedding and head.

    The loss sums a maximum and two numbers per token; norm weights' gradients are summed once a step.
    """
    passes = 8 * s.arch.n_layers + 4 + extra_collectives
    per_token = 3 * s.tokens * FLOAT
    return ring(n) * (s.micro_batches * (passes * s.activations + 2 * per_token) + 2 * s.norms)


@pytest.mark.parametrize("n", [2, 4])
def test_tensor_parallel(harness: Harness, n: int) -> None:
    entry = case("", tp=n)
    counted = sent(harness, entry)
    assert counted["tp"] == tensor_parallel_bytes(sizes(entry.overrides), n)
    assert set(counted) == {"tp", "world"}


@pytest.mark.parametrize(
    "change",
    [TIED, *(pytest.param(one, marks=pytest.mark.slow) for one in (CHUNKS, SMALL_BATCHES)), COMPILE],
    ids=["tied", "chunks", "accumulation", "compile"],
)
def test_tensor_parallel_is_the_same_with(harness: Harness, change: dict[str, Any]) -> None:
    """Sharing the embedding, cutting the loss into chunks and compiling send nothing more; micro-batches add up."""
    entry = case("", change, tp=2)
    assert sent(harness, entry)["tp"] == tensor_parallel_bytes(sizes(entry.overrides), 2)


def test_tensor_parallel_with_biases_sums_their_gradients_too(harness: Harness) -> None:
    """Biases after a sum (wo, w2) and the norms of queries and keys are whole on every rank."""
    entry = case("", BIASES, QK_NORM, tp=2)
    s = sizes(entry.overrides)
    whole = s.arch.n_layers * 2 * (s.arch.dim + s.arch.head_dim) * FLOAT
    assert sent(harness, entry)["tp"] == tensor_parallel_bytes(s, 2) + 2 * ring(2) * whole


def test_without_sequence_parallel_the_bytes_are_those_of_all_reduces(harness: Harness) -> None:
    """A sum is a scatter and a gather; norm weights' gradients are whole already."""
    entry = case("", NO_SEQUENCE, tp=2)
    s = sizes(entry.overrides)
    assert sent(harness, entry)["tp"] == tensor_parallel_bytes(s, 2) - 2 * ring(2) * s.norms


def test_without_loss_parallel_the_head_is_whole(harness: Harness) -> None:
    """No gather before the head and nothing per token; the whole head's gradient is summed instead."""
    entry = case("", NO_LOSS_PARALLEL, tp=2)
    s = sizes(entry.overrides)
    head = s.arch.vocab_size * s.arch.dim * FLOAT
    expected = ring(2) * ((8 * s.arch.n_layers + 2) * s.activations + 2 * (s.norms + head))
    assert sent(harness, entry)["tp"] == expected


@pytest.mark.parametrize(("early_stop", "again"), [(False, 4), (True, 3)])
def test_full_checkpointing_gathers_again(harness: Harness, early_stop: bool, again: int) -> None:
    """Recomputing a block repeats its collectives; stopping early leaves out the last, which backward does not need."""
    entry = case("", FULL_AC, {"activation_checkpoint.early_stop": early_stop}, tp=2)
    s = sizes(entry.overrides)
    assert sent(harness, entry)["tp"] == tensor_parallel_bytes(s, 2, extra_collectives=again * s.arch.n_layers)


@pytest.mark.parametrize(
    "change", [{}, ASYNC, pytest.param(COMPILE, marks=pytest.mark.slow)], ids=["serial", "async", "compile"]
)
def test_tensor_parallel_in_float8_gathers_bytes(harness: Harness, change: dict[str, Any]) -> None:
    """Of the eight passes of a block four are gathers, of rows with one byte a number and 16 for the factor."""
    entry = case("", TENSORWISE, change, tp=2)
    s = sizes(entry.overrides)
    gathers = 4 * s.arch.n_layers
    in_float8 = gathers * s.tokens * (s.arch.dim + 16)
    assert sent(harness, entry)["tp"] == tensor_parallel_bytes(s, 2, -gathers) + ring(2) * in_float8


# ---- data parallel ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [2, 4])
def test_replicas_sum_every_gradient_once(harness: Harness, n: int) -> None:
    entry = case("", ddp=n)
    counted = sent(harness, entry)
    assert counted["dp_replicate"] == 2 * ring(n) * sizes(entry.overrides).all
    assert set(counted) == {"dp_replicate", "loss", "world"}


@pytest.mark.parametrize(
    ("change", "sums"),
    [(SMALL_BUCKETS, 1), (SMALL_BATCHES, 1), (SMALL_BATCHES | EVERY_MICRO_BATCH, 4)],
    ids=["buckets", "accumulation", "every-micro-batch"],
)
def test_replicas_sum_as_often_as_asked(harness: Harness, change: dict[str, Any], sums: int) -> None:
    entry = case("", change, ddp=2)
    assert sent(harness, entry)["dp_replicate"] == sums * 2 * ring(2) * sizes(entry.overrides).all


def shard_bytes(s: Sizes, n: int, gathers: int, scatters: int) -> float:
    """Blocks are gathered `gathers` times a micro-batch, the rest once; gradients scattered `scatters` times a step."""
    return ring(n) * (s.micro_batches * (gathers * s.blocks + s.root) + scatters * s.all)


@pytest.mark.parametrize(
    ("change", "gathers", "scatters"),
    [
        ({}, 2, 1),
        (NEVER, 1, 1),
        (SMALL_BATCHES, 2, 1),
        (SMALL_BATCHES | EVERY_MICRO_BATCH, 2, 4),
    ],
    ids=["default", "never", "accumulation", "every-micro-batch"],
)
def test_shards(harness: Harness, change: dict[str, Any], gathers: int, scatters: int) -> None:
    entry = case("", change, fsdp=2)
    counted = sent(harness, entry)
    assert counted["dp_shard"] == shard_bytes(sizes(entry.overrides), 2, gathers, scatters)
    assert set(counted) == {"dp_shard", "loss", "world"}


def test_shards_that_are_never_freed_are_gathered_once_a_step(harness: Harness) -> None:
    entry = case("", NEVER, SMALL_BATCHES, fsdp=2)
    assert sent(harness, entry)["dp_shard"] == ring(2) * 2 * sizes(entry.overrides).all


def test_shards_over_four_ranks(harness: Harness) -> None:
    entry = case("", fsdp=4)
    assert sent(harness, entry)["dp_shard"] == shard_bytes(sizes(entry.overrides), 4, 2, 1)


@pytest.mark.parametrize("change", [{}, SHARED_FACTORS], ids=["own-factors", "shared-factors"])
def test_weights_gathered_in_float8(harness: Harness, change: dict[str, Any]) -> None:
    """The matrices of blocks travel with a byte for each number and a factor for each shard, gradients as before."""
    entry = case("", TENSORWISE, FLOAT8_GATHER, change, fsdp=2)
    s = sizes(entry.overrides)
    matrices, norms, count = s.blocks // FLOAT - 2 * s.arch.n_layers * s.arch.dim, s.norms, 4 * s.arch.n_layers
    of_blocks = matrices + 2 * count * FLOAT + norms - s.arch.dim * FLOAT
    counted = sent(harness, entry)
    assert counted["dp_shard"] == ring(2) * (2 * of_blocks + s.root + s.all)
    assert counted.get("fsdp", 0) == (2 * ring(2) * count * FLOAT if change else 0)  # the largest number of each


@pytest.mark.parametrize(
    ("change", "scatters", "sums"),
    [
        ({}, 1, 1),
        pytest.param(SMALL_BATCHES, 1, 1, marks=pytest.mark.slow),
        pytest.param(SMALL_BATCHES | EVERY_MICRO_BATCH, 2, 2, marks=pytest.mark.slow),
        (SMALL_BATCHES | SCATTER, 2, 1),
    ],
    ids=["default", "accumulation", "every-micro-batch", "scatter"],
)
def test_shards_in_replicas(harness: Harness, change: dict[str, Any], scatters: int, sums: int) -> None:
    """Between replicas a rank sums only its own shard: half of the parameters here."""
    entry = case("", change, ddp=2, fsdp=2)
    s = sizes(entry.overrides)
    counted = sent(harness, entry)
    assert counted["dp_shard"] == shard_bytes(s, 2, 2, scatters)
    assert counted["dp_replicate"] == sums * 2 * ring(2) * s.all / 2


def test_tensor_parallel_halves_what_shards_exchange(harness: Harness) -> None:
    """Each tp rank's shards are of its half of the matrices; norm weights are whole. Its own bytes stay as they are."""
    entry = case("", fsdp=2, tp=2)
    s = sizes(entry.overrides)
    counted = sent(harness, entry)
    block_norms, final_norm = s.norms - s.arch.dim * FLOAT, s.arch.dim * FLOAT
    blocks, root = (s.blocks + block_norms) / 2, (s.root + final_norm) / 2
    assert counted["dp_shard"] == ring(2) * (2 * blocks + root + blocks + root)
    # Gradients of norm weights are shards when they are summed over tp.
    assert counted["tp"] == tensor_parallel_bytes(s, 2) - ring(2) * s.norms


def matrices(s: Sizes) -> int:
    shapes = {name: shape for name, shape in logical_shapes(s.arch).items() if name.startswith("layers.")}
    return sum(math.prod(shape) for shape in shapes.values() if len(shape) == 2) * FLOAT


def test_muon_sends_every_matrix_to_its_owner_and_back(harness: Harness) -> None:
    """Half of the other rank's matrices in, half of the own ones back: together half of all of them."""
    entry = case("", MUON, fsdp=2)
    s = sizes(entry.overrides)
    assert sent(harness, entry)["dp_shard"] == shard_bytes(s, 2, 2, 1) + matrices(s) / 2


def test_muon_shares_out_the_matrices_of_replicas(harness: Harness) -> None:
    """Nothing travels in; each rank sends the other what it has computed, which is a half of all."""
    entry = case("", MUON, ddp=2)
    s = sizes(entry.overrides)
    sums = 2 * ring(2) * s.all
    assert sent(harness, entry)["dp_replicate"] - sums == pytest.approx(matrices(s) / 2, rel=0.1)


# ---- context parallel ------------------------------------------------------------------------------------------------


def ring_bytes(s: Sizes, n: int, forwards: int = 1) -> float:
    """Rank 0's: its first slice to every other rank in forward and backward, gradients of both slices of each of them.

    The other ranks' are in test_context.py.
    """
    slice_bytes = 2 * s.tokens // (2 * n) * s.arch.n_kv_heads * s.arch.head_dim * FLOAT
    return s.arch.n_layers * s.micro_batches * (n - 1) * slice_bytes * (forwards + 1 + 2)


@pytest.mark.parametrize("n", [2, 4])
def test_ring(harness: Harness, n: int) -> None:
    """Parameters are sharded over the same ranks, which counts as dp_shard."""
    entry = case("", RING, cp=n)
    s = sizes(entry.overrides)
    counted = sent(harness, entry)
    assert counted["cp"] == ring_bytes(s, n)
    assert counted["dp_shard"] == shard_bytes(s, n, 2, 1)
    assert set(counted) == {"cp", "dp_shard", "loss", "world"}


@pytest.mark.parametrize(
    ("change", "forwards"),
    [
        pytest.param(SMALL_BATCHES, 1, marks=pytest.mark.slow),
        pytest.param(TIED, 1, marks=pytest.mark.slow),
        (FULL_AC, 2),
        (OP_AC, 1),
        pytest.param(COMPILE, 1, marks=pytest.mark.slow),
    ],
    ids=["accumulation", "tied", "full-ac", "op-ac", "compile"],
)
def test_ring_with(harness: Harness, change: dict[str, Any], forwards: int) -> None:
    """Recomputing a whole block sends its keys again; recomputing around attention does not."""
    entry = case("", RING, change, cp=2)
    assert sent(harness, entry)["cp"] == ring_bytes(sizes(entry.overrides), 2, forwards)


def test_gathered_keys(harness: Harness) -> None:
    """Keys and values are gathered forward and backward, their gradients sent back once."""
    entry = case("", ALLGATHER, cp=4)
    s = sizes(entry.overrides)
    block = 2 * s.tokens * s.arch.n_kv_heads * s.arch.head_dim * FLOAT
    assert sent(harness, entry)["cp"] == s.arch.n_layers * 3 * ring(4) * block


def test_heads_for_tokens(harness: Harness) -> None:
    """q, k, v and the output, forward and backward."""
    entry = case("", ULYSSES, cp=4)
    s = sizes(entry.overrides)
    heads = 2 * s.arch.n_heads + 2 * s.arch.n_kv_heads
    moved = s.tokens / 4 * heads * s.arch.head_dim * FLOAT
    assert sent(harness, entry)["cp"] == s.arch.n_layers * 2 * ring(4) * moved


def test_tensor_parallel_ranks_pass_on_their_own_heads(harness: Harness) -> None:
    """Half of the heads on each tp rank, and half of the tokens between them."""
    entry = case("", RING, cp=2, tp=2)
    s = sizes(entry.overrides)
    counted = sent(harness, entry)
    assert counted["cp"] == ring_bytes(s, 2) / 2
    # Gradients of norm weights are shards when they are summed over tp.
    half = Sizes(s.arch, s.tokens // 2, s.micro_batches)
    assert counted["tp"] == tensor_parallel_bytes(half, 2) - ring(2) * s.norms
