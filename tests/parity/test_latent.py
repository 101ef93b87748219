"""Latent attention under every layout gives one process's numbers."""

import pytest

from tests.parity.cases import (
    ALLGATHER,
    ASYNC,
    COMPILE,
    DOCUMENTS,
    FULL_AC,
    NO_SEQUENCE,
    OP_AC,
    RING,
    ULYSSES,
    ZBV,
    Case,
    case,
    layers,
    marked,
    model,
)
from tests.parity.harness import Harness, compare

SIZES = {"kv_rank": 20, "nope_dim": 12, "rope_dim": 8, "v_dim": 12}
# With yarn the softmax has a scale of its own.
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "mscale": 0.7, "mscale_all_dim": 0.9}
COMMON = {"n_kv_heads": 8, "head_dim": 20, "rope_pairs": "neighbors"}
WIDE = model(latent=SIZES, rope_scaling=YARN, **COMMON)
LOW = model(latent={**SIZES, "q_rank": 28}, **COMMON)
EXPERTS = model(
    moe={
        "n_experts": 8,
        "top_k": 3,
        "expert_dim": 24,
        "shared_dim": 48,
        "first_dense": 1,
        "score": "sigmoid",
        "normalize": True,
        "n_groups": 4,
        "top_groups": 2,
        "group_score": "top2",
        "balance_coeff": 0.01,
    }
)
EP = {"parallelism.expert_parallel_degree": 2}

CASES = [
    case("latent-fsdp2", WIDE, fsdp=2),
    case("latent-fsdp2-low-op-ac", LOW, OP_AC, fsdp=2),
    *(
        case(f"latent-tp2{word}{name}", latent, *changes, tp=2)
        for word, latent in (("", WIDE), ("-low", LOW))
        for name, changes in (("", ()), ("-no-sequence", (NO_SEQUENCE,)), ("-async", (ASYNC,)))
    ),
    case("latent-tp2-low-async-no-sequence", LOW, ASYNC, NO_SEQUENCE, tp=2),
    case("latent-tp4-low-full-ac", LOW, FULL_AC, tp=4),
    case("latent-tp2-compile", WIDE, COMPILE, tp=2),
    case("latent-cp2-ring", WIDE, RING, cp=2),
    case("latent-cp2-ring-compile-documents", LOW, RING, COMPILE, DOCUMENTS, cp=2),
    case("latent-cp2-allgather-documents", LOW, ALLGATHER, DOCUMENTS, cp=2),
    case("latent-cp2-ulysses", WIDE, ULYSSES, cp=2),
    case("latent-cp2-tp2-ring", LOW, RING, cp=2, tp=2),
    case("latent-pp2-low", LOW, pp=2),
    case("latent-pp2-zbv", layers(4), WIDE, ZBV, pp=2),
    case("latent-pp2-zbv-tp2-low-async", layers(4), LOW, ZBV, ASYNC, pp=2, tp=2),
    case("latent-experts-fsdp2-ep2", LOW, EXPERTS, EP, fsdp=2),
    case("latent-experts-tp2-ep2", WIDE, EXPERTS, EP, tp=2),
]


FAST = {
    *("latent-fsdp2-low-op-ac", "latent-tp2-low-async-no-sequence", "latent-cp2-ring"),
    *("latent-cp2-allgather-documents", "latent-experts-tp2-ep2"),
}


@pytest.mark.parametrize("case", marked(CASES, FAST))
def test_layout(harness: Harness, case: Case) -> None:
    reference = harness.reference(case.overrides, case.timeout)
    compare(reference, harness.run(case.overrides, case.ranks, timeout=case.timeout), case.tolerances)
