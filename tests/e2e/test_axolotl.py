"""Axolotl configs train: those of the guides, a full fine-tune, LoRA and QLoRA, chats, plain texts."""

import json
import re
from pathlib import Path

import pytest

from shardline.cli.commands import load
from shardline.training.trainer import Trainer
from tests.e2e.hf_folders import write_model
from tests.e2e.tiny import command, rows
from tests.unit.config.axolotl_corpus import COMMON, EXAMPLES, FULL, LORA, SEEDS

ONE_RANK = [
    f"--parallelism.{name}_degree=1"
    for name in ("data_parallel_replicate", "data_parallel_shard", "tensor_parallel", "context_parallel")
]
SHORT = ["--training.seq_len=256", "--validation.seq_len=256", "--training.steps=2", "--metrics.log_freq=1"]
SIZES = {"hidden_size": 64, "intermediate_size": 128, "max_position_embeddings": 512}
QLORA = next(one.text for one in EXAMPLES if one.name == "qlora")
CHAT = """
base_model: x
chat_template: chatml
datasets:
  - path: chat.jsonl
    type: chat_template
    field_messages: conversations
    message_property_mappings: {role: from, content: value}
sequence_len: 64
micro_batch_size: 2
gradient_accumulation_steps: 2
sample_packing: true
learning_rate: 2e-4
bf16: false
lr_scheduler: constant
output_dir: ./outputs/run
"""
TEXTS = """
base_model: x
reinit_weights: true
pretraining_dataset:
  - path: texts.jsonl
    text_column: output
max_steps: 2
sequence_len: 64
micro_batch_size: 1
learning_rate: 3e-4
optimizer: lion
output_dir: ./outputs/run
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A model and data, under the names that the configs get."""
    path = tmp_path_factory.mktemp("axolotl")
    write_model(path / "model", **SIZES)
    turns = [[("human", f"Count to {n}"), ("gpt", " ".join(map(str, range(n))))] for n in range(3, 40)]
    alpaca = [{"instruction": turn[0][1], "input": "", "output": turn[1][1]} for turn in turns]
    chats = [{"conversations": [{"from": who, "value": text} for who, text in turn]} for turn in turns]
    for name, records in (("data", alpaca), ("texts", alpaca), ("chat", chats)):
        (path / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def local(folder: Path, text: str) -> str:
    text = re.sub(r"base_model: \S+", f"base_model: {folder / 'model'}", text)
    text = re.sub(r"path: (tatsu-lab/alpaca|teknium/\S+|data.jsonl)", f"path: {folder / 'data.jsonl'}", text)
    text = re.sub(r"path: (\w+\.jsonl)", rf"path: {folder}/\1", text)
    text = text.replace("<|end_of_text|>", "</s>")  # of the tokenizer here
    return re.sub(r"bf16: \S+", "bf16: false", text)  # slow on a CPU


def trained(folder: Path, text: str, *flags: str) -> list[dict]:
    Path("axolotl.yml").write_text(local(folder, text))
    config = load("axolotl.yml", [*SHORT, "--job.dump_folder=run", *flags], check_model=True)
    Trainer(config).train()
    return rows(Path("run"))


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SHARDLINE_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("example", SEEDS, ids=lambda example: example.name)
def test_the_configs_of_the_guides_train(folder, example):
    written = trained(folder, example.text, *ONE_RANK)
    assert [row["step"] for row in written] == [1, 2]
    assert list(Path("run/checkpoint/step-2").glob("*.safetensors"))


def test_a_config_with_validation_trains(folder):
    written = trained(
        folder, COMMON.replace("loss_watchdog_threshold: 5.0", "loss_watchdog_threshold: 50.0"), *ONE_RANK
    )
    assert any("validation_loss" in row for row in written)


@pytest.mark.parametrize("text", [CHAT, TEXTS, FULL + "optimizer: sgd\n"], ids=["chat", "texts", "sgd"])
def test_other_data_and_optimizers_train(folder, text):
    assert len(trained(folder, text)) == 2


def test_a_one_cycle_schedule_changes_rate_and_momentum(folder):
    """Two steps of OneCycleLR with no warmup: half of the way down, and its end."""
    written = trained(folder, FULL + "lr_scheduler: one_cycle\nwarmup_steps: 0\nmax_steps: 2\n")
    end = 1 / 25e4
    assert [row["lr"] for row in written] == pytest.approx([2e-5 * (1 + end) / 2, 2e-5 * end])
    text = Path("run/config.toml").read_text()
    assert "momentum_range = [0.85, 0.95]" in text


def test_adafactor_trains_rows_of_fused_weights(folder):
    text = FULL.replace("2e-5", "1e-2") + "optimizer: adafactor\nunfrozen_parameters: [.*0.self_attn.v_proj, .*norm]\n"
    written = trained(folder, text, "--training.steps=6")
    assert written[-1]["loss"] < written[0]["loss"]
    assert "1 tensor trained in part" in Path("run/log/rank-0.log").read_text()


def test_keys_of_older_guides_have_their_effect(folder):
    text = COMMON.replace("5.0", "50.0").replace("lr_scheduler: cosine", "lr_scheduler: rex")
    text += """
neftune_noise_alpha: 5
dataset_exact_deduplication: true
early_stopping_patience: 1
unfrozen_parameters: ["^model.layers.1.mlp.down_proj", "^lm_head.weight$"]
"""
    text = text.replace("learning_rate: 2e-4", "learning_rate: 1e-30")
    written = trained(folder, text, *ONE_RANK, "--training.steps=12", "--validation.freq=3")
    assert max(row["step"] for row in written) == 3
    log = Path("run/log/rank-0.log").read_text()
    assert "28,672 of" in next(line for line in log.splitlines() if line.startswith("trained "))
    assert "the run ends here (validation.patience)" in log


@pytest.mark.parametrize(
    "text",
    [COMMON.replace("5.0", "50.0") + LORA, QLORA.replace("5.0", "50.0")],
    ids=["lora", "qlora"],
)
def test_adapters_train_and_are_written_as_peft_reads_them(folder, text):
    trained(folder, text + "lora_rank_pattern: {down_proj: 2}\n", *ONE_RANK)
    written = json.loads(Path("run/checkpoint/step-2/adapter_config.json").read_text())
    assert written["rank_pattern"] == {"down_proj": 2}


@pytest.mark.slow
def test_ranks_are_given_on_the_command_line(folder):
    Path("axolotl.yml").write_text(local(folder, SEEDS[0].text))
    done = command("train", "axolotl.yml", "--nproc", "2", *SHORT, "--job.dump_folder=run")
    assert done.returncode == 0, done.stderr
    assert "2 ranks: tp 2" in done.stdout + done.stderr
    assert len(rows(Path("run"))) == 2
