"""The frozen weights beside which a run with LoRA trains: where they come from, and whether they are still the same.

A checkpoint of such a run holds only what is trained. Its manifest says where the rest came from, with a fingerprint:
a resumed run, an export or a generated text that would use other weights is refused.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from shardline.config.schema import Config
from shardline.errors import UserError
from shardline.hub import local_path
from shardline.storage.location import is_url

if TYPE_CHECKING:
    from shardline.adapters.lora import Adaptation
    from shardline.checkpoint.format import Saved
    from shardline.models.state import Parameters

SAMPLE = 1 << 16  # bytes at the beginning and at the end of each file that a fingerprint covers


class Base(NamedTuple):
    """Frozen weights: of a Hugging Face folder, of a checkpoint, or drawn from a seed."""

    kind: str  # "hf", "checkpoint" or "seed"
    path: str  # "" for drawn weights
    seed: int
    fingerprint: str

    @property
    def words(self) -> str:
        return f"weights drawn from seed {self.seed}" if self.kind == "seed" else self.path


def base_of(config: Config, seed: int) -> Base:
    """The frozen weights that a config names."""
    section = config.checkpoint
    if section.enable and section.initial_load_in_hf:
        return hf_base(Path(local_path(section.initial_load_path or config.model.hf_assets_path)))
    if section.enable and section.initial_load_path is not None and is_url(section.initial_load_path):
        raise UserError(
            "checkpoint.initial_load_path: with frozen weights it must be a folder; fetch the checkpoint first"
        )
    if section.enable and section.initial_load_path is not None:
        return checkpoint_base(Path(section.initial_load_path), section.load_step)
    return Base("seed", "", seed, f"seed {seed}")


def hf_base(folder: Path) -> Base:
    """A Hugging Face folder, known by the headers, sizes and samples of its files."""
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            digest.update(file.read(SAMPLE))
            file.seek(max(0, size - SAMPLE))
            digest.update(file.read(SAMPLE))
    return Base("hf", str(folder.resolve()), 0, digest.hexdigest()[:32])


def checkpoint_base(folder: Path, step: int = -1) -> Base:
    from shardline.checkpoint.format import find_checkpoint

    saved = find_checkpoint(folder, step)
    content = json.dumps(saved.manifest["files"], sort_keys=True)
    return Base("checkpoint", str(saved.path.resolve()), 0, hashlib.sha256(content.encode()).hexdigest()[:32])


def check_same(recorded: Base, found: Base, where: Path) -> None:
    if recorded.fingerprint != found.fingerprint:
        raise UserError(
            f"{where} was trained beside {recorded.words}, but these are other weights ({found.words}): name the same"
            " ones, with checkpoint.initial_load_path or --base"
        )


def fill_base(model: Parameters, base: Base) -> None:
    """Fill parameters with the frozen weights."""
    from shardline.checkpoint.format import find_checkpoint
    from shardline.checkpoint.load import load_weights
    from shardline.models.huggingface.files import read_hf
    from shardline.models.init import init_weights
    from shardline.models.state import load_logical_state

    if base.kind == "seed":
        init_weights(model, base.seed)
    elif base.kind == "hf":
        load_logical_state(model, read_hf(base.path, model.arch))
    else:
        load_weights(find_checkpoint(Path(base.path)), model)


# ---- what a manifest says --------------------------------------------------------------------------------------------


def recorded(how: Adaptation, base: Base) -> dict[str, Any]:
    return {**how.described(), "base": base._asdict()}


def recorded_adaptation(saved: Saved) -> Adaptation | None:
    """What a checkpoint holds where that is not the whole model."""
    content = saved.trainer.get("lora")
    if content is None:
        return None
    from shardline.adapters.lora import Adaptation

    options = {name: value for name, value in content.items() if name != "base"}
    return Adaptation(**{**options, "targets": tuple(options["targets"]), "saved": tuple(options["saved"])})


def recorded_base(saved: Saved) -> Base:
    return Base(**saved.trainer["lora"]["base"])


def recorded_reference(saved: Saved) -> Base | None:
    """The weights with which a run that trains all of them began, where it compares with those."""
    found = saved.trainer.get("reference")
    return None if found is None else Base(**found)


def find_base(saved: Saved, given: str | None) -> Base:
    """The frozen weights of a checkpoint: where they were, or at `given`."""
    known = recorded_base(saved)
    if known.kind == "seed" and given is None:
        return known
    place = Path(given or known.path)
    if not place.exists():
        raise UserError(
            f"{saved.path} holds an adapter; the weights beside which it was trained were at {place}:"
            " give --base=FOLDER"
        )
    found = hf_base(place) if (place / "config.json").is_file() else checkpoint_base(place)
    check_same(known, found, saved.path)
    return found


def changed(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The settings of LoRA in which a checkpoint and a run differ, dropout left out."""
    earlier: dict[str, Any] = {"ranks": {}, "alphas": {}, "bias": "none"}  # of checkpoints without these
    before = {**earlier, **saved}
    return [
        f"lora.{name}: {before.get(name)} -> {now[name]}"
        for name in ("rank", "alpha", "ranks", "alphas", "use_rslora", "use_dora", "targets", "saved", "bias")
        if json.dumps(before.get(name), sort_keys=True) != json.dumps(now[name], sort_keys=True)
    ]
