"""What replicas remember of gradients they have not yet exchanged (PowerSGD), as parts of a checkpoint.

    compression/error/<parameter>   (replicas, ...)      what each replica has left out so far
    compression/q/<parameter>       (tp, columns, rank)  where each tensor-parallel part's power method stands

On the layout that saved them a resumed run goes on bit by bit. For another number of replicas errors are added up and
shared out evenly, so that what is to be made good stays the same; Q are drawn again where they do not fit. Where an
embedding is tied to the output on another pipeline rank, that rank's error is kept as `output.weight`.
"""

from __future__ import annotations

import torch

from shardline.models.decoder import Decoder
from shardline.parallel.mesh import Mesh
from shardline.parallel.replicas import Remembered, Replicas
from shardline.training.pieces import Part, Piece, Place, part_key, place_of
from shardline.training.reading import Shards

ERROR, Q = "compression/error/", "compression/q/"
EMBEDDING, OUTPUT = "tok_embeddings.weight", "output.weight"


def remembered_parts(replicas: Replicas | None, model: Decoder, mesh: Mesh) -> list[Part]:
    parts = []
    for one in replicas.remembered() if replicas is not None else ():
        name = _held_as(one, model)
        whole = (mesh.size("dp_replicate"), *one.parameter.shape)
        parts.append(_part(ERROR + name, one.error, whole, _error_place(one, mesh)))
        parts.append(_part(Q + name, one.q, (mesh.size("tp"), *one.q.shape), _q_place(one, mesh)))
    return parts


def load_remembered(shards: Shards, replicas: Replicas | None, model: Decoder, mesh: Mesh) -> None:
    """Nothing is there where the run that saved did not compress; then these begin as in a new run."""
    for one in replicas.remembered() if replicas is not None else ():
        name = _held_as(one, model)
        one.error.zero_()  # an attempt before may have found its checkpoint damaged halfway
        _load_errors(shards, name, one, model, mesh)
        if Q + name in shards and shards.stored(Q + name).shape == (mesh.size("tp"), *one.q.shape):
            for _, block in shards.blocks(Q + name, _q_place(one, mesh)):
                one.q.copy_(block[0])


def _load_errors(shards: Shards, name: str, one: Remembered, model: Decoder, mesh: Mesh) -> None:
    names = [name, OUTPUT] if name == EMBEDDING and _holds_both_ends(model) else [name]
    stored = {key: shards.stored(key) for each in names if (key := ERROR + each) in shards}
    ranks, own = mesh.size("dp_replicate"), _error_place(one, mesh)
    for key, found in stored.items():
        if found.shape[1:] != tuple(one.parameter.shape):
            continue
        if found.shape[0] == ranks:
            _add(one.error, shards, key, own, 1.0)
            continue
        for replica in range(found.shape[0]):
            _add(one.error, shards, key, Place((replica, *own.start[1:]), own.size), 1.0 / ranks)


def _add(error: torch.Tensor, shards: Shards, key: str, wanted: Place, share: float) -> None:
    for place, block in shards.blocks(key, wanted):
        here = place.within(wanted).slices[1:]
        error[here].add_(block[0].to(error.device), alpha=share)


def _held_as(one: Remembered, model: Decoder) -> str:
    tied_copy = one.name == EMBEDDING and not any(stage.first for stage in model.stages)
    return OUTPUT if tied_copy else one.name


def _holds_both_ends(model: Decoder) -> bool:
    return any(stage.first for stage in model.stages) and any(stage.last for stage in model.stages)


def _part(name: str, tensor: torch.Tensor, shape: tuple[int, ...], place: Place) -> Part:
    return Part(part_key(name, place), tensor[None], tensor.dtype, (Piece(name, shape, place, None),), in_backward=True)


def _error_place(one: Remembered, mesh: Mesh) -> Place:
    held = place_of(one.parameter)
    return Place((mesh.coordinates["dp_replicate"], *held.start), (1, *held.size))


def _q_place(one: Remembered, mesh: Mesh) -> Place:
    return Place((mesh.coordinates["tp"], *(0 for _ in one.q.shape)), (1, *one.q.shape))
