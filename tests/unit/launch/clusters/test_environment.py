"""What is read from the environment of SLURM, Kubeflow, torchrun and MPI, and what is not."""

import os

import pytest

from shardline.cli.main import main
from shardline.cli.parser import parse
from shardline.config.names import LAUNCHER_VARIABLE
from shardline.errors import UserError
from shardline.launch import secret
from shardline.launch.clusters import environment
from shardline.launch.clusters.environment import (
    first_host,
    read_surroundings,
    take_surroundings,
    tasks_of_nodes,
    wait_for_name,
)

SLURM = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_STEP_NODELIST": "gpu[003-004]",
    "SLURM_NODEID": "1",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
}
KUBEFLOW = {
    "PET_NNODES": "2",
    "PET_NPROC_PER_NODE": "8",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "127.0.0.1",
    "PET_MASTER_PORT": "29400",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setattr(environment, "wait_for_name", lambda host: None)


def taken(variables, *words):
    from shardline.cli.commands import TRAIN

    parsed = parse(TRAIN, words)
    return take_surroundings(parsed.named(), parsed.given, variables)


def meeting(variables, *words):
    found = taken(variables, *words)
    return found["nnodes"], found["node_rank"], found["nproc"], found["rdzv_endpoint"]


def test_one_task_on_each_node_is_a_launcher(capsys):
    variables = {**SLURM, "SLURM_GPUS_ON_NODE": "8"}
    nodes, number, ranks, endpoint = meeting(variables)
    assert (nodes, number, ranks) == ("2", 1, 8)
    assert endpoint == meeting({**variables, "SLURM_NODEID": "0"})[3]  # all choose the same
    host, _, port = endpoint.partition(":")
    assert host == "gpu003"
    assert 20000 <= int(port) < 30000
    assert endpoint != meeting({**variables, "SLURM_JOB_ID": "4712"})[3]
    assert meeting({**variables, "MASTER_ADDR": "head", "MASTER_PORT": "7000"})[3] == "head:7000"
    assert meeting({**variables, "CUDA_VISIBLE_DEVICES": "0,1"})[2] == 2
    assert meeting(variables, "--nproc", "1")[2] == 1  # what is given counts, also where it is the default
    assert "note: srun: 2 machines, 8 ranks on each, meeting at gpu003:" in capsys.readouterr().err


def test_several_tasks_on_a_node_are_ranks():
    variables = {**SLURM, "SLURM_STEP_NUM_TASKS": "3", "SLURM_STEP_TASKS_PER_NODE": "2,1", "SLURM_PROCID": "2"}
    assert taken(variables)["nnodes"] == "1"
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
    assert [variables[name] for name in names] == ["2", "3", "0", "1", "gpu003"]


@pytest.mark.parametrize(
    "more",
    [
        {"SLURM_STEP_ID": ""},  # the batch script
        {"SLURM_STEP_ID": "4294967290"},  # an interactive step
        {"SLURM_PTY_PORT": "40000"},  # a shell of srun --pty
        {LAUNCHER_VARIABLE: "1"},  # a rank of our launcher
        {"TORCHELASTIC_RUN_ID": "x", "RANK": "0", "WORLD_SIZE": "2"},  # one of torchrun's
        {"RANK": "0", "WORLD_SIZE": "2"},
    ],
)
def test_what_is_no_task_of_srun_is_left_alone(more):
    variables = {**SLURM, **more}
    assert meeting(dict(variables)) == ("1", 0, 1, "")
    assert read_surroundings(variables) is None


@pytest.mark.parametrize("words", [["--nnodes", "1"], ["--rdzv-endpoint=h:1"], ["--dry-run"]])
def test_options_on_the_command_line_win(words):
    assert "surroundings" not in taken(dict(SLURM), *words)


def test_kubeflow_numbers_machines_and_names_where_they_meet():
    assert meeting(dict(KUBEFLOW)) == ("2", 1, 8, "127.0.0.1:29400")
    variables = {**KUBEFLOW, "RANK": "1", "WORLD_SIZE": "16"}  # as the operator of a PyTorchJob sets them: of pods
    del variables["PET_NODE_RANK"]
    assert meeting(variables)[1] == 1
    assert "RANK" not in variables
    alone = {"PET_NNODES": "1", "PET_NPROC_PER_NODE": "2", "RANK": "0", "WORLD_SIZE": "1"}
    assert meeting(alone)[:3] == ("1", 0, 2)
    assert "WORLD_SIZE" not in alone
    elastic = {"PET_NNODES": "1:4", "PET_RDZV_BACKEND": "c10d", "PET_RDZV_ENDPOINT": "h:1", "PET_MAX_RESTARTS": "3"}
    found = taken(elastic)
    assert [found[name] for name in ("nnodes", "rdzv_backend", "rdzv_endpoint", "max_restarts")] == [
        *("1:4", "c10d", "h:1", 3)
    ]


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({**KUBEFLOW, "PET_NODE_RANK": "one"}, "PET_NODE_RANK='one': expected a whole number"),
        ({**KUBEFLOW, "PET_NPROC_PER_NODE": "0"}, "PET_NPROC_PER_NODE=0: expected 1 or more"),
        ({"PET_NNODES": "2", "PET_NODE_RANK": "0"}, "PET_NNODES=2 without PET_MASTER_ADDR"),
        ({**SLURM, "SLURM_STEP_NODELIST": ""}, "SLURM_STEP_NODELIST='' names no host"),
        ({**SLURM, "SLURM_NODEID": ""}, "SLURM_NODEID='': expected a whole number"),
        (OPEN_MPI, "mpirun starts 4 ranks on several machines .* set MASTER_ADDR"),
    ],
)
def test_what_cannot_be_read_is_named(variables, said):
    with pytest.raises(UserError, match=said):
        taken(dict(variables))


