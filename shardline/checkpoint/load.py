"""Fills a model and its optimizer from a checkpoint of any layout: each rank reads the parts that it holds."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from shardline.adapters.lora import trained_parameters
from shardline.adapters.peft_files import open_peft
from shardline.checkpoint.format import MANIFEST, Saved
from shardline.checkpoint.lora.base import changed, recorded, recorded_base
from shardline.checkpoint.reader import ShardFiles
from shardline.checkpoint.shards import Place, TensorPiece, cut, place_of, put, state_pieces, whole_place
from shardline.config.architecture import Architecture
from shardline.errors import UserError
from shardline.models.decoder import Decoder
from shardline.models.dtensor import local
from shardline.models.state import Parameters, check_names, check_shapes, load_logical_state
from shardline.optim.adafactor import COLUMNS, ROWS
from shardline.optim.int8_moments import SCALES, decode, spread, stored_block
from shardline.optim.state import SavedState, prepare_state
from shardline.storage.blocks import Damaged


def load_model(saved: Saved, model: Decoder) -> None:
    """Fill a model from a checkpoint; with LoRA, fill the trained weights from a checkpoint of an adapter."""
    how = model.adaptation
    if how is None:
        load_weights(saved, model)
        return
    differing = changed(saved.trainer.get("lora", {}), recorded(how, recorded_base(saved)))
    if differing:
        raise UserError(f"{saved.path} is of another adapter ({', '.join(differing)}); restore these settings")
    if saved.is_hf:
        _, tensors = open_peft(saved.path, model.arch)
        load_logical_state(trained_parameters(model), tensors, strict=False)
        return
    with _damaged(saved):
        check_shapes(how.shapes(model.arch), set(saved.tensors("model/")))
    for name, parameter in trained_parameters(model).named_parameters():
        _fill(saved.shards, "model/", _pieces(model.arch, name, parameter), parameter)


def load_weights(saved: Saved, model: Parameters) -> None:
    """Fill parameters from a checkpoint of the whole model."""
    if saved.trainer.get("lora") is not None:
        raise UserError(f"{saved.path} holds an adapter, not a whole model; `shardline export --merge` makes one")
    if saved.is_hf:
        load_logical_state(model, saved.weights())
        return
    with _damaged(saved):
        check_names(model.arch, set(saved.tensors("model/")))
    for name, parameter in model.named_parameters():
        _fill(saved.shards, "model/", _pieces(model.arch, name, parameter), parameter)


@contextlib.contextmanager
def _damaged(saved: Saved) -> Iterator[None]:
    """Blame the manifest for tensors that do not fit: its architecture was already compared with the model's."""
    try:
        yield
    except UserError as error:
        raise Damaged(f"{saved.path / MANIFEST}: {error}") from error


def load_optimizer(saved: Saved, model: Decoder, optimizer: torch.optim.Optimizer) -> None:
    load_state(saved.shards, model, optimizer)


def load_state(shards: ShardFiles, model: Decoder, optimizer: torch.optim.Optimizer) -> None:
    """Fill an optimizer's state from the files of a checkpoint."""
    parameters = dict(model.named_parameters())
    for key, target in prepare_state(optimizer, model, _saved_state(shards, model)):
        kind, name = key.split(".", 1)
        pieces = state_pieces(model.arch, kind, name, target, parameters[name])
        if pieces and pieces[0].rows is None and pieces[0].half is None:  # the same state under every logical name
            pieces = pieces[:1]
        _fill(shards, f"optimizer/{kind}/", pieces, target)


def _saved_state(shards: ShardFiles, model: Decoder) -> dict[str, SavedState]:
    """The saved state of this rank's parameters by `<kind>.<parameter>` (`exp_avg.norm.weight`), codes as values."""
    kinds = {name.split("/", 2)[1] for name in shards if name.startswith("optimizer/")}
    kinds = {kind for kind in kinds if kind.removesuffix(SCALES) == kind or kind.removesuffix(SCALES) not in kinds}
    found: dict[str, SavedState] = {}
    for name, parameter in model.named_parameters():
        whole = cut(model.arch, name, parameter.shape, whole_place(parameter.shape))
        for kind in sorted(kinds):
            keys = [f"optimizer/{kind}/{piece.name}" for piece in whole]
            if not all(key in shards for key in keys):
                continue
            stored = [shards.stored(key) for key in keys]
            shape = _state_shape(kind, [one.shape for one in stored], whole, tuple(parameter.shape))
            coded = f"optimizer/{kind}{SCALES}/{whole[0].name}" in shards
            found[f"{kind}.{name}"] = SavedState(shape, torch.float32 if coded else stored[0].dtype)
    return found


def _state_shape(
    kind: str, stored: list[tuple[int, ...]], whole: list[TensorPiece], shape: tuple[int, ...]
) -> tuple[int, ...]:
    """The shape of the state in this run, from the shapes of its logical tensors and of the parameter."""
    if stored == [piece.shape for piece in whole]:
        return shape
    if kind == ROWS and stored == [(*piece.shape[:-1], 1) for piece in whole]:
        return (*shape[:-1], 1)
    if kind == COLUMNS and stored == [(*piece.shape[:-2], 1, piece.shape[-1]) for piece in whole]:
        fused = whole[0].rows is not None
        return (*shape[:-2], len(whole) if fused else 1, shape[-1])
    return stored[0]


def _pieces(arch: Architecture, name: str, tensor: Tensor) -> list[TensorPiece]:
    return cut(arch, name, tensor.shape, place_of(tensor))


def _fill(shards: ShardFiles, prefix: str, pieces: list[TensorPiece], tensor: Tensor) -> None:
    held = local(tensor.detach())
    for piece in pieces:
        stored = shards.stored(prefix + piece.name)
        if stored.shape != piece.shape:
            where = shards.folder / MANIFEST
            raise Damaged(f"{where}: {piece.name} has shape {stored.shape}, but the model needs {piece.shape}")
        scales = _scales(shards, f"{prefix.removesuffix('/')}{SCALES}/{piece.name}", piece)
        for place, block in shards.blocks(prefix + piece.name, piece.place):
            values = block if scales is None else decode(block, scales[place.within(piece.place).slices])
            put(held, piece, place, values)


def _scales(shards: ShardFiles, name: str, piece: TensorPiece) -> Tensor | None:
    """The scale of every element of a piece that was saved in 8 bits; None for other pieces."""
    if name not in shards:
        return None
    blocks, columns = shards.stored(name).shape[-1], piece.shape[-1]
    length, (*start, first), (*size, width) = stored_block(columns, blocks), piece.place.start, piece.place.size
    rows = Place((*start, 0), (*size, blocks)).slices
    return spread(shards.read(name, rows), length, width, first)
