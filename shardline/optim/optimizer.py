"""The optimizer from the config, its learning rate, and its state as named tensors.

State has the dtype of its parameter: float32 with float32 parameters (mixed precision included), bfloat16 with
`training.dtype = "bfloat16"`; `optimizer.state_dtype = "bfloat16"` keeps the moments of float32 parameters in it too.
The learning rate stays a plain number: the update is not compiled, so a new value costs nothing, and a tensor would
have to be copied to the device each step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardline import registry
from shardline.config.names import LAYERWISE
from shardline.errors import ConfigError, UserError
from shardline.models.dtensor import copy_into, local
from shardline.optim.bfloat16_moments import NarrowAdam
from shardline.optim.lamb import Lamb, Lars, Reduce, fused_parts

if TYPE_CHECKING:
    from shardline.config.schema import Config
    from shardline.config.schema import Optimizer as Section

log = logging.getLogger("shardline")

BUILT_IN: dict[str, Callable[..., torch.optim.Adam]] = {"AdamW": torch.optim.AdamW, "Adam": torch.optim.Adam}
# Each pair is passed whole: leaving one out would let torch choose.
IMPLEMENTATIONS = {
    "fused": {"fused": True, "foreach": False},
    "foreach": {"fused": False, "foreach": True},
    "for-loop": {"fused": False, "foreach": False},
}


def build_optimizer(config: Config, model: nn.Module, reduce: Reduce | None = None) -> torch.optim.Optimizer:
    """`optimizer.name` over the parameters that are trained: a built-in one, or a registered one.

    `reduce` sums the small vectors that LAMB and LARS need from all ranks; None takes torch.distributed's all-reduce.
    """
    section = config.optimizer
    if section.name in registry.optimizers:
        built = registry.optimizers[section.name](parameter_groups(section, model), section)
        if not isinstance(built, torch.optim.Optimizer):
            kind = type(built).__name__
            raise ConfigError(
                f"optimizer.name = {section.name!r}: its function gave {kind}, not a torch.optim.Optimizer"
            )
        return built
    if section.name in LAYERWISE:
        return _build_layerwise(section, model, reduce)
    adam = _build_adam(section, parameter_groups(section, model))
    wide = any(parameter.dtype != torch.bfloat16 for group in adam.param_groups for parameter in group["params"])
    return NarrowAdam(adam) if section.state_dtype == "bfloat16" and wide else adam


def scaled_lr(config: Config, global_batch_size: int) -> float:
    """The peak learning rate: `optimizer.lr`, in proportion to the batch with `lr_scaling = "linear"`."""
    section = config.optimizer
    if section.lr_scaling == "none":
        return section.lr
    return section.lr * global_batch_size / section.lr_scaling_base_batch


def parameter_groups(section: Section, model: nn.Module) -> list[dict[str, Any]]:
    """One group; two with `decay_norms = false`, where norm weights and biases (1-D) get no weight decay."""
    if section.decay_norms:
        return [{"params": _trained(model), "weight_decay": section.weight_decay}]
    return _two_groups(section, model)


def _trained(model: nn.Module) -> list[nn.Parameter]:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trained:
        raise UserError("the model has no parameter to train: every one is frozen")
    for name, parameter in model.named_parameters():
        if not local(parameter).is_contiguous():  # torch's fused CPU kernel would step the wrong elements in silence
            raise ValueError(f"{name} is not contiguous in memory")
    return trained


def _two_groups(section: Section, model: nn.Module) -> list[dict[str, Any]]:
    trained = _trained(model)
    groups = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": section.weight_decay},
        {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _build_layerwise(section: Section, model: nn.Module, reduce: Reduce | None) -> Lamb | Lars:
    """LAMB or LARS: matrices take trust ratios and decay, norm weights and biases neither."""
    groups = [{**group, "adapt": group["params"][0].ndim > 1} for group in _two_groups(section, model)]
    parts = fused_parts(model)
    if section.name == "LAMB":
        options = {"lr": section.lr, "betas": (section.beta1, section.beta2), "eps": section.eps}
        return Lamb(groups, options, parts, reduce)
    options = {"lr": section.lr, "momentum": section.beta1, "trust_coefficient": section.trust_coefficient}
    return Lars(groups, options, parts, reduce)


def _build_adam(section: Section, groups: list[dict[str, Any]]) -> torch.optim.Adam:
    def build(implementation: str) -> torch.optim.Adam:
        return BUILT_IN[section.name](
            groups,
            lr=section.lr,
            betas=(section.beta1, section.beta2),
            eps=section.eps,
            weight_decay=section.weight_decay,
            **IMPLEMENTATIONS[implementation],
        )

    try:
        return build(section.implementation)
    except RuntimeError as error:
        if section.implementation != "fused":
            raise
        log.warning("optimizer.implementation: fused does not run here (%s); foreach runs instead", error)
        return build("foreach")


def optimizer_state(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """The live state tensors as "exp_avg.<parameter>", "exp_avg_sq.<parameter>", "step.<parameter>".

    Adam's exist from the start (zeros); a registered optimizer's are those it has made so far.
    """
    tensors = {}
    for name, parameter in _named(optimizer, model).items():
        for kind, value in _state_of(optimizer, parameter).items():
            if not isinstance(value, Tensor):
                raise UserError(
                    f"the optimizer keeps {kind!r} of {name} as a {type(value).__name__};"
                    f" a checkpoint holds tensors: keep it as a 0-d tensor"
                )
            tensors[f"{kind}.{name}"] = value
    return tensors


class SavedState(NamedTuple):
    """What is known of a saved state tensor before it is read."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def prepare_state(
    optimizer: torch.optim.Optimizer, model: nn.Module, saved: Mapping[str, SavedState]
) -> dict[str, Tensor]:
    """The optimizer's live state tensors, to be filled, for saved ones named as in `optimizer_state`.

    They have the dtype and the cut that state has here; a registered optimizer that has none yet gets what was saved.
    """
    own = optimizer_state(optimizer, model)
    parameters = _named(optimizer, model)
    _check_names(own, saved, parameters)
    for key, (shape, _) in saved.items():
        if key in own and tuple(own[key].shape) != shape:
            raise UserError(f"optimizer state {key}: shape {shape} was saved, {tuple(own[key].shape)} is needed")
    for key, (shape, dtype) in saved.items():
        if key not in own:
            kind, name = key.split(".", 1)
            own[key] = optimizer.state[parameters[name]][kind] = _empty_state(shape, dtype, parameters[name])
    return {key: own[key] for key in saved}


