"""The commands: a table of their options, and what each runs. Nothing here imports torch before a command needs it."""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import re
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from shardline.cli.parser import Command, Option, Parsed
from shardline.config.files import is_preset, preset_lines, preset_names
from shardline.config.names import DTYPES, SCHEDULES
from shardline.errors import UserError

if TYPE_CHECKING:
    from shardline.config.schema import Config
    from shardline.run.options import TrainOptions

_DTYPE = Option("dtype", f"Convert to {', '.join(DTYPES)}; unset keeps the types.", str, "TYPE", choices=DTYPES)
_BASE = Option("base", "Of an adapter: where its frozen weights are now.", str, "FOLDER")
_JSON = Option("json", "Print one JSON object per line.", bool)
_ITERATIONS = Option("iterations", "Timed calls; unset: as many as fit into half a second.", int, "N", low=1)
_RENDEZVOUS = (
    Option("nnodes", "Number of machines, or a range.", str, "N|MIN:MAX", default="1"),
    Option("node-rank", "Number of this machine, from 0.", int, "N", default=0, low=0),
    Option("rdzv-id", "Name of the job under which machines meet.", str, "ID", default="none"),
    Option("rdzv-backend", "How machines meet: static or c10d.", str, "NAME", default="static"),
    Option("rdzv-endpoint", "Address at which machines meet.", str, "HOST:PORT", default=""),
    Option("rdzv-secret-file", "File (mode 0600) with the secret that all machines share.", str, "FILE", default=""),
)


def _processes(help: str, default: int | None = None) -> Option:
    return Option("nproc", f"Processes on this machine{help}.", int, "N", ("nproc-per-node",), default=default, low=1)


# ---- the config of a command -----------------------------------------------------------------------------------------

_CONFIG_DETAILS = f"""\
FILE is TOML or YAML. Flags change single keys: --training.steps 100, --training.steps=100, --compile.enable,
--compile.no_enable; lists are comma separated. `shardline config --comments` explains every key.
--preset NAME starts from a packaged file (`shardline config --presets` describes them):
{", ".join(preset_names())}."""


def load(file: str | None, flags: Sequence[str], *, check_model: bool = False, download: bool = False) -> Config:
    """The config of a command: loaded, its custom module imported, its combinations checked.

    A rank takes the config of the launcher that started it, which has checked it. With `download`, the sizes
    and the tokenizer of a model that it names on the Hub are brought here; without, that model is not checked.
    """
    from shardline.config.load import load_config, take_handed_over
    from shardline.config.rules import check
    from shardline.registry import import_custom

    handed_over = take_handed_over()
    config = handed_over or load_config(file, flags)
    with _placing(config):
        import_custom(config.experimental.custom_import)
        if handed_over is None:
            check(config)
            if check_model:
                config = _check_model(config, download)
    return config


def _check_model(config: Config, download: bool) -> Config:
    """Resolve the flavor and its overrides, unless the model is not built yet or not here."""
    from shardline.config.rules import check_architecture, check_parameters, pending, with_data_named
    from shardline.hub import model_name
    from shardline.run.downloads import downloaded

    name = model_name(config.model.hf_assets_path) if config.model.name == "auto" else None
    if download:
        config = downloaded(config, weights=False, data=False)
    elif name is not None and name.folder is None:
        print(f"note: {name} is a model of the Hub, which `shardline train` downloads: not checked", file=sys.stderr)
        return config
    if pending(config).keys() & {"model.name", "model.flavor"}:
        return config
    from shardline.models.flavors import check_weights, resolve
    from shardline.models.fused_weights import parameter_count

    arch = resolve(config.model)
    parameters = parameter_count(arch)
    check_parameters(config, parameters)
    check_architecture(config, arch)
    check_weights(config, arch)
    return with_data_named(config, parameters)


@contextlib.contextmanager
def _placing(config: Config) -> Iterator[None]:
    """Add the place where a key was given to each line of an error that begins with the key."""
    try:
        yield
    except UserError as error:
        error.args = ("\n".join(_located(config, line) for line in str(error).splitlines()),)
        raise


def _located(config: Config, line: str) -> str:
    from shardline.config.assemble import annotation_of

    key = re.match(r"[\w.]*", line)[0].rstrip(".")  # type: ignore[index]
    if annotation_of(key) is None and not line.startswith("model: "):  # "model: " is about several fields
        return line
    places = [config.origin(known) for known in (key, *config.given()) if known == key or known.startswith(f"{key}.")]
    where = next((place for place in places if place), "")
    return f"{where}: {line}" if where else line


# ---- train and config ------------------------------------------------------------------------------------------------


def _train(parsed: Parsed) -> int:
    from shardline.config.rules import refuse_pending
    from shardline.launch.clusters.environment import take_surroundings
    from shardline.run.options import TrainOptions, node_range

    named = take_surroundings(parsed.named(), parsed.given)
    options = TrainOptions(**named, debug=parsed.options["debug"], words=parsed.words)
    if options.resume and options.overwrite:
        raise UserError("--resume continues a run and --overwrite moves it aside: give one of them")
    if options.world_size is not None and not options.dry_run:
        raise UserError("--world-size is for --dry-run; --nproc starts processes")
    config = load(parsed.file, parsed.flags, check_model=True, download=True)
    with _placing(config):
        if not options.dry_run:
            refuse_pending(config)
            from shardline.launch.launch import train

            return train(config, options)
        from shardline.tools.dry_run.dry_run import describe

        _, nodes = node_range(options.nnodes)
        ranks = nodes * options.nproc
        known = options.world_size or (ranks if ranks > 1 else None)
        print(describe(config, known, options.nproc if nodes > 1 else None))
        return 0


