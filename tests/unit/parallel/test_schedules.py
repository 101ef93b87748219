"""Pipeline schedules: complete, able to run, as short as promised, and never worse than torch's own orders."""

from __future__ import annotations

import csv
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules as torch_schedules

from shardline.config.names import SCHEDULES
from shardline.errors import ConfigError
from shardline.parallel.pipeline.schedules import (
    KINDS,
    build_schedule,
    read_csv,
    stages_per_rank_of,
    theoretical_bubble,
    validate,
    warnings,
)
from shardline.parallel.pipeline.timeline import COSTS, Action, Schedule, in_flight, simulate
from tests.examples import examples

ALL = ("GPipe", "1F1B", "LoopedBFS", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
CLOSED = ("GPipe", "1F1B", "LoopedBFS", "Interleaved1F1B")
SPLIT = ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
V_SHAPED = ("ZBVZeroBubble", "DualPipeV")


@st.composite
def built(draw, of=ALL):
    name = draw(st.sampled_from(of))
    count = draw(st.sampled_from([count for count in range(1, 5) if count in stages_per_rank_of(name)]))
    return build_schedule(name, draw(st.integers(1, 8)), draw(st.integers(1, 24)), count)


def action(text):
    stage, kind, microbatch = next(text.partition(kind) for kind in "FBIW" if kind in text)
    return Action(kind, int(stage), int(microbatch))


def orders(*rows):
    return tuple(tuple(map(action, row.split())) for row in rows)


def written(schedule, path):
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows(schedule.orders)
    return path


# ---- what every schedule is ------------------------------------------------------------------------------------------


def test_all_schedules_are_there():
    assert tuple(KINDS) == SCHEDULES == ALL


@settings(max_examples=examples(150), deadline=None)
@given(built())
def test_each_pass_runs_once_where_its_stage_is(schedule):
    for rank, order in enumerate(schedule.orders):
        passes = sorted((a.stage, a.microbatch, a.kind) for a in order)
        kinds = {}
        for stage, microbatch, kind in passes:
            kinds.setdefault((stage, microbatch), []).append(kind)
        expected = {(s, m) for s in schedule.stages_of(rank) for m in range(schedule.microbatches)}
        assert set(kinds) == expected
        assert all("".join(found) in ("BF", "FIW") for found in kinds.values())
    assert schedule.splits == any(a.kind in "IW" for order in schedule.orders for a in order)
    if schedule.name != "DualPipeV" or schedule.microbatches >= schedule.stages:  # it cuts only some, so with few none
        assert schedule.splits == (schedule.name in SPLIT)


@settings(max_examples=examples(150), deadline=None)
@given(built(), st.sampled_from([0.0, 0.25, 1.5]))
def test_simulation_keeps_to_the_order_and_waits_for_inputs(schedule, transfer):
    costs = {"F": 1.0, "B": 2.5, "I": 1.25, "W": 0.75}
    timeline = simulate(schedule, costs, transfer)
    ends = {(s.action.kind.replace("I", "B"), *s.action[1:]): s.end for row in timeline.spans for s in row}
    for rank, row in enumerate(timeline.spans):
        assert tuple(span.action for span in row) == schedule.orders[rank]
        free = 0.0
        for (kind, stage, microbatch), start, end in row:
            ready = [free]
            other = stage - 1 if kind == "F" else stage + 1
            if kind != "W" and 0 <= other < schedule.stages:
                arrival = ends["F" if kind == "F" else "B", other, microbatch]
                ready.append(arrival + transfer * (schedule.placement[other] != rank))
            if kind in "BI":
                ready.append(ends["F", stage, microbatch])
            if kind == "W":
                ready.append(ends["B", stage, microbatch])
            assert start == max(ready), "neither before its inputs nor later than need be"
            assert end == start + costs[kind]
            free = end
    busy = [sum(costs[a.kind] for a in order) for order in schedule.orders]
    assert timeline.total == max(row[-1].end for row in timeline.spans)
    assert timeline.idle == pytest.approx([1 - one / timeline.total for one in busy])
    assert timeline.bubble == pytest.approx(1 - sum(busy) / (schedule.ranks * timeline.total))


@settings(max_examples=examples(150), deadline=None)
@given(built())
def test_bubble_is_between_the_least_possible_and_gpipe(schedule):
    """The last rank cannot start before p - 1 forward passes; GPipe waits for every rank twice."""
    p, m, v = schedule.ranks, schedule.microbatches, schedule.stages // schedule.ranks
    least = (p - 1) / (3 * v * m + p - 1)
    bubble = simulate(schedule).bubble
    assert least - 1e-12 <= bubble <= (p - 1) / (m + p - 1) + 1e-12
    if schedule.name in SPLIT and m >= schedule.stages:
        assert bubble == pytest.approx(least), "a zero-bubble schedule idles for that only"


@settings(max_examples=examples(150), deadline=None)
@given(built(CLOSED))
def test_closed_forms_are_what_is_simulated(schedule):
    p, m, v = schedule.ranks, schedule.microbatches, schedule.stages // schedule.ranks
    assert theoretical_bubble(schedule) == pytest.approx(simulate(schedule).bubble)
    if m >= p:
        assert theoretical_bubble(schedule) == pytest.approx((p - 1) / (v * m + p - 1))


@settings(max_examples=examples(50), deadline=None)
@given(built(SPLIT))
def test_others_are_simulated(schedule):
    assert theoretical_bubble(schedule) == simulate(schedule).bubble


def test_each_idea_gains_on_the_one_before():
    bubble = {name: simulate(build_schedule(name, 8, 32)).bubble for name in ALL}
    assert bubble["1F1B"] == bubble["GPipe"]
    assert bubble["Interleaved1F1B"] < bubble["1F1B"]
    assert max(bubble[name] for name in SPLIT) < bubble["Interleaved1F1B"]


def test_v_and_loops():
    for name in ALL:
        per_rank = [build_schedule(name, 3, 6).stages_of(rank) for rank in range(3)]
        if name in V_SHAPED:
            assert per_rank == [(0, 5), (1, 4), (2, 3)]
        elif 1 in stages_per_rank_of(name):
            assert per_rank == [(0,), (1,), (2,)]
        else:
            assert per_rank == [(0, 3), (1, 4), (2, 5)]


# ---- by hand ---------------------------------------------------------------------------------------------------------


def test_orders_by_hand():
    assert build_schedule("1F1B", 2, 3).orders == orders("0F0 0F1 0B0 0F2 0B1 0B2", "1F0 1B0 1F1 1B1 1F2 1B2")
    assert build_schedule("GPipe", 2, 2).orders == orders("0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1")
    assert build_schedule("LoopedBFS", 1, 2, 2).orders == orders("0F0 0F1 1F0 1F1 1B0 1B1 0B0 0B1")
    assert build_schedule("Interleaved1F1B", 2, 2).orders == orders(
        "0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1", "1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1"
    )
    assert build_schedule("ZBVZeroBubble", 1, 2).orders == orders("0F0 1F0 1I0 1W0 0F1 0I0 0W0 1F1 1I1 1W1 0I1 0W1")


def test_times_by_hand():
    timeline = simulate(build_schedule("1F1B", 2, 1), transfer=0.5)
    times = [[(str(span.action), span.start, span.end) for span in row] for row in timeline.spans]
    assert times == [[("0F0", 0, 1), ("0B0", 5, 7)], [("1F0", 1.5, 2.5), ("1B0", 2.5, 4.5)]]
    assert timeline.total == 7
    assert timeline.idle == (1 - 3 / 7, 1 - 3 / 7)


def test_in_flight():
    assert in_flight(build_schedule("1F1B", 4, 8)) == (4, 3, 2, 1)
    assert in_flight(build_schedule("1F1B", 4, 2)) == (2, 2, 2, 1)
    assert in_flight(build_schedule("GPipe", 2, 5)) == (5, 5)
    assert in_flight(build_schedule("Interleaved1F1B", 4, 8)) == (11, 9, 7, 5)
    assert in_flight(build_schedule("ZBVZeroBubble", 4, 8)) == (8, 8, 8, 8), "a weight gradient still needs them"


# ---- against torch ---------------------------------------------------------------------------------------------------


def torch_instance(name, ranks, microbatches, placement):
    """torch's schedule object, with just enough of a stage to compute the order of all ranks."""
    stages = [
        SimpleNamespace(
            stage_index=stage,
            num_stages=len(placement),
            group_size=ranks,
            group_rank=0,
            group=None,
            device="cpu",
            submod=torch.nn.Identity(),
            is_first=stage == 0,
            is_last=stage == len(placement) - 1,
            has_backward=True,
            stage_index_to_group_rank=None,
        )
        for stage, rank in enumerate(placement)
        if rank == 0
    ]
    kind = torch_schedules.get_schedule_class(name)
    single = issubclass(kind, torch_schedules.PipelineScheduleSingle)
    return kind(stages[0] if single else stages, microbatches, loss_fn=lambda output, target: output)


def torch_order(name, ranks, microbatches, placement):
    schedule = torch_instance(name, ranks, microbatches, placement)
    found = schedule._get_pipeline_order() if name in ("GPipe", "1F1B") else schedule.pipeline_order
    rows = []
    for rank in range(ranks):
        parts = [part for one in found[rank] if one is not None for part in one.sub_actions or (one,)]
        row = [(p.computation_type.value, p.stage_index, p.microbatch_index) for p in parts]
        row = [Action(*one) for one in row if one[0] in "FBIW"]
        if name == "1F1B" and rank == ranks - 1:  # torch's list for the last rank begins at 1; what it runs does not
            row = [a._replace(microbatch=a.microbatch - 1) if a.kind == "F" else a for a in row]
        rows.append(tuple(row))
    return Schedule(name, placement, microbatches, tuple(rows))


@pytest.mark.parametrize("name", ALL)
def test_never_worse_than_torch(name):
    compared, refusals = 0, set()
    for ranks in range(1, 7):
        for microbatches in (1, 2, 3, 4, 5, 6, 8, 9, 12, 16, 18):
            for count in [count for count in (1, 2, 3) if count in stages_per_rank_of(name)]:
                ours = build_schedule(name, ranks, microbatches, count)
                try:
                    theirs = torch_order(name, ranks, microbatches, ours.placement)
                except ValueError as refusal:  # torch asks for a multiple of something; ours runs with any number
                    refusals.add("icrobatches" in str(refusal))
                    continue
                validate(theirs)
                compared += 1
                assert all(a <= b for a, b in zip(in_flight(ours), in_flight(theirs), strict=True))
                for costs in (COSTS, {"F": 1.0, "B": 2.2, "I": 1.4, "W": 0.8}):
                    for transfer in (0.0, 0.3):
                        ours_takes = simulate(ours, costs, transfer).total
                        assert ours_takes <= simulate(theirs, costs, transfer).total + 1e-9
    assert compared >= 35
    assert False not in refusals


# ---- what is refused, what is warned of ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
def test_names_in_any_case_and_wrong_stages(name):
    assert build_schedule(name.upper(), 2, 4) == build_schedule(name.lower(), 2, 4) == build_schedule(name, 2, 4)
    allowed = stages_per_rank_of(name)
    for count in range(4):
        if count in allowed:
            assert build_schedule(name, 2, 4, count).stages == 2 * count
        else:
            with pytest.raises(ConfigError, match=rf"{name} runs with {allowed} stages? per rank, got {count}"):
                build_schedule(name, 2, 4, count)


def test_stage_counts_in_words():
    assert [str(stages_per_rank_of(name)) for name in ("1F1B", "LoopedBFS", "DualPipeV", "PipelineScheduleMulti")] == [
        "exactly 1",
        "2 or more",
        "exactly 2",
        "1 or more",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("Interleaved", 2, 2), "no schedule 'Interleaved', did you mean 'Interleaved1F1B'"),
        (("PipelineScheduleMulti", 2, 2), "PipelineScheduleMulti comes from a file: name the file"),
        (("1F1B", 0, 2), "at least 1 rank and 1 micro-batch, got 0 and 2"),
        (("1F1B", 2, 0), "at least 1 rank and 1 micro-batch, got 2 and 0"),
        (("1F1B", 2, 2, 2), "schedules with 2 per rank: LoopedBFS, Interleaved1F1B"),
    ],
)
def test_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        build_schedule(*arguments)


