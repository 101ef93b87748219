"""The decoder: embedding, blocks, final norm, output layer.

A block's `forward` is eager and thin: it collects plain tensors and hands them to `block.function`, a pure function
that compilation and activation checkpointing may wrap. The blocks share one function, hence one compiled graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardline.config.architecture import Architecture, LatentAttention, MixtureOfExperts
from shardline.models.adapted.low_rank import Adapted, LowRankSpec, Projection, Weight, adapt, joined, some_groups
from shardline.models.attention import (
    AttentionMask,
    KVCache,
    LayerCache,
    attention,
    document_lengths,
    document_positions,
    make_masks,
    remember,
    windows,
)
from shardline.models.dtensor import local, local_waiting
from shardline.models.experts.moe import ExpertExchange, ExpertProducts, ExpertWeights, RouterRun, SharedExpert, moe
from shardline.models.feed_forward import FeedForwardWeights, Products, feed_forward, narrow, widen
from shardline.models.fused_weights import block_norms, gate_block, qk_norm_width
from shardline.models.latent import NORM_EPS, LatentSpec, LatentWeights, latent_heads, latent_spec
from shardline.models.noise import add_noise
from shardline.models.norms import (
    Norm,
    NormSpec,
    NormWeights,
    capped,
    heads_norm,
    norm,
    norm_spec,
    rms_norm,
    stream_norm,
)
from shardline.models.products.linear import linear, weight_queue
from shardline.models.products.narrow import narrowed
from shardline.models.rope import depends_on_length, query_factors, rope_tables, rotate, window_rope_tables

# Cosines and sines, those of layers with their own rotary base, and factors of queries
Tables = tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]


class BlockSpec(NamedTuple):
    """The constants of a block's function, equal for all layers."""

    head_dim: int
    group: int  # query heads per KV head
    gate_block: int  # 0: the feed-forward part has no gate
    norm: NormSpec
    rope_pairs: str = "halves"
    rotated_norm: bool = False
    query_factor: float = 1.0  # queries are multiplied by it, which scales the softmax in every kernel
    parallel: bool = False  # the feed-forward part has the same input as attention
    residual_scale: float = 1.0
    activation: str = "silu"
    products: Products = Products()  # of attention
    ffn_products: Products = Products()
    moe: MixtureOfExperts | None = None
    exchange: ExpertExchange = ExpertExchange()
    run: RouterRun = RouterRun()
    expert_products: ExpertProducts = ExpertProducts()
    kv_heads: tuple[int, int] | None = None  # where every rank holds all of wkv: the first head used here, and how many
    latent: LatentSpec | None = None


class BlockWeights(NamedTuple):
    attention_norm: NormWeights | None
    attention_post_norm: NormWeights | None
    wqkv: Weight | None  # only queries where `wkv` is given, None where `latent` is
    wqkv_bias: Tensor | None
    wkv: Weight | None
    wkv_bias: Tensor | None
    latent: LatentWeights | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    sinks: Tensor | None
    wo: Weight
    wo_bias: Tensor | None
    ffn_norm: NormWeights | None
    ffn_post_norm: NormWeights | None
    ffn: FeedForwardWeights | None  # of a block with experts: the shared expert
    experts: ExpertWeights | None


def block_function(
    x: Tensor,
    weights: BlockWeights,
    cos: Tensor | None,
    sin: Tensor | None,
    mask: AttentionMask,
    spec: BlockSpec,
    shape: tuple[int, int],
    cache: LayerCache | None = None,
) -> Tensor:
    """Apply a block to the residual stream x (t, dim) of `shape` (B, S) tokens; weights are cast to the type of x."""
    w = weights
    assert w.ffn is not None
    read = norm(x, w.attention_norm, spec.norm)
    after = add(x, attention_part(read, w, cos, sin, mask, spec, shape, cache), w.attention_post_norm, spec)
    if not spec.parallel:
        read = norm(after, w.ffn_norm, spec.norm)
    out = feed_forward(read, w.ffn, spec.gate_block, spec.ffn_products, spec.activation)
    return add(after, out, w.ffn_post_norm, spec)