def _config(parsed: Parsed) -> int:
    if parsed.options["compatibility"]:
        from shardline.config.features import compatibility_page

        print(compatibility_page(), end="")
        return 0
    if parsed.options["presets"]:
        for name, lines in preset_lines():
            print(name, *lines, sep="\n  ")
        return 0
    if parsed.options["commands"]:
        from shardline.cli.page import commands_page

        print(commands_page(COMMANDS), end="")
        return 0
    if parsed.options["axolotl"]:
        from shardline.config.axolotl.table import keys_page

        print(keys_page(), end="")
        return 0
    from shardline.config.rules import notes
    from shardline.config.write import diff, markdown, to_toml

    if parsed.options["markdown"]:
        print(markdown(), end="")
        return 0
    if parsed.options["diff"]:
        if parsed.positionals or parsed.flags:
            raise UserError("shardline config --diff A B compares two files or presets and takes nothing else")
        a, b = (_file_or_preset(name) for name in parsed.options["diff"])
        print(diff(a, b), end="")
        return 0
    config = load(parsed.file, parsed.flags, check_model=True)
    for note in (*config.alias_notes, *notes(config)):
        print(f"note: {note}", file=sys.stderr)
    print(to_toml(config, comments=parsed.options["comments"], sources=True), end="")
    return 0


def _file_or_preset(name: str) -> Config:
    from shardline.config.load import load_config

    if not os.path.exists(name) and is_preset(name):
        return load_config(preset=name)
    return load_config(name)


TRAIN = Command(
    "train",
    "Train a model from a config file, a preset or flags alone.",
    ("[FILE]",),
    (
        Option("resume", "Resume from the latest checkpoint; an error if there is none.", bool),
        Option("overwrite", "Move the run that is already in the folder aside.", bool),
        Option("dry-run", "Report layout, sizes and communication; do not train.", bool),
        Option("world-size", "Number of ranks in a dry run.", int, "N", low=1),
        _processes("", default=1),
        *_RENDEZVOUS,
        Option("max-restarts", "How often failed workers are restarted.", int, "N", default=0, low=0),
    ),
    _train,
    config_flags=True,
    details=_CONFIG_DETAILS,
    examples=(
        "shardline train --preset demo",
        "shardline train run.toml --training.steps 500 --optimizer.lr=1e-3",
        "shardline train run.toml --job.dump_folder outputs/first --checkpoint.enable --resume",
        "shardline train run.toml --dry-run",
    ),
)
CONFIG = Command(
    "config",
    "Check a config and print it resolved, as TOML that loads back to the same config.",
    ("[FILE]",),
    (
        Option("comments", "Add type, default and meaning above each key.", bool),
        Option("diff", "Print the keys in which two files or presets differ.", str, "A B", count=2),
        Option("presets", "Print what each packaged config is for.", bool),
        Option("markdown", "Print the reference page of all keys.", bool),
        Option("compatibility", "Print which features can be combined.", bool),
        Option("commands", "Print the reference page of all commands.", bool),
        Option("axolotl", "Print what becomes of each key of an Axolotl config.", bool),
    ),
    _config,
    config_flags=True,
    details=_CONFIG_DETAILS,
    examples=(
        "shardline config run.toml",
        "shardline config --preset llama3_8b --training.seq_len=4096 > run.toml",
        "shardline config --comments",
        "shardline config --diff run.toml llama3_8b",
        "shardline config axolotl.yml > run.toml",
    ),
)


# ---- data, models and checkpoints ------------------------------------------------------------------------------------


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
    with _placing(config):
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
    "Print samples as training reads them, trained tokens coloured, and how many tokens there are.",
    ("[FILE]",),
    (
        Option("samples", "Samples of each source to print.", int, "N", default=3, low=0),
        Option("type", "Format of a data file, such as alpaca; unset: from its fields.", str, "NAME"),
    ),
    _show,
    config_flags=True,
    details="FILE: a data file (JSON, JSONL, Parquet), or a config with data.sources; --preset names a packaged one."
    "\nFlags such as --data.chat_template chatml and --model.tokenizer_path PATH hold for both.",
    examples=(
        "shardline data show --preset chat-demo",
        "shardline data show run.toml --samples 5",
        "shardline data show chat.jsonl --model.tokenizer_path ./llama --data.chat_template llama3",
    ),
)
VERIFY_DATA = Command(
    "data verify",
    "Read a whole token store and compare it with its checksums; exit code 2 names files and bytes.",
    ("FOLDER",),
    (),
    "shardline.tools.data_verify:verify",
    details="A run verifies what it reads, when it first reads it (training.verify_data); this reads everything.",
    examples=("shardline data verify store",),
)
IMPORT = Command(
    "import",
    "Convert a Hugging Face folder or a TorchTitan checkpoint to a Shardline checkpoint.",
    ("FOLDER", "OUT"),
    (
        Option("trust-pickle", "Read TorchTitan's .metadata, a pickle that can run code.", bool),
        Option("config", "TorchTitan: take the model section of this file.", str, "FILE"),
        _DTYPE,
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
        _DTYPE,
        Option("max-shard-size", "hf: largest file, such as 500MB or 2GiB; unset: 5GB.", str, "SIZE"),
        Option("overwrite", "Replace OUT.", bool),
        Option("merge", "Of a run with LoRA: write the whole model, not the adapter.", bool),
        _BASE,
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
    (_JSON,),
    "shardline.tools.checkpoints:ls",
    details=_CHECKPOINTS,
    examples=("shardline checkpoint ls outputs/run",),
)
CHECKPOINT_VERIFY = Command(
    "checkpoint verify",
    "Compare every byte of checkpoints with its checksum; exit code 2 and a list if anything is damaged.",
    ("PATH",),
    (Option("step", "Verify this step only; unset: every step.", int, "N", low=0), _JSON),
    "shardline.tools.checkpoints:verify",
    details=_CHECKPOINTS,
    examples=("shardline checkpoint verify outputs/run", "shardline checkpoint verify outputs/run --step 200"),
)
CHECKPOINT_SHOW = Command(
    "checkpoint show",
    "Show what a checkpoint holds: step, data position, model, layout, tensors.",
    ("PATH",),
    (Option("tensors", "List every tensor with its type, shape and shards.", bool), _JSON),
    "shardline.tools.checkpoints:show",
    details=_CHECKPOINTS + "\nOf several steps the newest is shown.",
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
        _BASE,
    ),
    _generate,
    details="FOLDER: a run, a checkpoint, the URL of one such as s3://bucket/run, or a Hugging Face folder.",
    examples=('shardline generate outputs/run --prompt "Once upon a time" --temperature 0.8 --top-p 0.95',),
)


