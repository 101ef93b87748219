"""Which carriers of rows there are on this machine."""

from __future__ import annotations

import torch

from shardline.parallel.expert.all_to_all import AllToAll
from shardline.parallel.expert.dispatch import Carrier


def carriers(device: torch.device) -> tuple[dict[str, Carrier], dict[str, str]]:
    """Those that can send rows of this device, by name, and why the others cannot."""
    return {"all_to_all": AllToAll()}, {"symmetric": "it is not built"}
