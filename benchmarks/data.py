"""Data speed on this machine: preparing compared with plain `encode_batch`, reading, verifying. One JSON line each.

python benchmarks/data.py [--megabytes 24] [--repeats 3] [--folder FOLDER] [--only prepare,read,verify]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

from shardline.config.load import load_config
from shardline.config.schema import Config
from shardline.data import demo
from shardline.data.prepare import named_source, prepare
from shardline.data.sources import open_source
from shardline.data.token_store import Numbers, TokenStore
from shardline.data.tokenizer import ByteTokenizer, load_tokenizer

READ_STEPS = 200
TRAINED_TOKENS = 20_000  # per second and process: a model of a few billion parameters on one GPU
PLAIN = """
import json, sys, time
from tokenizers import Tokenizer
tokenizer = Tokenizer.from_file(sys.argv[1])
texts = [json.loads(line)["text"] for line in open(sys.argv[2], encoding="utf-8")]
encode = getattr(tokenizer, sys.argv[3])
seconds = 0.0
for first in range(0, len(texts), 1000):
    batch = texts[first : first + 1000]
    started = time.perf_counter()
    encode(batch, add_special_tokens=False)
    seconds += time.perf_counter() - started
print(seconds)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=24)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", help="folder for the files (default: a temporary folder)")
    parser.add_argument("--only", default="prepare,read,verify", help="some of these, separated by commas")
    arguments = parser.parse_args()
    wanted = arguments.only.split(",")
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        characters = _write_text(folder / "text.jsonl", arguments.megabytes)
        if {"prepare", "read"} & set(wanted):
            _train_tokenizer(folder)
            _prepare(folder, characters, arguments.repeats)
        if "read" in wanted:
            _read(folder)
        if "verify" in wanted:
            _verify_samples(folder, arguments.repeats)
            _verify_training(folder)


def _write_text(file: Path, megabytes: int) -> int:
    """Return demo documents mixed with invented words, so that the tokenizer's word cache does not know everything."""
    chance = random.Random(0)
    stories = demo.documents("training")
    total = 0
    with file.open("w", encoding="utf-8") as stream:
        while total < megabytes * 2**20:
            text = " ".join(_strange(word, chance) for word in chance.choice(stories).split(" ")) + " "
            text = text * chance.choice([1, 1, 2, 4])
            total += len(text)
            stream.write(json.dumps({"text": text}) + "\n")
    return total


def _strange(word: str, chance: random.Random) -> str:
    if chance.random() > 0.15:
        return word
    return "".join(chance.choice("abdefgiklmnoprstu") for _ in range(3 + int(chance.random() * 8)))


def _train_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(vocab_size=8000, special_tokens=["<s>", "</s>"], show_progress=False)
    lines = (folder / "text.jsonl").read_text(encoding="utf-8").splitlines()[:5000]
    tokenizer.train_from_iterator((json.loads(line)["text"] for line in lines), trainer)
    tokenizer.save(str(folder / "tokenizer.json"))


def _prepare(folder: Path, characters: int, repeats: int) -> None:
    """Alternate the two and take the best of each, because other work on the machine only slows them down."""
    tokenizer = load_tokenizer(folder)
    source = open_source("benchmark", str(folder / "text.jsonl"))
    best = dict.fromkeys(("encode_batch", "encode_batch_fast", "prepare"), float("inf"))
    for _ in range(repeats):
        for name in ("encode_batch", "encode_batch_fast"):
            best[name] = min(best[name], _plain(folder, name))
        started = time.perf_counter()
        prepare(source, tokenizer, folder / "store", progress=False, overwrite=True)
        best["prepare"] = min(best["prepare"], time.perf_counter() - started)
    row = {f"{name}_mb_per_second": round(characters / 1e6 / seconds, 2) for name, seconds in best.items()}
    ratio = round(best["encode_batch"] / best["prepare"], 3)
    cores = len(os.sched_getaffinity(0))
    print(
        json.dumps(
            {"benchmark": "prepare", "megabytes": round(characters / 1e6, 1), "cores": cores, **row, "ratio": ratio}
        )
    )