# ---- measurements and drawings ---------------------------------------------------------------------------------------


def _bench_comm(parsed: Parsed) -> int:
    if parsed.options["tp"] is not None:
        parsed.flags.append(f"--parallelism.tensor_parallel_degree={parsed.options['tp']}")
    config = load(parsed.file, parsed.flags)
    from shardline.tools.bench.comm import run

    options = parsed.named("sizes", "ops", "dim", "dtype", "iterations", "json")
    return run(config, _start_options(parsed), **options)


def _bench_overlap(parsed: Parsed) -> int:
    keys = {"model": "model.name", "flavor": "model.flavor", "tp": "parallelism.tensor_parallel_degree"}
    parsed.flags += [f"--{key}={parsed.options[name]}" for name, key in keys.items()]
    config = load(parsed.file, parsed.flags, check_model=True)
    from shardline.tools.bench.overlap import run

    options = parsed.named("seq", "batch", "backend", "dtype", "iterations", "json")
    return run(config, _start_options(parsed), **options)


def _bench_experts(parsed: Parsed) -> int:
    keys = {"model": "model.name", "flavor": "model.flavor", "ep": "parallelism.expert_parallel_degree"}
    parsed.flags += [f"--{key}={parsed.options[name]}" for name, key in keys.items()]
    config = load(parsed.file, parsed.flags, check_model=True)
    from shardline.tools.bench.experts import run

    options = parsed.named("tokens", "skew", "dtype", "float8", "compile", "carrier", "iterations", "json")
    return run(config, _start_options(parsed), **options)


def _bench_device(parsed: Parsed) -> int:
    config = load(None, [])
    from shardline.tools.bench.device import run

    return run(config, _start_options(parsed), **parsed.named("write", "json"))


def _doctor(parsed: Parsed) -> int:
    config = load(parsed.file, parsed.flags, check_model=bool(parsed.file or parsed.flags))
    from shardline.tools.doctor.doctor import run

    with _placing(config):
        named = bool(parsed.file or parsed.flags)
        return run(config, _start_options(parsed), named=named, json=parsed.options["json"])


def _start_options(parsed: Parsed) -> TrainOptions:
    """How the ranks of a benchmark start; nproc 0 leaves their number to the layout."""
    from shardline.run.options import TrainOptions

    meeting = ("nnodes", "node_rank", "rdzv_id", "rdzv_backend", "rdzv_endpoint", "rdzv_secret_file")
    named = parsed.named(*meeting, "debug")
    return TrainOptions(nproc=parsed.options["nproc"] or 0, words=parsed.words, **named)


def _plan(parsed: Parsed) -> int:
    named = parsed.named()
    keys = {"model": "model.name", "flavor": "model.flavor", "seq": "training.seq_len"}
    given = {key: named.pop(name) for name, key in keys.items()}
    fixed = _fixed(parsed.flags)
    parsed.flags += [f"--{key}={value}" for key, value in given.items() if value is not None]
    if not parsed.file and not parsed.flags:
        raise UserError("shardline plan: name a config FILE, a --preset, or --model NAME --flavor SIZE")
    config = load(parsed.file, parsed.flags, check_model=True)
    if given["model.name"] is not None and not parsed.file and "compile.enable" not in fixed:
        config = config.replace({"compile.enable": True})
    with _placing(config):
        from shardline.plan.command import command

        return command(config, fixed, **named)


def _fixed(flags: Sequence[str]) -> dict[str, Any]:
    """Keys that the command line sets: the search leaves them as they are."""
    from shardline.config.flags import parse_flags

    return dict(parse_flags(flags).values)


