"""Records what the first step of a run really did: `engaged.json` in its folder, and a table in its log.

Nothing is copied from the config. A dispatch mode observes the operations of the step. The compiler does not work under
such a mode, so for compiled blocks, the graphs given to it are read. Tensors saved for backward are counted as a block
saves them, and products of tensor-parallel ranks are noted when their backend is looked up.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardline.memory.activation import kept_results
from shardline.models.decoder import Decoder
from shardline.parallel.apply import Applied
from shardline.parallel.compiled_graphs import Operations
from shardline.parallel.replicas.groups import ReplicaGroups
from shardline.parallel.tensor.backend_table import choices
from shardline.storage.atomic import write_atomically
from shardline.words import TableRows, counted, listed, sized

FILE = "engaged.json"
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "matmul")
PARTS_OF_PRODUCTS = ("linear", "scaled_mm", "grouped")  # in names of operations, including ours
ATTENTION = ("scaled_dot_product", "flex_attention", "varlen_attn", "shared_attention", "partial_attention")
UPDATES = {"_fused_": "fused", "_foreach_": "foreach"}  # in operation names of an update; the first found counts


class StepObserver:
    """Watches one step of this rank; `found` is what it saw."""

    def __init__(
        self, model: Decoder, optimizer: torch.optim.Optimizer, applied: Applied, served: bool = False
    ) -> None:
        """`served`: threads of a parameter server make the updates, at any time, so they are not watched."""
        self.model, self.optimizer, self.applied, self.served = model, optimizer, applied, served
        self.operations: Operations = Counter()
        self.updates: Operations = Counter()
        self.kept: dict[str, int] = {}  # layer -> bytes that its last forward pass saved
        self.in_backward = False  # whether the optimizer stepped inside backward
        self.groups: ReplicaGroups | None = None
        self.found: dict[str, Any] = {}

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        choices.ran = set()
        with contextlib.ExitStack() as stack:
            stack.callback(setattr, choices, "ran", None)
            stack.enter_context(self._counting_what_blocks_keep())
            if not self.served:
                stack.enter_context(self._seeing_updates())
            if self.applied.graphs is None:
                stack.enter_context(_Seeing(self.operations))
            yield
            self.found = self._found()

    @contextlib.contextmanager
    def _counting_what_blocks_keep(self) -> Iterator[None]:
        blocks = dict(zip(self.model.layers, self.model.blocks(), strict=True))
        plain = {layer: block.function for layer, block in blocks.items()}
        for layer, block in blocks.items():
            block.function = functools.partial(self._counted, layer, block.function)
        try:
            yield
        finally:
            for layer, block in blocks.items():
                block.function = plain[layer]

    def _counted(self, layer: str, function: Callable[..., Any], x: Tensor, *others: Any) -> Any:
        if not torch.is_grad_enabled():
            return function(x, *others)
        given = {_place(one) for one in tree_leaves(others) if isinstance(one, Tensor)}  # weights, tables, masks
        kept: dict[int, int] = {}

        def keep(tensor: Tensor) -> Tensor:
            if _place(tensor) not in given:
                kept[_place(tensor)] = tensor.untyped_storage().nbytes()
            return tensor

        kept_results.size = 0
        try:
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                out = function(x, *others)
            self.kept[layer] = sum(kept.values()) + kept_results.size
        finally:
            kept_results.size = None
        return out

    @contextlib.contextmanager
    def _seeing_updates(self) -> Iterator[None]:
        """Observe what the optimizer calls, even if blocks are compiled."""
        seeing = _Seeing(self.updates, everything=True)

        def before(*_: Any) -> None:
            self.in_backward = torch._C._current_graph_task_id() != -1
            seeing.__enter__()

        def after(*_: Any) -> None:
            seeing.__exit__(None, None, None)

        handles = [self.optimizer.register_step_pre_hook(before), self.optimizer.register_step_post_hook(after)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _update(self) -> str:
        return _update(self.optimizer, self.updates) + (", inside backward" if self.in_backward else "")

    def _found(self) -> dict[str, Any]:
        graphs, ran = self.applied.graphs, choices.ran or set()
        seen = sum(graphs or [], Counter(self.operations))
        products = {name: count for name, count in seen.items() if _is_product(name[0])}
        attention = {name: count for name, count in seen.items() if any(part in name[0] for part in ATTENTION)}
        kept = self.kept.values()
        return {
            "compiled_graphs": len(graphs or []),
            "cuda_graphs": self.applied.cuda_graphs,
            "blocks": len(self.kept),
            "kept_bytes": sum(kept),
            "kept_bytes_of_a_block": max(kept, default=0),
            "offloaded_bytes": 0 if self.applied.offload is None else self.applied.offload.sent,
            "attention": _words(attention),
            "products": _words(products),
            "tensor_parallel": {str(product): str(choice) for product, choice in sorted(ran, key=str)},
            "optimizer": type(self.optimizer).__name__,
            "update": "by the parameter server" if self.served else self._update(),
            **({} if self.groups is None else {"replica_groups": self.groups.engaged()}),
        }


class _Seeing(TorchDispatchMode):
    def __init__(self, seen: Operations, everything: bool = False) -> None:
        super().__init__()
        self.seen, self.everything = seen, everything

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Do not interfere with separately compiled functions: one that the compiler skips once is never compiled."""
        return True

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        name = function.name()
        if self.everything or _is_product(name) or any(part in name for part in ATTENTION):
            first = next((one for one in tree_leaves(arguments) if isinstance(one, Tensor)), None)
            if not isinstance(first, FakeTensor):  # with fake tensors, the compiler is tracing
                self.seen[name, "" if first is None else str(first.dtype)] += 1
        return function(*arguments, **(options or {}))


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _is_product(name: str) -> bool:
    plain = name.rpartition("::")[2].split(".")[0]
    return plain in PRODUCTS or any(part in plain for part in PARTS_OF_PRODUCTS)


