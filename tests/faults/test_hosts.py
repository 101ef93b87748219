"""Ranks on two hosts: they meet, the link carries what they send, and a cut link ends the job on both sides."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.hosts import joined_hosts, two_hosts

ROOT = Path(__file__).parents[2]
MEBIBYTE = 2**20


@pytest.fixture
def hosts():
    with two_hosts(rate="1gbit") as pair:
        yield pair


def start(host, number, first, *words):
    """Launch one rank on a host, as a user does on each machine."""
    meeting = ["--node-rank", str(number), "--rdzv-endpoint", f"{first.address}:29871"]
    command = [sys.executable, "-m", "tests.faults.two_nodes", *meeting, *words]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return host.start(command, cwd=ROOT, text=True, **pipes)


def test_ranks_on_two_hosts_sum_over_the_shaped_link(hosts):
    a, b = hosts
    before = a.sent_bytes()
    jobs = [start(a, 0, a, "sum", "16"), start(b, 1, a, "sum", "16")]
    ended = [(*job.communicate(timeout=60), job.returncode) for job in jobs]
    assert [code for _, _, code in ended] == [0, 0], ended
    seconds = float(re.search(r"took ([\d.]+) s", ended[0][0])[1])
    # Two ranks send the whole tensor each: 16 MiB at 1 Gbit/s, with nothing to spare, is 0.134 s.
    assert 0.12 < seconds < 30
    assert 16 * MEBIBYTE <= a.sent_bytes() - before < 20 * MEBIBYTE
    assert ended[1][0] == ""  # rank 1 is on another host, and still not the one to print


def test_three_hosts_reach_each_other_through_links_of_their_own():
    """A file from one to another: its sender and its receiver count it, the third does not."""
    serve = "import socket; s = socket.create_server(('', 29872)); print(flush=True); c = s.accept()[0]; n = 0\n"
    serve += "while part := c.recv(1 << 16): n += len(part)\nprint(n)"
    send = f"import socket, sys; socket.create_connection((sys.argv[1], 29872)).sendall(bytes({2 * MEBIBYTE}))"
    with joined_hosts(3, rate="100mbit") as (a, b, c):
        server = c.start([sys.executable, "-c", serve], stdout=subprocess.PIPE, text=True)
        server.stdout.readline()
        began = time.monotonic()
        assert a.run([sys.executable, "-c", send, c.name]).returncode == 0
        assert int(server.communicate(timeout=60)[0]) == 2 * MEBIBYTE
        assert time.monotonic() - began > 0.13  # 0.168 s at 100 Mbit/s, less what the bucket holds
        assert a.sent_bytes() > 2 * MEBIBYTE
        assert c.received_bytes() > 2 * MEBIBYTE
        assert b.received_bytes() < MEBIBYTE / 4


def wait_for_steps(jobs, folder):
    deadline = time.monotonic() + 60
    while not all((folder / f"step-{rank}").exists() for rank in (0, 1)):
        assert time.monotonic() < deadline, [job.poll() for job in jobs]
        time.sleep(0.1)


def test_a_cut_link_ends_the_job_on_both_hosts(hosts, tmp_path):
    a, b = hosts
    jobs = [start(a, 0, a, "loop", str(tmp_path)), start(b, 1, a, "loop", str(tmp_path))]
    wait_for_steps(jobs, tmp_path)
    b.cut()
    (_, error_a), (_, error_b) = (job.communicate(timeout=30) for job in jobs)
    assert [job.returncode for job in jobs] == [1, 1], (error_a, error_b)
    assert "where rank 1 did not arrive" in error_a
    assert re.search(r"rank 1 \(.*has not been heard of", error_a)
    assert "has not reached the store of the job at" in error_b
    assert not os.path.exists(f"/proc/{(tmp_path / 'pid-1').read_text()}")


def test_a_signal_for_one_launcher_ends_the_job_on_both_hosts(hosts, tmp_path):
    a, b = hosts
    jobs = [start(a, 0, a, "loop", str(tmp_path)), start(b, 1, a, "loop", str(tmp_path))]
    wait_for_steps(jobs, tmp_path)
    jobs[1].terminate()
    errors = [job.communicate(timeout=30)[1] for job in jobs]
    assert [job.returncode for job in jobs] == [143, 143], errors
    assert not any("error:" in text for text in errors), errors  # torch may warn of names it cannot look up
