"""Rank 0's end of a save: one manifest from what all ranks wrote, or a Hugging Face folder from their shards."""

from __future__ import annotations

import math
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from shardline.checkpoint import format as files
from shardline.checkpoint.assets import assets_at, special_tokens
from shardline.checkpoint.reader import Shards, TensorView
from shardline.config.architecture import Architecture
from shardline.config.layout import Layout
from shardline.models.fused_weights import logical_shapes
from shardline.models.hf import write_hf
from shardline.storage.safetensors import describe_file


class Merged(NamedTuple):
    files: dict[str, Any]
    tensors: dict[str, Any]
    rng: list[Any]


def merge(parts: list[dict[str, Any]]) -> Merged:
    """The manifest's tables from the parts that ranks told, in the order of ranks."""
    recorded: dict[str, Any] = {}
    tensors: dict[str, Any] = {}
    for part in parts:
        number = len(recorded)
        if part["file"] is not None:
            recorded[part["file"]] = part["record"]
        for name, row in part["tensors"].items():
            entry = tensors.setdefault(name, {"dtype": row["dtype"], "shape": row["shape"], "pieces": []})
            if (entry["dtype"], entry["shape"]) != (row["dtype"], row["shape"]):
                raise RuntimeError(f"ranks hold {name} as {entry['dtype']} {entry['shape']} and {row}")
            entry["pieces"] += [[number, *place] for place in row["places"]]
    for name, entry in tensors.items():
        rank = len(entry["shape"])
        held = sum(math.prod(piece[1 + rank :]) for piece in entry["pieces"])
        if held != math.prod(entry["shape"]):
            raise RuntimeError(f"ranks wrote {held} elements of {name} {entry['shape']}")
    return Merged(recorded, tensors, shortened_rng([part["rng"] for part in parts]))


def shortened_rng(states: list[dict[str, Any]]) -> list[Any]:
    """A state that an earlier rank has too is that rank's number: most often all ranks have the same."""
    shortened: list[Any] = []
    for rank, state in enumerate(states):
        same = next((other for other in range(rank) if shortened[other] == state), None)
        shortened.append(state if same is None else same)
    return shortened


@dataclass(frozen=True)
class Finish:
    step: int
    kind: files.Kind
    architecture: Architecture
    trainer: dict[str, Any]
    layout: Layout

    def publish(self, partial: Path, final: Path, merged: Merged, in_hf: torch.dtype | None) -> None:
        recorded, tensors = merged.files, merged.tensors
        self._check_names(tensors)
        if in_hf is not None:
            recorded, tensors = self._as_hf(partial, merged, in_hf), {}
        trainer = {**self.trainer, "rng": merged.rng}
        layout, ranks = asdict(self.layout), self.layout.world_size
        content = files.manifest(
            self.step, self.kind, self.architecture, trainer, recorded, tensors, world_size=ranks, layout=layout
        )
        files.publish(partial, final, content)

    def _check_names(self, tensors: dict[str, Any]) -> None:
        written = {name.removeprefix("model/") for name in tensors if name.startswith("model/")}
        if written != logical_shapes(self.architecture).keys():
            differing = sorted(written ^ logical_shapes(self.architecture).keys())
            raise RuntimeError(f"ranks wrote other tensors than the model has: {differing[:4]}")

    def _as_hf(self, partial: Path, merged: Merged, dtype: torch.dtype) -> dict[str, Any]:
        """Turn the shards into a Hugging Face folder, one tensor at a time; the folder's files, as recorded."""
        weights, location = (
            TensorView(Shards(partial, merged.files, merged.tensors), "model/"),
            self.trainer["tokenizer"],
        )
        write_hf(
            ((name, weights[name]) for name in logical_shapes(self.architecture)),
            self.architecture,
            partial / "hf",
            dtype,
            assets_from=assets_at(location),
            special_tokens=special_tokens(location),
        )
        for name in merged.files:
            (partial / name).unlink()
        for path in sorted((partial / "hf").iterdir()):
            path.rename(partial / path.name)
        shutil.rmtree(partial / "hf")
        return {path.name: describe_file(path) for path in sorted(partial.iterdir())}
