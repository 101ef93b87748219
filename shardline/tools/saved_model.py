"""A model on disk, in a run, a checkpoint, an adapter or a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from shardline.adapters.lora import own_parameters, trained_parameters
from shardline.checkpoint.assets import tokenizer_of_checkpoint
from shardline.checkpoint.format import find_checkpoint
from shardline.checkpoint.lora.adapter import Adapter, find_adapter
from shardline.config.architecture import Architecture
from shardline.data.tokenizer import BYTES, Tokenizer, load_tokenizer, tokenizer_file
from shardline.errors import UserError
from shardline.models.decoder import Decoder
from shardline.models.huggingface.files import read_hf
from shardline.models.state import load_logical_state
from shardline.precision.mixed import Precision
from shardline.run.device import choose_device, supports_bf16
from shardline.training.setup import build_model


class SavedModel(NamedTuple):
    architecture: Architecture
    read: Callable[[], Mapping[str, torch.Tensor]]
    tokenizer: str  # where it is
    adapter: Adapter | None = None
    step: int | None = None  # of a checkpoint
    validated: int = 0  # samples of each validation of its run; 0: none, or not known

    def build(self, device: torch.device, precision: Precision | None = None) -> Decoder:
        """Return the model with its weights; without a `precision`, in bfloat16 if the GPU supports it."""
        if precision is None:
            compute = torch.bfloat16 if device.type == "cuda" and supports_bf16(device) else torch.float32
            precision = Precision(compute, compute, torch.float32)
        how = None if self.adapter is None else self.adapter.how
        model, _ = build_model(self.architecture, device, precision, how=how)
        load_logical_state(own_parameters(model), self.read())
        if self.adapter is not None:
            load_logical_state(trained_parameters(model), self.adapter.tensors, strict=False)
        return model.eval()


def is_hf_folder(folder: Path) -> bool:
    return (folder / "config.json").is_file() and not (folder / "manifest.json").is_file()


def open_model(folder: Path, base: str | None = None) -> SavedModel:
    """Return the model in `folder`; `base` is the current folder of an adapter's frozen weights."""
    adapter = find_adapter(folder, base)
    if adapter is not None:
        return of_adapter(adapter)
    if is_hf_folder(folder):
        tensors = read_hf(folder)
        return SavedModel(tensors.arch, lambda: tensors, str(folder))
    saved = find_checkpoint(folder)

    def read() -> Mapping[str, torch.Tensor]:
        if saved.is_hf:  # our own format is verified while it is read
            saved.verify()
        return saved.weights()

    return SavedModel(
        saved.architecture, read, tokenizer_of_checkpoint(saved), None, saved.step, saved.trainer.get("validated", 0)
    )


def of_adapter(adapter: Adapter) -> SavedModel:
    return SavedModel(adapter.architecture, adapter.frozen, adapter.tokenizer, adapter, adapter.step)


def tokenizer_at(location: str, folder: Path, architecture: Architecture) -> Tokenizer:
    """Return the tokenizer at `location` for the model in `folder`, if the model's vocabulary is large enough."""
    if location != BYTES and (not location or tokenizer_file(Path(location)) is None):
        place = f"no tokenizer.json at {location}" if location else f"{folder} has no tokenizer"
        raise UserError(f"{place}: give --tokenizer=FOLDER with a tokenizer.json, or --tokenizer=bytes")
    tokenizer = load_tokenizer(location)
    if tokenizer.vocab_size > architecture.vocab_size:
        raise UserError(
            f"the tokenizer {tokenizer.name!r} has {tokenizer.vocab_size} ids, but the model {architecture.vocab_size}:"
            " use the model's own with --tokenizer=FOLDER"
        )
    return tokenizer


def device_named(name: str | None) -> torch.device:
    """Return the device named by --device; None: a GPU if there is one."""
    if name is None:
        return choose_device()
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"--device {name}: expected cpu, cuda or cuda:N") from None
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"--device {name}: expected cpu, cuda or cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(f"--device {name}: there are {torch.cuda.device_count()} CUDA devices here")
    return device