def test_few_microbatches_are_warned_of():
    assert warnings(build_schedule("1F1B", 8, 8)) == []
    assert warnings(build_schedule("1F1B", 1, 1)) == []
    [line] = warnings(build_schedule("Interleaved1F1B", 8, 8))
    assert line == (
        "Interleaved1F1B: with 8 micro-batches for 16 stages, ranks idle for 30% of a step; "
        "cut the batch into 16 or more (18% with 16)"
    )


# ---- files -----------------------------------------------------------------------------------------------------------


@settings(max_examples=examples(60), deadline=None)
@given(schedule=built())
def test_a_file_gives_the_schedule_back(schedule, tmp_path_factory):
    path = written(schedule, tmp_path_factory.mktemp("csv") / "mine.csv")
    found = build_schedule("1F1B", schedule.ranks, schedule.microbatches, csv=path)
    assert (found.placement, found.orders) == (schedule.placement, schedule.orders)
    assert found.name == "file mine.csv"
    assert theoretical_bubble(found) == simulate(schedule).bubble


@settings(max_examples=examples(60), deadline=None)
@given(schedule=built(), data=st.data())
def test_a_file_without_one_action_is_refused_by_that_name(schedule, data, tmp_path_factory):
    rank = data.draw(st.integers(0, schedule.ranks - 1))
    lost = data.draw(st.sampled_from(schedule.orders[rank]))
    rows = [[str(a) if a != lost else "" for a in order] for order in schedule.orders]
    path = tmp_path_factory.mktemp("csv") / "mine.csv"
    path.write_text("\n".join(",".join(row) for row in rows))
    with pytest.raises(ConfigError, match=rf"\b{lost}\b.* is missing on rank {rank}"):
        build_schedule("", schedule.ranks, schedule.microbatches, csv=path)


