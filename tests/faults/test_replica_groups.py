"""Replica groups are killed, come back or are slow: samples, losses and weights are those of one process."""

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time

import pytest
import torch

from shardline.parallel.replicas.lighthouse import Lighthouse
from shardline.parallel.replicas.quorum import Member
from tests import processes
from tests.faults.ledger import write_corpus
from tests.faults.nursery import Job
from tests.faults.replica_groups import GLOBAL_BATCH, LOCAL_BATCH, STEPS, Life, read_ledger, words_of
from tests.parity.harness import FLOAT32, complete

BATCH = {"training.global_batch_size": GLOBAL_BATCH, "training.local_batch_size": LOCAL_BATCH}
FAULT_TOLERANT = {"fault_tolerance.enable": True, "fault_tolerance.process_group_timeout_ms": 5000}


def serve_lighthouse(port=0, **options):
    """A lighthouse, and its address."""
    words = ["lighthouse", "--bind", f"127.0.0.1:{port}", "--join-timeout", "4", "--heartbeat-timeout", "1.5"]
    process = processes.start([sys.executable, "-m", "shardline", *words], stdout=subprocess.PIPE, text=True, **options)
    return process, re.search(r"http://\S+", process.stdout.readline())[0]


@pytest.fixture(scope="module")
def lab(nursery, tmp_path_factory):
    return Lab(nursery, tmp_path_factory.mktemp("replicas"))


class Lab:
    """Runs groups, and one process to compare them with."""

    def __init__(self, nursery, folder):
        self.nursery, self.folder, self.count = nursery, folder, 0
        self.corpus = write_corpus(folder / "corpus.jsonl", 12_000)
        self.rows, self.weights = self.alone()

    def settings(self, **more):
        data = {"training.dataset_path": str(self.corpus), "training.cache_folder": str(self.folder / "cache")}
        kept = {"training.steps": STEPS, **data, **BATCH, **more}
        return complete(kept, 1)

    def alone(self):
        place = self.folder / "alone"
        settings = self.settings() | {"job.dump_folder": str(place / "run")}
        ended = self.nursery.run(Job(place, 1, settings, entry="tests.faults.test_replica_groups:train_alone"))
        assert ended.codes == [0], ended.output()
        rows = [json.loads(line) for line in (place / "run" / "metrics.jsonl").read_text().splitlines()]
        return {row["step"]: row for row in rows}, torch.load(place / "weights")

    def run(self, *lives, lighthouse=None, pause=0.0, **more):
        """`pause`: seconds that each step takes besides."""
        self.count += 1
        place = self.folder / f"groups-{self.count}"
        server = None
        if lighthouse is None:
            server, lighthouse = serve_lighthouse()
        job = Job(place, len(lives), self.settings(**FAULT_TOLERANT, **more), grace=60, seconds=90,
                  entry="tests.faults.replica_groups:group", words=words_of(lives, lighthouse, pause))  # fmt: skip
        ended = self.nursery.run(job)
        if server is not None:
            processes.end(server)
        self.check(place, lives, ended)
        return place, read_ledger(place, len(lives))

    def check(self, place, lives, ended):
        """All lives end as they should, and the ledger, losses and weights are right."""
        said = ended.output()
        for number, group in enumerate(lives):
            codes = [int(line) for line in (place / f"codes-{number}").read_text().splitlines()]
            expected = [-9 if life.phase and life.action == "kill" else 0 for life in group]
            assert codes == expected, said
        rows = read_ledger(place, len(lives))
        last = {row.history for row in rows if row.step == STEPS}
        assert len(last) == 1, said
        for step in range(1, STEPS + 1):
            check_step(step, [row for row in rows if row.step == step], self.rows[step])
        for number, group in enumerate(lives):
            if not group[-1].phase or group[-1].action == "stop":
                weights = torch.load(place / f"weights-{number}")
                for name, expected in self.weights.items():
                    error = (weights[name] - expected).norm() / expected.norm()
                    assert error <= FLOAT32.parameter, f"group {number}: {name}"


def check_step(step, rows, alone):
    """Every sample of the step once: a group read its share, and shares that nobody wrote down are of the dead."""
    assert rows, f"step {step} was made by nobody"
    samples = list(range((step - 1) * GLOBAL_BATCH, step * GLOBAL_BATCH))
    slots = [samples[first : first + LOCAL_BATCH] for first in range(0, GLOBAL_BATCH, LOCAL_BATCH)]
    by_history = {}
    for row in rows:
        by_history.setdefault(row.history, []).append(row)
    for same in by_history.values():
        participants = same[0].participants
        for row in same:
            assert row.participants == participants
            place = participants.index(row.name) if row.name in participants else None
            share = [] if place is None else slots[place :: len(participants)]
            assert [number for number, _ in row.read] == [number for slot in share for number in slot], f"step {step}"
        read = [number for row in same for number, _ in row.read]
        assert len(read) == len(set(read))
        if set(participants) <= {row.name for row in same}:
            assert sorted(read) == samples, f"step {step}"
    for row in rows:
        assert row.loss == pytest.approx(alone["loss"], rel=FLOAT32.loss), f"step {step}"
        assert row.grad_norm == pytest.approx(alone["grad_norm"], rel=FLOAT32.gradient), f"step {step}"


def train_alone(words):
    from pathlib import Path

    from shardline.config.load import load_config
    from shardline.training.trainer import Trainer
    from tests.faults.nursery import job_of

    job = job_of(words[0])
    trainer = Trainer(load_config(overrides=job.settings))
    trainer.train()
    torch.save({name: one.detach() for name, one in trainer.model.named_parameters()}, Path(job.folder) / "weights")
    return 0


