"""Fills a model and its optimizer from a checkpoint of any layout: each rank reads what it holds."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from shardline.checkpoint.format import Saved
from shardline.checkpoint.reader import ShardFiles
from shardline.checkpoint.shards import TensorPiece, cut, place_of, put, whole_place
from shardline.config.architecture import Architecture
from shardline.errors import UserError
from shardline.models.decoder import Decoder
from shardline.models.dtensor import local
from shardline.models.fused_weights import logical_names
from shardline.models.state import check_names, load_logical_state
from shardline.optim.state import SavedState, prepare_state


def load_model(saved: Saved, model: Decoder) -> None:
    if saved.is_hf:
        load_logical_state(model, saved.weights())
        return
    shards = saved.shards
    check_names(model.arch, set(saved.tensors("model/")))
    for name, parameter in model.named_parameters():
        _fill(shards, "model/", _pieces(model.arch, name, parameter), parameter)


def load_optimizer(saved: Saved, model: Decoder, optimizer: torch.optim.Optimizer) -> None:
    shards = saved.shards
    found = _saved_state(shards, model)
    state = prepare_state(optimizer, model, {key: one.state for key, one in found.items()})
    for key, one in found.items():
        target = state[key]
        if one.follows:
            _fill(shards, f"optimizer/{one.kind}/", _pieces(model.arch, one.name, target), target)
        else:  # the same under every logical name
            logical = logical_names(model.arch, one.name)[0]
            pieces = [TensorPiece(logical, one.state.shape, place_of(target), None)]
            _fill(shards, f"optimizer/{one.kind}/", pieces, target)


class _ParameterState(NamedTuple):
    """State of one kind (`exp_avg`, `step`, ...) that a checkpoint has for a parameter."""

    kind: str
    name: str  # of the parameter
    state: SavedState
    follows: bool  # it has the parameter's shape


def _saved_state(shards: ShardFiles, model: Decoder) -> dict[str, _ParameterState]:
    """State of this rank's parameters, by `<kind>.<parameter>`."""
    kinds = sorted({name.split("/", 2)[1] for name in shards if name.startswith("optimizer/")})
    found: dict[str, _ParameterState] = {}
    for name, parameter in model.named_parameters():
        whole = cut(model.arch, name, parameter.shape, whole_place(parameter.shape))
        for kind in kinds:
            keys = [f"optimizer/{kind}/{piece.name}" for piece in whole]
            if not all(key in shards for key in keys):
                continue
            stored = [shards.stored(key) for key in keys]
            follows = [one.shape for one in stored] == [piece.shape for piece in whole]
            shape = tuple(parameter.shape) if follows else stored[0].shape
            found[f"{kind}.{name}"] = _ParameterState(kind, name, SavedState(shape, stored[0].dtype), follows)
    return found


def _pieces(arch: Architecture, name: str, tensor: Tensor) -> list[TensorPiece]:
    return cut(arch, name, tensor.shape, place_of(tensor))


def _fill(shards: ShardFiles, prefix: str, pieces: list[TensorPiece], tensor: Tensor) -> None:
    held = local(tensor.detach())
    for piece in pieces:
        stored = shards.stored(prefix + piece.name)
        if stored.shape != piece.shape:
            raise UserError(f"{piece.name} has shape {stored.shape}, the model wants {piece.shape}")
        for place, block in shards.blocks(prefix + piece.name, piece.place):
            put(held, piece, place, block)
