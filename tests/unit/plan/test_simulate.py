"""The simulation: schedules as the executor runs them, and what overlaps what."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardline.config.layout import Layout
from shardline.config.load import load_config
from shardline.parallel.pipeline.schedules import KINDS, build_schedule
from shardline.parallel.pipeline.timeline import in_flight, simulate
from shardline.plan.check import problem_of
from shardline.plan.hardware import find_profile
from shardline.plan.of_config import traits_for, workload_of
from shardline.plan.passes import PassModel
from shardline.plan.pipeline import Passes, held_microbatches, pipeline_seconds, planned
from shardline.plan.search import timed
from shardline.plan.simulate import step_time
from shardline.plan.stages import balanced
from shardline.plan.traits import SHARDLINE
from shardline.plan.work import Workload, layer_work
from tests.unit.plan.test_work import LLAMA, MODELS

H100 = find_profile("h100")


def stages_of(name):
    return KINDS[name].stage_counts.low


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 12)])
def test_a_pipeline_takes_as_long_as_its_timeline(name, ranks, microbatches):
    count = stages_of(name)
    schedule = build_schedule(name, ranks, microbatches, count)
    passes = [Passes(1.0, 2.0, 1.0)] * (ranks * count)
    seconds = pipeline_seconds(name, ranks, microbatches, count, passes, transfer=0.25)
    assert seconds == pytest.approx(simulate(schedule, transfer=0.25).total)
    assert planned(name, ranks, microbatches, count).in_flight == in_flight(schedule)


@pytest.mark.parametrize("name", ["1F1B", "Interleaved1F1B", "ZBVZeroBubble"])
def test_many_micro_batches_are_extrapolated_exactly(name):
    ranks, count = 4, stages_of(name)
    uneven = [Passes(1.0, 2.0, 0.9)] * (ranks * count - 1) + [Passes(1.4, 2.9, 1.3)]
    schedule = planned(name, ranks, 40, count)
    from shardline.plan.pipeline import _run

    assert pipeline_seconds(name, ranks, 40, count, uneven, 0.1) == pytest.approx(_run(schedule, uneven, 0.1, False))


def test_a_rank_that_is_a_little_slower_decides_a_long_step():
    """The slow rank has slack in the first rounds, which a slope between them would miss."""
    passes = [Passes(1.0, 2.0, 1.0)] * 16
    passes[1] = Passes(1.2, 2.4, 1.2)
    seconds = pipeline_seconds("Interleaved1F1B", 8, 512, 2, passes)
    assert seconds >= 512 * (3.0 + 3.6)


def test_transfers_that_block_cost_both_ranks():
    passes = [Passes(1.0, 2.0, 1.0)] * 4
    free, blocked = (pipeline_seconds("1F1B", 4, 64, 1, passes, 0.5, blocks) for blocks in (False, True))
    assert free < 64 * 4 < 64 * (3 + 4 * 0.5) < blocked  # two received and two sent for each micro-batch


@pytest.mark.parametrize(("schedule", "first", "last"), [("1F1B", 4, 1), ("GPipe", 16, 16)])
def test_ranks_hold_what_their_schedule_has_in_flight(schedule, first, last):
    assert held_microbatches(schedule, 4, 16, 1, 0) == first
    assert held_microbatches(schedule, 4, 16, 1, 3) == last


# ---- steps -----------------------------------------------------------------------------------------------------------


def run(layout=Layout(), hardware=H100, traits=SHARDLINE, arch=LLAMA, **fields):  # noqa: B008
    batches = fields.pop("micro_batches", 8)
    zero = 3 if layout.dp_shard * layout.cp > 1 else 0
    return step_time(Workload(arch, layout, 8192, 1, batches, zero=zero, **fields), hardware, traits)


def test_parts_add_up_to_the_step():
    time = run(Layout(pp=2, dp_shard=4, tp=4), micro_batches=16)
    parts = time.compute + time.bubble + time.optimizer + time.host + sum(time.exposed.values())
    assert parts == pytest.approx(time.total)


def test_more_micro_batches_make_the_bubble_smaller():
    shares = [time.bubble / time.total for time in (run(Layout(pp=4), micro_batches=n) for n in (4, 8, 32))]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] > 0.2 > shares[-1]


def test_recomputation_costs_what_it_computes():
    plain, selective, full = (run(recompute=mode).total for mode in ("none", "op", "full"))
    assert 1.0 < selective / plain < 1.08
    assert 1.25 < full / plain < 1.4
    assert run(recompute="2").total - plain == pytest.approx((full - plain) / 2)


def test_backward_of_attention_has_two_and_a_half_times_the_products():
    workload = Workload(LLAMA, Layout(), 8192, 1, 1)
    work = layer_work(workload, False)
    ahead, back = PassModel(workload, H100, SHARDLINE)._attention(work)
    rates = H100.attention[SHARDLINE.attention]
    kernel = H100.kernel / SHARDLINE.attention_rate
    assert (back - kernel) / (ahead - kernel) == pytest.approx(2.5 * rates[0] / rates[1])


def test_fsdp_hides_its_gathers_until_they_take_longer_than_a_layer():
    inside = run(Layout(dp_shard=8))
    slow = replace(H100, node=H100.node._replace(bandwidth=5e9))
    assert inside.exposed["dp_shard"] == 0
    assert run(Layout(dp_shard=8), slow).exposed["dp_shard"] > 0
    assert run(Layout(dp_shard=8), slow, reshard=False).total < run(Layout(dp_shard=8), slow).total


def test_copies_sum_gradients_beside_backward_except_for_the_last():
    time = run(Layout(dp_replicate=8))
    alone = run(Layout(dp_replicate=8), traits=replace(SHARDLINE, dp_hidden=()))
    assert 0 < time.exposed["dp"] < 0.4 * alone.exposed["dp"]


def test_overlapped_tensor_parallelism_exposes_less():
    serial = run(Layout(tp=8))
    overlapped = run(Layout(tp=8), traits=replace(SHARDLINE, tp_hidden=0.5))
    assert overlapped.exposed["tp"] == pytest.approx(serial.exposed["tp"] / 2)
    assert (
        run(Layout(tp=8), traits=SHARDLINE, hardware=replace(H100, per_node=2)).exposed["tp"] > 3 * serial.exposed["tp"]
    )


def test_a_slow_host_bounds_small_layers():
    small = MODELS["tied"]
    eager = replace(SHARDLINE, host_layer=20e-3)
    assert run(arch=small, traits=eager).host > 0.3 * run(arch=small, traits=eager).total
    assert run(arch=small).host == 0


def test_tokens_that_travel_once_travel_less():
    layout = Layout(dp_shard=64, ep=64)
    often, once = (
        run(layout, arch=MODELS["experts"], traits=replace(SHARDLINE, ep_once=flag)).exposed["ep"]
        for flag in (False, True)
    )
    assert once < often


def test_lora_and_float8_are_faster():
    assert run(lora_rank=16).compute < 0.85 * run().compute
    assert run(compute="float8").compute < 0.8 * run().compute
    assert run(cpu_offload=True).optimizer > 5 * run().optimizer
    assert run(recompute="offload").exposed["host_link"] > 0


def test_cuts_of_a_model_that_is_gone_are_not_those_of_the_next():
    for layers in (4, 16, 8, 32) * 3:  # each takes the place of the last one in memory
        workload = Workload(LLAMA.with_overrides({"n_layers": layers}), Layout(), 1024, 1, 1)
        assert sum(balanced(workload)) == layers


def test_on_a_cpu_numbers_have_four_bytes_and_no_communication_is_hidden():
    flags = [
        "--model.name=llama3",
        "--model.flavor=debugmodel",
        "--training.seq_len=2048",
        "--training.local_batch_size=8",
    ]
    config = load_config(None, flags)
    problem, layout = problem_of(config, find_profile("cpu"), 2, "cpu")
    workload = workload_of(config, problem.arch, layout, "cpu")
    assert workload.number == 4
    exposed = timed(problem, workload).exposed["dp_shard"]
    overlapping = replace(traits_for(workload, "cpu"), gather_hidden=True)
    assert exposed > step_time(workload, problem.hardware, overlapping).exposed["dp_shard"]
    assert timed(problem, replace(workload, activations="bfloat16")).compute < timed(problem, workload).compute
