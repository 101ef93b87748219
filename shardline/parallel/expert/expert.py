"""Expert parallelism: ranks hold different experts, and tokens are sent to them.

The `dp_shard x cp x tp` ranks of a replica, which hold different tokens, are `expert_shard x ep x etp` for the experts:

    ep             each rank holds experts / ep of the experts; rows are sent over this axis (dispatch.py)
    etp            1: an expert's matrices are whole; tp: they are sharded as tensor parallelism shards a feed-forward
                   layer, and the ranks of tp route the same tokens
    expert_shard   FSDP shards the experts over the remaining ranks

Without expert parallelism, tensor parallelism shards every expert (etp = tp).
"""

from __future__ import annotations

import functools

from torch import Tensor
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from shardline.comm import collectives
from shardline.comm.job import job
from shardline.comm.mesh import Mesh
from shardline.config.architecture import Architecture, MixtureOfExperts
from shardline.config.layout import Layout, routes_together
from shardline.models.decoder import Decoder
from shardline.models.experts.moe import ExpertExchange, RouterRun, Travel
from shardline.parallel.expert import deepep
from shardline.parallel.expert.all_to_all import AllToAll
from shardline.parallel.expert.dispatch import arrive, collect, depart, leave
from shardline.parallel.tensor.tensor import planned_cut, replace_parameter


def exchange(
    mesh: Mesh, moe: MixtureOfExperts, sequence_parallel: bool, narrow: bool, by_deepep: bool = False
) -> ExpertExchange:
    """Return how tokens reach the experts in this layout; in float8 if `narrow`.

    The shared expert hides the transfers. Without one, and if the host sends the rows, tokens are sent in two parts,
    each while the experts compute the other. On GPUs, two parts took longer than one: each part has separate products,
    and weight gradients are then sums of two.
    """
    layout, chosen = mesh.layout, ExpertExchange()
    if routes_together(layout):
        into, back = (
            (collectives.all_gather, collectives.reduce_scatter)
            if sequence_parallel
            else (collectives.copy, collectives.all_reduce)
        )
        chosen = chosen._replace(
            gather=functools.partial(into, axis="tp"),
            scatter=functools.partial(back, axis="tp"),
            share=1 / layout.tp,
        )
    elif layout.tp > 1:
        chosen = chosen._replace(place=mesh.coordinates["tp"])
        if not sequence_parallel:
            chosen = chosen._replace(
                gather=functools.partial(collectives.split, axis="tp"),
                scatter=functools.partial(collectives.join, axis="tp"),
            )
    shared = [axis for axis in ("cp", "tp") if mesh.size(axis) > 1 and (axis == "cp" or not routes_together(layout))]
    if shared:
        chosen = chosen._replace(add_up=functools.partial(_add_up, axes=tuple(shared)))
    if layout.ep > 1:
        parts = 2 if not moe.shared_dim and mesh.device_type == "cpu" else 1
        travel = Travel(functools.partial(depart, narrow=narrow), arrive, leave, collect, parts)
        chosen = chosen._replace(travel=deepep.TRAVEL._replace(parts=parts) if by_deepep else travel)
    return chosen


def sent_in_a_pass(arch: Architecture, layout: Layout, tokens: int, itemsize: int) -> int:
    """Return the bytes that a rank sends in one pass through a layer with experts, if tokens are spread evenly.

    Rows of `dim` numbers of `itemsize` bytes are sent to the experts and back; on the way there, each has a float32
    weight. `tokens` is the number of tokens of a micro-batch, of which ranks route different parts.
    """
    if arch.moe is None:
        return 0
    routed = tokens // layout.cp // (1 if routes_together(layout) else layout.tp)
    return routed * arch.moe.top_k * (2 * arch.dim * itemsize + 4) * (layout.ep - 1) // layout.ep


def _add_up(x: Tensor, axes: tuple[str, ...]) -> Tensor:
    for axis in axes:
        x = collectives.all_reduce(x, axis)
    return x


def apply_experts(
    model: Decoder, mesh: Mesh, sequence_parallel: bool, run: RouterRun, narrow: bool, by_deepep: bool
) -> None:
    """Keep only this rank's experts (still on the meta device), and tell the blocks how tokens reach the experts."""
    layout = mesh.layout
    assert model.arch.moe is not None
    way = exchange(mesh, model.arch.moe, sequence_parallel, narrow, by_deepep)
    for block in model.blocks():
        if block.moe is not None:
            block.spec = block.spec._replace(exchange=way, run=run)
    if layout.ep == 1:
        return
    if not by_deepep:  # deepep.start has already set DeepEP's buffer
        job.carrier = AllToAll()
    shared, cut = layout.etp > 1, mesh.of_experts("ep", "etp")
    for name, parameter in list(model.named_parameters()):
        if ".experts." not in name:
            continue
        placements: list[Placement] = [Shard(0)]
        if shared:
            placements.append(planned_cut(name))
        replace_parameter(model, name, distribute_tensor(parameter.detach(), cut, placements, src_data_rank=None))
