"""Which machines take part in a job, and how they report to each other: launchers in threads, without any rank."""

import itertools
import logging
import random
import socket
import threading
import time
from dataclasses import replace
from unittest.mock import Mock

import pytest

from shardline.config.load import load_config
from shardline.errors import UserError
from shardline.launch import endpoint, leader, rendezvous, rounds
from shardline.launch.endpoint import Endpoint
from shardline.launch.failures import in_a_line
from shardline.launch.launch import misfit
from shardline.launch.recovery import Recovery
from shardline.launch.rendezvous import Rendezvous
from shardline.launch.rounds import End, JobHistory, Terms
from shardline.report import Report
from shardline.run import attempt
from shardline.run.folder import open_run_folder
from shardline.run.options import TrainOptions


@pytest.fixture
def port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def launchers(port, monkeypatch):
    """Makes launchers of one job, as if each on a machine of its own; the first that meets leads."""
    monkeypatch.setattr(leader, "LAST_CALL", 0.5)
    monkeypatch.setattr(leader, "LINGER", 0.3)
    monkeypatch.setattr(rounds, "PERIOD", 0.05)
    made, numbers = [], itertools.count()
    monkeypatch.setattr(socket, "gethostname", lambda: f"host-{next(numbers)}")

    def make(
        nodes="1:2",
        number=None,
        ranks=1,
        job="x",
        max_restarts=3,
        seconds=20.0,
        lost=1.5,
        fits=lambda ranks: True,
        secret=b"secret",
    ):
        least, _, most = nodes.partition(":")
        terms = Terms(int(least), int(most or least), job, max_restarts)
        wrong = lambda ranks: "" if fits(ranks) else f"{ranks} ranks do not fit"  # noqa: E731
        address = f"127.0.0.1:{port}"
        made.append(Rendezvous(Endpoint(address, number, seconds), terms, ranks, lost, wrong, lambda: True, secret))
        return made[-1]

    yield make
    for one in reversed(made):
        one.close()


class Meet(threading.Thread):
    """A launcher that waits for its round: the round, an error, or "ended"."""

    def __init__(self, launcher):
        super().__init__(daemon=True)
        self.launcher, self.result = launcher, None
        self.start()

    def run(self):
        try:
            self.result = self.launcher.next_round() or "ended"
        except UserError as error:
            self.result = error

    def get(self, seconds=20):
        self.join(seconds)
        return self.result


def meet(*launchers):
    return [one.get() for one in [Meet(launcher) for launcher in launchers]]


def hosts(launcher):
    return [peer.host for peer in launcher.round.peers]


def wait_for(condition):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def failure(text="x", kind="error"):
    return End(Report(kind, 0, "h", 1, text, "", time.time()), 0.5)


def test_machines_meet_in_rounds_and_the_store_has_rank_0(launchers):
    a, b = launchers(ranks=2), launchers(ranks=3)
    first, second = meet(a, b)
    assert first == second
    leads, other = (a, b) if a.leads else (b, a)
    assert (leads.round.peers[0].ranks, leads.round.ranks, leads.round.number) == (leads.ranks, 5, 0)
    assert leads.round == other.round
    other.report(failure("of its own"))
    wait_for(lambda: leads.end is not None)
    assert (leads.end.report.text, leads.end.delay) == ("of its own", 0.5)
    for one in (a, b):
        one.state = replace(one.state, restarts=1)
    meet(a, b)
    assert (a.round.number, b.round.number, a.round.state.restarts) == (1, 1, 1)
    assert a.end is None


def test_the_first_failure_counts_and_before_a_regroup(launchers):
    a, b = launchers(), launchers()
    meet(a, b)
    a.report(failure("a machine joins", "regroup"))
    wait_for(lambda: b.end is not None)
    assert b.settle(failure("the first")).report.text == "the first"
    assert a.settle(failure("the second")).report.text == "the first"


