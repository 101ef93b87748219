"""Copies of the model are compared bit by bit, and who differs is named."""

from __future__ import annotations

import pytest
import torch

from shardline.comm.fake import fake_group
from shardline.comm.job import job
from shardline.comm.mesh import Mesh
from shardline.config.layout import Layout
from shardline.config.load import load_config
from shardline.errors import UserError
from shardline.models.dtensor import local
from shardline.models.flavors import resolve
from shardline.models.init import init_weights
from shardline.parallel.replica_check import CHUNK, check_replicas, fingerprint, replicated
from shardline.precision.mixed import choose_precision
from shardline.training.setup import build_model
from tests.parity.cases import BIASES, EXPERTS
from tests.parity.harness import MODEL
from tests.unit.parallel.test_data_parallel import ranks

CPU = torch.device("cpu")


def build(layout: Layout, **changes):
    config = load_config(overrides={"model.overrides": MODEL | changes})
    mesh = Mesh(layout, "cpu")
    model, _ = build_model(resolve(config.model), CPU, choose_precision(config, CPU, True), mesh, config)
    init_weights(model, 0)
    return model, mesh


def flip(tensor: torch.Tensor, index: int, bit: int) -> None:
    local(tensor).detach().view(-1).view(torch.int32)[index] ^= 1 << bit if bit < 31 else -(2**31)


def check_after_flip(layout: Layout, name: str, where: int | None):
    model, mesh = build(layout)
    if mesh.rank == where:
        flip(dict(model.named_parameters())[name], 3, 0)
    job.traffic.take()
    try:
        check_replicas(model, step=7)
    except UserError as error:
        return str(error)
    return job.traffic.take()


LAYOUTS = {
    "ddp": Layout(dp_replicate=4),
    "hsdp": Layout(dp_replicate=2, dp_shard=2),
    "fsdp-tp": Layout(dp_shard=2, tp=2),
    "ddp-tp": Layout(dp_replicate=2, tp=2),
}
CASES = [
    ("ddp", "layers.0.attention.wo.weight", 2, "layers.0.attention.wo.weight on rank 2."),
    ("ddp", "norm.weight", 0, "norm.weight on rank 0."),
    ("hsdp", "layers.1.feed_forward.w2.weight", 3, "layers.1.feed_forward.w2.weight between ranks 1, 3."),
    ("fsdp-tp", "layers.1.ffn_norm.weight", 1, "layers.1.ffn_norm.weight between ranks 0-1."),
    ("ddp-tp", "output.weight", 3, "output.weight between ranks 1, 3."),
]


@pytest.mark.parametrize(("layout", "name", "where", "text"), CASES)
def test_one_flipped_bit_is_found_and_named_on_every_rank(layout, name, where, text):
    messages = ranks().run(4, check_after_flip, LAYOUTS[layout], name, where)
    assert len(set(messages)) == 1
    assert messages[0].startswith(f"step 7: copies of the model differ: {text}")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_equal_copies_pass_and_cost_little(layout):
    for sent in ranks().run(4, check_after_flip, LAYOUTS[layout], "", None):
        assert sum(sent.values()) < 1000


def test_a_shard_of_its_own_is_compared_with_nobody():
    assert ranks().run(2, check_after_flip, Layout(dp_shard=2), "norm.weight", 1) == [{}, {}]


@pytest.mark.parametrize(
    ("layout", "over_tp"),
    [(Layout(dp_replicate=2, tp=2, ep=2), 0), (Layout(dp_replicate=2, dp_shard=2, tp=2, ep=2, etp=2), 2)],
)
def test_experts_are_compared_with_their_copies(layout, over_tp):
    """The axes of their mesh have other names."""
    with fake_group(0, layout.world_size):
        model, _ = build(layout, **EXPERTS["model.overrides"], **BIASES["model.overrides"])
        here = [name for name in replicated(model, "dp_replicate") if ".experts." in name]
        shared = [name for name in replicated(model, "tp") if ".experts." in name]
    assert len(here) == 4 * model.arch.n_layers  # two weights and two biases
    assert len(shared) == over_tp  # the biases of products back, one in each layer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8])
def test_every_bit_counts(dtype):
    torch.manual_seed(0)
    tensor = torch.randint(0, 255, (17,), dtype=torch.uint8) if dtype == torch.uint8 else torch.randn(17).to(dtype)
    before = fingerprint(tensor)
    raw = tensor.view(torch.uint8)
    for index in range(raw.numel()):
        for bit in range(8):
            raw[index] ^= 1 << bit
            assert fingerprint(tensor) != before
            raw[index] ^= 1 << bit
    assert fingerprint(tensor) == before


def test_order_counts_and_large_tensors_are_hashed_whole():
    tensor = torch.arange(CHUNK + 10, dtype=torch.float32)
    swapped = tensor.clone()
    swapped[[0, CHUNK + 5]] = tensor[[CHUNK + 5, 0]]
    assert fingerprint(swapped) != fingerprint(tensor)
    assert fingerprint(tensor.view(2, -1).T.contiguous().T) == fingerprint(tensor)
