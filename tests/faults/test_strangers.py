"""Strangers who reach a job's store: where it listens, and what becomes of what they write into it."""

import contextlib
import json
import os
import random
import signal
import socket
import time
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from tests.faults.ahead import fixtures, job
from tests.faults.test_ranks import PROMPT, Job, is_alive, wait_until

FOREIGN = "\x1b[31mpay here\x1b]0;owned\x07"
LAUNCHERS = "shardline/launchers"
run, jobs = fixtures(Job)


def listeners(pid):
    """(address, port) of everything that a process listens on."""
    inodes = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            inodes.add(os.readlink(descriptor))
    found = set()
    for family, name in ((socket.AF_INET, "tcp"), (socket.AF_INET6, "tcp6")):
        for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in inodes:
                address, port = words[1].split(":")
                raw = b"".join(bytes.fromhex(address[at : at + 8])[::-1] for at in range(0, len(address), 8))
                found.add((socket.inet_ntop(family, raw), int(port, 16)))
    return found


def stranger(run):
    """A connection to the job's store of somebody who does not belong to the job."""
    ((address, port),) = listeners(run.process.pid)
    return dist.TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=10))


def forged_end():
    report = {"kind": "user", "rank": 0, "host": "h", "pid": 1, "text": FOREIGN, "details": FOREIGN, "at": 0.0}
    return json.dumps({"report": report, "delay": 0.0})


def forged_history():
    return json.dumps({"round": 7, "restarts": 99, "folder": FOREIGN, "begun": True})


def check_that_it_restarts_and_ends(run):
    """A killed rank costs one restart, after which Ctrl-C ends the job as usual; nothing foreign was printed."""
    before = run.pid(1)
    os.kill(before, signal.SIGKILL)
    wait_until(lambda: run.pid(1) != before and is_alive(run.pid(1)), 60)
    for rank in range(run.ranks):
        (run.folder / f"step-{rank}").unlink()
    run.wait_for_step(3)
    run.process.send_signal(signal.SIGINT)
    code, stdout, stderr = run.end(PROMPT)
    assert code == 130, stderr
    assert "was killed by SIGKILL; restart 1 of 1 with 1 machine, 2 ranks" in stderr
    for text in (stdout, stderr):
        assert "pay here" not in text
        assert "\x1b" not in text
        assert "Traceback" not in text
    return stderr


@job("none")
def test_a_job_of_one_machine_listens_on_the_loopback_alone(run):
    run.wait_for_step(1)
    launcher, *ranks = (listeners(pid) for pid in (run.process.pid, *run.pids()))
    assert len(launcher) == 1  # the store
    assert all(ranks)  # gloo
    assert {address for found in (launcher, *ranks) for address, _ in found} == {"127.0.0.1"}


@job("none", restarts=1)
def test_messages_of_a_stranger_neither_end_a_job_nor_use_up_its_restarts(run):
    run.wait_for_step(3)
    store = stranger(run)
    session = next(key for key in store.list_keys() if key.endswith("/machine/0")).removesuffix("/machine/0")
    for place in (LAUNCHERS, session):
        store.set(f"{place}/end/0", forged_end())
        store.set(f"{place}/machine/0", forged_history())
        store.set(f"{place}/ready/0", forged_history())
    store.set(f"{LAUNCHERS}/leader", json.dumps({"session": "mine", "latest": 9, "over": True}))
    store.set("shardline/0/watchdog/hang", json.dumps(FOREIGN))
    steps = run.step(0)
    wait_until(lambda: run.step(0) > steps + 100, 60)
    stderr = check_that_it_restarts_and_ends(run)
    assert stderr.count(f"note: {LAUNCHERS}/") == 1  # by the launcher; ranks log the rest


def garbage(chance, store, keys):
    """Something that a stranger may put under a key."""
    return chance.choice(
        (
            chance.randbytes(chance.randrange(200)),
            b"x" * (1 << 22),
            FOREIGN.encode(),
            forged_end().encode(),
            forged_history().encode(),
            json.dumps(chance.choice(([], {}, 0, None, "x", [[]] * 9, {"peer": 1}, {"report": []}))).encode(),
            b"[" * 100_000,
            b"9" * 5_000,
            store.compare_set(chance.choice(keys), "", ""),  # signed, but for another key
        )
    )


def spoil(store, chance, seconds):
    """Change and delete what launchers and watchdogs have written, again and again."""
    earlier = {}
    keys = [key for key in store.list_keys() if LAUNCHERS in key or "watchdog" in key]
    keys += [f"{LAUNCHERS}/{name}" for name in ("count", "done/0", "latest", "over", "waits", "end/0", "refused/0")]
    keys += [key.replace("machine/0", f"machine/{place}") for key in keys for place in (1, 2) if "machine/0" in key]
    deadline, did = time.monotonic() + seconds, 0
    while time.monotonic() < deadline:
        key = chance.choice(keys)
        earlier.setdefault(key, store.compare_set(key, "", ""))
        what = chance.randrange(6)
        if what == 0:
            store.delete_key(key)
        elif what == 1:
            store.set(key, earlier[key])  # an old one of the same key
        elif what == 2:
            store.set(key, str(chance.randrange(-(2**40), 2**40)))  # what a counter looks like
        else:
            store.set(key, garbage(chance, store, keys))
        did += 1
    return did


@job("none", restarts=1)
def test_a_job_survives_whatever_stands_in_its_store(run):
    run.wait_for_step(3)
    assert spoil(stranger(run), random.Random(3), seconds=3.0) > 100
    check_that_it_restarts_and_ends(run)
