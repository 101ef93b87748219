"""Dry runs of many ranks: shards that add up to the model, and the collectives of a step."""

from __future__ import annotations

import sys
import time
from collections import Counter

import pytest
import torch
import torch.distributed as dist

from shardline.cli.main import main
from shardline.comm.fake import fake_group
from shardline.comm.job import job
from shardline.config.layout import KEYS, resolve_layout
from shardline.config.load import load_config
from shardline.config.schema import Config
from shardline.errors import UserError
from shardline.models.flavors import resolve
from shardline.models.fused_weights import parameter_count
from shardline.precision.mixed import Precision
from shardline.tools.dry_run import traffic as dry_step
from shardline.tools.dry_run.dry_run import describe
from shardline.tools.dry_run.shapes import build_rank, chosen_ranks, held, same_shapes, shapes
from shardline.tools.dry_run.traffic import step_collectives
from shardline.tools.stage_costs import read_model

FLOAT32 = Precision(torch.float32, torch.float32, torch.float32)
TINY = {"dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "head_dim": 8, "ffn_dim": 64, "vocab_size": 333}
BATCH, LENGTH = 2, 16
EXPERTS = {"n_experts": 8, "top_k": 2, "expert_dim": 16, "shared_dim": 16, "first_dense": 1, "balance_coeff": 0.01}
EP, ETP = "parallelism__expert_parallel_degree", "parallelism__expert_tensor_parallel_degree"


def tiny(overrides: dict | None = None, **settings) -> Config:
    """Settings: axes of the layout, and config keys with `__` for the dot."""
    values = {
        "model.flavor": "debugmodel",
        "model.overrides": {**TINY, **(overrides or {})},
        "training.local_batch_size": BATCH,
        "training.seq_len": LENGTH,
        "training.mixed_precision_param": "float32",
        "training.loss_chunk_tokens": BATCH * LENGTH,
    }
    for name, value in settings.items():
        key = f"parallelism.{KEYS[name]}" if name in KEYS else name.replace("__", ".")
        values[key] = value
    return load_config(overrides=values)


def traffic_of(ranks: int, config: Config, micro_batches: int = 1) -> dict[tuple[str, str], Counter]:
    layout = resolve_layout(config.parallelism, ranks)
    return step_collectives(resolve(config.model), config, layout, FLOAT32, micro_batches)


# ---- experts ---------------------------------------------------------------------------------------------------------


def test_tokens_travel_to_their_experts_and_back():
    """Rows of `dim` there and back, their weights there; the same in backward; first the counts, as int64."""
    traffic = traffic_of(4, tiny({"moe": EXPERTS, "n_layers": 3}, dp_shard=4, **{EP: 4}))
    counted, counts = traffic[("ep", "all-to-all")], traffic[("ep", "all-gather")]
    rows, layers = BATCH * LENGTH * 2, 2
    parts, rest = divmod(counted["calls"], 4 * layers)  # tokens may travel in parts, each with counts of its own
    assert parts > 0
    assert rest == 0
    assert counted["bytes"] == layers * rows * 4 * 2 * (2 * TINY["dim"] + 1) * 3 // 4
    assert counts["bytes"] == layers * parts * 8 * EXPERTS["n_experts"] * 3


@pytest.mark.parametrize(
    "settings",
    [
        {"dp_shard": 2, EP: 2},
        {"cp": 2, EP: 2},
        {"dp_shard": 2, "tp": 2, EP: 4},
        {"dp_shard": 2, "tp": 2, EP: 2, ETP: 2},
    ],
    ids=str,
)
def test_the_formula_of_what_travels_in_a_pass(settings):
    """`shardline schedule` computes it, a dry run counts it."""
    config = tiny({"moe": EXPERTS, "n_layers": 4}, pp=2, training__local_batch_size=3, **settings)
    model = read_model(config, None)
    costs = model.costs(2)
    assert costs.with_experts[0] > 0
    assert costs.transfers == tuple(2 * layers for layers in costs.with_experts)
    counted = traffic_of(model.layout.world_size, config)[("ep", "all-to-all")]
    assert counted["bytes"] == 3 * 2 * costs.sent[0]  # three micro-batches, forward and backward


def test_without_a_number_of_ranks_experts_have_enough():
    config = tiny({"moe": EXPERTS}, tp=2, **{EP: 4})
    assert describe(config).startswith("llama3 debugmodel on 4 ranks: dp_shard 2 x tp 2 (experts: ep 4)")


def test_biases_that_no_axis_cuts_are_stepped_too():
    counted = traffic_of(2, tiny({"moe": EXPERTS}, dp_shard=2, **{EP: 2}))
    assert counted[("ep", "all-to-all")]["calls"] > 0
    assert counted[("world", "all-reduce")]["calls"] == 1


@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_layers_with_and_without_experts_are_extended_apart(every):
    moe = {**EXPERTS, "every": every}
    deep = {number: tiny({"moe": moe, "n_layers": number}, dp_shard=4, **{EP: 4}) for number in (9, 11)}
    calls = {number: traffic_of(4, config)[("ep", "all-to-all")]["calls"] for number, config in deep.items()}
    holds = resolve(deep[9].model).moe.holds
    one = calls[9] // sum(map(holds, range(9)))
    assert one > 0
    assert calls == {number: one * sum(map(holds, range(number))) for number in deep}


TITAN = """  # sections and keys of a TorchTitan file for a mixture of experts
[model]
name = "llama3"
flavor = "debugmodel"

[optimizer]
name = "AdamW"
lr = 2.2e-4

[training]
local_batch_size = 8
seq_len = 512
dataset = "c4"

[parallelism]
data_parallel_replicate_degree = 1
data_parallel_shard_degree = -1
fsdp_reshard_after_forward = "default"
tensor_parallel_degree = 8
pipeline_parallel_degree = 4
pipeline_parallel_schedule = "Interleaved1F1B"
expert_parallel_degree = 64
expert_tensor_parallel_degree = 1
expert_parallel_comm_backend = "deepep"

[activation_checkpoint]
mode = "selective"
selective_ac_option = "op"

[compile]
enable = true
components = ["loss"]

[quantize.linear.float8]
filter_fqns = ["output", "router.gate"]

[quantize.grouped_mm.float8]
fqns = ["experts"]

[debug]
moe_force_load_balance = true
"""


@pytest.mark.parametrize(
    ("ranks", "cut", "shard"),
    [
        (512, "experts", (1, 2, 512, 1024)),
        pytest.param(1024, "columns", (2, 2, 512, 256), marks=pytest.mark.slow),
    ],
)
def test_a_large_mixture_is_described(ranks, cut, shard, tmp_path, capsys):
    sizes = {"dim": 1024, "n_layers": 16, "n_heads": 16, "n_kv_heads": 16, "ffn_dim": 4096, "vocab_size": 4096}
    moe = {"n_experts": 128, "top_k": 8, "expert_dim": 512, "first_dense": 2}
    keys = [f"--model.overrides.{name}={value}" for name, value in sizes.items()]
    keys += [f"--model.overrides.moe.{name}={value}" for name, value in moe.items()]
    file = tmp_path / "mixture.toml"
    file.write_text(TITAN)
    assert main(["train", str(file), "--dry-run", f"--world-size={ranks}", *keys]) == 0
    text = capsys.readouterr().out
    assert "ep              64 ranks, the first group: 0, 1, 2, ... 63" in text
    assert f"experts over ep, {cut} over expert_shard" in text
    assert str(shard) in text
    used = 14 * (3 * 8 * 512 * 1024 + 128 * 1024) + 2 * 3 * 4096 * 1024 + 16 * (4 * 1024**2 + 2 * 1024)
    assert f"({used + 2 * 4096 * 1024 + 1024:,} for each token)" in text
    assert "note: parallelism.expert_parallel_comm_backend: 'deepep' needs the package deep_ep" in text
    assert "note: quantize.grouped_mm.float8.fqns has no effect" in text


# ---- shards ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "degrees", "overrides"),
    [
        (4, {"dp_shard": 4}, {}),
        (3, {"dp_shard": 3}, {}),  # nothing is divided evenly
        (4, {"tp": 4}, {}),  # more ranks than KV heads, and an uneven vocabulary
        (4, {"tp": 4, "parallelism__disable_loss_parallel": True}, {}),
        (2, {"tp": 2}, {"tie_word_embeddings": True, "qkv_bias": True, "out_bias": True, "qk_norm": True}),
        (6, {"dp_shard": 3, "tp": 2}, {}),
        (8, {"dp_replicate": 2, "dp_shard": 2, "tp": 2}, {"vocab_size": 334}),
        (4, {"dp_replicate": 2, "tp": 2}, {}),
        (40, {"dp_shard": 40}, {}),  # more ranks than rows of a norm: some hold nothing of it
        (8, {"dp_shard": 2, "cp": 2, "tp": 2}, {}),
        (4, {"dp_shard": 4, EP: 2}, {"moe": EXPERTS}),
        (8, {"dp_shard": 4, "tp": 2, EP: 2, ETP: 2}, {"moe": EXPERTS}),
        (8, {"dp_replicate": 2, "dp_shard": 2, "tp": 2, EP: 4}, {"moe": EXPERTS, "mlp_bias": True}),
        (16, {"dp_shard": 8, "tp": 2, EP: 4}, {"moe": EXPERTS}),  # more ranks than experts: their columns are cut
    ],
    ids=str,
)
def test_shards_of_all_ranks_add_up_to_the_model(ranks, degrees, overrides):
    config = tiny(overrides, **degrees)
    arch, layout = resolve(config.model), resolve_layout(config.parallelism, ranks)
    built = [build_rank(arch, config, layout, FLOAT32, rank) for rank in range(ranks)]
    kinds = list(built[0].counts)
    once = sum(
        one.counts[kind] * torch.Size(one.shards[kind]).numel() / kind.copies(layout) for one in built for kind in kinds
    )
    assert once == parameter_count(arch)
    for one in built:  # what is said of ranks that are not built is what they would build
        assert one.counts == built[0].counts
        assert tuple(one.shards[kind] for kind in kinds) == shapes(kinds, layout, one.rank)
    alike = same_shapes(built[0], layout)
    assert sorted(rank for some in alike.values() for rank in some) == list(range(ranks))
    assert held(built[0], layout, alike) == (sum(one.elements for one in built), parameter_count(arch))