def _schedule(parsed: Parsed) -> int:
    from shardline.tools.schedule import command

    if not parsed.file and not parsed.flags:
        return command(None, **parsed.named())
    keys = {"pp": "degree", "schedule": "schedule", "csv": "schedule_csv"}
    given = {key: parsed.options[name] for name, key in keys.items() if parsed.options[name] is not None}
    if "schedule" in given:
        given.setdefault("schedule_csv", None)  # that of the config would be drawn instead
    parsed.flags += [f"--parallelism.pipeline_parallel_{key}={value}" for key, value in given.items()]
    config = load(parsed.file, parsed.flags, check_model=True)
    with _placing(config):
        return command(config, **parsed.named())


_BENCH_DTYPE = Option(
    "dtype", f"{', '.join(DTYPES)}; unset: bfloat16 on a GPU, else float32.", str, "TYPE", choices=DTYPES
)
_CARRIERS = ("all_to_all", "symmetric")
_OPS = "all_reduce,all_gather,reduce_scatter,all_to_all,p2p"
BENCH_COMM = Command(
    "bench comm",
    "Measure the speed of collectives over one mesh axis, by size.",
    ("[FILE]",),
    (
        Option("sizes", "A size, a doubling range, or a list: 1M, 1M:2G, 4K,1M.", str, "SIZES", default="1M:64M"),
        Option("ops", "Comma-separated collectives.", str, "NAMES", default=_OPS),
        Option("dim", "Mesh axis: tp, dp_shard, ..., or world for all ranks.", str, "NAME", default="world"),
        Option("tp", "Tensor-parallel ranks; --parallelism.* sets the rest of the layout.", int, "N", low=1),
        Option("dtype", f"{', '.join(DTYPES)}.", str, "TYPE", choices=DTYPES, default="float32"),
        _ITERATIONS,
        _JSON,
        _processes("; unset: as many as the layout needs"),
        *_RENDEZVOUS,
    ),
    _bench_comm,
    config_flags=True,
    details="Bandwidths are counted as nccl-tests count them. Without a layout, the axis has all ranks.",
    examples=(
        "shardline bench comm --sizes 1M:2G --nproc 2",
        "shardline bench comm run.toml --dim tp --ops all_gather,reduce_scatter --dtype bfloat16",
        "shardline bench comm --dim tp --tp 2 --parallelism.data_parallel_shard_degree 2 --json",
    ),
)
BENCH_OVERLAP = Command(
    "bench overlap",
    "Measure the overlapped tensor-parallel products of a model against collective-then-multiply.",
    (),
    (
        Option("model", "Model family.", str, "NAME", default="llama3"),
        Option("flavor", "Size of the model.", str, "NAME", default="8B"),
        Option("tp", "Tensor-parallel ranks.", int, "N", default=2, low=1),
        Option("seq", "Tokens per sequence.", int, "N", default=8192, low=1),
        Option("batch", "Sequences per micro-batch.", int, "N", default=1, low=1),
        Option("backend", "Measure this backend beside serial; unset: every one that can run.", str, "NAME"),
        _BENCH_DTYPE,
        _ITERATIONS,
        _JSON,
        _processes("; unset: as many as --tp needs"),
        *_RENDEZVOUS,
    ),
    _bench_overlap,
    config_flags=True,
    examples=(
        "shardline bench overlap --model llama3 --flavor 8B --tp 2 --seq 8192 --batch 1",
        "shardline bench overlap --flavor debugmodel --tp 2 --seq 256 --backend ring --json",
    ),
)
BENCH_EXPERTS = Command(
    "bench experts",
    "Measure how fast rows travel to experts on other ranks, and how much of that a layer hides.",
    (),
    (
        Option("model", "Model family.", str, "NAME", default="deepseek_v3"),
        Option("flavor", "Size of the model.", str, "NAME", default="16B"),
        Option("ep", "Expert-parallel ranks.", int, "N", default=2, low=1),
        Option("tokens", "Tokens of each rank; unset: 8192 on a GPU, else 512.", int, "N", low=2),
        Option("skew", "Second routing: rows of the fullest rank over the mean; 1: none.", float, "X", (), (), 2.5, 1),
        _BENCH_DTYPE,
        Option("float8", "Send tokens to the experts in float8.", bool),
        Option("compile", "Compile the layer, as compile.enable does.", bool),
        Option("carrier", "all_to_all or symmetric; unset: every one that can run.", str, "NAME", choices=_CARRIERS),
        _ITERATIONS,
        _JSON,
        _processes("; unset: as many as --ep needs"),
        *_RENDEZVOUS,
    ),
    _bench_experts,
    config_flags=True,
    details="Each for a balanced routing and a skewed one, in which one rank gets --skew times the mean number of rows,"
    "\nat most 0.9 of all rows.",
    examples=(
        "shardline bench experts --model deepseek_v3 --flavor 16B --ep 2 --tokens 8192",
        "shardline bench experts --model qwen3 --flavor 30B-A3B --ep 8 --skew 4 --float8",
        "shardline bench experts --flavor debugmodel --ep 2 --json",
    ),
)
BENCH_DEVICE = Command(
    "bench device",
    "Measure this machine: products by shape and type, attention, copies, and with --nproc collectives.",
    (),
    (
        Option("write", "Also write a profile, which `shardline plan --gpu FILE` reads.", str, "FILE"),
        _JSON,
        _processes("; unset: one, without collectives"),
        *_RENDEZVOUS,
    ),
    _bench_device,
    examples=(
        "shardline bench device",
        "shardline bench device --write mine.toml --nproc 8",
        "shardline plan run.toml --gpus 64 --gpu mine.toml",
    ),
)
DOCTOR = Command(
    "doctor",
    "Examine this machine, or all ranks of a job: what would break a run or slow it down, and the remedy.",
    ("[FILE]",),
    (_JSON, _processes("; unset: one, without links between ranks"), *_RENDEZVOUS),
    _doctor,
    config_flags=True,
    details="FILE: a config, for whose checkpoints there must be room. Exit code 1: something would break a run."
    "\nUnder torchrun or srun it examines the ranks that are there. docs/doctor.md explains each finding.",
    examples=(
        "shardline doctor",
        "shardline doctor run.toml --nproc 8",
        "torchrun --nproc-per-node 8 -m shardline doctor --json",
    ),
)
TRACE_OVERLAP = Command(
    "trace overlap",
    "Report how much communication profiler traces contain, and how much of it computation hides.",
    ("TRACE...",),
    (_JSON,),
    "shardline.tools.trace:command",
    details="TRACE: .json or .json.gz of one rank, as `--profiling.enable_profiling` writes them, one per rank,"
    "\nor the folder of a run, which stands for its last profile.",
    examples=(
        "shardline trace overlap outputs/run",
        "shardline trace overlap outputs/run/profile_traces/iteration_10/rank*_trace.json",
    ),
)
TRACE_KERNELS = Command(
    "trace kernels",
    "Report where the time of a step goes: kinds of kernels, idle gaps and the most expensive kernels.",
    ("TRACE...",),
    (Option("top", "Kernels to list.", int, "N", default=15, low=0), _JSON),
    "shardline.tools.trace_kernels:command",
    details="TRACE: as for `shardline trace overlap`; the table is the mean of all steps of all traces."
    "\nWithout a GPU, operations of the main thread count, each without those that it calls.",
    examples=(
        "shardline trace kernels outputs/run",
        "shardline trace kernels outputs/run/profile_traces/iteration_10/rank0_trace.json --top 30",
    ),
)
PLAN = Command(
    "plan",
    "Say which layouts of a number of GPUs fit, and how fast each will be, without running anything.",
    ("[FILE]",),
    (
        Option("gpus", "Number of GPUs.", int, "N", low=1),
        Option("nodes", "Number of machines, instead of --gpus.", int, "N", low=1),
        Option("gpu", "Their kind, or a profile (FILE.toml); unset: this machine's.", str, "NAME"),
        Option("gpus-per-node", "GPUs of one machine; unset: as the profile says.", int, "N", low=1),
        Option("model", "Model family, where there is no FILE.", str, "NAME"),
        Option("flavor", "Size of the model.", str, "NAME"),
        Option("seq", "Tokens per sequence.", int, "N", low=1),
        Option("global-batch", "Sequences per step; unset: the config's.", int, "N", low=1),
        Option("top", "Layouts to show.", int, "N", default=10, low=1),
        Option("goal", "What is best: speed, memory or cost.", str, "NAME", (), ("speed", "memory", "cost"), "speed"),
        Option("price", "Price of a GPU hour, for --tokens.", float, "X", low=0),
        Option("tokens", "Also say how long so many tokens take.", float, "N", low=1),
        Option("write", "Write the best layout as a config.", str, "FILE"),
        Option("check", "Only say whether FILE fits as it is; exit code 1 if not.", bool),
        _JSON,
    ),
    _plan,
    config_flags=True,
    details="Flags --section.key=value fix keys: the search leaves them as they are. Profiles: `shardline bench device`"
    "\nmeasures one; docs/planner.md says what is assumed, and how far predictions are off.",
    examples=(
        "shardline plan run.toml --gpus 256 --gpu h100",
        "shardline plan --model llama3 --flavor 70B --seq 8192 --global-batch 1024 --gpus 512 --gpu h100 --top 3",
        "shardline plan run.toml --gpus 64 --gpu h200 --parallelism.tensor_parallel_degree=8",
        "shardline plan --check run.toml --gpus 8 --gpu a100",
    ),
)
TRACE_HANG = Command(
    "trace hang",
    "Compare the flight recorders of a job's ranks: which collective did not end, and who is missing.",
    ("RUN",),
    (_JSON,),
    "shardline.tools.trace_hang:command",
    details="RUN: the folder of a run, or that of the files. A hang writes them, and so does SIGUSR2 to the launcher.",
    examples=("shardline trace hang outputs/run",),
)
SCHEDULE = Command(
    "schedule",
    "Draw a pipeline schedule and report its cost, without running anything.",
    ("[FILE]",),
    (
        Option("pp", "Pipeline ranks.", int, "N", low=1),
        Option("microbatches", "Micro-batches per step.", int, "N", low=1),
        Option("schedule", "Name of the schedule; unset: the config's, or 1F1B.", str, "NAME"),
        Option("stages-per-rank", "Stages on each rank; unset: the fewest possible.", int, "N", low=1),
        Option("csv", "Read the schedule, its ranks and micro-batches from this file.", str, "FILE"),
        Option("svg", "Also write the drawing to this file.", str, "FILE"),
        Option("compare", "Print a table of all schedules instead.", bool),
        Option("json", "Print one JSON object per schedule, with the time of each action.", bool),
    ),
    _schedule,
    config_flags=True,
    details=f"""\
NAME: {", ".join(SCHEDULES)}.
FILE, --preset and --section.key flags give a config: its schedule is drawn, with stages cut as a run cuts them and
passes as long as their layers have work. --pp, --microbatches, --schedule, --stages-per-rank and --csv replace what
it says; a schedule of --csv must have as many ranks and micro-batches.""",
    examples=(
        "shardline schedule run.toml",
        "shardline schedule run.toml --pp 8 --microbatches 32 --compare",
        "shardline schedule --pp 8 --microbatches 32 --schedule Interleaved1F1B --stages-per-rank 2",
        "shardline schedule --pp 4 --microbatches 8 --schedule ZBVZeroBubble --svg zbv.svg",
        "shardline schedule --pp 8 --microbatches 32 --compare",
        "shardline schedule --csv mine.csv",
    ),
)


