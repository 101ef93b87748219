"""Names that config values may have, and what a data or model section names. Nothing here imports torch."""

from __future__ import annotations

import glob
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from shardline import registry
from shardline.registry import nearest

if TYPE_CHECKING:
    from shardline.config.schema import Config

LAUNCHER_VARIABLE = "SHARDLINE_LAUNCHER"  # in the environment of a rank: pid of the launcher that started it

# ---- dtypes, optimizers, schedules, models ---------------------------------------------------------------------------

DTYPES = ("float32", "bfloat16", "float16")  # of commands; the schema says what a key takes
# Built-in optimizer -> tensors it keeps per parameter; Muon keeps one of a matrix of a block.
MOMENTS = {"AdamW": 2, "Adam": 2, "LAMB": 2, "LARS": 1, "Muon": 2}
LAYERWISE = ("LAMB", "LARS")  # optimizers with a trust ratio per layer
SCHEDULES = ("GPipe", "1F1B", "LoopedBFS", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
SPLIT_SCHEDULES = SCHEDULES[4:]  # compute weight gradients apart from input gradients
SCHEDULES_FROM_FILE = ("PipelineScheduleSingle", "PipelineScheduleMulti")  # TorchTitan's names for a schedule in a file
FLOAT8_LINEAR, FLOAT8_EXPERTS = "quantize.linear.float8", "quantize.grouped_mm.float8"
MX_CONVERTERS = ("quantize.linear.mx", "quantize.grouped_mm.mx")
CONVERTERS = (FLOAT8_LINEAR, FLOAT8_EXPERTS, *MX_CONVERTERS)
LOADABLE = ("model", "optimizer", "lr_scheduler", "dataloader", "train_state")  # parts of a checkpoint
# Models of TorchTitan 0.2 that are not built: (model, flavor) -> what they need
NOT_BUILT: dict[tuple[str, str], str] = {
    (model, flavor): feature
    for model, feature, flavors in (("flux", "image generation", "flux-debug flux-dev flux-schnell"),)
    for flavor in flavors.split()
}


def find_schedule(name: str) -> str | None:
    """The schedule's name as the table writes it, None for an unknown one; case does not matter."""
    return next((known for known in (*SCHEDULES, *SCHEDULES_FROM_FILE) if known.lower() == name.lower()), None)


def unknown_schedule(name: str) -> str:
    return f"there is no schedule {name!r}{nearest(name, SCHEDULES)} ({', '.join(SCHEDULES)})"


# ---- data: a section is [training] or [validation] -------------------------------------------------------------------

# Endings of the files that data is read from. All but Parquet may also end in .gz.
TEXT_FILES = (".txt", ".text", ".md")
LINE_FILES = (".jsonl", ".json", ".ndjson")
DATA_FILES = (*TEXT_FILES, *LINE_FILES, ".parquet")


def is_demo(section: Any) -> bool:
    return bool(section.dataset == "demo" and not section.dataset_path)


def is_store(section: Any) -> bool:
    return bool(section.dataset_path) and os.path.isfile(os.path.join(section.dataset_path, "store.json"))


def is_registered(section: Any) -> bool:
    return section.dataset in registry.sources and not is_store(section)


def names_files(section: Any) -> bool:
    """Whether the section names only files and globs, no folder."""
    return bool(_file_endings(section))


def names_texts(section: Any) -> bool:
    """Whether the section names only plain text files."""
    endings = _file_endings(section)
    return bool(endings) and all(end in TEXT_FILES for end in endings)


def _file_endings(section: Any) -> list[str]:
    """The endings of the named files and globs; an empty list when the section names anything else."""
    path = section.dataset_path or (section.dataset if os.path.isfile(section.dataset) else "")
    names = [os.path.expanduser(name.strip()) for name in path.split(",") if name.strip()]
    endings = [os.path.splitext(name.removesuffix(".gz"))[1] for name in names]
    known = [end in DATA_FILES or glob.has_magic(name) for name, end in zip(names, endings, strict=True)]
    other = is_registered(section) or any(map(os.path.isdir, (path, *names))) or not all(known)
    return [] if other else endings


# ---- the model -------------------------------------------------------------------------------------------------------


def has_window(config: Config) -> bool:
    """Whether the model has, or may have, a sliding window."""
    overrides = config.model.overrides
    if "sliding_window" in overrides:
        return overrides["sliding_window"] is not None
    named = config.model.name in ("auto", "gpt_oss") or config.model.flavor.endswith("_irope")
    return named or _flavor_field(config, "sliding_window") is not None


def scaling_type(config: Config) -> str | None:
    """How rotary frequencies are scaled, None if that is not known yet. Most named flavors scale as llama3 does."""
    for scaling in (config.model.overrides.get("rope_scaling"), _flavor_field(config, "rope_scaling")):
        found = scaling.get("type") if isinstance(scaling, Mapping) else getattr(scaling, "type", None)
        if found is not None:
            return str(found)
    return {"auto": None, "deepseek_v3": "yarn", "gpt_oss": "yarn"}.get(config.model.name, "llama3")


def _flavor_field(config: Config, field: str) -> Any:
    """An architecture field of a registered flavor; None for other flavors."""
    flavor = registry.flavors.get(config.model.name, {}).get(config.model.flavor)
    return flavor.get(field) if isinstance(flavor, Mapping) else getattr(flavor, field, None)
