"""Commands for data, models and checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardline.cli.common import BASE, DTYPE, JSON, load, placing
from shardline.cli.parser import Command, Option, Parsed
from shardline.errors import UserError

if TYPE_CHECKING:
    pass


def _import(parsed: Parsed) -> int:
    for name in (word.lstrip("-").partition("=")[0] for word in parsed.flags if word.startswith("--")):
        if not name.startswith(("model.", "experimental.custom_import", "preset")):
            raise UserError(f"shardline import: there is no option --{name}: it reads only --model.* of a config")
    named = parsed.named()
    file = named.pop("config")
    config = load(file, parsed.flags) if file or parsed.flags else None
    from shardline.checkpoint.convert import import_model
    from shardline.run.downloads import local_copy

    folder, out = parsed.positionals
    return import_model(local_copy(folder, weights=True), out, config=config, **named)


def _prepare(parsed: Parsed) -> int:
    from shardline.data.prepare import command
    from shardline.run.downloads import local_copy

    (source, out), named = parsed.positionals, parsed.named()
    tokenizer = local_copy(named.pop("tokenizer"))
    return command(local_copy(source) if source.startswith("hf://") else source, out, tokenizer=tokenizer, **named)


def _generate(parsed: Parsed) -> int:
    if parsed.options["prompt"] is None:
        raise UserError('shardline generate: --prompt is missing: --prompt "Once upon a time"')
    if parsed.options["top_p"] is not None and not 0 < parsed.options["top_p"] <= 1:
        raise UserError(f"--top-p: expected a number above 0, at most 1, got {parsed.options['top_p']}")
    from shardline.tools.generate import command

    return command(parsed.positionals[0], **parsed.named())


def _show(parsed: Parsed) -> int:
    from shardline.tools.data_show import command

    is_config = parsed.file is None or parsed.file.endswith((".toml", ".yaml", ".yml"))
    from shardline.run.downloads import downloaded

    config = load(parsed.file if is_config else None, parsed.flags)
    with placing(config):
        config = downloaded(config, weights=False)
        return command(config, None if is_config else parsed.file, **parsed.named())


PREPARE = Command(
    "data prepare",
    "Tokenize text into a token store that training reads without copying.",
    ("SRC", "OUT"),
    (
        Option("tokenizer", 'tokenizer.json or its folder, or "bytes".', str, "PATH", default="bytes"),
        Option("text-field", "Field of each record that holds the text.", str, "NAME", default="text"),
        Option("split", "Split of a Hugging Face dataset.", str, "NAME", default="train"),
        Option("workers", "Processes that tokenize; unset means one per core.", int, "N", low=1),
        Option("overwrite", "Replace what is in OUT.", bool),
    ),
    _prepare,
    details="SRC: a text, JSONL or Parquet file, a glob in quotes, a folder, the name of a Hugging Face dataset, or"
    "\nfiles of one: hf://datasets/OWNER/NAME/data/*.jsonl.",
    examples=(
        "shardline data prepare corpus.jsonl store --tokenizer ./llama",
        "shardline data prepare 'shards/*.parquet' store --text-field content",
        "shardline train run.toml --training.dataset_path store",
    ),
)
SHOW = Command(
    "data show",
    "Print samples as training reads them, with trained tokens colored, and the number of tokens.",
    ("[FILE]",),
    (
        Option("samples", "Samples of each source to print.", int, "N", default=3, low=0),
        Option("type", "Format of a data file, such as alpaca; unset: from its fields.", str, "NAME"),
    ),
    _show,
    config_flags=True,
    details="FILE: a data file (JSON, JSONL, Parquet), or a config with data.sources; --preset names a packaged one."
    "\nFlags such as --data.chat_template chatml and --model.tokenizer_path PATH apply to both.",
    examples=(
        "shardline data show --preset chat-demo",
        "shardline data show run.toml --samples 5",
        "shardline data show chat.jsonl --model.tokenizer_path ./llama --data.chat_template llama3",
    ),
)
VERIFY_DATA = Command(
    "data verify",
    "Read a whole token store and compare it with its checksums; exit code 2 if files are damaged, with their names.",
    ("FOLDER",),
    (),
    "shardline.tools.data_verify:verify",
    details="A run verifies data when it first reads it (training.verify_data); this command reads everything.",
    examples=("shardline data verify store",),
)
IMPORT = Command(
    "import",
    "Convert a Hugging Face folder or a TorchTitan checkpoint to a Shardline checkpoint.",
    ("FOLDER", "OUT"),
    (
        Option("trust-pickle", "Read TorchTitan's .metadata, a pickle that can run code.", bool),
        Option("config", "TorchTitan: take the model section of this file.", str, "FILE"),
        DTYPE,
        Option("overwrite", "Replace OUT.", bool),
    ),
    _import,
    config_flags=True,
    details="--model.name, --model.flavor and --model.overrides.* name the model of a TorchTitan checkpoint.",
    examples=(
        "shardline import ./Llama-3.2-1B checkpoints/llama",
        "shardline import outputs/checkpoint/step-1000 checkpoints/ours --trust-pickle --model.flavor 8B",
    ),
)
_FORMATS = ("hf", "consolidated")
EXPORT = Command(
    "export",
    "Write the weights of a checkpoint for other programs.",
    ("CHECKPOINT", "OUT"),
    (
        Option("format", "hf: a Hugging Face folder; consolidated: one file.", str, "NAME", (), _FORMATS, "hf"),
        DTYPE,
        Option("max-shard-size", "hf: largest file, such as 500MB or 2GiB; unset: 5GB.", str, "SIZE"),
        Option("overwrite", "Replace OUT.", bool),
        Option("merge", "For a run with LoRA: write the whole model, not the adapter.", bool),
        BASE,
    ),
    "shardline.checkpoint.convert:export",
    details="CHECKPOINT: a run, a checkpoint, or a URL of one such as s3://bucket/run.",
    examples=(
        "shardline export outputs/run/checkpoint/step-500 ./model --dtype bfloat16",
        "shardline export outputs/run/checkpoint/step-500 ./weights --format consolidated",
    ),
)
_CHECKPOINTS = "PATH: a run, its checkpoint folder, one step, or a URL of them such as s3://bucket/run."
CHECKPOINT_LS = Command(
    "checkpoint ls",
    "List checkpoints with their sizes and layouts, and what is broken or unfinished.",
    ("PATH",),
    (JSON,),
    "shardline.tools.checkpoints:ls",
    details=_CHECKPOINTS,
    examples=("shardline checkpoint ls outputs/run",),
)
CHECKPOINT_VERIFY = Command(
    "checkpoint verify",
    "Compare every byte of checkpoints with its checksum; exit code 2 and a list if anything is damaged.",
    ("PATH",),
    (Option("step", "Verify this step only; unset: every step.", int, "N", low=0), JSON),
    "shardline.tools.checkpoints:verify",
    details=_CHECKPOINTS,
    examples=("shardline checkpoint verify outputs/run", "shardline checkpoint verify outputs/run --step 200"),
)
CHECKPOINT_SHOW = Command(
    "checkpoint show",
    "Show what a checkpoint holds: step, data position, model, layout, tensors.",
    ("PATH",),
    (Option("tensors", "List every tensor with its type, shape and shards.", bool), JSON),
    "shardline.tools.checkpoints:show",
    details=_CHECKPOINTS + "\nIf there are several steps, the newest is shown.",
    examples=(
        "shardline checkpoint show outputs/run",
        "shardline checkpoint show outputs/run/checkpoint/step-200 --tensors",
    ),
)
GENERATE = Command(
    "generate",
    "Continue a prompt with a trained model.",
    ("FOLDER",),
    (
        Option("prompt", "Text to continue.", str, "TEXT"),
        Option("max-new-tokens", "Longest continuation.", int, "N", default=100, low=1),
        Option("temperature", "0 takes the likeliest token; higher is more varied.", float, "T", default=0.0, low=0),
        Option("top-k", "Sample from the K likeliest tokens.", int, "K", low=1),
        Option("top-p", "Sample from the likeliest tokens of total probability P.", float, "P", low=0),
        Option("seed", "Seed of the sampling.", int, "N", default=0, low=0),
        Option("device", "cpu or cuda; unset takes a GPU if there is one.", str, "NAME"),
        Option("tokenizer", "tokenizer.json, its folder, or bytes; unset takes the model's.", str, "PATH"),
        BASE,
    ),
    _generate,
    details="FOLDER: a run, a checkpoint, the URL of one such as s3://bucket/run, or a Hugging Face folder.",
    examples=('shardline generate outputs/run --prompt "Once upon a time" --temperature 0.8 --top-p 0.95',),
)