def test_a_silent_machine_is_given_up_and_stops_by_itself_before(launchers):
    a = launchers()
    one = Meet(a)
    wait_for(lambda: a.leads)
    b = launchers()
    two = Meet(b)
    assert len(one.get().peers) == len(two.get().peers) == 2
    b.thread._closed.set()
    wait_for(lambda: b.cut_off)
    assert a.end is None
    wait_for(lambda: a.end is not None)
    assert in_a_line(a.end.report).startswith(f"host {b.thread.me.host} is lost: no sign of life for ")
    assert a.end.delay >= 1.5
    assert not a.cut_off
    meet(a)
    assert hosts(a) == [a.thread.me.host]


def test_a_machine_that_comes_later_ends_the_round_without_a_failure(launchers):
    a = launchers(nodes="1:3")
    meet(a)
    b = launchers(nodes="1:3")
    late = Meet(b)
    wait_for(lambda: a.end is not None)
    assert (a.end.is_failure, a.end.report.text) == (False, f"host {b.thread.me.host} joins")
    meet(a)
    assert len(late.get().peers) == 2
    assert hosts(b) == [a.thread.me.host, b.thread.me.host]


def test_machines_in_reserve_step_in_and_go_when_the_job_is_over(launchers):
    a = launchers()
    first = Meet(a)
    wait_for(lambda: a.leads)
    b = launchers()
    second = Meet(b)
    assert len(first.get().peers) == len(second.get().peers) == 2
    c, d = launchers(), launchers()
    waiting = [Meet(c), Meet(d)]
    wait_for(lambda: c.thread is not None and "as many machines as it can use" in c.thread.waits_for)
    assert a.end is None
    b.thread._closed.set()
    wait_for(lambda: a.end is not None)
    meet(a)
    wait_for(lambda: any(one.result is not None for one in waiting))
    assert len(hosts(a)) == 2
    a.close()
    results = [one.get() for one in waiting]
    assert sorted(type(result).__name__ for result in results) == ["Round", "str"]
    assert "ended" in results


def test_as_many_machines_as_the_layout_can_use(launchers):
    """Of three with one rank each, two."""
    together = [launchers(nodes="1:3", fits=lambda ranks: ranks % 2 == 0) for _ in range(3)]
    waiting = [Meet(one) for one in together]
    wait_for(lambda: sum(one.result is not None for one in waiting) == 2)
    assert {len(one.round.peers) for one, thread in zip(together, waiting, strict=True) if thread.result} == {2}
    (spare,) = [thread for thread in waiting if thread.result is None]
    spare.launcher.close()
    assert spare.get() == "ended"


def test_too_few_or_unfit_machines_are_told_after_the_time_out(launchers, port):
    a = launchers(nodes="2:3", seconds=0.4)
    (few,) = meet(a)
    expected = f"more machines (1 of at least 2 is there: {a.thread.me.host})"
    assert str(few) == f"waited 0.4 s at 127.0.0.1:{port} for {expected}"


def test_a_layout_that_does_not_fit_is_told_with_its_numbers(launchers, port):
    (unfit,) = meet(launchers(seconds=0.4, fits=lambda ranks: ranks > 1))
    expected = "machines with which the layout fits (1 ranks do not fit)"
    assert str(unfit) == f"waited 0.4 s at 127.0.0.1:{port} for {expected}"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"nodes": "1:3"}, "--nnodes differs: 1:3 here, 1:2 on "),
        ({"job": "y"}, "--rdzv-id differs: y here, x on "),
        ({"max_restarts": 4}, "--max-restarts differs: 4 here, 3 on "),
    ],
)
def test_a_machine_that_was_started_differently_is_refused(launchers, change, said):
    a = launchers()
    meet(a)
    (refused,) = meet(launchers(**change))
    assert str(refused).startswith(said)
    assert a.end is None


