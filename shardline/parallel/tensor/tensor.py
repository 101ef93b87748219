"""Tensor parallelism: each rank holds some heads and some intermediate columns; between them, the sequence is sharded.

    residual stream            rows (tokens) sharded over tp: rank r has rows [r T/tp, (r+1) T/tp) of the T = B x S
      | all-gather rows        latent attention: the narrow latent vectors that each rank has computed for its rows
    wqkv, w13 (Shard(0))       column products: all tokens, this rank's heads or intermediate columns
      | attention, SwiGLU      no communication
    wo, w2 (Shard(1))          row products: all tokens, a summand of the result
      | reduce-scatter rows
    residual stream            norms and additions on T/tp rows only

Without sequence parallelism every rank has all rows. The two collectives are then an all-reduce after the row product,
and in backward one of the column product's input gradient. The embedding and the output layer are sharded by rows of
the vocabulary.

A norm over all query heads, or over all key heads, is the exception to "no communication": one number per token is
summed over tp.

Every rank holds norm weights, biases of row products and the projections to latent vectors whole. With sequence
parallelism, a rank's gradient of these covers only its rows: `sum_replicated_gradients` sums them once per step, in one
piece.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement
from torch.nn import functional as F

from shardline.comm import collectives
from shardline.comm.mesh import Mesh
from shardline.config.architecture import Architecture
from shardline.config.layout import Layout
from shardline.config.schema import Config
from shardline.errors import ConfigError
from shardline.models.adapted.low_rank import (
    Adapted,
    Weight,
    dropped,
    factors,
    joined,
    plain_weight,
    squared_norms,
    without_magnitude,
)
from shardline.models.adapted.quantized import OF_ROWS
from shardline.models.decoder import Decoder
from shardline.models.dtensor import local
from shardline.models.feed_forward import Biases, Products, Weights, columns
from shardline.models.fused_weights import gate_block, is_low_rank
from shardline.models.products.linear import linear
from shardline.parallel.tensor import overlap
from shardline.precision.float8 import Recipe, keeps_float8

# Ending of a parameter's name -> how tp shards it; all other parameters are whole on every rank.
PLAN: dict[str, Placement] = {
    "attention.wqkv.weight": Shard(0),
    "attention.wqkv.bias": Shard(0),
    "attention.wq.weight": Shard(0),
    "attention.wq.bias": Shard(0),
    "attention.wq_b.weight": Shard(0),
    "attention.wkv_b.weight": Shard(0),
    "attention.sinks": Shard(0),
    "attention.wo.weight": Shard(1),
    "feed_forward.w13.weight": Shard(0),
    "feed_forward.w13.bias": Shard(0),
    "feed_forward.w1.weight": Shard(0),
    "feed_forward.w1.bias": Shard(0),
    "feed_forward.w2.weight": Shard(1),
    "tok_embeddings.weight": Shard(0),
    "output.weight": Shard(0),
    "shared_experts.w13.weight": Shard(0),
    "shared_experts.w13.bias": Shard(0),
    "shared_experts.w2.weight": Shard(1),
    "moe.experts.w13.weight": Shard(2),
    "moe.experts.w13.bias": Shard(2),
    "moe.experts.w2.weight": Shard(2),
}
HEADS_NORMS = ("attention.q_norm.weight", "attention.k_norm.weight")


class TensorParallel(NamedTuple):
    """Settings from the config; `loss_parallel` shards the vocabulary in the loss, `overlapped` is async TP."""

    degree: int
    sequence_parallel: bool
    loss_parallel: bool
    overlapped: bool = False


def needs_split_kv(arch: Architecture, degree: int) -> bool:
    """Whether there are more ranks than KV heads: then queries are sharded, and every rank has all keys and values."""
    return degree > arch.n_kv_heads


def check_tensor_parallel(arch: Architecture, degree: int) -> None:
    """Raise for sizes that cannot be cut into `degree` parts; the message names degrees that fit."""
    problems = _problems(arch, degree)
    if problems:
        good = ", ".join(str(other) for other in range(1, 65) if not _problems(arch, other))
        raise ConfigError(
            f"parallelism.tensor_parallel_degree = {degree}: {'; '.join(problems)}. Degrees that fit: {good}"
        )


def _problems(arch: Architecture, degree: int) -> list[str]:
    problems = []
    if arch.n_heads % degree:
        problems.append(f"{arch.n_heads} heads cannot be shared by {degree} ranks")
    if max(degree, arch.n_kv_heads) % min(degree, arch.n_kv_heads):
        problems.append(f"{arch.n_kv_heads} KV heads and {degree} ranks: one must be a multiple of the other")
    if not all(vocabulary_rows(arch.vocab_size, degree, rank) for rank in range(degree)):
        problems.append(f"a vocabulary of {arch.vocab_size} leaves ranks without a row")
    for what, width in cut_widths(arch).items():
        block = gate_block(width) if arch.gated else 1
        if width % (degree * block):
            problems.append(f"{what} {width} is not a multiple of {degree} x {block}")
    return problems


def cut_widths(arch: Architecture) -> dict[str, int]:
    """Return the widths of the feed-forward parts that tensor parallelism always shards."""
    every = arch.moe is not None and all(arch.moe.holds(layer) for layer in range(arch.n_layers))
    dense = {} if every else {"ffn_dim": arch.ffn_dim}
    return {**dense, "shared_dim": arch.moe.shared_dim} if arch.moe is not None and arch.moe.shared_dim else dense


def check_rows(config: Config, plan: TensorParallel) -> None:
    """Raise if sequence parallelism cannot shard the rows of a micro-batch evenly; the message names near lengths."""
    if not plan.sequence_parallel:
        return
    for name, batch, length in batch_shapes(config):
        if length * batch % plan.degree:
            near = " and ".join(map(str, nearest_lengths(length, batch, plan.degree)))
            raise ConfigError(
                f"{name}.seq_len = {length}: {batch} x {length} = {batch * length} tokens cannot be shared evenly by"
                f" {plan.degree} tensor-parallel ranks; nearest lengths: {near}"
                " (or set parallelism.enable_sequence_parallel = false)"
            )


def check_shared_rows(config: Config, layout: Layout) -> None:
    """Raise if the ranks of tp cannot route equal parts of the tokens to experts of their own."""
    for name, batch, length in batch_shapes(config):
        if (rows := batch * length // layout.cp) % layout.tp:
            raise ConfigError(
                f"{name}.seq_len = {length}: {rows} tokens of a rank cannot be shared evenly by {layout.tp}"
                " tensor-parallel ranks, which send them to experts; choose another length, or set"
                f" parallelism.expert_tensor_parallel_degree = {layout.tp}"
            )


def batch_shapes(config: Config) -> list[tuple[str, int, int]]:
    """Return (section of the config, sequences that go through the model at a time, their length) tuples."""
    training, validation, section = config.training, config.validation, config.parallelism
    staged = section.pipeline_parallel_degree > 1
    each = training.rows_of_a_sample
    batch = section.pipeline_parallel_microbatch_size if staged else training.local_batch_size * each
    shapes = [("training", batch, training.seq_len)]
    validated = ("validation", validation.local_batch_size * each, validation.seq_len)
    return [*shapes, validated] if validation.enable else shapes


def nearest_lengths(length: int, batch: int, degree: int) -> list[int]:
    """Return the nearest lengths below and above at which `degree` ranks can share `batch` sequences evenly."""
    step = degree // math.gcd(degree, batch)
    below = length - length % step
    return [good for good in (below, below + step) if good > 0]


def placement(name: str, plan: TensorParallel, arch: Architecture) -> Placement:
    """Return the placement of the parameter `name` on the tp axis."""
    head = "tok_embeddings." if arch.tie_word_embeddings else "output."
    if name.startswith(head) and not plan.loss_parallel:
        return Replicate()
    if arch.qk_norm_over != "head" and name.endswith(HEADS_NORMS):  # it has weights of every head
        whole = name.endswith("k_norm.weight") and needs_split_kv(arch, plan.degree)
        return Replicate() if whole else Shard(0)
    return planned_cut(name)


def planned_cut(name: str) -> Placement:
    """Return how ranks that share a layer shard the parameter `name`; LoRA's matrices are sharded with their weight.

    Ranks that hold rows of a weight hold those rows of B and all of A; ranks that hold columns hold those columns of A
    and all of B. The rows of an embedding are columns of A.
    """
    module, _, stored = name.partition(".stored.")
    if stored:
        cut = planned_cut(f"{module}.weight")
        return Replicate() if cut == Shard(1) and stored in OF_ROWS else cut
    if is_low_rank(name):
        module, _, inner = name.partition(".lora.")
        cut = planned_cut(f"{module}.weight")
        by_columns = module == "tok_embeddings" or module.endswith((".wo", ".w2"))
        if cut == Replicate() or inner.endswith(".a") != by_columns:
            return Replicate()
        if module == "tok_embeddings":
            return Shard(1)
        return cut
    return next((cut for ending, cut in PLAN.items() if name.endswith(ending)), Replicate())


def apply_tensor_parallel(model: Decoder, mesh: Mesh, plan: TensorParallel) -> None:
    """Shard the parameters (still on the meta device) and give the blocks products with collectives."""
    tp = mesh.axis("tp")
    assert tp is not None
    arch, rank = model.arch, mesh.coordinates["tp"]
    for name, parameter in list(model.named_parameters()):
        if isinstance(parameter, DTensor):
            continue  # expert parallelism has sharded it
        cut = distribute_tensor(parameter.detach(), tp, [placement(name, plan, arch)], src_data_rank=None)
        replace_parameter(model, name, cut)
    products = parallel_products(plan)
    kv_heads = None
    if needs_split_kv(arch, plan.degree):
        kv_heads = (rank * arch.n_kv_heads // plan.degree, 1)
    for block in model.blocks():
        block.spec = block.spec._replace(products=products, ffn_products=products, kv_heads=kv_heads)
    rows = vocabulary_rows(arch.vocab_size, plan.degree, rank)
    whole = isinstance(placement("tok_embeddings.weight", plan, arch), Replicate)
    if model.tok_embeddings is not None:
        model.tok_embeddings.function = ParallelEmbedding(rows, plan.sequence_parallel, whole)


def replace_parameter(model: nn.Module, name: str, value: Tensor) -> None:
    path, _, last = name.rpartition(".")
    module = model.get_submodule(path)
    setattr(module, last, nn.Parameter(value, requires_grad=getattr(module, last).requires_grad))


def vocabulary_rows(vocab_size: int, degree: int, rank: int) -> range:
    """Return the rows of the vocabulary on a rank: equal parts; if they do not divide evenly, the last are smaller."""
    each = -(-vocab_size // degree)
    return range(min(rank * each, vocab_size), min((rank + 1) * each, vocab_size))


@functools.cache
def parallel_products(plan: TensorParallel, into: Recipe | None = None, back: Recipe | None = None) -> Products:
    """Return the products of blocks, with a collective before, after or inside the product.

    `into` and `back` are the float8 recipes of products into heads or intermediate columns, and of those back. Rows are
    then sent in float8, too, which a separate collective before a product cannot do: the overlapped operations run
    these products, with their serial backend unless async TP chooses another.
    """
    before = collectives.all_gather if plan.sequence_parallel else collectives.copy
    after = collectives.reduce_scatter if plan.sequence_parallel else collectives.all_reduce
    gather = overlap.all_gather_linear if plan.sequence_parallel else overlap.copy_linear
    scatter = overlap.linear_reduce_scatter if plan.sequence_parallel else overlap.linear_all_reduce

    def share(matrix: Tensor) -> Tensor:
        """Divide the matrix's gradient by the ranks if each has all of it, that is, without sequence parallelism."""
        return matrix if plan.sequence_parallel else _Share.apply(matrix, plan.degree)

    def fused_column(x: Tensor, weights: Weights, biases: Biases) -> tuple[Tensor, ...]:
        """Multiply with LoRA's A as one more weight that reads x, so that it needs no collective of its own.

        If rows are sent in float8 or A has dropout, A does not read the rows that are sent; then x A^T, which is
        narrow, is gathered instead.
        """
        low_rank = [joined(weight, x.dtype) if isinstance(weight, Adapted) else (None, None) for weight in weights]
        along = into is None and not any(isinstance(weight, Adapted) and weight.dropout for weight in weights)
        more = [a for a, _ in low_rank if along and a is not None]
        products = list(gather(x, (*map(plain_weight, weights), *more), "tp", into))
        lows = products[len(weights) :]
        found = []
        for weight, bias, product, (a, b) in zip(weights, biases, products, low_rank, strict=False):
            if a is not None and b is not None:
                low = lows.pop(0) if along else before(_read(x, weight) @ share(a).t(), "tp")
                product = torch.addmm(product, low, b.t())
            found.append(_with_bias(_with_magnitude(product, weight), bias))
        return tuple(found)

    def fused_row(x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
        """Sum LoRA's x A^T, which is narrow, over ranks separately, so that the large product stays unchanged."""
        product = scatter(x, (plain_weight(weight),), "tp", back)[0]
        a, b = joined(weight, x.dtype) if isinstance(weight, Adapted) else (None, None)
        if a is not None and b is not None:
            product = torch.addmm(product, after(_read(x, weight) @ a.t(), "tp"), share(b).t())
        return _with_bias(_with_magnitude(product, weight, "tp"), bias)

    def column(x: Tensor, weights: Weights, biases: Biases) -> tuple[Tensor, ...]:
        return columns(before(x, "tp"), weights, biases)  # one gather for all the weights that read x

    def row(x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
        if not isinstance(weight, Adapted):
            return _with_bias(after(linear(x, weight, None), "tp"), bias)
        summed = after(without_magnitude(x, weight, None), "tp")  # the low-rank term is a summand on each rank
        return _with_bias(_with_magnitude(summed, weight, "tp"), bias)

    return Products(
        fused_column if plan.overlapped or into is not None else column,
        fused_row if plan.overlapped or back is not None else row,
        functools.partial(before, axis="tp"),
        functools.partial(_mean, degree=plan.degree),
        keeps_float8(back),
    )


def _read(x: Tensor, weight: Weight) -> Tensor:
    """Return the input of LoRA's A."""
    other = dropped(x, weight) if isinstance(weight, Adapted) else None
    return x if other is None else other


def _with_magnitude(product: Tensor, weight: Weight, axis: str | None = None) -> Tensor:
    """Multiply the columns of a product with DoRA's factors; ranks along `axis` hold columns of the weight."""
    if not isinstance(weight, Adapted) or not weight.has_magnitude:
        return product
    squares = squared_norms(weight)
    squares = squares if axis is None else collectives.all_reduce(squares, axis)
    return product * factors(weight, squares).to(product.dtype)


class _Share(torch.autograd.Function):
    """Identity whose gradient is divided by the ranks: each has the whole gradient, and all later sum their shares."""

    @staticmethod
    def forward(ctx: Any, matrix: Tensor, ranks: int) -> Tensor:
        ctx.ranks = ranks
        return matrix.view_as(matrix)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient / ctx.ranks, None


def _mean(x: Tensor, degree: int) -> Tensor:
    """Average over ranks what each has computed from its heads; every rank then uses the mean for its own heads."""
    return collectives.copy(collectives.all_reduce(x, "tp"), "tp") / degree


def _with_bias(product: Tensor, bias: Tensor | None) -> Tensor:
    return product if bias is None else product + bias.to(product.dtype)


class ParallelEmbedding(NamedTuple):
    """An embedding in which each rank looks up the tokens whose rows it holds; the sum over ranks has every row."""

    rows: range
    sequence_parallel: bool
    whole: bool  # whether every rank holds all rows

    def __call__(self, tokens: Tensor, weight: Tensor) -> Tensor:
        flat = tokens.reshape(-1)
        if self.whole:
            return F.embedding(self.own_rows(tokens), weight)
        here = (flat >= self.rows.start) & (flat < self.rows.stop)
        found = F.embedding(torch.where(here, flat - self.rows.start, 0), weight).masked_fill(~here[:, None], 0)
        add_up = collectives.reduce_scatter if self.sequence_parallel else collectives.all_reduce
        return add_up(found, "tp")

    def own_rows(self, x: Tensor) -> Tensor:
        """Select from numbers (B, S), flattened, those of this rank's tokens."""
        flat, tp = x.reshape(-1), collectives.axis("tp")
        return flat.chunk(tp.size)[tp.rank] if self.sequence_parallel else flat


# Gradients of parameters that every rank holds whole


def replicated_parameters(model: Decoder, plan: TensorParallel) -> list[nn.Parameter]:
    """Return parameters that every tp rank holds whole, while its gradients cover only a part of the group's work."""
    # A rank applies norms of heads to its heads only; the norm of a latent vector comes before the heads.
    of_heads = HEADS_NORMS if model.arch.latent is None else ()
    found = []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad or not is_whole(parameter):
            continue
        of_some = any(part in name for part in (".wkv.", ".router.", ".experts.w2.bias", *of_heads))
        of_some = of_some or _is_beside_a_cut(name, plan, model.arch)
        if plan.sequence_parallel or of_some:
            found.append(parameter)
    return found


def _is_beside_a_cut(name: str, plan: TensorParallel, arch: Architecture) -> bool:
    """Whether a LoRA matrix is whole beside a sharded weight: each rank's part of the weight adds to its gradient."""
    module, _, inner = name.partition(".lora.")
    if not inner or inner.endswith(".magnitude") or module == "tok_embeddings":
        return False
    return placement(f"{module}.weight", plan, arch) != Replicate()


def is_whole(parameter: nn.Parameter) -> bool:
    """Whether the ranks of tp hold a parameter whole; parameters of experts have `etp` instead of tp, or neither."""
    if not isinstance(parameter, DTensor):
        return False
    axes = zip(parameter.device_mesh.mesh_dim_names or (), parameter.placements, strict=True)
    return any(axis in ("tp", "etp") and cut == Replicate() for axis, cut in axes)


def sum_replicated_gradients(parameters: list[nn.Parameter]) -> None:
    """Sum over tp the gradients of parameters that every rank holds whole, in one flat all-reduce."""
    gradients = [local(p.grad) for p in parameters if p.grad is not None]
    for dtype in dict.fromkeys(g.dtype for g in gradients):
        some = [g for g in gradients if g.dtype == dtype]
        flat = torch.cat([g.reshape(-1) for g in some])
        collectives.sum_in_place(flat, "tp")
        for gradient, part in zip(some, flat.split([g.numel() for g in some]), strict=True):
            gradient.copy_(part.view_as(gradient))