def test_files_that_torch_writes(tmp_path):
    for name in ("Interleaved1F1B", "LoopedBFS", "ZBVZeroBubble", "DualPipeV"):
        ours = build_schedule(name, 4, 8)
        path = tmp_path / f"{name}.csv"
        torch_instance(name, 4, 8, ours.placement)._dump_csv(str(path), format="compute_only")
        found = read_csv(path)
        assert found.placement == ours.placement
        assert found.orders == torch_order(name, 4, 8, ours.placement).orders


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no action"),
        ("0F0,0X0", "row 1, cell 2: '0X0' is not an action"),
        ("0F0,0B0\n,1F0,1B0,-1F0", "row 2, cell 4: '-1F0' is not an action"),
        ("0F0,0SEND_F0,0B0", "row 1, cell 2: '0SEND_F0' is not an action"),
        ("0F0,,0B0,0F0", "row 1, cell 4: '0F0': 0F0 is already in this row"),
        ("0F0,0B0\n1F0,0B1", "row 2, cell 2: '0B1': stage 0 is already in row 1"),
        ("0F0,0B0\n,\n1F0,1B0", "row 2 has no action"),
        ("0F0,0B0,2F0,2B0", "stage 1 is missing; the file goes up to stage 2"),
        ("0F0,0B0,0F1", "0B1, or 0I1 and 0W1, is missing on rank 0"),
        ("0F0,0B0,0B1", "0F1 is missing on rank 0"),
        ("0F0,0I0", "0W0 is missing on rank 0"),
        ("0F0,0W0", "0I0 is missing on rank 0"),
        ("0F0,0I0,0B0", "0B0 is the whole backward pass, but 0I0 is there too on rank 0"),
        ("0F0,0W0,0I0", "cannot run: on rank 0, 0W0 waits for 0I0, which comes later on the same rank"),
        ("0B0,0F0", "cannot run: on rank 0, 0B0 waits for 0F0, which comes later"),
        ("0F0,0B0,0F1,0B1\n1F1,1F0,1B1,1B0", "on rank 0, 0B0 waits for 1B0, which rank 1 never reaches"),
        ("0F0,0B0,0F99999999", "0F1 is missing on rank 0"),
        ("(0F0;0B0)OVERLAP_B_F", "is not an action"),
    ],
)
def test_files_that_are_refused(tmp_path, text, message):
    path = tmp_path / "mine.csv"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_csv(path)
    assert message in str(caught.value)
    assert "mine.csv" in str(caught.value)


