"""Compares every attention kernel with plain float32 attention, and times forward and backward. One JSON line each.

python benchmarks/attention.py                     the size of Llama 3 8B at 8192 tokens; tiny on a CPU
python benchmarks/attention.py --compile           the same inside a compiled function
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import torch
from torch import Tensor

from shardline.config.architecture import Architecture
from shardline.models.attention import AttentionMask, attention, choose_kernel, make_mask

CAUSAL = ("cudnn", "flash", "efficient", "sdpa", "varlen", "flex")
MASKED = ("sdpa", "varlen", "flex")


def packed_documents(batch: int, length: int, average: int) -> Tensor:
    """Return document numbers (B, S) of documents whose lengths vary around `average`."""
    generator = torch.Generator().manual_seed(0)
    starts = torch.rand(batch, length, generator=generator) < 1 / average
    return starts.cumsum(1).int()


def inputs(options: argparse.Namespace, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    """Return queries, keys, values and the result's gradient; values are a view of a fused product, as in a block."""
    generator = torch.Generator(device).manual_seed(0)
    group = options.heads // options.kv_heads
    shape = (options.batch, options.length, options.kv_heads, group + 2, options.head_dim)
    fused = torch.randn(shape, device=device, generator=generator).to(dtype)
    q, k, v = fused.split((group, 1, 1), dim=3)
    grad = torch.randn(q.shape, device=device, generator=generator).to(dtype)
    return [q.flatten(2, 3), k.flatten(2, 3), v.squeeze(3), grad.flatten(2, 3)]


def results(tensors: list[Tensor], mask: AttentionMask, function: Any) -> list[Tensor]:
    """Return the output and the gradients of queries, keys and values."""
    leaves = [tensor.detach().requires_grad_() for tensor in tensors[:3]]
    out = function(*leaves, mask)
    return [out.detach(), *torch.autograd.grad(out, leaves, tensors[3])]


def reference(tensors: list[Tensor], allowed: Tensor | None) -> list[Tensor]:
    """Compute plain float32 attention, one KV head of one row at a time: all S x S scores of 32 heads would not fit."""
    batch, _, heads, _ = tensors[0].shape
    kv_heads = tensors[1].shape[2]
    group = heads // kv_heads
    parts: list[list[list[Tensor]]] = []
    for b in range(batch):
        row = None if allowed is None else allowed[b if allowed.shape[0] > 1 else 0][None]
        parts.append([])
        for kv in range(kv_heads):
            q_heads, kv_head = slice(kv * group, (kv + 1) * group), slice(kv, kv + 1)
            picked = [tensors[i][b : b + 1, :, q_heads if i in (0, 3) else kv_head].float() for i in range(4)]
            parts[-1].append(results(picked, AttentionMask("math", allowed=row), attention))
    return [torch.cat([torch.cat([kv[i] for kv in row], dim=2) for row in parts]) for i in range(4)]


def seconds(tensors: list[Tensor], mask: AttentionMask, function: Any, repeats: int) -> float:
    """Return the median times of forward and backward."""
    cuda = tensors[0].is_cuda
    times = []
    for _ in range(repeats + 2):
        if cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
        results(tensors, mask, function)
        if cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return sorted(times[2:])[repeats // 2]


def floating_operations(options: argparse.Namespace, allowed: Tensor | None) -> float:
    """Return the FLOPs: 2 matrix products forward, 5 backward, over the allowed pairs."""
    if allowed is None:
        pairs = options.batch * options.length * (options.length + 1) / 2
    else:
        pairs = float(allowed.sum()) * (options.batch if allowed.shape[0] == 1 else 1)
    return 7 * 2 * pairs * options.heads * options.head_dim


def measure(kernel: str, case: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    row: dict[str, Any] = {"mask": case["name"], "kernel": kernel}
    try:
        mask = make_mask(case["arch"], case["tokens"], case["dtype"], case["window"], case["documents"], kernel=kernel)
        torch._dynamo.reset()
        function = torch.compile(attention, fullgraph=True) if options.compile else attention
        found = results(case["tensors"], mask, function)
        for name, one, two in zip(("out", "dq", "dk", "dv"), found, case["expected"], strict=True):
            row[f"{name}_max"] = float((one.float() - two).abs().max())
            row[f"{name}_relative"] = float((one.float() - two).norm() / two.norm())
        row["milliseconds"] = 1e3 * seconds(case["tensors"], mask, function, options.repeats)
        row["tflops"] = floating_operations(options, case["allowed"]) / row["milliseconds"] / 1e9
    except Exception as error:  # an unavailable kernel is a result too
        row["error"] = f"{type(error).__name__}: {str(error)[:160]}"
    return row


def cases(options: argparse.Namespace, device: torch.device, dtype: torch.dtype) -> list[dict[str, Any]]:
    arch = Architecture(
        dim=options.heads * options.head_dim,
        n_layers=1,
        n_heads=options.heads,
        n_kv_heads=options.kv_heads,
        ffn_dim=8,
        vocab_size=8,
    )
    tokens = torch.zeros(options.batch, options.length, dtype=torch.int64, device=device)
    documents = packed_documents(options.batch, options.length, options.length // 8).to(device)
    window = options.length // 8
    rows = []
    for name, size, packed in (
        ("causal", 0, None),
        ("block_causal", 0, documents),
        ("window", window, None),
        ("block_causal+window", window, documents),
    ):
        allowed = make_mask(arch, tokens, torch.float32, size, packed, kernel="sdpa").allowed
        chosen = choose_kernel(arch, device, dtype, plain=size == 0 and packed is None)
        row = {"name": name, "window": size, "documents": packed, "allowed": allowed, "chosen": chosen}
        rows.append({**row, "arch": arch, "tokens": tokens, "dtype": dtype, "tensors": inputs(options, device, dtype)})
    return rows


def main() -> None:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--length", type=int, default=8192 if cuda else 64)
    parser.add_argument("--heads", type=int, default=32 if cuda else 4)
    parser.add_argument("--kv-heads", type=int, default=8 if cuda else 2)
    parser.add_argument("--head-dim", type=int, default=128 if cuda else 16)
    parser.add_argument("--repeats", type=int, default=10 if cuda else 3)
    parser.add_argument("--compile", action="store_true")
    options = parser.parse_args()
    device = torch.device("cuda" if cuda else "cpu")
    for case in cases(options, device, torch.bfloat16 if cuda else torch.float32):
        case["expected"] = reference(case["tensors"], case["allowed"])
        for kernel in CAUSAL if case["name"] == "causal" else MASKED:
            row = measure(kernel, case, options)
            print(json.dumps({**row, "chosen": kernel == case["chosen"]}), flush=True)


if __name__ == "__main__":
    main()
