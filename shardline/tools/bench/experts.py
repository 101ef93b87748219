"""`shardline bench experts`: the transfers of rows to experts and back, and a layer with experts that hides them.

Times are medians over rounds in which all candidates take turns, on the slowest rank. The four transfers of a layer:

    dispatch            sort tokens by expert, exchange the numbers of rows, and send the rows
    combine             send results back, and add up those of each token
    combine backward    send gradients of results as tokens were sent; the numbers of rows are already known
    dispatch backward   send gradients of rows and of their weights back, and add up those of each token

    rows, GB/s          what the busiest rank sends to other ranks, or receives from them, whichever is more
    DeepEP's GB/s       as DeepEP's own tests count: each token once for every rank with one of its experts, including
                        this rank, whatever is sent; they time a dispatch whose plan is known, like combine backward
    hidden              1 - (overlapped - without transfers) / (one after another - without transfers)

A layer is router, experts and shared expert, forward and backward; `expert_layer.py` has its three variants.
"""

from __future__ import annotations

import functools
import json as json_lines
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor

from shardline.comm import collectives
from shardline.comm.job import job
from shardline.comm.mesh import Mesh
from shardline.comm.observe import runs_on_host
from shardline.config.layout import check_experts, resolve_layout
from shardline.config.schema import Config
from shardline.errors import UserError
from shardline.models.experts.moe import Travel, count_tokens
from shardline.models.flavors import resolve
from shardline.parallel.expert.all_to_all import AXIS
from shardline.parallel.expert.choose import carriers
from shardline.parallel.expert.dispatch import Carrier
from shardline.parallel.expert.expert import exchange
from shardline.parallel.tensor.autotune import IN_A_ROW, LEAST_ROUNDS, MOMENT, MOST_ROUNDS, medians
from shardline.precision.mixed import DTYPES
from shardline.run.device import device_name
from shardline.run.options import TrainOptions
from shardline.storage.compiler_cache import separate_caches
from shardline.tools.bench.collectives import WrongResult
from shardline.tools.bench.expert_layer import ExpertLayer, Stay, balanced_choices, one_after_another, skewed_choices
from shardline.tools.bench.ranks import on_ranks, rank_count
from shardline.words import to_stderr

TOKENS = {"cuda": 8192, "cpu": 512}  # per rank, if --tokens is not set
OFF, OFF_FLOAT8 = 0.05, 0.2  # allowed error of a token, relative to its norm: above rounding errors
Runs = dict[str, Callable[[], object]]


class Loads(NamedTuple):
    """How a routing loads the ranks; the same values on all of them."""

    rows: int  # of the busiest rank, to or from others
    tokens: int  # of the rank that gets the most; each token counts once
    rank_load: float  # rows of the fullest rank over the mean
    expert_load: float


def run(
    config: Config,
    start: TrainOptions,
    tokens: int | None,
    skew: float,
    dtype: str | None,
    float8: bool,
    compile: bool,
    carrier: str | None,
    iterations: int | None,
    json: bool,
) -> int:
    """Check the options, then start the ranks, or measure if this is one; return the exit code."""
    degree, arch = config.parallelism.expert_parallel_degree, resolve(config.model)
    if degree < 2:
        raise UserError("one rank holds all experts, so no rows are sent: use --ep 2 or more")
    if rank_count(start, degree) != degree:
        raise UserError(f"--ep {degree} needs {degree} ranks, but {rank_count(start, degree)} were requested")
    check_experts(arch, resolve_layout(config.parallelism, degree))

    def work(mesh: Mesh, device: torch.device) -> int:
        speaks = mesh.rank == 0
        found = _carriers(carrier, device, speaks)
        kind = DTYPES[dtype] if dtype else torch.bfloat16 if device.type == "cuda" else torch.float32
        layer, count = ExpertLayer(arch, kind, device), tokens or TOKENS[device.type]
        routings = {"balanced": balanced_choices(count, layer.spec, device)}
        if skew > 1:
            routings["skewed"] = skewed_choices(count, layer.spec, device, skew)
        travel = exchange(mesh, layer.spec, sequence_parallel=False, narrow=float8).travel
        assert travel is not None
        common = {"benchmark": "experts", "model": config.model.name, "flavor": config.model.flavor, "ep": degree}
        for routing, chosen in routings.items():
            for name, carries in found.items():
                if speaks:
                    print(f"{routing} routing, {name}", file=sys.stderr, flush=True)
                told = {**common, "routing": routing, "carrier": name, "float8": float8, "compiled": compile}
                rows = measure(layer, chosen, travel, carries, iterations, float8, compile)
                rows = [{**told, **row, **_place(layer, chosen)} for row in rows]
                for row in rows if speaks and json else ():
                    print(json_lines.dumps(row), flush=True)
                if speaks and not json:
                    _show(rows)
        return 0

    return on_ranks("bench experts", config, start, degree, work)