def test_a_group_is_lost_and_comes_back(lab):
    """Killed in a backward of step 4; the others go on, and in step 8 wait until its next life is there."""
    waits = Life(gate=8, until="ready-1-1")
    place, rows = lab.run([waits], [Life(4, "backward"), Life()])
    back = [row.step for row in rows if row.life == 1]
    assert back == list(range(back[0], STEPS + 1))
    assert 4 <= back[0] <= 9
    logged = [json.loads(line) for line in (place / "group-1-1" / "metrics.jsonl").read_text().splitlines()]
    assert logged[0]["replica_heals"] == 1
    assert logged[0]["replica_place"] == -1
    assert logged[-1]["replica_groups"] == 2


THREE = Life(gate=8, until="ready-1-1")


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["forward", "backward", "all_reduce", "commit"])
def test_one_of_three_is_killed_and_comes_back(lab, phase):
    _, rows = lab.run([THREE], [Life(4, phase), Life()], [THREE])
    assert {row.life for row in rows if row.step == STEPS} == {0, 1}
    assert len({row.name for row in rows if row.step == STEPS}) == 3


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["heal", "send"])
def test_killed_while_healing(lab, phase):
    """The one that heals is killed and comes a third time, or the one that sends the state is killed."""
    if phase == "heal":
        place, rows = lab.run([THREE], [Life(4, "forward"), Life(phase="heal"), Life()], [THREE])
        assert {row.life for row in rows if row.step == STEPS} == {0, 2}
    else:
        sends = Life(phase="send", gate=8, until="ready-1-1")
        place, rows = lab.run([sends, Life()], [Life(4, "forward"), Life()], [THREE])
        assert len({row.name for row in rows if row.step == STEPS}) == 3
    logged = (place / f"group-1-{2 if phase == 'heal' else 1}" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(logged[-1])["replica_heals"] == 1


@pytest.mark.slow
def test_two_are_killed_at_once(lab):
    _, rows = lab.run([THREE], [Life(4, "backward"), Life()], [Life(4, "all_reduce"), Life()])
    assert len({row.name for row in rows if row.step == STEPS}) == 3


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["forward", "all_reduce"])
def test_a_slow_group_is_left_behind_and_comes_back(lab, phase):
    """It is silent for longer than a step may wait and a heartbeat may fail: the others make the step without it."""
    slow = Life(4, phase, "stop", seconds=9.0)
    _, rows = lab.run([Life()], [slow], [Life()], pause=0.7)
    slow_rows = [row.step for row in rows if row.name.startswith("1:")]
    assert slow_rows
    others = {row.step for row in rows if "1:" not in "".join(row.participants)}
    assert others, "the others have made no step without it"


@pytest.mark.slow
def test_the_lighthouse_is_killed_and_starts_again(lab):
    """Steps wait for it; nothing is lost, and no group restarts."""
    process, address = serve_lighthouse()
    port, place = int(address.rpartition(":")[2]), lab.folder / f"groups-{lab.count + 1}"

    def restart():
        while not ((place / "ledger-0").exists() and len((place / "ledger-0").read_text().splitlines()) >= 4):
            time.sleep(0.02)
        processes.end(process)
        time.sleep(2)
        serve_lighthouse(port)
        (place / "again").touch()

    thread = threading.Thread(target=restart)
    thread.start()
    waits = Life(gate=9, until="again")
    _, rows = lab.run([waits], [waits], [waits], lighthouse=address, pause=0.2)
    thread.join()
    assert {row.life for row in rows} == {0}
    assert max(row.step for row in rows) == STEPS


@pytest.mark.slow
def test_a_stranger_at_the_lighthouse_changes_nothing(caplog):
    """Garbage does not end it; a member that the job did not sign is left out of each quorum, and named once."""
    process, address = serve_lighthouse()
    port = int(address.rpartition(":")[2])
    for garbage in (b"", b"\x00" * 4096, b"GET /../../etc/passwd HTTP/1.0\r\n\r\n", os.urandom(65536)):
        with socket.create_connection(("127.0.0.1", port)) as connection, contextlib.suppress(OSError):
            connection.sendall(garbage)
    own, other = Lighthouse(address, "0:own", b"key"), Lighthouse(address, "1:other", b"key")
    stranger = Lighthouse(address, "2:stranger", b"guessed")

    def asks(lighthouse, step, found):
        number = int(lighthouse.name[0])
        found[number] = lighthouse.quorum(Member(lighthouse.name, number, step, "h", "", 0, ""), lambda: over.is_set())

    over, counts = threading.Event(), []
    for step in (1, 2, 3):
        found = {}
        threads = [threading.Thread(target=asks, args=(one, step, found)) for one in (own, other, stranger)]
        for thread in threads:
            thread.start()
        for thread in threads[:2]:
            thread.join(30)
        counts.append([sorted(one.number for one in found[number]) for number in (0, 1)])
    over.set()
    for thread in threads:
        thread.join()
    for one in (own, other, stranger):
        one.close()
    assert process.poll() is None
    assert counts[1:] == [[[0, 1]] * 2] * 2  # the first quorum may be made before all have come
    assert all(2 not in numbers for both in counts for numbers in both)
    said = caplog.text.count(f"a member of the quorum at {address} is none of this job's groups: ignored")
    assert said == sum(one.met_stranger for one in (own, other, stranger))
    assert own.met_stranger or other.met_stranger
