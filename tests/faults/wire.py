"""One rank on one of two hosts: what its interface sends, for collectives alone and for whole training runs.

Started with the variables of torchrun, which is also how the training starts: `python -m tests.faults.wire FOLDER`.
"""

import json
import os
import sys
import time
from pathlib import Path
from unittest.mock import patch

STEPS = 5
BEGINNING = 1  # steps before the first that is measured
SIZE = 4 * 2**20  # of a whole tensor
REPEATS = 4

MODEL = {"dim": 256, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "head_dim": 64, "ffn_dim": 512, "vocab_size": 272}
TOKENS = 512  # of a step
COMMON = {
    **{f"model.overrides.{name}": value for name, value in MODEL.items()},
    "model.tokenizer_path": "bytes",
    "training.seq_len": 128,
    "training.global_batch_size": 4,
    "training.steps": STEPS,
    "metrics.log_freq": 1,
}
DDP = {"parallelism.data_parallel_replicate_degree": 2, "parallelism.data_parallel_shard_degree": 1}
TP = {"parallelism.tensor_parallel_degree": 2, "training.local_batch_size": 4}
CP = {"parallelism.context_parallel_degree": 2, "training.local_batch_size": 4}
LAYOUTS = {
    "ddp": DDP | {"training.local_batch_size": 2},
    "fsdp": {"training.local_batch_size": 2},
    "tp": TP,
    "tp-whole-tokens": TP | {"parallelism.enable_sequence_parallel": "false"},
    "cp": CP,
    "cp-heads": CP | {"parallelism.context_parallel_rotate_method": "ulysses"},
}


def sent():
    """Bytes and packets that have left this host."""
    (interface,) = (name for name in os.listdir("/sys/class/net") if name != "lo")
    folder = Path("/sys/class/net", interface, "statistics")
    return [int((folder / name).read_text()) for name in ("tx_bytes", "tx_packets")]


def each_collective():
    """Per kind: what was counted, and what left, for REPEATS of them."""
    import torch
    import torch.distributed as dist

    from shardline.comm import collectives
    from shardline.comm.job import job

    def of_gloo():
        with patch.object(collectives, "scattered_by_host", return_value=False):
            collectives.scatter_sum_into(part, whole, "world")

    dist.init_process_group("gloo")
    job.set_axes({"world": collectives.Axis("world", dist.group.WORLD, 2, dist.get_rank())})
    whole, part = torch.ones(SIZE // 4), torch.ones(SIZE // 8)
    kinds = {
        "all_reduce": lambda: collectives.sum_in_place(whole, "world"),
        "all_reduce_in_background": lambda: collectives.start_sum(whole, "world").wait(),
        "all_gather": lambda: collectives.gather_into(whole, part, "world"),
        "reduce_scatter": lambda: collectives.scatter_sum_into(part, whole, "world"),
        "reduce_scatter_of_gloo": of_gloo,
    }
    found = {}
    for name, run in kinds.items():
        run()  # connects
        dist.barrier()
        job.traffic.take()
        before = sent()
        for _ in range(REPEATS):
            run()
        dist.barrier()
        found[name] = {"counted": job.traffic.take()["world"], "sent": difference(sent(), before)}
    job.set_axes({})
    dist.destroy_process_group()
    return found


def training(folder):
    """Per layout: what metrics.jsonl says of the steps after the first ones (rank 0), and what left meanwhile."""
    from shardline.cli.main import main
    from shardline.registry import register_hook

    counters = {}
    register_hook("after_step")(lambda trainer, row: counters.update({row["step"]: sent()}))
    found = {}
    for number, (name, layout) in enumerate(LAYOUTS.items(), start=1):
        os.environ["MASTER_PORT"] = str(int(os.environ["FIRST_PORT"]) + number)
        run = folder / name
        keys = COMMON | layout | {"job.dump_folder": run}
        code = main(["train", *(f"--{key}={value}" for key, value in keys.items())])
        assert code == 0, code
        rows = whole_metrics(run / "metrics.jsonl")
        counted = sum(sum(row["comm_bytes"].values()) for row in rows[BEGINNING:])
        found[name] = {"counted": counted, "sent": difference(counters[STEPS], counters[BEGINNING])}
    return found


def whole_metrics(path):
    """Rank 0 writes them, and may be a little behind."""
    ends = time.monotonic() + 10
    while True:
        rows = [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
        if len(rows) == STEPS:
            return rows
        assert time.monotonic() < ends, f"{path} has {len(rows)} of {STEPS} rows"
        time.sleep(0.05)


def difference(after, before):
    return [late - early for late, early in zip(after, before, strict=True)]


if __name__ == "__main__":
    os.environ["FIRST_PORT"] = os.environ["MASTER_PORT"]
    place = Path(sys.argv[1])
    answer = {"collectives": each_collective(), "training": training(place)}
    (place / f"rank-{os.environ['RANK']}.json").write_text(json.dumps(answer))
