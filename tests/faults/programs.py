"""What ranks do in these tests: a loop of collectives with one fault in it, and a launcher of such ranks.

The words are: name of the fault, number of ranks, folder for signs of life, and perhaps a number of restarts.
"""

import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

from shardline.errors import UserError


def loop(words):
    """Steps of an all-reduce each; the fault happens on one rank in step 3."""
    fault, folder = words[0], Path(words[1])
    import torch
    import torch.distributed as dist

    from shardline.comm.store import connect_store, gather_ranks, start_groups
    from shardline.comm.watchdog import Watchdog

    start_groups("gloo", timedelta(seconds=60))
    rank, world = dist.get_rank(), dist.get_world_size()
    watchdog = Watchdog(connect_store(), rank, world, timeout_seconds=2.0, period=0.25)
    watchdog.start()
    (folder / f"pid-{rank}").write_text(str(os.getpid()))
    if rank == 0:
        print("ranks", [row["pid"] for row in gather_ranks(connect_store(), rank, world)], flush=True)
    else:
        gather_ranks(connect_store(), rank, world)
        print(f"stray words of rank {rank}", flush=True)
    stopped = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: stopped.append(number))
    for step in range(1, 10 if fault == "busy" else 2000):
        watchdog.step(step)
        if step == 3 and rank == world - 1:
            happen(fault, dist, torch, watchdog)
        if step == 3 and fault == "user everywhere":
            raise UserError("the data is not there")
        x = torch.full((4,), float(bool(stopped)))
        watchdog.enter("all_reduce over world of (4,) float32")
        dist.all_reduce(x)
        watchdog.leave()
        if x[0] > 0 and fault != "deaf":
            (folder / f"stopped-{rank}").write_text(str(step))
            return 128 + (stopped or [signal.SIGTERM])[0]
        (folder / f"step-{rank}").write_text(str(step))
        time.sleep(0.02)
    watchdog.close()
    dist.destroy_process_group()
    return 0


def happen(fault, dist, torch, watchdog):
    if fault == "raise":
        raise ValueError("a fault of its own")
    if fault == "user":
        raise UserError("this cannot work: change it")
    if fault == "exit":
        print("last words", flush=True)
        os._exit(7)
    if fault == "busy":
        with watchdog.busy("writing"):
            time.sleep(4.5)
    if fault == "sleep":
        time.sleep(60)
    if fault == "mismatch":
        watchdog.enter("all_gather over world of (2,) float32")
        x = torch.zeros(2)
        dist.all_gather([torch.zeros(2) for _ in range(dist.get_world_size())], x)
        watchdog.leave()


def main():
    from shardline.cli.main import main as command
    from shardline.launch import launch
    from shardline.launch.agent import Launch, start_ranks
    from shardline.launch.secret import job_secret
    from shardline.run.options import TrainOptions

    fault, ranks, folder, *restarts = sys.argv[1:5]
    options = TrainOptions(nproc=int(ranks), max_restarts=int(restarts[0]) if restarts else 0)
    # The command's way of showing errors, with this program in the place of the trainer.
    launch.train = lambda config, given: start_ranks(
        Launch(
            "tests.faults.programs:loop", (fault, folder), options, secret=job_secret(options), stop_timeout_seconds=2
        )
    )
    return command(["train", "--training.steps=1"])


if __name__ == "__main__":
    sys.exit(main())