def test_ranks_of_mpi():
    variables = {**OPEN_MPI, "MASTER_ADDR": "a"}
    taken(variables)
    assert [variables[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")] == list("3412")
    here = {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}
    taken(here)
    assert here["MASTER_ADDR"] == "127.0.0.1"
    mpich = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
    taken(mpich)
    assert (mpich["RANK"], mpich["MASTER_PORT"]) == ("1", "29500")


def test_lists_of_hosts_and_tasks():
    lists = ["gpu[003-007,9],login", "a,b[1-2]", "n[1-2]", "n[7]", "rack[1-2]n[10-20]", "one"]
    assert [first_host(text) for text in lists] == ["gpu003", "a", "n1", "n7", "rack1n10", "one"]
    assert tasks_of_nodes("2(x3),1") == [2, 2, 2, 1]


def test_machines_of_one_user_derive_the_secret_of_a_start(tmp_path):
    one, other = dict(SLURM), {**SLURM, "SLURM_NODEID": "0", "SLURM_PROCID": "0"}
    taken(one)
    taken(other)
    assert one[secret.VARIABLE] == other[secret.VARIABLE]
    file = tmp_path / "config" / "shardline" / "job-key"
    assert file.stat().st_mode & 0o777 == 0o600
    assert [path.name for path in file.parent.iterdir()] == ["job-key"]
    again = {**SLURM, "SLURM_RESTART_COUNT": "1"}
    taken(again)
    assert again[secret.VARIABLE] != one[secret.VARIABLE]
    given = {**SLURM, secret.VARIABLE: "given by the user"}
    taken(given)
    assert given[secret.VARIABLE] == "given by the user"
    file.chmod(0o644)
    with pytest.raises(UserError, match="others can read it"):
        taken(dict(SLURM))


def test_without_a_place_for_the_key_the_variable_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "file"))
    with pytest.raises(UserError, match="export SHARDLINE_JOB_SECRET"):
        taken(dict(SLURM))


def test_a_name_may_be_known_later(capsys):
    answers = iter(["not known", "not known", ""])
    wait_for_name("pod-0.job", 60, lambda host: next(answers))
    assert capsys.readouterr().err.count("waiting for the name pod-0.job") == 1
    with pytest.raises(UserError, match=r"pod-0\.job, has no address after 0 s: not known"):
        wait_for_name("pod-0.job", 0, lambda host: "not known")


def test_train_reads_them(monkeypatch, tmp_path, capsys):
    """The launcher gets what was read, its secret too."""
    launched = []
    monkeypatch.setattr("shardline.launch.agent.start_ranks", lambda launch: launched.append(launch) or 0)
    monkeypatch.chdir(tmp_path)
    for name in (secret.VARIABLE, "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    before = dict(os.environ)
    try:
        assert main(["train", "--nproc=2", "--training.steps=1"]) == 0
        options = launched[0].options
        assert (options.nnodes, options.node_rank, options.nproc) == ("2", 1, 2)
        assert launched[0].secret == os.environ[secret.VARIABLE].encode()
        assert "no effect" not in capsys.readouterr().err
    finally:
        os.environ.clear()
        os.environ.update(before)
