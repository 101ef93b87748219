"""What a rank knows of earlier rounds of its job, and what it notes for its launcher and later rounds.

The launcher gives its ranks SHARDLINE_ATTEMPT. The first rank of each machine writes notes into a file: where the run's
folder is, that the run has begun (its weights are there, `--overwrite` and `checkpoint.load_step` have done their
work), and when it reached which point, which gives the times of the parts of a recovery.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardline.config.schema import Config
    from shardline.run.options import TrainOptions

VARIABLE = "SHARDLINE_ATTEMPT"
SAVING = "saving"  # in the notes: whether a save is under way


@dataclass(frozen=True)
class Attempt:
    notes: str = ""  # the file for the launcher; none under another launcher
    folder: str | None = None  # of the run, if an earlier attempt has opened it
    begun: bool = False  # an earlier attempt has trained in it, or could have


def this_attempt() -> Attempt:
    text = os.environ.get(VARIABLE)
    return Attempt(**json.loads(text)) if text else Attempt()


def variable(attempt: Attempt) -> dict[str, str]:
    return {VARIABLE: json.dumps(asdict(attempt))}


def continued(config: Config, options: TrainOptions) -> tuple[Config, TrainOptions]:
    """Config and options of a later attempt: it continues in the first one's folder, and replaces or reloads nothing.

    `checkpoint.load_step` was for the first attempt; once the run has saved, the newest checkpoint counts.
    """
    attempt = this_attempt()
    if attempt.folder is None:
        return config, options
    changes: dict[str, Any] = {"job.dump_folder": attempt.folder}
    saves, checkpoints = not config.checkpoint.load_only, Path(attempt.folder) / config.checkpoint.folder
    if attempt.begun and saves and not is_partial_only(checkpoints):
        changes["checkpoint.load_step"] = -1
    overwrite = options.overwrite and not attempt.begun
    return config.replace(changes), dataclasses.replace(options, overwrite=overwrite)


def is_partial_only(checkpoints: Path) -> bool:
    """Whether the folder holds nothing but saves that a crash cut off."""
    return all(path.name.endswith(".partial") for path in checkpoints.glob("step-*"))


def note(what: str, **facts: Any) -> None:
    """Note that this rank has reached a point, with the time; only the first note of a name counts."""
    attempt = this_attempt()
    if not attempt.notes or os.environ.get("LOCAL_RANK") != "0" or (attempt.notes, what) in _noted:
        return
    _noted.add((attempt.notes, what))
    _write(Path(attempt.notes), {what: time.time(), **facts})


def say(what: str, value: Any) -> None:
    """Set what the notes of this rank say now."""
    notes = this_attempt().notes
    if notes and os.environ.get("LOCAL_RANK") == "0":
        _write(Path(notes), {what: value})


def _write(notes: Path, facts: dict[str, Any]) -> None:
    part = notes.with_name(f"{notes.name}.part")
    with _writing, contextlib.suppress(OSError):
        part.write_text(json.dumps({**read(notes), **facts}))
        part.replace(notes)


_writing = threading.Lock()
_noted: set[tuple[str, str]] = set()


def read(notes: Path) -> dict[str, Any]:
    """The notes of a rank; empty where there are none."""
    try:
        return dict(json.loads(notes.read_text()))
    except (OSError, ValueError):
        return {}
