"""Tokens that travel by DeepEP's interface, over gloo: the numbers of one process, and nothing is kept too long."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from shardline.comm.job import job
from shardline.comm.mesh import Mesh
from shardline.config.layout import Layout
from shardline.errors import ConfigError
from shardline.models.experts.moe import Dispatched
from shardline.parallel.expert import deepep
from tests import deep_ep_over_gloo as stand_in
from tests.unit.parallel.test_data_parallel import ranks

EXPERTS, TOKENS, WIDTH, K = 8, 12, 16, 3
ROUTINGS = ("drawn", "one expert", "one rank", "none on rank 0")
CPU = torch.device("cpu")


def tokens(rank: int, routing: str) -> tuple[Tensor, Tensor, Tensor]:
    """x (t, dim), chosen (t, k), weights (t, k) of a rank."""
    source = torch.Generator().manual_seed(rank)
    x, weights = torch.randn(TOKENS, WIDTH, generator=source), torch.rand(TOKENS, K, generator=source)
    scores = torch.rand(TOKENS, EXPERTS, generator=source)
    if routing == "one rank":
        scores[:, :K] += 1
    if routing == "none on rank 0":
        scores[:, :4] -= 1
    chosen = scores.topk(K, dim=1).indices
    if routing == "one expert":
        chosen, weights = torch.full((TOKENS, 1), 5), weights[:, :1].contiguous()
    return x, chosen, weights


def matrices() -> Tensor:
    return torch.randn(EXPERTS, WIDTH, generator=torch.Generator().manual_seed(99))


def expected(size: int, routing: str) -> list[Any]:
    """Results and gradients of each rank, computed without sending anything; the experts' gradients are the last."""
    w = matrices().requires_grad_()
    found = []
    for rank in range(size):
        x, chosen, weights = tokens(rank, routing)
        x.requires_grad_()
        weights.requires_grad_()
        out = (torch.tanh(x[:, None] * w[chosen]) * weights[..., None]).sum(1)
        out.backward(torch.arange(out.numel()).view_as(out) / out.numel())
        found.append([out.detach(), x.grad, weights.grad])
    return [*found, w.grad]


def experts(here: Dispatched, w: Tensor) -> Tensor:
    own = torch.searchsorted(here.ends, torch.arange(here.rows.shape[0]), right=True)
    return torch.tanh(here.rows * w[own]) * here.weights[:, None]


def travel(x: Tensor, chosen: Tensor, weights: Tensor, w: Tensor) -> Tensor:
    one, other = [
        deepep.depart(*part, EXPERTS) for part in zip(x.chunk(2), chosen.chunk(2), weights.chunk(2), strict=True)
    ]
    returning = [deepep.leave(experts(deepep.arrive(part), w), part) for part in (one, other)]
    return torch.cat([deepep.collect(*pair) for pair in zip(returning, (one, other), strict=True)])


def made(size: int) -> int:
    """Over `size` ranks; returns this rank."""
    mesh = Mesh(Layout(dp_shard=size, ep=size), "cpu")
    deepep.start(WIDTH, torch.float32, CPU)
    return mesh.rank


def kept() -> int:
    """Journeys that are kept once another one begins."""
    gc.collect()
    job.carrier.keep(deepep.Journey(None, 0, 0, 0, 0), CPU)
    return len(job.carrier.journeys) - 1


def there_and_back(size: int, routing: str, how: str) -> tuple[list[Any], int, int, dict[str, int]]:
    with stand_in.installed():
        rank = made(size)
        x, chosen, weights = tokens(rank, routing)
        w = matrices().view(size, -1, WIDTH)[rank].clone().requires_grad_()
        x.requires_grad_()
        weights.requires_grad_()
        job.traffic.take()
        if how == "checkpointed":
            out = checkpoint(travel, x, chosen, weights, w, use_reentrant=False)
        else:
            compiled = torch.compile(travel, backend="aot_eager", fullgraph=True)
            out = (compiled if how == "compiled" else travel)(x, chosen, weights, w)
        inside = kept()
        out.backward(torch.arange(out.numel()).view_as(out) / out.numel())
        assert not job.rows_under_way
        found = [out.detach(), x.grad, weights.grad, w.grad]
        sent = job.traffic.take()["ep"]
        del out
        return found, inside, kept(), {**stand_in.calls, "sent": sent}


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_results_and_gradients_are_those_of_one_process(size, routing):
    *wanted, of_experts = expected(size, routing)
    answers = ranks().run(size, there_and_back, size, routing, "plain")
    for (found, *_), one in zip(answers, wanted, strict=True):
        for a, b in zip(found[:3], one, strict=True):
            torch.testing.assert_close(a, b)
    torch.testing.assert_close(torch.cat([found[3] for found, *_ in answers]), of_experts)