def add(x: Tensor, out: Tensor, post_norm: NormWeights | None, spec: BlockSpec) -> Tensor:
    """Add the output of a part of a block to the residual stream."""
    out = norm(out, post_norm, spec.norm)
    return x + out if spec.residual_scale == 1.0 else x + out * spec.residual_scale


def expert_block_function(
    x: Tensor,
    weights: BlockWeights,
    cos: Tensor | None,
    sin: Tensor | None,
    mask: AttentionMask,
    spec: BlockSpec,
    shape: tuple[int, int],
    cache: LayerCache | None = None,
) -> tuple[Tensor, Tensor]:
    """Apply a block with experts; also return the tally of its router (see `moe`)."""
    w = weights
    read = norm(x, w.attention_norm, spec.norm)
    x = add(x, attention_part(read, w, cos, sin, mask, spec, shape, cache), w.attention_post_norm, spec)
    assert w.experts is not None
    assert spec.moe is not None
    normed = norm(x, w.ffn_norm, spec.norm)
    shared = None if w.ffn is None else _shared_expert(normed, w.ffn, spec)
    out, tally = moe(
        normed.flatten(0, -2), w.experts, spec.moe, spec.exchange, shape, spec.run, shared, spec.expert_products
    )
    return add(x, out.view_as(x), w.ffn_post_norm, spec), tally


def _shared_expert(x: Tensor, weights: FeedForwardWeights, spec: BlockSpec) -> SharedExpert:
    return SharedExpert(
        lambda: widen(x, weights, spec.ffn_products),
        lambda product: narrow(product, weights, spec.gate_block, spec.ffn_products).flatten(0, -2),
    )


def attention_part(
    x: Tensor,
    w: BlockWeights,
    cos: Tensor | None,
    sin: Tensor | None,
    mask: AttentionMask,
    spec: BlockSpec,
    shape: tuple[int, int],
    cache: LayerCache | None,
) -> Tensor:
    """Project, normalise, rotate, attend, project back.

    Layers without rotary positions have neither `cos` nor `sin`. In training, values are copied out of the fused
    product, since attention's backward would keep all of it for them; norms of queries and keys keep it anyway.
    """
    if w.latent is not None and spec.latent is not None:
        assert cos is not None
        assert sin is not None
        q, k, v, rows = latent_heads(x, w.latent, cos, sin, spec.latent, spec.products, shape)
    else:
        q, k, v, rows = project(x, w, spec, shape)  # (B, S, KV, group, D), (B, S, KV, 1, D) twice
        if w.q_norm is not None and w.k_norm is not None:
            q = heads_norm(q, w.q_norm, spec.norm, spec.products.mean)
            k = heads_norm(k, _own_keys(w.k_norm, spec), spec.norm, spec.products.mean)
        if cos is not None and sin is not None:
            q, k = rotate(q, cos, sin, spec.rope_pairs), rotate(k, cos, sin, spec.rope_pairs)
            if spec.rotated_norm:
                q, k = rms_norm(q, None, spec.norm.eps), rms_norm(k, None, spec.norm.eps)
        if spec.query_factor != 1.0:
            q = q * spec.query_factor
        q, k, v = q.flatten(2, 3), k.flatten(2, 3), v.squeeze(3)
        v = v.contiguous() if torch.is_grad_enabled() and w.q_norm is None else v
    if cache is not None:
        k, v = remember(cache, k, v)
    return spec.products.row(attention(q, k, v, mask, w.sinks).reshape(*rows, -1), w.wo, w.wo_bias)


def _own_keys(weight: Tensor, spec: BlockSpec) -> Tensor:
    """The key norm's weights for the KV heads that this rank uses, where it holds those of all KV heads."""
    if spec.kv_heads is None or spec.norm.over == "head":
        return weight
    first, count = spec.kv_heads
    return weight[spec.head_dim * first : spec.head_dim * (first + count)]