def _explain(parsed: Parsed) -> int:
    config = load(parsed.file, parsed.flags, check_model=True)
    with _placing(config):
        from shardline.show.explain import command

        return command(config, **parsed.named())


READ_BY_EVAL = ("training.cache_folder", "training.mixed_precision_param")


def _eval(parsed: Parsed) -> int:
    named = parsed.named()
    tasks, data = named["tasks"], named["data"]
    for name in (word.lstrip("-").partition("=")[0] for word in parsed.flags if word.startswith("--")):
        if not name.startswith(("validation.", "data.", "model.tokenizer_path", *READ_BY_EVAL)):
            raise UserError(f"shardline eval: there is no option --{name}: of a config it reads how data is read")
    with_tasks = {"include_path", "num_fewshot", "limit", "batch_size", "out", "device", "tokenizer"}
    with_data = {"nproc"}
    defaults = {option.key: option.default for option in EVAL.options}
    wrong = [key for key in (with_data if tasks else with_tasks) if named[key] != defaults[key]]
    if wrong or (tasks and (data or parsed.flags)):
        one = f"--{wrong[0].replace('_', '-')}" if wrong else "--data" if data else parsed.flags[0].partition("=")[0]
        raise UserError(
            f"shardline eval: {one} is for a file of data, --tasks for tasks: evaluate one after the other"
            if tasks
            else f"shardline eval: {one} is for tasks: give --tasks"
        )
    from pathlib import Path

    folder = Path(parsed.positionals[0])
    if tasks:
        from shardline.tools.tasks import run as run_tasks

        options = {key: named[key] for key in with_tasks}
        return run_tasks(folder, tasks, named["base"], json_lines=named["json"], **options)
    from shardline.run.options import TrainOptions
    from shardline.tools.perplexity import run

    start = TrainOptions(nproc=named["nproc"], words=parsed.words, debug=parsed.options["debug"])
    return run(start, folder, data, parsed.flags, named["base"], named["json"])


