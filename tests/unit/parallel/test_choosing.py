"""Choosing a backend for a product, remembering it, and what was hidden: without other ranks."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from shardline.comm import collectives
from shardline.comm.fake import fake_group
from shardline.comm.hidden_time import Times, host_times, union
from shardline.comm.mesh import Mesh
from shardline.comm.spans import Span
from shardline.config.layout import Layout
from shardline.config.load import load_config
from shardline.models.flavors import resolve
from shardline.models.init import init_weights
from shardline.parallel.tensor import async_tp, autotune, backend_table
from shardline.parallel.tensor.async_tp import _settled, _summary_line
from shardline.parallel.tensor.autotune import (
    CLEARLY,
    HOPELESS,
    LEAST_ROUNDS,
    Measured,
    Shape,
    as_row,
    block_shapes,
    candidates,
    fastest,
    from_row,
    measure,
    remembered_file,
    topology,
)
from shardline.parallel.tensor.backend_table import (
    SERIAL,
    Choice,
    Product,
    backends,
    choices,
    chosen_backend,
    product_of,
)
from shardline.parallel.tensor.float8_rows import written
from shardline.parallel.tensor.fused import Fused
from shardline.parallel.tensor.serial_and_ring import CHUNKS
from shardline.parallel.tensor.symmetric import Symmetric
from shardline.parallel.tensor.tensor import TensorParallel
from shardline.precision.float8 import Recipe
from shardline.precision.mixed import choose_precision
from shardline.tools.bench.torch_fused import TorchFused
from shardline.training.setup import build_model
from tests.parity.harness import MODEL

CPU = torch.device("cpu")
PRODUCT = Product("all_gather_linear", "forward", 64, 32, 48, torch.float32, "tp")
seconds = st.floats(1e-7, 10, allow_nan=False)
chosen_from = st.sampled_from(("ring", "symmetric"))
others = st.dictionaries(st.builds(Choice, chosen_from, st.sampled_from(CHUNKS)), seconds)

# ---- the choice ------------------------------------------------------------------------------------------------------


@given(others, seconds)
def test_serial_stays_unless_something_is_clearly_faster(times, serial):
    times = {**times, SERIAL: serial}
    found, best = fastest(times), min(times.values())
    assert (found == SERIAL) == (best >= serial * (1 - CLEARLY))
    assert times[found] <= best / (1 - CLEARLY)
    assert found == SERIAL or times[found] == best


@given(others.filter(bool))
def test_without_serial_the_fastest_is_taken(times):
    assert times[fastest(times)] == min(times.values())


@given(st.integers(1, 40), st.integers(1, 8))
def test_no_candidate_has_more_chunks_than_rows(rows, ranks):
    with patch.object(collectives, "axis_size", lambda axis: ranks), patch.dict(backends, torch=TorchFused()):
        found = candidates(PRODUCT._replace(rows=rows * ranks), ["serial", "ring", "torch"])
    assert found[0] == SERIAL
    assert len(set(found)) == len(found)
    assert [choice.chunks for choice in found if choice.backend == "ring"] == [n for n in CHUNKS if n <= rows]
    assert [choice.chunks for choice in found if choice.backend == "torch"] == [1]


def test_only_what_is_allowed_is_a_candidate():
    with patch.object(collectives, "axis_size", lambda axis: 2):
        assert candidates(PRODUCT, ["serial"]) == [SERIAL]
        assert {choice.backend for choice in candidates(PRODUCT, ["serial", "ring"])} == {"serial", "ring"}


OWN = {("all_gather_linear", "forward"): (1,), ("all_gather_linear", "backward"): CHUNKS}
OWN |= {("linear_reduce_scatter", "forward"): CHUNKS, ("linear_reduce_scatter", "backward"): (1,)}


@pytest.mark.parametrize(
    "operation", ["all_gather_linear", "linear_reduce_scatter", "linear_all_reduce", "copy_linear"]
)
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_backend_is_a_candidate_only_where_it_does_something_of_its_own(operation, direction):
    ours = {"symmetric": Symmetric(), "fused": Fused(), "torch": TorchFused()}
    product = PRODUCT._replace(operation=operation, direction=direction)
    with patch.object(collectives, "axis_size", lambda axis: 2), patch.dict(backends, ours):
        found = candidates(product, ["serial", "ring", *ours])
    counts = {name: tuple(choice.chunks for choice in found if choice.backend == name) for name in backends | ours}
    alone = (1,) if (operation, direction) in OWN else ()
    wanted = {"symmetric": OWN.get((operation, direction), ()), "fused": alone, "torch": alone}
    assert counts == {"serial": (1,), "ring": CHUNKS, **wanted}


def test_a_forced_backend_that_has_nothing_for_a_product_is_told():
    ring = Choice("ring")
    found = Measured(PRODUCT, 2.0, 1.0, {SERIAL: 4.0, ring: 2.5}, SERIAL)
    assert _settled(found, "ring").chosen == ring
    assert _settled(found, "fused").chosen == SERIAL
    assert ", fused cannot be used here: it does not support this operation" in _settled(found, "fused").words()
    refused = Measured(PRODUCT, 2.0, 1.0, {SERIAL: 4.0}, SERIAL, refused={"fused": "too small"})
    assert ", fused cannot be used here: too small" in _settled(refused, "fused").words()


def test_efficiency_is_the_share_of_exposed_time_that_is_gone():
    ring, slow = Choice("ring"), Choice("ring", 2)
    found = Measured(PRODUCT, 2.0, 1.0, {SERIAL: 4.0, ring: 2.5, slow: 5.0}, ring)
    assert (found.efficiency(SERIAL), found.efficiency(ring), found.efficiency(slow)) == (0, 0.75, -0.5)
    # Of the communication's own second; serial adds another one to the products, which is not communication.
    assert (found.comm_hidden(SERIAL), found.comm_hidden(ring), found.comm_hidden(slow)) == (-1.0, 0.5, -2.0)
    assert (found.best("ring"), found.best("serial"), found.best("symmetric")) == (ring, SERIAL, None)
    assert found.words() == "ring, 2500.00 ms against 4000.00 serial and 2000.00 without communication"
    # A machine too noisy to see communication at all
    noisy = Measured(PRODUCT, 2.0, 1.0, {SERIAL: 1.9, ring: 1.0}, ring)
    assert (noisy.efficiency(ring), noisy.comm_hidden(ring)) == (0, 1.0)


def test_a_step_that_is_compared_with_carries_every_product_serially():
    weights = [torch.empty(8, 4)]
    product = product_of("all_gather_linear", "forward", 16, weights, "tp", "")
    try:
        choices.chosen[product] = Choice("ring", 2)
        for serial, expected in ((False, ("ring", 2)), (True, ("serial", 1))):
            choices.serial = serial
            with chosen_backend("all_gather_linear", "forward", 16, weights, "tp", "") as (found, chunks):
                assert (found, chunks) == (backends[expected[0]], expected[1])
    finally:
        choices.reset()


def test_too_little_compute_for_its_communication_is_said():
    date = "2026-01-02 03:04"
    found = [Measured(PRODUCT, matmul, 1.0, {SERIAL: 4.0}, SERIAL, date=date) for matmul in (1.0, 2.5)]
    hint = ", and below 2 not all of it can hide: fewer tensor-parallel ranks or a faster link help"
    said = f"Async TP is enabled for 2 products (measured on {date}): 2 by serial; they take 1.8 times as long as"
    assert _summary_line(found, 0, 0.0) == f"{said} their communication{hint}"
    assert _summary_line(found[1:], 0, 0.0).endswith("they take 2.5 times as long as their communication")


def run_measured(times, rounds, tells_pace=False):
    """`measure` with a clock that tells what `times` says, its last number from then on; how often each was timed."""
    runs: Counter[str] = Counter()

    def timed(run, device, in_a_row):
        name = run()
        runs[name] += 1
        return times[name][min(runs[name], len(times[name])) - 1]

    def failed(run, device, trial=None, wanted=()):
        return "" if run() in times else "it is broken"

    class FakeTrial:
        def __init__(self, shape, device): ...

        multiply, communicate, run = (lambda self: "matmul"), (lambda self: "comm"), (lambda self, choice: str(choice))
        differentiate = lambda self: "weights"  # noqa: E731

    with (
        patch.object(autotune, "_tells_pace", lambda trial: tells_pace),
        patch.object(autotune, "Trial", FakeTrial),
        patch.object(autotune, "_failure", failed),
        patch.object(autotune, "timed", timed),
        patch.object(autotune, "slowest", lambda found, device: found),
    ):
        tried = [SERIAL, Choice("ring"), Choice("ring", 2)]
        return measure(Shape(PRODUCT), tried, CPU, rounds), runs


def test_times_are_medians_of_the_rounds():
    times = {
        "matmul": [1.0, 2.0, 3.0, 9.0],
        "comm": [0.5],
        "serial": [4.0, 4.0, 8.0, 4.0],
        "ring": [5.0, 3.0, 1.0, 3.5],
        "ring in 2 chunks": [5.0, 4.5],
    }
    found, runs = run_measured(times, rounds=3)
    assert (found.matmul, found.comm, found.serial) == (3.0, 0.5, 4.0)
    assert (found.chosen, found.times[found.chosen]) == (Choice("ring"), 3.0)
    assert set(runs.values()) == {4}


def test_weight_gradients_have_a_time_of_their_own_on_a_gpu():
    times = {
        "matmul": [3.0],
        "comm": [0.5],
        "weights": [1.0],
        "serial": [4.0],
        "ring": [3.5],
        "ring in 2 chunks": [3.2],
    }
    found, runs = run_measured(times, rounds=3, tells_pace=True)
    assert (found.matmul, found.comm, found.weights) == (3.0, 0.5, 1.0)
    assert found.alone == (2.0, 1.0, 0.5)
    assert found.times == {SERIAL: 4.0, Choice("ring"): 3.5, Choice("ring", 2): 3.2}
    assert found.chosen == Choice("ring", 2)
    assert set(runs.values()) == {4}
    found, runs = run_measured(times, rounds=3)
    assert (found.weights, found.alone, runs["weights"]) == (0.0, (3.0, 0.0, 0.5), 0)


def test_what_is_hopeless_is_not_run_again_but_serial_is():
    slow = {"matmul": [0.1], "comm": [0.1], "serial": [9.0], "ring": [1.0], "ring in 2 chunks": [HOPELESS]}
    found, runs = run_measured(slow, rounds=6)
    assert runs == {"matmul": 7, "comm": 7, "serial": 7, "ring": 7, "ring in 2 chunks": 1}
    assert found.times[Choice("ring", 2)] == HOPELESS


def test_what_cannot_run_is_left_out_and_said():
    found, runs = run_measured({"matmul": [0.1], "comm": [0.1], "serial": [2.0]}, rounds=1)
    assert found.times == {SERIAL: 2.0}
    assert found.chosen == SERIAL
    assert set(runs) == {"matmul", "comm", "serial"}
    assert found.words().endswith(" without communication, ring cannot be used here: it is broken")


def test_a_backend_that_fails_in_one_number_of_chunks_is_left_out():
    found, runs = run_measured({"matmul": [0.1], "comm": [0.1], "serial": [2.0], "ring": [1.0]}, rounds=1)
    assert (found.times, found.chosen) == ({SERIAL: 2.0}, SERIAL)
    assert found.refused == {"ring": "it is broken"}
    assert "ring" not in runs


RIGHT = torch.randn(400, 300, generator=torch.Generator().manual_seed(0))


def changed(kind):
    wrong = RIGHT.clone()
    if kind == "scaled":
        wrong *= 1.03
    elif kind == "one number":
        wrong[7, 7] += 1
    elif kind == "a row":
        wrong[7] = RIGHT[8]
    elif kind == "not a number":
        wrong[7, 7] = float("nan")
    return wrong


@pytest.mark.parametrize("kind", ["scaled", "one number", "a row", "not a number"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_wrong_numbers_are_told_from_rounded_ones(dtype, kind):
    right = RIGHT.to(dtype)
    rounded = (right.double() * (1 + torch.finfo(dtype).eps)).to(dtype)
    assert autotune._difference([right, rounded], [right, right]) == ""
    said = autotune._difference([right, changed(kind).to(dtype)], [right, right])
    assert said.startswith("its results differ from serial's: by ")


@pytest.mark.parametrize(("each", "rounds"), [(10.0, autotune.LEAST_ROUNDS), (1e-6, autotune.MOST_ROUNDS), (0.025, 10)])
def test_as_many_rounds_as_take_a_moment(each, rounds):
    slower = {"serial": 0.5, "ring": 0.8, "ring in 2 chunks": 1.0}
    _, runs = run_measured(
        {"matmul": [each], "comm": [each]} | {name: [each * share] for name, share in slower.items()}, rounds=None
    )
    assert set(runs.values()) == {1 + rounds}


def test_what_is_near_the_best_runs_again_alone_and_that_decides():
    first = 1 + LEAST_ROUNDS
    times = {
        "matmul": [0.1],
        "comm": [0.1],
        "serial": [0.11],
        "ring": [0.1] * first + [0.12],
        "ring in 2 chunks": [0.2],
    }
    found, runs = run_measured(times, rounds=None)
    assert found.chosen == SERIAL
    assert runs["serial"] == runs["ring"] == first + int(autotune.RUN_OFF / 0.2)
    assert runs["ring in 2 chunks"] == runs["matmul"] == first


# ---- the products of a block -----------------------------------------------------------------------------------------


def ran(degree, rank, sequence_parallel, training, **sizes):
    """Every product that a model's forward and backward asks for on one of `degree` ranks, with its weights' widths."""
    keys = {"tensor_parallel_degree": degree, "enable_sequence_parallel": sequence_parallel}
    settings = {f"parallelism.{key}": value for key, value in keys.items()}
    settings |= {"parallelism.enable_async_tensor_parallel": True, "model.overrides": MODEL | sizes}
    config, seen = load_config(overrides=settings), {}
    plain = backend_table.product_of

    def watched(operation, direction, rows, weights, axis, low):
        found = plain(operation, direction, rows, weights, axis, low)
        seen[found] = tuple(weight.shape[0] for weight in weights)
        return found

    with fake_group(rank, degree), patch.object(backend_table, "product_of", watched):
        precision = choose_precision(config, CPU, True)
        model, _ = build_model(resolve(config.model), CPU, precision, Mesh(Layout(tp=degree), "cpu"), config)
        init_weights(model, 0)
        with torch.set_grad_enabled(training):
            out = model.hidden(torch.arange(32).view(2, 16))
            if training:
                out.sum().backward()
    backend_table.choices.reset()
    return model.arch, seen


LATENT = {
    "n_kv_heads": 8,
    "head_dim": 20,
    "latent": {"kv_rank": 40, "nope_dim": 12, "rope_dim": 8, "v_dim": 12},
    "ffn_dim": 160,
}


@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize(
    ("degree", "sizes"),
    [
        (2, {}),
        (4, {"n_layers": 1}),  # as many KV heads as ranks
        (4, {"n_kv_heads": 2}),  # fewer: keys and values have a weight of their own, and each rank takes a part of it
        (8, {"n_kv_heads": 1}),
        (2, {"n_kv_heads": 8, "head_dim": 16, "ffn_dim": 96}),  # heads wider than dim / n_heads
        (2, {"gated": False, "ffn_dim": 96}),
        (2, LATENT),
        (4, {**LATENT, "latent": {**LATENT["latent"], "q_rank": 24}}),
        (2, {**LATENT, "moe": {"n_experts": 4, "top_k": 2, "expert_dim": 16, "shared_dim": 32, "first_dense": 1}}),
    ],
)
def test_shapes_are_those_of_the_products_that_run(degree, sizes, sequence_parallel):
    for rank, training in ((0, True), (degree - 1, False)):
        arch, seen = ran(degree, rank, sequence_parallel, training, **sizes)
        shapes = block_shapes(arch, degree, 32, torch.float32, sequence_parallel=sequence_parallel, training=training)
        assert {shape.product: shape.widths for shape in shapes if _runs(shape.product)} == {
            product: widths for product, widths in seen.items() if _runs(product)
        }
        assert len(shapes) == len({shape.product for shape in shapes})
        assert all(_runs(shape.product) for shape in shapes)


def _runs(product):
    """Whether it communicates: the others are plain products, which need no choice."""
    return (product.operation, product.direction) not in {("copy_linear", "forward"), ("linear_all_reduce", "backward")}


# ---- what is remembered ----------------------------------------------------------------------------------------------


@given(others, seconds, seconds, seconds, seconds)
def test_a_row_comes_back_as_it_was(times, serial, matmul, sent, weights):
    times = {SERIAL: serial, **times}
    before = Measured(PRODUCT, matmul, sent, times, fastest(times), weights=weights, date="2026-01-02 03:04")
    after = from_row(PRODUCT, json.loads(json.dumps(as_row(before))))
    assert after == dataclasses.replace(before, remembered=True)
    assert after.words() == f"{before.words()}, measured on 2026-01-02 03:04"


def test_a_backend_that_was_refused_is_not_tried_again(monkeypatch):
    monkeypatch.setattr(collectives, "axis_size", lambda name: 2)
    before = Measured(PRODUCT, 1.0, 0.1, {SERIAL: 2.0}, SERIAL, refused={"ring": "it is broken"})
    known = {str(PRODUCT): json.loads(json.dumps(as_row(before)))}
    recalled = async_tp._recall(Shape(PRODUCT), ["serial", "ring"], known)
    assert recalled is not None
    assert (recalled.refused, recalled.chosen) == ({"ring": "it is broken"}, SERIAL)
    del known[str(PRODUCT)]["refused"]
    assert async_tp._recall(Shape(PRODUCT), ["serial", "ring"], known) is None


class Place:
    """The world that `topology` asks."""

    def __init__(self, monkeypatch):
        self.hosts, self.tp, self.carrier, self.device = ["a", "a", "b", "b"], 2, "gloo", CPU
        axis = lambda name: SimpleNamespace(size=self.tp, group=None)  # noqa: E731
        monkeypatch.setattr(collectives, "axis", axis)
        monkeypatch.setattr(dist, "get_world_size", lambda: len(self.hosts))
        monkeypatch.setattr(dist, "get_backend", lambda group: self.carrier)
        monkeypatch.setattr(dist, "all_gather_object", self._gather)

    def _gather(self, found, own):
        found[:] = self.hosts

    def file(self, folder):
        return remembered_file(folder, topology(self.device))


def test_the_file_is_of_one_machine_with_one_torch_and_one_network(tmp_path, monkeypatch):
    for name in ("NCCL_ALGO", "GLOO_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    place = Place(monkeypatch)
    first = place.file(tmp_path)
    assert first.parent == tmp_path / "overlap"
    assert place.file(tmp_path) == first
    monkeypatch.setenv("UNRELATED", "1")
    assert place.file(tmp_path) == first

    def with_cuda(multiprocessors):
        def change(context):
            about = SimpleNamespace(name="a GPU", multi_processor_count=multiprocessors)
            context.setattr(torch.cuda, "get_device_properties", lambda device: about)
            context.setattr(place, "device", torch.device("cuda"))

        return change

    changes = [
        lambda context: context.setattr(place, "hosts", ["a", "b", "a", "b"]),
        lambda context: context.setattr(place, "hosts", ["a", "a", "c", "c"]),
        lambda context: context.setattr(place, "tp", 4),
        lambda context: context.setattr(place, "carrier", "nccl"),
        lambda context: context.setattr(torch, "__version__", "9.9"),
        lambda context: context.setattr(autotune, "__version__", "9.9"),
        lambda context: context.setattr(torch, "get_num_threads", lambda: 77),
        lambda context: context.setattr(autotune.os, "cpu_count", lambda: 77),
        lambda context: context.setenv("NCCL_ALGO", "Ring"),
        lambda context: context.setenv("NCCL_ALGO", "Tree"),
        lambda context: context.setenv("GLOO_SOCKET_IFNAME", "lo"),
        with_cuda(132),
        with_cuda(66),
    ]
    files = [first]
    for change in changes:
        with monkeypatch.context() as context:
            change(context)
            files.append(place.file(tmp_path))
    assert len(set(files)) == len(files)


# ---- what was hidden -------------------------------------------------------------------------------------------------

MOMENTS = 40
intervals = st.lists(st.tuples(st.integers(0, MOMENTS), st.integers(0, MOMENTS)), max_size=12)
recorded = st.lists(
    st.builds(
        lambda axis, start, length, waiting: Span(axis, "sum", start, start + length, waiting),
        st.sampled_from(("tp", "world")),
        st.integers(0, MOMENTS),
        st.integers(0, 9),
        st.booleans(),
    ),
    max_size=12,
)


def covered(found):
    return {moment for start, end in found for moment in range(start, end)}


@given(intervals)
def test_the_length_of_a_union(found):
    assert union(found) == len(covered(found))


@given(recorded)
def test_times_of_a_step_on_the_host(found):
    of_tp = [span for span in found if span.axis == "tp"]
    sent = covered((span.start, span.end) for span in of_tp if not span.waiting)
    waited = covered((span.start, span.end) for span in of_tp if span.waiting)
    times = host_times(found, "tp")
    assert times == (len(sent) / 1e9, len(waited) / 1e9)
    assert 0 <= times.hidden <= 1


@pytest.mark.parametrize(
    ("sent", "waited", "hidden"), [(4.0, 1.0, 0.75), (4.0, 4.0, 0.0), (4.0, 5.0, 0.0), (4.0, 0.0, 1.0), (0.0, 0.0, 0.0)]
)
def test_the_hidden_share(sent, waited, hidden):
    assert Times(sent, waited).hidden == hidden


def test_ranks_measure_the_same_products_in_one_order(tmp_path, monkeypatch):
    """Stages and float8 filters differ between ranks, and the order of a set between processes."""
    settings = {"model.overrides": MODEL, "parallelism.tensor_parallel_degree": 2}
    settings |= {"parallelism.enable_async_tensor_parallel": True}
    config, low = load_config(overrides=settings), Recipe("tensorwise", emulate=True)
    asked, both = [], ["", written(low)]
    monkeypatch.setattr(async_tp, "topology", lambda device: {})
    monkeypatch.setattr(async_tp, "_choose", lambda shapes, *rest: asked.append(shapes) or (async_tp.AsyncTensor(), {}))
    for recipes in ({None, low}, {low, None}, {None}, {low}):
        mesh = SimpleNamespace(rank=0, from_rank_0=lambda read: {}, from_everyone=lambda mine: [both, mine])
        plan = TensorParallel(2, True, True, True)
        async_tp.prepare(config, resolve(config.model), mesh, plan, torch.float32, CPU, tmp_path, frozenset(recipes))
    assert all(shapes == asked[0] for shapes in asked)
    assert {shape.product.low for shape in asked[0]} == {"", written(low)}
