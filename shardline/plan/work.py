"""What one rank computes and sends for one micro-batch: products with their real shapes, attention, bytes, collectives.

Everything is arithmetic on an `Architecture` and a `Layout`. Shapes are those of fused weights (QKV in one product,
gate and up in one) after tensor, context and expert parallelism have cut them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from shardline.config.architecture import Architecture, LatentAttention
from shardline.config.layout import Layout, routes_together


class MatrixProduct(NamedTuple):
    """`repeat` products (rows, inner) x (inner, columns)."""

    rows: float
    columns: float
    inner: float
    repeat: float = 1
    experts: bool = False

    @property
    def flops(self) -> float:
        return 2.0 * self.rows * self.columns * self.inner * self.repeat


class Sent(NamedTuple):
    """A collective over an axis; `size` is the whole tensor, as nccl-tests count it."""

    axis: str
    kind: str  # all_gather, reduce_scatter, all_reduce, all_to_all, send
    size: float


@dataclass(frozen=True)
class Workload:
    """The properties of a run on which its speed and memory depend."""

    arch: Architecture
    layout: Layout
    seq_len: int
    micro_batch: int  # sequences of one data rank in one forward pass
    micro_batches: int  # forward passes of a step
    zero: int = 3  # what dp_shard ranks shard: 0 nothing, 1 optimizer state, 2 also gradients, 3 also weights
    schedule: str = "1F1B"
    stages_per_rank: int = 1
    recompute: str = "none"  # none, op, full, attention, offload, or a number n: every n-th layer
    compute: str = "bfloat16"
    experts_compute: str = "bfloat16"
    storage: str = "float32"  # of weights
    activations: str = "bfloat16"  # the type of the stream between products
    keeps_narrow: bool = False  # a single rank also keeps weights in the compute type
    offload_every: int = 1
    sequence_parallel: bool = True
    async_tp: bool = False
    compiled: bool = True
    reshard: bool = True  # FSDP frees gathered weights between forward and backward
    ring: bool = False  # context parallelism passes keys around a ring; otherwise it gathers them
    reduce_each: bool = False  # gradients are summed after each micro-batch
    cpu_offload: bool = False
    early_step: bool = False
    state_bytes: float = 8  # bytes of optimizer state per parameter
    lora_rank: int = 0  # above 0: LoRA's matrices are trained beside frozen weights
    base_bytes: float = 2  # bytes of each frozen weight
    causal: bool = True
    layers_of_stages: tuple[int, ...] = ()  # if empty, `Traits.cut` decides

    @property
    def number(self) -> int:
        """Bytes of a number of the stream between products."""
        return 4 if self.activations == "float32" else 2

    @property
    def tokens(self) -> float:
        """Tokens of one micro-batch on one rank, before sequence parallelism splits them."""
        return self.micro_batch * self.seq_len / self.layout.cp

    @property
    def step_tokens(self) -> float:
        return float(self.micro_batch * self.micro_batches * self.layout.data_ranks * self.seq_len)

    @property
    def stream_share(self) -> int:
        """How many ranks share the residual stream of a token."""
        return self.layout.tp if self.sequence_parallel else 1


# ---- parameters ------------------------------------------------------------------------------------------------------


class Sizes(NamedTuple):
    """Parameters of one rank's part of a layer."""

    dense: float  # attention, norms, feed-forward part or shared expert
    experts: float


def layer_parameters(arch: Architecture, with_experts: bool, layout: Layout) -> Sizes:
    """Return the parameters of one layer on a rank, before data parallelism shards them."""
    products = [*attention_shapes(arch), *feed_forward_shapes(arch, with_experts)]
    norms = 2 * arch.dim * (2 if arch.norm_places == "both" else 1)
    dense = sum(columns * inner for columns, inner in products) / layout.tp + norms
    if not with_experts or arch.moe is None:
        return Sizes(dense, 0.0)
    moe = arch.moe
    experts = 3.0 * moe.n_experts * moe.expert_dim * arch.dim / expert_cut(layout)
    return Sizes(dense + moe.n_experts * arch.dim, experts)


