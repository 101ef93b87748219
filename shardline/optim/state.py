"""The state of an optimizer as named tensors, which a checkpoint saves and a loaded checkpoint fills."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardline.errors import UserError
from shardline.models.dtensor import local
from shardline.models.state import misfits
from shardline.optim.adafactor import COLUMNS, ROWS, Adafactor
from shardline.optim.gpu_adam import GPUAdam
from shardline.optim.int8_moments import SCALES
from shardline.optim.lamb import Lamb, Lars
from shardline.optim.lion import OneMoment
from shardline.optim.muon import Muon
from shardline.optim.narrow_adam import NarrowAdam, adam_state, keep_moment
from shardline.optim.optimizer import BUILT_IN


def optimizer_state(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """The live state tensors as "exp_avg.<parameter>", "exp_avg_sq.<parameter>", "step.<parameter>".

    Adam's exist from the start (zeros); a registered optimizer has those it has created so far. Moments in 8 bits are
    codes, with their scales in "exp_avg_scale.<parameter>".
    """
    tensors = {}
    for name, parameter in _named(optimizer, model).items():
        for kind, value in _state_of(optimizer, parameter).items():
            if not isinstance(value, Tensor):
                raise UserError(
                    f"the optimizer keeps {kind!r} of {name} as a {type(value).__name__}, but a checkpoint holds only"
                    f" tensors: keep it as a 0-d tensor"
                )
            tensors[f"{kind}.{name}"] = value
    return tensors


class SavedState(NamedTuple):
    """Shape and type of a saved state tensor, known before it is read."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def prepare_state(
    optimizer: torch.optim.Optimizer, model: nn.Module, saved: Mapping[str, SavedState]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the optimizer's state tensors; the caller fills each from the saved one before asking for the next.

    They have the dtype and sharding of this run; a registered optimizer without state gets those that were saved. 8-bit
    moments are filled as float32 values and coded afterwards, so `saved` never has scales.
    """
    own = {key: state for key, state in optimizer_state(optimizer, model).items() if not _is_scales(key, optimizer)}
    parameters = _named(optimizer, model)
    _check_names(own, saved, parameters)
    for key, (shape, _) in saved.items():
        if key in own and tuple(own[key].shape) != shape:
            raise UserError(f"optimizer state {key}: shape {shape} was saved, but {tuple(own[key].shape)} is needed")
    for key, (shape, dtype) in saved.items():
        if key not in own:
            kind, name = key.split(".", 1)
            parameter = parameters[name]
            if shape == tuple(parameter.shape):  # sharded like the parameter
                state = torch.empty_like(parameter, dtype=dtype, requires_grad=False)
            else:
                state = torch.empty(shape, dtype=dtype, device=parameter.device)
            own[key] = optimizer.state[parameter][kind] = state
    return _targets(optimizer, {key: own[key] for key in saved}, parameters)


def _targets(
    optimizer: torch.optim.Optimizer, own: Mapping[str, Tensor], parameters: Mapping[str, nn.Parameter]
) -> Iterator[tuple[str, Tensor]]:
    for key, tensor in own.items():
        kind, name = key.split(".", 1)
        state = optimizer.state[parameters[name]]
        if not isinstance(optimizer, NarrowAdam | GPUAdam) or kind + SCALES not in state:
            yield key, tensor
            continue
        wide = torch.zeros_like(tensor, dtype=torch.float32)
        yield key, wide
        keep_moment(parameters[name], state, kind, local(wide))


def _is_scales(key: str, optimizer: torch.optim.Optimizer) -> bool:
    return isinstance(optimizer, NarrowAdam | GPUAdam) and key.split(".", 1)[0].endswith(SCALES)


def has_rows_of(kind: str, state: Tensor, parameter: Tensor) -> bool:
    """Whether state is sharded and fused like its parameter: it has the same shape, or numbers for each row."""
    of_rows = (kind.endswith(SCALES) or kind == ROWS) and parameter.ndim > 1
    return state.shape == parameter.shape or (of_rows and state.shape[:-1] == parameter.shape[:-1])


def has_columns_of(kind: str, state: Tensor, parameter: Tensor) -> bool:
    """Whether state has one row for each matrix of its parameter, or for each matrix fused in it."""
    alike = state.ndim == parameter.ndim > 1 and state.shape[:-2] == parameter.shape[:-2]
    return kind == COLUMNS and alike and state.shape[-1] == parameter.shape[-1]


def _check_names(own: Mapping[str, Tensor], given: Collection[str], parameters: Mapping[str, Tensor]) -> None:
    """Refuse missing state and state of another model; a registered optimizer that has not stepped accepts any kind."""
    missing = [key for key in own if key not in given]
    kinds = {key.split(".", 1)[0] for key in own}
    unexpected = []
    for key in sorted(given):
        kind, _, name = key.partition(".")
        if name not in parameters or (kinds and kind not in kinds):
            unexpected.append(key)
    if missing or unexpected:
        problems = misfits(missing, unexpected, most=4)
        raise UserError(f"the saved optimizer state does not fit this model and optimizer; {problems}")


def _named(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, nn.Parameter]:
    """The optimizer's parameters by their names in the model."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return {names[parameter]: parameter for parameter in parameters}


def _state_of(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> dict[str, Any]:
    state, options = optimizer.state[parameter], optimizer.defaults
    if state:
        return state
    if isinstance(optimizer, Adafactor | GPUAdam | Lamb | Lars | Muon | NarrowAdam | OneMoment):
        state.update(optimizer.initial_state(parameter))
    elif type(optimizer) in BUILT_IN.values() and not options["amsgrad"]:
        on_device = options["fused"] or options["capturable"]
        state.update(adam_state(parameter, counts_on=parameter.device if on_device else "cpu"))
    return state