def test_files_of_another_size_or_none(tmp_path):
    path = written(build_schedule("Interleaved1F1B", 2, 4), tmp_path / "mine.csv")
    for arguments, message in (
        ((4, 4), "has rows for 2 ranks, the pipeline has 4"),
        ((2, 8), "has 4 micro-batches, a step has 8"),
        ((2, 4, 1), "has 2 stages per rank, expected 1"),
    ):
        with pytest.raises(ConfigError, match=message):
            build_schedule("1F1B", *arguments, csv=path)
    assert build_schedule("1F1B", 2, 4, 2, csv=path).stages == 4
    with pytest.raises(ConfigError, match=r"none.csv: cannot be read: No such file"):
        read_csv(tmp_path / "none.csv")
    (tmp_path / "bytes.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"bytes.csv: cannot be read as CSV"):
        read_csv(tmp_path / "bytes.csv")


def test_a_file_may_give_ranks_different_numbers_of_stages(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text("\ufeff0F0,,,,2F0,2B0,,,,0B0\n, 1F0 ,,,,,,1B0\n\n", encoding="utf-8")
    found = read_csv(path)
    assert [found.stages_of(rank) for rank in range(2)] == [(0, 2), (1,)]
    assert warnings(found) == [
        "file mine.csv: with 1 micro-batch for 3 stages, ranks idle for 50% of a step; cut the batch into 3 or more"
    ]
