"""Cases drawn from the table of features: together they turn on every pair that the table allows.

The cases written by hand cover many pairs already; for the rest, features are put together as long as the table allows
it and each adds a pair that no case has yet. A pair counts as covered where it was compared in float32, unless one of
its features is itself a lower precision: the bands of those are wide.
"""

from __future__ import annotations

import functools
import math
from itertools import combinations
from typing import Any

from shardline.config.features import EXCLUSIVE, FEATURES, NEEDS, REFUSED, active
from shardline.config.load import load_config
from tests.parity import cases
from tests.parity.cases import Case, case
from tests.parity.harness import BFLOAT16, FLOAT8, FLOAT8_OF_BFLOAT16, FLOAT32, complete, of_pairs
from tests.parity.pool import MOST_RANKS

Pair = frozenset[str]
ROUNDED = frozenset({"bfloat16", "float8"})

# Feature -> its word in a case's name, the degrees it sets, the keys it sets.
HOW: dict[str, tuple[str, dict[str, int], dict[str, Any]]] = {
    "DDP": ("ddp", {"ddp": 2}, {}),
    "FSDP": ("fsdp", {"fsdp": 2}, {}),
    "HSDP": ("hsdp", {"ddp": 2, "fsdp": 2}, {}),
    "TP": ("tp", {"tp": 2}, {}),
    "TP without sequence parallel": ("no_sequence", {}, cases.NO_SEQUENCE),
    "async TP": ("async", {}, cases.ASYNC),
    "whole loss on every TP rank": ("whole_loss", {}, cases.NO_LOSS_PARALLEL),
    "CP ring": ("ring", {"cp": 2}, cases.RING),
    "CP allgather": ("allgather", {"cp": 2}, cases.ALLGATHER),
    "CP ulysses": ("ulysses", {"cp": 2}, cases.ULYSSES),
    "accumulation": ("accumulation", {}, cases.SMALL_BATCHES),
    "AC full": ("full_ac", {}, cases.FULL_AC),
    "AC selective": ("op_ac", {}, cases.OP_AC),
    "AC memory budget": ("budget_ac", {}, cases.BUDGET_AC),
    "AC offload": ("offload_ac", {}, cases.layers(4) | cases.OFFLOAD_AC),
    "compile": ("compile", {}, cases.COMPILE),
    "optimizer in backward": ("early", {}, cases.EARLY | cases.TWO_PASSES),
    "CPU offload": ("offload", {}, cases.OFFLOAD),
    "bfloat16": ("bf16", {}, cases.BF16),
    "float8": ("float8", {}, cases.TENSORWISE),
    "LAMB": ("lamb", {}, cases.LAMB),
    "LARS": ("lars", {}, cases.LARS),
    "Muon": ("muon", {}, cases.MUON),
    "Adafactor": ("adafactor", {}, cases.ADAFACTOR),
    "LoRA": ("lora", {}, cases.LORA),
    "DPO": ("dpo", {}, cases.DPO),
    "tied embeddings": ("tied", {}, cases.TIED),
    "packed documents": ("documents", {}, cases.DOCUMENTS),
    "validation": ("validation", {}, cases.VALIDATION),
    "PP": ("pp", {"pp": 2}, {}),
    "PP zero-bubble": ("zbv", {}, cases.layers(4) | cases.ZBV),
    "experts": ("experts", {}, cases.EXPERTS),
    "EP": ("ep", {"tp": 2}, cases.ep(2)),  # replicas alone have no ranks to split
    "transformers": ("transformers", {}, cases.FOREIGN),
}


def allowed_pairs() -> set[Pair]:
    """Every pair that a config may have on together."""
    return {
        frozenset(pair)
        for pair in combinations(FEATURES, 2)
        if frozenset(pair) not in REFUSED and not any(set(pair) <= choice for choice in EXCLUSIVE)
    }


def pairs_of(entry: Case) -> set[Pair]:
    """The pairs of features that are on in a case, as its config says."""
    config = load_config(overrides=complete(entry.overrides, entry.ranks))
    return {frozenset(pair) for pair in combinations(active(config), 2)}


@functools.cache
def crossed() -> tuple[Case, ...]:
    by_hand = [pairs_of(entry) for entry in cases.CASES]
    in_float32 = [pairs for pairs in by_hand if not ROUNDED & frozenset().union(*pairs)]
    exact = {pair for pair in allowed_pairs() if not pair & ROUNDED} - set().union(*in_float32)
    rounded = {pair for pair in allowed_pairs() if pair & ROUNDED} - set().union(*by_hand)
    float8 = {pair for pair in rounded if "float8" in pair}
    found: list[Case] = []
    for left, without in ((exact, ROUNDED), (rounded - float8, {"float8"}), (float8, set[str]())):
        order = [name for name in FEATURES if name not in without]
        while left:
            features = _grow(left, order)
            found.append(_case_of(features))
            left -= {frozenset(pair) for pair in combinations(features, 2)}
    return tuple(found)


def _grow(left: set[Pair], order: list[str]) -> list[str]:
    """Features that go together, from the first pair that is left; each further one covers as many as possible."""
    chosen = _closed(min((sorted(pair, key=order.index) for pair in left), key=lambda pair: [*map(order.index, pair)]))
    while True:
        options = [closed for name in order if name not in chosen and _fits(closed := _closed([*chosen, name]))]
        gains = [sum(frozenset(pair) in left for pair in combinations(option, 2)) for option in options]
        now = sum(frozenset(pair) in left for pair in combinations(chosen, 2))
        if not options or max(gains) == now:
            return sorted(chosen, key=order.index)
        chosen = options[gains.index(max(gains))]


def _closed(features: list[str]) -> list[str]:
    """With what they need."""
    whole = list(dict.fromkeys(features))
    for name in whole:  # grows while it is walked
        whole += [other for other in NEEDS.get(name, ()) if other not in whole]
    return whole


def _fits(features: list[str]) -> bool:
    pairs = [frozenset(pair) for pair in combinations(features, 2)]
    degrees = {axis: degree for name in features for axis, degree in HOW[name][1].items()}
    if math.prod(degrees.values()) > MOST_RANKS:
        return False
    return not any(pair in REFUSED or any(pair <= choice for choice in EXCLUSIVE) for pair in pairs)


def _case_of(features: list[str]) -> Case:
    words, degrees, changes = [], dict[str, int](), list[dict[str, Any]]()
    for name in features:
        word, more, change = HOW[name]
        words.append(word)
        degrees |= more
        changes.append(change)
    if "AC memory budget" in features:
        changes.append(cases.BUDGET_AC)  # its compiler comes after the usual one
    if "experts" in features and {"bfloat16", "float8"} & set(features):
        # Rounding decides between experts with nearly equal scores, not the layout; long steps make more of it.
        changes.append(cases.FORCED | ({"optimizer.lr": 3.0} if "LARS" in features else {}))
    if {"DPO", "validation"} <= set(features):
        changes.append(cases.HELD_OUT)  # pairs to validate on
    wide, narrow = (FLOAT8, FLOAT8_OF_BFLOAT16) if "float8" in features else (FLOAT32, BFLOAT16)
    tolerances = narrow if "bfloat16" in features else wide
    tolerances = of_pairs(tolerances) if "DPO" in features else tolerances
    return case("-".join(["x", *words]), *changes, **degrees, tolerances=tolerances, slow=True, timeout=300)
