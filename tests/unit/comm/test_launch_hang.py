"""Who is missing: the watchdog's verdict from what ranks published."""

import threading
import time

import pytest
import torch
import torch.distributed as dist

from shardline.comm import watchdog
from shardline.comm.hang import Status, View, Wait, decode_status
from shardline.comm.job import job
from shardline.comm.store import backend_timeout, gather_ranks
from shardline.comm.watchdog import Watchdog

GATHER, SUM = "all_gather over tp of (4,)", "all_reduce over tp of (4,)"


def inside(rank, sequence, tag=GATHER, seconds=20.0, axis="tp", members=(0, 1), **more):
    wait = Wait(axis, sequence, tag, seconds, members)
    return Status(rank, "h", 100 + rank, 1, counts={axis: (sequence, tag)}, wait=wait, **more)


def outside(rank, sequence, tag=GATHER, axis="tp", idle=20.0, **more):
    return Status(rank, "h", 100 + rank, 1, idle=idle, counts={axis: (sequence, tag)}, **more)


def verdict(*statuses, silent=None, world_size=None, limit=10.0):
    found = {status.rank: status for status in statuses}
    return View(found, silent or {}, world_size or len(found), limit, 4.0).hang()


def test_a_rank_that_has_not_arrived_is_named_with_where_it_is():
    text = verdict(inside(0, 5), outside(1, 4, place="loader.py:7 in read", step=3))
    assert "rank 0 waits in all_gather over tp of (4,) (call 5), where rank 1 did not arrive" in text
    assert "rank 1 (host h, pid 101) is in step 3, in no collective for 20 s, at loader.py:7 in read" in text


@pytest.mark.parametrize(
    "statuses",
    [
        (inside(0, 5, seconds=9.0), outside(1, 4)),  # not yet
        (inside(0, 5), outside(1, 4, busy="saving")),  # said that it takes long
        (inside(0, 5), outside(1, 6)),  # was there and went on
        (outside(0, 5, idle=500.0), outside(1, 5, idle=500.0)),  # all compile
        (inside(0, 5), inside(1, 5, seconds=1.0)),  # the last one has just come
        (inside(0, 5), outside(1, 5), outside(2, 1)),  # another group is behind
    ],
)
def test_what_is_no_hang_is_left_alone(statuses):
    assert verdict(*statuses) is None


def test_two_collectives_at_the_same_place_are_a_mismatch():
    text = verdict(inside(0, 5, GATHER), inside(1, 5, SUM))
    assert "rank 0 waits in all_gather" in text
    assert "rank 1 (host h, pid 101) is in all_reduce over tp of (4,) (call 5)" in text


def test_a_rank_that_is_held_up_itself_is_not_the_one_to_name():
    held_up = inside(1, 7, SUM, axis="dp", members=(1, 2))
    text = verdict(
        inside(0, 5),
        Status(**{**vars(held_up), "counts": {"dp": (7, SUM), "tp": (4, GATHER)}}),
        outside(2, 6, axis="dp"),
    )
    assert "where rank 2 did not arrive" in text


def test_a_silent_rank_counts_as_missing_even_where_it_had_arrived():
    text = verdict(inside(0, 5), inside(1, 5, seconds=1.0), silent={1: 6.0})
    assert "has not been heard of for 6 s or more: it is stopped" in text


def test_a_rank_that_never_reported_is_missing():
    assert "rank 1 never reported" in verdict(inside(0, 1, members=None), world_size=2)


def test_a_collective_that_all_are_in_and_that_does_not_end_is_stuck():
    assert "ranks 0-1 all arrived" in verdict(inside(0, 5), inside(1, 5))


def test_silence_is_noticed_where_nobody_waits_in_a_watched_collective():
    assert verdict(outside(0, 5), outside(1, 5), silent={1: 5.0}) is None
    assert "rank 1" in verdict(outside(0, 5), outside(1, 5), silent={1: 12.0})
    idle = outside(0, 5, idle=120.0), outside(1, 5)
    assert verdict(*idle, silent={1: 14.0}, limit=100.0) is None
    assert "rank 1" in verdict(*idle, silent={1: 16.0}, limit=100.0)  # however long the limit is


def test_of_many_missing_ranks_some_are_named():
    text = verdict(inside(0, 5, members=None), *(outside(rank, 4) for rank in range(1, 12)))
    assert "where ranks 1-11 did not arrive" in text
    assert [line.split()[1] for line in text.splitlines()[1:-1]] == [str(rank) for rank in range(1, 9)]
    assert text.endswith("\n  and 3 more")


def test_a_rank_that_issued_a_collective_and_does_nothing_else_is_taken_to_wait_in_it():
    def issued(rank, sequence):
        wait = Wait("tp", sequence, GATHER, 20.0, (0, 1), presumed=True)
        return Status(rank, "h", 100 + rank, 1, counts={"tp": (sequence, GATHER)}, wait=wait)

    assert "rank 0 waits in all_gather over tp of (4,) (call 5), where rank 1 did not" in verdict(
        issued(0, 5), outside(1, 4)
    )
    assert verdict(issued(0, 5), issued(1, 5)) is None  # both compute: that is no collective that got stuck


@pytest.fixture
def store():
    return dist.HashStore()