EVAL = Command(
    "eval",
    "Evaluate a model: its perplexity on a file, or tasks of lm-evaluation-harness.",
    ("FOLDER",),
    (
        Option(
            "data",
            "File, glob or prepared store to take the perplexity of; unset: the run's validation data.",
            str,
            "FILE",
        ),
        _processes(" that share the data", default=1),
        Option("tasks", "Tasks of lm-evaluation-harness, such as hellaswag,arc_easy.", str, "NAMES"),
        Option("include-path", "Tasks: folder with task files of your own (YAML).", str, "FOLDER"),
        Option("num-fewshot", "Tasks: examples before each question; unset: the task's number.", int, "N", low=0),
        Option("limit", "Tasks: questions of each; unset: all.", int, "N", low=1),
        Option("batch-size", "Tasks: questions in one forward pass.", int, "N", default=8, low=1),
        Option("out", "Tasks: write the results to this file, as JSON.", str, "FILE"),
        Option("device", "Tasks: cpu or cuda; unset takes a GPU if there is one.", str, "NAME"),
        Option("tokenizer", "Tasks: tokenizer.json, its folder, or bytes; unset takes the model's.", str, "PATH"),
        _BASE,
        _JSON,
    ),
    _eval,
    config_flags=True,
    details="FOLDER: a run, a checkpoint, an adapter or a Hugging Face folder. With a run, data is read as its"
    "\nvalidation reads it; --validation.seq_len and other keys of [validation] and [data] change that."
    "\ndocs/eval.md has more.",
    examples=(
        "shardline eval outputs/run",
        "shardline eval outputs/run --data held_out.jsonl --nproc 4",
        "shardline eval ./Llama-3.2-1B --data book.txt --validation.seq_len=1024 --json",
        "shardline eval outputs/run --tasks hellaswag,arc_easy --limit 200",
    ),
)


def _tail(parsed: Parsed) -> int:
    from shardline.show.tail import command

    return command(*parsed.positionals, lines=parsed.options["lines"], follow=not parsed.options["no_follow"])


REPORT = Command(
    "report",
    "Draw runs, finished or under way: curves, where a step goes, pipeline, mesh, events, config; one HTML file.",
    ("RUN...",),
    (
        Option("out", "Write the page to this file; unset: report.html in the run's folder.", str, "FILE"),
        Option("watch", "Serve the page on this machine and keep it up to date, until Ctrl-C.", bool),
        Option("port", "Port of --watch; 0: any that is free.", int, "N", default=8421, low=0),
    ),
    "shardline.show.report:command",
    details="RUN: the folder of a run; up to five are drawn beside each other, with what differs in their configs."
    "\nThe file needs no network and opens from disk. docs/report.md explains each picture.",
    examples=(
        "shardline report outputs/run",
        "shardline report outputs/first outputs/second --out both.html",
        "shardline report outputs/run --watch",
    ),
)