def test_the_ranks_that_are_built():
    alike = {((1,),): [0, 1, 4], ((2,),): [2, 5], ((3,),): [3], ((0,),): [6, 7]}
    assert chosen_ranks(alike, most=10) == [0, 2, 3, 6, 7]
    assert chosen_ranks(alike, most=2) == [0, 7]
    assert chosen_ranks({((1,),): [0, 1, 2]}, most=4) == [0, 2]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B", "ZBVZeroBubble"])
def test_stages_of_all_ranks_add_up_to_the_model(schedule, tied):
    keys = {"pp": 2, "dp_shard": 3, "tp": 2, "parallelism__pipeline_parallel_schedule": schedule}
    config = tiny({"n_layers": 5, "tie_word_embeddings": tied}, **keys)
    arch, layout = resolve(config.model), resolve_layout(config.parallelism, 12)
    built = [build_rank(arch, config, layout, FLOAT32, rank) for rank in range(12)]
    twice = arch.vocab_size * arch.dim if tied and schedule != "ZBVZeroBubble" else 0
    once = [held(built[first], layout, same_shapes(built[first], layout))[1] for first in (0, 6)]
    assert sum(once) == parameter_count(arch) + twice
    assert sorted(built[0].indices + built[6].indices) == list(range(5))
    for one in built:  # what is said of ranks that are not built is what they would build
        same = built[0 if one.rank < 6 else 6]
        assert one.counts == same.counts
        assert tuple(one.shards.values()) == shapes(list(same.counts), layout, one.rank)
    text = describe(config, 12)
    assert f"with copies counted once: {parameter_count(arch):,}, the parameters of the model" in text


