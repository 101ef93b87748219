"""How `launch ssh` starts and ends machines; shells of this machine stand for them, and a script for the run."""

import os
import signal
import subprocess
import sys
import time

import pytest

from shardline.cli.main import main
from shardline.launch.clusters import ssh

# In place of ssh: HOST COMMAND.
REACH = """\
case $1 in
    silent) exec sleep 10 ;;
    closed) exit 255 ;;
    greets) echo "Welcome to $1" ;;
esac
exec sh -c "$2"
"""
# In place of the run of a machine, which notes what it is given.
RUN = """\
#!/bin/sh
case "$*" in
    *"--node-rank 1"*) echo "$SHARDLINE_JOB_SECRET $COLOUR" >second; echo from b; exit "${SECOND_CODE:-0}" ;;
esac
trap '[ -z "$PRINTS" ] || seq 99999 && echo TERM >told; kill $!; exit 143' TERM
echo "$SHARDLINE_JOB_SECRET $COLOUR" >first
printf 'from a, no end'
[ -z "$WAITS" ] || { sleep 8 & wait; }
"""


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SHARDLINE_PROGRAM", str(tmp_path / "run"))
    for name, text in (("reach", REACH), ("run", RUN), ("some.env", "COLOUR=dark red\n")):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    return tmp_path


def launch(hosts):
    return main(["launch", "ssh", f"--hosts={hosts}", "--ssh=sh reach", "--env-file=some.env"])


def test_all_machines_get_one_secret_and_the_variables(place, capfd):
    assert launch("a,greets") == 0
    secret, *colour = (place / "first").read_text().split()
    assert colour == ["dark", "red"]
    assert len(secret) == 64
    assert (place / "second").read_text() == (place / "first").read_text()
    out, err = capfd.readouterr()
    assert out == "from a, no end"
    assert err == "greets: Welcome to greets\ngreets: from b\n"


def test_nothing_starts_where_a_machine_does_not_answer(place, monkeypatch, capsys):
    monkeypatch.setattr(ssh, "REACH_SECONDS", 0.5)
    assert launch("a,silent") == 1
    assert capsys.readouterr().err == "error: silent did not answer within 0.5 s: nothing was started\n"
    assert launch("a,closed") == 1
    assert capsys.readouterr().err == "error: ssh to closed ended with 255\n"
    assert not (place / "first").exists()


def test_where_one_machine_fails_the_other_is_asked_to_stop(place, monkeypatch):
    monkeypatch.setattr(ssh, "FAILED_SECONDS", 0.2)
    monkeypatch.setenv("SECOND_CODE", "2")
    monkeypatch.setenv("WAITS", "1")
    assert launch("a,b") == 2
    assert (place / "told").read_text() == "TERM\n"


def test_a_signal_reaches_the_run(place):
    words = [sys.executable, "-m", "shardline", "launch", "ssh", "--hosts=a,b", "--ssh=sh reach"]
    with subprocess.Popen(words, env={**os.environ, "WAITS": "1"}, stdout=subprocess.PIPE) as job:
        assert job.stdout.read(14) == b"from a, no end"
        job.send_signal(signal.SIGTERM)
        assert job.wait(60) == 143
    assert (place / "told").exists()


def test_a_killed_start_leaves_a_run_that_can_still_print(place):
    words = [sys.executable, "-m", "shardline", "launch", "ssh", "--hosts=a,b", "--ssh=sh reach"]
    with subprocess.Popen(words, env={**os.environ, "WAITS": "1", "PRINTS": "1"}, stdout=subprocess.PIPE) as job:
        assert job.stdout.read(14) == b"from a, no end"
        job.kill()
    deadline = time.monotonic() + 6
    while not (place / "told").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_signal_before_all_have_answered_ends_the_start(place):
    words = [sys.executable, "-m", "shardline", "launch", "ssh", "--hosts=silent,greets", "--ssh=sh reach"]
    with subprocess.Popen(words, stderr=subprocess.PIPE) as job:
        assert job.stderr.readline() == b"greets: Welcome to greets\n"
        began = time.monotonic()
        job.send_signal(signal.SIGINT)
        assert job.wait(60) == 130
        assert time.monotonic() - began < ssh.REACH_SECONDS
