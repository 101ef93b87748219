"""Commands that show runs and configs, evaluate models, and help to begin: report, tail, explain, eval, init."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardline.cli.common import BASE, JSON, load, placing, processes
from shardline.cli.parser import Command, Option, Parsed
from shardline.errors import UserError

if TYPE_CHECKING:
    pass


def _explain(parsed: Parsed) -> int:
    config = load(parsed.file, parsed.flags, check_model=True)
    with placing(config):
        from shardline.show.explain import command

        return command(config, **parsed.named())


READ_BY_EVAL = ("training.cache_folder", "training.mixed_precision_param")


def _eval(parsed: Parsed) -> int:
    named = parsed.named()
    tasks, data = named["tasks"], named["data"]
    for name in (word.lstrip("-").partition("=")[0] for word in parsed.flags if word.startswith("--")):
        if not name.startswith(("validation.", "data.", "model.tokenizer_path", *READ_BY_EVAL)):
            raise UserError(
                f"shardline eval: there is no option --{name}: it takes only the config keys that say how data is read"
            )
    with_tasks = {"include_path", "num_fewshot", "limit", "batch_size", "out", "device", "tokenizer"}
    with_data = {"nproc"}
    defaults = {option.key: option.default for option in EVAL.options}
    wrong = [key for key in (with_data if tasks else with_tasks) if named[key] != defaults[key]]
    if wrong or (tasks and (data or parsed.flags)):
        one = f"--{wrong[0].replace('_', '-')}" if wrong else "--data" if data else parsed.flags[0].partition("=")[0]
        raise UserError(
            f"shardline eval: {one} is for a file of data, --tasks for tasks: evaluate one after the other"
            if tasks
            else f"shardline eval: {one} is for tasks: add --tasks"
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
            "File, glob or prepared store to compute the perplexity of; unset: the run's validation data.",
            str,
            "FILE",
        ),
        processes(" that share the data", default=1),
        Option("tasks", "Tasks of lm-evaluation-harness, such as hellaswag,arc_easy.", str, "NAMES"),
        Option("include-path", "Tasks: folder with task files of your own (YAML).", str, "FOLDER"),
        Option("num-fewshot", "Tasks: examples before each question; unset: the task's number.", int, "N", low=0),
        Option("limit", "Tasks: questions per task; unset: all.", int, "N", low=1),
        Option("batch-size", "Tasks: questions in one forward pass.", int, "N", default=8, low=1),
        Option("out", "Tasks: write the results to this file, as JSON.", str, "FILE"),
        Option("device", "Tasks: cpu or cuda; unset takes a GPU if there is one.", str, "NAME"),
        Option("tokenizer", "Tasks: tokenizer.json, its folder, or bytes; unset takes the model's.", str, "PATH"),
        BASE,
        JSON,
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
    "Draw runs, finished or running, in one HTML file: curves, the time of a step, pipeline, mesh, events, config.",
    ("RUN...",),
    (
        Option("out", "Write the page to this file; unset: report.html in the run's folder.", str, "FILE"),
        Option("watch", "Serve the page on this machine and keep it up to date, until Ctrl-C.", bool),
        Option("port", "Port of --watch; 0: any free port.", int, "N", default=8421, low=0),
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
    "Follow a run by its files until it ends, also one on another machine with a shared folder.",
    ("RUN",),
    (
        Option("lines", "Earlier lines to show.", int, "N", default=10, low=0),
        Option("no-follow", "Show these lines and exit.", bool),
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
    details="FILE: run.toml by default; an existing file is not touched. What an option answers is not asked;"
    "\nthrough a pipe, each line is an answer, and an empty one takes the default. The config is checked before"
    "\nit is written.",
    examples=(
        "shardline init",
        "shardline init tune.toml --model ./Qwen3-0.6B --data train.jsonl --goal lora --gpus 1 --run outputs/tune",
    ),
)


def _completion(parsed: Parsed) -> int:
    from shardline.cli.commands import COMMANDS
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
