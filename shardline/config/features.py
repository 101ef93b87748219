"""Which features can be combined: one table for the validator, the compatibility page and the parity tests.

A feature is on if its test holds for a config. Two features can be on together unless they are alternatives
(`EXCLUSIVE`) or the pair is refused, with a reason and a remedy (`REFUSED`). A parity case runs every allowed pair.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import combinations

from shardline.config.names import FLOAT8_LINEAR, SPLIT_SCHEDULES, find_schedule, is_foreign
from shardline.config.schema import Config


@dataclass(frozen=True)
class Refusal:
    reason: str
    remedy: str


# A degree of -1 is neither 1 nor above 1: it depends on the number of ranks (`layout.with_degrees`).
def _shards(config: Config) -> bool:
    return config.parallelism.data_parallel_shard_degree > 1


def has_replicas(config: Config) -> bool:
    return config.parallelism.data_parallel_replicate_degree > 1


def is_context_parallel(config: Config) -> bool:
    return config.parallelism.context_parallel_degree > 1


def _travels(*methods: str) -> Callable[[Config], bool]:
    return lambda config: is_context_parallel(config) and config.parallelism.context_parallel_rotate_method in methods


def is_tensor_parallel(config: Config) -> bool:
    return config.parallelism.tensor_parallel_degree > 1


def is_pipelined(config: Config) -> bool:
    return config.parallelism.pipeline_parallel_degree > 1


def _splits_backward(config: Config) -> bool:
    """What a schedule from a file does is known only when the file is read."""
    section = config.parallelism
    named = find_schedule(section.pipeline_parallel_schedule) in SPLIT_SCHEDULES
    return is_pipelined(config) and named and not section.pipeline_parallel_schedule_csv


def _mode(*names: str) -> Callable[[Config], bool]:
    return lambda config: config.activation_checkpoint.mode in names


def _override(name: str, value: object) -> Callable[[Config], bool]:
    return lambda config: config.model.overrides.get(name) == value


_keeps_documents_apart = _override("attn_mask_type", "block_causal")


def _packs_records(config: Config) -> bool:
    return bool(config.data.sources) and config.data.packing == "first_fit"


FEATURES: dict[str, Callable[[Config], bool]] = {
    "DDP": lambda c: has_replicas(c) and c.parallelism.data_parallel_shard_degree == 1 and not is_context_parallel(c),
    "FSDP": lambda c: _shards(c) and not has_replicas(c),
    "HSDP": lambda c: (_shards(c) or is_context_parallel(c)) and has_replicas(c),
    "TP": is_tensor_parallel,
    "TP without sequence parallel": lambda c: is_tensor_parallel(c) and not c.parallelism.enable_sequence_parallel,
    "async TP": lambda c: is_tensor_parallel(c) and c.parallelism.enable_async_tensor_parallel,
    "whole loss on every TP rank": lambda c: is_tensor_parallel(c) and c.parallelism.disable_loss_parallel,
    "CP ring": _travels("ring", "alltoall"),
    "CP allgather": _travels("allgather"),
    "CP ulysses": _travels("ulysses"),
    "accumulation": lambda c: (
        (c.training.gradient_accumulation_steps or 1) > 1
        or c.training.global_batch_size > c.training.local_batch_size * _known_data_ranks(c)
    ),
    "AC full": _mode("full"),
    "AC selective": _mode("selective"),
    "AC memory budget": _mode("memory_budget"),
    "AC offload": _mode("offload"),
    "compile": lambda c: c.compile.enable,
    "optimizer in backward": lambda c: c.optimizer.early_step_in_backward,
    "CPU offload": lambda c: c.training.enable_cpu_offload,
    "bfloat16": lambda c: c.training.mixed_precision_param == "bfloat16" and c.is_set("training.mixed_precision_param"),
    "float8": lambda c: FLOAT8_LINEAR in c.model.converters,
    "LAMB": lambda c: c.optimizer.name == "LAMB",
    "LARS": lambda c: c.optimizer.name == "LARS",
    "Muon": lambda c: c.optimizer.name == "Muon",
    "Adafactor": lambda c: c.optimizer.name == "Adafactor",
    "LoRA": lambda c: c.lora.enable,
    "DPO": lambda c: c.training.objective == "dpo",
    "tied embeddings": _override("tie_word_embeddings", True),
    "packed documents": lambda c: _keeps_documents_apart(c) or _packs_records(c),
    "validation": lambda c: c.validation.enable,
    "PP": is_pipelined,
    "PP zero-bubble": _splits_backward,
    "experts": lambda c: bool(c.model.overrides.get("moe")) or c.parallelism.expert_parallel_degree > 1,
    "EP": lambda c: c.parallelism.expert_parallel_degree > 1,
    "transformers": is_foreign,
}

# Context-parallel ranks shard the parameters too: with replicas that is HSDP.
EXCLUSIVE: tuple[frozenset[str], ...] = (
    frozenset({"DDP", "FSDP", "HSDP"}),
    *(frozenset({"DDP", name}) for name in ("CP ring", "CP allgather", "CP ulysses")),
    frozenset({"CP ring", "CP allgather", "CP ulysses"}),
    frozenset({"AC full", "AC selective", "AC memory budget", "AC offload"}),
    frozenset({"LAMB", "LARS", "Muon", "Adafactor"}),
)

_NOT_IN_BACKWARD = 'set optimizer.name = "AdamW", or optimizer.early_step_in_backward = false'
_TRUST_RATIO = Refusal("a trust ratio needs one all-reduce per parameter during backward", _NOT_IN_BACKWARD)
_COMPILED = Refusal(
    "compiled blocks cannot compute weight gradients separately from input gradients",
    'set parallelism.pipeline_parallel_schedule = "Interleaved1F1B", or compile.enable = false',
)
_LATE = Refusal(
    "a gradient is complete only after the last micro-batch of its stage",
    "set optimizer.early_step_in_backward = false",
)
_SHARD = "set {} = 1, and shard with parallelism.data_parallel_shard_degree"
# Features that need to know the arithmetic of a block: feature -> remedy.
_NATIVE_ONLY = {
    **dict.fromkeys(
        ("TP", "TP without sequence parallel", "async TP", "whole loss on every TP rank"),
        _SHARD.format("parallelism.tensor_parallel_degree"),
    ),
    **dict.fromkeys(("CP ring", "CP allgather", "CP ulysses"), _SHARD.format("parallelism.context_parallel_degree")),
    **dict.fromkeys(("PP", "PP zero-bubble"), _SHARD.format("parallelism.pipeline_parallel_degree")),
    **dict.fromkeys(("experts", "EP"), _SHARD.format("parallelism.expert_parallel_degree")),
    "float8": "remove it from model.converters",
    "Muon": 'set optimizer.name = "AdamW"',
}
REFUSED: dict[frozenset[str], Refusal] = {
    frozenset({"DDP", "optimizer in backward"}): Refusal(
        "gradients stay in buckets until they are summed, so it would save no memory",
        "shard instead: raise parallelism.data_parallel_shard_degree and lower data_parallel_replicate_degree",
    ),
    frozenset({"DDP", "CPU offload"}): Refusal(
        "every replica would keep the whole model in host memory",
        "shard instead: raise parallelism.data_parallel_shard_degree and lower data_parallel_replicate_degree",
    ),
    frozenset({"optimizer in backward", "LAMB"}): _TRUST_RATIO,
    frozenset({"optimizer in backward", "LARS"}): _TRUST_RATIO,
    frozenset({"optimizer in backward", "Adafactor"}): Refusal(
        "means over rows and columns need all-reduces of each parameter during backward", _NOT_IN_BACKWARD
    ),
    frozenset({"optimizer in backward", "Muon"}): Refusal(
        "ranks divide the matrices among themselves, and have all gradients only after backward", _NOT_IN_BACKWARD
    ),
    **{
        frozenset({"LoRA", name}): Refusal(
            "it scales or orthogonalizes updates of whole weight matrices, which LoRA's factors are not",
            'set optimizer.name = "AdamW"',
        )
        for name in ("LAMB", "LARS", "Muon")
    },
    frozenset({"PP", "optimizer in backward"}): _LATE,
    frozenset({"PP zero-bubble", "optimizer in backward"}): _LATE,
    frozenset({"PP zero-bubble", "compile"}): _COMPILED,
    frozenset({"PP zero-bubble", "AC memory budget"}): _COMPILED,
    **{
        frozenset({"transformers", name}): Refusal("needs a model family that Shardline has itself", remedy)
        for name, remedy in _NATIVE_ONLY.items()
        if name in FEATURES
    },
}

REFUSED |= {
    frozenset({"DPO", name}): Refusal(
        "the loss of a pair needs both log-probabilities before the first backward, and stages send in one direction",
        _SHARD.format("parallelism.pipeline_parallel_degree"),
    )
    for name in ("PP", "PP zero-bubble")
}

# Features that need another one.
NEEDS: dict[str, tuple[str, ...]] = {
    "TP without sequence parallel": ("TP",),
    "async TP": ("TP",),
    "whole loss on every TP rank": ("TP",),
    "AC memory budget": ("compile",),
    "PP zero-bubble": ("PP",),
    "EP": ("experts",),
}


def active(config: Config) -> list[str]:
    return [name for name, test in FEATURES.items() if test(config)]


def refusals(config: Config) -> Iterator[tuple[str, str, Refusal]]:
    """Pairs of features that are on and cannot be combined."""
    for pair in combinations(active(config), 2):
        refusal = REFUSED.get(frozenset(pair))
        if refusal is not None:
            yield *pair, refusal


def _known_data_ranks(config: Config) -> int:
    part = config.parallelism
    return max(part.data_parallel_replicate_degree, 1) * max(part.data_parallel_shard_degree, 1)


def compatibility_page() -> str:
    """The page `docs/compatibility.md`."""
    names = list(FEATURES)
    numbers = {pair: number for number, pair in enumerate(REFUSED, start=1)}
    lines = [
        "# Which features can be combined",
        "",
        "Generated by `shardline config --compatibility` from the table that the validator uses. `+`: allowed, and a",
        "parity case runs the pair. A number: refused, for the reason below. `.`: two alternatives.",
        "",
        "| | " + " | ".join(str(index) for index in range(1, len(names) + 1)) + " |",
        "|---" * (len(names) + 1) + "|",
    ]
    for row, name in enumerate(names):
        cells = [_cell(name, other, numbers) if column < row else "" for column, other in enumerate(names)]
        lines.append(f"| **{row + 1}. {name}** | " + " | ".join(cells) + " |")
    lines.append("")
    for pair, number in numbers.items():
        refusal = REFUSED[pair]
        together = " with ".join(sorted(pair))
        lines.append(f"{number}. {together}: {refusal.reason}; {refusal.remedy}.")
    for name, others in NEEDS.items():
        lines.append(f"- {name} needs {', '.join(others)}.")
    return "\n".join(lines) + "\n"


def _cell(a: str, b: str, numbers: dict[frozenset[str], int]) -> str:
    pair = frozenset({a, b})
    if pair in numbers:
        return str(numbers[pair])
    return "." if any(pair <= choice for choice in EXCLUSIVE) else "+"
