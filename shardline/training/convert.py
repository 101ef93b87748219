"""`shardline import` and `shardline export`: Hugging Face folders to checkpoints and back, bit by bit."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch

from shardline.errors import UserError
from shardline.models.fused import logical_shapes, parameter_count
from shardline.models.hf import copy_assets, read_hf, write_hf
from shardline.models.hf_config import architecture_from_hf
from shardline.precision.mixed import DTYPES
from shardline.training import checkpoint as files
from shardline.training.tensor_file import Entry, write_tensors


def import_hf(folder: str | Path, out: str | Path, dtype: str | None = None, overwrite: bool = False) -> int:
    """Write the weights of a Hugging Face folder as a model-only checkpoint; types are kept unless `dtype` is given."""
    folder, out = Path(folder), Path(out)
    architecture = architecture_from_hf(folder)
    partial = _new_folder(out, overwrite)
    try:
        tensors = read_hf(folder, architecture)
        wanted = _dtype(dtype)
        entries = [
            Entry(f"model/{name}", shape, wanted or tensors.dtype(name), lambda name=name: tensors[name])  # type: ignore[misc]
            for name, shape in logical_shapes(architecture).items()
        ]
        recorded = {files.STATE_FILE: write_tensors(partial / files.STATE_FILE, entries)}
        copy_assets(folder, partial)
        trainer = {"step": 0, "samples": 0, "tokens": 0, "tokenizer": _tokenizer_in(out, partial)}
        files.publish(partial, out, files.manifest(0, "model", architecture, trainer, recorded))
    except OSError as error:
        raise UserError(f"{out} was not written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    print(f"imported {len(entries)} tensors, {parameter_count(architecture):,} parameters, to {out}")
    return 0


def export(
    checkpoint: str | Path, out: str | Path, format: str = "hf", dtype: str | None = None, overwrite: bool = False
) -> int:
    """Write a checkpoint's weights as a Hugging Face folder or as one consolidated safetensors file."""
    saved, out = files.find_checkpoint(Path(checkpoint)), Path(out)
    if files.STATE_FILE not in saved.files:
        raise UserError(f"{saved.path} is a Hugging Face folder already")
    saved.verify()
    partial = _new_folder(out, overwrite)
    try:
        assets = _assets(saved)
        if format == "hf":
            shutil.rmtree(partial)
            write_hf(_named_tensors(saved), saved.architecture, partial, dtype=_dtype(dtype), assets_from=assets)
        elif format == "consolidated":
            _write_consolidated(saved, partial, _dtype(dtype))
        else:
            raise UserError(f"--format {format}: expected hf or consolidated")
        if out.exists():
            shutil.rmtree(out)
        partial.rename(out)
    except OSError as error:
        raise UserError(f"{out} was not written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    print(f"exported step {saved.step} ({parameter_count(saved.architecture):,} parameters) to {out}")
    return 0


def _write_consolidated(saved: files.Saved, out: Path, dtype: torch.dtype | None) -> None:
    tensors = saved.tensors("model/")
    entries = [
        Entry(name, tuple(tensor.shape), dtype or tensor.dtype, lambda name=name: tensors[name])  # type: ignore[misc]
        for name, tensor in ((name, tensors[name]) for name in tensors)
    ]
    write_tensors(out / "consolidated.safetensors", entries)
    (out / "architecture.json").write_text(json.dumps(saved.architecture.model_dump(mode="json"), indent=1) + "\n")


def _named_tensors(saved: files.Saved) -> Iterator[tuple[str, torch.Tensor]]:
    tensors = saved.tensors("model/")
    for name in logical_shapes(saved.architecture):
        yield name, tensors[name]


def _assets(saved: files.Saved) -> Path | None:
    """Where tokenizer files of this checkpoint are: beside it, or where its run found them."""
    for place in (saved.path, Path(saved.trainer.get("tokenizer", ""))):
        folder = place.parent if place.is_file() else place
        if (folder / "tokenizer.json").is_file():
            return folder
    return None


def _tokenizer_in(out: Path, partial: Path) -> str:
    return str(out.resolve()) if (partial / "tokenizer.json").is_file() else "bytes"


def _new_folder(out: Path, overwrite: bool) -> Path:
    if out.exists() and (not out.is_dir() or any(out.iterdir())) and not overwrite:
        raise UserError(f"{out} exists and is not empty: name another folder, or give --overwrite")
    partial = out.with_name(out.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
    except OSError as error:
        raise UserError(f"{out} cannot be written: {error.strerror or error}") from error
    return partial


def _dtype(name: str | None) -> torch.dtype | None:
    if name is not None and name not in DTYPES:
        raise UserError(f"--dtype {name}: expected one of {', '.join(DTYPES)}")
    return DTYPES[name] if name is not None else None
