"""What a replica group's run needs besides the groups themselves: its global batch, and settings that must agree."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from shardline.comm.mesh import Mesh
from shardline.config.architecture import Architecture
from shardline.config.layout import Layout
from shardline.config.schema import Config
from shardline.data.order import global_batch
from shardline.errors import UserError
from shardline.models.decoder import Decoder
from shardline.optim.state import optimizer_state
from shardline.parallel.replicas.groups import ReplicaGroups
from shardline.parallel.replicas.lighthouse import import_coordination

# Sections that affect a run's results.
SECTIONS = ("model", "optimizer", "lr_scheduler", "parallelism", "data", "lora", "quantize")
KEYS = "seq_len local_batch_size max_norm steps epochs dataset dataset_path dtype mixed_precision_param objective"


def for_groups(config: Config, layout: Layout, arch: Architecture) -> Config:
    """Return the config with the global batch of all groups together as a number."""
    import_coordination()
    if arch.moe is not None:
        raise UserError("fault_tolerance.enable: replica groups of a mixture of experts are not built yet")
    training, groups = config.training, config.fault_tolerance.group_size
    if training.global_batch_size >= 0 and training.gradient_accumulation_steps is None:
        return config
    if groups == 0:
        raise UserError(
            "fault_tolerance.group_size = 0: the global batch covers all replica groups, even while some are gone; set"
            " their number, or training.global_batch_size"
        )
    size = groups * global_batch(training, layout.data_ranks)
    return config.replace({"training.global_batch_size": size, "training.gradient_accumulation_steps": None})


def join_groups(config: Config, mesh: Mesh, model: Decoder, optimizer: torch.optim.Optimizer) -> ReplicaGroups:
    """Return this rank's view of the groups; they connect before the first step."""

    def state() -> Mapping[str, Tensor]:
        """All tensors that a step changes, in the same order in all groups."""
        trained = {name: parameter.detach() for name, parameter in model.named_parameters() if parameter.requires_grad}
        return {**trained, **dict(model.named_buffers()), **optimizer_state(optimizer, model)}

    _check_state(model, optimizer)
    return ReplicaGroups(config.fault_tolerance, mesh, _same(config, mesh), state)


def _check_state(model: Decoder, optimizer: torch.optim.Optimizer) -> None:
    """Refuse a registered optimizer that creates its state in its first step: a group that returns has not made one."""
    held = {key.partition(".")[2] for key in optimizer_state(optimizer, model)}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and name not in held:
            raise UserError(
                f"fault_tolerance.enable: {type(optimizer).__name__} has no state of {name} before its first step, but"
                " a group that returns receives the state of another into its own; create it in the constructor"
            )


def _same(config: Config, mesh: Mesh) -> dict[str, Any]:
    """What must be equal in all groups: the values of some keys, and checksums of sections."""
    training = {f"training.{name}": str(getattr(config.training, name, None)) for name in KEYS.split()}
    return {
        "training.global_batch_size": config.training.global_batch_size,
        "debug.seed": config.debug.seed or 0,
        "the layout": str(mesh.layout),
        **training,
        **{f"checksum of [{name}]": _checksum(getattr(config, name)) for name in SECTIONS},
    }


def _checksum(section: Any) -> str:
    text = json.dumps(section.model_dump(mode="json"), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]
