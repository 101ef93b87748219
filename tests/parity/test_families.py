"""gpt-oss and Llama 4 under every layout give one process's numbers: sinks, chunks, layers without rotary positions."""

import pytest

from tests.parity.cases import (
    ALLGATHER,
    COMPILE,
    CONTIGUOUS,
    DOCUMENTS,
    NO_SEQUENCE,
    ONE_KV_HEAD,
    OP_AC,
    RING,
    SMALL_STEPS,
    ULYSSES,
    ZBV,
    Case,
    case,
    layers,
    marked,
    model,
)
from tests.parity.harness import Harness, compare
from tests.parity.test_experts import ep

EXPERTS = {
    "n_experts": 8,
    "top_k": 2,
    "expert_dim": 32,
    "normalize": True,
    "router_bias": True,
    "activation": "clamped",
}
GPT_OSS = model(
    sinks=True,
    sliding_window=6,
    sliding_window_layers=[0],
    qkv_bias=True,
    out_bias=True,
    mlp_bias=True,
    moe=EXPERTS,
)
LLAMA4 = SMALL_STEPS | model(
    n_layers=4,
    rope_pairs="neighbors",
    rope_layers=[0, 1, 2],
    sliding_window=12,  # of 32 tokens: chunks end within the slices of context parallelism
    sliding_window_layers=[0, 1, 2],
    window_kind="chunked",
    rotated_norm=True,
    query_scale=0.3,
    query_scale_step=4,
    moe={
        "n_experts": 8,
        "top_k": 1,
        "expert_dim": 32,
        "shared_dim": 32,
        "every": 2,
        "score": "sigmoid",
        "scale_input": True,
    },
)

CASES = [
    case("gpt-oss-tp2", GPT_OSS, tp=2),
    case("gpt-oss-tp2-whole", GPT_OSS, NO_SEQUENCE, tp=2),
    case("gpt-oss-tp2-one-kv-head", GPT_OSS, ONE_KV_HEAD, tp=2),
    case("gpt-oss-fsdp2-ep2", GPT_OSS, ep(2), fsdp=2),
    case("gpt-oss-fsdp4-ep2-one-expert", GPT_OSS, model(moe={**EXPERTS, "n_experts": 2}), ep(2), fsdp=4),
    case("gpt-oss-tp2-ep2", GPT_OSS, ep(2), tp=2),
    case("gpt-oss-cp2-ring", GPT_OSS, RING, cp=2),
    case("gpt-oss-cp2-allgather", GPT_OSS, ALLGATHER, cp=2),
    case("gpt-oss-cp2-ulysses", GPT_OSS, ULYSSES, cp=2),
    case("gpt-oss-cp2-ring-documents", GPT_OSS, RING, DOCUMENTS, cp=2),
    case("gpt-oss-cp2-tp2-ulysses", GPT_OSS, ULYSSES, cp=2, tp=2),
    case("gpt-oss-pp2", GPT_OSS, pp=2),
    case("gpt-oss-pp2-zbv", GPT_OSS, layers(4), ZBV, pp=2),
    case("gpt-oss-ddp2-op-ac", GPT_OSS, OP_AC, ddp=2),
    case("gpt-oss-fsdp2-compile", GPT_OSS, COMPILE, fsdp=2),
    case("gpt-oss-cp2-compile", GPT_OSS, RING, COMPILE, cp=2),
    case("llama4-tp2", LLAMA4, tp=2),
    case("llama4-fsdp2-ep2", LLAMA4, ep(2), fsdp=2),
    case("llama4-cp2-ring", LLAMA4, RING, cp=2),
    case("llama4-cp2-ring-contiguous", LLAMA4, RING, CONTIGUOUS, cp=2),
    case("llama4-cp2-allgather", LLAMA4, ALLGATHER, cp=2),
    case("llama4-cp2-ulysses", LLAMA4, ULYSSES, cp=2),
    case("llama4-cp2-ring-documents", LLAMA4, RING, DOCUMENTS, cp=2),
    case("llama4-pp2", LLAMA4, pp=2),
    case("llama4-fsdp2-compile", LLAMA4, COMPILE, fsdp=2),
]


FAST = {
    *("gpt-oss-tp2-whole", "gpt-oss-fsdp2-ep2", "gpt-oss-cp2-ring-documents"),
    *("llama4-tp2", "llama4-fsdp2-ep2", "llama4-cp2-ring"),
}


@pytest.mark.parametrize("case", marked(CASES, FAST))
def test_layout(harness: Harness, case: Case) -> None:
    reference = harness.reference(case.overrides, case.timeout)
    compare(reference, harness.run(case.overrides, case.ranks, timeout=case.timeout), case.tolerances)
