"""What a rank computes and holds, by arithmetic, against what the model says of itself."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardline.config.layout import Layout
from shardline.config.load import load_config
from shardline.models.flavors import resolve
from shardline.models.fused_weights import parameter_count
from shardline.plan.stages import by_costs, cut, stage_parameters
from shardline.plan.traits import Traits
from shardline.plan.work import Workload, head_product, layer_work
from shardline.run.device import flops_per_token


def architecture(name, flavor, **overrides):
    flags = [f"--model.overrides.{key}={value}" for key, value in overrides.items()]
    return resolve(load_config(None, [f"--model.name={name}", f"--model.flavor={flavor}", *flags]).model)


LLAMA = architecture("llama3", "8B")
MODELS = {
    "llama": LLAMA,
    "tied": architecture("llama3", "1B"),
    "experts": architecture("qwen3", "30B-A3B"),
    "latent": architecture("deepseek_v3", "16B"),
}


def workload(arch, layout=Layout(), **fields):  # noqa: B008
    return Workload(arch, layout, 4096, 1, 4, **fields)


@pytest.mark.parametrize("name", MODELS)
def test_stages_have_the_parameters_of_the_model(name):
    arch = MODELS[name]
    for layout in (Layout(), Layout(pp=2), Layout(pp=2, tp=2, dp_shard=2)):
        stages = cut(workload(arch, layout), Traits(cut="even"))
        assert sum(stage.layers for stage in stages) == arch.n_layers
        held = [sum(stage_parameters(workload(arch, layout), stage)) for stage in stages]
        twice = arch.vocab_size * arch.dim if arch.tie_word_embeddings and layout.pp > 1 else 0
        assert layout.tp * sum(held) == pytest.approx(parameter_count(arch) + twice, rel=2e-3)


@pytest.mark.parametrize("name", MODELS)
def test_products_and_attention_are_the_flops_of_the_model(name):
    arch = MODELS[name]
    one = replace(workload(arch), causal=False)
    dense, mixed = (layer_work(one, with_experts) for with_experts in (False, True))
    flops = 0.0
    for stage in cut(one, Traits(cut="even")):
        for count, work in ((stage.dense, dense), (stage.experts, mixed)):
            flops += count * (sum(product.flops for product in work.products) + work.attention)
    flops += head_product(one).flops
    assert 3 * flops / one.tokens == pytest.approx(flops_per_token(arch, 4096), rel=5e-3)


def test_tensor_parallelism_cuts_products_and_sends_the_stream():
    alone, shared = (layer_work(workload(LLAMA, Layout(tp=tp)), False) for tp in (1, 4))
    assert sum(p.flops for p in alone.products) == pytest.approx(4 * sum(p.flops for p in shared.products))
    assert not alone.sent
    assert [one.kind for one in shared.sent] == ["all_gather", "reduce_scatter"] * 2
    assert {one.size for one in shared.sent} == {4096 * LLAMA.dim * 2.0}
    plain = layer_work(workload(LLAMA, Layout(tp=4), sequence_parallel=False), False)
    assert [one.kind for one in plain.sent] == ["all_reduce"] * 2


def test_experts_get_the_rows_of_their_tokens():
    arch = MODELS["experts"]
    moe = arch.moe
    work = layer_work(workload(arch, Layout(dp_shard=8, ep=8)), True)
    grouped = [product for product in work.products if product.experts]
    assert [product.repeat for product in grouped] == [moe.n_experts / 8] * 2
    assert all(product.rows * product.repeat == 4096 * moe.top_k for product in grouped)
    assert {one.kind for one in work.sent} == {"all_to_all"}


def test_a_window_and_context_parallelism_change_what_attention_computes():
    whole = layer_work(workload(LLAMA), False).attention
    assert layer_work(workload(LLAMA, Layout(cp=2)), False).attention == whole / 2
    narrow = LLAMA.with_overrides({"sliding_window": 512})
    assert layer_work(workload(narrow), False).attention < whole / 3
    seen = [min(place + 1, 512) for place in range(4096)]  # keys that each query sees
    ratio = layer_work(workload(narrow), False).attention / whole
    assert ratio == pytest.approx(sum(seen) / (4096 * 4097 / 2), rel=2e-3)
    half = narrow.with_overrides({"sliding_window_layers": tuple(range(0, LLAMA.n_layers, 2))})
    assert layer_work(workload(half), False).attention / whole == pytest.approx((1 + ratio) / 2)
    assert layer_work(workload(LLAMA, causal=False), False).attention == 2 * whole


def test_context_parallel_ranks_send_keys_and_values_of_their_own_tokens():
    own = 2 * 1024 * LLAMA.n_kv_heads * LLAMA.head_dim * 2.0  # keys and values of 4096 / 4 tokens in bfloat16
    gathered, passed = (layer_work(workload(LLAMA, Layout(cp=4), ring=ring), False) for ring in (False, True))
    assert [(one.kind, one.size) for one in gathered.sent] == [("all_gather", 4 * own)]
    assert [(one.kind, one.size) for one in passed.sent] == [("send", 3 * own)]
    assert [one.kind for one in gathered.sent_backward] == ["all_gather", "reduce_scatter"]
    assert [one.size for one in passed.sent_backward] == [3 * own] * 2


def test_stages_by_costs_count_the_output_layer():
    """16 equal layers and an output layer of 4: half of the costs are 10 layers, or the one that crosses as well."""
    arch = architecture("llama3", "1B", n_kv_heads=32, vocab_size=131072)
    assert by_costs(workload(arch, Layout(pp=2))) == (10, 6)
    assert by_costs(workload(arch, Layout(pp=2)), above=True) == (11, 5)
    assert by_costs(workload(arch, Layout(pp=4))) == (5, 5, 5, 1)
    assert by_costs(workload(arch, Layout(pp=16)))[-1] == 0  # the output layer leaves ranks without a layer
