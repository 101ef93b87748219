"""The commands. Each reads its options and calls one function, imported when it is needed."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from shardline.cli.parser import Command, Option, Parsed, help_text, parse
from shardline.errors import UserError
from shardline.registry import nearest

if TYPE_CHECKING:
    from shardline.config.schema import Config
    from shardline.run.options import TrainOptions

DTYPES = ("float32", "bfloat16", "float16")
_CONFIG_DETAILS = """\
FILE is TOML or YAML. Flags change single keys: --training.steps 100, --training.steps=100, --compile.enable,
--compile.no_enable; lists are comma separated. `shardline config --comments` explains every key.
--preset NAME starts from a packaged file: {presets}."""

_MEETING = (
    Option("nnodes", "Machines, or a range of them.", str, "N|MIN:MAX", default="1"),
    Option("node-rank", "Number of this machine.", int, "N", default=0, low=0),
    Option("rdzv-id", "Name of the job that machines meet under.", str, "ID", default="none"),
    Option("rdzv-backend", "How machines meet: static or c10d.", str, "NAME", default="static"),
    Option("rdzv-endpoint", "Where machines meet.", str, "HOST:PORT", default=""),
)
TRAIN = Command(
    "train",
    "Train a model from a config file, a preset or flags alone.",
    ("[FILE]",),
    (
        Option("resume", "Insist on a checkpoint to go on from.", bool, default=False),
        Option("overwrite", "Move the run that is already in the folder aside.", bool, default=False),
        Option("dry-run", "Build and report, do not train.", bool, default=False),
        Option("world-size", "Ranks to build for in a dry run.", int, "N", low=1),
        Option("nproc", "Processes on this machine.", int, "N", ("nproc-per-node",), default=1, low=1),
        *_MEETING,
        Option("max-restarts", "How often failed workers are started again.", int, "N", default=0, low=0),
    ),
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
        Option("comments", "Add type, default and meaning above each key.", bool, default=False),
        Option("diff", "Print the keys in which two files or presets differ.", str, "A B", count=2),
        Option("markdown", "Print the reference page of all keys.", bool, default=False),
        Option("compatibility", "Print which features go together.", bool, default=False),
    ),
    config_flags=True,
    details=_CONFIG_DETAILS,
    examples=(
        "shardline config run.toml",
        "shardline config --preset llama3_8b --training.seq_len=4096 > run.toml",
        "shardline config --comments",
        "shardline config --diff run.toml llama3_8b",
    ),
)
PREPARE = Command(
    "data prepare",
    "Tokenize text into a token store that training reads without copying.",
    ("SRC", "OUT"),
    (
        Option("tokenizer", 'tokenizer.json or its folder, or "bytes".', str, "PATH", default="bytes"),
        Option("text-field", "Field of each record that holds the text.", str, "NAME", default="text"),
        Option("split", "Split of a Hugging Face dataset.", str, "NAME", default="train"),
        Option("workers", "Processes that tokenize; unset means one per core.", int, "N", low=1),
        Option("overwrite", "Replace what is in OUT.", bool, default=False),
    ),
    details="SRC: a text, JSONL or Parquet file, a glob in quotes, a folder, or the name of a Hugging Face dataset.",
    examples=(
        "shardline data prepare corpus.jsonl store --tokenizer ./llama",
        "shardline data prepare 'shards/*.parquet' store --text-field content",
        "shardline train run.toml --training.dataset_path store",
    ),
)
IMPORT = Command(
    "import",
    "Turn a Hugging Face folder (config.json, safetensors) or TorchTitan's checkpoint into ours.",
    ("FOLDER", "OUT"),
    (
        Option("trust-pickle", "Read TorchTitan's .metadata, a pickle that can run code.", bool, default=False),
        Option("config", "TorchTitan's: take the model section of this file.", str, "FILE"),
        Option("dtype", f"Convert to {', '.join(DTYPES)}; unset keeps the types.", str, "TYPE", choices=DTYPES),
        Option("overwrite", "Replace OUT.", bool, default=False),
    ),
    config_flags=True,
    details="--model.flavor and the like name the model of a TorchTitan checkpoint where its shapes fit several.",
    examples=(
        "shardline import ./Llama-3.2-1B checkpoints/llama",
        "shardline import outputs/checkpoint/step-1000 checkpoints/ours --trust-pickle --model.flavor 8B",
    ),
)
EXPORT = Command(
    "export",
    "Write the weights of a checkpoint for other programs.",
    ("CHECKPOINT", "OUT"),
    (
        Option(
            "format",
            "hf: a Hugging Face folder; consolidated: one file.",
            str,
            "hf|consolidated",
            (),
            ("hf", "consolidated"),
            "hf",
        ),
        Option("dtype", f"Convert to {', '.join(DTYPES)}; unset keeps the types.", str, "TYPE", choices=DTYPES),
        Option("max-shard-size", "hf: largest file, such as 500MB or 2GiB; unset: 5GB.", str, "SIZE"),
        Option("overwrite", "Replace OUT.", bool, default=False),
    ),
    details="CHECKPOINT: a run, a checkpoint, or a URL of one such as s3://bucket/run.",
    examples=(
        "shardline export outputs/run/checkpoint/step-500 ./model --dtype bfloat16",
        "shardline export outputs/run/checkpoint/step-500 ./weights --format consolidated",
    ),
)
_CHECKPOINTS = "PATH: a run, its checkpoint folder, one step, or a URL of them such as s3://bucket/run."
_JSON = Option("json", "Print one JSON object per line.", bool, default=False)
CHECKPOINT_LS = Command(
    "checkpoint ls",
    "List what is saved: steps, sizes, layouts, and what is broken or was left behind.",
    ("PATH",),
    (_JSON,),
    details=_CHECKPOINTS,
    examples=("shardline checkpoint ls outputs/run",),
)
CHECKPOINT_VERIFY = Command(
    "checkpoint verify",
    "Read every byte of checkpoints and compare it with its checksum; exit 2 names what is damaged.",
    ("PATH",),
    (Option("step", "Verify this step alone; unset: every one.", int, "N", low=0), _JSON),
    details=_CHECKPOINTS,
    examples=("shardline checkpoint verify outputs/run", "shardline checkpoint verify outputs/run --step 200"),
)
CHECKPOINT_SHOW = Command(
    "checkpoint show",
    "Say what a checkpoint holds: step, data position, model, layout, tensors.",
    ("PATH",),
    (Option("tensors", "List every tensor with its type, shape and pieces.", bool, default=False), _JSON),
    details=_CHECKPOINTS + " Of several steps the newest.",
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
        Option("top-k", "Choose among the K likeliest tokens.", int, "K", low=1),
        Option("top-p", "Choose among the likeliest tokens of total probability P.", float, "P", low=0),
        Option("seed", "Seed of the choice.", int, "N", default=0, low=0),
        Option("device", "cpu or cuda; unset takes the GPU if there is one.", str, "NAME"),
        Option("tokenizer", "tokenizer.json, its folder, or bytes; unset takes the model's.", str, "PATH"),
    ),
    details="FOLDER: a run, a checkpoint, the URL of one such as s3://bucket/run, or a Hugging Face folder.",
    examples=('shardline generate outputs/run --prompt "Once upon a time" --temperature 0.8 --top-p 0.95',),
)
BENCH_COMM = Command(
    "bench comm",
    "Measure how fast collectives run over one mesh dimension, by size.",
    ("[FILE]",),
    (
        Option("sizes", "One, a range in doubling steps, or a list: 1M, 1M:2G, 4K,1M.", str, "SIZES", default="1M:64M"),
        Option(
            "ops",
            "Which, with commas between.",
            str,
            "NAMES",
            default="all_reduce,all_gather,reduce_scatter,all_to_all,p2p",
        ),
        Option("dim", "Mesh dimension: tp, dp_shard, ..., world for all ranks.", str, "NAME", default="world"),
        Option("tp", "Tensor-parallel ranks; --parallelism.* tells the rest of a layout.", int, "N", low=1),
        Option("dtype", f"{', '.join(DTYPES)}.", str, "TYPE", choices=DTYPES, default="float32"),
        Option("iterations", "Calls that are timed; unset: half a second of them.", int, "N", low=1),
        Option("json", "Print one JSON object per line.", bool, default=False),
        Option("nproc", "Processes on this machine; unset: as the layout needs.", int, "N", ("nproc-per-node",), low=1),
        *_MEETING,
    ),
    config_flags=True,
    details="Bandwidths are counted as nccl-tests count them. Without a layout, the dimension has all ranks.",
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
        Option("seq", "Length of a sequence.", int, "N", default=8192, low=1),
        Option("batch", "Sequences of a micro-batch.", int, "N", default=1, low=1),
        Option("backend", "Measure this one beside serial; unset: every one that can run.", str, "NAME"),
        Option("dtype", f"{', '.join(DTYPES)}; unset: bfloat16 on a GPU, else float32.", str, "TYPE", choices=DTYPES),
        Option("iterations", "Calls that are timed; unset: half a second of them.", int, "N", low=1),
        Option("json", "Print one JSON object per line.", bool, default=False),
        Option("nproc", "Processes on this machine; unset: as --tp needs.", int, "N", ("nproc-per-node",), low=1),
        *_MEETING,
    ),
    config_flags=True,
    examples=(
        "shardline bench overlap --model llama3 --flavor 8B --tp 2 --seq 8192 --batch 1",
        "shardline bench overlap --flavor debugmodel --tp 2 --seq 256 --backend ring --json",
    ),
)
TRACE_OVERLAP = Command(
    "trace overlap",
    "Say how much communication a profiler's traces show, and how much of it computation hides.",
    ("TRACE...",),
    (Option("json", "Print one JSON object per line.", bool, default=False),),
    details="TRACE: .json or .json.gz of one rank, as `--profiling.enable_profiling` writes them; one for each rank."
    "\nOf a run's folder, those of its last profile.",
    examples=(
        "shardline trace overlap outputs/run",
        "shardline trace overlap outputs/run/profile_traces/iteration_10/rank*_trace.json",
    ),
)

SCHEDULE = Command(
    "schedule",
    "Draw a pipeline schedule and say what it costs, without running anything.",
    (),
    (
        Option("pp", "Pipeline ranks.", int, "N", low=1),
        Option("microbatches", "Micro-batches of a step.", int, "N", low=1),
        Option("schedule", "Name of the schedule; unset: 1F1B.", str, "NAME"),
        Option("stages-per-rank", "Stages on each rank; unset: the fewest it runs with.", int, "N", low=1),
        Option("csv", "Read the schedule from a file, ranks and micro-batches too.", str, "FILE"),
        Option("svg", "Write the drawing as a picture, too.", str, "FILE"),
        Option("compare", "Print a table of all schedules instead.", bool, default=False),
        Option("json", "Print one JSON object per schedule, with the time of each action.", bool, default=False),
    ),
    details="NAME: GPipe, 1F1B, LoopedBFS, Interleaved1F1B, InterleavedZeroBubble, ZBVZeroBubble, DualPipeV.",
    examples=(
        "shardline schedule --pp 8 --microbatches 32 --schedule Interleaved1F1B --stages-per-rank 2",
        "shardline schedule --pp 4 --microbatches 8 --schedule ZBVZeroBubble --svg zbv.svg",
        "shardline schedule --pp 8 --microbatches 32 --compare",
        "shardline schedule --csv mine.csv",
    ),
)


def program(words: Sequence[str] | None = None) -> int:
    """The `shardline` command as a process of its own, whose end nothing left behind may spoil."""
    from shardline.run.signals import claim_process

    claim_process()
    code = main(sys.argv[1:] if words is None else words)
    is_rank = "RANK" in os.environ and os.environ.get("WORLD_SIZE", "1") != "1"
    # Such a thread waits for a machine that is gone; coming back while the interpreter ends, it would abort the process
    hangs = any(thread.name == "shardline-store" for thread in threading.enumerate())
    if is_rank or hangs:
        from shardline.launch.rank_main import leave

        leave(code)
    return code


def main(given: Sequence[str]) -> int:
    """Run one command; the exit code. What a user can mend or has asked for is a line, no traceback."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # torch's profiler reads it on import, and would write into the bar
    debug = "--debug" in given
    try:
        code = dispatch(given)
        sys.stdout.flush()
        return code
    except UserError as error:
        if debug:
            traceback.print_exc()
        first, *more = str(error).splitlines() or [""]
        print("\n".join([f"error: {first}", *(f"       {line}" for line in more)]), file=sys.stderr)
        return 2
    except KeyboardInterrupt as error:  # holds the number of a signal that a run took
        print("interrupted", file=sys.stderr)
        return 128 + int(error.args[0] if error.args else signal.SIGINT)
    except BrokenPipeError:
        # Whoever read the output is gone; keep the interpreter from complaining when it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def dispatch(given: Sequence[str]) -> int:
    """Run one command; the exit code. Errors are the caller's."""
    words = list(given)
    while words[:1] == ["--debug"]:
        words = words[1:]
    if not words or words[0] in ("--help", "-h", "help"):
        print(_overview())
        return 0
    if words[0] in ("--version", "-V", "version"):
        from shardline import __version__

        print(f"shardline {__version__}")
        return 0
    name, rest = words[0], words[1:]
    groups = _groups()
    if name in groups:
        names = groups[name]
        if rest[:1] in ([], ["--help"], ["-h"]):
            print("\n\n".join(help_text(COMMANDS[f"{name} {second}"][0]) for second in names))
            return 0
        if rest[0] not in names:
            close = nearest(rest[0], names)
            raise UserError(f"shardline {name}: there is no command {rest[0]!r}{close} ({', '.join(names)})")
        name, rest = f"{name} {rest[0]}", rest[1:]
    if name not in COMMANDS:
        names = [*COMMANDS, *groups]
        raise UserError(f"there is no command {name!r}{nearest(name, names)} (shardline --help)")
    command, run = COMMANDS[name]
    parsed = parse(command, rest)
    if parsed.options["help"]:
        print(_with_presets(help_text(command)))
        return 0
    return run(parsed)