@pytest.mark.parametrize(
    ("change", "said"),
    [({"nodes": "3"}, "--nnodes differs: 2 here, 3 on "), ({"job": "y"}, "--rdzv-id differs: x here, y on ")],
)
@pytest.mark.parametrize("max_restarts", [0, 3])
def test_who_waits_for_a_machine_that_was_started_differently_ends_with_it(launchers, change, said, max_restarts):
    options = {"nodes": "2", "max_restarts": max_restarts}
    a = launchers(**options)
    waiting = Meet(a)
    wait_for(lambda: a.leads)
    b = launchers(**{**options, **change})
    (refused,) = meet(b)
    assert "differs" in str(refused)
    assert str(waiting.get(5)) == f"{said}{b.thread.me.host}"


@pytest.mark.parametrize(
    ("nodes", "first_round", "more"),
    [
        pytest.param("1:2", 0, 0, id="the others are enough without it"),
        pytest.param("2", 4, 1, id="it is left over from another job"),
    ],
)
def test_a_machine_that_was_started_differently_ends_nobody_who_can_do_without_it(launchers, nodes, first_round, more):
    a = launchers(nodes)
    waiting = Meet(a)
    wait_for(lambda: a.leads)
    stranger = launchers(nodes, job="y")
    stranger.state = JobHistory(round=first_round)
    (refused,) = meet(stranger)
    assert str(refused).startswith("--rdzv-id differs: y here, x on ")
    others = [launchers(nodes) for _ in range(more)]
    meet(*others)
    assert hosts(waiting.get() and a) == [one.thread.me.host for one in (a, *others)]


def test_launchers_with_the_same_host_name_and_pid_are_two(launchers, monkeypatch):
    """As in containers that share the name of their host."""
    monkeypatch.setattr(socket, "gethostname", lambda: "host")
    first, second = meet(launchers("2", seconds=1.0), launchers("2", seconds=1.0))
    assert len(first.peers) == len(second.peers) == 2


def test_numbers_are_kept_and_one_that_is_taken_is_refused(launchers):
    b, a = launchers("2", number=1), launchers("2", number=0)
    meet(b, a)
    assert [peer.number for peer in a.round.peers] == [0, 1]
    (refused,) = meet(launchers("2", number=1))
    assert str(refused).startswith("--node-rank 1: ")
    b.thread._closed.set()
    wait_for(lambda: a.end is not None)
    back = launchers("2", number=1)
    meet(a, back)
    assert [peer.host for peer in back.round.peers] == [a.thread.me.host, back.thread.me.host]


def test_a_machine_that_leaves_sends_first_why(launchers):
    a = launchers()
    first = Meet(a)
    wait_for(lambda: a.leads)
    b = launchers()
    meet(b)
    first.get()
    b.thread._closed.set()  # from here on this thread talks to the store
    b.thread._thread.join()
    b.report(failure("host b leaves (SIGTERM)", "leave"))
    b.thread.leaving = True
    b.thread._exchange()
    wait_for(lambda: a.end is not None)
    assert (b.thread.has_left, a.end.report.kind, a.end.report.text) == (True, "leave", "host b leaves (SIGTERM)")


def test_what_is_known_of_the_run_survives_the_machine_of_the_endpoint(launchers):
    a = launchers()
    survivor = launchers()
    survivor.state = JobHistory(round=4, restarts=2, folder="outputs/run", begun=True)
    meet(a, survivor)
    assert a.round.state == survivor.round.state == JobHistory(4, 2, "outputs/run", True)


# ---- secrets and strangers -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("secret", [b"", b"another"])
def test_a_machine_with_another_secret_is_told_and_writes_nothing(launchers, port, secret, monkeypatch, capsys):
    monkeypatch.setattr(rendezvous, "STRANGER_SECONDS", 0.3)
    a = launchers()
    meet(a)
    (problem,) = meet(launchers(secret=secret))
    assert str(problem).startswith(f"--rdzv-endpoint 127.0.0.1:{port}: the launcher there has another secret, or none")
    store = a.thread.job.base
    assert [bool(store.get(key)) for key in store.list_keys() if "/machine/" in key].count(True) == 1
    assert a.end is None
    assert "secret" not in capsys.readouterr().err


