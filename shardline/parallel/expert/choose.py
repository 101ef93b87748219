"""At the start of a run on GPUs: what sends rows to experts, the all-to-all or kernels over shared memory.

Both carry the same rows, of the run's size and with a drawn routing, there and back; the faster one stays. Kernels that
do not give the very numbers of the all-to-all are no candidate.
"""

from __future__ import annotations

import statistics

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
from shardline.parallel.tensor.autotune import slowest, timed

ROUNDS, IN_A_ROW = 5, 4


def choose_carrier(config: Config, arch: Architecture, mesh: Mesh, dtype: torch.dtype, device: torch.device) -> str:
    """Set the carrier of this run; returns a line for the log. All ranks call it together."""
    asked = config.parallelism.expert_parallel_comm_backend
    if arch.moe is None or mesh.layout.ep == 1 or asked in ("all_to_all", "deepep"):
        return ""
    if asked == "standard" and device.type != "cuda":
        return ""
    reason = unusable(device)
    if reason is None:
        trip = Trip(arch.moe, arch.dim, _tokens(config, mesh), dtype, device)
        kernels, fallback = SharedMemory(device), AllToAll()
        with job.traffic.uncounted():
            reason = trip.difference(kernels, fallback)
    if reason is not None:
        return f"Experts: rows travel by all-to-all; kernels over shared memory cannot be used here ({reason})"
    if asked == "symmetric":
        job.carrier = kernels
        return "Experts: rows travel by kernels over shared memory"
    with job.traffic.uncounted():
        by_kernels, by_all_to_all = (trip.seconds(carrier) for carrier in (kernels, fallback))
    faster, times = "kernels over shared memory", f"{by_kernels * 1e3:.2f} ms against {by_all_to_all * 1e3:.2f}"
    if by_all_to_all <= by_kernels:
        symmetric_memory.keep(())
        faster, times = "all-to-all", f"{by_all_to_all * 1e3:.2f} ms against {by_kernels * 1e3:.2f} by kernels"
    else:
        job.carrier = kernels
        times += f" by all-to-all, {symmetric_memory.space(AXIS, device).bytes / 2**30:.2f} GiB shared"
    return f"Experts: rows travel by {faster}, there and back in {times}"


def _tokens(config: Config, mesh: Mesh) -> int:
    """The tokens of a part: half of those that a rank routes in a micro-batch."""
    layout, section = mesh.layout, config.training
    shared_by = layout.cp * (1 if routes_together(layout) else layout.tp)
    return max(1, section.local_batch_size * section.seq_len // shared_by // 2)


class Trip:
    """Tokens that travel to experts, drawn at random, and back."""

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
        """What arrives, and what comes back."""
        table, sizes = carrier.plan(self.counts)
        sent = carrier.send(self.x, self.weights, self.order, self.k, table, sizes)
        rows, weights = carrier.landed(sent, table, sizes)
        back = carrier.send_back(rows, weights, table, sizes)
        return [rows, weights, *carrier.gathered(back, self.inverse, self.k)]

    def difference(self, carrier: Carrier, other: Carrier) -> str | None:
        """Why a carrier cannot be used; None where it brings what the other one brings, several times in a row."""

        def attempt() -> None:
            wanted = self.run(other)
            for sign in (1, -1, 1, -1):  # what an earlier trip left must not pass for what this one brings
                self.x *= sign
                found = self.run(carrier)
                wanted = [wanted[0] * sign, wanted[1], wanted[2] * sign, wanted[3]]
                if not all(torch.equal(one, another) for one, another in zip(found, wanted, strict=True)):
                    raise RuntimeError("rows that arrive are not those that were sent")

        reason = symmetric_memory.agreed_reason(attempt)
        if reason is not None:
            symmetric_memory.start_anew()
        return reason

    def seconds(self, carrier: Carrier) -> float:
        samples = [timed(lambda: self.run(carrier), self.device, IN_A_ROW) for _ in range(ROUNDS)]
        return statistics.median(slowest(samples, self.device))