TAIL = Command(
    "tail",
    "Follow a run by its files, also one of another machine on a shared folder, until it ends.",
    ("RUN",),
    (
        Option("lines", "Lines to show of what was before.", int, "N", default=10, low=0),
        Option("no-follow", "Show them and end.", bool),
    ),
    _tail,
    details="RUN: the folder of a run. Exit code 0: it ended; 1: it failed. A pipe gets whole lines.",
    examples=("shardline tail outputs/run", "shardline tail outputs/run --lines 1000 --no-follow | grep validation"),
)

EXPLAIN = Command(
    "explain",
    "Explain what a config would do, before it runs: mesh, shards, a token's life, schedule, traffic and memory.",
    ("[FILE]",),
    (
        Option("html", "Write a page with pictures instead of text.", bool),
        Option("out", "File of --html; unset: explain.html.", str, "FILE"),
        Option("world-size", "Number of ranks; unset: as many as the degrees need.", int, "N", low=1),
    ),
    _explain,
    config_flags=True,
    details="Nothing is trained and no GPU is needed: sizes and bytes are those of a run on GPUs.",
    examples=(
        "shardline explain run.toml",
        "shardline explain run.toml --html --out plan.html",
        "shardline explain --preset llama3_8b --world-size 64 --parallelism.tensor_parallel_degree=8",
    ),
)


def _init(parsed: Parsed) -> int:
    from pathlib import Path

    from shardline.cli.init import run

    return run(Path(parsed.file or "run.toml"), parsed.named(), lambda file: load(file, [], check_model=True))


INIT = Command(
    "init",
    "Ask five questions and write a config with a reason for each key.",
    ("[FILE]",),
    (
        Option("model", "Answer: 'llama3 8B', a Hugging Face folder, or owner/name.", str, "NAME"),
        Option("data", "Answer: a file, a glob, a prepared store, or demo.", str, "PATH"),
        Option("goal", "Answer: pretrain, finetune or lora.", str, "NAME"),
        Option("gpus", "Answer: GPUs on this machine; 0 trains on the CPU.", str, "N"),
        Option("run", "Answer: the folder of the run.", str, "FOLDER"),
    ),
    _init,
    details="FILE: run.toml unless named; one that is there is not touched. What an option answers is not asked;"
    "\nthrough a pipe each line is an answer, an empty one takes the default. The config is checked before"
    "\nit is written.",
    examples=(
        "shardline init",
        "shardline init tune.toml --model ./Qwen3-0.6B --data train.jsonl --goal lora --gpus 1 --run outputs/tune",
    ),
)


def _completion(parsed: Parsed) -> int:
    from shardline.cli.completion import script

    print(script(parsed.positionals[0], COMMANDS), end="")
    return 0


COMPLETION = Command(
    "completion",
    "Print a script with which a shell completes commands, options, config keys and their values.",
    ("SHELL",),
    (),
    _completion,
    details='SHELL: bash, zsh or fish. Put eval "$(shardline completion bash)" into ~/.bashrc, the same with zsh into'
    "\n~/.zshrc after compinit; for fish, write the script to ~/.config/fish/completions/shardline.fish.",
    examples=('eval "$(shardline completion bash)"',),
    choices=("bash", "zsh", "fish"),
)


# ---- clusters --------------------------------------------------------------------------------------------------------


def _launch(name: str, parsed: Parsed) -> int:
    from shardline.config.rules import refuse_pending

    # In a cluster the model's folder may be where this machine has nothing.
    config = load(parsed.file, parsed.flags, check_model=name != "kubernetes")
    with _placing(config):
        refuse_pending(config)
        module = importlib.import_module(f"shardline.launch.clusters.{name}")
        code: int = module.command(config, parsed.file, parsed.flags, parsed.words, **parsed.named())
        return code


