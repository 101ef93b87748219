"""The frozen weights to which a run with LoRA adds its adapter: where they come from, and whether they are the same.

A checkpoint of such a run holds only the trained weights. Its manifest records where the others came from, with a
fingerprint, so that a resumed run, an export or text generation is refused if it would use other weights.
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

SAMPLE = 1 << 16  # bytes that a fingerprint covers at the beginning and at the end of each file


class Base(NamedTuple):
    """Frozen weights: from a Hugging Face folder, from a checkpoint, or drawn from a seed."""

    kind: str  # "hf", "checkpoint" or "seed"
    path: str  # "" for drawn weights
    seed: int
    fingerprint: str

    @property
    def words(self) -> str:
        return f"weights drawn from seed {self.seed}" if self.kind == "seed" else self.path


def base_of(config: Config, seed: int, resumed: Path | None = None) -> Base:
    """The frozen weights that a config names.

    In a run that is resumed from the folder `resumed`, `checkpoint.load_step` is a step of its own, and the step of the
    frozen weights is the recorded one.
    """
    section = config.checkpoint
    if section.enable and section.initial_load_in_hf:
        return hf_base(Path(local_path(section.initial_load_path or config.model.hf_assets_path)))
    if section.enable and section.initial_load_path is not None and is_url(section.initial_load_path):
        raise UserError(
            "checkpoint.initial_load_path: with frozen weights it must be a folder; fetch the checkpoint first"
        )
    if section.enable and section.initial_load_path is not None:
        folder = Path(section.initial_load_path)
        if resumed is None:
            return checkpoint_base(folder, section.load_step)
        return checkpoint_base(_recorded_step(resumed, section.load_step, folder) or folder)
    return Base("seed", "", seed, f"seed {seed}")


def _recorded_step(resumed: Path, step: int, folder: Path) -> Path | None:
    """The checkpoint in `folder` whose weights a run has under its own; None if it is not there (any more)."""
    from shardline.checkpoint.format import find_checkpoint

    try:
        saved = find_checkpoint(resumed, step)
    except UserError:  # the start itself will say so
        return None
    known = recorded_base(saved) if saved.trainer.get("lora") else recorded_reference(saved)
    path = Path(known.path) if known is not None and known.kind == "checkpoint" else None
    return path if path is not None and path.is_relative_to(folder.resolve()) and path.is_dir() else None


def hf_base(folder: Path) -> Base:
    """The weights of a Hugging Face folder, identified by the names, sizes, beginnings and ends of its files."""
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
            f"{where} was trained on top of {recorded.words}, but these are other weights ({found.words}): name the"
            " same weights with checkpoint.initial_load_path or --base"
        )


def fill_base(model: Parameters, base: Base) -> None:
    """Fill parameters with the frozen weights."""
    from shardline.checkpoint.format import find_checkpoint
    from shardline.checkpoint.load import load_weights
    from shardline.models.added_rows import read_hf_enlarged
    from shardline.models.init import init_weights
    from shardline.models.state import load_logical_state

    if base.kind == "seed":
        init_weights(model, base.seed)
    elif base.kind == "hf":
        load_logical_state(model, read_hf_enlarged(Path(base.path), model.arch))
    else:
        load_weights(find_checkpoint(Path(base.path)), model)


# ---- what a manifest says --------------------------------------------------------------------------------------------


def recorded(how: Adaptation, base: Base) -> dict[str, Any]:
    return {**how.described(), "base": base._asdict()}


def recorded_adaptation(saved: Saved) -> Adaptation | None:
    """The adaptation that a checkpoint records; None if it holds the whole model."""
    content = saved.trainer.get("lora")
    if content is None:
        return None
    from shardline.adapters.lora import Adaptation

    options = {name: value for name, value in content.items() if name != "base"}
    return Adaptation(**{**options, "targets": tuple(options["targets"]), "saved": tuple(options["saved"])})


def recorded_base(saved: Saved) -> Base:
    if saved.trainer.get("lora") is None:
        raise UserError(
            f"{saved.path} holds a whole model, not an adapter: train an adapter of it in another job.dump_folder, with"
            " checkpoint.initial_load_path"
        )
    return Base(**saved.trainer["lora"]["base"])


def recorded_reference(saved: Saved) -> Base | None:
    """The recorded reference weights of a run that trains all weights and compares them with the initial ones."""
    found = saved.trainer.get("reference")
    return None if found is None else Base(**found)


def find_base(saved: Saved, given: str | None) -> Base:
    """Find the frozen weights of a checkpoint: where they were, or at `given`."""
    known = recorded_base(saved)
    if known.kind == "seed" and given is None:
        return known
    place = Path(given or known.path)
    if not place.exists():
        raise UserError(
            f"{saved.path} holds an adapter, but its frozen weights are no longer at {place}: pass --base=FOLDER"
        )
    found = hf_base(place) if (place / "config.json").is_file() else checkpoint_base(place)
    check_same(known, found, saved.path)
    return found


def changed(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The LoRA settings, other than dropout, in which a checkpoint and a run differ."""
    earlier: dict[str, Any] = {"ranks": {}, "alphas": {}, "bias": "none"}  # for checkpoints that do not record these
    before = {**earlier, **saved}
    return [
        f"lora.{name}: {before.get(name)} -> {now[name]}"
        for name in ("rank", "alpha", "ranks", "alphas", "use_rslora", "use_dora", "targets", "saved", "bias")
        if json.dumps(before.get(name), sort_keys=True) != json.dumps(now[name], sort_keys=True)
    ]
