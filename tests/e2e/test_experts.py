"""What a user sees of experts: the preset, rows and tables; and bad input: exit code 2, numbers, what would fit."""

import os
import subprocess
import sys

import pytest

from shardline.cli.main import main
from shardline.training import step
from tests.e2e.tiny import flags, rows, run

EXPERTS = {"n_experts": 6, "top_k": 2, "expert_dim": 16}


def demo(folder, *keys):
    command = [sys.executable, "-m", "shardline", "train", "--preset", "moe-demo", "--job.dump_folder", str(folder)]
    split = ["--nproc", "4", "--parallelism.expert_parallel_degree=4"]
    done = subprocess.run([*command, *split, *keys], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout, rows(folder)


def test_the_demo_starts_on_four_ranks(tmp_path):
    out, seen = demo(tmp_path / "run", "--training.steps=3", "--metrics.log_freq=1")
    assert "8 experts over 4 ranks" in out
    assert len(seen) == 3
    assert all(row["comm_bytes"]["ep"] > 0 for row in seen)
    assert all(1.0 <= row["expert_load"] == max(row["expert_load_layers"].values()) <= 4.0 for row in seen)


@pytest.mark.slow
def test_the_loss_of_the_demo_falls(tmp_path):
    _, seen = demo(tmp_path / "run")
    assert seen[-1]["loss"] < 0.4 * seen[0]["loss"]


def words(folder, moe=EXPERTS, **keys):
    given = [f"--model.overrides.moe.{name}={value}" for name, value in (moe or {}).items()]
    return ["train", *flags(folder, **keys), *given]


@pytest.mark.parametrize(
    ("degree", "moe", "said"),
    [
        (
            3,
            EXPERTS,
            "expert_parallel_degree = 3: dp_shard 4 x cp 1 x tp 1 = 4 ranks cannot be split into ep 3 x etp 1",
        ),
        (3, EXPERTS, "degrees that fit: 1, 2, 4"),
        (
            4,
            EXPERTS,
            "expert_parallel_degree = 4: 6 experts cannot be divided evenly among 4 ranks; degrees that fit: 1, 2",
        ),
        (4, {**EXPERTS, "n_experts": 2}, "2 experts cannot be divided evenly among 4 ranks; degrees that fit: 1, 2"),
        (2, None, "expert_parallel_degree = 2: the model has no experts"),
        (2, {**EXPERTS, "top_k": 7}, "model.overrides.moe: top_k (7) must not exceed n_experts (6)"),
        (2, {**EXPERTS, "n_groups": 4}, "model.overrides.moe: n_groups (4) must divide n_experts (6)"),
        (2, {**EXPERTS, "topk": 3}, "model.overrides.moe.topk: there is no such field, did you mean 'top_k'?"),
        (2, {"top_k": 3}, "model.overrides.moe.n_experts: is required: the flavor has no moe to change"),
    ],
)
def test_experts_that_do_not_fit(tmp_path, capsys, degree, moe, said):
    keys = [f"--parallelism.expert_parallel_degree={degree}", "--nproc=4"]
    assert main([*words(tmp_path / "run", moe), *keys]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert "Traceback" not in error
    assert not (tmp_path / "run").exists()


def test_an_expert_too_narrow_for_tensor_parallelism(tmp_path, capsys):
    keys = ["--parallelism.tensor_parallel_degree=2", "--nproc=2", "--dry-run"]
    assert main([*words(tmp_path / "run", {**EXPERTS, "expert_dim": 15}), *keys]) == 2
    assert "an expert's width, 15, is not a multiple of it" in capsys.readouterr().err


DEEPEP = ["--parallelism.expert_parallel_comm_backend=deepep", "--parallelism.expert_parallel_degree=2", "--nproc=2"]


def test_kernels_that_are_not_there(tmp_path, capsys):
    assert main([*words(tmp_path / "run"), *DEEPEP]) == 2
    error = capsys.readouterr().err
    assert "needs the package deep_ep, which is not installed; 'standard' sends tokens without it" in error
    assert len(error.strip().splitlines()) == 1
    assert main([*words(tmp_path / "run"), *DEEPEP, "--dry-run"]) == 0
    assert "needs the package deep_ep, which is not installed" in capsys.readouterr().out


def test_kernels_that_cannot_be_used(tmp_path):
    """Here the package is there and cannot be imported, as on a machine without CUDA."""
    (tmp_path / "deep_ep.py").write_text("raise ImportError('libcuda.so.1: cannot open shared object file')")
    paths = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "shardline", *words(tmp_path / "run"), *DEEPEP]
    environment = os.environ | {"PYTHONPATH": paths}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 2, done.stderr
    reason = "'deepep' cannot be used here (libcuda.so.1: cannot open shared object file)"
    assert done.stderr.strip().splitlines() == [
        f"error: command line: parallelism.expert_parallel_comm_backend: {reason}; 'standard' sends tokens without it"
    ]
    assert not (tmp_path / "run").exists()


def test_a_checkpoint_with_another_number_of_experts(tmp_path, capsys):
    folder, saving = tmp_path / "run", {"checkpoint__enable": True, "training__steps": 1}
    assert main(words(folder, **saving)) == 0
    capsys.readouterr()
    assert main(words(folder, {**EXPERTS, "n_experts": 8}, **saving)) == 2
    assert "is of another model (moe.n_experts: 6 -> 8)" in capsys.readouterr().err
    start = {**saving, "checkpoint__initial_load_path": folder / "checkpoint"}
    assert main(words(tmp_path / "other", {**EXPERTS, "n_experts": 8}, **start)) == 2
    assert "is of another model (moe.n_experts: 6 -> 8)" in capsys.readouterr().err


def test_coefficients_of_losses_may_change_on_the_way(tmp_path, capsys):
    folder, saving = tmp_path / "run", {"checkpoint__enable": True, "checkpoint__interval": 1}
    assert main(words(folder, training__steps=1, **saving)) == 0
    assert main(words(folder, {**EXPERTS, "aux_loss_coeff": 0.1}, training__steps=2, **saving)) == 0


def test_rows_and_closing_table_show_the_load(tmp_path, capsys):
    moe = {**EXPERTS, "first_dense": 1, "aux_loss_coeff": 0.01}
    assert main(words(tmp_path / "run", moe, training__steps=2)) == 0
    out = capsys.readouterr().out
    assert "expert load" in out
    assert "times the mean at most (layer 1)" in out


def test_the_same_load_for_all_experts_if_it_is_forced(tmp_path):
    sizes = {
        "dim": 32,
        "n_layers": 3,
        "n_heads": 2,
        "ffn_dim": 32,
        "vocab_size": 272,
        "moe": {**EXPERTS, "n_experts": 8},
    }
    seen = run(tmp_path / "run", model__overrides=sizes, debug__moe_force_load_balance=True, training__steps=2)
    assert [row["expert_load"] for row in seen] == [1.0, 1.0]
    assert seen[0]["expert_load_layers"] == {"0": 1.0, "1": 1.0, "2": 1.0}
    assert "aux_loss" not in seen[0]


def test_the_load_costs_no_second_wait_for_the_device(tmp_path, monkeypatch):
    """Loss, norm and loads are read together, once a step: the number of layers and a few more, not all counts."""
    waits = []
    read = step.read
    monkeypatch.setattr(step, "read", lambda numbers: waits.append(len(numbers)) or read(numbers))
    sizes = {"dim": 32, "n_layers": 3, "n_heads": 2, "ffn_dim": 32, "vocab_size": 272}
    for moe in (None, {**EXPERTS, "n_experts": 64, "z_loss_coeff": 0.01}):
        run(tmp_path / str(moe is None), model__overrides=sizes | {"moe": moe}, training__steps=2)
    without, _, with_experts, _ = waits
    assert with_experts == without + 3 + 1


def test_forcing_needs_experts(tmp_path, capsys):
    assert main(["train", *flags(tmp_path / "run"), "--debug.moe_force_load_balance", "--dry-run"]) == 0
    assert "note: debug.moe_force_load_balance has no effect: the model has no experts" in capsys.readouterr().out