def _plain(folder: Path, method: str) -> float:
    """Return the seconds of the plain library call on all cores, in a new process with a cold word cache like ours."""
    command = [sys.executable, "-c", PLAIN, str(folder / "tokenizer.json"), str(folder / "text.jsonl"), method]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def _read(folder: Path) -> None:
    from shardline.data.loader import build_loader

    for workers in (0, 2):
        for mask in ("causal", "block_causal"):
            loader = build_loader(_config(folder, workers), "training", _arch(mask), load_tokenizer(folder))
            loader.step()
            started = time.perf_counter()
            for _ in range(READ_STEPS):
                loader.step()
            rate = READ_STEPS * 8 * 2048 / (time.perf_counter() - started)
            loader.close()
            print(json.dumps({"benchmark": "read", "workers": workers, "mask": mask, "tokens_per_second": round(rate)}))


def _verify_samples(folder: Path, repeats: int) -> None:
    """Read samples at random places of a newly opened store, so that each needs blocks that are not verified yet."""
    prepare(open_source("benchmark", str(folder / "text.jsonl")), ByteTokenizer(), folder / "bytes", progress=False)
    for length in (2048, 8192):
        best = dict.fromkeys((False, True), float("inf"))
        for verifies in (False, True) * repeats:
            store, chance = TokenStore.open(folder / "bytes"), random.Random(0)
            store.verifies = verifies
            blocks = store.tokens * store.dtype.itemsize // store.manifest["block_bytes"]
            count = blocks // 4  # so few that most samples have blocks of their own
            starts = [chance.randrange(store.tokens - length) for _ in range(count)]
            store.read(0, 1)  # opens the file
            started = time.perf_counter()
            for start in starts:
                store.read(start, length)
            best[verifies] = min(best[verifies], (time.perf_counter() - started) / count)
        added = best[True] - best[False]
        row = {"benchmark": "verify", "what": "samples read for the first time", "seq_len": length, "samples": count}
        row |= {"read_us": round(1e6 * best[False], 1), "verify_us": round(1e6 * added, 1)}
        print(json.dumps(row | {"share_of_training": round(added * TRAINED_TOKENS / length, 6)}))


def _verify_training(folder: Path, steps: int = 100) -> None:
    """Train the demo preset from a store on disk and measure the share of its first steps spent on verifying."""
    import torch

    from shardline.training.trainer import Trainer

    store = prepare(named_source("demo", "text", "train"), ByteTokenizer(), folder / "demo", progress=False)
    keys = {"training.dataset_path": str(folder / "demo"), "model.tokenizer_path": "bytes", "training.steps": steps}
    spent, blocks, verify = [0.0], [0], Numbers._verify

    def timed(numbers: Numbers, *place: object) -> None:
        started = time.perf_counter()
        before = numbers._unread.count(1)
        verify(numbers, *place)  # type: ignore[arg-type]
        blocks[0] += before - numbers._unread.count(1)
        spent[0] += time.perf_counter() - started

    Numbers._verify = timed  # type: ignore[method-assign]
    trainer = Trainer(load_config(preset="demo", overrides=keys | {"job.dump_folder": str(folder / "run")}))
    started = time.perf_counter()
    trainer.train()
    seconds = time.perf_counter() - started
    Numbers._verify = verify  # type: ignore[method-assign]
    row = {"benchmark": "verify", "what": "training of the demo preset", "device": torch.get_default_device().type}
    row |= {"steps": steps, "store_tokens": store.tokens, "blocks": blocks[0], "seconds": round(seconds, 2)}
    print(json.dumps(row | {"verify_ms": round(1e3 * spent[0], 2), "share_of_training": round(spent[0] / seconds, 6)}))


def _config(folder: Path, workers: int) -> Config:
    keys = {
        "training.dataset_path": str(folder / "store"),
        "training.local_batch_size": 8,
        "training.seq_len": 2048,
        "training.dataloader.num_workers": workers,
        "debug.seed": 0,
    }
    return load_config(overrides=keys)


def _arch(mask: str) -> SimpleNamespace:
    return SimpleNamespace(vocab_size=8000, attn_mask_type=mask)


if __name__ == "__main__":
    main()
