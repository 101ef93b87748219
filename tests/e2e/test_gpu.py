"""What only a CUDA device shows: the numbers of a CPU, bitwise repetition, packed documents on every kernel."""

import json
import os
import subprocess
import sys

import pytest
import torch

from shardline.models.dtensor import local
from shardline.training.trainer import Trainer
from tests.e2e.tiny import flags, rows, run, tiny_config

pytestmark = pytest.mark.gpu
KERNEL_SIZES = {"head_dim": 64, "attn_mask_type": "block_causal"}


def numbers(written):
    return [tuple(row[key] for key in ("loss", "grad_norm", "validation_loss") if key in row) for row in written]


def test_float32_on_cuda_gives_the_cpu_numbers(tmp_path, monkeypatch):
    settings = {"training__mixed_precision_param": "float32", "training__steps": 10}
    on_gpu = numbers(run(tmp_path / "cuda", **settings))
    monkeypatch.setattr("shardline.training.setup.choose_device", lambda: torch.device("cpu"))
    on_cpu = numbers(run(tmp_path / "cpu", **settings))
    for a, b in zip(on_gpu, on_cpu, strict=True):
        assert a == pytest.approx(b, rel=1e-4)


@pytest.mark.parametrize("compiled", [False, True])
def test_deterministic_runs_are_bitwise_equal(tmp_path, compiled):
    settings = {"debug__deterministic": True, "compile__enable": compiled}
    assert numbers(run(tmp_path / "a", **settings)) == numbers(run(tmp_path / "b", **settings))


def test_a_resumed_run_is_bitwise_the_uninterrupted_one(tmp_path):
    settings = {"checkpoint__enable": True, "checkpoint__interval": 3, "checkpoint__last_save_model_only": False,
                "debug__deterministic": True, "lr_scheduler__total_steps": 6}  # fmt: skip
    whole = numbers(run(tmp_path / "whole", **settings))
    run(tmp_path / "parts", training__steps=3, **settings)
    assert numbers(run(tmp_path / "parts", **settings)) == whole


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("backend", ["flex", "varlen"])
def test_packed_documents_on_every_kernel(tmp_path, backend, compiled):
    overrides = {**tiny_config(tmp_path).model.overrides, **KERNEL_SIZES}
    settings = {"training__seq_len": 256, "compile__enable": compiled}
    plain = run(tmp_path / "sdpa", model__overrides={**overrides, "attn_backend": "sdpa"}, training__seq_len=256)
    other = run(tmp_path / backend, model__overrides={**overrides, "attn_backend": backend}, **settings)
    for a, b in zip(plain, other, strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-2)
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=5e-2)


def test_pinned_memory_and_workers(tmp_path):
    plain = numbers(run(tmp_path / "plain"))
    workers = {"training__dataloader__num_workers": 2, "training__dataloader__pin_memory": True}
    assert numbers(run(tmp_path / "workers", **workers)) == pytest.approx(plain, rel=1e-3)


@pytest.mark.parametrize("early", [False, True])
def test_weights_in_host_memory_give_the_same_numbers(tmp_path, early):
    """The CPU steps with gradients that have arrived, and the GPU computes with weights that have."""
    settings = {"training__mixed_precision_param": "float32", "training__steps": 10, "training__max_norm": 0.0}
    plain = numbers(run(tmp_path / "plain", **settings))
    settings |= {"training__enable_cpu_offload": True, "optimizer__early_step_in_backward": early}
    trainer = Trainer(tiny_config(tmp_path / "offload", **settings))
    trainer.train()
    assert all(local(parameter).is_pinned() for parameter in trainer.model.parameters())
    for a, b in zip(numbers(rows(tmp_path / "offload")), plain, strict=True):
        assert a == pytest.approx(b, rel=1e-4)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"training__gradient_accumulation_steps": 3},
        {"lora__enable": True, "lora__target_modules": ["all-linear"]},
        {"activation_checkpoint__mode": "selective"},
        {"validation__enable": True, "validation__freq": 2, "validation__steps": 1, "validation__seq_len": 16},
        {"training__dtype": "bfloat16"},
        {"optimizer__name": "SGD"},
    ],
    ids=lambda settings: ",".join(settings) or "plain",
)
def test_recorded_passes_give_the_same_bits(tmp_path, settings):
    settings = {"compile__enable": True, "debug__deterministic": True, "training__steps": 8, **settings}
    plain = numbers(run(tmp_path / "plain", **settings))
    assert numbers(run(tmp_path / "recorded", compile__cuda_graphs=True, **settings)) == plain
    engaged = json.loads((tmp_path / "recorded/engaged.json").read_text())
    assert engaged["cuda_graphs"] == (2 if "training__gradient_accumulation_steps" in settings else 1)


def test_recorded_passes_go_on_from_a_checkpoint(tmp_path):
    settings = {"checkpoint__enable": True, "checkpoint__interval": 4, "debug__deterministic": True,
                "lr_scheduler__total_steps": 8, "compile__enable": True, "compile__cuda_graphs": True}  # fmt: skip
    whole = numbers(run(tmp_path / "whole", training__steps=8, **settings))
    run(tmp_path / "parts", training__steps=4, **settings)
    assert numbers(run(tmp_path / "parts", training__steps=8, **settings)) == whole


def test_a_second_start_compiles_no_kernel(tmp_path):
    caches = {"HOME": str(tmp_path), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "caches")}
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_CACHE_DIR"}
    kernels = []
    for name in ("first", "second"):
        command = [sys.executable, "-m", "shardline", "train", *flags(tmp_path / name, compile__enable=True)]
        subprocess.run(command, env={**kept, **caches}, check=True, capture_output=True)
        kernels.append(sorted(str(file) for file in tmp_path.rglob("*.cubin")))
    assert kernels[0]
    assert kernels[0] == kernels[1]
