"""Optimizers over DTensors on four gloo ranks: sharded in any way, they do what they do on one."""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from shardline.models.dtensor import local, local_slices
from shardline.optim.early_step import EarlyStep, step_early
from shardline.optim.lamb import whole_norms
from shardline.optim.optimizer import build_optimizer
from shardline.optim.state import optimizer_state
from tests.unit.optim.optimizer_state import load_optimizer_state
from tests.unit.optim.test_early_step import one_rank
from tests.unit.optim.test_lamb import config, decoder, norm, set_gradients

RANKS = 4
CASES: dict[str, Callable[[], None]] = {}


def case(function):
    CASES[function.__name__] = function
    return function


def shard(model: nn.Module, mesh, placements) -> None:
    """Make every parameter a DTensor; vectors are sharded by rows where matrices are by columns."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            fitting = [Shard(0) if cut == Shard(1) and parameter.ndim == 1 else cut for cut in placements]
            value = distribute_tensor(parameter.detach(), mesh, fitting, src_data_rank=None)
            setattr(module, name, nn.Parameter(value))


def give_gradients(model: nn.Module, whole: nn.Module, step: int) -> None:
    set_gradients(whole, step)
    for parameter, source in zip(model.parameters(), whole.parameters(), strict=True):
        mesh, placements = parameter.device_mesh, parameter.placements
        parameter.grad = distribute_tensor(source.grad.clone(), mesh, placements, src_data_rank=None)


def assert_same(model: nn.Module, whole: nn.Module, tolerance: float) -> None:
    for (name, parameter), expected in zip(model.named_parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(
            parameter.detach().full_tensor(),
            expected.detach(),
            rtol=tolerance,
            atol=tolerance,
            msg=lambda text, name=name: f"{name}: {text}",
        )


def plain_sum(tensor, group):
    dist.all_reduce(tensor, group=group)
    return tensor


def meshes():
    flat = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("all",))
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    return {
        "rows": (flat, [Shard(0)]),
        "columns": (flat, [Shard(1)]),
        "replicas": (flat, [Replicate()]),
        "replicas of rows": (square, [Replicate(), Shard(0)]),
        "rows of columns": (square, [Shard(0), Shard(1)]),
        "half the ranks": (square["tp"], [Shard(0)]),
    }


@case
def layerwise_steps_are_those_of_one_process():
    for name in ("LAMB", "LARS", "SGD", "Lion"):
        for label, (mesh, placements) in meshes().items():
            whole, model = decoder(name), decoder(name)
            shard(model, mesh, placements)
            one, many = build_optimizer(config(name), whole), build_optimizer(config(name), model)
            for step in range(3):
                give_gradients(model, whole, step)
                one.step()
                many.step()
            try:
                assert_same(model, whole, 1e-6)
            except AssertionError as error:
                raise AssertionError(f"{name}, {label}: {error}") from None


@case
def norms_of_all_tensors_take_one_all_reduce():
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    flat = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("all",))
    sizes, groups = [(7, 6), (8, 3), (5, 2), (9, 4), (4, 4)], []
    tensors = [torch.randn(size, generator=torch.Generator().manual_seed(7)) for size in sizes]
    cuts = [(flat, [Shard(0)]), (square, [Replicate(), Shard(1)]), (square, [Replicate(), Replicate()]), None]

    def noted_sum(tensor, group):
        groups.append(group)
        return plain_sum(tensor, group)

    def norms(every):
        with patch("shardline.optim.lamb.sum_over_group", noted_sum):
            return whole_norms(distributed(every)).tolist()

    def distributed(every):
        return [
            t if cut is None else distribute_tensor(t, *cut, src_data_rank=None)
            for t, cut in zip(tensors, every, strict=False)
        ]

    found = norms(cuts)
    assert found == pytest.approx([norm(t) for t in tensors[:4]], rel=1e-6)
    assert groups == [None], "tensors on meshes of all ranks share one all-reduce"
    groups.clear()
    found = norms([*cuts, (square["tp"], [Shard(0)])])
    assert found == pytest.approx([norm(t) for t in tensors], rel=1e-6)
    assert groups == [None, square["tp"].get_group()]
    groups.clear()
    norms([(flat, [Replicate()]), None])
    assert groups == [], "what every rank has whole needs no other rank"


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(12, 12) for _ in range(3)])
        self.head = nn.Linear(12, 5, bias=False)

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


def sharded_layers(mesh, **options) -> nn.Module:
    model = Layers()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def loss_of(model: nn.Module, step: int, part: slice) -> torch.Tensor:
    """Sum over rows, of which each rank takes its part; FSDP averages, hence the factor."""
    data = torch.randn(8, 12, generator=torch.Generator().manual_seed(step))[part]
    return model(data).square().sum() * (8 // len(data)) / 8


def compare_training(name: str, step_whole, step_sharded, tolerance: float = 1e-6, **options) -> None:
    mesh = init_device_mesh("cpu", (RANKS,))
    whole, model = Layers(), sharded_layers(mesh, **options)
    own = slice(2 * dist.get_rank(), 2 * dist.get_rank() + 2)
    # With the shorter averages of test_lamb, Adam's steps of nearly zero gradients would show the order of sums.
    how = config(name).replace({"optimizer.beta1": 0.9, "optimizer.beta2": 0.95})
    one, many = build_optimizer(how, whole), build_optimizer(how, model)
    run_whole, run_sharded = step_whole(whole, one), step_sharded(model, many)
    for step in range(4):
        run_whole(step, slice(None))
        run_sharded(step, own)
    assert_same(model, whole, tolerance)
    assert not torch.allclose(whole.head.weight, Layers().head.weight)


def ordinary(model, optimizer):
    def step(number, part):
        loss_of(model, number, part).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@case
def fsdp_with_cpu_offload_trains_with_every_optimizer():
    for name in ("AdamW", "LAMB", "LARS"):
        compare_training(name, ordinary, ordinary, offload_policy=CPUOffloadPolicy(pin_memory=False))


def one_pass(model, optimizer):
    early = EarlyStep(optimizer)

    def step(number, part):
        def backward():
            loss = loss_of(model, number, part)
            loss.backward()
            assert all(p.grad is None for p in model.parameters())
            return loss.detach()

        step_early(early, backward, one_rank, max_norm=0.0)

    return step


@case
def early_steps_under_fsdp_are_ordinary_ones():
    compare_training("AdamW", ordinary, one_pass)
    compare_training("AdamW", ordinary, one_pass, offload_policy=CPUOffloadPolicy(pin_memory=False))


MAX_NORM = 0.05


def clipped(model, optimizer):
    def step(number, part):
        loss_of(model, number, part).backward()
        assert nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM) > MAX_NORM
        optimizer.step()
        optimizer.zero_grad()

    return step


def two_passes(model, optimizer):
    early = EarlyStep(optimizer)

    def step(number, part):
        def backward():
            loss = loss_of(model, number, part)
            loss.backward()
            return loss.detach()

        def over_ranks(loss, squares):
            dist.all_reduce(squares)
            return one_rank(loss, squares)

        _, changed = step_early(early, backward, over_ranks, MAX_NORM)
        assert changed

    return step


@case
def two_passes_under_fsdp_clip_exactly():
    compare_training("LARS", clipped, two_passes)  # the length of LARS's step of a bias shows the clipping
    compare_training("AdamW", clipped, two_passes)


@case
def interleaved_shards_have_the_norms_of_the_whole():
    """FSDP over tensor parallel rows: each rank's rows are a part of a part."""
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    whole, model = decoder("LAMB"), decoder("LAMB")
    shard(model, square["tp"], [Shard(0)])
    for block in model.blocks():
        fully_shard(block, mesh=square["dp"])
    fully_shard(model, mesh=square["dp"])
    weight = model.layers["0"].attention.wqkv.weight
    assert type(weight.placements[0]).__name__ == "_StridedShard"
    one, many = build_optimizer(config("LAMB"), whole), build_optimizer(config("LAMB"), model)
    for step in range(3):
        set_gradients(whole, step)
        for parameter, source in zip(model.parameters(), whole.parameters(), strict=True):
            parameter.grad = torch.zeros_like(parameter)
            local(parameter.grad).copy_(source.grad[local_slices(parameter)])
        one.step()
        many.step()
    for parameter, expected in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(
            local(parameter.detach()), expected.detach()[local_slices(parameter)], rtol=1e-6, atol=1e-6
        )