def _groups() -> dict[str, list[str]]:
    """First words of commands of two words, and the second words that there are."""
    groups: dict[str, list[str]] = {}
    for first, _, second in (name.partition(" ") for name in COMMANDS):
        if second:
            groups.setdefault(first, []).append(second)
    return groups


def _overview() -> str:
    width = max(len(name) for name in COMMANDS)
    rows = [f"  {name:<{width}}  {command.summary}" for name, (command, _) in COMMANDS.items()]
    return "\n".join(
        [
            "usage: shardline COMMAND [options]",
            "",
            "Train large language models from one config file.",
            "",
            "commands:",
            *rows,
            "",
            "  shardline COMMAND --help     options and examples of a command",
            "  shardline --version",
            "",
            "start here:",
            "  shardline train --preset demo",
        ]
    )


def _with_presets(text: str) -> str:
    from shardline.config.files import preset_names

    return text.replace("{presets}", ", ".join(preset_names()))


def load(parsed: Parsed) -> Config:
    """The config of `train` and `config`: loaded, custom module imported, combinations checked."""
    return _of_file(parsed, parsed.positionals[0] if parsed.positionals else None)


def _of_file(parsed: Parsed, file: str | None) -> Config:
    from shardline.config.load import load_config
    from shardline.config.rules import check
    from shardline.registry import import_custom

    config = load_config(file, parsed.flags)
    with _placing(config):
        import_custom(config.experimental.custom_import)
        check(config)
    return config