def project(
    x: Tensor, w: BlockWeights, spec: BlockSpec, shape: tuple[int, int]
) -> tuple[Tensor, Tensor, Tensor, torch.Size]:
    """Queries, keys and values of all tokens for the heads of this rank, and the shape of the product's rows."""
    assert w.wqkv is not None
    if w.wkv is None:
        (product,) = spec.products.column(x, (w.wqkv,), (w.wqkv_bias,))
        heads = w.wqkv.shape[0] // ((spec.group + 2) * spec.head_dim)  # from the weight: never symbolic when compiled
        fused = product.view(*shape, heads, spec.group + 2, spec.head_dim)
        q, k, v = fused.split((spec.group, 1, 1), dim=3)
        return q, k, v, product.shape[:-1]
    # More ranks than KV heads: every rank holds all of them and uses those that its query heads read.
    first, count = spec.kv_heads or (0, w.wkv.shape[0] // (2 * spec.head_dim))
    rows = slice(2 * spec.head_dim * first, 2 * spec.head_dim * (first + count))
    wkv_bias = None if w.wkv_bias is None else w.wkv_bias[rows]
    used = some_groups(w.wkv, first, count) if isinstance(w.wkv, Adapted) else w.wkv[rows]
    product, kv = spec.products.column(x, (w.wqkv, used), (w.wqkv_bias, wkv_bias))
    k, v = kv.view(*shape, count, 2, spec.head_dim).split(1, dim=3)
    group = w.wqkv.shape[0] // (count * spec.head_dim)
    return product.view(*shape, count, group, spec.head_dim), k, v, product.shape[:-1]


class CodedWeight(nn.Module):
    """A frozen weight in 4 or 8 bits, uninitialised (models/adapted/quantized.py)."""

    codes: nn.Parameter

    def __init__(self, kind: str, tensors: dict[str, Tensor], shared: int | None) -> None:
        super().__init__()
        self.kind, self.shared = kind, shared
        for name in ("codes", "factors", "scales", "offsets", "row_factors"):
            given = tensors.get(name)
            setattr(self, name, None if given is None else nn.Parameter(given, requires_grad=False))


NO_MATRICES = LowRankSpec(0.0, (Projection("", 1, 1.0),))


class Adaptable(nn.Module):
    """A module with a weight beside which low-rank matrices may be trained (`adapters`)."""

    weight: nn.Parameter

    def __init__(self) -> None:
        super().__init__()
        self.stored: CodedWeight | None = None  # in place of the weight
        self.lora: nn.ModuleDict | None = None  # by the name of the projection: a fused weight has several
        self.low_rank: LowRankSpec | None = None
        self.bare = False  # use the frozen weight alone, as if nothing were trained beside it

    def used(self, part: Callable[[Tensor], Tensor]) -> Weight:
        """The weight as matrix products take it, with the matrices that are trained beside it."""
        if self.stored is not None:
            held = tuple(part(parameter) for parameter in self.stored.parameters())
            beside = None if self.bare else self.lora
            return adapt(held, self.stored.kind, beside, self.low_rank or NO_MATRICES, part)
        if self.lora is None or self.low_rank is None or self.bare:
            return part(self.weight)
        return adapt((part(self.weight),), "", self.lora, self.low_rank, part)


class Linear(Adaptable):
    """A weight (rows, columns) and an optional bias, uninitialised: `init_weights` or a checkpoint fills them."""

    def __init__(self, rows: int, columns: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, columns))
        self.bias = nn.Parameter(torch.empty(rows)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.used(local), self.bias)


