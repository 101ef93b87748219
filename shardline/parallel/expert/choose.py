"""Chooses at the start of a run on GPUs what sends rows to experts: all-to-all, or kernels over shared memory.

Both send the same rows, of the run's size and with random routing, there and back; the faster one is used. The kernels
are no candidate unless their results equal those of the all-to-all exactly.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardline.comm import symmetric_memory
from shardline.comm.job import job
from shardline.comm.mesh import Mesh
from shardline.config.architecture import Architecture, MixtureOfExperts
from shardline.config.layout import routes_together
from shardline.config.schema import Config
from shardline.models.experts.moe import count_tokens, sort_by_expert
from shardline.parallel.expert.all_to_all import AXIS, AllToAll
from shardline.parallel.expert.dispatch import Carrier
from shardline.parallel.expert.symmetric import SharedMemory, unusable
from shardline.parallel.tensor.autotune import medians

ROUNDS, IN_A_ROW = 5, 4


def carriers(device: torch.device) -> tuple[dict[str, Carrier], dict[str, str]]:
    """Return the usable carriers for this device by name, and why others are unusable; the same on every rank."""
    found: dict[str, Carrier] = {"all_to_all": AllToAll()}
    reason = unusable(device)
    if reason is not None:
        return found, {"symmetric": reason}
    return {**found, "symmetric": SharedMemory(device)}, {}


def choose_carrier(config: Config, arch: Architecture, mesh: Mesh, dtype: torch.dtype, device: torch.device) -> str:
    """Set the carrier of this run; return a line for the log. All ranks call it together."""
    asked = config.parallelism.expert_parallel_comm_backend
    nothing_to_choose = device.type != "cuda" and asked == "standard"
    if arch.moe is None or mesh.layout.ep == 1 or asked in ("all_to_all", "deepep") or nothing_to_choose:
        return ""
    found, refused = carriers(device)
    reason = refused.get("symmetric")
    if reason is None:
        trip = Trip(arch.moe, arch.dim, _tokens(config, mesh), dtype, device)
        with job.traffic.uncounted():
            reason = trip.difference(found["symmetric"], found["all_to_all"])
    if reason is not None:
        return f"Experts: rows are sent by all-to-all; kernels over shared memory cannot be used here ({reason})"
    with job.traffic.uncounted():
        times = {"symmetric": 0.0} if asked == "symmetric" else trip.times(found)
    fastest = min(times, key=lambda name: times[name])
    job.carrier = found[fastest]
    if fastest == "all_to_all":
        symmetric_memory.space(AXIS, device).keep(())
    how = {"all_to_all": "all-to-all", "symmetric": "kernels over shared memory"}
    several = ", ".join(f"{1e3 * times[name]:.2f} ms by {how[name]}" for name in sorted(times, key=lambda n: times[n]))
    measured = f"; a round trip takes {several}" if len(times) > 1 else ""
    return f"Experts: rows are sent by {how[fastest]}{measured}"


def _tokens(config: Config, mesh: Mesh) -> int:
    """Return the number of tokens that a rank routes in a micro-batch."""
    layout, section = mesh.layout, config.training
    shared_by = layout.cp * (1 if routes_together(layout) else layout.tp)
    return max(1, section.local_batch_size * section.rows_of_a_sample * section.seq_len // shared_by)


class Trip:
    """Random tokens that are sent to random experts and back."""

    def __init__(self, moe: MixtureOfExperts, dim: int, tokens: int, dtype: torch.dtype, device: torch.device) -> None:
        source = torch.Generator(device).manual_seed(job.axes[AXIS].rank)
        self.device, self.k = device, moe.top_k
        self.x = torch.randn(tokens, dim, device=device, generator=source).to(dtype)
        self.weights = torch.rand(tokens * moe.top_k, 1, device=device, generator=source)
        scores = torch.rand(tokens, moe.n_experts, device=device, generator=source)
        chosen = scores.topk(moe.top_k, dim=1).indices
        self.order, self.inverse = sort_by_expert(chosen)
        self.counts = count_tokens(chosen, moe.n_experts)

    def run(self, carrier: Carrier) -> list[Tensor]:
        """Return what arrives and what comes back."""
        table, sizes = carrier.plan(self.counts)
        sent = carrier.send(self.x, self.weights, self.order, self.k, table, sizes)
        rows, weights = carrier.landed(sent, table, sizes)
        back = carrier.send_back(rows, weights, table, sizes)
        return [rows, weights, *carrier.gathered(back, self.inverse, self.k)]

    def difference(self, carrier: Carrier, other: Carrier) -> str | None:
        """Return why a carrier cannot be used; None if its results equal the other's, several times in a row."""

        def attempt() -> None:
            wanted = self.run(other)
            for sign in (1, -1, 1, -1):  # stale rows of an earlier trip must not pass for new ones
                self.x *= sign
                found = self.run(carrier)
                wanted = [wanted[0] * sign, wanted[1], wanted[2] * sign, wanted[3]]
                if not all(torch.equal(one, another) for one, another in zip(found, wanted, strict=True)):
                    raise RuntimeError("received rows differ from those sent")

        reason = symmetric_memory.agreed_reason(attempt)
        if reason is not None:
            symmetric_memory.start_anew()
        return reason

    def times(self, found: dict[str, Carrier]) -> dict[str, float]:
        """Return the seconds of a trip there and back by each carrier."""
        runs: dict[Any, Callable[[], Any]]
        runs = {name: functools.partial(self.run, carrier) for name, carrier in found.items()}
        return medians(runs, list(runs), ROUNDS, self.device, IN_A_ROW)
