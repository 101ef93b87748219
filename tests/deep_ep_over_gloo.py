"""A stand-in for the package `deep_ep` whose Buffer sends over gloo: the interface of DeepEP 1.x, on CPUs, in any type.

    with deep_ep_over_gloo.installed():
        import deep_ep                      this module

It refuses what DeepEP's host code refuses. What a call that finishes later returns has no values before its event was
waited for. `calls` counts what was called.
"""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

topk_idx_t = torch.int64
calls: Counter[str] = Counter()


@contextlib.contextmanager
def installed() -> Iterator[None]:
    calls.clear()
    sys.modules["deep_ep"] = sys.modules[__name__]
    try:
        yield
    finally:
        del sys.modules["deep_ep"]


class Config:
    def __init__(self, tokens: int) -> None:
        self.tokens = tokens

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return num_ranks * self.tokens * hidden_bytes

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return 0


class EventOverlap:
    def __init__(self, finish: Callable[[], None] | None = None) -> None:
        self.finish = finish

    def current_stream_wait(self) -> None:
        assert self.finish is not None
        self.finish()


class Buffer:
    def __init__(self, group: dist.ProcessGroup, num_nvl_bytes: int = 0, num_rdma_bytes: int = 0) -> None:
        self.group, self.rank, self.group_size = group, group.rank(), group.size()
        self.num_nvl_bytes, self.num_rdma_bytes = num_nvl_bytes, num_rdma_bytes
        everyone: list[Any] = [None] * self.group_size
        dist.all_gather_object(everyone, num_nvl_bytes, group)
        assert len(set(everyone)) == 1
        self.memory = torch.empty(num_nvl_bytes, dtype=torch.uint8)
        calls["Buffer"] += 1

    def get_local_buffer_tensor(
        self, dtype: torch.dtype, size: torch.Size | None = None, offset: int = 0, use_rdma_buffer: bool = False
    ) -> Tensor:
        return self.memory.view(dtype)

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        assert num_ranks in (2, 4, 8), f"Unsupported number of EP ranks: {num_ranks}"
        return Config(256)

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        return Buffer.get_dispatch_config(num_ranks)

    def get_dispatch_layout(
        self,
        topk_idx: Tensor,
        num_experts: int,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor, EventOverlap]:
        assert topk_idx.dtype == topk_idx_t
        assert topk_idx.dim() == 2
        assert topk_idx.is_contiguous()
        assert not async_finish
        experts = (topk_idx[..., None] == torch.arange(num_experts)).any(1)  # (t, E)
        in_rank = experts.unflatten(1, (self.group_size, -1)).any(2)
        calls["get_dispatch_layout"] += 1
        return in_rank.sum(0).int(), None, experts.sum(0).int(), in_rank, EventOverlap()

    def dispatch(
        self,
        x: Tensor,
        handle: tuple[Tensor, ...] | None = None,
        num_tokens_per_rank: Tensor | None = None,
        num_tokens_per_rdma_rank: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        expert_alignment: int = 1,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Any, ...]:
        self._check(x)
        assert expert_alignment == 1
        assert not allocate_on_comm_stream  # which needs an event, too
        if handle is not None:
            calls["cached dispatch"] += 1
            assert topk_idx is None
            assert topk_weights is None
            sent, received, is_token_in_rank = handle
            assert is_token_in_rank.shape == (x.shape[0], self.group_size)
            (came,), event = self._send([self._by_rank(x, is_token_in_rank)], sent, received, async_finish)
            return came, None, None, None, None, event
        calls["dispatch"] += 1
        assert num_tokens_per_rank is not None
        assert num_tokens_per_expert is not None
        assert is_token_in_rank is not None
        assert topk_idx is not None
        assert topk_weights is not None
        assert num_tokens_per_rank.dtype == num_tokens_per_expert.dtype == torch.int32
        assert is_token_in_rank.dtype == torch.bool
        assert topk_idx.dtype == topk_idx_t
        assert topk_weights.dtype == torch.float32
        assert topk_idx.shape == topk_weights.shape
        assert topk_idx.shape[0] == x.shape[0]
        assert topk_idx.is_contiguous()
        assert topk_weights.is_contiguous()
        sent, received = num_tokens_per_rank.long(), torch.empty(self.group_size, dtype=torch.int64)
        dist.all_to_all_single(received, sent, group=self.group)
        of_experts = torch.empty_like(num_tokens_per_expert)
        dist.all_to_all_single(of_experts, num_tokens_per_expert, group=self.group)
        counts = of_experts.view(self.group_size, -1).sum(0).tolist()
        here = num_tokens_per_expert.shape[0] // self.group_size
        ranks = torch.arange(self.group_size)[:, None, None]
        is_there = topk_idx.div(here, rounding_mode="floor") == ranks  # (ranks, t, k)
        local = torch.where(is_there, topk_idx - here * ranks, -1)
        weights = torch.where(is_there, topk_weights, 0.0)
        rows = is_token_in_rank.t()
        parts = [self._by_rank(x, is_token_in_rank), local[rows], weights[rows]]
        came, event = self._send(parts, sent, received, async_finish)
        return *came, counts, (sent, received, is_token_in_rank), event

    def combine(
        self,
        x: Tensor,
        handle: tuple[Tensor, ...],
        topk_weights: Tensor | None = None,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        self._check(x)
        calls["combine"] += 1
        received, sent, is_token_in_rank = handle  # what came goes back
        assert x.shape[0] == int(sent.sum())
        parts = [x]
        if topk_weights is not None:
            assert topk_weights.dtype == torch.float32
            assert topk_weights.dim() == 2
            assert topk_weights.is_contiguous()
            assert topk_weights.shape[0] == x.shape[0]
            parts.append(topk_weights)
        tokens = is_token_in_rank.shape[0]
        sums = [torch.full((tokens, part.shape[1]), torch.nan, dtype=part.dtype) for part in parts]
        came, arrived = self._send(parts, sent, received, async_finish=True)

        def finish() -> None:
            arrived.current_stream_wait()
            for total, rows in zip(sums, came, strict=True):
                wide = torch.zeros(total.shape, dtype=torch.promote_types(total.dtype, torch.float32))
                for there, of_rank in zip(is_token_in_rank.t(), rows.split(received.tolist()), strict=True):
                    wide[there] += of_rank
                total.copy_(wide)

        event = self._event(finish, async_finish)
        return sums[0], sums[1] if topk_weights is not None else None, event

    def _check(self, x: Tensor) -> None:
        assert x.dim() == 2
        assert x.is_contiguous()
        assert x.shape[1] * x.element_size() % 16 == 0
        hint = Buffer.get_dispatch_config(self.group_size).get_nvl_buffer_size_hint
        assert hint(x.shape[1] * x.element_size(), self.group_size) <= self.num_nvl_bytes
        fills = torch.are_deterministic_algorithms_enabled() and torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
        assert not fills

    def _by_rank(self, x: Tensor, is_token_in_rank: Tensor) -> Tensor:
        return torch.cat([x[there] for there in is_token_in_rank.t()])

    def _send(
        self, parts: list[Tensor], sent: Tensor, received: Tensor, async_finish: bool
    ) -> tuple[list[Tensor], EventOverlap]:
        """Send rows sorted by rank; what comes is filled in when its event is waited for."""
        out, into = sent.tolist(), received.tolist()
        arriving = [part.new_empty(sum(into), *part.shape[1:]) for part in parts]
        pairs = zip(arriving, parts, strict=True)
        works = [dist.all_to_all_single(a, p, into, out, group=self.group, async_op=True) for a, p in pairs]
        came = [torch.full_like(part, -2 if part.dtype == topk_idx_t else torch.nan) for part in arriving]

        def finish() -> None:
            for work, wanted, part in zip(works, came, arriving, strict=True):
                work.wait()
                wanted.copy_(part)

        return came, self._event(finish, async_finish)

    def _event(self, finish: Callable[[], None], async_finish: bool) -> EventOverlap:
        if async_finish:
            return EventOverlap(finish)
        finish()
        return EventOverlap()
