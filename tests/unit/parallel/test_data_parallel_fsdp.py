"""FSDP and HSDP: what is gathered when, and how many bytes each choice costs."""

from __future__ import annotations

import functools
from collections import Counter
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import Shard

from shardline.comm import exposed_time
from shardline.comm.exposed_time import Exposed, StreamWaits, exposed
from shardline.comm.job import job
from shardline.comm.mesh import Mesh
from shardline.comm.observe import Started
from shardline.comm.spans import now
from shardline.config.layout import Layout
from shardline.config.load import load_config
from shardline.models.flavors import resolve
from shardline.models.init import init_weights
from shardline.parallel.data import float8_gather
from shardline.parallel.data import fsdp as data
from shardline.parallel.data.fsdp import CountedGather, CountedScatter, TimedWork, _expert_cut, set_gradient_sync
from shardline.precision.mixed import choose_precision
from shardline.training.setup import build_model
from tests.parity.harness import MODEL
from tests.unit.parallel.test_data_parallel import ranks

CPU = torch.device("cpu")
BLOCKS = 4


def build(layout: Layout, **overrides):
    settings = {f"parallelism.{key}": value for key, value in overrides.items() if "." not in key}
    settings |= {key: value for key, value in overrides.items() if "." in key}
    config = load_config(overrides={"model.overrides": MODEL | {"n_layers": BLOCKS}, **settings})
    mesh = Mesh(layout, "cpu")
    model, _ = build_model(resolve(config.model), CPU, choose_precision(config, CPU, True), mesh, config)
    init_weights(model, 0)
    return config, model


def backward(config, model, batches: int = 1) -> None:
    for number in range(batches):
        set_gradient_sync(model, config.parallelism, last=number == batches - 1)
        tokens = torch.arange(16).view(2, 8) + number
        (model.hidden(tokens).square().sum() + model.output_weight().square().sum()).backward()


# ---- bytes -----------------------------------------------------------------------------------------------------------


def sent(layout: Layout, batches: int, **overrides):
    """Bytes of a step, and the parameters of the blocks and of the rest."""
    config, model = build(layout, **overrides)
    job.traffic.take()
    backward(config, model, batches)
    blocks = sum(p.numel() for p in model.layers.parameters())
    return job.traffic.take(), 4 * blocks, 4 * (sum(p.numel() for p in model.parameters()) - blocks)


