"""Dense families beyond Llama under many layouts give one process's numbers: caps, norms, biases, parallel blocks."""

import pytest

from tests.parity.cases import (
    ALLGATHER,
    ASYNC,
    COMPILE,
    DOCUMENTS,
    NO_LOSS_PARALLEL,
    NO_SEQUENCE,
    ONE_KV_HEAD,
    OP_AC,
    RING,
    SMALL_STEPS,
    TENSORWISE,
    ULYSSES,
    VALIDATION,
    ZBV,
    Case,
    case,
    layers,
    marked,
    model,
)
from tests.parity.harness import FLOAT8, Harness, compare

ALTERNATING = {"sliding_window": 6, "sliding_window_layers": [0]}
GEMMA = {
    "norm_kind": "rms_plus_one",
    "norm_places": "both",
    "activation": "gelu_tanh",
    "embedding_scale": 8.0,
    "tie_word_embeddings": True,
    **ALTERNATING,
}
GEMMA2 = model(**GEMMA, score_cap=2.0, logit_cap=1.5, attention_scale=0.3)
GEMMA3 = model(**GEMMA, qk_norm=True, window_rope_theta=100.0, rope_scaling={"type": "linear", "factor": 8.0})
LONG = {
    "type": "longrope",
    "factor": 4.0,
    "original_max_position_embeddings": 16,  # of 32 tokens, of which a rank of context parallelism has 16
    "short_factor": [1.0, 1.5, 2.0],
    "long_factor": [1.0, 4.0, 9.0],
}
PHI3 = model(rope_fraction=0.75, rope_scaling=LONG, sliding_window=20)
OLMO2 = model(norm_places="after", qk_norm=True, qk_norm_over="width", **ALTERNATING)
GRANITE = model(
    embedding_scale=12.0, residual_scale=0.22, attention_scale=0.1, logit_scale=0.125, tie_word_embeddings=True
)
# Key biases of dimensions that do not rotate change no softmax: with the usual eps Adam makes whole steps of rounding.
GLM4 = {"optimizer.eps": 1e-4} | model(
    norm_places="both", rope_fraction=0.5, rope_pairs="neighbors", qkv_bias=True, n_kv_heads=2
)
STARCODER2 = model(
    norm_kind="layer",
    norm_bias=True,
    activation="gelu_tanh",
    gated=False,
    qkv_bias=True,
    out_bias=True,
    mlp_bias=True,
    tie_word_embeddings=True,
    ffn_dim=132,
)
COHERE = model(
    norm_kind="layer",
    parallel_block=True,
    rope_pairs="neighbors",
    qk_norm=True,
    qk_norm_over="each_head",
    logit_scale=0.25,
    tie_word_embeddings=True,
)
SMOLLM3 = model(rope_layers=[0])

CASES = [
    case("gemma2-tp2", GEMMA2, VALIDATION, tp=2),
    case("gemma2-tp2-whole-vocabulary", GEMMA2, NO_LOSS_PARALLEL, tp=2),
    case("gemma2-tp2-async", GEMMA2, ASYNC, tp=2),
    case("gemma2-cp2-ring", GEMMA2, RING, cp=2),
    case("gemma2-cp2-ring-documents", GEMMA2, RING, DOCUMENTS, cp=2),
    case("gemma2-cp2-allgather", GEMMA2, ALLGATHER, cp=2),
    case("gemma2-cp2-ulysses", GEMMA2, ULYSSES, cp=2),
    case("gemma2-pp2", GEMMA2, pp=2),
    case("gemma2-pp2-zbv", GEMMA2, layers(4), ZBV, pp=2),
    case("gemma2-fsdp2-compile", GEMMA2, COMPILE, fsdp=2),
    case("gemma2-cp2-compile", GEMMA2, RING, COMPILE, cp=2),
    case("gemma2-ddp2-op-ac", GEMMA2, OP_AC, ddp=2),
    case("gemma3-fsdp2-tp2", GEMMA3, fsdp=2, tp=2),
    case("gemma3-cp2-ring", GEMMA3, RING, cp=2),
    case("phi3-tp2", PHI3, tp=2),
    case("phi3-cp2-ring", PHI3, RING, cp=2),
    case("olmo2-tp2", OLMO2, tp=2),
    case("olmo2-tp2-whole", OLMO2, NO_SEQUENCE, tp=2),
    case("olmo2-tp4-one-kv-head", OLMO2, ONE_KV_HEAD, tp=4),
    case("olmo2-fsdp2-tp2-async-compile", OLMO2, ASYNC, COMPILE, fsdp=2, tp=2),
    case("olmo2-pp2-zbv-tp2", OLMO2, layers(4), ZBV, pp=2, tp=2),
    case("granite-tp2", GRANITE, tp=2),
    case("granite-pp2", GRANITE, pp=2),
    case("glm4-tp2", GLM4, tp=2),
    case("glm4-tp4-split-kv", GLM4, tp=4),
    case("starcoder2-tp2", STARCODER2, tp=2),
    case("starcoder2-tp2-whole", STARCODER2, NO_SEQUENCE, tp=2),
    case("starcoder2-fsdp2", STARCODER2, fsdp=2),
    case("starcoder2-tp2-float8", STARCODER2, TENSORWISE, SMALL_STEPS, tp=2, tolerances=FLOAT8),
    case("cohere-tp2", COHERE, tp=2),
    case("cohere-tp4-one-kv-head", COHERE, ONE_KV_HEAD, tp=4),
    case("cohere-pp2-zbv", COHERE, layers(4), ZBV, pp=2),
    case("smollm3-ddp2", SMOLLM3, ddp=2),
]
FAST = {
    *("gemma2-tp2", "gemma2-cp2-ring-documents", "gemma3-fsdp2-tp2", "phi3-cp2-ring", "olmo2-tp2"),
    *("granite-tp2", "glm4-tp2", "starcoder2-tp2", "cohere-tp2"),
}


@pytest.mark.parametrize("case", marked(CASES, FAST))
def test_layout(harness: Harness, case: Case) -> None:
    reference = harness.reference(case.overrides, case.timeout)
    compare(reference, harness.run(case.overrides, case.ranks, timeout=case.timeout), case.tolerances)