class Embedding(Adaptable):
    """The token embedding; where ranks share the vocabulary, `function` is replaced by one with a collective."""

    def __init__(self, vocab_size: int, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, dim))
        self.function: Any = F.embedding  # (tokens, weight) -> rows

    def own_rows(self, x: Tensor) -> Tensor:
        """From one number per token (B, S), return those of the tokens whose rows `forward` returns on this rank."""
        return x if self.function is F.embedding else self.function.own_rows(x)

    def forward(self, tokens: Tensor) -> Tensor:
        rows: Tensor = self.function(tokens, local(self.weight))
        if self.lora is None or self.bare:
            return rows
        weight = self.used(local)
        assert isinstance(weight, Adapted)
        a, b = joined(weight, rows.dtype)  # a (r, vocabulary) is a narrow embedding
        assert a is not None
        assert b is not None
        return rows + linear(self.function(tokens, a.t()), b, None)


class Attention(nn.Module):
    """The attention weights of a block; the arithmetic is `attention_part`."""

    def __init__(self, arch: Architecture, split_kv: bool) -> None:
        super().__init__()
        heads, kv = arch.n_heads * arch.head_dim, 2 * arch.n_kv_heads * arch.head_dim
        self.wqkv = None if split_kv else Linear(heads + kv, arch.dim, arch.qkv_bias)
        self.wq = Linear(heads, arch.dim, arch.qkv_bias) if split_kv else None
        self.wkv = Linear(kv, arch.dim, arch.qkv_bias) if split_kv else None
        spec = norm_spec(arch)
        self.q_norm = Norm(qk_norm_width(arch, arch.n_heads), spec) if arch.qk_norm else None
        self.k_norm = Norm(qk_norm_width(arch, arch.n_kv_heads), spec) if arch.qk_norm else None
        self.sinks = nn.Parameter(torch.empty(arch.n_heads)) if arch.sinks else None
        self.wo = Linear(arch.dim, heads, arch.out_bias)


class LatentProjections(nn.Module):
    """The weights of a block with latent attention; the arithmetic is `latent_heads`."""

    def __init__(self, arch: Architecture, sizes: LatentAttention) -> None:
        super().__init__()
        queries, rank = arch.n_heads * sizes.head_dim, sizes.q_rank
        self.wq = Linear(queries, arch.dim) if rank is None else None
        self.wq_a = None if rank is None else Linear(rank, arch.dim)
        self.q_norm = None if rank is None else Norm(rank, NormSpec(eps=NORM_EPS))
        self.wq_b = None if rank is None else Linear(queries, rank)
        self.wkv_a = Linear(sizes.kv_rank + sizes.rope_dim, arch.dim)
        self.kv_norm = Norm(sizes.kv_rank, NormSpec(eps=NORM_EPS))
        self.wkv_b = Linear(arch.n_heads * (sizes.nope_dim + sizes.v_dim), sizes.kv_rank)
        self.wo = Linear(arch.dim, arch.n_heads * sizes.v_dim)

    def weights(self, part: Callable[[Tensor], Tensor]) -> LatentWeights:
        return LatentWeights(
            wq_a=None if self.wq_a is None else self.wq_a.used(part),
            q_norm=None if self.q_norm is None else part(self.q_norm.weight),
            wq=(self.wq or self.wq_b).used(part),  # type: ignore[union-attr]
            wkv_a=self.wkv_a.used(part),
            kv_norm=part(self.kv_norm.weight),
            wkv_b=self.wkv_b.used(part),
        )


class FeedForward(nn.Module):
    """The feed-forward weights of a block; the arithmetic is `feed_forward`."""

    def __init__(self, arch: Architecture, width: int) -> None:
        super().__init__()
        self.w13 = Linear(2 * width, arch.dim, arch.mlp_bias) if arch.gated else None
        self.w1 = None if arch.gated else Linear(width, arch.dim, arch.mlp_bias)
        self.w2 = Linear(arch.dim, width, arch.mlp_bias)

    @property
    def into(self) -> Linear:
        """The layer from dim to the intermediate width."""
        layer = self.w13 or self.w1
        assert layer is not None
        return layer


