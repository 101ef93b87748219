"""benchmarks/planner.py: rows as workloads, its scores, and that each row is predicted or left out with a reason."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from shardline.plan.traits import Traits

ROOT = Path(__file__).parents[3]
ROW = {
    "dataset": "ultrascale-playbook",
    "model": "Llama-like 1B",
    "hidden": 2048,
    "layers": 16,
    "heads": 32,
    "kv_heads": 32,
    "ffn": 8192,
    "vocab": 131072,
    "seq_len": 4096,
    "gpus": 8,
    "gpu_type": "H100-80GB",
    "precision": "bf16",
    "dp": 8,
    "tp": 1,
    "pp": 1,
    "micro_batch": 2,
    "global_batch": 256,
    "grad_accum": 16,
    "zero_stage": 0,
    "tokens_per_s_per_gpu": 40150,
    "mem_gib": 50.2,
}
FAILED = {
    "model": "80B",
    "nodes": 2,
    "micro_batch": 1,
    "grad_accum": 16,
    "global_batch": 256,
    "dp": 16,
    "pp": 1,
    "tp": 1,
}


@pytest.fixture(scope="module")
def benchmark():
    spec = importlib.util.spec_from_file_location("planner_benchmark", ROOT / "benchmarks" / "planner.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["planner_benchmark"] = module
    spec.loader.exec_module(module)
    return module


def folder_of(path, rows, failed=()):
    (path / "measured_layouts.json").write_text(json.dumps({"rows": rows}))
    (path / "failed_layouts.json").write_text(json.dumps(list(failed)))
    return path


def test_a_known_row_is_predicted(benchmark, tmp_path):
    found = benchmark.report(folder_of(tmp_path, [ROW], [FAILED]))
    assert found["overall"]["tokens_per_s"]["mape"] < 0.1
    assert found["overall"]["memory"]["mape"] < 0.1
    assert found["does_not_fit"] == {
        "failed": 1,
        "ran": 1,
        "recall": 1.0,
        "precision": 1.0,
        "by_memory": 1,
        "impossible": 0,
    }


@pytest.mark.parametrize("missing", [key for key in ROW if key not in ("gpus", "gpu_type", "seq_len")])
def test_a_row_may_lack_a_key(benchmark, tmp_path, missing):
    row = {key: value for key, value in ROW.items() if key != missing}
    found = benchmark.report(folder_of(tmp_path, [row]))
    assert found["rows"] == 1
    assert found["overall"]["rows"] + sum(found["left_out"].values()) == 1


def test_rows_about_which_too_little_is_known_are_left_out_with_a_reason(benchmark, tmp_path):
    unknown = {**ROW, "model": "something", "hidden": None, "layers": None}
    strange = {**ROW, "gpu_type": "abacus"}
    found = benchmark.report(folder_of(tmp_path, [ROW, unknown, strange]))
    assert found["overall"]["rows"] == 1
    assert len(found["left_out"]) == 2


def test_rows_whose_numbers_are_none_are_left_out_with_a_reason(benchmark, tmp_path):
    """Every row is scored or counted, whatever stands in it; a failed layout, too."""
    strange = (-1, "x", "1e400", True, 3.7, float("nan"), [], 1e12)
    keys = ("gpus", "tp", "micro_batch", "layers", "tokens_per_s_per_gpu", "mem_gib")
    rows = [{**ROW, key: value} for key in keys for value in strange]
    failed = [{**FAILED, "tp": value} for value in strange] + [{"model": "1B"}]
    found = benchmark.report(folder_of(tmp_path, [ROW, *rows], failed))
    counted = found["overall"]["rows"] + found["doubtful"] + sum(found["left_out"].values())
    assert counted == found["rows"] == 1 + len(rows)
    assert sum(found["failed_left_out"].values()) == len(failed)
    json.dumps(found, allow_nan=False)


def test_numbers_may_stand_as_text(benchmark, tmp_path):
    """Numbers as text count as numbers, and text of no number as not given."""
    number = (int, float)
    text = {key: str(value) if isinstance(value, number) else value for key, value in ROW.items()}
    plain, written, without = (
        benchmark.report(folder_of(tmp_path, [row])) for row in (ROW, text, {**text, "mem_gib": "n/a", "vp": ""})
    )
    assert plain["overall"] == written["overall"]
    assert without["overall"]["tokens_per_s"] == plain["overall"]["tokens_per_s"]
    assert "memory" not in without["overall"]


def test_rows_that_are_none_are_left_out_with_a_reason(benchmark, tmp_path):
    found = benchmark.report(folder_of(tmp_path, [ROW, None, 3, "row", []], [None, FAILED, 7]))
    assert (found["overall"]["rows"], sum(found["left_out"].values())) == (1, 4)
    assert (found["does_not_fit"]["failed"], sum(found["failed_left_out"].values())) == (1, 2)


@pytest.mark.parametrize(
    ("files", "code", "rows", "failed"),
    [
        ({"measured_layouts.json": {"rows": [ROW]}}, 0, 1, 0),
        ({"measured_layouts.json": [ROW]}, 0, 1, 0),
        ({"failed_layouts.json": [FAILED]}, 0, 0, 1),
        ({"measured_layouts.json": [], "failed_layouts.json": []}, 0, 0, 0),
        ({"measured_layouts.json": {}, "failed_layouts.json": {"rows": [FAILED]}}, 0, 0, 1),
        ({}, 1, 0, 0),
        ({"measured_layouts.json": {"rows": 3}}, 1, 0, 0),
        ({"measured_layouts.json": 3}, 1, 0, 0),
    ],
)
def test_a_folder_is_scored_as_far_as_it_goes(benchmark, tmp_path, monkeypatch, capsys, files, code, rows, failed):
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    for more in ([], ["--json"]):
        monkeypatch.setattr(sys, "argv", ["planner.py", "--data", str(tmp_path), *more])
        if code:
            with pytest.raises(SystemExit, match=str(tmp_path)):
                benchmark.main()
            continue
        benchmark.main()
        shown = capsys.readouterr()
        if more:
            found = json.loads(shown.out)
            assert found["overall"]["rows"] == rows
            assert found["does_not_fit"].get("failed", 0) == failed
        assert ("has no" in shown.err) == (len(files) == 1)


def test_a_source_nobody_knows_is_predicted_between_the_known_ones(benchmark, tmp_path):
    """The same layout by an unknown trainer is not further off than the known trainers are from each other, twice."""
    rows, trainers = sys.modules["planner_rows"], sys.modules["planner_trainers"]
    trainers.use_constants(trainers.fitted("all"))
    known = ("nanotron", "llm_foundry", "torch", "megatron")
    for changes in ({}, {"gpus": 64, "dp": 8, "tp": 8, "micro_batch": 4, "grad_accum": 8, "zero_stage": 1}):
        speeds = [rows.predicted(rows.measured({**ROW, **changes}, trainer)).predicted for trainer in known]
        unknown = rows.predicted(rows.measured({**ROW, **changes, "dataset": "new"})).predicted
        assert min(speeds) / 2 < unknown < 2 * max(speeds)


def test_the_longest_word_of_the_dataset_says_who_trained(benchmark):
    trainer_of = sys.modules["planner_trainers"].trainer_of
    assert trainer_of({"dataset": "korthikanti-2022", "source": "values in Megatron-LM"}) == "megatron_a100"
    assert trainer_of({"dataset": "new", "source": "github:pytorch/torchtitan"}) == "torch"
    assert trainer_of({"dataset": None, "source": 7}) == "default"


@pytest.mark.parametrize("gpu", ["H200", "MI300X", "MI325X", "A100-40GB", "GB300", "RTX 4090", "H800"])
def test_unknown_sources_models_and_sizes_of_clusters_are_predicted(benchmark, tmp_path, gpu):
    row = {**ROW, "dataset": "new", "model": "Mystery-9B", "gpu_type": gpu, "gpus": 384, "dp": 48, "tp": 8}
    row |= {"global_batch": 192, "micro_batch": 1, "grad_accum": 4, "hidden": 3584, "heads": 28, "kv_heads": 4}
    found = benchmark.report(folder_of(tmp_path, [row]))
    assert found["overall"]["rows"] == 1
    assert not found["left_out"]


@pytest.mark.parametrize(
    ("changes", "trainer"),
    [
        ({}, "nanotron"),
        ({"gpus": 64, "dp": 4, "tp": 16, "micro_batch": 16, "grad_accum": 4}, "nanotron_again"),
        ({"gpus": 64, "dp": 16, "pp": 4, "micro_batch": 1, "grad_accum": 16, "zero_stage": 1}, "nanotron_piped"),
        ({"gpus": 64, "dp": 16, "pp": 4, "micro_batch": 1, "grad_accum": 16}, "nanotron_first"),
        ({"gpus": 64, "dp": 32, "pp": 2, "micro_batch": 1, "grad_accum": 8, "zero_stage": 1}, "nanotron_lean"),
    ],
)
def test_the_layout_says_which_version_measured_it(benchmark, changes, trainer):
    rows, trainers = sys.modules["planner_rows"], sys.modules["planner_trainers"]
    trainers.use_constants(trainers.fitted("all"))
    assert rows.measured({**ROW, **changes}).trainer == trainer


def test_what_stays_gathered_and_what_a_pipeline_adds_count_in_memory(benchmark):
    rows, memory = sys.modules["planner_rows"], sys.modules["planner_memory"]
    trainers = sys.modules["planner_trainers"]
    trainers.use_constants(trainers.fitted("all"))
    workload = rows.measured({**ROW, "dp": 2, "tp": 4, "micro_batch": 1, "grad_accum": 128}).workload
    piped, lean = (trainers.traits_of(name) for name in ("nanotron_piped", "nanotron_lean"))
    stream = workload.tokens * 2 * workload.arch.dim
    assert memory.layer_bytes(workload, piped) - memory.layer_bytes(workload, lean) == pytest.approx(stream)
    stages = rows.measured({**ROW, "dp": 1, "tp": 4, "pp": 2, "micro_batch": 1, "grad_accum": 256}).workload
    more = memory.layer_bytes(stages, lean) - memory.layer_bytes(workload, lean)
    assert more == pytest.approx(lean.kept_piped * stream / 4)


def test_a_constant_that_rows_do_not_decide_stays_where_its_table_has_it(benchmark, tmp_path):
    """Rows of one layout, half as fast as the table says: rates go down, and what plays no part stays."""
    fit, rows, trainers = (sys.modules[f"planner_{name}"] for name in ("fit", "rows", "trainers"))
    trainers.use_constants({})
    wanted = rows.predicted(rows.measured(ROW)).predicted / 2
    own = [{**ROW, "zero_stage": zero, "tokens_per_s_per_gpu": wanted} for zero in (0, 1, 0, 1)]
    found = fit.fit(folder_of(tmp_path, own), lambda row: True, {"nanotron"})["nanotron"]
    before = trainers.TRAINERS["nanotron"]["traits"]
    assert found["products"] < 0.8 * Traits().products
    assert found["delay"] == pytest.approx(before["delay"], rel=0.01)


def test_what_is_left_out_is_predicted_without_it(benchmark, tmp_path):
    """Two sources of one trainer: the rows of one do not change how they are predicted themselves."""
    fit, trainers = sys.modules["planner_fit"], sys.modules["planner_trainers"]
    own = {**ROW, "dataset": "nemo-a", "zero_stage": 1}
    other = [{**own, "dataset": "nemo-b", "micro_batch": size, "grad_accum": 32 // size} for size in (1, 2, 4)]

    def predicted(speed):
        folder = folder_of(tmp_path, [{**own, "tokens_per_s_per_gpu": speed}, *other])
        held = fit._left_out(folder, lambda row: row.dataset == "nemo-a", "nemo-a")
        return held[0].predicted

    assert predicted(20_000) == predicted(40_000)
    assert trainers.traits_of("megatron").products != trainers.TRAINERS["megatron"]["traits"].get("products", 1.0)


def test_rows_that_contradict_themselves_do_not_count(benchmark, tmp_path):
    found = benchmark.report(folder_of(tmp_path, [ROW, {**ROW, "grad_accum": 4}, {**ROW, "notes": "INCONSISTENT"}]))
    assert found["doubtful"] == 2
    assert found["overall"]["rows"] == 1


def test_a_row_is_stalled_where_a_larger_micro_batch_was_much_faster(benchmark, tmp_path):
    slow = {**ROW, "micro_batch": 1, "grad_accum": 32, "tokens_per_s_per_gpu": 4000}
    found = benchmark.report(folder_of(tmp_path, [ROW, slow]))["overall"]["tokens_per_s"]
    assert found["stalled"] == 1
    assert found["mape_without_stalled"] < 0.1 < found["mape"]


def test_ranks_and_regret(benchmark):
    assert benchmark.spearman(np.array([1.0, 2.0, 3.0, 4.0]), np.array([10.0, 20.0, 30.0, 25.0])) == pytest.approx(0.8)
    assert benchmark.spearman(np.array([1.0, 1.0, 2.0]), np.array([3.0, 3.0, 9.0])) == pytest.approx(1.0)


def test_impossible_layouts_are_known(benchmark, tmp_path):
    few = {**FAILED, "model": "1B", "pp": 4, "dp": 4, "micro_batch": 32, "grad_accum": 2}  # fewer than stages - 1
    empty = {**FAILED, "model": "1B", "nodes": 8, "pp": 16, "dp": 4, "grad_accum": 64}  # a stage without a block
    found = benchmark.report(folder_of(tmp_path, [ROW], [few, empty]))["does_not_fit"]
    assert found["impossible"] == 2


def test_groups_go_to_one_side_whole(benchmark, tmp_path):
    rows = [{**ROW, "gpus": gpus, "dp": gpus, "grad_accum": 128 // gpus} for gpus in (8, 16, 32, 64, 128)]
    rows += [{**row, "zero_stage": 1} for row in rows]
    found = benchmark.report(folder_of(tmp_path, rows))
    assert found["fit"]["rows"] + found["check"]["rows"] == 10
    assert found["fit"]["rows"] % 2 == found["check"]["rows"] % 2 == 0


def test_the_command_prints_json(tmp_path):
    words = [
        sys.executable,
        str(ROOT / "benchmarks" / "planner.py"),
        "--data",
        str(folder_of(tmp_path, [ROW])),
        "--json",
    ]
    found = json.loads(subprocess.run(words, capture_output=True, text=True, check=True).stdout)
    assert {"overall", "fit", "check", "by_dataset", "does_not_fit"} <= set(found)


def test_own_runs_are_predicted_within_what_the_page_says(benchmark):
    runs = [run for run in benchmark.own_runs() if not run.get("earlier")]
    assert len(runs) >= 13
    assert max(abs(run["gib_error"]) for run in runs) <= 0.05
    assert max(abs(run["speed_error"]) for run in runs) <= 0.10