def test_stages_send_each_micro_batch_once_up_and_once_down():
    """Of two ranks with two stages each, the first sends activations of stages 0 and 2 and the gradient of stage 2."""
    keys = {"pp": 2, "training__local_batch_size": 6, "parallelism__pipeline_parallel_schedule": "Interleaved1F1B"}
    counted = traffic_of(2, tiny({"n_layers": 4}, **keys))
    assert counted["pp", "send"] == {"calls": 3 * 6, "bytes": 3 * 6 * LENGTH * 32 * 4}
    twice = traffic_of(2, tiny({"n_layers": 4}, **keys), micro_batches=2)
    assert twice["pp", "send"]["calls"] == 2 * 3 * 6
    assert set(counted) == {("pp", "send"), ("world", "all-reduce")}


def test_a_dry_run_tells_of_too_few_micro_batches():
    text = describe(tiny({"n_layers": 4}, pp=4), 4)
    assert "warning: 1F1B: with 2 micro-batches for 4 stages, ranks idle for 60% of a step" in text
    assert "layers of each stage: 0, 1, 2, 3" in text


# ---- collectives -----------------------------------------------------------------------------------------------------


def test_tensor_parallel_sends_two_gathers_and_two_scatters_a_block_and_pass():
    counted = traffic_of(2, tiny(tp=2))
    activations = BATCH * LENGTH * 32 * 4 // 2  # (n - 1) / n of the tokens, float32
    # forward and backward of 2 blocks, and of the embedding and the head once each
    expected = {"calls": 2 * 4 + 2, "bytes": (2 * 4 + 2) * activations}
    assert counted["tp", "all-gather"] == expected
    assert counted["tp", "reduce-scatter"] == expected
    tokens, norms = BATCH * LENGTH, 5 * 32
    assert counted["tp", "all-reduce"] == {"calls": 3, "bytes": 4 * (3 * tokens + norms)}  # maximum, two sums; norms
    assert counted["world", "all-reduce"]["calls"] == 1
    assert set(counted) == {("tp", kind) for kind in ("all-gather", "reduce-scatter", "all-reduce")} | {
        ("world", "all-reduce")
    }