class ExpertLinear(Adaptable):
    """The matrices of all experts, uninitialised, and their biases."""

    def __init__(self, shape: tuple[int, ...], bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape))
        self.bias = nn.Parameter(torch.empty(shape[:-1])) if bias else None


class Experts(nn.Module):
    def __init__(self, arch: Architecture, spec: MixtureOfExperts) -> None:
        super().__init__()
        self.w13 = ExpertLinear((spec.n_experts, 2, spec.expert_dim, arch.dim), arch.mlp_bias)
        self.w2 = ExpertLinear((spec.n_experts, arch.dim, spec.expert_dim), arch.mlp_bias)


class Router(nn.Module):
    """The router's weights; `balance` is updated by `optim`, not by gradients."""

    def __init__(self, arch: Architecture, spec: MixtureOfExperts) -> None:
        super().__init__()
        self.gate = Linear(spec.n_experts, arch.dim, spec.router_bias)
        self.balance = nn.Parameter(torch.empty(spec.n_experts), requires_grad=False) if spec.balance_coeff else None


class Moe(nn.Module):
    """The weights of a block's router, experts and shared expert; the arithmetic is `moe`."""

    def __init__(self, arch: Architecture, spec: MixtureOfExperts) -> None:
        super().__init__()
        self.spec = spec
        self.router = Router(arch, spec)
        self.experts = Experts(arch, spec)
        self.shared_experts = FeedForward(arch, spec.shared_dim) if spec.shared_dim else None


