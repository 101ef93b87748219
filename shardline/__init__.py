"""Shardline: train large language models from one config file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardline.config.load import load_config as load_config
    from shardline.config.schema import Config as Config
    from shardline.registry import register_flavor as register_flavor
    from shardline.registry import register_hook as register_hook
    from shardline.registry import register_optimizer as register_optimizer
    from shardline.registry import register_source as register_source
    from shardline.training.trainer import Trainer as Trainer

__version__ = "0.1.0"

# Imported when first asked for: the command line answers without loading torch.
_HOMES = {
    "load_config": "shardline.config.load",
    "Config": "shardline.config.schema",
    "Trainer": "shardline.training.trainer",
    "register_flavor": "shardline.registry",
    "register_source": "shardline.registry",
    "register_optimizer": "shardline.registry",
    "register_hook": "shardline.registry",
}

__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'shardline' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