def _carriers(wanted: str | None, device: torch.device, speaks: bool) -> dict[str, Carrier]:
    """Return the requested carrier, or all that can run here."""
    found, refused = carriers(device)
    if wanted in refused:
        raise UserError(f"--carrier {wanted} cannot be used here: {refused[wanted]}")
    for name, why in refused.items() if speaks and wanted is None else ():
        to_stderr(f"note: {name} cannot be used here: {why}")
    if speaks and device.type == "cuda" and runs_on_host(collectives.axis(AXIS).group, device):
        to_stderr("note: ranks share a GPU, so all_to_all is gloo's, through host memory, not NCCL's")
    return found if wanted is None else {wanted: found[wanted]}


def _place(layer: ExpertLayer, chosen: Tensor) -> dict[str, Any]:
    """Return what the numbers depend on in addition to the routing."""
    return {
        "tokens": chosen.shape[0],
        "dtype": str(layer.dtype).removeprefix("torch."),
        "device": device_name(layer.device),
        "backend": dist.get_backend(collectives.axis(AXIS).group),
        "torch": torch.__version__,
    }


# ---- measuring -------------------------------------------------------------------------------------------------------


def measure(
    layer: ExpertLayer,
    chosen: Tensor,
    travel: Travel,
    carrier: Carrier,
    rounds: int | None,
    float8: bool,
    compile: bool,
) -> list[dict[str, Any]]:
    """Return a row for each of the four transfers, and one for the layer."""
    x, job.carrier = layer.tokens(chosen), carrier
    table, sizes = carrier.plan(count_tokens(chosen, layer.spec.n_experts))
    if layer.device.type == "cuda":
        torch.cuda.synchronize(layer.device)  # the copy of the sizes to the host may not be done
    loads = loads_of(table, sizes, chosen)
    _check(layer, x, travel, OFF_FLOAT8 if float8 else OFF)
    told = {"rank_load": round(loads.rank_load, 3), "expert_load": round(loads.expert_load, 3)}
    rows = []
    for what, seconds in _seconds(_transfers(layer, x, travel), layer.device, rounds).items():
        each = layer.dim * (1 if float8 and what == "dispatch" else layer.dtype.itemsize)
        sent = {"rows": loads.rows, "bytes": loads.rows * each, "microseconds": seconds * 1e6}
        speed = {"gbs": loads.rows * each / seconds / 1e9, "deepep_gbs": loads.tokens * each / seconds / 1e9}
        rows.append({"what": what, **told, **sent, **speed})
    times = _seconds(_layers(layer, x, travel, carrier, Stay(table, sizes), compile), layer.device, rounds)
    return [*rows, {"what": "layer", **told, **layer_row(times, len(chosen))}]


def layer_row(times: dict[str, float], tokens: int) -> dict[str, Any]:
    """Return the times of the layer's three variants, tokens per second of a rank, and the hidden share."""
    overlapped, serial, without = times["overlapped"], times["one after another"], times["without transfers"]
    return {
        **{f"{way.replace(' ', '_')}_ms": seconds * 1e3 for way, seconds in times.items()},
        "tokens_per_second": tokens / overlapped,
        "hidden": 1 - (overlapped - without) / (serial - without) if serial > without else None,
    }


