"""`shardline eval` with data: the loss per target token, computed with validation's loader and forward passes."""

from __future__ import annotations

import contextlib
import json as json_text
import math
import sys
import time
from pathlib import Path
from typing import Any

import torch

from shardline.comm.mesh import Mesh
from shardline.config.load import load_config
from shardline.config.names import is_demo
from shardline.config.schema import Config
from shardline.data.loader import build_loader, fitted
from shardline.data.tokenizer import choose_tokenizer
from shardline.errors import UserError
from shardline.parallel.data.fsdp import free_gathered
from shardline.precision.mixed import choose_precision
from shardline.run.device import supports_bf16
from shardline.run.options import TrainOptions
from shardline.tools.bench.ranks import on_ranks
from shardline.tools.saved_model import is_hf_folder, open_model
from shardline.training.loss import Head
from shardline.training.setup import set_determinism
from shardline.training.validate import add_losses, means
from shardline.training.whole_model import WholeModel


def run(start: TrainOptions, folder: Path, data: str | None, flags: list[str], base: str | None, json: bool) -> int:
    """Start the ranks, or evaluate if this is one; each has the whole model, and reads its share of the data."""
    config = _config_of(folder, data, flags)

    def work(mesh: Mesh, device: torch.device) -> int:
        with contextlib.redirect_stdout(sys.stderr):  # messages while data is prepared
            found = evaluate(config, folder, mesh, device, base)
        if mesh.rank == 0:
            print(json_text.dumps(found) if json else _table(found))
        return 0

    return on_ranks("eval", load_config(), start, 1, work)


@torch.no_grad()
def evaluate(config: Config, folder: Path, mesh: Mesh, device: torch.device, base: str | None = None) -> dict[str, Any]:
    """Return what is printed: loss, perplexity, and the number of tokens."""
    began = time.perf_counter()
    set_determinism(config, device)
    saved, tokenizer = open_model(folder, base), choose_tokenizer(config)
    arch = fitted(saved.architecture, config, tokenizer)
    model = saved._replace(architecture=arch).build(device, choose_precision(config, device, supports_bf16(device)))
    share = {"rank": mesh.data_rank, "ranks": mesh.layout.data_ranks}
    loader = build_loader(config, "validation", arch, tokenizer, device=device, **share)
    try:
        passes = WholeModel(config, model, mesh, Head(None, config.training.loss_chunk_tokens, None))
        sums = torch.zeros(2, dtype=torch.float64, device=device)
        for batch in loader.epoch(_batches(config, saved.validated, mesh.layout.data_ranks)):
            add_losses(sums, passes, [batch])
    finally:
        loader.close()
    free_gathered(model)
    targets, found = means(sums, passes, mesh)
    if not targets:
        raise UserError(f"{_named(config)} has no target tokens: nothing to evaluate")
    loss = found["loss"]
    return {
        "model": str(folder),
        "step": saved.step,
        "data": _named(config),
        "loss": loss,
        "perplexity": math.exp(loss) if loss < 700 else math.inf,
        "target_tokens": round(targets),
        "seq_len": config.validation.seq_len,
        "seconds": round(time.perf_counter() - began, 2),
    }


def _batches(config: Config, validated: int, ranks: int) -> int | None:
    """Return the batches per rank; None: all. On any number of ranks, the samples are those of the run's validation."""
    section = config.validation
    if section.steps < 0 or validated == 0:
        return None if section.steps < 0 else section.steps
    batches, rest = divmod(validated, section.local_batch_size * ranks)
    if rest:
        raise UserError(
            f"the run validated on {validated} samples, which {ranks} ranks cannot read in batches of"
            f" {section.local_batch_size}: change --nproc or --validation.local_batch_size"
        )
    return batches


def _config_of(folder: Path, data: str | None, flags: list[str]) -> Config:
    """Return the config of the run that `folder` is or belongs to, with `data` set in it."""
    place = next(
        (one / "config.toml" for one in (folder, *folder.parents[:2]) if (one / "config.toml").is_file()), None
    )
    if is_hf_folder(folder):
        config = load_config(None, ["--model.name=auto", f"--model.hf_assets_path={folder}", *flags])
    elif place is not None:
        config = load_config(place, flags)
    else:
        own = [f"--model.tokenizer_path={found}"] if (found := open_model(folder).tokenizer) else []
        config = load_config(None, [*own, *flags])
    changes: dict[str, Any] = {"validation.enable": True}
    if data is not None:
        changes |= {"validation.dataset_path": data, "validation.steps": -1} | _records(config, data)
    elif not config.validation.enable:
        raise UserError(f"{folder} was trained without validation data: name a file with --data FILE")
    elif config.training.objective == "dpo":
        raise UserError(
            f"{folder} was trained on preference pairs, which have no perplexity: name a text with --data FILE"
        )
    return config.replace(changes)


def _records(config: Config, data: str) -> dict[str, Any]:
    """If the run read records, read `data` as records of the same type; if it read preference pairs, as text."""
    if config.training.objective == "dpo":
        return {"data.sources": [], "data.validation_sources": [], "training.objective": "next_token"}
    if not config.data.sources:
        return {}
    return {"data.validation_sources": [{**config.data.sources[0], "path": data}], "data.held_out": 0.0}


def _named(config: Config) -> str:
    section = config.validation
    if config.data.sources:
        tables = config.data.validation_sources
        return ", ".join(str(table["path"]) for table in tables) if tables else "data.held_out"
    return "demo" if is_demo(section) else section.dataset_path or section.dataset


def _table(found: dict[str, Any]) -> str:
    step = "" if found["step"] is None else f", step {found['step']}"
    rows = {
        "model": f"{found['model']}{step}",
        "data": f"{found['data']}: {found['target_tokens']:,} target tokens in sequences of {found['seq_len']}",
        "loss": f"{found['loss']:.6f} a token",
        "perplexity": f"{found['perplexity']:.4f}",
        "seconds": f"{found['seconds']}",
    }
    return "\n".join(f"{name:<12}{text}" for name, text in rows.items())