@pytest.mark.parametrize(("how", "inside"), [("plain", 2), ("compiled", 2), ("checkpointed", 0)])
def test_a_handle_is_kept_while_backward_needs_it(how, inside):
    *wanted, _ = expected(2, "drawn")
    for (found, during, after, calls), one in zip(ranks().run(2, there_and_back, 2, "drawn", how), wanted, strict=True):
        torch.testing.assert_close(found[1], one[1])
        assert (during, after) == (inside, 0)
        twice = 2 if how == "checkpointed" else 1
        assert calls["dispatch"] == 1 + 2 * twice, "one when it was tried out, and one for each part"
        assert calls["cached dispatch"] == 2
        assert calls["combine"] == 1 + 2 * twice + 2


def test_a_token_is_sent_once_to_a_rank():
    """Forward: a token with its choices and weights, and its results; backward: both, and gradients of weights."""
    chosen = [tokens(rank, "drawn")[1] for rank in range(2)]
    away = [int((of_rank // (EXPERTS // 2) == 1 - rank).any(1).sum()) for rank, of_rank in enumerate(chosen)]
    row = 4 * WIDTH
    for rank, (*_, calls) in enumerate(ranks().run(2, there_and_back, 2, "drawn", "plain")):
        went, came = away[rank], away[1 - rank]
        assert calls["sent"] == went * (2 * row + 12 * K) + came * (2 * row + 4 * K)


def without_backward() -> tuple[bool, int]:
    with stand_in.installed():
        rank = made(2)
        x, chosen, weights = tokens(rank, "drawn")
        w = matrices().view(2, -1, WIDTH)[rank]
        with torch.no_grad():
            first = travel(x, chosen, weights, w)
        never_used = travel(x.requires_grad_(), chosen, weights, w)
        same = torch.equal(first, never_used)
        del never_used
        return same and not job.rows_under_way, kept()


def test_nothing_is_left_where_backward_does_not_run():
    assert ranks().run(2, without_backward) == [(True, 0)] * 2


# ---- refused at the start, by all ranks ------------------------------------------------------------------------------


def refusal(break_it: Any, width: int = WIDTH) -> str:
    with stand_in.installed(), pytest.MonkeyPatch.context() as patch:
        mesh = Mesh(Layout(dp_shard=2, ep=2), "cpu")
        if break_it is not None:
            break_it(patch, mesh.rank)
        with pytest.raises(ConfigError) as caught:
            deepep.start(width, torch.float32, CPU)
        return str(caught.value)


def not_importable_on_rank_1(patch: Any, rank: int) -> None:
    if rank == 1:
        patch.setattr(deepep, "PACKAGE", "deep_ep_is_not_there")


def no_buffer(patch: Any, rank: int) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("CUDA driver version is insufficient\nand more lines")

    patch.setattr(stand_in.Buffer, "__init__", fails)


def buffer_elsewhere(patch: Any, rank: int) -> None:
    patch.setattr(stand_in.Buffer, "get_local_buffer_tensor", lambda *_: torch.empty(0, device="meta"))


def wrong_type_on_rank_0(patch: Any, rank: int) -> None:
    combine = stand_in.Buffer.combine

    def only_bfloat16(self: Any, x: Tensor, *rest: Any, **options: Any) -> Any:
        result = combine(self, x, *rest, **options)
        if rank == 0:
            raise RuntimeError("Unsupported type")
        return result

    patch.setattr(stand_in.Buffer, "combine", only_bfloat16)


def loses_a_token(patch: Any, rank: int) -> None:
    combine = stand_in.Buffer.combine
    patch.setattr(stand_in.Buffer, "combine", lambda self, x, *rest, **options: combine(self, x * 0, *rest, **options))


@pytest.mark.parametrize(
    ("break_it", "width", "said"),
    [
        (not_importable_on_rank_1, WIDTH, "No module named 'deep_ep_is_not_there'"),
        (no_buffer, WIDTH, "CUDA driver version is insufficient"),
        (buffer_elsewhere, WIDTH, "it sends from meta, but this run is on cpu"),
        (wrong_type_on_rank_0, WIDTH, "Unsupported type"),
        (loses_a_token, WIDTH, "tokens do not come back as they were sent"),
        (None, 12, "a token has 48 bytes; over 2 ranks, DeepEP needs multiples of 32"),
    ],
)
def test_where_it_cannot_be_used_every_rank_says_why(break_it, width, said):
    line = (
        f"parallelism.expert_parallel_comm_backend: 'deepep' cannot be used here ({said});"
        " 'standard' sends tokens without it"
    )
    assert ranks().run(2, refusal, break_it, width) == [line] * 2
