"""Replicas: their gradients are summed, once each, while backward goes on."""

from __future__ import annotations

import functools
import json

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from shardline.comm import exposed_time
from shardline.comm.exposed_time import exposed
from shardline.comm.job import job
from shardline.comm.mesh import Mesh
from shardline.config.layout import Layout
from shardline.config.load import load_config
from shardline.models.decoder import Decoder
from shardline.models.flavors import resolve
from shardline.models.init import init_weights
from shardline.parallel.data import compression
from shardline.parallel.data.ddp import Replicas
from shardline.run.folder import RunFolder
from shardline.telemetry.metrics import KEYS, MetricsLog
from tests.parity.harness import MODEL
from tests.parity.pool import CaseFailed, Pool

SMALL = 0.00105  # MiB: every layer below gets a bucket of its own


@functools.cache
def ranks() -> Pool:
    """One set of workers for all tests of data parallelism."""
    return Pool()


def settings(**overrides):
    return load_config(overrides={f"parallelism.{key}": value for key, value in overrides.items()})


def layers(count: int = 3, size: int = 16) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(size, size) for _ in range(count)))


def data(rank: int, batch: int) -> torch.Tensor:
    return torch.randn(4, 16, generator=torch.Generator().manual_seed(100 * rank + batch))


def micro_batches(model: nn.Module, replicas: Replicas, rank: int, count: int, every: bool) -> None:
    for number in range(count):
        replicas.expect(last=number == count - 1, every_micro_batch=every)
        model(data(rank, number)).square().sum().backward()
    replicas.finish()


# ---- sums ------------------------------------------------------------------------------------------------------------


def summed(every: bool, **overrides):
    """Gradients after two steps of three micro-batches: the second step must not see the first."""
    mesh, model = Mesh(Layout(dp_replicate=2), "cpu"), layers()
    replicas = Replicas(model, settings(**overrides))
    for _ in range(2):
        model.zero_grad()
        job.traffic.take()
        micro_batches(model, replicas, mesh.rank, 3, every)
    return [p.grad for p in model.parameters()], job.traffic.take()["dp_replicate"], len(replicas.buckets)


def expected() -> list[torch.Tensor]:
    model = layers()
    for rank in range(2):
        for number in range(3):
            model(data(rank, number)).square().sum().backward()
    return [p.grad for p in model.parameters()]


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("every", [True, False])
@pytest.mark.parametrize("bucket", [SMALL, 25.0])
def test_every_way_of_summing_gives_the_large_batch(overlap, every, bucket):
    first, second = ranks().run(
        2,
        functools.partial(summed, every, overlap_gradient_reduction=overlap, gradient_bucket_mib=bucket),
    )
    size = sum(p.numel() for p in layers().parameters()) * 4
    for gradients, sent, buckets in (first, second):
        assert buckets == (1 if bucket == 25.0 else 3)
        assert sent == size * (3 if every else 1)  # two ranks: 2 (n - 1) / n = 1
        for seen, wanted in zip(gradients, expected(), strict=True):
            torch.testing.assert_close(seen, wanted)
    assert all(torch.equal(a, b) for a, b in zip(first[0], second[0], strict=True))  # bit by bit


def test_bfloat16_sends_half_and_rounds():
    runs = ranks().run(2, functools.partial(summed, False, gradient_compression="bfloat16"))
    assert runs[0][1] == sum(p.numel() for p in layers().parameters()) * 2
    for a, b, wanted in zip(runs[0][0], runs[1][0], expected(), strict=True):
        assert torch.equal(a, b)
        assert a.dtype == torch.float32
        assert not torch.equal(a, wanted)
        torch.testing.assert_close(a, wanted, rtol=2e-2, atol=2e-2 * float(wanted.abs().max()))


