"""What a rank of a launched replica group does besides: it writes down what it reads, waits where it is told, and dies.

    shardline train ... --experimental.custom_import=tests.faults.replica_hooks

with REPLICAS_FOLDER for its files and REPLICAS_LIFE, a `Life` as JSON: a fault of one rank comes in forward, before the
first pass, or in all_reduce, where gradients are there and not yet summed over the groups.
"""

from __future__ import annotations

import json
import os
import signal
import time
import zlib
from pathlib import Path
from typing import Any

from shardline.registry import register_hook
from tests.faults.nursery import note
from tests.faults.replica_groups import Life

FOLDER, RANK = Path(os.environ["REPLICAS_FOLDER"]), int(os.environ.get("RANK", "0"))
LIFE, FAULTY_RANK, COUNT = Life(**json.loads(os.environ["REPLICAS_LIFE"])), 1, int(os.environ["REPLICAS_COUNT"])


@register_hook("before_build")
def prepare(config: Any) -> None:
    """Change the classes that this process will use; it builds one trainer."""
    from shardline.parallel.replicas.groups import ReplicaGroups
    from shardline.training.trainer import Trainer

    number = config.fault_tolerance.replica_id
    meet, compute, sums = ReplicaGroups.meet, Trainer.train_step, ReplicaGroups.sum_gradients
    now = {"step": 0}

    def met(self: Any, *arguments: Any) -> Any:
        (FOLDER / f"ready-{number}-{COUNT}-{RANK}").touch()
        return meet(self, *arguments)

    def happen(phase: str) -> None:
        if (LIFE.phase, LIFE.at, RANK) == (phase, now["step"], FAULTY_RANK):
            os.kill(os.getpid(), signal.SIGKILL)

    def computed(self: Any, batches: Any, *arguments: Any) -> Any:
        now["step"] = self.progress.step + 1
        while now["step"] == LIFE.gate and not (FOLDER / LIFE.until).exists():
            time.sleep(0.02)
        time.sleep(LIFE.seconds)
        happen("forward")
        result = compute(self, batches, *arguments)
        if result.counts:
            read = [
                (int(one), zlib.crc32(batch.tokens[row].numpy().tobytes()))
                for batch in batches
                for row, one in enumerate(batch.sample_ids)
            ]
            row = {"life": COUNT, "step": now["step"], "loss": result.loss, "grad_norm": result.grad_norm, "read": read}
            plan = self.groups.plan
            place = [one.name for one in plan.participants]
            row |= {"name": plan.own.name, "participants": place, "history": plan.history()}
            note(FOLDER / f"ledger-{number}-{RANK}", row | {"data_rank": self.mesh.data_rank})
        return result

    def summed(self: Any, *arguments: Any) -> None:
        happen("all_reduce")
        sums(self, *arguments)

    ReplicaGroups.meet, ReplicaGroups.sum_gradients = met, summed  # type: ignore[method-assign]
    Trainer.train_step = computed  # type: ignore[method-assign]