def test_calls_are_counted_by_axis_and_published(store):
    dog = Watchdog(store, 0, 2, timeout_seconds=0.0)
    job.members["tp"] = (0, 1)
    assert [dog.enter("a", "tp"), dog.leave(), dog.enter("b", "dp"), dog.issue("c", "tp")] == [1, None, 1, 2]
    time.sleep(0.01)
    dog._publish()
    status = dog.store.read("status/0", decode_status)
    assert status.counts == {"tp": (2, "c"), "dp": (1, "b")}
    assert (status.wait.axis, status.wait.sequence, status.wait.tag) == ("dp", 1, "b")
    dog.leave()
    dog.wait(2, "c", "tp")
    time.sleep(0.01)
    assert dog.status().wait.members == (0, 1)
    dog.leave()
    assert dog.status().wait is None
    dog.issue("d", "tp")
    assert (dog.status().wait.tag, dog.status().wait.presumed) == ("d", True)
    dog.step(2)
    assert dog.status().wait is None
    dog.issue("e", "tp")
    assert dog.post("f", "pp") == 1  # goes on by itself: nobody is presumed to wait in it
    assert (dog.status().wait, dog.status().counts["pp"]) == (None, (1, "f"))
    assert "test_launch_hang.py" in dog.status().place


class Event:
    """Stands for one of a device: over when the test says so."""

    def __init__(self):
        self.over = False

    def record(self):
        pass

    def query(self):
        return self.over


def test_a_rank_is_in_the_first_collective_that_its_device_has_not_done(store, monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    dog = Watchdog(store, 0, 2, timeout_seconds=10.0)
    for tag, axis in (("a", "tp"), ("b", "tp"), ("c", "dp"), ("d", "tp")):
        dog.enter(tag, axis)
        dog.leave(on_device=True)
    status = dog.status()
    assert (status.wait.axis, status.wait.sequence, status.wait.tag, status.wait.presumed) == ("tp", 1, "a", False)
    assert status.counts == {"tp": (1, "a"), "dp": (1, "c")}
    follow(dog, done=2)
    status = dog.status()
    assert (status.wait.tag, status.counts) == ("c", {"dp": (1, "c"), "tp": (3, "d")})
    assert dog._stuck_seconds() < 5.0  # of 10
    dog._asking_since = time.monotonic() - 2  # the driver does not answer: what was issued is all that is known
    assert (dog.status().wait, dog.status().counts) == (None, {"tp": (3, "d"), "dp": (1, "c")})
    follow(dog, done=2)
    assert (dog.status().wait, dog.status().counts) == (None, {"tp": (3, "d"), "dp": (1, "c")})


def follow(dog, done):
    for _, event in list(dog._launched)[:done]:
        event.over = True
    looked = iter([False, True])
    dog._closed.wait = lambda seconds: next(looked)
    dog._follow()


def test_all_ranks_end_with_the_message_that_came_first(store, monkeypatch):
    ended = []
    monkeypatch.setattr(
        Watchdog, "_end", lambda self, message, shown=False: ended.append((self.rank, message)) or self.close()
    )
    dogs = [Watchdog(store, rank, 2, timeout_seconds=0.3, period=0.05) for rank in (0, 1)]
    for dog in dogs:
        dog.start()
    assert job.watchdog is dogs[1]
    dogs[0].enter("sum")
    deadline = time.monotonic() + 10
    while len(ended) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert {rank for rank, _ in ended} == {0, 1}
    assert len({message for _, message in ended}) == 1
    assert "where rank 1 did not arrive" in ended[0][1]
    assert job.watchdog is None


def test_one_rank_of_many_looks(store, monkeypatch):
    monkeypatch.setattr(watchdog, "MANY_RANKS", 1)
    dogs = [Watchdog(store, rank, 3, timeout_seconds=1.0) for rank in range(3)]
    for dog in dogs:
        dog.enter("sum")
    assert [dog._has_turn(2.0) for dog in dogs] == [True, False, False]
    assert [dog._has_turn(2.5) for dog in dogs] == [True, False, False]
    assert dogs[2]._has_turn(2.0 + watchdog.TURN_SECONDS)  # the first brought no result


def test_a_busy_rank_does_not_look(store):
    dog = Watchdog(store, 0, 2, timeout_seconds=0.0)
    dog.enter("sum")
    time.sleep(0.01)
    assert dog._stuck_seconds() > 0
    with dog.busy("saving"):
        assert dog._stuck_seconds() == 0
        assert dog.status().busy == "saving"


def test_a_store_out_of_reach_ends_a_rank_that_waits(store, monkeypatch):
    ended = []
    monkeypatch.setattr(Watchdog, "_end", lambda self, message, shown=False: ended.append(message) or self.close())
    dog = Watchdog(store, 0, 2, timeout_seconds=0.2, period=0.02)
    monkeypatch.setattr(dog, "_publish", lambda: threading.Event().wait(5))  # an answer that does not come
    threading.Thread(target=dog._watch, daemon=True).start()
    dog.enter("sum")
    dog._guard()
    assert "has not reached the store of the job" in ended[0]


def test_the_backends_wait_longer_than_the_watchdog():
    assert backend_timeout(5).total_seconds() == 25
    assert backend_timeout(1000).total_seconds() == 1200


def test_rank_zero_learns_where_all_ranks_are(store):
    assert gather_ranks(store, 1, 2) == []
    assert [row["rank"] for row in gather_ranks(store, 0, 2)] == [0, 1]
