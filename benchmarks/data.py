"""Data speed on this machine, one JSON object per line: preparing against plain `encode_batch`, and reading.

python benchmarks/data.py [--megabytes 24] [--repeats 3] [--folder FOLDER]
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

from shardline.data import demo
from shardline.data.prepare import prepare
from shardline.data.sources import open_source
from shardline.data.tokenizer import load_tokenizer

READ_STEPS = 200
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
    parser.add_argument("--folder", help="where to put the files (default: a temporary folder)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        characters = _write_text(folder / "text.jsonl", arguments.megabytes)
        _train_tokenizer(folder)
        _prepare(folder, characters, arguments.repeats)
        _read(folder)


def _write_text(file: Path, megabytes: int) -> int:
    """Demo documents with invented words among them, so that the tokenizer's word cache does not know everything."""
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
    """Alternate the two and take the best of each: other work on the machine only makes either slower."""
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
    """Seconds of the bare library call on all cores, in a fresh process so that its word cache is as cold as ours."""
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


def _config(folder: Path, workers: int) -> SimpleNamespace:
    options = SimpleNamespace(num_workers=workers, persistent_workers=False, pin_memory=False, prefetch_factor=None)
    training = SimpleNamespace(
        dataset="benchmark",
        dataset_path=str(folder / "store"),
        local_batch_size=8,
        global_batch_size=-1,
        seq_len=2048,
        dataloader=options,
    )
    return SimpleNamespace(training=training, debug=SimpleNamespace(seed=0))


def _arch(mask: str) -> SimpleNamespace:
    return SimpleNamespace(vocab_size=8000, attn_mask_type=mask)


if __name__ == "__main__":
    main()