def test_several_machines_without_a_secret_meet_and_say_so_once(launchers, port, capsys):
    together = [launchers(secret=b"") for _ in range(2)]
    meet(*together)
    note = f"note: this job has no secret: whoever reaches 127.0.0.1:{port} can stop or change it;"
    assert capsys.readouterr().err.count(note) == 1
    together[0].report(failure())
    meet(*together)
    assert capsys.readouterr().err == ""


def test_keys_of_ranks_differ_by_round_and_job_and_are_the_same_on_all_machines(launchers, port):
    a, b = launchers(), launchers()
    meet(a, b)
    first = a.rank_key()
    assert b.rank_key() == first
    a.report(failure())
    meet(a, b)
    assert a.rank_key() == b.rank_key() != first
    other = Rendezvous(
        Endpoint("127.0.0.1:0", 0, 20.0), Terms(1, 1, "x", 0), 1, 9.0, lambda ranks: "", lambda: True, b"secret"
    )
    meet(other)
    assert other.rank_key() not in (first, a.rank_key())
    other.close()


def test_machines_meet_again_and_again_while_a_stranger_changes_and_deletes_what_they_write(launchers, capsys):
    a, b = launchers(lost=20.0), launchers(lost=20.0)
    meet(a, b)
    a.thread.job.base.set("shardline/launchers/count", "one")
    ends, chance = threading.Event(), random.Random(1)
    store = a.thread.job.base.clone()

    def spoil():
        while not ends.wait(0.005):
            key = chance.choice(store.list_keys())
            store.delete_key(key)
            if chance.random() < 0.7:
                store.set(key, chance.choice((chance.randbytes(99), b"{}", b"\x1b[31m", b"x" * 99_999)))

    thread = threading.Thread(target=spoil, daemon=True)
    thread.start()
    try:
        for number in range(1, 4):
            b.report(failure(f"failure {number}"))
            wait_for(lambda: a.end is not None and b.end is not None)
            assert (a.end.report.text, b.end.report.text) == (f"failure {number}",) * 2
            for one in (a, b):
                one.state = replace(one.state, restarts=number)
            meet(a, b)
            assert (a.round.number, b.round.number, a.round.state.restarts) == (number, number, number)
    finally:
        ends.set()
        thread.join()
    assert capsys.readouterr().err.count("was not written by this job: ignored\n") <= 2  # each launcher once


def test_a_copy_of_an_old_record_does_not_keep_a_dead_machine_alive(launchers):
    a, b = launchers(lost=1.0), launchers(lost=1.0)
    meet(a, b)
    leads, other = (a, b) if a.leads else (b, a)
    name, store = f"machine/{other.thread.index}", leads.thread.store.store.clone()
    record = store.get(name)
    other.thread._closed.set()
    wait_for(lambda: store.set(name, record) or leads.end is not None)
    assert "is lost: no sign of life" in leads.end.report.text


# ---- a job without restarts ------------------------------------------------------------------------------------------

ONCE = {"nodes": "2", "max_restarts": 0}


def test_one_machine_takes_a_free_port_and_waits_for_nobody(monkeypatch):
    endpoint = Endpoint("127.0.0.1:0", 0, 90.0)
    once = Rendezvous(endpoint, Terms(1, 1, "none", 0), 2, 10.0, lambda ranks: "", lambda: True)
    started = time.monotonic()
    assert once.next_round().ranks == 2
    assert once.is_done()
    host, number = once.store_address
    socket.create_connection((host, number)).close()
    once.close()
    assert time.monotonic() - started < 60  # whoever waits for others waits 90 s


def test_machines_get_the_numbers_they_were_given_and_one_store(launchers, port):
    second, first = launchers(**ONCE, number=1), launchers(**ONCE, number=0)
    meet(second, first)
    assert (first.place, second.place, first.leads, second.leads) == (0, 1, True, False)
    assert first.store_address == second.store_address == ("127.0.0.1", port)
    first.thread.store.write("key", "value")
    assert second.thread.store.read("key", str) == "value"


def test_unnumbered_machines_count_as_they_come_and_the_one_that_serves_is_first(launchers):
    together = [launchers("3", max_restarts=0) for _ in range(3)]
    meet(*together)
    assert sorted(one.place for one in together) == [0, 1, 2]
    assert [one.place for one in together if one.leads] == [0]


