"""Try every change, or those that are named: `python -m tests.mutations.run [--jobs N] [NAME or FILE ...]`.

First all tests of the changes run in an unchanged copy of the tree, where they must pass. The changes that survive, and
those whose tests could not run, are printed at the end; the exit code is then 1.
"""

from __future__ import annotations

import argparse
import contextlib
import queue
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.mutations.change import Change
from tests.mutations.changes import CHANGES
from tests.mutations.trees import Tree

TAIL = 1500  # characters of what tests printed


def chosen(words: Sequence[str]) -> list[Change]:
    """The changes whose name or file contains one of the words; all without words."""
    found = [one for one in CHANGES if not words or any(word in one.name or word in one.file for word in words)]
    if not found:
        sys.exit(f"no change has {' or '.join(words)} in its name or file")
    return found


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Switch promises off, and see whether tests notice.")
    parser.add_argument("names", nargs="*", help="parts of names or files of the changes to try")
    parser.add_argument("--jobs", type=int, default=2, help="changes that are tried at the same time")
    parser.add_argument("--trust", action="store_true", help="do not run the tests without a change first")
    parser.add_argument("--show", action="store_true", help="print the end of what each change's tests printed")
    options = parser.parse_args(given)
    changes, began = chosen(options.names), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="shardline-changes-") as folder, contextlib.ExitStack() as stack:
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that all of it is tidied up
        trees: queue.Queue[Tree] = queue.Queue()
        for number in range(max(1, min(options.jobs, len(changes)))):
            trees.put(Tree(Path(folder, str(number))))
            stack.callback(trees.queue[-1].close)
        if not options.trust:
            tree = trees.get()
            tests = sorted({test for change in changes for test in change.tests.split()})
            code, printed = tree.run_tests(tests, "-n", str(options.jobs), "--dist", "loadgroup")
            trees.put(tree)
            if code != 0:
                print(printed[-4 * TAIL :])
                print("the tests do not pass without a change")
                return 1

        def tried(change: Change) -> tuple[Change, str]:
            tree, start = trees.get(), time.monotonic()
            try:
                word, printed = tree.verdict(change)
            finally:
                trees.put(tree)
            print(f"{word:10} {time.monotonic() - start:5.0f} s  {change.name}", flush=True)
            if options.show or word != "caught":
                print(printed[-TAIL:], flush=True)
            return change, word

        with ThreadPoolExecutor(options.jobs) as pool:
            verdicts = list(pool.map(tried, changes))
    left = [(change, word) for change, word in verdicts if word != "caught"]
    for change, word in left:
        print(f"{word}: {change.name} ({change.file}): {change.old!r} -> {change.new!r}")
    print(f"{len(verdicts) - len(left)} of {len(verdicts)} changes caught in {time.monotonic() - began:.0f} s")
    return int(bool(left))


if __name__ == "__main__":
    sys.exit(main())
