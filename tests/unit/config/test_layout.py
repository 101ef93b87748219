"""The number of ranks on each axis: inference, numbering, and what is proposed where the numbers do not fit."""

from __future__ import annotations

import contextlib
import math
import re
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardline.comm.mesh import crossing_lines, sharing_lines, world_size
from shardline.config.layout import AXES, EXPERT_AXES, KEYS, Layout, resolve_layout, suggestions
from shardline.config.load import load_config
from shardline.config.schema import Parallelism
from shardline.errors import ConfigError, UserError
from shardline.models.flavors import resolve
from shardline.parallel.apply import check_layout
from shardline.parallel.tensor.tensor import TensorParallel, check_rows, nearest_lengths

small = st.integers(1, 6)
layouts = st.builds(Layout, pp=small, dp_replicate=small, dp_shard=small, cp=small, tp=small)
MODEL = ("pp", "cp", "tp")


def section(**degrees: int) -> Parallelism:
    return load_config(overrides={f"parallelism.{KEYS[axis]}": n for axis, n in degrees.items()}).parallelism


@given(layouts, st.data())
def test_coordinates_undo_the_numbering(layout, data):
    rank = data.draw(st.integers(0, layout.world_size - 1))
    found, number = layout.coordinates(rank), 0
    for axis in AXES:
        assert 0 <= found[axis] < getattr(layout, axis)
        number = number * getattr(layout, axis) + found[axis]
    assert number == rank


@given(layouts)
def test_ranks_of_tp_are_neighbours(layout):
    for rank in range(0, layout.world_size, layout.tp):
        group = [layout.coordinates(rank + place) for place in range(layout.tp)]
        assert [c.pop("tp") for c in group] == list(range(layout.tp))
        assert all(c == group[0] for c in group)


