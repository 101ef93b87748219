"""Samples per second that count while processes are killed: replica groups compared with checkpoint restarts.

    python benchmarks/goodput.py                               # a fault every 60 s, 4 of them: about 10 minutes
    python benchmarks/goodput.py --every 20 --faults 3         # a shorter run
    python benchmarks/goodput.py --ways groups -- --training.seq_len=512   # flags after -- go to every run

Both ways use the same number of processes (--size), model and global batch, on this machine; the clock starts when both
have made --warm steps. At the same times, process k of each is killed by SIGKILL, with k in turn.

    restart   one job that shards over all; it saves every --save-seconds in the background, and its launcher starts
              all ranks again from the last save (--max-restarts)
    groups    one replica group per process; a killed one is started again at once, as a scheduler would

One JSON line per way, and one with the ratio:

    committed_samples    sequences of the steps that count at the end, minus those before the clock started
    lost_samples         sequences of steps that had to be repeated after a restart
    samples_per_second   committed samples divided by the wall time
    stopped_seconds        wall time in gaps between steps that count, of more than --gap seconds
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
POLL = 0.05
LIGHTHOUSE = ["lighthouse", "--bind", "127.0.0.1:0", "--join-timeout", "2", "--heartbeat-timeout", "1"]


class Processes:
    """The processes that this benchmark started; they end with it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.all = folder, list[subprocess.Popen[str]]()

    def start(self, words: Sequence[str], name: str, **more: str) -> subprocess.Popen[str]:
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "PYTHONPATH": str(ROOT),
            **more,
        }
        with (self.folder / f"said-{name}").open("a") as said:
            process = subprocess.Popen(
                [sys.executable, "-m", "shardline", *words],
                stdout=said, stderr=said, text=True, env=environment, start_new_session=True, cwd=self.folder,
            )  # fmt: skip
        self.all.append(process)
        return process

    def end(self) -> None:
        for process in self.all:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


class Restart:
    """One job, which its launcher restarts."""

    def __init__(self, options: argparse.Namespace, processes: Processes) -> None:
        self.options, self.run = options, processes.folder / "run"
        shards = f"--parallelism.data_parallel_shard_degree={options.size}"
        saves = ["--checkpoint.enable", "--checkpoint.interval_type=seconds", "--checkpoint.async_mode=async",
                 f"--checkpoint.interval={options.save_seconds}", "--checkpoint.keep_latest_k=2"]  # fmt: skip
        many = ["--nproc", str(options.size), "--max-restarts", "1000"]
        words = ["train", *common(options), shards, *saves, *many, f"--job.dump_folder={self.run}"]
        processes.start(words, "restart")

    def step(self) -> int:
        return last_step(self.run / "metrics.jsonl")

    def kill(self, number: int) -> bool:
        try:
            ranks = json.loads((self.run / "log" / "ranks.json").read_text())
        except (OSError, ValueError):
            return False
        ranks = ranks if isinstance(ranks, list) else ranks["ranks"]
        return kill_process(int(ranks[number]["pid"]))

    def lives(self) -> None:
        """The launcher looks after its ranks."""


class Groups:
    """One job per process; a job that ends is started again."""

    def __init__(self, options: argparse.Namespace, processes: Processes) -> None:
        self.options, self.processes, self.counts = options, processes, [0] * options.size
        processes.start(LIGHTHOUSE, "lighthouse")
        while not (found := re.search(r"http://\S+", (processes.folder / "said-lighthouse").read_text())):
            time.sleep(POLL)
        self.lighthouse = found[0]
        self.groups = [self.start(number) for number in range(options.size)]

    def start(self, number: int) -> subprocess.Popen[str]:
        self.counts[number] += 1
        own = [f"--fault_tolerance.replica_id={number}", "--fault_tolerance.enable",
               "--fault_tolerance.process_group_timeout_ms=10000",
               f"--job.dump_folder={self.processes.folder / f'group-{number}-{self.counts[number]}'}"]  # fmt: skip
        words = ["train", *common(self.options), *own]
        return self.processes.start(words, f"group-{number}", TORCHFT_LIGHTHOUSE=self.lighthouse)

    def step(self) -> int:
        return max((last_step(file) for file in self.processes.folder.glob("group-*/metrics.jsonl")), default=0)

    def kill(self, number: int) -> bool:
        return kill_process(self.groups[number].pid)

    def lives(self) -> None:
        for number, process in enumerate(self.groups):
            if process.poll() is not None:
                self.groups[number] = self.start(number)


