"""Commands of the pages that `make test-docs` does not run, each with the reason."""

NOT_RUN: dict[str, str] = {
    # The beginning of a command, or a word of it: why.
    "make demo": "makes an environment; step 1 of the tutorial runs the same demo",
    "pip install": "installs packages; tests/e2e/test_wheel.py installs the wheel",
    "host0:29500": "needs several machines; tests/faults/test_multi_host.py and test_elastic.py have two",
    "Qwen/Qwen3-0.6B": "needs the Hub; tests/e2e/test_hub.py has a server that speaks its protocol",
    "shardline launch ssh": "needs two machines with sshd; make test-slurm has them",
    "shardline lighthouse": "serves until Ctrl-C; tests/faults/test_replica_groups.py starts one",
    "--fault_tolerance.replica_id=": "needs another group; tests/faults/test_replica_groups.py has both",
    "--tasks hellaswag": "needs the Hub; tests/e2e/test_eval.py has tasks of the same kinds, and the next command one",
    "shardline data prepare SRC": "a synopsis; the store of the other commands is prepared by one like it",
    "shardline train ...": "a part of a command",
    "--trust-pickle": "needs a checkpoint of TorchTitan; tests/unit/checkpoint writes some",
    "--lora.base_dtype nf4": "trains 10,000 steps of Llama 8B; tests/unit/adapters and tests/parity have QLoRA",
    "--watch": "serves until Ctrl-C; tests/unit/show has the server",
    "python benchmarks/": "measures for minutes, most of them on a GPU",
    "bench overlap --model llama3 --flavor 8B": "needs a GPU; tests/unit/tools has a small model",
    "bench experts --model deepseek_v3 --flavor 16B": "needs a GPU; tests/unit/tools has a small model",
    "bench device": "measures for minutes; tests/unit/tools has it",
}
