"""The checkpointed state of workers that train independently between synchronisations (local SGD, DiLoCo).

    model/<name>, optimizer/<kind>/<name>     the global weights, and the optimizer state of worker 0: a checkpoint like
                                              any other, which a synchronous run can resume, too
    workers/<worker>/model/<name>             each worker's own weights
    workers/<worker>/optimizer/<kind>/<name>  the optimizer state of the other workers
    outer/momentum/model/<name>               the momentum of the outer steps
    outer/average/model/<name>                averages that were sent but not yet applied

A run resumed with the same number of workers continues bit for bit, if the layout within them is the same. With another
number, all workers start from the global weights, and what each learned since the last synchronisation is lost.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from shardline.checkpoint.load import load_state
from shardline.checkpoint.reader import ShardFiles
from shardline.checkpoint.shards import HeldTensor, held_state, held_weights, put
from shardline.comm.mesh import Mesh
from shardline.models.decoder import Decoder
from shardline.parallel.data.diloco import Arrived, Fragment, OuterLoop
from shardline.words import counted

log = logging.getLogger("shardline")
WORKERS, MOMENTUM, AVERAGE = "workers/", "outer/momentum/", "outer/average/"


class WorkerState:
    """What this rank saves and loads for its worker; `outer` is None if gradients are summed every step."""

    def __init__(self, outer: OuterLoop | None, model: Decoder, optimizer: torch.optim.Optimizer, mesh: Mesh) -> None:
        self.outer, self.model, self.optimizer, self.mesh = outer, model, optimizer, mesh
        self.loaded = False

    # ---- saving ------------------------------------------------------------------------------------------------------

    def weights(self, dtype: torch.dtype | None = None) -> list[HeldTensor]:
        """The weights that a checkpoint stores as the model's: the global ones, if workers have their own."""
        held = held_weights(self.model, dtype)
        return held if self.outer is None else self._with(held, "values")

    def held(self) -> list[HeldTensor]:
        """The state of this rank's optimizer, and whatever else its worker needs to continue."""
        state = held_state(self.model, self.optimizer)
        if self.outer is None:
            return state
        own = f"{WORKERS}{self.mesh.worker}/"
        trained = self._trained()
        state = state if self.mesh.worker == 0 else [_named(one, own) for one in state]
        momenta = self._with(trained, "momenta", MOMENTUM)
        return [*state, *(_named(one, own) for one in trained), *momenta, *self._averages(trained)]

    def _trained(self) -> list[HeldTensor]:
        assert self.outer is not None
        known = {tensor.data_ptr() for fragment in self.outer.fragments for tensor in fragment.own}
        return [one for one in held_weights(self.model) if one.tensor.data_ptr() in known]

    def _with(self, held: list[HeldTensor], what: str, prefix: str = "") -> list[HeldTensor]:
        """Replace the worker's own weights in `held` by the fragments' `values` or `momenta`."""
        assert self.outer is not None
        other = {
            own.data_ptr(): tensor
            for fragment in self.outer.fragments
            for own, tensor in zip(fragment.own, getattr(fragment, what), strict=True)
        }
        swapped = [replace(one, tensor=other.get(one.tensor.data_ptr(), one.tensor)) for one in held]
        return [_named(one, prefix) for one in swapped] if prefix else swapped

    def _averages(self, trained: list[HeldTensor]) -> Iterator[HeldTensor]:
        """Wait for the averages that were sent, and yield them."""
        for fragment in self._fragments():
            if fragment.sent is not None:
                pairs = zip(fragment.own, fragment.sent.wait(), strict=True)
                there = {own.data_ptr(): average for own, average in pairs}
                for one in trained:
                    average = there.get(one.tensor.data_ptr())
                    if average is not None:
                        yield _named(replace(one, tensor=average, dtype=average.dtype), AVERAGE)

    def _fragments(self) -> list[Fragment]:
        return [] if self.outer is None else self.outer.fragments

    # ---- loading -----------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Start from the model's weights as the global ones, unless a checkpoint had more state."""
        if self.outer is not None and not self.loaded:
            self.outer.begin()

    def load(self, shards: ShardFiles) -> None:
        """Load what the checkpoint has; model and optimizer already have its global weights and worker 0's state."""
        saved = _workers_in(shards)
        workers = self.mesh.workers
        if saved and saved != (0 if self.outer is None else workers):
            log.warning(
                "the checkpoint has the states of %s, but there %s now: all start from the global weights, and what"
                " each learned since the last synchronisation is lost",
                counted(saved, "worker"),
                "are none" if self.outer is None else f"are {workers}" if workers > 1 else "is 1",
            )
        if self.outer is None:
            return
        self.outer.begin()
        self.loaded = True
        trained = self._trained()
        _fill(self._with(trained, "momenta", MOMENTUM), shards)
        source = self.mesh.worker % saved if saved else 0
        if source:
            load_state(shards.below(f"{WORKERS}{source}/"), self.model, self.optimizer)
        if saved == workers:
            _fill([_named(one, f"{WORKERS}{self.mesh.worker}/") for one in trained], shards)
            self._load_averages(trained, shards)

    def _load_averages(self, trained: list[HeldTensor], shards: ShardFiles) -> None:
        held = {one.tensor.data_ptr(): one for one in trained}
        for fragment in self._fragments():
            ours = [held[own.data_ptr()] for own in fragment.own if own.data_ptr() in held]
            there = [piece.name for one in ours for piece in one.pieces if AVERAGE + piece.name in shards]
            if there and len(there) == sum(len(one.pieces) for one in ours):
                averages = [torch.zeros_like(own, dtype=torch.float32) for own in fragment.own]
                places = {own.data_ptr(): average for own, average in zip(fragment.own, averages, strict=True)}
                _fill([_named(replace(one, tensor=places[one.tensor.data_ptr()]), AVERAGE) for one in ours], shards)
                fragment.sent = Arrived(averages)
            elif there:
                log.warning("an average that was sent but not yet applied is dropped: fragments have other layers now")