def loads_of(table: Tensor, sizes: Tensor, chosen: Tensor) -> Loads:
    """Return the loads. `table` has each rank's rows for each expert, `sizes` (ranks, ranks) those for each rank."""
    ranks, n_experts = len(sizes), table.shape[1]
    away = sizes - sizes.diag().diag()
    meets = torch.zeros(len(chosen), ranks, device=chosen.device).scatter_(1, chosen // (n_experts // ranks), 1.0)
    tokens = collectives.sum_in_place(meets.sum(0), AXIS)
    return Loads(
        rows=int(max(away.sum(0).max(), away.sum(1).max())),
        tokens=int(tokens.max()),
        rank_load=_over_mean(sizes.sum(0)),
        expert_load=_over_mean(table[:ranks].sum(0)),
    )


def _over_mean(rows: Tensor) -> float:
    return float(rows.max() / rows.double().mean())


def _transfers(layer: ExpertLayer, x: Tensor, travel: Travel) -> Runs:
    """Return each of the four transfers by itself, from its start to the arrival."""
    routing = layer.routing(x)
    weights = routing.weights.requires_grad_()

    def depart() -> Any:
        return travel.depart(x, routing.chosen, weights, layer.spec.n_experts)

    one = depart()
    arrived = travel.arrive(one)
    results = arrived.rows.detach().requires_grad_()

    def combine() -> Tensor:
        return travel.collect(travel.leave(results, one), one)

    out = combine()
    of_out, of_arrived = torch.ones_like(out), [torch.ones_like(arrived.rows), torch.ones_like(arrived.weights)]
    gradients = functools.partial(torch.autograd.grad, retain_graph=True)
    return {
        "dispatch": lambda: travel.arrive(depart()),
        "combine": combine,
        "combine backward": lambda: gradients(out, results, of_out),
        "dispatch backward": lambda: gradients([arrived.rows, arrived.weights], [x, weights], of_arrived),
    }


def _layers(layer: ExpertLayer, x: Tensor, travel: Travel, carrier: Carrier, stay: Carrier, compile: bool) -> Runs:
    gradient = torch.ones_like(x)
    overlapped: Any = layer.forward
    plain: Any = layer.forward
    if compile:
        from shardline.parallel.expert.compiled_order import compiler

        separate_caches()
        overlapped = torch.compile(layer.forward, fullgraph=True, backend=compiler("inductor"))
        plain = torch.compile(layer.forward, fullgraph=True)

    def run(forward: Any, way: Travel, carries: Carrier) -> None:
        job.carrier = carries
        layer.both_ways(forward, x, way, gradient)

    return {
        "overlapped": functools.partial(run, overlapped, travel, carrier),
        "one after another": functools.partial(run, plain, one_after_another(travel), carrier),
        "without transfers": functools.partial(run, plain, travel._replace(parts=1), stay),
    }


def _seconds(runs: Runs, device: torch.device, rounds: int | None) -> dict[str, float]:
    """Return median seconds. On a GPU, a sample is the mean of consecutive runs, as in training the host runs ahead."""
    in_a_row = IN_A_ROW if device.type == "cuda" else 1
    names = list(runs)
    medians(runs, names, 1, device, in_a_row)  # warms up
    slowest = max(medians(runs, names, 1, device, in_a_row).values()) * in_a_row
    count = rounds or min(max(int(MOMENT / slowest), LEAST_ROUNDS), MOST_ROUNDS)
    times: dict[str, float] = medians(runs, names, count, device, in_a_row)
    return times


@torch.no_grad()
def _check(layer: ExpertLayer, x: Tensor, travel: Travel, allowed: float) -> None:
    """Check that both variants with transfers agree with a loop over the experts, for every token."""
    wanted = layer.by_loop(x)
    for way in (travel, one_after_another(travel)):
        apart = (layer.forward(x, way, with_shared=False).float() - wanted).norm(dim=1) / wanted.norm(dim=1)
        worst = int(apart.argmax())
        if not apart[worst] < allowed:
            raise WrongResult(f"token {worst} is off by {apart[worst]:.1%} from a loop over the experts")


# ---- output ----------------------------------------------------------------------------------------------------------


def _show(rows: list[dict[str, Any]]) -> None:
    """Print a table of the transfers, and lines about the layer."""
    *transfers, layer = rows
    loads = (
        f"the fullest rank has {layer['rank_load']:.2f} times the mean, the fullest expert {layer['expert_load']:.2f}"
    )
    table = Table("what", "rows", "MiB", "us", "GB/s", "DeepEP's GB/s", title_justify="left")
    for row in transfers:
        numbers = (row["bytes"] / 2**20, row["microseconds"], row["gbs"], row["deepep_gbs"])
        table.add_row(row["what"], f"{row['rows']:,}", *(f"{number:,.2f}" for number in numbers))
    console = Console(width=max(120, Console().width), highlight=False)
    console.print(f"{layer['routing']} routing, {layer['carrier']}: {loads}", table, sep="\n")
    for way in ("overlapped", "one after another", "without transfers"):
        milliseconds = layer[f"{way.replace(' ', '_')}_ms"]
        speed = layer["tokens"] / milliseconds * 1e3
        console.print(f"layer {way + ':':<18} {milliseconds:10.3f} ms, {speed:12,.0f} tokens/s of a rank")
    hidden = layer["hidden"]
    console.print("transfers cost nothing here" if hidden is None else f"hidden: {hidden:.0%} of the transfers")
    kind = f"{layer['dtype']}{', rows to experts in float8' if layer['float8'] else ''}"
    kind += ", compiled" if layer["compiled"] else ""
    console.print(f"{layer['ep']} ranks of {layer['tokens']:,} tokens, {kind}, {layer['backend']}, {layer['device']}\n")
