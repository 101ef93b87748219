"""Trials: a job is hurt, started again, and held against one that nothing happened to.

    reference   steps 1 2 3 4 5         sample ids and losses of each step
    trial       steps 1 2 3 x           killed in the save of step 3, or a file of it damaged
                          3 4 5         resumed from step 2, on the same layout or another

Together the attempts must have trained each sample once, in order; losses and the last checkpoint are bitwise those of
the reference where the layout is the same, and within the tolerance of the parity tests where it is another.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from shardline.checkpoint import format as files
from tests import proven
from tests.faults.nursery import Ended, Fault, Job, Nursery

SEED = int(os.environ.get("SHARDLINE_FAULT_SEED", "6"))
RESUMED, REFUSED, SAID = "resumed at the last good step", "refused, file named", "save failed and said so"
STEPS = 5
TOLERANCE = 1e-4  # relative, of the parity tests
SETTINGS: dict[str, Any] = {
    "model.overrides": {
        "dim": 32,
        "n_layers": 2,
        "n_heads": 4,
        "n_kv_heads": 2,
        "head_dim": 8,
        "ffn_dim": 64,
        "vocab_size": 272,
    },
    "model.tokenizer_path": "bytes",
    "training.seq_len": 32,
    "training.global_batch_size": 4,
    "training.local_batch_size": 4,
    "training.steps": STEPS,
    "training.mixed_precision_param": "float32",
    "optimizer.lr": 3e-3,
    "lr_scheduler.warmup_steps": 2,
    "lr_scheduler.total_steps": STEPS,
    "metrics.log_freq": 1,
    "checkpoint.enable": True,
    "checkpoint.interval": 1,
    "checkpoint.keep_latest_k": 2,
    "checkpoint.last_save_model_only": False,
}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {  # number of ranks, and what makes it so
    "one": (1, {}),
    "ddp": (
        2,
        {
            "parallelism.data_parallel_replicate_degree": 2,
            "parallelism.data_parallel_shard_degree": 1,
            "training.local_batch_size": 2,
        },
    ),
    "fsdp": (2, {"parallelism.data_parallel_shard_degree": 2, "training.local_batch_size": 2}),
    "tp": (2, {"parallelism.tensor_parallel_degree": 2}),
    "pp": (2, {"parallelism.pipeline_parallel_degree": 2}),
}
# Where system calls fail. The layouts above take turns in the other tests.
LARGER_LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "cp": (2, {"parallelism.context_parallel_degree": 2}),
    "hsdp": (
        4,
        {
            "parallelism.data_parallel_replicate_degree": 2,
            "parallelism.data_parallel_shard_degree": 2,
            "training.local_batch_size": 1,
        },
    ),
    "fsdp-cp": (
        4,
        {
            "parallelism.data_parallel_shard_degree": 2,
            "parallelism.context_parallel_degree": 2,
            "training.local_batch_size": 2,
        },
    ),
}


@dataclass(frozen=True)
class Row:
    """One step, as its ranks wrote it down."""

    step: int
    loss: float
    grad_norm: float
    samples: tuple[int, ...]  # of all data ranks, in their order
    at: float = field(compare=False)  # when it ended


@dataclass
class Lab:
    """Where trials take place; keeps the references and the table of what happened."""

    nursery: Nursery
    folder: Path
    table: Counter[tuple[str, str, str]] = field(default_factory=Counter)  # point, action, outcome
    _references: dict[str, Trial] = field(default_factory=dict)
    _numbers: int = 0

    def __post_init__(self) -> None:
        """Data that is quickly read: ranks start hundreds of times."""
        corpus = self.folder / "corpus.jsonl"
        corpus.write_text("".join(json.dumps({"text": f"{number} " * 40}) + "\n" for number in range(300)))
        self.data = {"training.dataset_path": str(corpus), "training.cache_folder": str(self.folder / "cache")}

    def trial(self, layout: str, **settings: Any) -> Trial:
        self._numbers += 1
        return Trial(self, self.folder / f"trial-{self._numbers}", layout, settings)

    def reference(self, layout: str) -> Trial:
        """A run of this layout that nothing happens to."""
        if layout not in self._references:
            trial = self.trial(layout)
            ended = trial.start()
            assert ended.codes == [0] * len(ended.codes), (ended.reports, ended.output())
            assert [row.step for row in trial.rows[0]] == [*range(1, STEPS + 1)]
            samples = [number for row in trial.rows[0] for number in row.samples]
            assert len(set(samples)) == len(samples) == STEPS * SETTINGS["training.global_batch_size"]
            self._references[layout] = trial
        return self._references[layout]

    def clean(self, layout: str, mode: str = "disabled", steps: int = 3) -> Trial:
        """A copy of a run that ended well after some steps; its files may be damaged."""
        name = f"clean {layout} {mode} {steps}"
        if name not in self._references:
            trial = self.trial(layout, **{"checkpoint.async_mode": mode})
            ended = trial.start(**{"training.steps": steps})
            assert ended.codes == [0] * len(ended.codes), (ended.reports, ended.output())
            self._references[name] = trial
        source, trial = self._references[name], self.trial(layout, **{"checkpoint.async_mode": mode})
        shutil.copytree(source.run, trial.run)
        trial.rows, trial.layouts, trial.started = list(source.rows), list(source.layouts), list(source.started)
        return trial

    def seconds(self, layout: str, whole: bool = False) -> float:
        """From the end of the first step to the end of the last one; `whole`: from the start."""
        reference = self.reference(layout)
        return reference.seconds if whole else reference.rows[0][-1].at - reference.rows[0][0].at

    def count(self, point: str, action: str, outcome: str) -> None:
        self.table[point, action, outcome] += 1
        proven.note("fault", f"{self.folder} {self.table.total()}")

    def lines(self) -> list[str]:
        rows = [("point", "action", "count", "outcome")]
        rows += [(point, action, str(count), outcome) for (point, action, outcome), count in sorted(self.table.items())]
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        text = ["  ".join(word.ljust(width) for word, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        points = {point for point, _, _ in self.table}
        return [*text, f"{self.table.total()} faults at {len(points)} points"]


class Trial:
    """One run folder, and the attempts at training in it."""

    def __init__(self, lab: Lab, folder: Path, layout: str, settings: dict[str, Any]) -> None:
        self.lab, self.folder, self.layout, self.settings = lab, folder, layout, settings
        self.run = folder / "run"
        self.checkpoints = self.run / "checkpoint"
        self.rows: list[list[Row]] = []  # of each attempt
        self.layouts: list[str] = []
        self.started: list[int] = []  # the step each attempt began after
        self.log, self.seconds = "", 0.0  # of the last attempt; the log is that of all ranks

    def save_in(self, folder: Path) -> None:
        self.checkpoints = folder
        self.settings["checkpoint.folder"] = str(folder)

    def start(self, layout: str | None = None, fault: Fault | None = None, **changes: Any) -> Ended:
        """One attempt. Keys with a dot are settings, others belong to the job."""
        layout = layout or self.layout
        ranks, cut = (LAYOUTS | LARGER_LAYOUTS)[layout]
        settings = {**SETTINGS, **cut, **self.lab.data, **self.settings, "job.dump_folder": str(self.run)}
        settings |= {key: value for key, value in changes.items() if "." in key}
        options = {key: value for key, value in changes.items() if "." not in key}
        logs = {path: path.stat().st_size for path in self.run.glob("log/rank-*.log")}
        place = self.folder / f"attempt-{len(self.rows) + 1}"
        ended = self.lab.nursery.run(Job(place, ranks, settings, fault, **options))
        texts = [
            path.read_bytes()[logs.get(path, 0) :].decode() for path in sorted(self.run.glob("log/rank-[0-9].log"))
        ]
        self.log, self.seconds = "\n".join(texts), ended.seconds
        self.rows.append(_rows(place, ranks))
        self.layouts.append(layout)
        self.started.append(self.resumed or 0)
        assert not ended.hung, f"a rank hangs: {ended.output()}"
        return ended

    def resume(self, layout: str, newest: int, allowed: str = "damaged", **changes: Any) -> None:
        """Go on to the end, from the step that is expected; then everything is as if nothing had happened."""
        ended = self.start(layout, **changes)
        assert ended.codes == [0] * len(ended.codes), ended.reports
        if newest == STEPS:
            assert "already finished" in self.log
            allowed += "|partial|removed"  # the next save would remove them
        else:
            assert (self.resumed or 0) == newest
        self.check_whole(allowed)

    @property
    def resumed(self) -> int | None:
        """The step that the last attempt says it went on from."""
        found = re.search(r"resumed from \S*/step-(\d+)(?:\.replaced)?$", self.log, re.MULTILINE)
        return int(found[1]) if found else None

    @property
    def reported(self) -> int:
        """The newest step that the last attempt said it had saved."""
        return max((int(step) for step in re.findall(r"saved \S*/step-(\d+)\b", self.log)), default=0)

    def names(self) -> list[str]:
        return sorted(path.name for path in self.checkpoints.iterdir()) if self.checkpoints.exists() else []

    def has_results(self) -> bool:
        """Whether there is anything that a fresh start would lose."""
        metrics = self.run / "metrics.jsonl"
        return bool(self.names()) or (metrics.exists() and metrics.stat().st_size > 0)

    def last_logged_step(self) -> int:
        lines = (self.run / "metrics.jsonl").read_text().splitlines()
        return max((json.loads(line)["step"] for line in lines if line.endswith("}")), default=0)

    def check_saved(self, least: int = 0) -> int:
        """The newest step that is whole on disk; not older than what was reported or than `least`."""
        reported = max(self.reported, least)
        newest = max((saved.step for saved in files.list_checkpoints(self.checkpoints) if _whole(saved)), default=0)
        assert newest >= reported
        if 0 < reported < newest and self.settings.get("checkpoint.keep_latest_k", 2) > 1:
            files.find_checkpoint(self.checkpoints / f"step-{reported}").verify()
        return newest

    def check_whole(self, allowed: str = "damaged|abandoned") -> None:
        """All attempts together have done what the reference did, and left nothing behind but what is allowed."""
        effective: list[tuple[Row, str]] = []
        for rows, layout, start in zip(self.rows, self.layouts, self.started, strict=True):
            assert [row.step for row in rows] == [*range(start + 1, start + 1 + len(rows))]
            if rows:  # else it was refused, or had nothing to do
                effective = [(row, on) for row, on in effective if row.step <= start] + [(row, layout) for row in rows]
        first, exact = effective[0][1], True
        reference = self.lab.reference(first)
        assert [row.samples for row, _ in effective] == [row.samples for row in reference.rows[0]], "other samples"
        for (row, layout), expected in zip(effective, reference.rows[0], strict=True):
            exact = exact and layout == first
            _check_row(row, expected, exact)
        self._check_metrics([row for row, _ in effective])
        self._check_last(reference, exact)
        left = [name for name in self.names() if not re.fullmatch(rf"step-\d+(\.({allowed}))?", name)]
        assert not left, f"left behind: {left}"

    def _check_metrics(self, rows: list[Row]) -> None:
        written = [json.loads(line) for line in (self.run / "metrics.jsonl").read_text().splitlines()]
        assert [(row["step"], row["loss"]) for row in written] == [(row.step, row.loss) for row in rows]

    def _check_last(self, reference: Trial, exact: bool) -> None:
        last, of_reference = (files.find_checkpoint(trial.checkpoints / f"step-{STEPS}") for trial in (self, reference))
        last.verify()
        wanted = {name: of_reference.shards.read(name) for name in of_reference.shards}
        if last.kind == "model":
            saved = {f"model/{name}": tensor for name, tensor in last.weights().items()}
            wanted = {name: tensor for name, tensor in wanted.items() if name.startswith("model/")}
        else:
            saved = {name: last.shards.read(name) for name in last.shards}
        assert saved.keys() == wanted.keys()
        for name, a in saved.items():
            b = wanted[name]
            if exact:
                assert torch.equal(a, b), name
            else:
                error = float((a - b).double().norm() / b.double().norm().clamp(min=1e-30))
                assert error <= 10 * TOLERANCE, f"{name}: relative {error:.1e}"


def short(cases: Sequence[Any], few: Sequence[Any]) -> list[Any]:
    """Parameters of a test; all but a few only in `make test-all`."""
    names = ["-".join(map(str, case)) if isinstance(case, tuple) else str(case) for case in cases]
    marks = [[] if case in few else [pytest.mark.slow] for case in cases]
    return [pytest.param(case, id=name, marks=mark) for case, name, mark in zip(cases, names, marks, strict=True)]


def _rows(place: Path, ranks: int) -> list[Row]:
    """Of steps that all ranks wrote down."""
    ledgers = []
    for rank in range(ranks):
        path = place / f"ledger-{rank}"
        lines = path.read_text().splitlines() if path.exists() else []
        ledgers.append([json.loads(line) for line in lines])
    rows = []
    for of_step in zip(*ledgers, strict=False):
        assert len({(row["step"], row["loss"], row["grad_norm"]) for row in of_step}) == 1, of_step
        shares = {row["data_rank"]: row["samples"] for row in of_step}
        assert all(row["samples"] == shares[row["data_rank"]] for row in of_step), of_step
        samples = tuple(number for data_rank in sorted(shares) for number in shares[data_rank])
        rows.append(Row(of_step[0]["step"], of_step[0]["loss"], of_step[0]["grad_norm"], samples, of_step[0]["at"]))
    return rows


def _check_row(row: Row, wanted: Row, exact: bool) -> None:
    if exact:
        assert row == wanted
        return
    for seen, expected in ((row.loss, wanted.loss), (row.grad_norm, wanted.grad_norm)):
        assert abs(seen - expected) <= TOLERANCE * abs(expected), (row, wanted)


def _whole(saved: files.Saved) -> bool:
    try:
        saved.verify()
    except files.UserError:
        return False
    return True