def expert_cut(layout: Layout) -> int:
    """Return the number of ranks that split the experts' matrices, before data parallelism shards them."""
    return layout.ep * (layout.tp if routes_together(layout) else 1)


def expert_shards(layout: Layout) -> int:
    """Return the number of ranks over which data parallelism shards the experts' matrices."""
    return layout.dp_shard * layout.cp * layout.tp // expert_cut(layout)


def attention_shapes(arch: Architecture) -> Iterator[tuple[int, int]]:
    """Yield (columns, inner) of the products of attention."""
    if arch.latent is not None:
        yield from _latent_shapes(arch, arch.latent)
    else:
        yield (arch.n_heads + 2 * arch.n_kv_heads) * arch.head_dim, arch.dim
    yield arch.dim, arch.n_heads * arch.v_dim


def _latent_shapes(arch: Architecture, latent: LatentAttention) -> Iterator[tuple[int, int]]:
    queries = arch.n_heads * latent.head_dim
    if latent.q_rank is None:
        yield queries, arch.dim
    else:
        yield latent.q_rank, arch.dim
        yield queries, latent.q_rank
    yield latent.kv_rank + latent.rope_dim, arch.dim
    yield arch.n_heads * (latent.nope_dim + latent.v_dim), latent.kv_rank


def feed_forward_shapes(arch: Architecture, with_experts: bool) -> Iterator[tuple[int, int]]:
    """Yield (columns, inner) of the feed-forward part, or in a layer with experts, of the shared expert."""
    width = arch.ffn_dim
    if with_experts and arch.moe is not None:
        width = arch.moe.shared_dim
    if width:
        yield width * (2 if arch.gated else 1), arch.dim
        yield arch.dim, width


def adapter_parameters(arch: Architecture, rank: int) -> float:
    """Return the number of LoRA parameters beside the linear layers of one layer."""
    shapes = [*attention_shapes(arch), *feed_forward_shapes(arch, False)]
    extra = 2 * 1 + (1 if arch.gated else 0)  # fused products have LoRA matrices for each of their parts
    return float(rank * (sum(columns + inner for columns, inner in shapes) + extra * arch.dim))


def expert_layers(arch: Architecture) -> int:
    return 0 if arch.moe is None else sum(arch.moe.holds(layer) for layer in range(arch.n_layers))


# ---- a layer ---------------------------------------------------------------------------------------------------------


class LayerWork(NamedTuple):
    """The forward pass of one layer for one micro-batch on one rank."""

    products: tuple[MatrixProduct, ...]
    attention: float  # FLOPs; with a causal mask, those of half of the square
    moved: float  # bytes that kernels between the products read and write, if fused as far as possible
    sent: tuple[Sent, ...]
    sent_backward: tuple[Sent, ...]
    out_of_heads: int  # index of the product from attention back to the stream


