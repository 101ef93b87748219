"""Axolotl's keys about saving, validating, resuming and logging.

`saves_per_epoch` and `evals_per_epoch` are, as in Axolotl, fractions of the whole run: 1 / (times x num_epochs).
"""

from __future__ import annotations

import os

from shardline.config.axolotl.reader import Reader, choice, number, switch, text, whole
from shardline.config.axolotl.training import epochs_of

STRATEGIES = (False, "no", "epoch", "steps", "best")
STEPS = 500  # transformers' default of save_steps and eval_steps


def saving(reader: Reader) -> None:
    """When checkpoints are written, and the form of the last one."""
    _cadence(reader, "checkpoint.interval", "saves_per_epoch", "save_steps", "save_strategy")
    if reader.get("save_strategy", choice(*STRATEGIES)) == "best":
        reader.problem("save_strategy", "checkpoints are kept by age, not by their loss; use 'epoch' or 'steps'")
    if not reader.get("save_safetensors", switch, True):
        reader.problem("save_safetensors", "weights are always written as safetensors; remove the key")
    reader.set("checkpoint.last_save_in_hf", True, "output_dir")
    reader.set("checkpoint.export_dtype", "bfloat16", "output_dir")


def validating(reader: Reader) -> None:
    """Whether and when the loss of held-out records is computed; `datasets.py` has which records."""
    strategies = [name for name in ("eval_strategy", "evaluation_strategy") if reader.has(name)]
    strategy = strategies[0] if strategies else "eval_strategy"
    held_out = bool(reader.get("val_set_size", number, 0.0))
    source = "val_set_size" if held_out else "test_datasets"
    off = reader.get(strategy, choice(*STRATEGIES)) in (False, "no")
    if not (held_out or reader.has("test_datasets")) or off:
        reason = f"{strategy} is no" if off else "nothing is held out: val_set_size is 0"
        for name in (
            "evals_per_epoch",
            "eval_steps",
            "eval_batch_size",
            "eval_sequence_len",
            "early_stopping_patience",
        ):
            if reader.has(name):
                reader.idle(name, reason)
        return
    reader.set("validation.enable", True, source)
    for native, name, other, default in (
        ("local_batch_size", "eval_batch_size", "micro_batch_size", 1),
        ("seq_len", "eval_sequence_len", "sequence_len", 512),
    ):
        given = name if reader.has(name) else other
        reader.set(f"validation.{native}", reader.get(given, whole, default), given)
    _cadence(reader, "validation.freq", "evals_per_epoch", "eval_steps", strategy)
    if (patience := reader.get("early_stopping_patience", whole)) is not None and patience > 0:
        reader.set("validation.patience", patience, "early_stopping_patience")
        reader.note("early_stopping_patience", "the run ends with its last weights, not with the best ones")


def _cadence(reader: Reader, native: str, per_epoch: str, steps: str, strategy: str) -> None:
    """Set a number of steps, or a fraction of the run, from the three ways to say it."""
    times, count = reader.get(per_epoch, number), reader.get(steps, number)
    if times and count:
        reader.together(per_epoch, steps)
    if times:
        reader.set(f"{native}_ratio", min(1.0, 1 / (times * epochs_of(reader))), per_epoch)
    elif count and count < 1:
        reader.set(f"{native}_ratio", count, steps)
    elif count:
        reader.set(native, reader.get(steps, whole, STEPS), steps)
    elif reader.get(strategy) in (False, "no"):
        reader.set(f"{native}_ratio", 1.0, strategy)
    elif reader.get(strategy) == "steps":
        reader.set(native, STEPS, strategy)
    else:
        reader.set(f"{native}_ratio", min(1.0, 1 / epochs_of(reader)), strategy)


def resuming(reader: Reader) -> None:
    """Continue from a checkpoint of another run; a run finds its own checkpoints without any key."""
    given = reader.get("resume_from_checkpoint")
    if given in (None, False, True, ""):
        return
    path = text(given)
    if os.path.isfile(os.path.join(path, "trainer_state.json")):
        reader.problem(
            "resume_from_checkpoint",
            f"{path} is a checkpoint of transformers' Trainer: its optimizer state cannot be read; begin from its"
            " weights with base_model",
        )
    reader.set("checkpoint.initial_load_path", path, "resume_from_checkpoint")
    reader.set("checkpoint.initial_load_model_only", False, "resume_from_checkpoint")
    reader.set("checkpoint.initial_load_in_hf", False, "resume_from_checkpoint")


def logging(reader: Reader) -> None:
    """Weights & Biases: on if a project is named."""
    project, mode = reader.get("wandb_project", text), reader.get("wandb_mode", text)
    on = reader.get("use_wandb", switch, bool(project)) and mode != "disabled"
    if project:
        reader.set("metrics.wandb_project", project, "wandb_project")
    if on:
        reader.set("metrics.enable_wandb", True, "wandb_project" if project else "use_wandb")
    if mode:
        reader.set("metrics.wandb_mode", mode, "wandb_mode")


HANDLERS = (saving, validating, resuming, logging)