def _words(seen: dict[tuple[str, str], int]) -> dict[str, int]:
    return {f"{name} {dtype.removeprefix('torch.')}".strip(): count for (name, dtype), count in sorted(seen.items())}


def _update(optimizer: torch.optim.Optimizer, seen: Operations) -> str:
    """How the optimizer stepped: with our kernels, with torch's kernels for many tensors, or tensor by tensor."""
    launched = getattr(optimizer, "launched", 0)
    if launched:
        return f"{counted(launched, 'kernel')} of its own"
    found = (word for part, word in UPDATES.items() if any(part in name for name, _ in seen))
    return next(found, "tensor by tensor" if seen else "none")


# ---- what is written -------------------------------------------------------------------------------------------------


def write(folder: Path, step: int, of_ranks: list[dict[str, Any]]) -> None:
    """Write what rank 0 observed, and how other ranks differ."""
    first = of_ranks[0]
    others = {
        str(rank): {key: value for key, value in found.items() if value != first[key]}
        for rank, found in enumerate(of_ranks)
        if found != first
    }
    write_atomically(folder / FILE, json.dumps({"step": step, **first, "other_ranks": others}, indent=1))


def table(found: dict[str, Any]) -> TableRows:
    """Label and value of each row of the log's table."""
    kept = f"{sized(found['kept_bytes_of_a_block'])} saved by a block for backward, {sized(found['kept_bytes'])} in all"
    rows = [
        ("compiled", counted(found["compiled_graphs"], "graph") if found["compiled_graphs"] else "nothing"),
        ("activations", f"{kept}, {sized(found['offloaded_bytes'])} sent to the host"),
        ("attention", listed(list(found["attention"])) or "none seen"),
        ("products", listed(list(found["products"]), most=8) or "none seen"),
        ("optimizer", f"{found['optimizer']}: {found['update']}"),
    ]
    carried = Counter(found["tensor_parallel"].values())
    if carried:
        rows.append(("tensor parallel", ", ".join(f"{count} by {name}" for name, count in carried.items())))
    return rows
