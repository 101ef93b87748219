"""Where a rank's printed output goes: at first into a file of the launcher, then into the run's log folder."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from shardline.storage.atomic import plain_file

OUTPUT_VARIABLE = "SHARDLINE_OUTPUT"  # file that takes what this rank prints; rank 0 prints to the console


def keep_output(folder: Path) -> None:
    """Move what this rank has printed, and what it prints from now on, into the run's log folder."""
    place = os.environ.get(OUTPUT_VARIABLE)
    if place is None:
        return
    folder.mkdir(parents=True, exist_ok=True)  # rank 0 made it on its machine, which may share no disk with this one
    kept = folder / f"rank-{os.environ['RANK']}.out.log"
    sys.stdout.flush()
    sys.stderr.flush()
    with open(place, "rb") as before, open(kept, "ab", opener=plain_file) as after:
        after.write(before.read())
        after.flush()
        os.dup2(after.fileno(), 1)
        os.dup2(after.fileno(), 2)
    link = f"{place}.link"  # the launcher keeps reading at the old place
    os.symlink(kept.resolve(), link)
    os.replace(link, place)