def common(options: argparse.Namespace) -> list[str]:
    batch = options.batch * options.size
    return ["--preset=demo", f"--training.local_batch_size={options.batch}", f"--training.global_batch_size={batch}",
            "--training.steps=1000000", "--lr_scheduler.warmup_steps=10", "--metrics.log_freq=1",
            *options.words]  # fmt: skip


def last_step(file: Path) -> int:
    """Return the step of the last complete row."""
    try:
        with file.open("rb") as lines:
            lines.seek(max(0, lines.seek(0, os.SEEK_END) - 16384))
            whole = lines.read().split(b"\n")[:-1]
        return max((int(json.loads(line)["step"]) for line in whole[-3:] if line.startswith(b"{")), default=0)
    except (OSError, ValueError, KeyError):
        return 0


def kill_process(pid: int) -> bool:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def measure(options: argparse.Namespace, build: Callable[[argparse.Namespace, Processes], Any]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as parent:
        processes = Processes(Path(parent))
        try:
            job = build(options, processes)
            deadline = time.monotonic() + 300
            while job.step() < options.warm:
                if time.monotonic() > deadline:
                    said = "\n".join(file.read_text()[-2000:] for file in Path(parent).glob("said-*"))
                    sys.exit(f"no step {options.warm} after 300 s:\n{said}")
                time.sleep(POLL)
            return watch(options, job)
        finally:
            processes.end()


def watch(options: argparse.Namespace, job: Any) -> dict[str, Any]:
    """Kill processes at the scheduled times until the time is over."""
    began, first = time.monotonic(), job.step()
    seconds, killed, lost, stopped = options.every * (options.faults + 1), 0, 0, 0.0
    farthest, moved, due = first, began, 1
    before = first
    while (now := time.monotonic()) < began + seconds:
        job.lives()
        if due <= options.faults and now >= began + due * options.every and job.kill((due - 1) % options.size):
            killed, due = killed + 1, due + 1
        step = job.step()
        if 0 < step < before:  # steps after the save from which it resumed were lost
            lost += before - step
        before = step or before
        if step > farthest:
            stopped += now - moved if now - moved > options.gap else 0.0
            farthest, moved = step, now
        time.sleep(POLL)
    took = time.monotonic() - began
    stopped += took + began - moved if took + began - moved > options.gap else 0.0
    batch = options.batch * options.size
    committed = (job.step() or before) - first
    return {
        "seconds": round(took, 1),
        "faults": killed,
        "steps": committed,
        "committed_samples": committed * batch,
        "lost_samples": lost * batch,
        "samples_per_second": round(committed * batch / took, 3),
        "stopped_seconds": round(stopped, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", nargs="+", choices=["restart", "groups"], default=["restart", "groups"])
    parser.add_argument("--every", type=float, default=60.0, help="seconds between faults")
    parser.add_argument("--faults", type=int, default=4)
    parser.add_argument("--size", type=int, default=2, help="processes")
    parser.add_argument("--batch", type=int, default=4, help="sequences per process in one forward pass")
    parser.add_argument("--save-seconds", type=int, default=10)
    parser.add_argument("--warm", type=int, default=5, help="steps before the clock starts")
    parser.add_argument("--gap", type=float, default=2.0)
    parser.add_argument("words", nargs="*", help="settings for every run, after --")
    options = parser.parse_args()
    schedule = {"every": options.every, "size": options.size, "batch": options.batch * options.size}
    print(json.dumps(schedule | {"save_seconds": options.save_seconds, "load": os.getloadavg()[0]}), flush=True)
    rates = {}
    for way in options.ways:
        line = measure(options, {"restart": Restart, "groups": Groups}[way])
        rates[way] = line["samples_per_second"]
        print(json.dumps({"way": way} | line), flush=True)
    if len(rates) == 2:
        print(json.dumps({"groups_over_restart": round(rates["groups"] / rates["restart"], 3)}), flush=True)


if __name__ == "__main__":
    main()
