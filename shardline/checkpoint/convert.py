"""`shardline import` and `shardline export`: from Hugging Face and TorchTitan, to Hugging Face or one file, bit-exact.

Tensors are read and written one at a time; the output gets its name when all of it is on disk.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardline.adapters.peft_files import write_peft
from shardline.checkpoint import format as files
from shardline.checkpoint.assets import (
    assets_at,
    assets_of_checkpoint,
    special_tokens,
    tokenizer_of_checkpoint,
    tokenizer_of_run,
)
from shardline.checkpoint.commit import publish, put_in_place
from shardline.checkpoint.fetch import local_path
from shardline.checkpoint.lora.adapter import Adapter, find_adapter
from shardline.config.architecture import Architecture
from shardline.config.schema import Config
from shardline.errors import UserError
from shardline.models.fused_weights import keeps_type, logical_shapes, parameter_count
from shardline.models.huggingface.config import architecture_from_hf
from shardline.models.huggingface.files import HFTensors, copy_assets, read_hf, write_hf
from shardline.precision.mixed import DTYPES
from shardline.storage.safetensors import Entry, LazyTensors, entries_from, write_tensors

if TYPE_CHECKING:
    import torch

    from shardline.checkpoint.torchtitan import DCPTensors

CONSOLIDATED = "consolidated.safetensors"
METADATA = ".metadata"  # the index file of torch.distributed.checkpoint


def import_model(
    folder: str | Path,
    out: str | Path,
    dtype: str | None = None,
    overwrite: bool = False,
    trust_pickle: bool = False,
    config: Config | None = None,
) -> int:
    """Write weights as a model-only checkpoint; types are kept unless `dtype` is given.

    `folder` is a Hugging Face folder, whose config.json and tokenizer files are copied, so the checkpoint needs nothing
    else to be trained, sampled or exported. Or it is TorchTitan's, and `config` names the model.
    """
    folder, out, wanted = Path(folder), Path(out).resolve(), DTYPES[dtype] if dtype else None
    tensors: DCPTensors | HFTensors
    assets: Path | None
    if is_dcp_folder(folder):
        tensors, assets = _open_dcp(folder, trust_pickle, config)
    elif _is_ours(folder):
        raise UserError(
            f"{folder} is a run or a checkpoint of Shardline; `shardline export` makes a Hugging Face folder of it"
        )
    else:
        tensors, assets = _open_hf(folder, trust_pickle, config), folder
    architecture = tensors.arch
    with _new_folder(out, overwrite, source=folder) as partial:
        partial.mkdir()
        entries = _entries(tensors, architecture, wanted, "model/")
        recorded, tensors_table = files.write_whole(partial, entries)
        if assets is not None:
            copy_assets(assets, partial)
        if (folder / "config.json").is_file():
            shutil.copyfile(folder / "config.json", partial / "config.json")
        trainer = {"step": 0, "samples": 0, "tokens": 0, "tokenizer": ""}  # a tokenizer lies beside the weights
        publish(partial, out, files.manifest(0, "model", architecture, trainer, recorded, tensors_table))
    print(f"imported {len(entries)} tensors, {parameter_count(architecture):,} parameters, to {out}")
    return 0


def is_dcp_folder(folder: Path) -> bool:
    """Whether a folder is TorchTitan's; one with several steps raises an error that suggests the newest."""
    steps = [path.parent.name for path in folder.glob(f"step-*/{METADATA}")]
    if steps and not (folder / METADATA).is_file():
        newest = max(steps, key=lambda name: int("".join(filter(str.isdigit, name)) or -1))
        raise UserError(f"{folder} holds several steps: name one of them, such as {folder / newest}")
    return (folder / METADATA).is_file()


def _open_dcp(folder: Path, trusted: bool, config: Config | None) -> tuple[DCPTensors, Path | None]:
    if not trusted:
        raise UserError(
            f"{folder} was written by torch.distributed.checkpoint: its {METADATA} is a Python pickle, which can run"
            " any code when it is read\npass --trust-pickle if you trust whoever wrote it"
        )
    from shardline.checkpoint.torchtitan import open_dcp

    return open_dcp(folder, config), None if config is None else assets_at(tokenizer_of_run(config))


def _open_hf(folder: Path, trusted: bool, config: Config | None) -> HFTensors:
    if trusted:
        raise UserError(f"--trust-pickle is for folders of torch.distributed.checkpoint: {folder} has no {METADATA}")
    if config is not None:
        raise UserError(f"{folder}: its config.json says which model it is; leave out --config and --section.key flags")
    return read_hf(folder, architecture_from_hf(folder))


