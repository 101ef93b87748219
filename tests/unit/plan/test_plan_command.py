"""`shardline plan`: what it finds, writes, checks, prints and refuses."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from shardline.cli.main import main
from shardline.config.load import load_config
from shardline.plan.check import judge
from shardline.plan.hardware import find_profile
from shardline.plan.of_config import kept_by, workload_of
from shardline.plan.report import mfu, report
from shardline.plan.search import MARGIN, PlanProblem, candidates, changes_of, config_of, search
from shardline.run.device import flops_per_token
from tests.unit.plan.test_work import LLAMA, MODELS

H100 = find_profile("h100")
EIGHT_B = ["--model", "llama3", "--flavor", "8B", "--seq", "8192", "--global-batch", "64", "--gpu", "h100"]


def problem(ranks=8, batch=64, arch=LLAMA, name="llama3", flavor="8B", fixed=None, *flags):
    config = load_config(None, [f"--model.name={name}", f"--model.flavor={flavor}", "--training.seq_len=8192", *flags])
    config = config.replace({"compile.enable": True})
    return PlanProblem(config, arch, H100, ranks, batch, fixed or {}, kept_by(config, arch))


def shown(capsys, *words):
    code = main(["plan", *words])
    return code, capsys.readouterr()


# ---- the search ------------------------------------------------------------------------------------------------------


def test_candidates_fit_and_come_fastest_first():
    found = search(problem(), 5)
    assert len(found) == 5
    assert all(one.memory.total <= MARGIN * (H100.memory - H100.allowance) for one in found)
    speeds = [one.tokens_per_second for one in found]
    assert speeds == sorted(speeds, reverse=True)
    assert all(one.ranks == 8 for one in found)
    assert {one.workload.step_tokens for one in found} == {64 * 8192.0}


def test_room_is_what_other_programs_leave():
    assert problem().room == H100.memory - 1.5 * 2**30


def test_every_layout_is_a_config_that_means_the_same():
    given = problem(16, 64)
    for one in search(given, 6):
        written = config_of(given, one.workload)
        again = workload_of(written, LLAMA, one.workload.layout)
        for field in ("layout", "micro_batch", "micro_batches", "recompute", "schedule", "stages_per_rank", "reshard"):
            assert getattr(again, field) == getattr(one.workload, field), field


def test_candidates_cover_every_dimension():
    seen = {"tp": set(), "cp": set(), "pp": set(), "dp_shard": set(), "dp_replicate": set()}
    schedules, sizes, overlapped = set(), set(), set()
    for one in candidates(problem(64, 256)):
        for axis, degrees in seen.items():
            degrees.add(getattr(one.layout, axis))
        schedules.add(one.schedule)
        sizes.add(one.micro_batch)
        overlapped.add(one.async_tp)
    assert all(len(degrees) > 1 for degrees in seen.values())
    assert max(seen["tp"]) == 8  # GPUs of a node
    assert seen["cp"] == {1, 2}  # a slice of the 8192 tokens has 4096 or more
    assert schedules == {"1F1B", "Interleaved1F1B"}
    assert {1, 2, 4} <= sizes
    assert overlapped == {True, False}


def test_experts_are_split_where_there_are_some():
    given = problem(8, 64, MODELS["experts"], "qwen3", "30B-A3B")
    assert {one.layout.ep for one in candidates(given)} >= {1, 2, 4, 8}


def test_keys_of_the_command_line_stay_as_they_are():
    fixed = {"parallelism.tensor_parallel_degree": 4, "activation_checkpoint.mode": "none"}
    found = search(problem(8, 64, fixed=fixed), 3)
    assert {one.workload.layout.tp for one in found} == {4}
    assert {one.workload.recompute for one in found} == {"none"}


def test_the_goal_memory_takes_the_smallest():
    fast, small = (search(problem(), 1, goal)[0] for goal in ("speed", "memory"))
    assert small.memory.total < fast.memory.total
    assert small.tokens_per_second < fast.tokens_per_second


# ---- the command -----------------------------------------------------------------------------------------------------


def test_the_best_layout_is_written_as_a_config_that_trains(capsys, tmp_path):
    file = tmp_path / "best.toml"
    small = ["--model", "llama3", "--flavor", "debugmodel", "--seq", "512", "--global-batch", "32", "--gpu", "h100"]
    code, printed = shown(capsys, *small, "--gpus", "16", "--top", "3", "--write", str(file))
    assert code == 0
    assert f"wrote {file}" in printed.out
    assert main(["train", str(file), "--dry-run", "--world-size", "16"]) == 0
    assert "llama3 debugmodel on 16 ranks" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("words", [["--flavor", "8B"], ["--flavor", "70B", "--parallelism.pipeline_parallel_degree=4"]])
def test_large_layouts_train_too(capsys, tmp_path, words):
    file = tmp_path / "best.toml"
    common = ["--model", "llama3", *words, "--seq", "8192", "--global-batch", "256", "--gpu", "h100", "--gpus", "64"]
    assert shown(capsys, *common, "--top", "1", "--write", str(file))[0] == 0
    assert main(["train", str(file), "--dry-run", "--world-size", "64"]) == 0


def test_what_is_printed_fits_a_terminal_and_names_its_parts(capsys):
    code, printed = shown(capsys, *EIGHT_B, "--nodes", "2", "--top", "4", "--tokens", "1e12", "--price", "2")
    assert code == 0
    lines = printed.out.splitlines()
    assert max(map(len, lines)) <= 80
    for words in (
        "tok/s/GPU",
        "MFU",
        "a step of",
        "computation",
        "Memory of the fullest rank",
        "Why the next ones lose",
    ):
        assert words in printed.out
    assert "1,000,000,000,000 tokens: " in printed.out
    assert "at 2 per GPU and hour" in printed.out


def test_json_has_the_same_numbers(capsys):
    code, printed = shown(capsys, *EIGHT_B, "--gpus", "8", "--top", "2", "--json")
    rows = [json.loads(line) for line in printed.out.splitlines()]
    assert code == 0
    assert len(rows) == 2
    assert rows[0]["tokens_per_second_per_device"] >= rows[1]["tokens_per_second_per_device"]
    assert sum(rows[0]["memory"].values()) / 2**30 == pytest.approx(rows[0]["memory_gib"], rel=0.01)
    assert sum(rows[0]["parts"].values()) == pytest.approx(rows[0]["step_seconds"], rel=0.01)


def test_speed_mfu_and_cost_follow_from_the_time_of_a_step():
    given = problem()
    (one,) = search(given, 1)
    speed = 64 * 8192 / one.time.total / 8
    assert one.tokens_per_second == pytest.approx(speed)
    flops, peak = flops_per_token(LLAMA, 8192), H100.peak("bfloat16")
    assert mfu(given, one) == pytest.approx(speed * flops / peak)
    frozen = replace(one, workload=replace(one.workload, lora_rank=8))
    assert mfu(given, frozen) == pytest.approx(speed * (flops - flops_per_token(LLAMA, 0) / 3) / peak)
    hour = speed * 8 * 3600
    shown, longer = (report(given, [one], {"tokens": hours * hour, "price": 2.5}) for hours in (36, 240))
    assert shown.endswith(": 36.0 hours, 720 at 2.5 per GPU and hour")
    assert longer.endswith(" tokens: 10.0 days, 4,800 at 2.5 per GPU and hour")


def test_the_goal_cost_may_take_fewer_gpus(capsys):
    code, printed = shown(capsys, *EIGHT_B, "--gpus", "64", "--goal", "cost", "--top", "1", "--json")
    assert code == 0
    layout = json.loads(printed.out)["layout"]
    assert layout["pp"] * layout["dp_replicate"] * layout["dp_shard"] * layout["cp"] * layout["tp"] < 64


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--gpus", "8", "--gpu", "h10"], "did you mean 'h100'?"),
        (["--gpu", "h100"], "--gpus N (or --nodes N) is missing"),
        (["--gpus", "8", "--nodes", "2", "--gpu", "h100"], "contradict each other"),
        (["--gpus", "8", "--gpu", "h100", "--parallelism.tensor_parallel_degree=16"], "no layout of 8 GPUs with"),
        (["--gpus", "8", "--gpu", "h100", "--goal", "beauty"], "--goal"),
    ],
)
def test_bad_input_ends_with_a_sentence(capsys, words, message):
    code, printed = shown(capsys, "--model", "llama3", "--flavor", "8B", *words)
    assert code == 2
    assert message in printed.err
    assert len(printed.err.splitlines()) == 1


def test_a_model_must_be_named(capsys):
    code, printed = shown(capsys, "--gpus", "8", "--gpu", "h100")
    assert code == 2
    assert "name a config FILE" in printed.err


def test_where_nothing_fits_it_says_what_would(capsys):
    words = ["--model", "llama3", "--flavor", "70B", "--seq", "8192", "--global-batch", "8", "--gpus", "8"]
    code, printed = shown(capsys, *words, "--gpu", "a100_40gb")
    assert code == 2
    assert "no layout of 8 x NVIDIA A100 SXM 40 GB fits" in printed.err
    assert "64 GPUs or --" in printed.err


# ---- one config ------------------------------------------------------------------------------------------------------


def test_a_config_that_fits_is_said_to(capsys, tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('[model]\nname = "llama3"\nflavor = "1B"\n[training]\nseq_len = 2048\nlocal_batch_size = 1\n')
    code, printed = shown(capsys, "--check", str(file), "--gpu", "h100")
    assert code == 0
    assert printed.out.startswith("fits: ")


def test_a_config_that_does_not_fit_gets_changes_that_make_it_fit(capsys, tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('[model]\nname = "llama3"\nflavor = "8B"\n[training]\nseq_len = 8192\nlocal_batch_size = 8\n')
    code, printed = shown(capsys, "--check", str(file), "--gpus", "8", "--gpu", "h100")
    assert code == 1
    assert "does not fit" in printed.out
    assert "most of it: activations" in printed.out
    config = load_config(str(file))
    verdict = judge(config, H100, 8)
    assert 1 <= len(verdict.changes) <= 3
    assert [one.seconds for one in verdict.changes] == sorted(one.seconds for one in verdict.changes)
    for change in verdict.changes:
        assert judge(config.replace(change.keys), H100, 8).fits
        key, value = next((key, value) for key, value in change.keys.items() if value is not None)
        assert f"--{key}={str(value).lower() if isinstance(value, bool) else value}" in printed.out


def test_two_changes_together_where_one_is_not_enough():
    config = load_config(None, ["--model.name=llama3", "--model.flavor=8B", "--training.seq_len=16384"])
    config = config.replace({"training.local_batch_size": 2})
    verdict = judge(config, find_profile("rtx4090"), 8)
    assert not verdict.fits
    assert verdict.changes
    assert all(", and " in change.words for change in verdict.changes)


def test_changes_are_only_what_differs():
    given = problem()
    best = search(given, 1)[0]
    keys = changes_of(given, best.workload)
    assert all(given.config.value(key) != value for key, value in keys.items())
