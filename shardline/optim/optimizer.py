"""The optimizer from the config, and its learning rate.

State has the dtype of its parameter: float32 with float32 parameters (mixed precision included), bfloat16 with
`training.dtype = "bfloat16"`; `optimizer.state_dtype` keeps the moments of float32 parameters in bfloat16 or 8 bits.
The learning rate is a plain number: the update is not compiled, so a new value costs nothing, while a tensor would have
to be copied to the device each step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from shardline import registry
from shardline.config.names import LAYERWISE
from shardline.config.schema import Config
from shardline.config.schema import Optimizer as Section
from shardline.errors import ConfigError, UserError
from shardline.models.dtensor import local
from shardline.models.fused_weights import is_low_rank
from shardline.optim.adafactor import Adafactor, parts_of
from shardline.optim.gpu_adam import GPUAdam
from shardline.optim.lamb import Lamb, Lars, fused_parts
from shardline.optim.lion import Lion, Sgd
from shardline.optim.lr_schedule import RATIO
from shardline.optim.matrices import matrices_of
from shardline.optim.muon import Muon
from shardline.optim.narrow_adam import NarrowAdam

log = logging.getLogger("shardline")

BUILT_IN: dict[str, Callable[..., torch.optim.Adam]] = {"AdamW": torch.optim.AdamW, "Adam": torch.optim.Adam}
# Both flags are passed, since torch would choose for one that is left out.
IMPLEMENTATIONS = {
    "fused": {"fused": True, "foreach": False},
    "foreach": {"fused": False, "foreach": True},
    "for-loop": {"fused": False, "foreach": False},
}


NARROW = {"bfloat16": torch.bfloat16, "int8": torch.int8}  # types of moments


def build_optimizer(config: Config, model: nn.Module) -> torch.optim.Optimizer:
    """Build the optimizer that `optimizer.name` names, built in or registered, for all trained parameters."""
    optimizer = _build(config, model)
    if config.lr_scheduler.momentum_range is not None:
        for group in optimizer.param_groups:
            if "betas" not in group and "momentum" not in group:
                name = config.optimizer.name
                raise ConfigError(f"lr_scheduler.momentum_range: {name} has neither momentum nor betas; leave it unset")
    return optimizer


def _build(config: Config, model: nn.Module) -> torch.optim.Optimizer:
    section = config.optimizer
    groups = parameter_groups(section, model, section.decay_norms)
    if config.lora.enable and config.lora.lr_ratio != 1:
        groups = _with_ratio(groups, model, config.lora.lr_ratio)
    if section.name in registry.optimizers:
        built = registry.optimizers[section.name](groups, section)
        if not isinstance(built, torch.optim.Optimizer):
            kind = type(built).__name__
            raise ConfigError(
                f"optimizer.name = {section.name!r}: its function returned {kind}, not a torch.optim.Optimizer"
            )
        return built
    if section.name in LAYERWISE:
        return _build_layerwise(section, model)
    if section.name == "Muon":
        return _build_muon(section, model)
    if section.name == "Adafactor":
        return _build_adafactor(section, model, groups)
    if section.name == "SGD":
        return Sgd(groups, {"lr": section.lr, "momentum": section.beta1})
    if section.name == "Lion":
        return Lion(groups, {"lr": section.lr, "betas": (section.beta1, section.beta2)})
    adam = _build_adam(section, groups)
    wide = any(parameter.dtype != torch.bfloat16 for group in adam.param_groups for parameter in group["params"])
    by_kernel = section.implementation == "fused" and GPUAdam.serves(adam) and not section.early_step_in_backward
    momentum = max(config.lr_scheduler.momentum_range or (0.0,))
    if section.state_dtype == "int8" and by_kernel and GPUAdam.serves_int8(adam, momentum):
        return GPUAdam(adam, int8=True)
    if section.state_dtype != "parameter" and wide:
        return NarrowAdam(adam, NARROW[section.state_dtype])
    return GPUAdam(adam) if by_kernel else adam


def scaled_lr(config: Config, global_batch_size: int) -> float:
    """The peak learning rate: `optimizer.lr`, scaled in proportion to the batch if `lr_scaling = "linear"`."""
    section = config.optimizer
    if section.lr_scaling == "none":
        return section.lr
    return section.lr * global_batch_size / section.lr_scaling_base_batch


def parameter_groups(section: Section, model: nn.Module, decay_norms: bool) -> list[dict[str, Any]]:
    """One group; or, without `decay_norms`, two: norm weights and biases then get no weight decay."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trained:
        raise UserError("the model has no parameter to train: every one is frozen")
    for name, parameter in model.named_parameters():
        if not local(parameter).is_contiguous():  # torch's fused CPU kernel would silently step the wrong elements
            raise ValueError(f"{name} is not contiguous in memory")
    if decay_norms:
        return [{"params": trained, "weight_decay": section.weight_decay}]
    plain = plain_parameters(model)
    groups = [
        {"params": [p for p in trained if p not in plain], "weight_decay": section.weight_decay},
        {"params": [p for p in trained if p in plain], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _with_ratio(groups: list[dict[str, Any]], model: nn.Module, ratio: float) -> list[dict[str, Any]]:
    """LoRA+: put the matrices B into groups of their own, with `ratio` times the learning rate."""
    faster = {p for name, p in model.named_parameters() if is_low_rank(name) and name.endswith(".b")}
    found = []
    for group in groups:
        found.append({**group, "params": [p for p in group["params"] if p not in faster]})
        found.append({**group, "params": [p for p in group["params"] if p in faster], RATIO: ratio})
    return [group for group in found if group["params"]]


def plain_parameters(model: nn.Module) -> set[nn.Parameter]:
    """Norm weights and biases; the biases of a layer's experts form one tensor with more dimensions."""
    return {p for name, p in model.named_parameters() if p.ndim <= 1 or name.endswith(".bias")}


def _build_layerwise(section: Section, model: nn.Module) -> Lamb | Lars:
    """Build LAMB or LARS: matrices get trust ratios and decay, norm weights and biases neither."""
    plain = plain_parameters(model)
    groups = [{**group, "adapt": group["params"][0] not in plain} for group in parameter_groups(section, model, False)]
    parts = fused_parts(model)
    if section.name == "LAMB":
        options = {"lr": section.lr, "betas": (section.beta1, section.beta2), "eps": section.eps}
        return Lamb(groups, options, parts)
    options = {"lr": section.lr, "momentum": section.beta1, "trust_coefficient": section.trust_coefficient}
    return Lars(groups, options, parts)


def _build_adafactor(section: Section, model: nn.Module, groups: list[dict[str, Any]]) -> Adafactor:
    options = {
        "lr": section.lr,
        "beta1": section.adafactor_momentum,
        "decay_rate": section.adafactor_decay_rate,
        "clip_threshold": section.adafactor_clip_threshold,
        "eps": tuple(section.adafactor_eps),
        "scale_parameter": section.adafactor_scale_parameter,
    }
    return Adafactor(groups, options, parts_of(model, plain_parameters(model)))


def _build_muon(section: Section, model: nn.Module) -> Muon:
    """Build Muon for the matrices of blocks, and AdamW with its usual groups for all other parameters."""
    matrices = matrices_of(model)
    own = {matrix.parameter for matrix in matrices}
    groups = parameter_groups(section, model, section.decay_norms)
    others = [{**group, "params": [p for p in group["params"] if p not in own]} for group in groups]
    others = [group for group in others if group["params"]]
    options = {
        "lr": section.lr,
        "lr_factor": section.muon_lr_factor,
        "weight_decay": section.weight_decay,
        "momentum": section.muon_momentum,
        "ns_steps": section.muon_ns_steps,
        "adjust_lr": section.muon_adjust_lr,
    }
    return Muon(matrices, options, _build_adam(section, others) if others else None)


def _build_adam(section: Section, groups: list[dict[str, Any]]) -> torch.optim.Adam:
    def build(implementation: str) -> torch.optim.Adam:
        return BUILT_IN.get(section.name, torch.optim.AdamW)(
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
        log.warning("optimizer.implementation: fused cannot be used here (%s); foreach is used instead", error)
        return build("foreach")
