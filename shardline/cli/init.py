"""`shardline init`: five questions, and a config that says why each key has its value."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from shardline.config.schema import Config
from shardline.config.write import toml_value
from shardline.errors import UserError
from shardline.json_text import parse_json
from shardline.registry import nearest
from shardline.words import for_stream, to_stderr

GOALS = ("pretrain", "finetune", "lora")
RECORDS = {"messages": "chat_template", "instruction": "alpaca"}  # field of a record -> its type
RATES = {"pretrain": 3e-4, "finetune": 2e-5, "lora": 2e-4}


class Question(NamedTuple):
    key: str
    text: str
    default: str


QUESTIONS = (
    Question("model", "Model: FAMILY FLAVOR such as 'llama3 8B', a Hugging Face folder, or owner/name", ""),
    Question("data", "Data: a text, JSONL or Parquet file, a glob, a prepared store, or demo", "demo"),
    Question("goal", f"Goal: {', '.join(GOALS)}", ""),
    Question("gpus", "GPUs on this machine (0: train on the CPU)", "0"),
    Question("run", "Folder of the run", "outputs/run"),
)
MODEL_OF_DEMO = "llama3 debugmodel"


def run(file: Path, given: Mapping[str, str | None], check: Callable[[str], Config]) -> int:
    """Ask what was not given, and write the config once it is checked; `check` loads it from a file."""
    if file.exists():
        raise UserError(f"{file} already exists: use another name, as in shardline init other.toml")
    if not file.parent.is_dir():
        raise UserError(f"{file}: there is no folder {file.parent}")
    text = config_text(answers(given))
    with tempfile.TemporaryDirectory() as folder:
        draft = Path(folder) / "run.toml"
        draft.write_text(text, encoding="utf-8")
        try:
            check(str(draft))
        except UserError as error:
            error.args = (str(error).replace(str(draft), "the config that your answers make"),)
            raise
    try:
        with open(file, "x", encoding="utf-8") as out:
            out.write(text)
    except OSError as error:
        with contextlib.suppress(OSError):
            if not isinstance(error, FileExistsError):
                file.unlink()
        raise UserError(f"cannot write {file}: {error.strerror}") from error
    print(f"wrote {file}\n\n  shardline explain {file}\n  shardline train {file}{_processes(text)}")
    return 0


def _processes(text: str) -> str:
    number = next((line.rpartition(" ")[2] for line in text.splitlines() if line.startswith("# ranks: ")), "1")
    return "" if number == "1" else f" --nproc {number}"


def answers(given: Mapping[str, str | None]) -> dict[str, str]:
    """Each question's answer: what was given as an option, else what is typed or comes through a pipe."""
    found: dict[str, str] = {}
    for number, question in enumerate(QUESTIONS, start=1):
        value = given.get(question.key)
        while value is None:
            value = _asked(number, question, _default(question, found))
            problem = _problem(question.key, value)
            if problem and not sys.stdin.isatty():
                raise UserError(problem)
            if problem:
                to_stderr(problem)
                value = None
        if problem := _problem(question.key, value):
            raise UserError(problem)
        found[question.key] = value.strip()
    if found["goal"] != "pretrain" and not is_hf(found["model"]):
        raise UserError(f"--goal {found['goal']} needs weights: name a Hugging Face folder, or owner/name, as --model")
    return found


def _default(question: Question, found: Mapping[str, str]) -> str:
    """The answer of an empty line, which may follow from earlier ones."""
    if question.key == "model":
        return MODEL_OF_DEMO
    if question.key == "goal":
        return "finetune" if is_hf(found["model"]) else "pretrain"
    return question.default


def _asked(number: int, question: Question, default: str) -> str:
    text = f"{number}/{len(QUESTIONS)} {question.text} [{default}]:"
    print(for_stream(text, sys.stderr), end=" ", file=sys.stderr, flush=True)
    line = sys.stdin.readline()
    if not sys.stdin.isatty():
        print(line.rstrip("\n"), file=sys.stderr)
    if not line:
        raise UserError(f"the input ended before question {number}: pass --{question.key} VALUE, or an empty line")
    return line.strip() or default


def is_hf(model: str) -> bool:
    """Whether a model is named by a folder or by its place on the Hub, not by family and flavor."""
    return len(model.split()) != 2 or os.path.isdir(model)


def _problem(key: str, value: str) -> str | None:
    """What is wrong with an answer by itself; the schema and the model say the rest."""
    if not value.strip():
        return f"--{key}: expected an answer, got an empty one"
    if key == "goal" and value not in GOALS:
        return f"--goal: expected one of {', '.join(GOALS)}, got {value!r}{nearest(value, GOALS)}"
    if key == "gpus" and not (value.isascii() and value.isdigit()):
        return f"--gpus: expected a whole number, 0 or more, got {value!r}"
    if key == "model" and is_hf(value) and "/" not in value and not os.path.isdir(value):
        return f"--model: expected FAMILY FLAVOR, an existing folder, or owner/name on the Hub, got {value!r}"
    return None