@given(layouts, st.booleans(), st.data())
def test_experts_cut_the_ranks_of_a_replica_evenly(layout, whole_experts, data):
    ranks = layout.dp_shard * layout.cp * layout.tp
    etp = 1 if whole_experts else layout.tp
    ep = data.draw(st.sampled_from([d for d in range(1, ranks // etp + 1) if ranks % (d * etp) == 0]))
    part = section(**{axis: getattr(layout, axis) for axis in AXES}).model_copy(
        update={"expert_parallel_degree": ep, "expert_tensor_parallel_degree": etp}
    )
    found = resolve_layout(part, layout.world_size)
    assert (found.ep, found.etp) == ((ep, etp) if ep > 1 else (1, 1))
    assert found.expert_shard * found.ep * found.etp == ranks
    places = [tuple(found.expert_coordinates(rank)[axis] for axis in EXPERT_AXES) for rank in range(ranks)]
    assert places == sorted(set(places))  # each once, in the order of the ranks: etp, then ep are neighbours
    if found.world_size > ranks:
        assert found.expert_coordinates(ranks) == found.expert_coordinates(0)
    if ep > 1 and etp == layout.tp:
        assert all(found.expert_coordinates(rank)["etp"] == found.coordinates(rank)["tp"] for rank in range(ranks))


@pytest.mark.parametrize(
    ("ep", "etp", "said"),
    [
        (3, 1, r"expert_parallel_degree = 3: dp_shard 2 x cp 1 x tp 2 = 4 ranks .*degrees that fit: 1, 2, 4"),
        (4, 2, r"ep 4 x etp 2; degrees that fit: 1, 2$"),
        (2, 3, "expert_tensor_parallel_degree = 3: expected 1 or tensor_parallel_degree, 2"),
    ],
)
def test_experts_that_do_not_fit_are_refused_with_degrees_that_do(ep, etp, said):
    part = section(dp_shard=2, tp=2).model_copy(
        update={"expert_parallel_degree": ep, "expert_tensor_parallel_degree": etp}
    )
    with pytest.raises(ConfigError, match=said):
        resolve_layout(part, 4)


@given(layouts)
def test_minus_one_takes_the_rest(layout):
    degrees = dict(zip(AXES, layout.degrees, strict=True))
    assert resolve_layout(section(**degrees), layout.world_size) == layout
    assert resolve_layout(section(**{**degrees, "dp_shard": -1}), layout.world_size) == layout


@given(layouts, st.booleans(), st.integers(1, 400))
def test_a_mismatch_shows_the_equation_and_layouts_that_work(layout, inferred, world_size):
    degrees = dict(zip(AXES, layout.degrees, strict=True)) | ({"dp_shard": -1} if inferred else {})
    given_product = math.prod(degree for degree in degrees.values() if degree > 0)
    fits = world_size % given_product == 0 if inferred else world_size == given_product
    if fits:
        assert resolve_layout(section(**degrees), world_size).world_size == world_size
        return
    with pytest.raises(ConfigError) as caught:
        resolve_layout(section(**degrees), world_size)
    message = str(caught.value)
    equation, tries = message.split("; try ")
    assert all(f"{axis} {degree}" in equation for axis, degree in degrees.items())
    assert f"= {given_product} does not match {world_size} rank" in equation
    proposals = tries.split("; or ")
    assert len(set(proposals)) == 2
    if world_size == 1:
        assert proposals.pop() == f"{given_product} ranks: --nproc {given_product}"
    for words in proposals:  # typed after the flags that failed, they lead to a run
        flags = {axis: int(degree) for key, degree in re.findall(r"--parallelism\.(\w+)=(\d+)", words)
                 for axis in AXES if KEYS[axis] == key}  # fmt: skip
        assert resolve_layout(section(**degrees | flags), world_size).world_size == world_size


@given(layouts, st.integers(1, 2000))
def test_proposals_keep_what_was_asked_for_where_they_can(layout, world_size):
    wanted = dict(zip(AXES, layout.degrees, strict=True))
    found = suggestions(wanted, world_size)
    for proposal in found:
        assert proposal.world_size == world_size
        assert all(getattr(proposal, axis) <= wanted[axis] for axis in MODEL)
    if world_size % (layout.pp * layout.cp * layout.tp) == 0:
        assert all(getattr(found[0], axis) == wanted[axis] for axis in MODEL)
        data_ranks = world_size // (layout.pp * layout.cp * layout.tp)
        if data_ranks % layout.dp_replicate == 0 or data_ranks % layout.dp_shard == 0:
            assert found[0].dp_replicate == layout.dp_replicate or found[0].dp_shard == layout.dp_shard


@pytest.mark.parametrize(
    ("world_size", "degrees", "expected"),
    [
        (128, {"dp_shard": 8, "tp": 8}, [Layout(dp_shard=16, tp=8), Layout(dp_replicate=2, dp_shard=8, tp=8)]),
        (12, {"tp": 8, "dp_shard": 0}, [Layout(dp_shard=3, tp=4), Layout(dp_replicate=3, tp=4)]),
        (8, {"tp": 3, "dp_shard": 0}, [Layout(dp_shard=4, tp=2), Layout(dp_replicate=2, dp_shard=2, tp=2)]),
        (7, {"tp": 2, "dp_shard": 0}, [Layout(dp_shard=7), Layout(dp_replicate=7)]),
        (8, {"pp": 8, "tp": 8, "dp_shard": 8}, [Layout(tp=8), Layout(pp=8)]),
        (1, {"dp_shard": 8}, [Layout()]),
    ],
)
def test_what_is_proposed(world_size, degrees, expected):
    assert suggestions({**dict.fromkeys(AXES, 1), **degrees}, world_size) == expected


def test_the_message_as_a_user_sees_it():
    with pytest.raises(ConfigError) as caught:
        resolve_layout(section(tp=3), 8)
    assert str(caught.value) == (
        "parallelism: pp 1 x dp_replicate 1 x dp_shard -1 x cp 1 x tp 3: 1 x 1 x 1 x 3 = 3 does not match 8 ranks,"
        " which it must divide (dp_shard -1 takes the remaining ranks);"
        " try --parallelism.data_parallel_shard_degree=4 --parallelism.tensor_parallel_degree=2; or"
        " --parallelism.data_parallel_replicate_degree=2 --parallelism.data_parallel_shard_degree=2"
        " --parallelism.tensor_parallel_degree=2"
    )


# ---- nodes -----------------------------------------------------------------------------------------------------------


@given(layouts, st.integers(1, 16))
def test_tp_over_a_node_boundary_is_reported(layout, ranks_per_node):
    nodes = [{rank // ranks_per_node for rank in range(first, first + layout.tp)}
             for first in range(0, layout.world_size, layout.tp)]  # fmt: skip
    lines = crossing_lines(layout, ranks_per_node)
    assert len(lines) == any(len(used) > 1 for used in nodes)


def test_the_line_names_axis_ranks_and_consequence():
    (line,) = crossing_lines(Layout(dp_shard=4, tp=4), 6)
    assert line == (
        "tp 4 crosses nodes of 6 ranks: 1 of 4 groups, first ranks 4 to 7; every layer waits for the network between"
        " them. A tensor_parallel_degree that divides 6 stays inside a node"
    )
    assert "its only group, first ranks 0 to 15" in crossing_lines(Layout(tp=16), 8)[0]
    assert crossing_lines(Layout(dp_shard=2, tp=8), 8) == []


@pytest.mark.parametrize(("device", "gpus", "lines"), [("cuda", 8, 0), ("cuda", 1, 1), ("cpu", 0, 0)])
def test_ranks_that_share_a_gpu_are_reported(monkeypatch, device, gpus, lines):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    found = sharing_lines(torch.device(device))
    assert len(found) == lines
    assert all(line.startswith("8 ranks of this machine share 1 GPU: they communicate by gloo") for line in found)


# ---- rows of a micro-batch -------------------------------------------------------------------------------------------


@given(st.integers(1, 5000), st.integers(1, 64), st.integers(1, 64))
def test_nearest_lengths(length, batch, degree):
    good = nearest_lengths(length, batch, degree)
    assert all(near * batch % degree == 0 for near in good)
    below = [n for n in range(length, 0, -1) if n * batch % degree == 0][:1]
    assert good[:-1] == below  # there may be none
    above = next(n for n in range(length + 1, length + degree + 1) if n * batch % degree == 0)
    assert good[-1] == above


def rows_config(length: int, batch: int, validates: bool = False, stages: int = 1) -> SimpleNamespace:
    return SimpleNamespace(
        parallelism=SimpleNamespace(pipeline_parallel_degree=stages, pipeline_parallel_microbatch_size=1),
        training=SimpleNamespace(seq_len=length, local_batch_size=batch, rows_of_a_sample=1),
        validation=SimpleNamespace(seq_len=7, local_batch_size=3, enable=validates),
    )


def test_rows_that_cannot_be_shared_are_refused():
    plan = TensorParallel(8, sequence_parallel=True, loss_parallel=True)
    check_rows(rows_config(12, 2), plan)
    check_rows(rows_config(13, 1), plan._replace(sequence_parallel=False))
    message = r"training.seq_len = 13: 2 x 13 = 26 tokens .* 8 tensor-parallel ranks; nearest lengths: 12 and 16 \(or"
    with pytest.raises(ConfigError, match=message):
        check_rows(rows_config(13, 2), plan)
    with pytest.raises(ConfigError, match=r"training.seq_len = 12: 1 x 12 .* nearest lengths: 8 and 16"):
        check_rows(rows_config(12, 2, stages=2), plan)  # a micro-batch of the pipeline has one sequence
    with pytest.raises(ConfigError, match=r"validation.seq_len = 7: 3 x 7 .* nearest lengths: 8 \(or"):
        check_rows(rows_config(16, 1, validates=True), plan)
    with pytest.raises(ConfigError, match=r"training.seq_len = 12: 1 x 12 .* nearest lengths: 8 and 16"):
        check_rows(rows_config(12, 2, stages=2), plan)  # pipeline stages get micro-batches of one


@pytest.mark.parametrize("text", ["two", "", "0", "-1", "1.5"])
def test_a_number_of_ranks_that_is_none_is_named(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", text)
    with pytest.raises(UserError, match=f"^WORLD_SIZE={re.escape(text)} in the environment: .*number of ranks"):
        world_size()
    monkeypatch.setenv("WORLD_SIZE", "12")
    assert world_size() == 12


@pytest.mark.parametrize(("length", "refused"), [(33, True), (32, False)])
def test_ranks_that_route_parts_of_the_tokens_need_equal_parts(length, refused):
    keys = {"tensor_parallel_degree": 2, "expert_parallel_degree": 2, "enable_sequence_parallel": False}
    moe = {"n_experts": 4, "top_k": 2, "expert_dim": 16}
    sizes = {"dim": 32, "n_layers": 1, "n_heads": 2, "n_kv_heads": 2, "ffn_dim": 32, "vocab_size": 300, "moe": moe}
    settings = {f"parallelism.{key}": value for key, value in keys.items()} | {"model.overrides": sizes}
    config = load_config(overrides=settings | {"training.seq_len": length, "training.local_batch_size": 1})
    layout = resolve_layout(config.parallelism, 2)
    with pytest.raises(ConfigError, match="33 tokens of a rank") if refused else contextlib.nullcontext():
        check_layout(config, resolve(config.model), layout)
