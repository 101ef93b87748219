"""What a layer keeps for its backward: the real block runs on tensors without memory, and what autograd saves counts.

The trace records which operation made each tensor, so it covers three ways to run a block:

    cpu        everything that autograd saves
    eager      on a GPU: norms and SwiGLU are kernels that keep their input and recompute the rest
    compiled   the results of products, attention and collectives from which the saved tensors follow, and the block's
               input: the compiler recomputes elementwise operations

Selective checkpointing by operation keeps the block's input and what its policy (`memory/activation.py`) saves.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardline.comm.fake import fake_group, fake_tensors
from shardline.comm.mesh import Mesh
from shardline.config.architecture import Architecture
from shardline.config.layout import Layout
from shardline.config.schema import Config
from shardline.memory.activation import kept_attention_ops, product_shape, travels
from shardline.models.attention import make_masks
from shardline.models.decoder import Block, Decoder
from shardline.models.dtensor import local
from shardline.models.feed_forward import columns
from shardline.parallel.apply import make_model, tensor_plan
from shardline.precision.mixed import Precision

# Parts of the names of operations whose results the compiler keeps instead of recomputing them.
COSTLY = ("mm", "linear", "attention", "c10d", "shardline::")
WAYS = ("cpu", "eager", "compiled", "op", "full")  # the last two are policies, the same for every way to run a block
TOKENS = 256  # of the shorter of two traces; their difference shows which memory grows with tokens


class Kept(NamedTuple):
    """What one layer of a kind keeps of one micro-batch."""

    per_token: float  # bytes
    fixed: float  # bytes

    def bytes(self, tokens: float) -> float:
        return self.fixed + self.per_token * tokens


def trace_layers(arch: Architecture, config: Config, tp: int, precision: Precision) -> dict[bool, dict[str, Kept]]:
    """Return what layers without and with experts keep on one of `tp` ranks, for each way to run and each policy.

    Context and expert parallelism do not change what a rank keeps of each of its tokens.
    """
    kinds, layout = _one_layer_of_each(arch), Layout(tp=tp)
    config = config.replace({"activation_checkpoint.mode": "none", "compile.enable": False})
    short, long = (_trace(arch, config, layout, precision, kinds, tokens) for tokens in (TOKENS, 2 * TOKENS))
    return {kind: {way: _line(short[kind][way], long[kind][way]) for way in WAYS} for kind in kinds}


def _line(short: float, long: float) -> Kept:
    return Kept((long - short) / TOKENS, max(0.0, 2 * short - long))


def _one_layer_of_each(arch: Architecture) -> dict[bool, int]:
    if arch.moe is None:
        return {False: 0}
    layers = {arch.moe.holds(layer): layer for layer in reversed(range(arch.n_layers))}
    return {kind: layers[kind] for kind in sorted(layers)}


def _trace(
    arch: Architecture,
    config: Config,
    layout: Layout,
    precision: Precision,
    kinds: dict[bool, int],
    tokens: int,
) -> dict[bool, dict[str, float]]:
    with _silent(), fake_group(0, layout.world_size):
        model, _ = make_model(
            arch, config, Mesh(layout, "cpu", apart=config.parallelism.data_parallel_mode != "sync"), precision
        )
        with fake_tensors():
            for module in model.modules():
                module.to_empty(device="cpu", recurse=False)
            model.train()
            plan = tensor_plan(config, layout)
            rows = tokens // plan.degree if plan is not None and plan.sequence_parallel else tokens
            return {kind: _kept(model, model.block(layer), layout, tokens, rows) for kind, layer in kinds.items()}


@contextmanager
def _silent() -> Iterator[None]:
    """Silence the log: messages from building the traced model do not concern the run."""
    log = logging.getLogger("shardline")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def _kept(model: Decoder, block: Block, layout: Layout, tokens: int, rows: int) -> dict[str, float]:
    spec = block.spec
    found = _run(model, block, layout, tokens, rows).kept(("cpu",))
    if spec.ffn_products.column is columns:  # a partial avoids the function that only a CPU uses
        block.spec = spec._replace(ffn_products=spec.ffn_products._replace(column=functools.partial(columns)))
    found |= _run(model, block, layout, tokens, rows).kept(WAYS[1:])
    block.spec = spec
    return found


def _run(model: Decoder, block: Block, layout: Layout, tokens: int, rows: int) -> Tape:
    """Return the tape of one block's forward pass over one sequence, of which a rank's residual stream has `rows`."""
    dtype, numbers = model.compute_dtype or torch.float32, torch.zeros(1, tokens, dtype=torch.int64)
    cos, sin, *_ = model._rope(numbers, None, None)
    mask = make_masks(model.arch, numbers, dtype, None, None)[block.window]
    dim = model.arch.dim
    shape = (1, tokens, dim) if layout.tp == 1 else (rows, dim)
    x = torch.empty(shape, dtype=dtype, requires_grad=True)
    tape = Tape(x, {_storage(local(parameter)) for parameter in block.parameters()})
    with tape, torch.autograd.graph.saved_tensors_hooks(tape.save, _same):
        out = block(x, *((cos, sin) if block.rotates else (None, None)), mask, (1, tokens), None)
    tape.out = _storage(out)
    return tape


def _same(x: Tensor) -> Tensor:
    return x


def _storage(x: Tensor) -> int:
    return x.untyped_storage()._cdata


class Tape(TorchDispatchMode):
    """Records which operation made each tensor, and which tensors autograd saved."""

    def __init__(self, x: Tensor, parameters: set[int]) -> None:
        super().__init__()
        self.first = first = _storage(x)
        self.parameters, self.out = parameters, -1
        self.sizes: dict[int, int] = {first: x.untyped_storage().nbytes()}
        self.roots: dict[int, frozenset[int]] = {first: frozenset([first])}  # costly results that a tensor follows from
        self.narrow: dict[int, int] = {}  # float32 copy -> what it was copied from
        self.wide: set[int] = set()
        self.gated: set[int] = set()  # intermediate results of SwiGLU
        self.saved: dict[int, Tensor] = {}
        self.alive: list[Tensor] = []  # so that no storage's address is reused
        self.policy: set[int] = {first}  # what selective checkpointing by operation keeps
        self.products = 0

    def save(self, x: Tensor) -> Tensor:
        self.saved[_storage(x)] = x
        return x

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        made = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        self.alive += made
        name, read = func.name(), [_storage(x) for x in given]
        costly = any(part in name for part in COSTLY)
        self._apply_policy(func, args, made)
        for x in given if name.startswith("c10d") else ():  # a collective writes into an existing tensor
            self.roots[_storage(x)] = frozenset([_storage(x)])
        for x in made:
            key = _storage(x)
            if key in read:  # a view, or changed in place
                continue
            self.sizes[key] = x.untyped_storage().nbytes()
            before = frozenset().union(*(self.roots.get(other, frozenset()) for other in read))
            self.roots[key] = frozenset([key]) if costly else before
            self._remember(name, key, x, given, read)
        return out

    def _remember(self, name: str, key: int, x: Tensor, given: list[Tensor], read: list[int]) -> None:
        if given and x.dtype == torch.float32 and given[0].dtype in (torch.bfloat16, torch.float16):
            self.narrow[key] = read[0]
        elif any(other in self.narrow or other in self.wide for other in read) and x.dtype == torch.float32:
            self.wide.add(key)
        if "silu" in name or "gelu" in name or ("mul" in name and any(other in self.gated for other in read)):
            self.gated.add(key)

    def _apply_policy(self, func: Any, args: Any, made: list[Tensor]) -> None:
        if product_shape(func, args) is not None:
            self.products += 1
            if self.products % 2 == 0:
                return
        elif func not in kept_attention_ops() and not travels(func):
            return
        self.policy |= {_storage(x) for x in made}

    def kept(self, ways: tuple[str, ...]) -> dict[str, float]:
        """Return the bytes kept until backward, except weights and the block's result (the next block's input)."""
        saved = {key for key in self.saved if key in self.sizes}
        keys = {
            "cpu": saved,
            "eager": {self.narrow.get(key, key) for key in saved - self.gated - self.wide},
            "compiled": set().union(*(self.roots[key] for key in saved)),
            "op": self.policy,
            "full": {self.first},
        }
        without = self.parameters | {self.out}
        return {way: float(sum(self.sizes.get(key, 0) for key in keys[way] - without)) for way in ways}
