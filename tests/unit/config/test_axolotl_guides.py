"""Axolotl configs of ten kinds as its guides have them, on tiny folders: what they become, and their dry run."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from shardline.cli.main import main
from shardline.config.check import check, checked_layout
from shardline.config.load import load_config

GUIDES = Path(__file__).with_name("guides")
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
    "max_position_embeddings": 16384,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
# name of the file -> model_type, more of config.json, ranks, what it becomes
EXPECTED: dict[str, tuple[str, dict[str, Any], int, dict[str, Any]]] = {
    "llama-3-lora-8b": (
        "llama",
        {},
        2,
        {
            "lora.base_dtype": "int8",
            "lora.rank": 32,
            "lora.rank_pattern": {"down_proj": 8, r"layers\.0\..*": 64},
            "lora.alpha_pattern": {"down_proj": 8.0},
            "lora.modules_to_save": ["embed_tokens", "lm_head"],
            "optimizer.state_dtype": "int8",
            "training.epochs": 4.0,
            "lr_scheduler.warmup_steps": 10,
            "validation.freq_ratio": 1 / 16,
            "checkpoint.interval_ratio": 0.25,
            "data.held_out": 0.05,
            "parallelism.data_parallel_replicate_degree": -1,
        },
    ),
    "qlora-fsdp-70b": (
        "llama",
        {},
        4,
        {
            "lora.base_dtype": "nf4",
            "lora.target_modules": [],
            "training.enable_cpu_offload": True,
            "parallelism.data_parallel_shard_degree": -1,
            "parallelism.fsdp_reshard_after_forward": "always",
            "data.packing": "none",
            "activation_checkpoint.mode": "full",
        },
    ),
    "mistral-full": (
        "mistral",
        {"sliding_window": 4096},
        2,
        {
            "optimizer.name": "Adafactor",
            "optimizer.weight_decay": 0.01,
            "optimizer.decay_norms": False,
            "lr_scheduler.include_ends": True,
            "lr_scheduler.momentum_range": None,
            "lr_scheduler.warmup_start_factor": 0.04,
            "training.neftune_alpha": 5.0,
            "training.max_norm": 0.5,
            "metrics.enable_wandb": True,
            "metrics.wandb_mode": "offline",
            "checkpoint.keep_latest_k": 2,
        },
    ),
    "qwen-dpo": (
        "qwen2",
        {"tie_word_embeddings": True},
        2,
        {
            "training.objective": "dpo",
            "dpo.beta": 0.1,
            "dpo.loss": "sigmoid",
            "data.chat_template": "qwen_25",
            "validation.enable": False,
            "training.gradient_accumulation_steps": 4,
        },
    ),
    "gemma-2-qlora": (
        "gemma2",
        {"sliding_window": 4096, "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 16}
        | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "tie_word_embeddings": True},
        2,
        {
            "lora.base_dtype": "nf4",
            "data.chat_template": "gemma",
            "data.sources": [
                {
                    "path": "cgato/SlimOrcaDedupCleaned",
                    "type": "chat_template",
                    "split": "train[:20%]",
                    "drop_system_message": True,
                }
            ],
            "lr_scheduler.warmup_ratio": 0.1,
            "training.tf32": True,
        },
    ),
    "phi-3-ft": (
        "phi3",
        {"pad_token_id": 0, "original_max_position_embeddings": 16384},
        2,
        {
            "lora.rank": 64,
            "optimizer.beta2": 0.95,
            "optimizer.eps": 1e-5,
            "validation.freq": 1000,
            "validation.patience": 3,
            "checkpoint.interval": 5000,
            "data.chat_template": "phi_3",
        },
    ),
    "mixtral-qlora": (
        "mixtral",
        {"num_local_experts": 4, "num_experts_per_tok": 2},
        2,
        {
            "lora.target_modules": ["q_proj", "v_proj", "k_proj", "o_proj"],
            "lr_scheduler.cycles": 2,
            "training.max_loss": 5.0,
            "parallelism.fsdp_reshard_after_forward": "always",
            "training.enable_cpu_offload": False,
        },
    ),
    "llama-chat-template": (
        "llama",
        {},
        1,
        {
            "lr_scheduler.decay_type": "inverse_sqrt",
            "lora.use_rslora": True,
            "lora.lr_ratio": 16.0,
            "training.steps": 60,
            "activation_checkpoint.mode": "offload",
            "compile.enable": True,
            "checkpoint.interval_ratio": 1.0,
            "validation.freq": 20,
            "data.excess_length": "truncate",
            "debug.seed": 3407,
        },
    ),
    "tinyllama-pretrain": (
        "llama",
        {},
        1,
        {
            "training.steps": 200,
            "data.sources": [{"path": "allenai/c4", "name": "en", "type": "completion", "split": "train[100:]"}],
            "lr_scheduler.decay_steps": 40,
            "lr_scheduler.min_lr_factor": 0.1,
            "checkpoint.interval_ratio": 0.25,
        },
    ),
    "llama-zero3": (
        "llama",
        {"num_hidden_layers": 24},
        8,
        {
            "parallelism.fsdp_reshard_after_forward": "always",
            "parallelism.data_parallel_shard_degree": -1,
            "lr_scheduler.decay_power": 2.0,
            "lr_scheduler.min_lr_factor": 1e-7 / 3e-6,
            "data.train_on_inputs": True,
            "training.local_batch_size": 32,
        },
    ),
}


def test_every_guide_is_here():
    assert {path.stem for path in GUIDES.glob("*.yml")} == EXPECTED.keys()


@pytest.mark.parametrize("name", EXPECTED)
def test_a_guide_becomes_a_native_config_that_can_be_built(name, tmp_path, monkeypatch, capsys):
    kind, more, ranks, expected = EXPECTED[name]
    monkeypatch.chdir(tmp_path)
    Path("tiny").mkdir()
    Path("tiny/config.json").write_text(json.dumps({"model_type": kind, **SIZES, **more}))
    text = (GUIDES / f"{name}.yml").read_text()
    Path("guide.yml").write_text(re.sub(r"base_model: \S+", "base_model: ./tiny", text))
    config = load_config("guide.yml")
    check(config)
    assert checked_layout(config, ranks).world_size == ranks
    for key, value in expected.items():
        found = config.value(key)
        assert found == (pytest.approx(value) if isinstance(value, float) else value), key
    assert main(["config", "guide.yml"]) == 0
    assert "# from learning_rate (line" in capsys.readouterr().out
    assert main(["train", "guide.yml", "--dry-run", "--world-size", str(ranks)]) == 0
    shown = capsys.readouterr()
    assert "Traceback" not in shown.out + shown.err
    assert f"on {ranks} rank" in shown.out