def rounded_sums():
    """bfloat16 is for the link alone: what three micro-batches add up is kept in float32."""
    mesh, model = Mesh(Layout(dp_replicate=2), "cpu"), layers(1)
    replicas = Replicas(model, settings(gradient_compression="bfloat16"))
    for number, share in enumerate((256.0, 1.0, 1.0)):
        replicas.expect(last=number == 2, every_micro_batch=True)
        (model[0].weight.sum() * (share if mesh.rank == 0 else 0.0)).backward()
    replicas.finish()
    return model[0].weight.grad.unique().tolist()


def test_rounding_does_not_add_up():
    assert ranks().run(2, rounded_sums) == [[258.0], [258.0]]  # in bfloat16, 256 + 1 is 256


def without_gradients():
    """Rank 1 does not use layer 1; a hook of the user froze layer 2 after the buckets were made."""
    mesh, model = Mesh(Layout(dp_replicate=2), "cpu"), layers()
    replicas = Replicas(model, settings(gradient_bucket_mib=SMALL))
    model[2].requires_grad_(False)
    replicas.expect(last=True, every_micro_batch=False)
    hidden = model[0](data(mesh.rank, 0))
    model[2](hidden if mesh.rank == 1 else model[1](hidden)).square().sum().backward()
    replicas.finish()
    return [p.grad for p in model.parameters()]


def test_a_parameter_without_gradient_counts_as_zero():
    first, second = ranks().run(2, without_gradients)
    alone = layers()
    alone[2](alone[1](alone[0](data(0, 0)))).square().sum().backward()
    torch.testing.assert_close(second[2], alone[1].weight.grad)  # what rank 0 alone has
    assert first[4] is None
    assert second[4] is None
    assert all(torch.equal(a, b) for a, b in zip(first[:4], second[:4], strict=True))


def mixed_types():
    mesh, model = Mesh(Layout(dp_replicate=2), "cpu"), layers(2)
    model[1].to(torch.bfloat16)
    replicas = Replicas(model, settings())
    replicas.expect(last=True, every_micro_batch=False)
    for p in model.parameters():
        p.sum().mul(1.0 if mesh.rank == 0 else 2**-7).backward()
    replicas.finish()
    return [p.grad for p in model.parameters()], len(replicas.buckets), job.traffic.take()["dp_replicate"]


def test_gradients_of_different_types_share_a_bucket():
    (gradients, buckets, sent), _ = ranks().run(2, mixed_types)
    assert buckets == 1
    assert [g.dtype for g in gradients] == [torch.float32] * 2 + [torch.bfloat16] * 2
    assert all(g.float().unique().tolist() == [1 + 2**-7] for g in gradients)
    assert sent == sum(g.numel() for g in gradients) * 4  # summed in training.mixed_precision_reduce


def cut_by_tensor_parallel(compression_name: str):
    """Five rows over two tp ranks: three and two."""
    mesh = Mesh(Layout(dp_replicate=2, tp=2), "cpu")
    joined = mesh.joined("dp_replicate", "tp")
    model = nn.Module()
    for name, rows, cut in (("a", 5, Shard(0)), ("b", 6, Shard(1)), ("c", 4, Replicate())):
        value = distribute_tensor(torch.zeros(rows, 8), joined, [Replicate(), cut], src_data_rank=None)
        setattr(model, name, nn.Parameter(value))
    replicas = Replicas(model, settings(gradient_compression=compression_name, powersgd_rank=1))
    replicas.expect(last=True, every_micro_batch=False)
    share = mesh.coordinates["dp_replicate"] + 1.0
    sum((p.to_local() * share * (1 + mesh.coordinates["tp"])).sum() for p in model.parameters()).backward()
    replicas.finish()
    same = all(isinstance(p.grad, DTensor) and p.grad.placements == p.placements for p in model.parameters())
    return same, mesh.coordinates["tp"], [p.grad.to_local() for p in model.parameters()]


@pytest.mark.parametrize("name", ["none", "powersgd"])
def test_parts_that_tensor_parallel_cut_are_summed_apart(name):
    for same, tp, gradients in ranks().run(4, cut_by_tensor_parallel, name):
        assert same
        assert [tuple(g.shape) for g in gradients] == [(3 - tp, 8), (6, 4), (4, 8)]
        for gradient in gradients:
            torch.testing.assert_close(gradient, torch.full_like(gradient, 3.0 * (1 + tp)))