def export(
    checkpoint: str | Path,
    out: str | Path,
    format: str = "hf",
    dtype: str | None = None,
    overwrite: bool = False,
    max_shard_size: str | None = None,
    merge: bool = False,
    base: str | None = None,
) -> int:
    """Write a checkpoint's weights as a Hugging Face folder or as one consolidated safetensors file.

    A checkpoint of a run with LoRA becomes an adapter in the format of `peft`; with `merge`, the whole model.
    """
    if format not in ("hf", "consolidated"):
        raise UserError(f"--format {format}: expected hf or consolidated")
    if max_shard_size is not None and format != "hf":
        raise UserError("--max-shard-size is for --format hf: a consolidated export is one file")
    limit = size_of(max_shard_size or "5GB")
    path, out, wanted = local_path(checkpoint), Path(out).resolve(), DTYPES[dtype] if dtype else None
    adapter = find_adapter(path, base)
    if adapter is not None:
        return _export_adapter(adapter, path, out, format, wanted, overwrite, limit, merge)
    if merge:
        raise UserError(f"--merge is for adapters: {path} holds a whole model, which is exported without it")
    saved = _find(path)
    if saved.is_hf:  # other checkpoints are verified while they are read
        saved.verify()
    entries = _entries(saved.weights(), saved.architecture, wanted)
    with _new_folder(out, overwrite, source=saved.path) as partial:
        if format == "hf":
            write_hf(
                entries,
                saved.architecture,
                partial,
                max_shard_bytes=limit,
                assets_from=assets_of_checkpoint(saved),
                special_tokens=special_tokens(tokenizer_of_checkpoint(saved)),
            )
        else:
            _write_consolidated(partial, entries, saved.architecture)
        put_in_place(partial, out)
    print(f"exported step {saved.step} ({parameter_count(saved.architecture):,} parameters) to {out}")
    return 0


def _write_consolidated(partial: Path, entries: list[Entry], arch: Architecture) -> None:
    partial.mkdir()
    write_tensors(partial / CONSOLIDATED, entries)
    (partial / "architecture.json").write_text(json.dumps(arch.model_dump(mode="json"), indent=1) + "\n")


def _export_adapter(
    adapter: Adapter,
    source: Path,
    out: Path,
    format: str,
    dtype: torch.dtype | None,
    overwrite: bool,
    limit: int,
    merge: bool,
) -> int:
    """Write an adapter in the format of `peft`, or the model that results from merging it into its frozen weights."""
    assets = assets_at(adapter.tokenizer)
    if not merge and (format != "hf" or dtype is not None):
        raise UserError("--format and --dtype apply to whole models: add --merge, or leave them out for an adapter")
    with _new_folder(out, overwrite, source=source) as partial:
        if merge:
            tensors, architecture = adapter.merged()
            entries = _entries(tensors, architecture, dtype)
        if merge and format == "hf":
            options: dict[str, Any] = {"assets_from": assets, "special_tokens": special_tokens(adapter.tokenizer)}
            write_hf(entries, architecture, partial, max_shard_bytes=limit, **options)
        elif merge:
            _write_consolidated(partial, entries, architecture)
        else:
            write_peft(partial, adapter.tensors, adapter.how, adapter.architecture, adapter.base.path or None)
            if assets is not None:
                copy_assets(assets, partial)
        put_in_place(partial, out)
    what = "the merged model" if merge else "the adapter"
    print(f"exported {what} of step {adapter.step} to {out}")
    return 0


def _entries(tensors: LazyTensors, arch: Architecture, dtype: torch.dtype | None, prefix: str = "") -> list[Entry]:
    """All weights, in the type they are stored in unless `dtype` is given."""
    entries = entries_from(tensors, logical_shapes(arch), prefix)
    if dtype is None:
        return entries
    return [entry if keeps_type(entry.name) else entry._replace(dtype=dtype) for entry in entries]


def size_of(text: str) -> int:
    """Return the number of bytes in `5GB`, `500MB`, `2GiB`."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(I?)B", text.strip().upper())
    size = 0 if match is None else int(float(match[1]) * (1024 if match[3] else 1000) ** " KMGT".index(match[2] or " "))
    if size < 1:
        raise UserError(f"--max-shard-size {text}: expected a size such as 5GB, 500MB or 2GiB")
    return size


def _is_ours(folder: Path) -> bool:
    return not (folder / "config.json").exists() and any(
        (folder / name).exists() for name in (files.MANIFEST, "checkpoint")
    )


def _find(path: Path) -> files.Saved:
    if (path / "config.json").is_file() and not (path / "manifest.json").is_file():
        raise UserError(f"{path} is a Hugging Face folder already; `shardline import` makes a checkpoint of it")
    return files.find_checkpoint(path)


@contextlib.contextmanager
def _new_folder(out: Path, overwrite: bool, source: Path) -> Iterator[Path]:
    """Yield a folder beside `out` to write into; it is always removed unless it was renamed."""
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
    """Refuse to replace anything without --overwrite, or anything but a model: a home folder is never emptied."""
    here = source.resolve()
    if here == out or here in out.parents or out in here.parents:
        raise UserError(f"{out} and {source} overlap: write to a folder outside the one that is read")
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if not overwrite:
        raise UserError(f"{out} exists and is not empty: use another folder, or pass --overwrite")
    known = ("manifest.json", "config.json", "adapter_config.json", CONSOLIDATED)
    if not any((out / name).is_file() for name in known):
        raise UserError(f"{out} is neither a checkpoint nor an exported model, so --overwrite does not replace it")
