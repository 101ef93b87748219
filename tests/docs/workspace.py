"""A folder in which the commands of the pages run: small data, configs, models and runs under their names."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

from tests.docs.fences import ROOT
from tests.e2e.hf_folders import tokenizer_folder, write_model

SENTENCE = "the cat sat on the mat and saw a bird"
RUN = """\
[model]
name = "llama3"
flavor = "debugmodel"
tokenizer_path = "bytes"
overrides = { dim = 64, n_layers = 8, n_heads = 8, n_kv_heads = 8, ffn_dim = 128, vocab_size = 272 }
[training]
steps = 2
seq_len = 64
local_batch_size = 2
[optimizer]
lr = 1e-3
[lr_scheduler]
warmup_steps = 1
[[data.sources]]
path = "data/train.jsonl"
type = "completion"
"""
TASK = """\
task: mine
dataset_path: json
dataset_kwargs: {data_files: questions.jsonl}
test_split: train
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list: [{metric: acc}]
"""
AXOLOTL = """\
base_model: ./Qwen3-tiny
datasets:
  - path: ./chat.jsonl
    type: chat_template
chat_template: chatml
sequence_len: 256
micro_batch_size: 1
gradient_accumulation_steps: 1
max_steps: 2
learning_rate: 1e-3
optimizer: adamw_torch
adapter: lora
lora_r: 4
lora_alpha: 8
lora_target_linear: true
output_dir: ./outputs/axolotl
"""


def make(folder: Path) -> Path:
    """Data, configs and models; then two runs, one of them with LoRA, which `outputs/run` names in turn."""
    chance = random.Random(0)
    words = SENTENCE.split()
    for part, files in (("train", 4), ("held_out", 2)):
        (folder / "data" / part).mkdir(parents=True)
        for number in range(files):
            text = "\n".join(" ".join(chance.choices(words, k=12)) for _ in range(600))
            (folder / "data" / part / f"{number}.txt").write_text(text)
    texts = [{"text": " ".join(chance.choices(words, k=60))} for _ in range(1500)]
    (folder / "data" / "train.jsonl").write_text("".join(json.dumps(one) + "\n" for one in texts))
    for name in ("held_out", "book"):
        (folder / f"{name}.txt").write_text("\n".join(one["text"] for one in texts[:400]))
    (folder / "tasks").mkdir()
    (folder / "tasks" / "mine.yaml").write_text(TASK)
    question = {"question": "the cat sat on", "choices": [" the mat", " a bird"], "answer": 0}
    (folder / "questions.jsonl").write_text((json.dumps(question) + "\n") * 4)
    turns = [{"role": "user", "content": SENTENCE}, {"role": "assistant", "content": "a bird"}]
    (folder / "chat.jsonl").write_text((json.dumps({"messages": turns}) + "\n") * 200)
    for name in ("run", "a", "b"):
        (folder / f"{name}.toml").write_text(RUN)
    for name in ("axolotl", "my-axolotl"):
        (folder / f"{name}.yml").write_text(AXOLOTL.replace("outputs/axolotl", f"outputs/{name}"))
    for name, family in (("Qwen3-tiny", "Qwen3"), ("Qwen3-0.6B", "Qwen3"), ("Llama-3.2-1B", "Llama")):
        model(folder / name, family)
    (folder / "Llama-3.1-8B").symlink_to("Llama-3.2-1B")
    (folder / "llama").symlink_to("Llama-3.2-1B")
    for name in ("configs", "examples", "benchmarks"):
        (folder / name).symlink_to(ROOT / name)
    runs(folder)
    return folder


def model(folder: Path, family: str) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}  # NF4 cuts rows into blocks of 64
    write_model(folder, family, **sizes, vocab_size=300, bos_token_id=0, eos_token_id=1)
    for file in tokenizer_folder().iterdir():
        (folder / file.name).write_bytes(file.read_bytes())


def runs(folder: Path) -> None:
    saved = "--checkpoint.enable --training.steps 4 --training.dataset_path data/train.jsonl --training.seq_len 64"
    validated = "--validation.enable --validation.dataset_path data/held_out --validation.steps 2"
    traced = "--profiling.enable_profiling --profiling.profile_freq 4 --profiling.profiler_active 1"
    base = "shardline train --preset finetune --model.hf_assets_path ./Qwen3-tiny --training.global_batch_size 2"
    shell(folder, f"{base} {saved} {validated} {traced} --job.dump_folder outputs/plain")
    shell(folder, f"{base} {saved} --lora.enable --lora.rank 4 --job.dump_folder outputs/lora")
    for name in ("first", "second"):
        shell(folder, f"shardline train run.toml --job.dump_folder outputs/{name} --checkpoint.enable")
    shell(folder, "shardline data prepare data/train.jsonl store --tokenizer bytes")


def shell(folder: Path, command: str, seconds: float = 300) -> subprocess.CompletedProcess[str]:
    """Run a command as it stands on a page, 80 columns wide."""
    places = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    given = os.environ | {"PATH": places, "COLUMNS": "80", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    given["SHARDLINE_CACHE"] = str(folder / "cache")  # prepared data stays out of the home folder
    done = subprocess.run(
        ["bash", "-c", command], cwd=folder, env=given, capture_output=True, text=True, timeout=seconds
    )
    if done.returncode:
        raise AssertionError(f"{command}\nexit code {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}")
    return done


def take(folder: Path, kind: str) -> None:
    """Let `outputs/run` be one of the prepared runs."""
    for name in ("model", "adapter", "weights", "checkpoints"):  # what commands of another page wrote
        shutil.rmtree(folder / name, ignore_errors=True)
    link = folder / "outputs" / "run"
    link.unlink(missing_ok=True)
    link.symlink_to(kind)
