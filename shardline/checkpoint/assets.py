"""What weights need besides tensors: where the tokenizer is, and which tokens begin and end a text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from shardline.checkpoint.format import Saved
from shardline.config.schema import Config, Data
from shardline.data.formats.template import FROM_TOKENIZER, choose_template, without_generation
from shardline.data.tokenizer import BYTES, JsonTokenizer, Tokenizer, load_tokenizer, tokenizer_file
from shardline.hub import local_path
from shardline.models.huggingface.config import read_config
from shardline.models.huggingface.files import copy_assets
from shardline.storage.atomic import write_atomically

OWN = "tokenizer"  # folder of a run's own tokenizer, inside the run's folder


def changes_tokenizer(config: Config) -> bool:
    """Whether a run adds tokens or a chat template to the tokenizer that it was given."""
    data = config.data
    return bool(data.added_tokens or data.special_tokens or (data.sources and has_template(data)))


def has_template(section: Data) -> bool:
    """Whether `[data]` names a chat template of its own."""
    given = section.chat_template or ("jinja" if section.chat_template_jinja else "")
    return bool(given) and not given.startswith(FROM_TOKENIZER)


def write_tokenizer(config: Config, tokenizer: Tokenizer) -> None:
    """Save the tokenizer with the tokens and the template of the run, for exports to copy."""
    if not changes_tokenizer(config) or not isinstance(tokenizer, JsonTokenizer):
        return
    folder = Path(config.job.dump_folder or ".") / OWN
    folder.mkdir(parents=True, exist_ok=True)
    copy_assets(tokenizer.file.parent, folder)
    tokenizer.backend.save(str(folder / "tokenizer.json"))
    file = folder / "tokenizer_config.json"
    settings = read_config(folder, file.name) if file.is_file() else {}
    write_atomically(file, json.dumps(settings | tokenizer.special_tokens, indent=2, ensure_ascii=False))
    if has_template(config.data):
        text = choose_template(config.data.chat_template, config.data.chat_template_jinja, tokenizer).text
        write_atomically(folder / "chat_template.jinja", without_generation(text))


def tokenizer_of_run(config: Config) -> str:
    """The tokenizer a run uses, in the form its checkpoints record: "bytes" or an absolute path."""
    own = Path(config.job.dump_folder or ".") / OWN
    if changes_tokenizer(config) and (own / "tokenizer.json").is_file():
        return str(own.resolve())
    given = local_path(config.model.tokenizer_path or config.model.hf_assets_path)
    return BYTES if given == BYTES or tokenizer_file(Path(given)) is None else str(Path(given).resolve())


def tokenizer_of_checkpoint(saved: Saved) -> str:
    """The tokenizer beside the weights, if there is one (the checkpoint may have moved), or the run's; "" if none."""
    return str(saved.path) if (saved.path / "tokenizer.json").is_file() else saved.trainer.get("tokenizer", "")


def assets_of_checkpoint(saved: Saved) -> Path | None:
    """Where the files for an export come from: the weights' own folder, or the run's tokenizer."""
    beside = any((saved.path / name).is_file() for name in ("tokenizer.json", "config.json"))
    return saved.path if beside else assets_at(tokenizer_of_checkpoint(saved))


def assets_at(location: str) -> Path | None:
    """The folder of a tokenizer.json, or the file if it has another name; None if there is no tokenizer file."""
    file = None if location in ("", BYTES) else tokenizer_file(Path(location))
    return file.parent if file is not None and file.name == "tokenizer.json" else file


def special_tokens(location: str) -> dict[str, Any]:
    """`bos_token_id` and `eos_token_id` of the tokenizer, for a config.json."""
    if location != BYTES and assets_at(location) is None:
        return {}
    tokenizer = load_tokenizer(location)
    return {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id}


def end_tokens(tokenizer: Tokenizer, location: str) -> list[int]:
    """Every token that ends a text: the tokenizer's, and those that the model's own files name."""
    found = [] if tokenizer.eos_id is None else [tokenizer.eos_id]
    folder = assets_at(location)
    for name in ("generation_config.json", "config.json"):
        if folder is not None and (folder / name).is_file():
            given = read_config(folder, name).get("eos_token_id")
            found += given if isinstance(given, list) else [] if given is None else [given]
    return sorted(set(found))
