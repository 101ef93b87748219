"""What layers keep: the trace without memory against what autograd really saves, and against the compiler's choice."""

from __future__ import annotations

import pytest
import torch

from shardline.comm.mesh import Mesh
from shardline.config.layout import Layout
from shardline.config.load import load_config
from shardline.models.attention import make_masks
from shardline.models.flavors import resolve
from shardline.parallel.apply import make_model
from shardline.plan.of_config import kept_by
from shardline.plan.trace import Kept, trace_layers
from shardline.precision.mixed import Precision

FLOAT32 = Precision(torch.float32, torch.float32, torch.float32)
SMALL = {"dim": 64, "n_layers": 1, "n_heads": 4, "n_kv_heads": 2, "head_dim": 16, "ffn_dim": 160, "vocab_size": 256}


def config_of(*flags, name="llama3", flavor="debugmodel", **overrides):
    sizes = [f"--model.overrides.{key}={value}" for key, value in overrides.items()]
    return load_config(None, [f"--model.name={name}", f"--model.flavor={flavor}", *sizes, *flags])


def saved_bytes(config, tokens, **options):
    """Bytes that the first block of a real model saves, weights not counted."""
    arch = resolve(config.model)
    model, _ = make_model(arch, config, Mesh(Layout(), "cpu"), FLOAT32)
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    block, numbers = model.block(0), torch.zeros(1, tokens, dtype=torch.int64)
    if options:
        torch._dynamo.reset()
        block.function = torch.compile(block.function, fullgraph=True, **options)
    cos, sin, *_ = model._rope(numbers, None, None)
    mask = make_masks(arch, numbers, torch.float32, None, None)[block.window]
    saved = {}
    known = {parameter.untyped_storage()._cdata for parameter in block.parameters()}
    known |= {table.untyped_storage()._cdata for table in (cos, sin)}

    def save(x):
        if x.untyped_storage()._cdata not in known:
            saved[x.untyped_storage()._cdata] = x.untyped_storage().nbytes()
        return x

    x = torch.randn(1, tokens, arch.dim, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(save, lambda x: x):
        out = block(x, cos, sin, mask, (1, tokens), None)
    saved.pop(out.untyped_storage()._cdata, None)
    return sum(saved.values())


def test_without_sequence_parallel_a_rank_keeps_the_stream_of_all_tokens():
    def kept(*flags):
        config = config_of("--parallelism.tensor_parallel_degree=2", *flags, **SMALL)
        return kept_by(config, resolve(config.model), "cpu")(2)[False]

    split, whole = kept(), kept("--parallelism.enable_sequence_parallel=false")
    stream = SMALL["dim"] * 4
    assert whole["full"].per_token == 2 * split["full"].per_token == stream  # its input alone
    for way in ("cpu", "eager"):
        assert whole[way].per_token >= split[way].per_token + stream / 2


@pytest.mark.parametrize("overrides", [{}, {"qk_norm": "true"}, {"gated": "false", "activation": "gelu_tanh"}])
def test_a_trace_counts_what_autograd_saves(overrides):
    config = config_of(**{**SMALL, **overrides})
    kept = kept_by(config, resolve(config.model), "cpu")(1)[False]["cpu"]
    for tokens in (128, 640):
        assert kept.bytes(tokens) == pytest.approx(saved_bytes(config, tokens), rel=0.01)


def test_policies_keep_less_from_one_to_the_next():
    config = config_of(**SMALL)
    ways = kept_by(config, resolve(config.model))(1)[False]
    sizes = [ways[name].per_token for name in ("eager", "compiled", "op", "full")]
    assert sizes == sorted(sizes, reverse=True)
    assert ways["full"] == Kept(SMALL["dim"] * 2.0, 0.0)  # the block's input alone, in bfloat16


def test_selective_checkpointing_keeps_what_its_policy_saves():
    """Input, fused QKV, attention and its log-sum-exp, and the fused gate-up product."""
    config = config_of(**SMALL)
    kept = kept_by(config, resolve(config.model))(1)[False]["op"]
    qkv = (SMALL["n_heads"] + 2 * SMALL["n_kv_heads"]) * SMALL["head_dim"]
    numbers = SMALL["dim"] + qkv + SMALL["n_heads"] * SMALL["head_dim"] + 2 * SMALL["ffn_dim"]
    assert kept.per_token == pytest.approx(2 * numbers + 4 * SMALL["n_heads"], rel=0.01)


def test_tensor_parallel_ranks_keep_their_part():
    config = config_of(**{**SMALL, "n_heads": 8, "n_kv_heads": 8, "head_dim": 8})
    table = kept_by(config, resolve(config.model))
    alone, shared = table(1)[False]["op"].per_token, table(4)[False]["op"].per_token
    assert shared == pytest.approx(alone / 4, rel=0.01)
    assert table(4)[False]["eager"].per_token > table(1)[False]["eager"].per_token / 4  # gathered inputs stay whole


def test_layers_with_experts_are_traced_apart():
    config = config_of(name="deepseek_v3")
    kinds = kept_by(config, resolve(config.model))(1)
    assert set(kinds) == {False, True}
    assert kinds[True]["op"].per_token < kinds[True]["compiled"].per_token


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [256, 512])
def test_compiled_blocks_keep_what_the_trace_says(tokens):
    """The compiler's own partition of forward and backward."""
    import torch._functorch.config as functorch

    config = config_of(**SMALL)
    kept = trace_layers(resolve(config.model), config, 1, FLOAT32)[False]["compiled"]
    with functorch.patch(ban_recompute_materialized_backward=False):  # as memory/activation.py sets it
        measured = saved_bytes(config, tokens, backend="aot_eager_decomp_partition")
    assert kept.bytes(tokens) == pytest.approx(measured, rel=0.02)


def test_a_trace_logs_nothing(caplog):
    config = config_of(**SMALL)
    with caplog.at_level("INFO", "shardline"):
        kept_by(config, resolve(config.model))(2)
    assert not caplog.records


def test_keys_may_name_a_layer_that_a_small_model_lacks():
    config = config_of("--lora.enable", "--lora.target_modules=layers.3.attention.wq", **{**SMALL, "n_layers": 4})
    assert kept_by(config, resolve(config.model))(1)[False]["full"].per_token > 0
