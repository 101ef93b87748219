"""Names that config values may have, and what a data or model section names. Nothing here imports torch."""

from __future__ import annotations

import glob
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardline import registry
from shardline.hub import local_path
from shardline.json_text import parse_json
from shardline.registry import nearest

if TYPE_CHECKING:
    from shardline.config.schema import Config

LAUNCHER_VARIABLE = "SHARDLINE_LAUNCHER"  # in the environment of a rank: pid of the launcher that started it
PROGRAM_VARIABLE = "SHARDLINE_PROGRAM"  # how the user calls this program, for commands that messages show

# Two ways to say the same thing: only one of a key and its alternative, which has no default, may be set.
ALTERNATIVES = {
    "training.steps": "training.epochs",
    "training.global_batch_size": "training.gradient_accumulation_steps",
    "lr_scheduler.warmup_steps": "lr_scheduler.warmup_ratio",
    "checkpoint.interval": "checkpoint.interval_ratio",
    "validation.freq": "validation.freq_ratio",
}

# ---- dtypes, optimizers, schedules, models ---------------------------------------------------------------------------

DTYPES = ("float32", "bfloat16", "float16")  # of commands; the schema says what a key takes
# Built-in optimizer -> tensors it keeps per parameter; Muon keeps one for the matrices of blocks, Adafactor one for
# parameters that are not matrices.
MOMENTS = {"AdamW": 2, "Adam": 2, "Adafactor": 1, "SGD": 1, "Lion": 1, "LAMB": 2, "LARS": 1, "Muon": 2}
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
CARD = "README.md"  # of a dataset; beside records it is not text to train on


LARGEST_ON_DEMO = 100_000_000  # parameters of a model that trains on generated text without being asked to


def is_demo(section: Any) -> bool:
    return bool(section.dataset == "demo" and not section.dataset_path)


def names_text(section: Any) -> bool:
    """Whether the section names data of its own."""
    return bool(section.dataset_path) or section.dataset not in (None, "demo")


def is_store(section: Any) -> bool:
    return bool(section.dataset_path) and os.path.isfile(os.path.join(local_path(section.dataset_path), "store.json"))


def is_registered(section: Any) -> bool:
    return section.dataset in registry.sources and not is_store(section)


def names_files(section: Any) -> bool:
    """Whether the section names only files and globs, no folders."""
    return bool(_file_endings(section))


def names_texts(section: Any) -> bool:
    """Whether the section names only plain text files."""
    endings = _file_endings(section)
    return bool(endings) and all(end in TEXT_FILES for end in endings)


def _file_endings(section: Any) -> list[str]:
    """The endings of the named files and globs; an empty list when the section names anything else."""
    path = section.dataset_path or (section.dataset if os.path.isfile(section.dataset or "") else "")
    names = [os.path.expanduser(name.strip()) for name in path.split(",") if name.strip()]
    endings = [os.path.splitext(name.removesuffix(".gz"))[1] for name in names]
    known = [end in DATA_FILES or glob.has_magic(name) for name, end in zip(names, endings, strict=True)]
    other = is_registered(section) or any(map(os.path.isdir, (path, *names))) or not all(known)
    return [] if other else endings


def data_paths(config: Config, key: str) -> list[str]:
    """The paths under a key such as `training.dataset_path` or `data.sources` that the run reads as files."""
    part, _, name = key.partition(".")
    if name != "dataset_path":
        named = [(str(table.get("path", "")), table.get("data_files") or []) for table in config.value(key)]
        inside = [(path, [files] if isinstance(files, str) else files) for path, files in named]
        return [place for path, files in inside for place in [os.path.join(path, str(f)) for f in files] or [path]]
    section = config.value(part)
    unread = config.data.sources or is_registered(section) or (part == "validation" and not section.enable)
    return [] if unread else [item.strip() for item in (section.dataset_path or "").split(",") if item.strip()]


def holds_parquet(path: str) -> bool:
    place = Path(local_path(path)).expanduser()
    return path.endswith(".parquet") or (place.is_dir() and next(place.rglob("*.parquet"), None) is not None)


def is_saved_dataset(path: str) -> bool:
    """Whether the path is a folder of `save_to_disk` of the package `datasets`."""
    place = Path(path).expanduser()
    return any((place / name).is_file() for name in ("dataset_dict.json", "state.json"))


# ---- the model -------------------------------------------------------------------------------------------------------


WINDOWED = ("auto", "gpt_oss", "gemma2", "gemma3", "phi3", "starcoder2")
# How the flavors of a model scale rotary frequencies, if at all; not known for `auto` and registered models.
SCALED = {"llama3": "llama3", "llama4": "llama3", "deepseek_v3": "yarn", "gpt_oss": "yarn", "gemma3": "linear"}


def has_window(config: Config) -> bool:
    """Whether the model has, or may have, a sliding window."""
    overrides = config.model.overrides
    if "sliding_window" in overrides:
        return overrides["sliding_window"] is not None
    named = config.model.name in WINDOWED or config.model.flavor.endswith("_irope")
    named = named or (config.model.name, config.model.flavor) == ("command_r", "7B")
    return named or _flavor_field(config, "sliding_window") is not None


def is_foreign(config: Config) -> bool:
    """Whether the code of transformers computes the model: by request, or because its family is not built here."""
    section = config.model
    if section.name != "auto" or section.implementation != "auto":
        return section.implementation == "transformers"
    try:
        content = parse_json(Path(local_path(section.hf_assets_path), "config.json").read_bytes())
        return "model_type" in content and not is_built(content["model_type"])
    except (OSError, ValueError, TypeError):
        return False  # reading the file reports what is wrong with it


def is_built(model_type: Any) -> bool:
    """Whether the decoder computes models of this type itself."""
    from shardline.config.architecture import NATIVE

    # for llama4 and gemma3, the text model is read
    return isinstance(model_type, str) and (model_type in NATIVE or model_type in ("llama4", "gemma3"))


def scaling_type(config: Config) -> str | None:
    """How rotary frequencies are scaled, None if that is not known yet."""
    for scaling in (config.model.overrides.get("rope_scaling"), _flavor_field(config, "rope_scaling")):
        found = scaling.get("type") if isinstance(scaling, Mapping) else getattr(scaling, "type", None)
        if found is not None:
            return str(found)
    return SCALED.get(config.model.name)


def _flavor_field(config: Config, field: str) -> Any:
    """An architecture field of a registered flavor; None for other flavors."""
    flavor = registry.flavors.get(config.model.name, {}).get(config.model.flavor)
    return flavor.get(field) if isinstance(flavor, Mapping) else getattr(flavor, field, None)