@pytest.mark.parametrize(
    ("overrides", "gathers_of_blocks", "gathers_of_rest", "scatters"),
    [
        # Three micro-batches. Weights that are freed after forward are gathered again for backward.
        ({}, 6, 3, 1),
        ({"fsdp_reshard_after_forward": "always"}, 6, 3, 1),
        ({"fsdp_reshard_after_forward": "never"}, 1, 1, 1),
        ({"accumulation_sync": "micro_batch"}, 6, 3, 3),
        ({"accumulation_sync": "micro_batch", "fsdp_reshard_after_forward": "never"}, 1, 1, 3),
        ({"accumulation_sync": "scatter"}, 6, 3, 1),  # there are no sums between replicas to put off
    ],
)
def test_bytes_of_shards(overrides, gathers_of_blocks, gathers_of_rest, scatters):
    for traffic, blocks, rest in ranks().run(2, functools.partial(sent, Layout(dp_shard=2), 3, **overrides)):
        gathered = gathers_of_blocks * blocks + gathers_of_rest * rest
        assert traffic == {"dp_shard": (gathered + scatters * (blocks + rest)) // 2}


def test_gradients_are_reduced_in_the_type_that_is_asked_for():
    """Weights travel in bfloat16, gradients in training.mixed_precision_reduce."""
    narrow = {"training.mixed_precision_param": "bfloat16"}
    for traffic, blocks, rest in ranks().run(2, functools.partial(sent, Layout(dp_shard=2), 1, **narrow)):
        assert traffic == {"dp_shard": ((2 * blocks + rest) // 2 + blocks + rest) // 2}


@pytest.mark.parametrize(("mode", "scatters", "sums"), [("step", 1, 1), ("micro_batch", 3, 3), ("scatter", 3, 1)])
def test_bytes_of_replicated_shards(mode, scatters, sums):
    layout = Layout(dp_replicate=2, dp_shard=2)
    for traffic, blocks, rest in ranks().run(4, functools.partial(sent, layout, 3, accumulation_sync=mode)):
        assert traffic["dp_shard"] == (6 * blocks + 3 * rest + scatters * (blocks + rest)) // 2
        assert traffic["dp_replicate"] == sums * (blocks + rest) // 2


# ---- order -----------------------------------------------------------------------------------------------------------


class NamedGather(CountedGather):
    def __init__(self, name: str, log: list[str]) -> None:
        super().__init__()
        self.name, self.log = name, log

    def __call__(self, *arguments, **options):
        self.log.append(f"gather {self.name}")
        return super().__call__(*arguments, **options)


class NamedScatter(CountedScatter):
    def __init__(self, name: str, log: list[str]) -> None:
        super().__init__()
        self.name, self.log = name, log

    def __call__(self, *arguments, **options):
        self.log.append(f"scatter {self.name}")
        return super().__call__(*arguments, **options)


def order(depth: int) -> list[str]:
    config, model = build(Layout(dp_shard=2), fsdp_prefetch=depth)
    log: list[str] = []
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            module.set_custom_all_gather(NamedGather(name or "root", log))
            module.set_custom_reduce_scatter(NamedScatter(name or "root", log))
    for name, block in model.layers.items():

        def logged(*arguments, name=name, function=block.function):
            log.append(f"run layers.{name}")
            return function(*arguments)

        block.function = logged
    backward(config, model)
    return [entry.replace("layers.", "") for entry in log]


def test_weights_of_the_next_blocks_are_gathered_ahead():
    none, one, two = (ranks().run(2, order, depth)[0] for depth in (0, 1, 2))
    forward = "gather root, gather 0, run 0, gather 1, run 1, gather 2, run 2, gather 3, run 3"
    assert ", ".join(none).startswith(forward)
    forward = "gather root, gather 0, gather 1, run 0, gather 2, run 1, gather 3, run 2, run 3"
    assert ", ".join(one).startswith(forward)
    forward = "gather root, gather 0, gather 1, gather 2, run 0, gather 3, run 1, run 2, run 3"
    assert ", ".join(two).startswith(forward)
    # In backward the root is still there; block 3 is needed first.
    assert (
        ", ".join(one[9:])
        == "gather 3, gather 2, scatter 3, gather 1, scatter 2, gather 0, scatter 1, scatter 0, scatter root"
    )
    assert (
        ", ".join(two[9:])
        == "gather 3, gather 2, gather 1, scatter 3, gather 0, scatter 2, scatter 1, scatter 0, scatter root"
    )


# ---- waiting, offload ------------------------------------------------------------------------------------------------


def gradients_of(layout: Layout, **overrides):
    """Gradients, where they lie, and whether FSDP keeps shards in host memory: on a CPU nothing else tells."""
    config, model = build(layout, **overrides)
    backward(config, model)
    gradients = [p.grad.to_local().clone() for p in model.parameters()]
    sharded = [
        module._get_fsdp_state()._fsdp_param_group for module in model.modules() if isinstance(module, FSDPModule)
    ]
    kept = {parameter.offload_to_cpu for group in sharded if group is not None for parameter in group.fsdp_params}
    return gradients, {p.grad.device.type for p in model.parameters()}, kept


GATHER, SCATTER, SUM = 1, 100, 10_000  # seconds that a wait takes by the clock below


def waited_by_own_clock(layout: Layout):
    """What is measured where time passes in waits for collectives alone."""
    clock = [0]
    summed = CountedScatter.all_reduced

    def passing(seconds, function):
        def timed(*arguments, **options):
            result = function(*arguments, **options)
            clock[0] += seconds
            return result

        return timed

    def reduced(self, gradient):
        clock[0] += SUM
        summed(self, gradient)

    class Slow(Started):
        wait = passing(GATHER, Started.wait)

    with (
        patch.object(data, "now", lambda: clock[0] * 10**9),
        patch.object(exposed_time, "time", SimpleNamespace(perf_counter=lambda: clock[0])),
        patch.object(data, "Started", Slow),
        patch.object(data.collectives, "scattered_by_host", passing(SCATTER, data.collectives.scattered_by_host)),
        patch.object(CountedScatter, "all_reduced", reduced),
    ):
        config, model = build(layout)
        exposed.take()
        backward(config, model)
        return exposed.take(), exposed.take()


@pytest.mark.parametrize(
    ("layout", "sums"), [(Layout(dp_shard=2), 0), (Layout(dp_replicate=2, dp_shard=2), 1)], ids=["fsdp", "hsdp"]
)
def test_the_time_that_is_waited_for_communication_is_measured(layout, sums):
    """Blocks are gathered twice and the rest once; each is scattered once, and summed between replicas."""
    seconds = (2 * BLOCKS + 1) * GATHER + (BLOCKS + 1) * (SCATTER + sums * SUM)
    assert ranks().run(layout.world_size, waited_by_own_clock, layout) == [(seconds, 0)] * layout.world_size


def recorded(layout: Layout, **overrides):
    """(axis, collective) of the spans of a step: those of collectives, and those of waits for them."""
    config, model = build(layout, fsdp_prefetch=1, **overrides)
    backward(config, model)  # nobody reads: nothing is kept
    job.spans.record("test")
    start = now()
    backward(config, model)
    end = now()
    found = job.spans.take("test")
    job.spans.stop("test")
    assert all(start <= span.start <= span.end <= end for span in found)
    talking, standing = ([span for span in found if span.waiting is stands] for stands in (False, True))
    blocked = {(span.start, span.end) for span in talking} & {(span.start, span.end) for span in standing}
    return *(Counter((span.axis, span.what) for span in kind) for kind in (talking, standing)), len(blocked)


@pytest.mark.parametrize(
    ("layout", "sums"),
    [(Layout(dp_shard=2), 0), (Layout(dp_replicate=2, dp_shard=2), BLOCKS + 1)],
    ids=["fsdp", "hsdp"],
)
def test_collectives_and_waits_for_them_leave_spans(layout, sums):
    """Weights are gathered in the background: a span from issue to end, and one of the wait. The rest blocks."""
    expected = {("dp_shard", "all_gather"): 2 * BLOCKS + 1, ("dp_shard", "reduce_scatter"): BLOCKS + 1}
    expected |= {("dp_replicate", "all_reduce"): sums} if sums else {}
    for talking, standing, blocked in ranks().run(layout.world_size, recorded, layout):
        assert talking == expected
        assert standing == expected
        assert blocked == BLOCKS + 1 + sums


def test_offload_works_without_a_gpu_and_changes_no_number():
    offload = {"training.enable_cpu_offload": True}
    plain = ranks().run(2, gradients_of, Layout(dp_shard=2))
    offloaded = ranks().run(2, functools.partial(gradients_of, Layout(dp_shard=2), **offload))
    for (wanted, _, on_device), (seen, devices, on_host) in zip(plain, offloaded, strict=True):
        assert devices == {"cpu"}
        assert (on_device, on_host) == ({False}, {True})
        assert all(torch.equal(a, b) for a, b in zip(wanted, seen, strict=True))


# ---- waiting between the streams of a GPU ----------------------------------------------------------------------------


class Moment:
    """An event of a stream that runs as fast as it is told to."""

    def __init__(self, milliseconds: float) -> None:
        self.at = milliseconds

    def elapsed_time(self, other: Moment) -> float:
        assert other.at >= self.at, "not defined"
        return other.at - self.at

    def synchronize(self) -> None: ...


def test_only_what_a_stream_waited_for_counts():
    total = Exposed()
    total.between(Moment(1.0), Moment(3.0))  # waited 2 ms
    total.between(Moment(7.0), Moment(5.0))  # was there already
    total.between(Moment(8.0), Moment(8.5))
    assert total.take() == pytest.approx(0.0025)
    assert total.take() == 0


def marked(layout: Layout, batches: int):
    """What happens in which order, with `N` for the Nth mark and `N-M` for a wait that began and ended at those."""
    two_blocks = {"model.overrides": MODEL | {"n_layers": 2}}
    (plain_config, plain), (config, model) = (build(layout, fsdp_prefetch=1, **two_blocks) for _ in range(2))
    names = {module: (name or "root").removeprefix("layers.") for name, module in model.named_modules()}
    log: list[str] = []
    marks: list[Moment] = []
    gather, scatter, wait = CountedGather.__call__, CountedScatter.__call__, TimedWork.wait

    def mark():
        marks.append(Moment(len(marks) + 1))
        log.append(str(len(marks)))
        return marks[-1]

    def told(word, function):
        return lambda self, *arguments, **options: log.append(word(self)) or function(self, *arguments, **options)

    with (
        patch.object(exposed_time, "mark", mark),
        patch.object(data, "mark", mark),
        patch.object(exposed, "between", lambda ready, done: log.append(f"{ready.at}-{done.at}")),
        patch.object(CountedGather, "__call__", told(lambda self: f"gather {names[self.module]}", gather)),
        patch.object(CountedScatter, "__call__", told(lambda self: "scatter", scatter)),
        patch.object(TimedWork, "wait", told(lambda self: "wait", wait)),
    ):
        data.use_counted_collectives(model, StreamWaits(), replicated=layout.dp_replicate > 1)
        backward(config, model, batches)
    backward(plain_config, plain, batches)
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    return " ".join(log), all(torch.equal(a.grad.to_local(), b.grad.to_local()) for a, b in pairs)


FORWARD = "1 gather root 2 wait gather 0 3 1-2 4 wait gather 1 5 4-3 6 wait 6-5 "
BACKWARD = "gather 1 7 8 wait gather 0 9 8-7 "


@pytest.mark.parametrize(
    ("layout", "batches", "expected"),
    [
        # The gradients of block 1 are waited for when those of block 0 are there (13-11), those of block 0 at the end
        (
            Layout(dp_shard=2),
            1,
            FORWARD + BACKWARD + "scatter 10 11 12 wait 12-9 13 13-11 scatter 14 15 16 16-15 scatter 17 18 17-18",
        ),
        # A first micro-batch that sums nothing; at the end, the sum between replicas is waited for, too
        (
            Layout(dp_replicate=2, dp_shard=2),
            2,
            FORWARD
            + BACKWARD
            + "10 wait 10-9 11 gather root 12 wait gather 0 13 11-12 14 wait gather 1 15 14-13 16 wait 16-15 "
            "gather 1 17 18 wait gather 0 19 18-17 scatter 20 21 22 wait 22-19 23 23-21 scatter 24 25 26 26-25 "
            "scatter 27 28 27-28 29 28-29",
        ),
    ],
    ids=["fsdp", "hsdp-accumulation"],
)
def test_a_mark_stands_before_each_wait_of_a_stream(layout, batches, expected):
    for log, same in ranks().run(layout.world_size, marked, layout, batches):
        assert log == expected
        assert same


@pytest.mark.parametrize(
    ("shape", "experts", "ranks", "cut"),
    [((1, 12, 8), 1, 3, 1), ((1, 2, 8, 12), 1, 3, 3), ((1, 16, 8), 1, 3, None), ((4, 16, 8), 4, 3, None)],
)
def test_experts_are_cut_where_ranks_get_equal_parts(shape, experts, ranks, cut):
    found = _expert_cut(ranks, experts, torch.nn.Parameter(torch.empty(shape, device="meta")))
    assert found == (None if cut is None else Shard(cut))


@pytest.mark.parametrize(("rows", "attached"), [(8, True), (9, False)])
def test_every_rank_decides_alike_what_is_gathered_in_float8(rows, attached):
    """Of uneven rows most ranks hold as many as FSDP pads to: each would decide by its own shard."""
    module = torch.nn.Linear(4, rows)
    parameter = SimpleNamespace(
        _module_info=SimpleNamespace(module=module, param_name="weight"),
        _sharded_local_tensor=torch.empty(-(-rows // 2), 4),
        padded_sharded_param_size=torch.Size((-(-rows // 2), 4)),
        fsdp_placement=Shard(0),
        mesh_info=SimpleNamespace(shard_mesh_size=2),
        _orig_size=torch.Size((rows, 4)),
        _init_extensions=lambda: None,
    )
    assert (float8_gather._attach(parameter, {module}) is not None) == attached