def _check_model(config: Config) -> None:
    """Resolve the flavor and its overrides, unless the model is one that is not built yet."""
    from shardline.config.rules import pending

    if not any(row.key in ("model.name", "model.flavor") for row in pending(config)):
        from shardline.models.flavors import resolve

        with _placing(config):
            resolve(config.model)


@contextlib.contextmanager
def _placing(config: Config) -> Iterator[None]:
    """Put the place of the key that a line of an error begins with in front of it; a line with a place stays."""
    try:
        yield
    except UserError as error:
        error.args = ("\n".join(_located(config, line) for line in str(error).splitlines()),)
        raise


def _located(config: Config, line: str) -> str:
    from shardline.config.assemble import annotation_of

    key = re.match(r"[\w.]*", line)[0].rstrip(".")  # type: ignore[index]
    if annotation_of(key) is None and not line.startswith("model: "):  # of how fields fit together
        return line
    places = [config.origin(known) for known in (key, *config.given()) if known == key or known.startswith(f"{key}.")]
    where = next((place for place in places if place), "")
    return f"{where}: {line}" if where else line


def _train(parsed: Parsed) -> int:
    from shardline.config.rules import refuse_pending
    from shardline.run.options import TrainOptions

    options = TrainOptions(**{name: v for name, v in parsed.options.items() if name != "help"}, words=parsed.words)
    if options.resume and options.overwrite:
        raise UserError("--resume goes on with a run and --overwrite replaces it: give one of them")
    if options.world_size is not None and not options.dry_run:
        raise UserError("--world-size is for --dry-run; --nproc starts processes")
    config = load(parsed)
    if not options.dry_run:
        refuse_pending(config)
    _check_model(config)
    with _placing(config):
        return _describe(config, options) if options.dry_run else _start(config, options)