def test_without_sequence_parallelism_everything_is_an_all_reduce():
    counted = traffic_of(2, tiny(tp=2, parallelism__enable_sequence_parallel=False))
    assert set(counted) == {("tp", "all-reduce"), ("world", "all-reduce")}
    assert counted["tp", "all-reduce"]["calls"] == 2 * 4 + 2 + 2


def test_checkpointing_gathers_again():
    plain, again = traffic_of(2, tiny(tp=2)), traffic_of(2, tiny(tp=2, activation_checkpoint__mode="full"))
    assert again["tp", "all-gather"]["calls"] == plain["tp", "all-gather"]["calls"] + 2 * 2


KEYS_AND_VALUES = 2 * BATCH * LENGTH * 2 * 8 * 4  # of all tokens of a layer


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        # rank 0 of 4: a slice of 8 to each other rank in forward and backward, gradients of two of each of them
        ("ring", {"ring": (2 * 2, 2 * 3 * 4 * KEYS_AND_VALUES // 8)}),
        (
            "allgather",
            {"all-gather": (2 * 2, 2 * 2 * 3 * KEYS_AND_VALUES // 4), "all-to-all": (2, 2 * 3 * KEYS_AND_VALUES // 4)},
        ),
        # 3 of 4 parts of q and the output; k and v are 2 heads, repeated for 4 ranks, so of the same size
        ("ulysses", {"all-to-all": (2 * 2 * 4, 2 * 2 * 4 * (3 * 2 * KEYS_AND_VALUES // 2 // 4 // 4))}),
    ],
)
def test_context_parallel_sends_keys_or_heads(method, expected):
    counted = traffic_of(4, tiny({"vocab_size": 320}, cp=4, parallelism__context_parallel_rotate_method=method))
    found = {kind: (numbers["calls"], numbers["bytes"]) for (axis, kind), numbers in counted.items() if axis == "cp"}
    assert found == expected
    assert counted["dp_shard", "reduce-scatter"]["calls"] == 3, "parameters are sharded over the same ranks"


def test_recomputed_attention_sends_again():
    ring = {"cp": 2, "parallelism__context_parallel_rotate_method": "ring"}
    plain = traffic_of(2, tiny(**ring))["cp", "ring"]["bytes"]
    assert traffic_of(2, tiny(activation_checkpoint__mode="full", **ring))["cp", "ring"]["bytes"] == plain * 5 // 4
    assert traffic_of(2, tiny(activation_checkpoint__mode="selective", **ring))["cp", "ring"]["bytes"] > plain
    by_op = {"activation_checkpoint__mode": "selective", "activation_checkpoint__selective_ac_option": "op"}
    assert traffic_of(2, tiny(**by_op, **ring))["cp", "ring"]["bytes"] == plain


def test_a_ring_that_sends_less_is_said():
    ring = {"cp": 2, "parallelism__context_parallel_rotate_method": "ring"}
    assert "the ring sends less" in describe(tiny({"sliding_window": 4}, **ring), 2)
    assert "the ring sends less" in describe(tiny({"attn_mask_type": "block_causal"}, **ring), 2)
    assert "the ring sends less" not in describe(tiny(**ring), 2)


def test_fsdp_gathers_twice_and_scatters_once():
    config = tiny({"vocab_size": 320}, dp_shard=4)
    counted, size = traffic_of(4, config), 4 * parameter_count(resolve(config.model)) * 3 // 4
    root = 4 * (2 * 320 * 32 + 32) * 3 // 4  # the embedding, the last norm and the head stay gathered
    assert counted["dp_shard", "all-gather"] == {"calls": 2 * 2 + 1, "bytes": 2 * size - root}
    assert counted["dp_shard", "reduce-scatter"] == {"calls": 3, "bytes": size}
    kept = traffic_of(4, tiny({"vocab_size": 320}, dp_shard=4, parallelism__fsdp_reshard_after_forward="never"))
    assert kept["dp_shard", "all-gather"] == {"calls": 3, "bytes": size}


def test_gradients_of_frozen_layers_are_not_sent():
    deep = {"n_layers": 12}
    whole = traffic_of(2, tiny(deep, dp_shard=2))
    last = traffic_of(2, tiny(deep, dp_shard=2, training__unfrozen_parameters=["model.layers.11.mlp.down_proj"]))
    scatter = ("dp_shard", "reduce-scatter")
    assert 0 < last[scatter]["bytes"] < whole[scatter]["bytes"] / 10
    adapted = tiny(deep, dp_shard=2, lora__enable=True, lora__layers=[11])
    assert traffic_of(2, adapted)[scatter]["bytes"] < whole[scatter]["bytes"] / 10


def test_replicas_sum_their_gradients():
    config = tiny(dp_replicate=2)
    counted = traffic_of(2, config)
    assert counted["dp_replicate", "all-reduce"] == {"calls": 1, "bytes": 4 * parameter_count(resolve(config.model))}
    assert counted["loss", "all-reduce"]["calls"] == 1


@pytest.mark.parametrize(
    ("ranks", "layers", "settings"),
    [
        (4, 6, {"dp_shard": 2, "tp": 2, "activation_checkpoint__mode": "full"}),
        pytest.param(
            *(4, 6, {"dp_replicate": 2, "dp_shard": 2, "parallelism__accumulation_sync": "scatter"}),
            marks=pytest.mark.slow,
        ),
        pytest.param(*(2, 6, {"dp_shard": 2, "parallelism__accumulation_sync": "micro_batch"}), marks=pytest.mark.slow),
        pytest.param(
            2,
            11,
            {"tp": 2, "activation_checkpoint__mode": "selective", "activation_checkpoint__selective_ac_option": "2"},
            marks=pytest.mark.slow,
        ),
        pytest.param(*(2, 6, {"dp_replicate": 2, "parallelism__gradient_bucket_mib": 0.05}), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_proportion_gives_what_all_layers_and_micro_batches_give(ranks, layers, settings):
    config = tiny({"n_layers": layers}, **settings)
    arch, layout = resolve(config.model), resolve_layout(config.parallelism, ranks)
    whole = dry_step._step(arch, config, layout, FLOAT32, layers, 3)
    assert step_collectives(arch, config, layout, FLOAT32, 3) == whole


@pytest.mark.parametrize("mode", ["memory_budget", "offload"])
def test_every_mode_that_needs_a_device_is_stepped_without_one(mode):
    config = tiny(
        {"attn_backend": "flex", "sliding_window": 4, "sliding_window_layers": [1]},
        tp=2,
        compile__enable=True,
        activation_checkpoint__mode=mode,
        training__enable_cpu_offload=True,
        training__loss_chunk_tokens=0,
    )
    assert traffic_of(2, config) == traffic_of(2, tiny(tp=2))


def test_nothing_is_left_behind():
    before = job.traffic
    describe(tiny(tp=2), 2)
    assert job.traffic is before
    assert not dist.is_initialized()
    with pytest.raises(UserError, match="heads cannot be shared"):
        describe(tiny(tp=8), 8)
    assert not dist.is_initialized()


def test_a_torch_without_a_fake_group_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.testing._internal.distributed.fake_pg", None)
    with pytest.raises(UserError, match=r"PyTorch [\w.+]+ has no fake process group"), fake_group(0, 2):
        pass


# ---- the text --------------------------------------------------------------------------------------------------------


def test_the_text_of_a_run():
    text = describe(tiny({"n_layers": 3}, dp_shard=2, tp=4), 8)
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert lines[0] == "llama3 debugmodel on 8 ranks: dp_shard 2 x tp 4"
    assert "dp_shard 2 ranks, the first group: 0, 4" in lines
    assert "tp 4 ranks, the first group: 0, 1, 2, 3" in lines
    assert "layers.*.attention.wq.weight 3 x (32, 32) rows over tp, rows over dp_shard (4, 32) 384" in lines
    assert "layers.*.attention.wkv.weight 3 x (32, 32) rows over dp_shard (16, 32) 1,536" in lines
    assert "layers.*.feed_forward.w2.weight 3 x (32, 64) columns over tp, rows over dp_shard (16, 16) 768" in lines
    assert "tok_embeddings.weight 1 x (333, 32) rows over tp, rows over dp_shard (42, 32) 1,344" in lines
    # 333 rows are 84, 84, 84, 81; 81 are 41 and 40
    last = lines.index(next(line for line in lines if line.startswith("rank 7 holds")))
    assert lines[last].endswith("other shards than rank 0:")
    assert lines[last + 1] == "tok_embeddings.weight 1 x (333, 32) rows over tp, rows over dp_shard (40, 32) 1,280"
    assert any(line.startswith("8 ranks, 3 different sets of shards (3 ranks were built)") for line in lines)
    total = parameter_count(resolve(tiny({"n_layers": 3}).model))
    assert f"with copies counted once: {total:,}, the parameters of the model" in lines
    assert f"step: 1 x micro-batch x 2 data ranks = {BATCH * LENGTH * 2} tokens" in lines
    assert any(line.startswith("dp_shard all-gather 7 x") for line in lines)


def test_a_step_of_several_micro_batches_is_counted_as_such():
    keys = {"dp_shard": 2, "training__gradient_accumulation_steps": 3}
    lines = [" ".join(line.split()) for line in describe(tiny({"n_layers": 3}, **keys), 2).splitlines()]
    assert f"step: 3 x micro-batch x 2 data ranks = {3 * BATCH * LENGTH * 2} tokens" in lines
    assert any(line.startswith(f"dp_shard all-gather {3 * 7} x") for line in lines)


def test_one_rank():
    lines = [" ".join(line.split()) for line in describe(tiny(), 1).splitlines()]
    assert lines[0] == "llama3 debugmodel on 1 rank"
    assert "layers.*.attention.wo.weight 2 x (32, 32) 2,048" in lines
    assert not any("collectives" in line or "mesh" in line for line in lines)


def test_bytes_follow_the_types():
    def sizes(**settings) -> str:
        text = describe(tiny({"vocab_size": 65536, "dim": 1024}, dp_shard=2, **settings), 2)
        return next(line for line in text.splitlines() if line.startswith("rank 0 holds")).split(": ")[1]

    assert sizes() == "weights 257.13 MiB, gradients 257.13 MiB, AdamW state 514.27 MiB"
    narrow = "weights 257.13 MiB, gradients 257.13 MiB, AdamW state 257.13 MiB"
    assert sizes(optimizer__state_dtype="bfloat16") == narrow
    assert sizes(optimizer__state_dtype="int8").endswith("AdamW state 130.60 MiB")
    assert sizes(optimizer__name="Muon").endswith("Muon state 513.14 MiB")  # blocks have one tensor, the rest two
    assert sizes(training__dtype="bfloat16") == "weights 128.57 MiB, gradients 128.57 MiB, AdamW state 257.13 MiB"


def test_ranks_are_as_many_as_the_degrees_ask_for():
    assert describe(tiny(dp_shard=2, tp=2)).startswith("llama3 debugmodel on 4 ranks")
    assert describe(tiny()).startswith("llama3 debugmodel on 1 rank")


def test_tp_over_a_node_boundary_is_in_the_text():
    assert "tp 4 crosses nodes of 2 ranks" in describe(tiny(tp=4), 4, ranks_per_node=2)
    assert "crosses" not in describe(tiny(tp=4), 4, ranks_per_node=4)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--parallelism.tensor_parallel_degree=3"], "= 3 does not match 8 ranks"),
        (["--parallelism.tensor_parallel_degree=8"], "4 heads cannot be shared by 8 ranks"),
        (["--parallelism.tensor_parallel_degree=4", "--training.seq_len=15"], "nearest lengths: 14 and 16"),
        (["--training.global_batch_size=20"], "global_batch_size"),
        (["--parallelism.context_parallel_degree=8", "--training.seq_len=40"], "nearest lengths: 32 and 48"),
    ],
)
def test_layouts_that_cannot_be_end_with_2(words, message, capsys):
    sizes = [f"--model.overrides.{name}={value}" for name, value in TINY.items()]
    common = ["--training.local_batch_size=2", "--training.seq_len=16", "--dry-run", "--world-size=8"]
    assert main(["train", *sizes, *common, *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_8b_at_a_million_tokens_over_64_ranks(capsys):
    words = ["--model.flavor=8B", "--training.seq_len=1048576", "--training.local_batch_size=1"]
    words += ["--parallelism.context_parallel_degree=64", "--parallelism.context_parallel_rotate_method=ring"]
    assert main(["train", *words, "--dry-run", "--world-size=64"]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert (
        "context of 1,048,576 tokens in 128 slices of 8,192: cp 0 has 0 and 127, cp 1 has 1 and 126,"
        " cp 2 has 2 and 125, ..., cp 63 has 63 and 64" in lines
    )
    assert "a rank has 16,384 tokens of a micro-batch between its products" in lines
    # 32 blocks forward and backward: of keys one slice to each other rank, twice, of gradients two
    size = 2 * 8192 * 8 * 128 * 2
    assert any(line.startswith(f"cp ring 64 x {32 * 63 * 4 * size:,} bytes") for line in lines)


@pytest.mark.slow
def test_405b_for_512_ranks_takes_seconds(capsys):
    started = time.process_time()
    assert main(["train", "--preset=llama3_405b", "--dry-run", "--world-size=512"]) == 0
    assert time.process_time() - started < 20  # 3 on an idle core of today
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "with copies counted once: 405,853,388,800, the parameters of the model" in lines
    assert any(line.startswith("pipeline of 8 ranks: Interleaved1F1B, ") for line in lines)
    micro_batches, layers, send = 8, 15, 3  # of the first rank, which has stages 0 and 8
    # forward, backward and recomputation of its blocks, two each; the embedding
    assert any(line.startswith(f"tp all-gather {micro_batches * (layers * 6 + 1)} x") for line in lines)
    assert any(line.startswith(f"pp send {micro_batches * send} x") for line in lines)


def test_workers_send_little_between_two_meetings():
    keys = {"dp_replicate": 2, "dp_shard": 2, "parallelism__data_parallel_mode": "diloco"}
    sent = {axis for axis, _ in traffic_of(4, tiny(**keys, fault_tolerance__sync_steps=1))}
    assert sent == {"dp_shard", "world"} | ({"fsdp"} & sent)
    keys |= {"parallelism__data_parallel_mode": "sync"}
    assert "dp_replicate" in {axis for axis, _ in traffic_of(4, tiny(**keys))}
