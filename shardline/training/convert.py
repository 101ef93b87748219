"""`shardline import` and `shardline export`: Hugging Face folders to checkpoints and back, bit by bit.

Tensors are read and written one at a time; what is written appears under its name when all of it is on disk.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from shardline.errors import UserError
from shardline.models.fused import logical_shapes, parameter_count
from shardline.models.hf import HFTensors, copy_assets, read_hf, write_hf
from shardline.models.hf_config import architecture_from_hf
from shardline.precision.mixed import DTYPES
from shardline.training import checkpoint as files
from shardline.training.assets import assets_of_checkpoint, special_tokens, tokenizer_of_checkpoint
from shardline.training.tensor_file import Entry, write_tensors

CONSOLIDATED = "consolidated.safetensors"


def import_hf(folder: str | Path, out: str | Path, dtype: str | None = None, overwrite: bool = False) -> int:
    """Write the weights of a Hugging Face folder as a model-only checkpoint; types are kept unless `dtype` is given.

    Its config.json and tokenizer files go along: the checkpoint needs nothing else to be trained, sampled or exported.
    """
    folder, out, wanted = Path(folder), Path(out).resolve(), _dtype(dtype)
    architecture = architecture_from_hf(folder)
    tensors = read_hf(folder, architecture)
    with _new_folder(out, overwrite, source=folder) as partial:
        partial.mkdir()
        entries = _entries(tensors, logical_shapes(architecture), wanted, "model/")
        recorded, tensors_table = files.write_whole(partial, entries)
        copy_assets(folder, partial)
        shutil.copyfile(folder / "config.json", partial / "config.json")
        trainer = {"step": 0, "samples": 0, "tokens": 0, "tokenizer": ""}  # its tokenizer, if any, lies beside it
        files.publish(partial, out, files.manifest(0, "model", architecture, trainer, recorded, tensors_table))
    print(f"imported {len(entries)} tensors, {parameter_count(architecture):,} parameters, to {out}")
    return 0


def export(
    checkpoint: str | Path, out: str | Path, format: str = "hf", dtype: str | None = None, overwrite: bool = False
) -> int:
    """Write a checkpoint's weights as a Hugging Face folder or as one consolidated safetensors file."""
    if format not in ("hf", "consolidated"):
        raise UserError(f"--format {format}: expected hf or consolidated")
    saved, out, wanted = _find(Path(checkpoint)), Path(out).resolve(), _dtype(dtype)
    saved.verify()
    tensors = saved.weights()
    with _new_folder(out, overwrite, source=saved.path) as partial:
        if format == "hf":
            write_hf(
                ((name, tensors[name]) for name in logical_shapes(saved.architecture)),
                saved.architecture,
                partial,
                dtype=wanted,
                assets_from=assets_of_checkpoint(saved),
                special_tokens=special_tokens(tokenizer_of_checkpoint(saved)),
            )
        else:
            partial.mkdir()
            entries = _entries(tensors, logical_shapes(saved.architecture), wanted)
            write_tensors(partial / CONSOLIDATED, entries)
            architecture = json.dumps(saved.architecture.model_dump(mode="json"), indent=1)
            (partial / "architecture.json").write_text(architecture + "\n")
        files.put_in_place(partial, out)
    print(f"exported step {saved.step} ({parameter_count(saved.architecture):,} parameters) to {out}")
    return 0


def _find(path: Path) -> files.Saved:
    if (path / "config.json").is_file() and not (path / "manifest.json").is_file():
        raise UserError(f"{path} is a Hugging Face folder already; `shardline import` makes a checkpoint of it")
    return files.find_checkpoint(path)


def _entries(
    tensors: files.TensorView | HFTensors,
    shapes: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype | None,
    prefix: str = "",
) -> list[Entry]:
    return [
        Entry(prefix + name, shape, dtype or tensors.dtype(name), lambda name=name: tensors[name])  # type: ignore[misc]
        for name, shape in shapes.items()
    ]


@contextlib.contextmanager
def _new_folder(out: Path, overwrite: bool, source: Path) -> Iterator[Path]:
    """A free name beside `out` to write under; nothing is left there, whatever happens."""
    _check_place(out, overwrite, source)
    partial = out.with_name(f".{out.name}.partial-{os.getpid()}")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(partial, ignore_errors=True)
        yield partial
    except OSError as error:
        at = f" ({error.filename})" if error.filename else ""
        raise UserError(f"{out} was not written: {error.strerror or error}{at}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _check_place(out: Path, overwrite: bool, source: Path) -> None:
    """What is there is replaced when asked for, and only if it is a model: --overwrite never empties a home folder."""
    here = source.resolve()
    if here == out or here in out.parents or out in here.parents:
        raise UserError(f"{out} and {source} overlap: name a folder apart from what is read")
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if not overwrite:
        raise UserError(f"{out} exists and is not empty: name another folder, or give --overwrite")
    if not any((out / name).is_file() for name in ("manifest.json", "config.json", CONSOLIDATED)):
        raise UserError(f"{out} is no checkpoint and no exported model: --overwrite does not replace it")


def _dtype(name: str | None) -> torch.dtype | None:
    if name is not None and name not in DTYPES:
        raise UserError(f"--dtype {name}: expected one of {', '.join(DTYPES)}")
    return DTYPES[name] if name is not None else None