_KINDS = ("trainjob", "pytorchjob", "jobset")
_NODES = Option("nodes", "Number of machines.", int, "N", default=1, low=1)
_GPUS = Option("gpus-per-node", "GPUs of each machine; unset: none.", int, "N", low=1)
_JOB_NAME = Option("job-name", "Name of the job; unset: that of FILE.", str, "NAME", default="")
_RESTARTS = Option("max-restarts", "How often failed ranks are restarted inside the job.", int, "N", default=0, low=0)
_ENV_FILE = Option("env-file", "File of lines NAME=VALUE, variables of every rank.", str, "FILE", default="")
_SUBMISSION = (
    Option("out", "File to write; unset: named after the job.", str, "FILE", default=""),
    Option("dry-run", "Print it, write nothing.", bool),
    Option("submit", "Also submit it.", bool),
)
LAUNCH_SLURM = Command(
    "launch slurm",
    "Write a script for sbatch that requeues itself until the run's last step is reached; --submit submits it.",
    ("[FILE]",),
    (
        _NODES,
        _GPUS,
        _processes(" of the cluster; unset: one per GPU, or one"),
        Option("cpus-per-task", "Cores of each machine; unset: whole machines, --exclusive.", int, "N", low=1),
        Option("time", "Time limit of one start, as sbatch takes it: 24:00:00.", str, "TIME", default=""),
        Option("partition", "Partition.", str, "NAME", default=""),
        Option("account", "Account.", str, "NAME", default=""),
        Option("qos", "Quality of service.", str, "NAME", default=""),
        Option("sbatch", "Further options of sbatch, in quotes.", str, "WORDS", default=""),
        _JOB_NAME,
        _RESTARTS,
        Option("container", "Image: a .sif file for apptainer, any other for pyxis.", str, "IMAGE", default=""),
        Option("mounts", "Folders for the container, besides this one: A:B,C:D.", str, "LIST", default=""),
        _ENV_FILE,
        *_SUBMISSION,
    ),
    functools.partial(_launch, "slurm"),
    config_flags=True,
    details="Nothing is submitted without --submit. docs/clusters.md explains the script.",
    examples=(
        "shardline launch slurm run.toml --nodes 4 --gpus-per-node 8 --time 24:00:00 --partition batch",
        "shardline launch slurm run.toml --nodes 4 --gpus-per-node 8 --submit",
        "shardline launch slurm run.toml --sbatch='--constraint=h100 --mail-type=FAIL' --dry-run",
    ),
)
LAUNCH_K8S = Command(
    "launch k8s",
    "Write manifests of a TrainJob, a PyTorchJob or a JobSet, with shared disk, restarts and probes.",
    ("[FILE]",),
    (
        Option("image", "Image that has shardline.", str, "IMAGE", default=""),
        Option("kind", "trainjob, pytorchjob or jobset.", str, "NAME", (), _KINDS, "trainjob"),
        _NODES,
        _GPUS,
        _processes(" of the cluster; unset: one per GPU, or one"),
        Option("claim", "PersistentVolumeClaim of the shared disk; unset: one is made.", str, "NAME", default=""),
        Option("storage", "Size of the disk that is made.", str, "SIZE", default="200Gi"),
        Option("mount", "Where pods see the disk; relative paths of FILE start there.", str, "PATH", default="/shared"),
        Option("namespace", "Namespace.", str, "NAME", default="default"),
        _JOB_NAME,
        _RESTARTS,
        Option("restarts", "How often the cluster starts the job again.", int, "N", default=10, low=0),
        _ENV_FILE,
        *_SUBMISSION,
    ),
    functools.partial(_launch, "kubernetes"),
    config_flags=True,
    details="Nothing is submitted without --submit, which calls kubectl. docs/clusters.md explains the manifests.",
    examples=(
        "shardline launch k8s run.toml --image registry.example.org/shardline:1 --nodes 4 --gpus-per-node 8",
        "shardline launch k8s run.toml --image IMAGE --kind jobset --claim my-disk --dry-run",
    ),
)
LAUNCH_SSH = Command(
    "launch ssh",
    "Run on machines that ssh reaches, without a scheduler; ends when the run ends.",
    ("[FILE]",),
    (
        Option("hosts", "The machines, the first one with rank 0: a,b or me@a,me@b.", str, "LIST", default=""),
        _processes("; unset: one"),
        Option("port", "Port of the first machine, at its name in --hosts.", int, "N", default=29500, low=1),
        Option(
            "ssh",
            "Command that reaches a machine.",
            str,
            "WORDS",
            default="ssh -o BatchMode=yes -o ServerAliveInterval=15",
        ),
        Option("folder", "Folder on every machine; unset: this one.", str, "PATH", default=""),
        _RESTARTS,
        _ENV_FILE,
        Option("dry-run", "Print what every machine would run.", bool),
    ),
    functools.partial(_launch, "ssh"),
    config_flags=True,
    details="Folder, FILE and this program are at the same places on all machines, the run's folder on a shared disk.",
    examples=("shardline launch ssh run.toml --hosts a,b --nproc 8",),
)


def _lighthouse(parsed: Parsed) -> int:
    from shardline.launch.lighthouse import serve

    return serve(**parsed.named())


LIGHTHOUSE = Command(
    "lighthouse",
    "Serve the place in which replica groups find each other (fault_tolerance.enable), until Ctrl-C.",
    (),
    (
        Option("bind", "Address to listen at; port 0: any that is free.", str, "HOST:PORT", default="127.0.0.1:29510"),
        Option("min-replicas", "Fewest groups that train.", int, "N", default=1, low=1),
        Option("join-timeout", "Seconds to wait for a group that lives and does not come.", float, "S", default=60.0),
        Option("heartbeat-timeout", "Seconds of silence after which a group is lost.", float, "S", default=5.0),
    ),
    _lighthouse,
    details="It needs the package torchft (pip install 'shardline[ft]'), and prints the variable that groups read.",
    examples=(
        "shardline lighthouse",
        "shardline lighthouse --bind 10.0.0.1:29510 --heartbeat-timeout 2",
    ),
)

COMMANDS: dict[str, Command] = {
    command.name: command
    for command in (
        *(TRAIN, CONFIG, PREPARE, SHOW, VERIFY_DATA, IMPORT, EXPORT),
        *(CHECKPOINT_LS, CHECKPOINT_VERIFY, CHECKPOINT_SHOW, GENERATE, EVAL),
        *(BENCH_COMM, BENCH_OVERLAP, BENCH_EXPERTS, BENCH_DEVICE, TRACE_OVERLAP, TRACE_KERNELS, TRACE_HANG),
        *(SCHEDULE, PLAN, DOCTOR, REPORT, EXPLAIN, TAIL, INIT, COMPLETION),
        *(LAUNCH_SLURM, LAUNCH_K8S, LAUNCH_SSH, LIGHTHOUSE),
    )
}