class Block(nn.Module):
    def __init__(self, arch: Architecture, layer: int, window: int, split_kv: bool = False) -> None:
        super().__init__()
        spec = arch.moe if arch.moe is not None and arch.moe.holds(layer) else None
        norms = block_norms(arch)
        self.attention_norm = stream_norm(arch) if "attention_norm" in norms else None
        latent = arch.latent
        self.attention = Attention(arch, split_kv) if latent is None else LatentProjections(arch, latent)
        self.attention_post_norm = stream_norm(arch) if "attention_post_norm" in norms else None
        self.ffn_norm = stream_norm(arch) if "ffn_norm" in norms else None
        self.feed_forward = FeedForward(arch, arch.ffn_dim) if spec is None else None
        self.moe = None if spec is None else Moe(arch, spec)
        self.ffn_post_norm = stream_norm(arch) if "ffn_post_norm" in norms else None
        self.window, self.rotates = window, arch.rotates(layer)
        self.own_base = window > 0 and arch.window_rope_theta is not None
        width = arch.ffn_dim if spec is None else spec.shared_dim
        self.spec = BlockSpec(
            arch.head_dim,
            arch.n_heads // arch.n_kv_heads,
            gate_block(width) if arch.gated else 0,
            norm_spec(arch),
            arch.rope_pairs,
            arch.rotated_norm,
            1.0 if arch.attention_scale is None else arch.attention_scale * arch.head_dim**0.5,
            arch.parallel_block,
            arch.residual_scale,
            arch.activation,
            moe=spec,
            latent=latent_spec(arch),
        )
        self.function: Callable[..., Any] = block_function if spec is None else expert_block_function
        self.tally: Tensor | None = None  # the router's, since the last reset: tokens of each expert, losses
        self.rest: WithoutExperts | None = None

    @property
    def module(self) -> nn.Module:
        """The module that FSDP shards: the block itself."""
        return self

    def without_experts(self) -> WithoutExperts:
        """Return everything in this block but its experts, as a module that the block's forward then goes through."""
        self.rest = WithoutExperts(self)
        return self.rest

    def weights(self) -> BlockWeights:
        """This rank's shard of each weight, as plain tensors."""
        a, m = self.attention, self.moe
        f = self.feed_forward if m is None else m.shared_experts
        part = local_waiting if weight_queue.offered else lambda parameter: narrowed(local(parameter))
        plain = (a.wqkv or a.wq, a.wkv, a.q_norm, a.k_norm) if isinstance(a, Attention) else (None,) * 4
        queries, kv, q_norm, k_norm = plain

        def maybe(module: nn.Module | None, name: str) -> Tensor | None:
            parameter = None if module is None else getattr(module, name)
            return None if parameter is None else part(parameter)

        def both(module: Linear | ExpertLinear) -> tuple[Any, Tensor | None]:
            return module.used(part), maybe(module, "bias")

        def of_norm(module: Norm | None) -> NormWeights | None:
            return None if module is None else module.weights(part)

        return BlockWeights(
            attention_norm=of_norm(self.attention_norm),
            attention_post_norm=of_norm(self.attention_post_norm),
            wqkv=None if queries is None else queries.used(part),
            wqkv_bias=maybe(queries, "bias"),
            wkv=None if kv is None else kv.used(part),
            wkv_bias=maybe(kv, "bias"),
            latent=a.weights(part) if isinstance(a, LatentProjections) else None,
            q_norm=maybe(q_norm, "weight"),
            k_norm=maybe(k_norm, "weight"),
            sinks=maybe(a, "sinks") if isinstance(a, Attention) else None,
            wo=a.wo.used(part),
            wo_bias=maybe(a.wo, "bias"),
            ffn_norm=of_norm(self.ffn_norm),
            ffn_post_norm=of_norm(self.ffn_post_norm),
            ffn=None if f is None else FeedForwardWeights(*both(f.into), *both(f.w2)),
            experts=None
            if m is None
            else ExpertWeights(
                *both(m.router.gate),
                None if m.router.balance is None else local(m.router.balance),
                *both(m.experts.w13),
                *both(m.experts.w2),
            ),
        )

    def forward(
        self,
        x: Tensor,
        cos: Tensor | None,
        sin: Tensor | None,
        mask: AttentionMask,
        shape: tuple[int, int],
        cache: LayerCache | None = None,
    ) -> Tensor:
        run = self.run if self.rest is None else self.rest
        out: Tensor = run(x, cos, sin, mask, shape, cache)
        return out

    def run(
        self,
        x: Tensor,
        cos: Tensor | None,
        sin: Tensor | None,
        mask: AttentionMask,
        shape: tuple[int, int],
        cache: LayerCache | None,
    ) -> Tensor:
        if cache is not None:  # lengths grow with every token, and each would recompile a compiled function
            plain: Callable[..., Any] = block_function if self.moe is None else expert_block_function
            out = plain(x, self.weights(), cos, sin, mask, self.spec, shape, cache)
        else:
            out = self.function(x, self.weights(), cos, sin, mask, self.spec, shape)
        if self.moe is None:
            return out
        x, tally = out
        if torch.is_grad_enabled():  # training; not in the function, which checkpointing may run twice
            self.tally = tally if self.tally is None else self.tally + tally
        return x


class WithoutExperts(nn.Module):
    """The modules of a block but its experts: FSDP shards the two over different ranks, and all-gathers by module."""

    def __init__(self, block: Block) -> None:
        super().__init__()
        assert block.moe is not None
        self.attention_norm, self.attention, self.ffn_norm = block.attention_norm, block.attention, block.ffn_norm
        self.attention_post_norm, self.ffn_post_norm = block.attention_post_norm, block.ffn_post_norm
        self.router, self.shared_experts = block.moe.router, block.moe.shared_experts
        self.run = block.run

    def forward(self, *arguments: Any) -> Tensor:
        return self.run(*arguments)


class Stage(NamedTuple):
    """Consecutive modules of a model: some layers, with the embedding before them or norm and output after them."""

    layers: tuple[int, ...]
    first: bool
    last: bool