def _describe(config: Config, options: TrainOptions) -> int:
    from shardline.run.options import node_range
    from shardline.tools.dry_run.dry_run import describe

    _, nodes = node_range(options.nnodes)
    ranks = nodes * options.nproc
    known = options.world_size or (ranks if ranks > 1 else None)
    print(describe(config, known, options.nproc if nodes > 1 else None))
    return 0


def _start(config: Config, options: TrainOptions) -> int:
    from shardline.launch.launch import train

    return train(config, options)


def _config(parsed: Parsed) -> int:
    from shardline.config.rules import notes
    from shardline.config.write import diff, markdown, to_toml

    if parsed.options["compatibility"]:
        from shardline.config.features import compatibility_page

        print(compatibility_page(), end="")
        return 0
    if parsed.options["markdown"]:
        print(markdown(), end="")
        return 0
    if parsed.options["diff"]:
        if parsed.positionals or parsed.flags:
            raise UserError("shardline config --diff A B compares two files or presets and takes nothing else")
        a, b = (_file_or_preset(name) for name in parsed.options["diff"])
        print(diff(a, b), end="")
        return 0
    config = load(parsed)
    _check_model(config)
    for note in (*config.alias_notes, *notes(config)):
        print(f"note: {note}", file=sys.stderr)
    print(to_toml(config, comments=parsed.options["comments"]), end="")
    return 0