def layer_work(workload: Workload, with_experts: bool) -> LayerWork:
    arch, layout, tokens = workload.arch, workload.layout, workload.tokens
    tp, dim = layout.tp, arch.dim
    number = workload.number
    stream = tokens * dim * number
    products = [MatrixProduct(*shape) for shape in _cut_products(attention_shapes(arch), tokens, tp, dim)]
    out_of_heads = len(products) - 1
    products += [
        MatrixProduct(*shape) for shape in _cut_products(feed_forward_shapes(arch, with_experts), tokens, tp, dim)
    ]
    flops = 2.0 * tokens * _seen(workload) * arch.n_heads * (arch.head_dim + arch.v_dim) / tp
    heads = (arch.n_heads + arch.n_kv_heads) * arch.head_dim
    width = arch.ffn_dim if not with_experts or arch.moe is None else arch.moe.shared_dim
    moved = 10.0 * stream / workload.stream_share  # two norms, two sums
    moved += tokens * number / tp * (2.0 * heads + (3.0 if arch.gated else 2.0) * width)
    if workload.lora_rank:  # LoRA's matrices read each product's input and change its result
        moved += number * sum(one.rows * (one.inner + one.columns) for one in products)
    if workload.base_bytes < number:  # both passes read codes, and write and read weights
        moved += 2 / 3 * sum(one.columns * one.inner for one in products) * (workload.base_bytes + 2 * number)
    sent, back = _tensor_parallel(workload, stream)
    extra_sent, extra_back = _context_parallel(workload)
    sent, back = sent + extra_sent, back + extra_back
    if with_experts and arch.moe is not None:
        moe, together = arch.moe, routes_together(layout)
        rows, own = tokens * moe.top_k / (1 if together else tp), moe.n_experts / layout.ep
        width_here = moe.expert_dim / (tp if together else 1)
        products.append(MatrixProduct(tokens / workload.stream_share, moe.n_experts, dim))
        products.append(MatrixProduct(rows / own, 2.0 * width_here, dim, own, True))
        products.append(MatrixProduct(rows / own, dim, width_here, own, True))
        moved += rows * number * (6.0 * dim + 3.0 * width_here)
        if layout.ep > 1:
            travel = Sent("ep", "all_to_all", rows * dim * number)
            sent, back = (*sent, travel, travel), (*back, travel, travel)
    return LayerWork(tuple(products), flops, moved, sent, back, out_of_heads)


def kept_numbers(workload: Workload, work: LayerWork) -> float:
    """Return about how many numbers a layer keeps: the stream twice, and results of first products and attention."""
    arch, tokens, tp = workload.arch, workload.tokens, workload.layout.tp
    wide = sum(one.rows * one.columns * one.repeat for one in work.products if one.columns != arch.dim)
    return wide + tokens * (2 * arch.dim / workload.stream_share + arch.n_heads * arch.v_dim / tp)


def _cut_products(
    shapes: Iterator[tuple[int, int]], tokens: float, tp: int, dim: int
) -> Iterator[tuple[float, float, float]]:
    """Yield (rows, columns, inner) on a rank: columns are cut if it reads the stream, `inner` if it writes to it."""
    for columns, inner in shapes:
        yield (tokens, columns, inner / tp) if columns == dim and inner != dim else (tokens, columns / tp, inner)


def _seen(workload: Workload) -> float:
    """Return how many keys a query sees on average over the layers."""
    arch, length = workload.arch, float(workload.seq_len)
    whole = length / 2 if workload.causal else length
    if arch.sliding_window is None or arch.sliding_window >= length:
        return whole
    windowed = arch.n_layers if arch.sliding_window_layers is None else len(arch.sliding_window_layers)
    share = windowed / arch.n_layers
    return share * (arch.sliding_window - arch.sliding_window**2 / (2 * length)) + (1 - share) * whole


def _tensor_parallel(workload: Workload, stream: float) -> tuple[tuple[Sent, ...], tuple[Sent, ...]]:
    if workload.layout.tp == 1:
        return (), ()
    if not workload.sequence_parallel:
        both = (Sent("tp", "all_reduce", stream),) * 2
        return both, both
    gather, scatter = Sent("tp", "all_gather", stream), Sent("tp", "reduce_scatter", stream)
    return (gather, scatter) * 2, (gather, scatter) * 2


def _context_parallel(workload: Workload) -> tuple[tuple[Sent, ...], tuple[Sent, ...]]:
    layout, arch = workload.layout, workload.arch
    if layout.cp == 1:
        return (), ()
    own = 2.0 * workload.tokens * arch.n_kv_heads * arch.head_dim / min(layout.tp, arch.n_kv_heads) * workload.number
    whole = own * layout.cp
    if workload.ring:
        passed = Sent("cp", "send", own * (layout.cp - 1))
        return (passed,), (passed, passed)
    return (Sent("cp", "all_gather", whole),), (Sent("cp", "all_gather", whole), Sent("cp", "reduce_scatter", whole))


def head_product(workload: Workload) -> MatrixProduct:
    arch, tp = workload.arch, workload.layout.tp
    return MatrixProduct(workload.tokens, arch.vocab_size / tp, arch.dim)