class Decoder(nn.Module):
    """A model, or those of its pipeline stages that this rank holds (`stages`; None: all).

    Parameters are made on the default device, uninitialised, under their names in the whole model. Where embedding and
    output are tied, a rank with the last stage holds the embedding too. `compute_dtype` None computes in the type of
    the parameters.
    """

    frozen: frozenset[str] = frozenset()  # logical names of weights that are not trained (adapters/freeze.py)
    noise_bound = 0.0  # bound of the noise that `hidden` adds to embeddings if it is given `noise`

    gives_logits = False  # whether `hidden` returns logits, for models that change them after the output layer

    def __init__(self, arch: Architecture, split_kv: bool = False, stages: Sequence[Stage] | None = None) -> None:
        super().__init__()
        self.arch = arch
        self.compute_dtype: torch.dtype | None = None
        self.adaptation: Any = None  # what is trained, where that is only a part (adapters/lora.py)
        self.context: Any = None  # where ranks share sequences: this rank's positions, masks and tokens
        self.stages = (Stage(tuple(range(arch.n_layers)), True, True),) if stages is None else tuple(stages)
        first, last = any(stage.first for stage in self.stages), any(stage.last for stage in self.stages)
        tied = arch.tie_word_embeddings
        self.tok_embeddings = Embedding(arch.vocab_size, arch.dim) if first or (last and tied) else None
        here = {layer for stage in self.stages for layer in stage.layers}
        blocks = {str(i): Block(arch, i, window, split_kv) for i, window in enumerate(windows(arch)) if i in here}
        self.layers = nn.ModuleDict(blocks)
        self.norm = stream_norm(arch) if last else None
        self.output = Linear(arch.vocab_size, arch.dim) if last and not tied else None
        self._tables: tuple[tuple[int, torch.device], Tables] | None = None

    def hidden(
        self,
        tokens: Tensor,
        *,
        stage: Stage | None = None,
        x: Tensor | None = None,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        cache: KVCache | None = None,
        noise: Tensor | None = None,
    ) -> Tensor:
        """Hidden states (B, S, dim) of tokens (B, S) after the final norm; ranks that share tokens get their own rows.

        They include the factor `logit_scale`, so that the output layer's weight alone turns them into logits.
        `positions` (S,) or (B, S) default to 0, 1, ...; `documents` (B, S) keep packed documents apart, and positions
        restart in each. With `stage`, one of several, `x` is the residual stream before that stage (None for the first)
        and the result the one after it. `noise` (B, S) holds the keys of the noise on embeddings (noise.py).
        """
        if stage is None:
            (stage,) = self.stages
        if stage.first:
            assert self.tok_embeddings is not None
            x = self.tok_embeddings(tokens)
            x = x if self.compute_dtype is None else x.to(self.compute_dtype)
            if noise is not None:
                x = add_noise(x, self.tok_embeddings.own_rows(noise), self.noise_bound)
            if self.arch.embedding_scale != 1.0:  # rounded to the type of x, as Gemma was trained
                x = x * torch.tensor(self.arch.embedding_scale, dtype=x.dtype, device=x.device)
        assert x is not None
        if positions is None and documents is not None and self.arch.attn_mask_type == "block_causal":
            own = (lambda x: x) if self.context is None else self.context.own
            positions = own(document_positions(documents)).to(tokens.device, non_blocking=True)
            lengths = own(document_lengths(documents)) if depends_on_length(self.arch) else None
        else:
            lengths = None
        cos, sin, own_cos, own_sin, factors = self._rope(tokens, positions, cache, lengths)
        if self.context is not None and cache is None:
            masks = self.context.masks(self.arch, tokens, x.dtype, documents)
        else:
            masks = make_masks(self.arch, tokens, x.dtype, documents, cache)
        for index in stage.layers:
            block, layer = self.block(index), None if cache is None else cache.layer(index)
            mask, shape = masks[block.window], (tokens.shape[0], tokens.shape[1])
            if block.rotates and block.own_base:
                x = block(x, own_cos, own_sin, mask, shape, layer)
            elif block.rotates:
                x = block(x, cos, sin, mask, shape, layer)
            else:
                x = block(x, None, None, mask._replace(factors=factors), shape, layer)
        if cache is not None:
            cache.used += tokens.shape[1]
        if not stage.last:
            return x
        assert self.norm is not None
        x = self.norm(x)
        return x if self.arch.logit_scale == 1.0 else x * self.arch.logit_scale

    def forward(self, tokens: Tensor, **options: Any) -> Tensor:
        """Logits (B, S, V); `options` are those of `hidden`."""
        return self.logits(self.hidden(tokens, **options))

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits (..., V) of hidden states (..., dim)."""
        return capped(linear(hidden, self.output_weight(), None), self.arch.logit_cap)

    def blocks(self) -> list[Block]:
        return [block for block in self.layers.values() if isinstance(block, Block)]

    def block(self, layer: int) -> Block:
        block = self.layers[str(layer)]
        assert isinstance(block, Block)
        return block

    def whole_parameters(self) -> set[nn.Parameter]:
        """Parameters that FSDP leaves whole: balancing biases, which are updated from counts and never cast."""
        routers = [block.moe.router for block in self.blocks() if block.moe is not None]
        return {router.balance for router in routers if router.balance is not None}

    def check_masks(self, device: torch.device) -> None:
        """Called once on every rank after weights are loaded. Nothing to check: this model builds its own masks."""

    def retie(self) -> None:
        """Called after parameters were replaced. Nothing to do: a tied weight belongs to one module here."""

    def make_adaptable(self) -> None:
        """Called before low-rank matrices are attached. Nothing to do: modules that can have some are `Adaptable`."""

    def renew_blocks(self) -> None:
        """Called after modules in blocks got new parameters. Nothing to do: a block reads them in every step."""

    def computing_modules(self) -> Iterator[nn.Module]:
        """The modules whose `forward` computes: here, those that hold the parameters."""
        return self.modules()

    def output_weight(self) -> Weight:
        """The output layer's weight (V, dim), or the embedding's when they are tied."""
        if self.output is None:
            assert self.tok_embeddings is not None, "the output is in another stage"
            return local(self.tok_embeddings.weight)
        return self.output.used(local)

    def tables_for(self, tokens: Tensor) -> Tables:
        """The position tables that the next pass over such tokens reads; code that records that pass must keep them."""
        return self._rope(tokens, None, None)

    def _rope(
        self, tokens: Tensor, positions: Tensor | None, cache: KVCache | None, lengths: Tensor | None = None
    ) -> Tables:
        """Cosines and sines that broadcast to (B, S, KV, group, D/2), and factors of queries for layers without them.

        `lengths` (B, S) are those of packed documents, where frequencies depend on them. The tables of the default
        positions are cached. They are not buffers, so nothing must be recomputed when a model on the meta device gets
        its memory.
        """
        key = (tokens.shape[1], tokens.device)
        default = positions is None and cache is None
        if default and self._tables is not None and self._tables[0] == key:
            return self._tables[1]
        if default and self.context is not None:
            positions = self.context.positions(tokens.shape[1] * self.context.slices.ranks, tokens.device)
        elif positions is None:
            start = 0 if cache is None else cache.used
            positions = torch.arange(start, start + tokens.shape[1], device=tokens.device)
        length: int | Tensor | None = lengths
        if default:
            length = tokens.shape[1] * (1 if self.context is None else self.context.slices.ranks)
        cos, sin = (table[..., None, None, :] for table in rope_tables(self.arch, positions, length))
        own_cos, own_sin = None, None
        if self.arch.window_rope_theta is not None:
            own_cos, own_sin = (table[..., None, None, :] for table in window_rope_tables(self.arch, positions))
        factors = query_factors(self.arch, positions)  # broadcast to (B, S, H, D)
        tables = cos, sin, own_cos, own_sin, None if factors is None else factors[..., None, None]
        if default:
            self._tables = (key, tables)
        return tables