def _file_or_preset(name: str) -> Config:
    from shardline.config.files import preset_names
    from shardline.config.load import load_config

    if not os.path.exists(name) and name.removesuffix(".toml") in preset_names():
        return load_config(preset=name)
    return load_config(name)


def _prepare(parsed: Parsed) -> int:
    from shardline.data.prepare import command

    source, out = parsed.positionals
    return command(source, out, **_named(parsed, "tokenizer", "text_field", "split", "workers", "overwrite"))


def _import(parsed: Parsed) -> int:
    for name in (word.lstrip("-").partition("=")[0] for word in parsed.flags if word.startswith("--")):
        if not name.startswith(("model.", "experimental.custom_import", "preset")):
            raise UserError(f"shardline import: there is no option --{name}: of a config, only --model.* matters here")
    config = _of_file(parsed, parsed.options["config"]) if parsed.options["config"] or parsed.flags else None
    from shardline.checkpoint.convert import import_model

    folder, out = parsed.positionals
    return import_model(folder, out, config=config, **_named(parsed, "dtype", "overwrite", "trust_pickle"))


def _export(parsed: Parsed) -> int:
    from shardline.checkpoint.convert import export

    checkpoint, out = parsed.positionals
    return export(checkpoint, out, **_named(parsed, "format", "dtype", "overwrite", "max_shard_size"))


