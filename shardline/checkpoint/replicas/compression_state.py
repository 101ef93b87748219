"""The state of gradient compression in a checkpoint: the error that compression has left out of gradients so far.

    compression/error/<parameter>   (replicas x rows, ...)  the error of each replica, or of each of its tensor-parallel
                                                            ranks if those add up gradients
    compression/q/<parameter>       (tp x columns, rank)    PowerSGD's matrix Q of each tensor-parallel shard

A run resumed on the same layout continues bit for bit. On another number of replicas, errors are added up and shared
out evenly, so that their sum stays the same; Q is drawn again if it does not fit. If an embedding is tied to the output
on another pipeline rank, that rank's error is saved as `output.weight`.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable

import torch
from torch import nn

from shardline.checkpoint.reader import ShardFiles
from shardline.checkpoint.shards import HeldTensor, Place, TensorPiece, held_key, place_of
from shardline.comm.mesh import Mesh
from shardline.models.decoder import Decoder
from shardline.parallel.data.ddp import LeftOut, Replicas
from shardline.parallel.data.replica_sums import left_out_of_shards

log = logging.getLogger("shardline")
ERROR, Q = "compression/error/", "compression/q/"
EMBEDDING, OUTPUT = "tok_embeddings.weight", "output.weight"


class CompressionState:
    """The compression state on this rank; empty if nothing is compressed."""

    def __init__(
        self, replicas: Replicas | None, model: Decoder, mesh: Mesh, summed_over_tp: Iterable[nn.Parameter] = ()
    ) -> None:
        self.mesh = mesh
        self.left_out = functools.partial(left_out_of_shards, model) if replicas is None else replicas.left_out
        self.summed_over_tp = {id(parameter) for parameter in summed_over_tp}
        self.names = {name for name, _ in model.named_parameters()}
        self.first = any(stage.first for stage in model.stages)
        self.last = any(stage.last for stage in model.stages)

    def held(self) -> list[HeldTensor]:
        found = []
        for name, one in self._held().items():
            place = self._error_place(one)
            rows, *rest = one.parameter.shape or (1,)
            shape = (self._holder(one)[1] * rows, *rest)
            found.append(_held_tensor(ERROR + name, one.error.view(place.size), shape, place))
            if one.q is not None:
                found.append(_held_tensor(Q + name, one.q, self._q_shape(one.q), self._q_place(one.q)))
        return found

    def load(self, shards: ShardFiles) -> None:
        """Load what the checkpoint has; the rest starts as in a new run."""
        held = self._held()
        for name, one in held.items():
            one.error.zero_()  # an earlier attempt may have failed halfway on a damaged checkpoint
            tied_here = name == EMBEDDING and self.first and self.last and OUTPUT not in self.names
            sources = [name, OUTPUT] if tied_here else [name]
            for key in (ERROR + source for source in sources if ERROR + source in shards):
                self._add_errors(shards, key, one)
            if one.q is not None and Q + name in shards and shards.stored(Q + name).shape == self._q_shape(one.q):
                _add(one.q.zero_(), shards, Q + name, self._q_place(one.q), 1.0)
        saved = {name.removeprefix(ERROR) for name in shards if name.startswith(ERROR)}
        fresh = {one.name for name, one in held.items() if name not in saved} - saved if saved else set()
        lost = (saved & self.names) - {one.name for one in held.values()}
        if lost or fresh:
            log.warning(
                "compression errors are not loaded for %d parameters of this rank: they are fused, sharded or"
                " compressed differently now",
                len(lost | fresh),
            )

    def _held(self) -> dict[str, LeftOut]:
        """This rank's state by its names in the files."""
        return {OUTPUT if one.name == EMBEDDING and not self.first else one.name: one for one in self.left_out()}

    def _add_errors(self, shards: ShardFiles, key: str, one: LeftOut) -> None:
        (_, holders), own = self._holder(one), self._error_place(one)
        rows, error = (one.parameter.shape or (1,))[0], one.error.view(own.size)
        saved = shards.stored(key).shape[0] // rows
        if saved == holders:
            _add(error, shards, key, own, 1.0)
            return
        first = own.start[0] % rows
        for holder in range(saved):
            place = Place((holder * rows + first, *own.start[1:]), own.size)
            _add(error, shards, key, place, 1.0 / holders)

    def _holder(self, one: LeftOut) -> tuple[int, int]:
        """This rank's index among the ranks that each keep an error for the same element, and their number."""
        holder, holders = self.mesh.coordinates["dp_replicate"], self.mesh.size("dp_replicate")
        if id(one.parameter) in self.summed_over_tp:
            return holder * self.mesh.size("tp") + self.mesh.coordinates["tp"], holders * self.mesh.size("tp")
        return holder, holders

    def _error_place(self, one: LeftOut) -> Place:
        held, (holder, _) = place_of(one.parameter), self._holder(one)
        rows, start = (one.parameter.shape or (1,))[0], held.start or (0,)
        return Place((holder * rows + start[0], *start[1:]), held.size or (1,))

    def _q_shape(self, q: torch.Tensor) -> tuple[int, int]:
        columns, rank = q.shape
        return self.mesh.size("tp") * columns, rank

    def _q_place(self, q: torch.Tensor) -> Place:
        columns, rank = q.shape
        return Place((self.mesh.coordinates["tp"] * columns, 0), (columns, rank))


def _held_tensor(name: str, tensor: torch.Tensor, shape: tuple[int, ...], place: Place) -> HeldTensor:
    return HeldTensor(
        held_key(name, place), tensor, tensor.dtype, (TensorPiece(name, shape, place, None),), changes_in_backward=True
    )


def _add(tensor: torch.Tensor, shards: ShardFiles, key: str, wanted: Place, share: float) -> None:
    for place, block in shards.blocks(key, wanted):
        tensor[place.within(wanted).slices].add_(block.to(tensor.device), alpha=share)
