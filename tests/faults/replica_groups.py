"""Replica groups that die, come back and are slow, and the ledger of what they read.

A group is a process of the nursery, which forks one process after another: its lives. A life trains until it ends or
its fault comes. The groups write down every step that counts, and what they read for it.

    group 0   step 1 2 3 4 5 6 7 8 9 ...
    group 1   step 1 2 3 killed in step 4          comes back: heals in step 8, and goes on
    group 2   step 1 2 3 4 5 6 7 (waits for 1) 8 9 ...
"""

from __future__ import annotations

import json
import os
import signal
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.faults.nursery import job_of, note

GLOBAL_BATCH, STEPS, LOCAL_BATCH = 12, 12, 2


@dataclass(frozen=True)
class Life:
    """One start of a group; `fault` comes in step `at`: kill or stop, in a phase of the step."""

    at: int = 0
    phase: str = ""  # forward, backward, all_reduce, commit, heal, send
    action: str = "kill"
    seconds: float = 0.0  # that it is stopped
    gate: int = 0  # in this step it waits ...
    until: str = ""  # ... for this file


def group(words: Sequence[str]) -> int:
    """The lives of one group; the nursery calls it. It returns the exit code of the last."""
    job, number = job_of(words[0]), int(words[1])
    lives = [Life(**life) for life in json.loads(words[3])[number]]
    code = 0
    for count, life in enumerate(lives):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                code = live(job, number, count, life, words[4], float(words[5]))
            finally:
                os._exit(code)
        while True:
            _, status = os.waitpid(child, os.WUNTRACED)
            if not os.WIFSTOPPED(status):
                break
            time.sleep(life.seconds)
            os.kill(child, signal.SIGCONT)
        code = os.waitstatus_to_exitcode(status)
        note(job.folder / f"codes-{number}", code)
    return max(code, 0) or (1 if code else 0)


def live(job: Any, number: int, count: int, life: Life, lighthouse: str, pause: float) -> int:
    """Train; `out-N` of the nursery has what is printed."""
    import torch

    from shardline.config.load import load_config
    from shardline.training.trainer import Trainer

    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    os.environ["TORCHFT_LIGHTHOUSE"] = lighthouse
    folder = job.folder / f"group-{number}-{count}"
    own = {"fault_tolerance.replica_id": number, "job.dump_folder": str(folder)}
    trainer = Trainer(load_config(overrides=job.settings | own))
    arm(trainer, life)
    fetch, compute, read = trainer.loader.step, trainer.train_step, list[Any]()
    ledger = job.folder / f"ledger-{number}"

    def fetched() -> Any:
        step = trainer.progress.step + 1
        while step == life.gate and not (job.folder / life.until).exists():
            time.sleep(0.02)
        time.sleep(pause)
        batches = fetch()
        read[:] = [
            (int(one), zlib.crc32(batch.tokens[row].numpy().tobytes()))
            for batch in batches
            for row, one in enumerate(batch.sample_ids)
        ]
        return batches

    def computed(*arguments: Any) -> Any:
        result = compute(*arguments)
        plan = trainer.groups.plan
        row = {"life": count, "step": trainer.progress.step + 1, "loss": result.loss, "grad_norm": result.grad_norm}
        if result.counts:
            place = [one.name for one in plan.participants]
            note(ledger, {**row, "read": read, "name": plan.own.name, "participants": place, "history": plan.history()})
        return result

    trainer.loader.step, trainer.train_step = fetched, computed  # type: ignore[method-assign]
    (job.folder / f"ready-{number}-{count}").touch()
    groups = len(list(job.folder.glob("out-*")))
    while count == 0 and len(list(job.folder.glob("ready-*-0"))) < groups:
        time.sleep(0.01)
    trainer.train()
    weights = {name: parameter.detach() for name, parameter in trainer.model.named_parameters()}
    torch.save(weights, job.folder / f"weights-{number}")
    return 0


def arm(trainer: Any, life: Life) -> None:
    """Let the fault come in its phase of its step."""
    from shardline.parallel.replicas import link
    from shardline.training import whole_model

    groups = trainer.groups

    def happen() -> None:
        os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[life.action])

    def before(owner: Any, name: str, begin: Callable[..., Any] | None = None) -> None:
        original = getattr(owner, name)

        def replaced(*arguments: Any) -> Any:
            if trainer.progress.step + 1 == life.at and groups.plan is not None:
                if begin is not None:
                    begin(*arguments)
                setattr(owner, name, original)
                happen()
            return original(*arguments)

        setattr(owner, name, replaced)

    places: dict[str, tuple[Any, ...]] = {
        "forward": (trainer.stepper.passes, "forward_backward"),
        "backward": (whole_model, "run_backward"),
        "commit": (groups, "commit"),
        "heal": (link, "receive_state"),
        "send": (link, "send_state"),
    }
    if life.phase == "all_reduce":
        link.sum_over = in_the_middle(trainer, life.at, link.sum_over, happen)  # type: ignore[assignment]
    elif life.phase in ("heal", "send"):
        owner, name = places[life.phase]
        before_any = getattr(owner, name)

        def gone(*arguments: Any) -> Any:
            happen()
            return before_any(*arguments)

        setattr(owner, name, gone)
    elif life.phase:
        before(*places[life.phase][:2])


def in_the_middle(
    trainer: Any, at: int, sum_over: Callable[..., int], happen: Callable[[], None]
) -> Callable[..., int]:
    """A sum whose fault comes when its first part is on its way; that of the gradients, not that of the targets."""

    class Begun:
        def __init__(self, group: Any) -> None:
            self.group, self.size = group, group.size

        def allreduce(self, tensors: Any) -> Any:
            work = self.group.allreduce(tensors)
            happen()
            return work

    def replaced(group: Any, tensors: Sequence[Any]) -> int:
        begins = trainer.progress.step + 1 == at and len(tensors) > 1
        return sum_over(Begun(group) if begins else group, tensors)

    return replaced


# ---- in the test -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    life: int
    step: int
    loss: float
    grad_norm: float
    read: list[list[int]]
    name: str
    participants: list[str]
    history: str


def read_ledger(folder: Path, groups: int) -> list[Row]:
    files = [folder / f"ledger-{number}" for number in range(groups)]
    return [Row(**json.loads(line)) for file in files if file.exists() for line in file.read_text().splitlines()]


def words_of(lives: Sequence[Sequence[Life]], lighthouse: str, pause: float) -> tuple[str, ...]:
    return json.dumps([[asdict(life) for life in group] for group in lives]), lighthouse, str(pause)