class LocalState(WorkerState):
    """The state of asynchronous workers that take local steps. When they save, all have the same weights.

    Each has its own optimizer; the rank that serves a tensor also has its momentum of the outer steps.
    """

    def __init__(
        self,
        momenta: Sequence[tuple[Tensor, Tensor]],
        model: Decoder,
        optimizer: torch.optim.Optimizer,
        mesh: Mesh,
    ) -> None:
        """`momenta`: pairs of a weight that this rank serves and its momentum."""
        super().__init__(None, model, optimizer, mesh)
        self.momenta = {own.data_ptr(): momentum for own, momentum in momenta}

    def held(self) -> list[HeldTensor]:
        state = super().held()
        state = state if self.mesh.worker == 0 else [_named(one, f"{WORKERS}{self.mesh.worker}/") for one in state]
        return [*state, *self._momenta()]

    def load(self, shards: ShardFiles) -> None:
        saved = _workers_in(shards)
        if saved and saved != self.mesh.workers:
            words = "the checkpoint has the states of %s, but there are %d now: some start with the state of another"
            log.warning(words, counted(saved, "worker"), self.mesh.workers)
        _fill(self._momenta(), shards)
        source = self.mesh.worker % saved if saved else 0
        if source:
            load_state(shards.below(f"{WORKERS}{source}/"), self.model, self.optimizer)

    def _momenta(self) -> list[HeldTensor]:
        held = [one for one in held_weights(self.model) if one.tensor.data_ptr() in self.momenta]
        return [_named(replace(one, tensor=self.momenta[one.tensor.data_ptr()]), MOMENTUM) for one in held]


def _workers_in(shards: ShardFiles) -> int:
    """Count the workers with a state in a checkpoint; worker 0's may be that of the checkpoint itself."""
    return max((1 + int(name.split("/", 2)[1]) for name in shards if name.startswith(WORKERS)), default=0)


def _named(one: HeldTensor, prefix: str) -> HeldTensor:
    """Return the tensor under names with this prefix, and with a new key."""
    digest = hashlib.blake2b(f"{prefix} {one.key}".encode(), digest_size=8).digest()
    pieces = tuple(piece._replace(name=prefix + piece.name) for piece in one.pieces)
    return replace(one, key=int.from_bytes(digest, "little"), pieces=pieces)


def _fill(held: list[HeldTensor], shards: ShardFiles) -> None:
    """Fill the tensors that the checkpoint has."""
    for one in held:
        if all(piece.name in shards for piece in one.pieces):
            for piece in one.pieces:
                for place, block in shards.blocks(piece.name, piece.place):
                    put(one.tensor, piece, place, block)