@case
def narrow_state_is_sharded_saved_and_loaded():
    for cut in (Shard(0), Shard(1)):
        narrow_state_over(cut, "bfloat16", {torch.bfloat16})
        narrow_state_over(cut, "int8", {torch.int8, torch.uint8, torch.float32})


def narrow_state_over(cut, dtype, types):
    mesh = init_device_mesh("cpu", (RANKS,))
    narrow = config("AdamW").replace({"optimizer.state_dtype": dtype})

    def built():
        model = decoder("AdamW")
        shard(model, mesh, [cut])
        return model, build_optimizer(narrow, model)

    model, optimizer = built()
    other, resumed = built()
    source = decoder("AdamW")
    for step in range(2):
        give_gradients(model, source, step)
        optimizer.step()
    state = optimizer_state(optimizer, model)
    moments = [tensor for key, tensor in state.items() if not key.startswith("step")]
    assert all(isinstance(tensor, DTensor) for tensor in moments)
    assert {tensor.dtype for tensor in moments} == types
    whole = {key: t.full_tensor() if isinstance(t, DTensor) else t.clone() for key, t in state.items()}
    load_optimizer_state(resumed, other, whole)  # whole tensors: each rank takes its part
    for mine, theirs in zip(other.parameters(), model.parameters(), strict=True):
        local(mine.detach()).copy_(local(theirs.detach()))
    for each, its_optimizer in ((model, optimizer), (other, resumed)):
        give_gradients(each, source, 9)
        its_optimizer.step()
    for mine, theirs in zip(other.parameters(), model.parameters(), strict=True):
        assert torch.equal(local(mine), local(theirs))
    if dtype == "bfloat16":
        load_optimizer_state(resumed, other, optimizer_state(optimizer, model))  # and sharded ones, as they are


def _work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(os.path.join(folder, "store"), RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    for name, function in CASES.items():
        try:
            with patch("shardline.optim.lamb.sum_over_group", plain_sum):  # there is no run whose axes it would name
                function()
            text = ""
        except BaseException:
            text = traceback.format_exc()
        with open(os.path.join(folder, f"{name}.{rank}"), "w") as file:
            file.write(text or "passed")
        failed = torch.tensor(float(bool(text)))
        dist.all_reduce(failed)
        if failed:
            break  # other ranks may be in the middle of a collective
    dist.destroy_process_group()  # its threads must have ended when the process does


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("ranks")
    context = multiprocessing.spawn(_work, args=(str(path),), nprocs=RANKS, join=False)
    until = time.monotonic() + 100
    while time.monotonic() < until and not context.join(timeout=1):
        pass
    for process in context.processes:
        process.kill()
    return path


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_four_ranks(name, folder):
    texts = [file.read_text() if (file := folder / f"{name}.{rank}").exists() else "" for rank in range(RANKS)]
    failures = [text for text in texts if text != "passed"]
    assert not failures, next((text for text in failures if text), "did not finish")
