"""From a config to a model with weights on a device, and the process-wide switches a run sets first."""

from __future__ import annotations

import os
import random

import numpy as np
import torch

from shardline.comm.mesh import Mesh
from shardline.config.architecture import Architecture
from shardline.config.schema import Config
from shardline.models.decoder import Decoder
from shardline.parallel.apply import Applied, make_model
from shardline.precision.mixed import Precision


def seed_of(config: Config) -> int:
    return config.debug.seed or 0


def set_determinism(config: Config, device: torch.device) -> None:
    """Seed every generator; with `debug.deterministic`, also refuse operations whose result may vary."""
    seed = seed_of(config)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    deterministic = config.debug.deterministic
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when its first handle is made
    torch.use_deterministic_algorithms(deterministic, warn_only=config.debug.deterministic_warn_only)
    if device.type == "cuda":
        torch.backends.cudnn.deterministic = deterministic
        torch.backends.cudnn.benchmark = False
        torch.backends.cuda.enable_cudnn_sdp(False)  # where PyTorch chooses, it would take lengths that give NaN


def build_model(
    arch: Architecture,
    device: torch.device,
    precision: Precision,
    mesh: Mesh | None = None,
    config: Config | None = None,
) -> tuple[Decoder, Applied]:
    """A model, cut and transformed for this run, whose parameters have memory on `device` but no values yet."""
    model, applied = make_model(arch, config, mesh, precision)
    offloaded = config is not None and config.training.enable_cpu_offload
    model.to_empty(device=torch.device("cpu") if offloaded else device)
    model.train()
    return model, applied
