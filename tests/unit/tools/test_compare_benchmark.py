"""benchmarks/compare.py: its command lines, what it reads from the runs' output, its table; and its case for a CPU."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from shardline.config.load import load_config

PATH = Path(__file__).parents[3] / "benchmarks" / "compare.py"


# As TorchTitan 0.2.2 prints it, colours included
TITAN = """
[titan] 2026-11-16 10:00:01,000 - root - INFO - Starting job: default job
[titan] 2026-11-16 10:00:02,000 - root - INFO - Training starts at step 1
\x1b[31m[titan] 2026-11-16 10:00:30,000 - root - INFO - step:  1  loss: 12.26304  grad_norm:  2.9116  memory: 60.53GiB(43.31%)  tps: 583  tflops: 21.44  mfu: 2.17%\x1b[39m
[titan] 2026-11-16 10:00:31,000 - root - INFO - step:  2  loss: 12.00000  grad_norm:  2.8000  memory: 67.51GiB(48.30%)  tps: 20,000  tflops: 900.10  mfu: 91.01%
[titan] 2026-11-16 10:00:31,500 - root - INFO - step:  3  loss: 11.50000  grad_norm:  2.7000  memory: 67.51GiB(48.30%)  tps: 35,400  tflops: 900.10  mfu: 91.01%
[titan] 2026-11-16 10:00:32,000 - root - INFO - step:  4  loss:  9.25000  grad_norm:  2.6000  memory: 67.51GiB(48.30%)  tps: 35,500  tflops: 900.10  mfu: 91.01%
[titan] 2026-11-16 10:00:32,500 - root - INFO - Training completed
PEAK 67.5
"""  # noqa: E501
OUT_OF_MEMORY = """
[rank0]: Traceback (most recent call last):
[rank0]:   File "train.py", line 1, in <module>
[rank0]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 62.62 GiB.
[rank0]:[W1116 10:00:00] Warning: destroy_process_group() was not called
PEAK 120.0
"""


@pytest.fixture(scope="module")
def benchmark():
    spec = importlib.util.spec_from_file_location("compare_benchmark", PATH)
    module = importlib.util.module_from_spec(spec)
    sys.modules["compare_benchmark"] = module
    spec.loader.exec_module(module)
    return module


def output(benchmark, text, code=0):
    """What `execute` gives for these lines, one a second."""
    program = f"import sys; print({text!r}); sys.exit({code})"
    found = benchmark.execute([sys.executable, "-c", program], {}, 60)
    return found._replace(lines=[(float(place), line) for place, (_, line) in enumerate(found.lines)], began=100.0)


def test_torchtitan_lines(benchmark):
    found = benchmark.titan_numbers(output(benchmark, TITAN), 16384)
    assert found == {
        "first_step_seconds": 3.0,
        "tokens_per_second": 35450,
        "memory_gib": 67.5,
        "first_loss": 12.26304,
        "last_loss": 9.25,
    }


def test_step_lines(benchmark):
    """The last two of four intervals count: 2 and 3 seconds for 100 tokens, half of it on the CPU."""
    marks = [(110, 5, 6.5), (120, 10, 6.0), (121, 10.5, "None"), (123, 11.5, 5.0), (126, 13, 4.5)]
    lines = ["", "noise", *(f"STEP {wall} {cpu} {loss}" for wall, cpu, loss in marks), "PEAK 1.5"]
    found = benchmark.step_numbers(output(benchmark, "\n".join(lines)), 100)
    assert found == {
        "first_step_seconds": 10.0,
        "tokens_per_second": 100 / 2.5,
        "cpu_seconds": 1.25,
        "memory_gib": 1.5,
        "first_loss": 6.5,
        "last_loss": 4.5,
    }


def test_no_step_is_no_result(benchmark):
    empty = output(benchmark, "nothing happened")
    assert benchmark.step_numbers(empty, 1) is None
    assert benchmark.titan_numbers(empty, 1) is None
    assert benchmark.last_error(empty, 60) == "nothing happened"


def test_the_line_that_names_the_error(benchmark):
    failed = output(benchmark, OUT_OF_MEMORY, code=1)
    assert failed.code == 1
    assert benchmark.last_error(failed, 60).endswith("CUDA out of memory. Tried to allocate 62.62 GiB.")
    refused = output(benchmark, "error: model.converters: float8 is not built\nSTEP 1 1 1", code=2)
    assert benchmark.last_error(refused, 60) == "error: model.converters: float8 is not built"


def test_a_run_that_takes_too_long_is_killed(benchmark):
    found = benchmark.execute([sys.executable, "-c", "import time; time.sleep(600)"], {}, 0.5)
    assert found.code == -9
    assert benchmark.last_error(found, 0.5).startswith("killed: after 0 s")


def test_a_missing_package_is_an_error_of_its_run_alone(benchmark, tmp_path, monkeypatch):
    run = benchmark.Run("torchtitan", benchmark.LLAMA_8B, ("--compile.enable",))
    monkeypatch.setattr(benchmark, "command_of", lambda *options: [sys.executable, "-m", "no_such_package.train"])
    error = benchmark.measure(run, 2, [], 60, tmp_path)["error"]
    assert "No module named 'no_such_package'" in error


RESULTS = [
    {
        "trainer": "shardline",
        "tokens_per_second": 37000.0,
        "memory_gib": 50.0,
        "first_step_seconds": 20.0,
        "cpu_seconds": 0.25,
    },
    {"trainer": "torchtitan", "tokens_per_second": 18500.0, "memory_gib": 62.5, "first_step_seconds": 40.0},
    {"trainer": "trainer", "error": "torch.OutOfMemoryError"},
]


def test_ratios_and_the_table(benchmark):
    common = {"case": "bf16", "model": "Llama", "variant": "", "cache": "as it was"}
    other = {**common, "model": "Qwen", "trainer": "torchtitan", "tokens_per_second": 5.0}
    assert benchmark.ratio(RESULTS[0], RESULTS[1], "tokens_per_second") == 2
    assert benchmark.ratio(RESULTS[0], RESULTS[2], "tokens_per_second") is None
    lines = benchmark.table([*({**common, **result} for result in RESULTS), other]).splitlines()
    assert lines[2:] == [
        "| bf16 | Llama | shardline | 37,000 |  | 50.0 |  | 20.0 |  | 0.250 |  |",
        "| bf16 | Llama | torchtitan | 18,500 | 2.00 x | 62.5 | 0.80 x | 40.0 | 0.50 x |  |  |",
        "| bf16 | Llama | trainer | cannot |  |  |  |  |  |  |  |",
        "| bf16 | Qwen | torchtitan | 5 |  |  |  |  |  |  |  |",  # a first run of its own
    ]
    assert len({line.count("|") for line in lines}) == 1


def test_a_first_run_that_failed_gives_no_ratios(benchmark):
    common = {"case": "long", "model": "Llama", "variant": "", "cache": "as it was"}
    lines = benchmark.table([{**common, **RESULTS[2]}, {**common, **RESULTS[1]}]).splitlines()
    assert lines[2:] == [
        "| long | Llama | trainer | cannot |  |  |  |  |  |  |  |",
        "| long | Llama | torchtitan | 18,500 |  | 62.5 |  | 40.0 |  |  |  |",
    ]


def ours(benchmark):
    return [(name, run) for name, runs in benchmark.CASES.items() for run in runs if run.trainer == "shardline"]


def test_our_command_lines_are_configs(benchmark, tmp_path):
    for _, run in ours(benchmark):
        words = benchmark.command_of(run, 3, tmp_path, [])
        assert words[2:4] == ["shardline", "train"]
        training = load_config(overrides=words[4:]).training
        assert (training.steps, training.seq_len, training.local_batch_size) == (3, run.model.seq_len, run.model.batch)


def test_both_trainers_get_the_same_flags(benchmark, tmp_path):
    for name, runs in benchmark.CASES.items():
        for run in (run for run in runs if run.trainer == "torchtitan"):
            words = benchmark.command_of(run, 3, tmp_path, ["--only.ours=1"])
            assert run._replace(trainer="shardline") in runs, name
            assert set(run.flags) <= set(words)
            assert "--only.ours=1" not in words
            assert sum(word.startswith("--activation_checkpoint.mode=") for word in words) == 1
            benchmark.write_module(run, tmp_path)
            compile((tmp_path / "compare_marks.py").read_text(), "compare_marks.py", "exec")


def test_only_first_steps_have_caches_of_their_own(benchmark, tmp_path):
    for name, runs in benchmark.CASES.items():
        for run in runs:
            variables = benchmark.environment_of(run, tmp_path, tmp_path / "cache")
            own = variables.get("TRITON_CACHE_DIR", "").startswith(str(tmp_path))
            assert (
                own == variables.get("TORCHINDUCTOR_CACHE_DIR", "").startswith(str(tmp_path)) == (name == "first-step")
            )
    assert [run.cache for run in benchmark.CASES["first-step"]] == ["cold", "cold", "warm", "warm"]


def test_an_unknown_case_is_refused(benchmark, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["compare.py", "--cases", "bf16,fp4"])
    with pytest.raises(SystemExit):
        benchmark.main()
    assert "no case is named 'fp4'; there are bf16, " in capsys.readouterr().err


@pytest.mark.slow
def test_a_case_on_this_machine(benchmark, monkeypatch, capsys):
    """Ours and the plain loop: the Trainer needs a package that tests do without."""
    runs = [run for run in benchmark.CASES["cpu-demo"] if run.trainer != "trainer"]
    small = ["--training.local_batch_size=2", "--model.overrides.n_layers=1"]
    monkeypatch.setitem(benchmark.CASES, "cpu-demo", runs)
    monkeypatch.setattr(sys, "argv", ["compare.py", "--cases=cpu-demo", "--steps=4", "--", *small])
    monkeypatch.setenv("PYTHONPATH", str(PATH.parents[1]))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    benchmark.main()
    printed = capsys.readouterr().out
    rows = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    assert [row["trainer"] for row in rows] == ["shardline", "loop"]
    for row in rows:
        assert "error" not in row
        assert row["first_loss"] == pytest.approx(5.8, abs=0.3)  # of 320 tokens, not trained
        assert min(row["tokens_per_second"], row["memory_gib"], row["first_step_seconds"], row["cpu_seconds"]) > 0
        assert {"machine", "torch", "python"} <= set(row)
    assert "| cpu-demo | the demo preset | loop |" in printed


def test_list(benchmark, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["compare.py", "--list"])
    benchmark.main()
    printed = capsys.readouterr().out.splitlines()
    assert {line.split()[0] for line in printed} == set(benchmark.CASES)
    assert len(printed) == sum(map(len, benchmark.CASES.values()))


def test_only_the_chosen_trainers_run(benchmark, monkeypatch):
    monkeypatch.setattr(benchmark, "measure", lambda run, *rest: {"tokens_per_second": 1.0})
    monkeypatch.setattr(benchmark, "mfu", lambda run, rate: None)
    found = benchmark.compare(["bf16", "cpu-demo"], 2, [], 1.0, ["shardline", "loop"])
    assert [(row["case"], row["trainer"]) for row in found] == [
        (case, trainer) for case in ("bf16", "cpu-demo") for trainer in ("shardline", "loop")
    ]
    with pytest.raises(benchmark.argparse.ArgumentTypeError, match="no trainer is named 'titan'"):
        benchmark.chosen_trainers("titan")
