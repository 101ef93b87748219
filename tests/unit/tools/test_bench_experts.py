"""`shardline bench experts`: what it refuses, what it counts, and that its three ways of a layer are what they say."""

from __future__ import annotations

import functools
import json
import os
import re
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch

from shardline.cli.main import main
from shardline.comm import collectives
from shardline.comm.job import job
from shardline.comm.mesh import Mesh
from shardline.config.layout import Layout
from shardline.config.schema import Model
from shardline.models.experts import rows as expert_rows
from shardline.models.experts.moe import Travel, as_it_is
from shardline.models.flavors import resolve
from shardline.parallel.expert.all_to_all import AllToAll
from shardline.parallel.expert.expert import exchange
from shardline.tools.bench import expert_layer, experts
from shardline.tools.bench.collectives import WrongResult
from shardline.tools.bench.expert_layer import ExpertLayer, Stay, balanced_choices, one_after_another, skewed_choices
from shardline.tools.bench.experts import _layers, _show, layer_row, loads_of
from tests.e2e.tiny import command
from tests.parity.pool import Pool

CPU = torch.device("cpu")
ON_CPU = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
TRANSFERS = ["dispatch", "combine", "combine backward", "dispatch backward"]
FIRST = ["benchmark", "model", "flavor", "ep", "routing", "carrier", "float8", "compiled"]
FIRST += ["what", "rank_load", "expert_load"]
LAST = ["tokens", "dtype", "device", "backend", "torch"]
OF_TRANSFER = ["rows", "bytes", "microseconds", "gbs", "deepep_gbs"]
OF_LAYER = ["overlapped_ms", "one_after_another_ms", "without_transfers_ms", "tokens_per_second", "hidden"]


@pytest.fixture(scope="module")
def pool():
    workers = Pool()
    yield workers
    workers.close()


def debug_arch(model="deepseek_v3", **overrides):
    """Eight experts; those of deepseek_v3 have top 3 and a shared expert, those of gpt_oss biases."""
    return resolve(Model(name=model, flavor="debugmodel", overrides=overrides))


