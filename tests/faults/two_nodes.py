"""Launches one rank on each of two hosts: `--node-rank N --rdzv-endpoint HOST:PORT PROGRAM WORD`."""

import sys
import time


def add_up(words):
    """One all-reduce of WORD MiB."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    x = torch.ones(int(words[0]) * 2**20 // 4)
    dist.barrier()
    started = time.perf_counter()
    dist.all_reduce(x)
    print(f"took {time.perf_counter() - started:.3f} s")
    assert float(x.mean()) == 2.0
    dist.destroy_process_group()
    return 0


def main():
    from shardline.launch.agent import Launch, start_ranks
    from shardline.run.options import TrainOptions

    node_rank, endpoint, program, word = sys.argv[2], sys.argv[4], sys.argv[5], sys.argv[6]
    entry = "tests.faults.two_nodes:add_up" if program == "sum" else "tests.faults.programs:loop"
    words = (word,) if program == "sum" else (program, word)
    options = TrainOptions(nproc=1, nnodes="2", node_rank=int(node_rank), rdzv_endpoint=endpoint)
    return start_ranks(Launch(entry, words, options))


if __name__ == "__main__":
    sys.exit(main())
