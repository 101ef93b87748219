"""The life of one token in a step, told with a config's numbers: which ranks it visits, and what is sent."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from shardline.config.architecture import Architecture, MixtureOfExperts
from shardline.config.layout import Layout, routes_together
from shardline.config.schema import Config
from shardline.parallel.context.context import context_plan, slices_line
from shardline.parallel.pipeline.stages import PipelinePlan
from shardline.precision.mixed import Precision
from shardline.words import counted, listed, numbered, ranges, sized

Moment = tuple[str, str]  # its name, and what happens
RECOMPUTED = {
    "full": "Only the input of each block was saved, so the block first runs forward once more.",
    "selective": "Some results inside a block were not saved and are first computed again.",
    "memory_budget": "The compiler saved what fits its memory budget, and computes the rest again.",
    "offload": "Activations that were sent to host memory are first fetched back.",
    "none": "Everything that backward reads was saved.",
}
CONTEXT_WORDS = {
    "allgather": "Keys and values of all slices are gathered over cp; queries stay where they are.",
    "ring": "Keys and values pass around the cp ranks, block by block, while attention runs over the previous block.",
    "ulysses": "Over cp, a rank exchanges its tokens of all heads for all tokens of some heads, and back afterwards.",
}


@dataclass(frozen=True)
class TokenPath:
    """The config behind the sentences; `tokens` is the number in a micro-batch on one rank."""

    config: Config
    arch: Architecture
    layout: Layout
    precision: Precision
    plan: PipelinePlan | None

    @property
    def rows(self) -> int:
        training = self.config.training
        return training.local_batch_size * training.rows_of_a_sample if self.plan is None else self.plan.microbatch_size

    @property
    def tokens(self) -> int:
        return self.rows * self.config.training.seq_len // self.layout.cp

    @property
    def shares_rows(self) -> bool:
        """Whether tp ranks have different tokens between products."""
        return self.layout.tp > 1 and self.config.parallelism.enable_sequence_parallel

    @property
    def row_bytes(self) -> int:
        """The bytes of one token in the residual stream."""
        return self.arch.dim * self.precision.compute.itemsize

    @property
    def gathers_weights(self) -> bool:
        return self.layout.dp_shard * self.layout.cp > 1


def token_life(path: TokenPath) -> Iterator[Moment]:
    """Yield its moments, from its sample to the update to which it contributes."""
    yield "batch", _batch(path)
    if path.layout.cp > 1:
        yield "context", _context(path)
    if path.gathers_weights:
        yield "weights", _weights(path)
    if path.arch.foreign is None:
        yield "embedding", _embedding(path)
        yield "attention", _attention(path)
        yield from _feed_forward(path)
    else:
        yield "layers", f"It passes through {path.arch.n_layers} layers of the model's own code."
    if path.plan is not None:
        yield "next stage", _next_stage(path, path.plan)
    yield "loss", _loss(path)
    yield "backward", _backward(path)
    if path.layout.world_size > path.layout.pp * path.layout.tp:
        yield "gradients", _gradients(path)
    yield "update", _update(path)


def _batch(path: TokenPath) -> str:
    length, ranks = path.config.training.seq_len, path.layout.data_ranks
    where = f" on one of {ranks} data ranks, which read different samples" if ranks > 1 else ""
    share = path.layout.cp * path.layout.tp
    with_it = f" The {share} ranks of its cp and tp groups work on the same sample." if share > 1 and ranks > 1 else ""
    return f"The token is in a micro-batch of {path.rows} x {length:,} tokens{where}.{with_it}"


def _context(path: TokenPath) -> str:
    plan = context_plan(path.config, path.layout.cp, 0)
    line = slices_line(plan, path.config.training.seq_len)
    return f"Each sequence is split over cp, so one rank in {path.layout.cp} has the token: {line}."


def _weights(path: TokenPath) -> str:
    count = path.layout.dp_shard * path.layout.cp
    reshard = path.config.parallelism.fsdp_reshard_after_forward
    keeps = reshard == "never" or (reshard == "default" and path.plan is not None)
    after = "stay until the end of the step" if keeps else "are freed after it and gathered again in backward"
    return (
        f"Before each block runs, its weights are gathered from the {count} ranks that store them (FSDP); they {after}."
    )


def _embedding(path: TokenPath) -> str:
    arch, tp = path.arch, path.layout.tp
    words = f"Its id selects a row of the embedding: {arch.dim:,} numbers, {sized(path.row_bytes)}."
    if tp == 1:
        return words
    if arch.tie_word_embeddings and path.config.parallelism.disable_loss_parallel:
        return f"{words} Every tp rank has all rows."
    rows = f"{-(-arch.vocab_size // tp):,} of the {arch.vocab_size:,} rows"
    words = f"{words} Each tp rank has {rows}; the others contribute zeros, and a sum over tp"
    if path.shares_rows:
        return f"{words} leaves every rank {path.tokens // tp:,} of the {path.tokens:,} tokens (reduce-scatter)."
    return f"{words} gives all ranks all tokens (all-reduce)."


def _joined(path: TokenPath, what: str) -> str:
    """How tokens are gathered before the first product of a part."""
    if path.layout.tp == 1:
        return ""
    if path.shares_rows:
        return f"The tokens of the {path.layout.tp} tp ranks are gathered. Each rank multiplies them by its {what}."
    return f"Every tp rank has all tokens and multiplies them by its {what}."


def _summed(path: TokenPath, matrix: str) -> str:
    if path.layout.tp == 1:
        return ""
    how = "reduce-scatter, and each rank has its own tokens again" if path.shares_rows else "all-reduce"
    return f"{matrix} gives each rank a partial sum; these are added over tp ({how})."


def _attention(path: TokenPath) -> str:
    arch, layout = path.arch, path.layout
    words = [f"In each of {counted(arch.n_layers, 'layer')} the token is normalised first."]
    if layout.tp > 1:
        kv = (
            "the latent vectors"
            if arch.latent is not None
            else counted(max(1, arch.n_kv_heads // layout.tp), "key head")
        )
        words.append(_joined(path, f"{arch.n_heads // layout.tp} of {arch.n_heads} query heads and {kv}"))
    else:
        words.append(f"It has {arch.n_heads} query heads and {arch.n_kv_heads} key heads of {arch.head_dim} numbers.")
    if layout.cp > 1:
        words.append(CONTEXT_WORDS[context_plan(path.config, layout.cp, 0).method])
    words += ["It attends to the tokens before it in its sequence.", _summed(path, "The product with wo")]
    return " ".join(filter(None, words))


def _feed_forward(path: TokenPath) -> Iterator[Moment]:
    arch, tp = path.arch, path.layout.tp
    moe = arch.moe
    with_experts = [] if moe is None else [layer for layer in range(arch.n_layers) if moe.holds(layer)]
    dense = [layer for layer in range(arch.n_layers) if layer not in with_experts]
    if dense:
        width = f"{arch.ffn_dim // tp:,} of {arch.ffn_dim:,} hidden columns"
        first = _joined(path, width) or f"It is widened to {arch.ffn_dim:,} numbers and narrowed again."
        yield (
            "feed-forward" + (f" ({numbered('layer', dense)})" if moe is not None else ""),
            " ".join(filter(None, [first, _summed(path, "The product with w2")])),
        )
    if moe is not None and with_experts:
        yield f"experts ({numbered('layer', with_experts)})", _experts(path, moe)


def _experts(path: TokenPath, moe: MixtureOfExperts) -> str:
    layout = path.layout
    words = [f"The router scores {moe.n_experts} experts and takes the best {moe.top_k}."]
    if layout.ep > 1:
        copies = f"up to {moe.top_k} copies of the token, {sized(path.row_bytes)} each,"
        words.append(
            f"Each ep rank holds {counted(moe.n_experts // layout.ep, 'expert')}, so {copies} are sent to the ranks of"
            " its experts, and the results are sent back (all-to-all)."
        )
    if routes_together(layout):
        words.append(f"The {layout.tp} tp ranks share each expert's matrices, and their partial sums are added.")
    if moe.shared_dim:
        meanwhile = " meanwhile" if layout.ep > 1 else ""
        words.append(f"A shared expert of {moe.shared_dim:,} columns processes every token{meanwhile}.")
    return " ".join(words)


def _next_stage(path: TokenPath, plan: PipelinePlan) -> str:
    size = path.tokens * path.row_bytes // (path.layout.tp if path.shares_rows else 1)
    cuts = [ranges(stage.layers) or "none" for stage in plan.stages]
    return (
        f"The layers are split into {len(cuts)} stages ({listed(cuts, most=8)}). After the last layer of a stage, the"
        f" micro-batch is sent to the rank of the next one: {sized(size)} from each rank."
    )


def _loss(path: TokenPath) -> str:
    arch, tp = path.arch, path.layout.tp
    where = "On the last stage it" if path.plan is not None else "It"
    if tp > 1 and not path.config.parallelism.disable_loss_parallel:
        rows = f"{arch.vocab_size:,} rows of the output, {-(-arch.vocab_size // tp):,} on each tp rank"
        return f"{where} is compared with the {rows}. Logits are not gathered: only three numbers per token are sent."
    return f"{where} is compared with the {arch.vocab_size:,} rows of the output, for the loss of the next token."


def _backward(path: TokenPath) -> str:
    words = ["Its gradient takes the same path back."]
    if path.layout.tp > 1 and path.shares_rows:
        words.append("Where tokens were gathered, gradients are scattered, and vice versa.")
    return " ".join([*words, RECOMPUTED[path.config.activation_checkpoint.mode]])


def _gradients(path: TokenPath) -> str:
    layout, words = path.layout, []
    if path.gathers_weights:
        words.append(
            f"The gradients of weights are summed over {layout.dp_shard * layout.cp} ranks, and each keeps its shard"
            " (reduce-scatter)."
        )
    if layout.dp_replicate > 1:
        words.append(f"They are summed between {layout.dp_replicate} replicas (all-reduce).")
    return " ".join(words)


def _update(path: TokenPath) -> str:
    config = path.config
    clipped = f", clipped to a norm of {config.training.max_norm:g} over all ranks" if config.training.max_norm else ""
    what = "adapters" if config.lora.enable else "weights"
    return f"{config.optimizer.name} updates the {what} that a rank holds from their gradients{clipped}."