@pytest.mark.parametrize("number", [None, 1])
def test_a_machine_that_comes_after_the_start_is_refused(launchers, port, number, capsys):
    first, second = (launchers(**ONCE, number=None if number is None else one) for one in (0, 1))
    meet(first, second)
    late = launchers(**ONCE, number=number)
    (refused,) = meet(late)
    assert str(refused) == f"--rdzv-endpoint 127.0.0.1:{port}: a job is under way there"
    assert f"note: the launcher on host {late.thread.me.host} (pid " in capsys.readouterr().err
    assert first.end is None


def test_a_machine_too_many_is_refused(launchers, port):
    together = [launchers(**ONCE) for _ in range(3)]
    said = {str(result) for result in meet(*together) if isinstance(result, UserError)}
    address = f"--rdzv-endpoint 127.0.0.1:{port}: "
    assert len(said) == 1
    assert said <= {f"{address}2 machines are there already (--nnodes)", f"{address}a job is under way there"}


def test_a_launcher_that_died_before_the_others_came_leaves_its_number(launchers):
    first, ended = launchers("3", number=0, max_restarts=0), launchers("3", number=1, max_restarts=0)
    waiting = [Meet(first), Meet(ended)]
    wait_for(lambda: first.thread is not None and first.thread.leader and len(first.thread.leader.peers) == 2)
    ended.closed = True
    assert waiting[1].get() == "ended"  # and so it does not come again
    ended.thread._closed.set()
    time.sleep(0.5)  # no round begins with a machine that is silent, before it is given up
    again, third = launchers("3", number=1, max_restarts=0), launchers("3", number=2, max_restarts=0)
    meet(again, third)
    assert hosts(waiting[0].get() and first) == [one.thread.me.host for one in (first, again, third)]


def test_who_did_not_come_is_named(launchers, port, capsys, monkeypatch):
    monkeypatch.setattr(endpoint, "PATIENCE", 0.1)
    one = launchers("4", number=0, max_restarts=0, seconds=0.5)
    (late,) = meet(one)
    missing = f"machines 1-3 of 4 (present: {one.thread.me.host})"
    assert str(late) == f"waited 0.5 s at 127.0.0.1:{port} for {missing}"
    assert capsys.readouterr().err.splitlines()[-1] == f"waiting for {missing} at 127.0.0.1:{port}"


def test_others_end_with_a_first_machine_that_gives_up_before_the_start(launchers, port):
    first, second = (launchers("3", number=number, max_restarts=0) for number in (0, 1))
    waiting = [Meet(first), Meet(second)]
    wait_for(lambda: second.thread is not None and "machine 2 of 3" in second.thread.waits_for)
    first.close()
    assert str(waiting[1].get()) == f"--rdzv-endpoint 127.0.0.1:{port}: the launcher there has ended"


def test_a_break_in_the_network_does_not_end_the_only_round(launchers):
    first, second = (launchers(**ONCE, number=number, lost=0.3) for number in (0, 1))
    meet(first, second)
    second.thread._closed.set()
    time.sleep(1.0)
    assert (first.end, second.cut_off) == (None, False)


def test_all_machines_of_the_only_round_finish_together(launchers):
    first, second = (launchers(**ONCE, number=number) for number in (0, 1))
    meet(first, second)
    assert not first.is_done()
    assert not second.is_done()
    wait_for(lambda: first.is_done() and second.is_done())


def test_times_by_part_add_up():
    recovery = Recovery(failure().report, 10.0, 10.3, reached={"joined": 12.3, "loaded": 13.5})
    assert recovery.parts() == {"detect": 0.3, "rendezvous": 2.0, "load": 1.2}
    assert recovery.record(4)["seconds"] is None
    recovery.reached["first_step"] = 19.1
    assert recovery.line() == "recovered in 9.1 s: detect 0.3, rendezvous 2.0, load 1.2, first step 5.6"
    assert (recovery.record(4)["seconds"], recovery.record(4)["from_step"]) == (9.1, 4)