# ---- the record ------------------------------------------------------------------------------------------------------


def test_a_row_may_say_how_long_communication_was_exposed(tmp_path):
    metrics = MetricsLog(load_config(), RunFolder(tmp_path))
    metrics.log(dict.fromkeys(KEYS, 1) | {"comm_bytes": {}, "dp_exposed_seconds": 0.25})
    metrics.log(dict.fromkeys(KEYS, 2) | {"comm_bytes": {}})
    metrics.close()
    first, second = (json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert list(first) == [*KEYS, "dp_exposed_seconds"]
    assert list(second) == list(KEYS)


# ---- order and overlap -----------------------------------------------------------------------------------------------


class Clock:
    """Time that passes in backward and in waits alone."""

    now = 0

    def perf_counter(self) -> int:
        return self.now


class SlowLink:
    """Stands for a link that carries one sum after the other, each in four seconds."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.free_at, self.sizes, self.waited = clock, 0, [], 0

    def start_sum(self, flat: torch.Tensor, axis: str):
        self.sizes.append(flat.numel())
        self.free_at = done = max(self.free_at, self.clock.now) + 4

        def wait(_) -> None:
            self.waited += done > self.clock.now
            self.clock.now = max(self.clock.now, done)

        return type("Work", (), {"wait": wait})()


class SlowBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, clock):
        ctx.clock = clock
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        ctx.clock.now += 5
        return gradient, None


def exposed_over_a_slow_link(monkeypatch, **overrides) -> tuple[float, SlowLink, int]:
    clock, model = Clock(), layers(4)
    link = SlowLink(clock)
    monkeypatch.setattr(compression.collectives, "start_sum", link.start_sum)
    monkeypatch.setattr(exposed_time, "time", clock)
    replicas = Replicas(model, settings(gradient_bucket_mib=SMALL, **overrides))
    exposed.reset()
    replicas.expect(last=True, every_micro_batch=False)
    x = data(0, 0)
    for layer in model:
        x = layer(SlowBackward.apply(x.requires_grad_(), clock))
    x.sum().backward()
    in_backward = len(link.sizes)
    replicas.finish()
    return exposed.take(), link, in_backward


def test_sums_hide_behind_backward(monkeypatch):
    seconds, link, in_backward = exposed_over_a_slow_link(monkeypatch)
    assert in_backward == len(link.sizes) == 4
    assert (link.waited, seconds) == (0, 0)  # each sum is done before backward gets to the next layer
    seconds, link, in_backward = exposed_over_a_slow_link(monkeypatch, overlap_gradient_reduction=False)
    assert in_backward == 0
    assert (link.waited, seconds) == (4, 4 * 4)


def test_buckets_follow_backward():
    model = Decoder(resolve(load_config(overrides={"model.overrides": MODEL}).model))
    init_weights(model, 0)
    replicas = Replicas(model, settings(gradient_bucket_mib=0.05))
    arrived: list[str] = []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: arrived.append(name))
    (model.hidden(torch.zeros(1, 8, dtype=torch.int64)) @ model.output_weight().T).sum().backward()
    assert arrived == [replicas.names[p] for bucket in replicas.buckets for p in bucket.parameters]
    assert len(replicas.buckets) > 3


def backward_twice():
    Mesh(Layout(dp_replicate=2), "cpu")
    model = layers()
    replicas = Replicas(model, settings())
    replicas.expect(last=True, every_micro_batch=False)
    model(data(0, 0)).sum().backward()
    model(data(0, 1)).sum().backward()


def test_a_second_gradient_after_the_sum_began_is_refused():
    with pytest.raises(CaseFailed, match=r"the gradient of \d.(bias|weight) came twice in one backward"):
        ranks().run(2, backward_twice)