def two_ranks():
    return Mesh(Layout(dp_shard=2, ep=2), "cpu")


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--ep", "1"], "one rank holds all experts, so no rows are sent: use --ep 2 or more"),
        (
            ["--ep", "3"],
            "expert_parallel_degree = 3: 8 experts cannot be divided evenly among 3 ranks; degrees that fit: 1",
        ),
        (["--model", "llama3"], "parallelism.expert_parallel_degree = 2: the model has no experts"),
        (["--nproc", "4"], "--ep 2 needs 2 ranks, but 4 were requested"),
        (["--carrier", "deepep"], "--carrier: expected one of all_to_all, symmetric, got 'deepep'"),
        (["--skew", "0.5"], "--skew: expected a number, 1 or more, got '0.5'"),
        (["--tokens", "1"], "--tokens: expected a whole number, 2 or more, got '1'"),
        (["--dtype", "int8"], "--dtype: expected one of float32"),
        (["--flavor", "debugmodl"], "did you mean 'debugmodel'?"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_starts(words, said, capsys, monkeypatch):
    monkeypatch.setattr("shardline.launch.agent.start_ranks", lambda launch: pytest.fail("ranks were started"))
    assert main(["bench", "experts", "--flavor", "debugmodel", *words]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("error: ")
    assert said in shown


def test_a_carrier_that_cannot_run_is_refused_or_left_out(monkeypatch, capsys):
    kept = AllToAll()
    monkeypatch.setattr(experts, "carriers", lambda device: ({"all_to_all": kept}, {"symmetric": "it needs CUDA"}))
    with pytest.raises(experts.UserError, match="--carrier symmetric cannot be used here: it needs CUDA"):
        experts._carriers("symmetric", CPU, speaks=True)
    assert experts._carriers("all_to_all", CPU, speaks=True) == {"all_to_all": kept}
    assert capsys.readouterr().err == ""
    assert experts._carriers(None, CPU, speaks=True) == {"all_to_all": kept}
    assert capsys.readouterr().err == "note: symmetric cannot be used here: it needs CUDA\n"


# ---- the command -----------------------------------------------------------------------------------------------------


def test_json_lines_of_both_routings():
    words = ["--flavor", "debugmodel", "--tokens", "64", "--iterations", "2", "--float8", "--json"]
    done = command("bench", "experts", *words, env=ON_CPU)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    whats = [*TRANSFERS, "layer"]
    assert [(row["routing"], row["what"]) for row in rows] == [
        (routing, what) for routing in ("balanced", "skewed") for what in whats
    ]
    for row in rows:
        is_layer, balanced = row["what"] == "layer", row["routing"] == "balanced"
        assert list(row) == [*FIRST, *(OF_LAYER if is_layer else OF_TRANSFER), *LAST]
        assert (row["benchmark"], row["carrier"], row["ep"], row["float8"]) == ("experts", "all_to_all", 2, True)
        assert (row["model"], row["flavor"], row["tokens"]) == ("deepseek_v3", "debugmodel", 64)
        assert (row["dtype"], row["backend"], row["torch"]) == ("float32", "gloo", torch.__version__)
        assert (row["rank_load"] == row["expert_load"] == 1) if balanced else 1.5 < row["rank_load"] <= 1.9
        if is_layer:
            check_layer(row)
        else:
            check_transfer(row, balanced)


def check_transfer(row, balanced):
    """64 tokens choose 3 of 8 experts: half of the 192 rows stay, and each token has an expert on both ranks."""
    assert row["rows"] == 96 if balanced else 96 < row["rows"] < 192
    assert row["bytes"] == row["rows"] * 256 * (1 if row["what"] == "dispatch" else 4)  # float8, else float32
    seconds = row["microseconds"] / 1e6
    assert row["gbs"] == pytest.approx(row["bytes"] / seconds / 1e9)
    each = row["bytes"] // row["rows"]
    tokens = row["deepep_gbs"] * seconds * 1e9 / each
    assert tokens == pytest.approx(round(tokens))
    assert tokens == pytest.approx(128) if balanced else tokens <= 128.5


def check_layer(row):
    overlapped, serial, without = (row[key] for key in OF_LAYER[:3])
    assert min(overlapped, serial, without) > 0
    assert row["tokens_per_second"] == pytest.approx(64 / overlapped * 1e3)
    wanted = 1 - (overlapped - without) / (serial - without) if serial > without else None
    assert row["hidden"] == (wanted if wanted is None else pytest.approx(wanted))


@pytest.mark.slow
def test_the_table_and_no_second_routing():
    words = ["--model", "gpt_oss", "--flavor", "debugmodel", "--tokens", "16", "--iterations", "1", "--skew", "1"]
    done = command("bench", "experts", *words, "--carrier", "all_to_all", env=ON_CPU)
    assert done.returncode == 0, done.stderr
    title, _, names, _, *rows, _, overlapped, serial, without, hidden, last = done.stdout.splitlines()[:-1]
    assert title == ("balanced routing, all_to_all: the fullest rank has 1.00 times the mean, the fullest expert 1.00")
    columns = ["what", "rows", "MiB", "us", "GB/s", "DeepEP's GB/s"]
    assert [cell.strip() for cell in names.split("┃")[1:-1]] == columns
    assert [line.split("│")[1].strip() for line in rows] == TRANSFERS
    assert [line.split(":")[0] for line in (overlapped, serial, without)] == [
        *("layer overlapped", "layer one after another", "layer without transfers")
    ]
    assert hidden.startswith(("hidden: ", "transfers cost nothing here"))
    assert last.startswith("2 ranks of 16 tokens, float32, gloo, ")


def test_a_wrong_result_ends_with_exit_code_1(tmp_path):
    (tmp_path / "wrong.py").write_text(
        "from shardline.parallel.expert.all_to_all import AllToAll\n"
        "right = AllToAll.gathered\n"
        "def wrong(self, *given):\n"
        "    out, *side = right(self, *given)\n"
        "    out[3] = out[2]\n"
        "    return [out, *side]\n"
        "AllToAll.gathered = wrong\n"
    )
    words = ["--flavor", "debugmodel", "--tokens", "16", "--iterations", "1"]
    done = command("bench", "experts", *words, f"--experimental.custom_import={tmp_path / 'wrong.py'}", env=ON_CPU)
    assert done.returncode == 1
    assert re.search("token (3|11) is off by .* from a loop over the experts", done.stderr)  # of both parts


# ---- numbers ---------------------------------------------------------------------------------------------------------


def test_the_hidden_share_follows_from_the_times():
    times = {"overlapped": 0.025, "one after another": 0.04, "without transfers": 0.02}
    assert layer_row(times, 100) == {
        "overlapped_ms": 25.0,
        "one_after_another_ms": 40.0,
        "without_transfers_ms": 20.0,
        "tokens_per_second": 4000.0,
        "hidden": 0.75,
    }
    assert layer_row(times | {"one after another": 0.02}, 100)["hidden"] is None


@pytest.mark.parametrize("compiled", [True, False])
def test_compiled_layers_overlap_as_compiled_blocks_do_and_others_are_left_to_the_compiler(compiled):
    called = []
    layer = SimpleNamespace(forward="eager", both_ways=lambda forward, *given: called.append(forward))

    def compile_(forward, fullgraph, backend=None):
        return "plain" if backend is None else backend.__name__

    with patch("torch.compile", compile_):
        runs = _layers(layer, torch.ones(1), Travel(*[as_it_is] * 4, parts=1), None, None, compiled)
    for run in runs.values():
        run()
    assert called == (["compile_transfers", "plain", "plain"] if compiled else ["eager"] * 3)


def test_where_transfers_cost_nothing_no_share_is_shown(capsys):
    times = {"overlapped": 0.02, "one after another": 0.02, "without transfers": 0.02}
    told = {
        "routing": "balanced",
        "carrier": "all_to_all",
        "float8": True,
        "compiled": True,
        "rank_load": 1.0,
        "expert_load": 1.0,
        "ep": 2,
    }
    _show([{**told, **layer_row(times, 100), "tokens": 100, "dtype": "bfloat16", "backend": "nccl", "device": "a GPU"}])
    shown = capsys.readouterr().out
    assert "layer overlapped:            20.000 ms,        5,000 tokens/s of a rank" in shown
    assert "transfers cost nothing here" in shown
    assert "2 ranks of 100 tokens, bfloat16, rows to experts in float8, compiled, nccl, a GPU" in shown


def test_loads_are_those_of_the_busiest_rank(monkeypatch):
    """Rank 0 sends 2 + 1 rows away and gets 5 + 2; rank 1 gets the most rows, rank 0 the most from others."""
    monkeypatch.setattr(collectives, "sum_in_place", lambda x, axis: x)
    table = torch.tensor([[0, 1, 2, 0, 1, 0], [5, 0, 9, 0, 0, 0], [1, 1, 0, 0, 2, 0]])
    sizes = table.view(3, 3, 2).sum(2)
    loads = loads_of(table, sizes, torch.tensor([[0, 1], [0, 2], [1, 4], [4, 5]]))
    assert (loads.rows, loads.tokens) == (7, 3)  # the first token meets rank 0 once, though two experts are there
    assert loads.rank_load == pytest.approx(11 / (22 / 3))
    assert loads.expert_load == pytest.approx(11 / (22 / 6))


@pytest.mark.parametrize(
    ("ranks", "skew", "arch", "load"),
    [
        (4, 2.5, {}, 2.5),
        (8, 2.5, {}, 2.5),
        (2, 2.5, {}, 1.8),  # at most 0.9 of all rows
        (2, 1.4, {}, 1.4),
        (8, 5.0, {"moe": {"top_k": 2}}, 4.0),  # one expert there: a token chooses it once
        (2, 2.5, {"moe": {"top_k": 7}}, 8 / 7),  # four experts there
    ],
)
def test_a_skewed_routing_loads_the_first_rank(ranks, skew, arch, load, monkeypatch):
    spec = debug_arch(**arch).moe
    monkeypatch.setitem(job.axes, "ep", collectives.Axis("ep", None, ranks, 1))
    chosen = skewed_choices(2000, spec, CPU, skew)
    again = skewed_choices(2000, spec, CPU, skew)
    assert torch.equal(chosen, again)
    assert chosen.shape == (2000, spec.top_k)
    assert (chosen.sort(1).values.diff(dim=1) > 0).all()  # no expert twice
    counts = chosen.flatten().bincount(minlength=8)
    of_ranks = counts.view(ranks, -1).sum(1)
    assert of_ranks[0] / of_ranks.double().mean() == pytest.approx(load, rel=0.03)
    assert of_ranks.argmax() == 0
    monkeypatch.setitem(job.axes, "ep", collectives.Axis("ep", None, ranks, 0))
    assert not torch.equal(chosen, skewed_choices(2000, spec, CPU, skew))  # other tokens on another rank


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_balanced_routing_loads_all_experts_and_spreads_each_token(ranks, monkeypatch):
    monkeypatch.setitem(job.axes, "ep", collectives.Axis("ep", None, ranks, 0))
    chosen = balanced_choices(64, debug_arch().moe, CPU)
    assert (chosen.flatten().bincount() == 64 * 3 // 8).all()
    on_ranks = chosen // (8 // ranks)
    assert all(len(set(one.tolist())) == min(3, ranks) for one in on_ranks)


# ---- the layer -------------------------------------------------------------------------------------------------------


class Watched(AllToAll):
    """Notes when transfers start and when they are waited for."""

    def __init__(self, events):
        self.events = events

    def send(self, *given):
        self.events.append("start")
        return super().send(*given)

    def landed(self, *given):
        self.events.append("land")
        return super().landed(*given)

    def send_back(self, *given):
        self.events.append("start")
        return super().send_back(*given)

    def gathered(self, *given):
        self.events.append("land")
        return super().gathered(*given)


def watched_ways(model):
    """What happens in the layer, in order, with transfers overlapped and one after another."""
    mesh, arch = two_ranks(), debug_arch(model)
    layer = ExpertLayer(arch, torch.float32, CPU)
    chosen = skewed_choices(16, layer.spec, CPU, 2.5)
    x = layer.tokens(chosen)
    assert torch.equal(layer.routing(x).chosen.sort(1).values, chosen)
    events, multiply = [], expert_rows.multiply
    halves = {name: getattr(expert_layer, name) for name in ("widen", "narrow")}
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(expert_rows, "multiply", lambda *given: events.append("experts") or multiply(*given))
        for name, half in halves.items():
            noted = functools.partial(lambda half, *given: events.append("shared") or half(*given), half)
            patch.setattr(expert_layer, name, noted)
        job.carrier = Watched(events)
        travel = exchange(mesh, layer.spec, False, False).travel
        for way in (travel, one_after_another(travel)):
            layer.both_ways(layer.forward, x, way, torch.ones_like(x))
            seen.append(list(events))
            events.clear()
    assert not job.rows_under_way
    return seen


def test_transfers_overlap_in_one_way_and_not_in_the_other(pool):
    """No clock: half of the shared expert runs during each transfer, or every start is followed by its wait."""
    for overlapped, serial in pool.run(2, watched_ways, "deepseek_v3"):
        products = ["experts", "experts"]
        assert overlapped[:8] == ["start", "shared", "land", *products, "start", "shared", "land"]
        assert [event for event in overlapped[8:] if event != "experts"] == ["start", "land"] * 2
        assert serial[:8] == ["start", "land", "shared", *products, "start", "land", "shared"]
        assert [event for event in serial[8:] if event != "experts"] == ["start", "land"] * 2


def outputs(model, dtype, narrow, skew):
    """Both ways that send, and a loop over experts; and which numbers of a layer that sends nothing are sound."""
    mesh = two_ranks()
    layer = ExpertLayer(debug_arch(model), dtype, CPU)
    chosen = skewed_choices(32, layer.spec, CPU, skew)
    x, travel = layer.tokens(chosen), exchange(mesh, layer.spec, False, narrow).travel
    job.carrier = AllToAll()
    table, sizes = job.carrier.plan(chosen.flatten().bincount(minlength=8))
    experts._check(layer, x, travel, experts.OFF_FLOAT8 if narrow else 0.02)
    arrived = travel.arrive(travel.depart(x, chosen, layer.routing(x).weights, 8))
    job.carrier = Stay(table, sizes)
    stayed = travel.arrive(travel.depart(x, chosen, layer.routing(x).weights, 8))
    assert [one.shape for one in stayed] == [one.shape for one in arrived]
    assert torch.equal(stayed.ends, arrived.ends)
    out = layer.forward(x, travel._replace(parts=1))
    (of_x,) = torch.autograd.grad(out, x, torch.ones_like(out))
    return bool(out.isfinite().all() and of_x.isfinite().all()) and of_x.norm().item() > 0


@pytest.mark.parametrize("model", ["deepseek_v3", "gpt_oss"])
@pytest.mark.parametrize(("dtype", "narrow"), [(torch.float32, False), (torch.bfloat16, True)])
def test_results_are_those_of_a_loop_and_without_transfers_the_sizes_stay(pool, model, dtype, narrow):
    assert all(pool.run(2, outputs, model, dtype, narrow, 1.8))


def one_expert_off():
    mesh = two_ranks()
    layer = ExpertLayer(debug_arch(), torch.float32, CPU)
    x, job.carrier = layer.tokens(balanced_choices(32, layer.spec, CPU)), AllToAll()
    right = layer.by_loop

    def wrong(x):
        wanted = right(x)
        wanted[5] = wanted[6]
        return wanted

    layer.by_loop = wrong
    try:
        experts._check(layer, x, exchange(mesh, layer.spec, False, False).travel, experts.OFF)
    except WrongResult as error:
        return str(error)
    return "nothing"


def test_one_wrong_token_is_found(pool):
    assert all(said.startswith("token 5 is off by") for said in pool.run(2, one_expert_off))


def test_a_rank_that_gets_no_rows_computes_without_transfers(monkeypatch):
    monkeypatch.setitem(job.axes, "ep", collectives.Axis("ep", None, 2, 1))
    sizes, x, order = torch.tensor([[6, 0], [6, 0]]), torch.randn(3, 4), torch.arange(6)
    stay = Stay(torch.zeros(2, 8), sizes)
    rows, side = stay.landed(stay.send(x, torch.ones(6, 1), order, 2, *stay.planned), *stay.planned)
    assert (rows.shape, side.shape) == ((0, 4), (0, 1))
    out, back = stay.gathered(stay.send_back(rows, side, *stay.planned), order, 2)
    assert (out.shape, back.shape) == ((3, 4), (6, 1))


def test_more_experts_than_numbers_of_a_token_are_refused(monkeypatch):
    monkeypatch.setitem(job.axes, "ep", collectives.Axis("ep", None, 2, 0))
    arch = debug_arch(moe={"n_experts": 512})
    with pytest.raises(experts.UserError, match="512 experts are too many for tokens of 256 numbers to choose among"):
        ExpertLayer(arch, torch.float32, CPU)


@pytest.mark.gpu
def test_both_routings_on_a_gpu():
    done = command("bench", "experts", "--flavor", "debugmodel", "--iterations", "2", "--json", env=os.environ)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert {(row["tokens"], row["dtype"]) for row in rows} == {(8192, "bfloat16")}
    assert all(row["gbs"] > 0 for row in rows if row["what"] != "layer")