# ---- the file --------------------------------------------------------------------------------------------------------


def config_text(found: Mapping[str, str]) -> str:
    """The config as TOML, with a reason above each key."""
    gpus = int(found["gpus"])
    parts = [
        f"# Written by shardline init; `shardline config --comments` explains every key.\n# ranks: {max(1, gpus)}",
        _section("job", ("dump_folder", found["run"], "All files of the run; an existing run is resumed.")),
        _model(found),
        _lora(found),
        _data(found),
        _optimizer(found),
        _section(
            "checkpoint",
            ("enable", True, "Save, so that nothing is lost and the run can be resumed."),
            ("interval", 100, "Steps between saves."),
            ("keep_latest_k", 3, "Older ones are removed."),
            *([("initial_load_in_hf", True, "Start from the weights in the folder.")] if _loads(found) else []),
        ),
        _machine(gpus),
        _section(
            "generation",
            ("prompts", ["The"], "How the model continues these prompts is logged while it trains."),
            ("freq", 100, "Steps between samples."),
        ),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _section(name: str, *rows: tuple[str, object, str]) -> str:
    return "\n".join([f"[{name}]", *(f"# {why}\n{key} = {toml_value(value)}" for key, value, why in rows)])


def _loads(found: Mapping[str, str]) -> bool:
    return is_hf(found["model"]) and found["goal"] != "pretrain"


def _model(found: Mapping[str, str]) -> str:
    if is_hf(found["model"]):
        folder = ("hf_assets_path", found["model"], "config.json, tokenizer and weights.")
        return _section("model", ("name", "auto", "The model of the folder below."), folder)
    name, flavor = found["model"].split()
    rows: list[tuple[str, object, str]] = [
        ("name", name, "Family."),
        ("flavor", flavor, "Size."),
        ("tokenizer_path", "bytes", "One token per byte; name a tokenizer.json or its folder for a real vocabulary."),
    ]
    return _section("model", *rows)


def _lora(found: Mapping[str, str]) -> str:
    if found["goal"] != "lora":
        return ""
    return _section(
        "lora",
        ("enable", True, "Train low-rank matrices beside the frozen weights."),
        ("rank", 16, "Rank of the matrices; a higher one can learn more."),
        ("alpha", 32.0, "Their product is multiplied by alpha / rank."),
    )


def _data(found: Mapping[str, str]) -> str:
    demo = found["data"] == "demo"
    small = found["model"] == MODEL_OF_DEMO
    kind = None if found["goal"] == "pretrain" else record_type(found["data"])
    if kind is not None:
        table = "[[data.sources]]\n# Records; `shardline data show` prints which of their tokens are trained.\npath = "
        return table + f"{toml_value(found['data'])}\ntype = {toml_value(kind)}\n\n" + _training(found, small, [])
    rows: list[tuple[str, object, str]] = [
        ("dataset", "demo", "Generated text, to see everything run.")
        if demo
        else ("dataset_path", found["data"], "`shardline data prepare` makes a store that starts at once."),
    ]
    return _training(found, small, rows)


def _training(found: Mapping[str, str], small: bool, rows: list[tuple[str, object, str]]) -> str:
    size: list[tuple[str, object, str]] = [
        ("seq_len", 256 if small else 2048, "Tokens per sequence."),
        ("local_batch_size", 8 if small else 1, "Sequences per rank in one forward pass: the knob for memory."),
        ("global_batch_size", 8 * max(1, int(found["gpus"])), "Sequences per step, over all ranks."),
        ("steps", 1000, "Optimizer steps; training.epochs can be set instead."),
    ]
    return _section("training", *rows, *size)


def record_type(path: str) -> str | None:
    """The type of a JSONL file's records, by the fields of the first; None: plain text, or not known."""
    if not path.endswith(".jsonl") or not os.path.isfile(path):
        return None
    with open(path, encoding="utf-8", errors="replace") as file, contextlib.suppress(ValueError):
        first = parse_json(file.readline(2**20))
        if isinstance(first, dict):
            return next((kind for field, kind in RECORDS.items() if field in first), None)
    return None


def _optimizer(found: Mapping[str, str]) -> str:
    rate = _section("optimizer", ("lr", RATES[found["goal"]], "Peak learning rate; docs/console.md has typical ones."))
    return (
        rate
        + "\n\n"
        + _section(
            "lr_scheduler",
            ("warmup_steps", 50, "Steps in which the rate rises."),
            ("decay_type", "cosine", "How it falls after that."),
            ("min_lr_factor", 0.1, "Where it ends, as a fraction of lr."),
        )
    )


def _machine(gpus: int) -> str:
    if gpus == 0:
        return ""
    compiled = _section("compile", ("enable", True, "Faster steps, a slower start."))
    if gpus == 1:
        return compiled
    shard = (
        "data_parallel_shard_degree",
        -1,
        "FSDP: weights, gradients and optimizer state are sharded over all ranks.",
    )
    return _section("parallelism", shard) + "\n\n" + compiled
