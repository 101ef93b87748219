"""Loads state into an optimizer from tensors in memory, as tests do; a run fills it from a checkpoint's files."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardline.models.dtensor import local, local_slices
from shardline.optim.int8_moments import SCALES, decode, spread, stored_block
from shardline.optim.state import SavedState, prepare_state


def load_optimizer_state(optimizer: torch.optim.Optimizer, model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Put tensors named as in `optimizer_state` into the optimizer, in the dtype and on the device its state has.

    Given tensors are whole, or sharded as the parameters are; sharded state takes its part of a whole tensor.
    """
    tensors = {key: _decoded(key, tensor, tensors) for key, tensor in tensors.items() if SCALES + "." not in key}
    saved = {key: SavedState(tuple(tensor.shape), tensor.dtype) for key, tensor in tensors.items()}
    for key, state in prepare_state(optimizer, model, saved):
        if isinstance(tensors[key], DTensor):
            state.copy_(tensors[key])
        else:
            local(state).copy_(tensors[key][local_slices(state)])


def _decoded(key: str, tensor: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
    scales = tensors.get(key.replace(".", SCALES + ".", 1))
    if scales is None:
        return tensor
    columns = tensor.shape[-1]
    return decode(tensor, spread(scales, stored_block(columns, scales.shape[-1]), columns))
