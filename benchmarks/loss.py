"""Peak memory and time of the loss, forward and backward: chunked compared with whole logits. One JSON line per case.

    python benchmarks/loss.py     # CUDA: 16384 tokens, dim 4096, V 128256, bfloat16; CPU: a small one in float32
    python benchmarks/loss.py --tokens 8192 --vocabulary 32000 --chunks 0 1024 4096

`peak_mib` is what the loss allocates beyond its inputs, including the gradients of hidden states and weight.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardline.training.loss import IGNORE, choose_chunk_tokens, chunked_cross_entropy

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def plain(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    logits = (hidden @ weight.to(hidden.dtype).T).float()
    return F.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="sum") / labels.numel()


def chunked(chunk_tokens: int, compiled: bool) -> Loss:
    def loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        scale, backend = 1 / labels.numel(), "inductor" if compiled else None
        return chunked_cross_entropy(hidden, weight, labels, scale=scale, chunk_tokens=chunk_tokens, backend=backend)

    return loss


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of live tensors made by operations, and their peak (for CPU)."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, int] = {}
        self.now = self.peak = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        out = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._watch(leaf.untyped_storage(), given)
        return out

    def _watch(self, storage: torch.UntypedStorage, given: set[int]) -> None:
        key = storage._cdata
        if key in self.live or key in given:
            return
        self.live[key] = storage.nbytes()
        self.now += self.live[key]
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self.now -= self.live.pop(key, 0)


def step(loss: Loss, hidden: Tensor, weight: Tensor, labels: Tensor) -> None:
    hidden.grad = weight.grad = None
    loss(hidden, weight, labels).backward()


def peak_mib(loss: Loss, hidden: Tensor, weight: Tensor, labels: Tensor) -> float:
    hidden.grad = weight.grad = None
    if hidden.is_cuda:
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step(loss, hidden, weight, labels)
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    with LiveBytes() as memory:
        step(loss, hidden, weight, labels)
    return memory.peak / 2**20


def milliseconds(loss: Loss, inputs: tuple[Tensor, Tensor, Tensor], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        step(loss, *inputs)
        if inputs[0].is_cuda:
            torch.cuda.synchronize()
        times.append(1000 * (time.perf_counter() - start))
    return statistics.median(times)


def measure(name: str, loss: Loss, inputs: tuple[Tensor, Tensor, Tensor], repeats: int) -> dict[str, Any]:
    for _ in range(2):  # compile, choose kernels
        step(loss, *inputs)
    if inputs[0].is_cuda:
        torch.cuda.synchronize()
    row: dict[str, Any] = {"case": name, "milliseconds": round(milliseconds(loss, inputs, repeats), 2)}
    # A dispatch mode does not see allocations of compiled code, so on CPU only eager cases report their peak.
    if inputs[0].is_cuda or "compiled" not in name:
        row["peak_mib"] = round(peak_mib(loss, *inputs), 1)
    return row


def cases(chunks: list[int], compiled: bool) -> list[tuple[str, Loss]]:
    rows: list[tuple[str, Loss]] = [("plain", plain)]
    rows += [(f"chunked {size or 'auto'}", chunked(size, False)) for size in chunks]
    if compiled:
        rows += [("plain compiled", torch.compile(plain))]
        rows += [(f"chunked {size or 'auto'} compiled", chunked(size, True)) for size in chunks]
    return rows


def main() -> None:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tokens", type=int, default=16384 if cuda else 2048)
    parser.add_argument("--dim", type=int, default=4096 if cuda else 256)
    parser.add_argument("--vocabulary", type=int, default=128256 if cuda else 8192)
    parser.add_argument("--dtype", default="bfloat16" if cuda else "float32")
    parser.add_argument("--chunks", type=int, nargs="+", default=[0, 512, 1024, 2048, 4096] if cuda else [0, 128, 512])
    parser.add_argument("--compiled", action=argparse.BooleanOptionalAction, default=cuda)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device("cuda" if cuda else "cpu")
    hidden = torch.randn(options.tokens, options.dim, device=device, dtype=getattr(torch, options.dtype))
    weight = 0.02 * torch.randn(options.vocabulary, options.dim, device=device)
    labels = torch.randint(0, options.vocabulary, (options.tokens,), device=device)
    inputs = hidden.requires_grad_(), weight.requires_grad_(), labels
    machine = torch.cuda.get_device_name() if cuda else f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
    about = {
        "machine": machine,
        "torch": torch.__version__,
        "tokens": options.tokens,
        "dim": options.dim,
        "vocabulary": options.vocabulary,
        "dtype": options.dtype,
        "auto_chunk": choose_chunk_tokens(hidden, options.vocabulary),
        "whole_float32_logits_mib": options.tokens * options.vocabulary * 4 / 2**20,
    }
    for name, loss in cases(options.chunks, options.compiled):
        torch._dynamo.reset()
        print(json.dumps({**measure(name, loss, inputs, options.repeats), **about}), flush=True)


if __name__ == "__main__":
    main()