def load_optimizer_state(optimizer: torch.optim.Optimizer, model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Put tensors named as in `optimizer_state` into the optimizer, in the dtype and on the device its state has.

    Given tensors are whole or sharded as the parameters are; of a whole one, sharded state takes its part.
    """
    saved = {key: SavedState(tuple(tensor.shape), tensor.dtype) for key, tensor in tensors.items()}
    for key, state in prepare_state(optimizer, model, saved).items():
        _fill(state, tensors[key])


def _empty_state(shape: tuple[int, ...], dtype: torch.dtype, parameter: nn.Parameter) -> Tensor:
    """On the parameter's device, sharded as the parameter is where it has its shape."""
    if shape != tuple(parameter.shape):
        return torch.empty(shape, dtype=dtype, device=parameter.device)
    return torch.empty_like(parameter, dtype=dtype, requires_grad=False)


def _fill(state: Tensor, tensor: Tensor) -> None:
    if isinstance(tensor, DTensor):
        state.copy_(tensor)
    else:
        copy_into(state, tensor)


def _check_names(own: Mapping[str, Tensor], given: Iterable[str], parameters: Mapping[str, Tensor]) -> None:
    """Nothing that is needed may be missing. A registered optimizer that has not stepped takes any kind of state."""
    given = set(given)
    missing = [key for key in own if key not in given]
    kinds = {key.split(".", 1)[0] for key in own}
    unexpected = []
    for key in sorted(given):
        kind, _, name = key.partition(".")
        if name not in parameters or (kinds and kind not in kinds):
            unexpected.append(key)
    problems = [
        f"{word}: {_shortened(keys)}" for word, keys in (("missing", missing), ("unexpected", unexpected)) if keys
    ]
    if problems:
        raise UserError(f"the saved optimizer state does not fit this model and optimizer; {'; '.join(problems)}")


def _shortened(names: list[str], shown: int = 4) -> str:
    more = len(names) - shown
    return ", ".join(names[:shown]) + (f" and {more} more" if more > 0 else "")


def _named(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, nn.Parameter]:
    """The optimizer's parameters by their name in the model."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return {names[parameter]: parameter for parameter in parameters}


def _state_of(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> dict[str, Any]:
    state, options = optimizer.state[parameter], optimizer.defaults
    if state:
        return state
    if isinstance(optimizer, Lamb | Lars | NarrowAdam):
        state.update(optimizer.initial_state(parameter))
    elif type(optimizer) in BUILT_IN.values() and not options["amsgrad"]:
        # What the first step would make; a fused step counts on the parameter's device.
        on_device = options["fused"] or options["capturable"]
        state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device if on_device else "cpu")
        state["exp_avg"] = torch.zeros_like(parameter, requires_grad=False)
        state["exp_avg_sq"] = torch.zeros_like(parameter, requires_grad=False)
    return state