def _checkpoint_ls(parsed: Parsed) -> int:
    from shardline.tools.checkpoints import ls

    return ls(parsed.positionals[0], **_named(parsed, "json"))


def _checkpoint_verify(parsed: Parsed) -> int:
    from shardline.tools.checkpoints import verify

    return verify(parsed.positionals[0], **_named(parsed, "step", "json"))


def _checkpoint_show(parsed: Parsed) -> int:
    from shardline.tools.checkpoints import show

    return show(parsed.positionals[0], **_named(parsed, "tensors", "json"))


def _generate(parsed: Parsed) -> int:
    if parsed.options["prompt"] is None:
        raise UserError('shardline generate: --prompt is missing: --prompt "Once upon a time"')
    if parsed.options["top_p"] is not None and not 0 < parsed.options["top_p"] <= 1:
        raise UserError(f"--top-p: expected a number above 0, at most 1, got {parsed.options['top_p']}")
    from shardline.tools.generate import command

    names = ("prompt", "max_new_tokens", "temperature", "top_k", "top_p", "seed", "device", "tokenizer")
    return command(parsed.positionals[0], **_named(parsed, *names))


def _bench_comm(parsed: Parsed) -> int:
    if parsed.options["tp"] is not None:
        parsed.flags.append(f"--parallelism.tensor_parallel_degree={parsed.options['tp']}")
    config, start = load(parsed), _starting(parsed)
    from shardline.tools.bench.comm import CommOptions, run

    return run(CommOptions(config, start, **_named(parsed, "sizes", "ops", "dim", "dtype", "iterations", "json")))


def _bench_overlap(parsed: Parsed) -> int:
    keys = {"model": "model.name", "flavor": "model.flavor", "tp": "parallelism.tensor_parallel_degree"}
    parsed.flags += [f"--{key}={parsed.options[name]}" for name, key in keys.items()]
    config = load(parsed)
    _check_model(config)
    from shardline.tools.bench.overlap import OverlapOptions, run

    names = ("seq", "batch", "backend", "dtype", "iterations", "json")
    return run(OverlapOptions(config, _starting(parsed), **_named(parsed, *names)))


def _starting(parsed: Parsed) -> TrainOptions:
    """How a benchmark's ranks start; nproc 0 where no number was given."""
    from shardline.run.options import TrainOptions

    names = ("nnodes", "node_rank", "rdzv_id", "rdzv_backend", "rdzv_endpoint", "debug")
    return TrainOptions(nproc=parsed.options["nproc"] or 0, words=parsed.words, **_named(parsed, *names))


def _trace_overlap(parsed: Parsed) -> int:
    from shardline.tools.trace import command

    return command(parsed.positionals, **_named(parsed, "json"))


def _schedule(parsed: Parsed) -> int:
    from shardline.tools.schedule import command

    names = ("pp", "microbatches", "schedule", "stages_per_rank", "csv", "svg", "compare", "json")
    return command(**_named(parsed, *names))


def _named(parsed: Parsed, *names: str) -> dict[str, Any]:
    return {name: parsed.options[name] for name in names}


COMMANDS: dict[str, tuple[Command, Callable[[Parsed], int]]] = {
    "train": (TRAIN, _train),
    "config": (CONFIG, _config),
    "data prepare": (PREPARE, _prepare),
    "import": (IMPORT, _import),
    "export": (EXPORT, _export),
    "checkpoint ls": (CHECKPOINT_LS, _checkpoint_ls),
    "checkpoint verify": (CHECKPOINT_VERIFY, _checkpoint_verify),
    "checkpoint show": (CHECKPOINT_SHOW, _checkpoint_show),
    "generate": (GENERATE, _generate),
    "bench comm": (BENCH_COMM, _bench_comm),
    "bench overlap": (BENCH_OVERLAP, _bench_overlap),
    "trace overlap": (TRACE_OVERLAP, _trace_overlap),
    "schedule": (SCHEDULE, _schedule),
}
