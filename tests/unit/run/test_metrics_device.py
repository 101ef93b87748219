"""The device: its choice, peak and memory, and the FLOPs of a token."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from shardline.config.architecture import Architecture
from shardline.models.decoder import Decoder
from shardline.run.device import (
    available_memory,
    choose_device,
    device_identity,
    device_name,
    flops_by_part,
    flops_per_token,
    peak_by_name,
    peak_flops,
    peak_memory_gib,
    reset_peak,
    supports_bf16,
)

CPU = torch.device("cpu")


def test_ranks_share_what_the_machine_and_its_control_group_leave(monkeypatch):
    files = {"meminfo": "MemTotal: 9000 kB\nMemAvailable: 4000 kB\n", "memory.max": "3000000"}
    files["memory.current"] = "1000000"
    monkeypatch.setattr(Path, "read_text", lambda self, *more, **options: files[self.name])
    assert available_memory(CPU, 4) == 500_000
    files["memory.max"] = "max"
    assert available_memory(CPU, 2) == 2000 * 1024


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA H200", 989.4),
        ("NVIDIA H200 NVL", 835.5),
        ("NVIDIA GH200 480GB", 989.4),
        ("NVIDIA B200", 2250),
        ("NVIDIA GB200", 2500),
        ("NVIDIA L40S", 362.1),
        ("NVIDIA L4", 121),
        ("NVIDIA A10", 125),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("AMD Instinct MI300X", 1307.4),
        ("NVIDIA A10G", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("Tesla V100-SXM2-16GB", None),
        ("Some Future Card", None),
    ],
)
def test_peak_by_name(name, tflops):
    assert peak_by_name(name) == (None if tflops is None else pytest.approx(tflops * 1e12))


def test_peak_is_for_16_bit_products_of_known_devices(monkeypatch):
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: "NVIDIA H200")
    cuda = torch.device("cuda", 0)
    assert peak_flops(cuda, torch.bfloat16) == pytest.approx(989.4e12)
    assert peak_flops(cuda, torch.float32) is None
    assert peak_flops(CPU, torch.bfloat16) is None


def test_ranks_choose_their_gpu(monkeypatch):
    chosen = []
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    monkeypatch.setattr("torch.cuda.set_device", chosen.append)
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert choose_device() == torch.device("cuda", 3)
    assert chosen == [torch.device("cuda", 3)]
    monkeypatch.setenv("LOCAL_RANK", "6")
    assert choose_device() == torch.device("cuda", 2)  # in turn
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert choose_device() == CPU


def test_cpu_has_a_name_and_bf16():
    assert device_name(CPU)
    assert supports_bf16(CPU)


PEAKS = """
import torch
from shardline.run.device import peak_memory_gib, reset_peak
cpu = torch.device("cpu")
print(peak_memory_gib(cpu))
held = torch.ones(300 * 2**20 // 4)
print(peak_memory_gib(cpu))
del held
print(peak_memory_gib(cpu))
reset_peak(cpu)
print(peak_memory_gib(cpu))
"""


def test_peak_memory_of_the_cpu_follows_what_is_held_can_be_reset_and_is_not_that_of_the_starting_process():
    """In a process of its own: what earlier tests have left of memory is not given back at a known time."""
    ours = torch.ones(2**30 // 4)
    child = subprocess.run([sys.executable, "-c", PEAKS], capture_output=True, text=True, check=True)
    first, with_it, without, again = map(float, child.stdout.split())
    assert first < ours.nbytes / 2**30
    assert with_it > first + 0.25
    assert without == pytest.approx(with_it, abs=0.01)
    assert again < with_it - 0.25


EIGHT_LAYERS = Architecture(dim=4096, n_layers=8, n_heads=32, n_kv_heads=8, ffn_dim=14336, vocab_size=128256)


def test_flops_follow_the_convention_of_the_published_figures():
    """34,742 tokens/s of this shape at sequence 8192 are published as 59.2 % of 989 TFLOP/s."""
    assert flops_per_token(EIGHT_LAYERS, 8192) * 34742 / 989e12 == pytest.approx(0.592, abs=0.0005)


def test_tied_head_is_counted_as_the_product_it_is():
    tied = EIGHT_LAYERS.with_overrides({"tie_word_embeddings": True})
    assert flops_per_token(tied, 8192) == flops_per_token(EIGHT_LAYERS, 8192)


@pytest.mark.parametrize("q_rank", [None, 16])
def test_flops_of_latent_attention_are_those_that_run(monkeypatch, q_rank):
    """PyTorch's own count of forward and backward, which has no norms, with values as narrow as they are."""
    monkeypatch.setattr("shardline.models.attention.as_wide_as", lambda q, v: v)
    monkeypatch.setattr("shardline.models.products.cpu_product.onednn", lambda: None)  # its products are not counted
    sizes = {"kv_rank": 12, "q_rank": q_rank, "nope_dim": 10, "rope_dim": 6, "v_dim": 8}
    arch = Architecture(dim=32, n_layers=2, n_heads=4, ffn_dim=48, vocab_size=64, latent=sizes)
    model, tokens = Decoder(arch), torch.zeros(2, 24, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        model(tokens).sum().backward()
    norms = sum(p.numel() for name, p in model.named_parameters() if name.endswith("norm.weight"))
    assert counter.get_total_flops() == tokens.numel() * (flops_per_token(arch, 24) - 6 * norms)


@pytest.mark.parametrize(
    "changes", [{}, {"qkv_bias": True, "out_bias": True, "mlp_bias": True}, {"qk_norm": True, "head_dim": 16}]
)
def test_flops_count_the_parameters_of_the_model(changes):
    arch = Architecture(dim=32, n_layers=2, n_heads=4, ffn_dim=48, vocab_size=64).with_overrides(changes)
    with torch.device("meta"):
        model = Decoder(arch)
    multiplied = sum(p.numel() for p in model.parameters()) - model.tok_embeddings.weight.numel()
    assert flops_per_token(arch, 128) == 6 * multiplied + 12 * 2 * 4 * arch.head_dim * 128


def test_flops_count_the_experts_that_a_token_uses():
    moe = {"n_experts": 8, "top_k": 2, "expert_dim": 24, "shared_dim": 40, "first_dense": 1, "router_bias": True}
    arch = Architecture(dim=32, n_layers=3, n_heads=4, ffn_dim=48, vocab_size=64, moe=moe)
    dense = 4 * 32 * 32 + 2 * 32 + 3 * 32 * 48 + 2 * 4 * 8 * 128
    sparse = dense - 3 * 32 * 48 + 8 * 32 + 8 + 2 * 3 * 32 * 24 + 3 * 32 * 40
    assert flops_by_part(arch, 128) == ([6 * dense, 6 * sparse, 6 * sparse], 6 * (32 + 64 * 32))
    assert flops_per_token(arch, 128) == 6 * (dense + 2 * sparse + 32 + 64 * 32)


@pytest.mark.gpu
def test_cuda_peak_memory_counts_from_the_reset():
    device = choose_device()
    held = torch.empty(2**28, dtype=torch.uint8, device=device)
    assert peak_memory_gib(device) >= 0.25
    del held
    reset_peak(device)
    assert peak_memory_gib(device) < 0.25
    assert supports_bf16(device)


def test_ranks_that_share_a_gpu_are_one_device(monkeypatch):
    uuids = {0: "GPU-a", 1: "GPU-b"}
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=uuids[device.index]))
    gpus = [torch.device("cuda", 0), torch.device("cuda", 0), torch.device("cuda", 1)]
    assert len({device_identity(gpu, rank) for rank, gpu in enumerate(gpus)}) == 2
    assert len({device_identity(CPU, rank) for rank in range(3)}) == 3