# ---- the run's folder ------------------------------------------------------------------------------------------------


@pytest.fixture
def later(tmp_path, monkeypatch):
    """This process as a rank of a later attempt, whose run is in a folder of this name."""

    def be(begun=True):
        told = attempt.Attempt(str(tmp_path / "notes"), str(tmp_path / "run"), begun)
        for name, value in {**attempt.variable(told), "LOCAL_RANK": "0"}.items():
            monkeypatch.setenv(name, value)
        (tmp_path / "run" / "checkpoint").mkdir(parents=True, exist_ok=True)
        return tmp_path / "run"

    return be


def test_later_attempts_keep_the_folder_and_neither_overwrite_nor_go_back(later):
    config = load_config(None, ["--checkpoint.enable", "--checkpoint.load_step=3"])
    options = TrainOptions(overwrite=True)
    folder = later(begun=False)
    kept, asked = attempt.continued(config, options)
    assert (kept.job.dump_folder, asked.overwrite, kept.checkpoint.load_step) == (str(folder), True, 3)
    later()
    kept, asked = attempt.continued(config, options)
    assert (asked.overwrite, kept.checkpoint.load_step) == (False, 3)  # nothing saved yet: it begins where it began
    (folder / "checkpoint" / "step-5.partial").mkdir()  # cut off: step 3 of checkpoint.initial_load_path counts again
    assert attempt.continued(config, options)[0].checkpoint.load_step == 3
    assert not opened(kept, UserError("checkpoint.load_step = 3: there is no such step")).resume  # it is not asked
    (folder / "checkpoint" / "step-5").mkdir()
    assert attempt.continued(config, options)[0].checkpoint.load_step == -1
    never_saves = config.replace({"checkpoint.load_only": True})  # so the newest step is not its own
    assert attempt.continued(never_saves, options)[0].checkpoint.load_step == 3


def opened(config, good):
    folder = open_run_folder(config, has_good_checkpoint=Mock(side_effect=[good]))
    folder.close()
    return folder


def test_a_later_attempt_resumes_or_begins_anew_and_never_in_silence(later, caplog):
    caplog.set_level(logging.INFO, logger="shardline")
    folder = later()
    config = load_config(None, ["--checkpoint.enable", f"--job.dump_folder={folder}"])
    (folder / "metrics.jsonl").write_text('{"step": 1}\n')
    first = opened(config, None)
    assert (first.resume, first.again) == (False, True)
    assert caplog.messages == [f"restarted: nothing was saved yet, {folder} begins at step 0 again"]
    (folder / "checkpoint" / "step-2.partial").mkdir()
    assert not opened(config, None).resume
    (folder / "checkpoint" / "step-2").mkdir()
    assert opened(config, 2).resume
    assert caplog.messages[-1] == f"restarted: resuming from step 2 of the run in {folder}"
    with pytest.raises(UserError, match="holds no checkpoint that the run could be restarted from"):
        opened(config, None)


def test_what_a_rank_tells_is_read_with_its_time(later, tmp_path):
    later()
    before = time.time()
    attempt.note("opened", folder="run")
    attempt.note("loaded", step=3)
    attempt.note("loaded", step=4)  # told once
    told = attempt.read(tmp_path / "notes")
    assert (told["folder"], told["step"]) == ("run", 3)
    assert before <= told["opened"] <= told["loaded"]
    assert attempt.read(tmp_path / "nothing") == {}


def test_ranks_that_neither_layout_nor_batch_can_use_are_told_with_numbers():
    config = load_config(None, ["--parallelism.tensor_parallel_degree=2", "--training.global_batch_size=8"])
    assert misfit(config, 2) == ""
    assert "does not match 3 ranks" in misfit(config, 3)
    config = load_config(None, ["--training.global_batch_size=8", "--training.local_batch_size=1"])
    assert misfit(config, 4) == ""
    assert "training.global_batch_size = 8 does not divide" in misfit(config, 3)
