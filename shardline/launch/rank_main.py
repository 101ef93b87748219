"""The program of a rank that our launcher started: `python -m shardline.launch.rank_main MODULE:FUNCTION WORDS...`.

The function gets the words and returns an exit code. An error that it does not handle goes into the rank's report,
not to the console: the launcher shows the one that was the cause.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import importlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Sequence
from typing import NoReturn

from shardline.config.names import LAUNCHER_VARIABLE
from shardline.errors import UserError
from shardline.report import report_of, write_report
from shardline.run.output import OUTPUT_VARIABLE
from shardline.run.signals import claim_process

PR_SET_PDEATHSIG = 1


def main() -> None:
    claim_process()
    tie_to_launcher()
    faulthandler.enable()
    entry, words = sys.argv[1], sys.argv[2:]
    sys.argv = [entry, *words]
    leave(run(entry, words))


def leave(code: int) -> NoReturn:
    """End a rank without destructors: those of process groups may wait for ranks that are gone, or abort a success."""
    if code == 0:
        threading._shutdown()  # type: ignore[attr-defined]  # what Python does itself: wait for threads,
        atexit._run_exitfuncs()  # then call what was registered
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def run(entry: str, words: Sequence[str]) -> int:
    """Run the rank and return its exit code; an error that it did not handle goes into its report."""
    try:
        module, _, name = entry.partition(":")
        code: int = getattr(importlib.import_module(module), name)(words)
        return code
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    except KeyboardInterrupt as error:  # holds the number of the signal
        if OUTPUT_VARIABLE not in os.environ:  # rank 0, for all
            print("interrupted", file=sys.stderr)
        return 128 + int(error.args[0] if error.args else signal.SIGINT)
    except BaseException as error:
        report = report_of(error)
        if not write_report(report):
            sys.stderr.write(report.details)
        return 2 if isinstance(error, UserError) else 1


def tie_to_launcher() -> None:
    """Let the kernel kill this process when the launcher dies: nobody else would end it."""
    launcher = os.environ.get(LAUNCHER_VARIABLE)
    if launcher is None:
        return
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(launcher):  # it died before this was set up
        os._exit(1)


if __name__ == "__main__":
    main()
