"""The `shardline` command: choose a command, run it, and turn its errors into an exit code."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import sys
import threading
import traceback
from collections.abc import Sequence
from pathlib import Path

from shardline.cli.commands import COMMANDS
from shardline.cli.parser import help_rows, help_text, parse
from shardline.config.names import PROGRAM_VARIABLE
from shardline.errors import UserError
from shardline.registry import nearest
from shardline.words import for_stream, masked, printable, width_of


def program(words: Sequence[str] | None = None) -> int:
    """Run `shardline` as its own process, which threads left behind must not abort at its end."""
    from shardline.run.signals import claim_process

    claim_process()
    os.environ.setdefault(PROGRAM_VARIABLE, called_as(sys.argv[0]))
    code = main(sys.argv[1:] if words is None else words)
    is_rank = "RANK" in os.environ and os.environ.get("WORLD_SIZE", "1") != "1"
    # Such a thread waits for a machine that is gone; if it woke during the shutdown, it would abort the process
    hangs = any(thread.name in ("shardline-store", "shardline-quorum") for thread in threading.enumerate())
    if is_rank or hangs:
        from shardline.launch.rank_main import leave

        leave(code)
    return code


def called_as(first_word: str) -> str:
    """How the user calls this program, for commands that messages show: the shortest way that finds the same file."""
    path = Path(first_word)
    if path.name == "__main__.py":
        return f"{called_as(sys.executable)} -m shardline"
    if path.name == "train.py":  # a module that torchrun runs
        return "shardline"
    found = shutil.which(path.name)
    if found is not None and os.path.abspath(found) == os.path.abspath(path):
        return path.name
    inside = path.is_absolute() and path.is_relative_to(Path.cwd())
    return shlex.quote(str(path.relative_to(Path.cwd()) if inside else path))


def main(given: Sequence[str]) -> int:
    """Run one command and return its exit code. A UserError is printed as a message without a traceback."""
    os.environ.setdefault(
        "KINETO_LOG_LEVEL", "6"
    )  # torch's profiler reads it on import, and would write into the progress bar
    try:
        code = dispatch(given)
        sys.stdout.flush()
        return code
    except UserError as error:
        if "--debug" in given:
            traceback.print_exc()
        first, *more = masked(printable(str(error))).splitlines() or [""]
        text = "\n".join([f"error: {first}", *(f"       {line}" for line in more)])
        print(for_stream(text, sys.stderr), file=sys.stderr)
        return 2
    except KeyboardInterrupt as error:  # holds the number of the signal that ended a run
        from shardline.run.signals import counts_as

        print("interrupted", file=sys.stderr)
        return 128 + counts_as(error.args[0] if error.args else signal.SIGINT)
    except BrokenPipeError:
        # The reader of the output is gone; keep the interpreter from complaining when it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def dispatch(given: Sequence[str]) -> int:
    """Run one command and return its exit code; errors are left to the caller."""
    words = list(given)
    while words[:1] == ["--debug"]:
        words = words[1:]
    if not words or words[0] in ("--help", "-h", "help"):
        print(_overview(width_of(sys.stdout)))
        return 0
    if words[0] in ("--version", "-V", "version"):
        from shardline import __version__

        print(f"shardline {__version__}")
        return 0
    name, rest = words[0], words[1:]
    seconds = [known.partition(" ")[2] for known in COMMANDS if known.startswith(f"{name} ")]  # of two-word commands
    if seconds:
        if rest[:1] in ([], ["--help"], ["-h"]):
            print("\n\n".join(help_text(COMMANDS[f"{name} {second}"], width_of(sys.stdout)) for second in seconds))
            return 0
        if rest[0] not in seconds:
            close = nearest(rest[0], seconds)
            raise UserError(f"shardline {name}: there is no command {rest[0]!r}{close} ({', '.join(seconds)})")
        name, rest = f"{name} {rest[0]}", rest[1:]
    if name not in COMMANDS:
        names = [*COMMANDS, *(known.partition(" ")[0] for known in COMMANDS)]
        raise UserError(f"there is no command {name!r}{nearest(name, names)} (shardline --help)")
    command = COMMANDS[name]
    parsed = parse(command, rest)
    if parsed.options["help"]:
        print(help_text(command, width_of(sys.stdout)))
        return 0
    return command(parsed)


def _overview(width: int | None) -> str:
    rows = "\n".join(help_rows([(name, command.summary) for name, command in COMMANDS.items()], width))
    return f"""\
usage: shardline COMMAND [options]

Train large language models from one config file.

commands:
{rows}

  shardline COMMAND --help     options and examples of a command
  shardline --version

start here:
  shardline train --preset demo"""
