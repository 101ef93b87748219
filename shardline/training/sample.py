"""`shardline generate`: text from a checkpoint or a Hugging Face folder."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from shardline.data.tokenizer import Tokenizer, load_tokenizer
from shardline.errors import UserError
from shardline.models.decoder import Decoder
from shardline.models.generate import generate
from shardline.models.hf import read_hf
from shardline.models.hf_config import architecture_from_hf
from shardline.models.state import load_logical_state
from shardline.precision.mixed import Precision
from shardline.training import checkpoint as files
from shardline.training.build import build_model
from shardline.training.device import choose_device, supports_bf16


def command(
    folder: str | Path,
    *,
    prompt: str,
    max_new_tokens: int = 100,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    device: str | None = None,
    tokenizer: str | None = None,
) -> int:
    """Print the prompt and what the model adds to it, as it comes."""
    where = torch.device(device) if device else choose_device()
    model, location = load_for_inference(Path(folder), where)
    words = load_tokenizer(tokenizer or location)
    ids = _with_start(words, words.encode(prompt))
    if not ids:
        raise UserError("--prompt is empty and the tokenizer has no start token: give at least one character")
    sys.stdout.write(prompt)
    shown, new = "", list[int]()
    for token in generate(
        model,
        torch.tensor([ids], device=where),
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        eos_id=words.eos_id,
        seed=seed,
    ):
        new.append(token)
        text = words.decode(new)
        if not text.endswith("�"):  # a character may take several tokens
            sys.stdout.write(text[len(shown) :])
            sys.stdout.flush()
            shown = text
    sys.stdout.write("\n")
    return 0


def load_for_inference(folder: Path, device: torch.device) -> tuple[Decoder, str]:
    """The model in `folder` (checkpoint, run or Hugging Face) and where its tokenizer is."""
    compute = torch.bfloat16 if device.type == "cuda" and supports_bf16(device) else torch.float32
    precision = Precision(compute, compute, torch.float32)
    if (folder / "config.json").is_file():
        architecture = architecture_from_hf(folder)
        model = build_model(architecture, device, precision)
        load_logical_state(model, read_hf(folder, architecture))
        location = str(folder)
    else:
        saved = files.find_checkpoint(folder)
        if files.STATE_FILE not in saved.files:
            return load_for_inference(saved.path, device)
        saved.verify()
        model = build_model(saved.architecture, device, precision)
        files.load_model(saved, model)
        location = saved.trainer.get("tokenizer", "bytes")
    model.eval()
    return model, location


def _with_start(tokenizer: Tokenizer, ids: list[int]) -> list[int]:
    """Training documents begin with the start token, so prompts do too."""
    return ids if tokenizer.bos_id is None else [tokenizer.bos_id, *ids]
