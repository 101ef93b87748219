"""The commands: a table of their options, and what each runs. Nothing here imports torch before a command needs it."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from shardline.cli.cluster import LAUNCH_K8S, LAUNCH_SLURM, LAUNCH_SSH, LIGHTHOUSE
from shardline.cli.common import CONFIG_DETAILS, RENDEZVOUS, load, placing, processes
from shardline.cli.files import (
    CHECKPOINT_LS,
    CHECKPOINT_SHOW,
    CHECKPOINT_VERIFY,
    EXPORT,
    GENERATE,
    IMPORT,
    PREPARE,
    SHOW,
    VERIFY_DATA,
)
from shardline.cli.look import COMPLETION, EVAL, EXPLAIN, INIT, REPORT, TAIL
from shardline.cli.measure import (
    BENCH_COMM,
    BENCH_DEVICE,
    BENCH_EXPERTS,
    BENCH_OVERLAP,
    DOCTOR,
    PLAN,
    SCHEDULE,
    TRACE_HANG,
    TRACE_KERNELS,
    TRACE_OVERLAP,
)
from shardline.cli.parser import Command, Option, Parsed
from shardline.config.files import is_preset, preset_lines
from shardline.errors import UserError
from shardline.words import flowing, for_stream, table_lines, to_stderr, width_of

if TYPE_CHECKING:
    from shardline.config.schema import Config


def _train(parsed: Parsed) -> int:
    from shardline.run.signals import interruptible

    with interruptible():
        return _train_here(parsed)


def _train_here(parsed: Parsed) -> int:
    from shardline.config.check import refuse_pending
    from shardline.launch.clusters.environment import take_surroundings
    from shardline.run.options import TrainOptions, node_range

    named = take_surroundings(parsed.named(), parsed.given)
    options = TrainOptions(**named, debug=parsed.options["debug"], words=parsed.words)
    if options.resume and options.overwrite:
        raise UserError("--resume continues a run and --overwrite moves it aside: use only one of them")
    if options.world_size is not None and not options.dry_run:
        raise UserError("--world-size is for --dry-run; --nproc starts processes")
    if not (parsed.positionals or parsed.flags or {"RANK", "WORLD_SIZE"} & set(os.environ)):
        raise UserError(
            "shardline train: nothing says what to train; name a config file (`shardline init` writes one), a preset"
            " (--preset demo) or keys (--training.steps 100)"
        )
    config = load(parsed.file, parsed.flags, check_model=True, download=True)
    with placing(config):
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
        width = width_of(sys.stdout)
        for name, lines in preset_lines():
            text = "\n".join(lines) if width is None else flowing("\n".join(lines))
            rows = [("", line) for line in text.split("\n")]
            print(name, *(left + right for left, right in table_lines(rows, width)), sep="\n")
        return 0
    if parsed.options["commands"]:
        from shardline.cli.page import commands_page

        print(commands_page(COMMANDS), end="")
        return 0
    if parsed.options["axolotl"]:
        from shardline.config.axolotl.table import keys_page

        print(keys_page(), end="")
        return 0
    from shardline.config.check import notes
    from shardline.config.write import diff, markdown, to_toml

    if parsed.options["markdown"]:
        print(markdown(), end="")
        return 0
    if parsed.options["diff"]:
        if parsed.positionals or parsed.flags:
            raise UserError("shardline config --diff A B compares two files or presets and takes nothing else")
        a, b = (_file_or_preset(name) for name in parsed.options["diff"])
        text = diff(a, b)
        print(for_stream(text, sys.stdout), end="")
        if not text:
            to_stderr("no key differs")
        return 0
    config = load(parsed.file, parsed.flags, check_model=True)
    for note in (*config.alias_notes, *notes(config)):
        to_stderr(f"note: {note}")
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
        Option("measure-again", "Measure again what async TP chooses by, and ignore earlier measurements.", bool),
        Option("dry-run", "Report layout, sizes and communication; do not train.", bool),
        Option("world-size", "Number of ranks in a dry run.", int, "N", low=1),
        processes("", default=1),
        *RENDEZVOUS,
        Option("max-restarts", "How often failed workers are restarted.", int, "N", default=0, low=0),
    ),
    _train,
    config_flags=True,
    details=CONFIG_DETAILS,
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
    details=CONFIG_DETAILS,
    examples=(
        "shardline config run.toml",
        "shardline config --preset llama3_8b --training.seq_len=4096 > run.toml",
        "shardline config --comments",
        "shardline config --diff run.toml llama3_8b",
        "shardline config axolotl.yml > run.toml",
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
