"""Where the secret of a job comes from, and what is refused."""

import os

import pytest

from shardline.cli.main import main
from shardline.errors import UserError
from shardline.launch import agent, secret
from shardline.launch.agent import Agent, Launch
from shardline.launch.secret import job_secret
from shardline.run.options import TrainOptions

SECRET = "0123456789abcdef0123"


@pytest.fixture(autouse=True)
def no_variable(monkeypatch):
    monkeypatch.delenv(secret.VARIABLE, raising=False)


def of_file(path, nodes="2"):
    return job_secret(TrainOptions(nnodes=nodes, rdzv_secret_file=str(path)))


def test_one_machine_makes_its_own_and_several_have_none_by_themselves():
    one, another = job_secret(TrainOptions()), job_secret(TrainOptions(max_restarts=3))
    assert len(one) == len(another) == 32
    assert one != another
    assert job_secret(TrainOptions(nnodes="1:2")) == b""


def test_machines_read_it_from_the_environment_or_a_file_of_their_own(monkeypatch, tmp_path):
    file = tmp_path / "secret"
    file.write_text(f"{SECRET}\n")
    file.chmod(0o600)
    assert of_file(file) == of_file(file, "1") == SECRET.encode()
    monkeypatch.setenv(secret.VARIABLE, SECRET)
    assert job_secret(TrainOptions(nnodes="2")) == SECRET.encode()
    with pytest.raises(UserError, match="are both set: use only one"):
        of_file(file)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o620])
def test_a_file_that_others_can_read_is_refused(tmp_path, mode):
    file = tmp_path / "secret"
    file.write_text(SECRET)
    file.chmod(mode)
    with pytest.raises(UserError) as raised:
        of_file(file)
    assert str(raised.value).endswith(f"others can read it (mode {mode:04o}): chmod 600 {file}")
    assert SECRET not in str(raised.value)


def test_what_is_no_secret_is_refused(monkeypatch, tmp_path):
    os.mkfifo(tmp_path / "pipe", 0o600)
    (tmp_path / "empty").touch(0o600)
    for name, said in (("pipe", "not a file"), ("absent", "No such file"), ("empty", "is empty")):
        with pytest.raises(UserError, match=said):
            of_file(tmp_path / name)
    monkeypatch.setenv(secret.VARIABLE, "short")
    with pytest.raises(UserError, match="SHARDLINE_JOB_SECRET: a secret has at least 16 characters, this one has 5"):
        job_secret(TrainOptions(nnodes="2"))


def test_the_command_refuses_it_before_it_starts_anything(tmp_path, capsys):
    words = [
        "train",
        "--nproc",
        "2",
        "--rdzv-secret-file",
        str(tmp_path / "absent"),
        "--job.dump_folder",
        str(tmp_path),
    ]
    assert main(words) == 2
    assert "absent cannot be read: No such file or directory" in capsys.readouterr().err


def test_it_is_in_no_text_about_the_launch():
    assert SECRET not in repr(Launch("m:f", (), TrainOptions(), secret=SECRET.encode()))


def test_ranks_get_a_key_and_not_the_secret_itself(tmp_path, monkeypatch):
    monkeypatch.setenv(secret.VARIABLE, SECRET)
    started = []
    monkeypatch.setattr(agent, "start_rank", lambda *given: started.append(given[-1]))
    options = TrainOptions(nproc=2)
    job = Agent(Launch("m:f", (), options, secret=job_secret(options)), tmp_path)
    try:
        job._start(job.rendezvous.next_round())
        store = job.rendezvous.thread.job.base
        stored = [store.get(key) for key in store.list_keys()]
    finally:
        job.rendezvous.close()
    first, second = started
    assert first["SHARDLINE_RANK_KEY"] == second["SHARDLINE_RANK_KEY"]
    assert len(bytes.fromhex(first["SHARDLINE_RANK_KEY"])) == 32
    assert not any(SECRET in value for value in (*first.values(), *second.values()))
    assert not any(SECRET.encode() in value or first["SHARDLINE_RANK_KEY"].encode() in value for value in stored)
