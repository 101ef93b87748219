"""Messages in the job's store: what was not written by the job counts as absent."""

import json
from dataclasses import asdict

import pytest
import torch.distributed as dist

from shardline.comm import store as stores
from shardline.comm.hang import Status, decode_status
from shardline.comm.store import SignedStore, derived_key, gather_ranks
from shardline.words import printable


@pytest.fixture
def pair():
    """The same names in one store, for a process of the job and for a stranger; and what the first has ignored."""
    base, ignored = dist.HashStore(), []
    return SignedStore(base, "job", b"secret", ignored.append), SignedStore(base, "job", b"", ignored.append), ignored


def test_a_message_is_read_by_those_who_have_the_key_and_only_under_its_name(pair):
    own, other, ignored = pair
    own.write("a", {"x": [1, "two"]})
    assert own.read("a", dict) == {"x": [1, "two"]}
    assert own.read("b", dict) is None
    assert ignored == []
    assert other.read("a", dict) is None
    assert ignored == ["job/a"]
    own.store.set("b", own.store.get("a"))
    assert own.read("b", dict) is None
    assert SignedStore(own.base, "another", b"secret").read("a", dict) is None


@pytest.mark.parametrize(
    "found", [b"\xff\xfe", b"{}", b"0" * 64, b"0" * 64 + b"{}", b"x" * (1 << 20), "é".encode() * 40, b"[" * 90_000]
)
def test_what_is_not_signed_is_absent_and_reported_once(pair, found):
    own, _, ignored = pair
    own.store.set("a", found)
    assert [own.read("a", dict), own.read("a", dict)] == [None, None]
    assert ignored == ["job/a"]
    assert own.offer("a", {"x": 1}, dict) is None  # it is written over
    assert own.read("a", dict) == {"x": 1}


@pytest.mark.parametrize("message", [None, [], {}, {"rank": "x"}, {"rank": 1}, 7, "text"])
def test_a_signed_message_of_another_shape_is_absent_too(pair, message):
    """Where a job has no secret, anybody can sign."""
    own, _, ignored = pair
    own.write("a", message)
    assert own.read("a", decode_status) is None
    assert ignored == ["job/a"]


def test_the_warning_of_a_rank_names_the_message_and_is_no_note_too(caplog):
    own = SignedStore(dist.HashStore(), "watchdog", b"secret")
    own.store.set("hang", b"{}")
    assert own.read("hang", dict) is None
    assert [record.getMessage() for record in caplog.records] == [
        "watchdog/hang in the job's store was not written by this job: ignored"
    ]


def test_a_signed_message_that_is_no_json_is_absent(pair):
    own, *_ = pair
    for text in ("[" * 90_000, "9" * 5_000, "", "{"):
        own.store.set("a", own._signature("a", text.encode()) + text)
        assert own.read("a", lambda value: value) is None


def test_the_first_offer_stands_unless_it_yields(pair):
    own, *_ = pair
    assert own.offer("a", 1, int) is None
    assert own.offer("a", 1, int) is None
    assert own.offer("a", 2, int) == 1
    assert own.offer("a", 3, int, yields=lambda held: held < 3) is None
    assert own.read("a", int) == 3
    own.store.delete_key("a")
    assert own.offer("a", 4, int, yields=lambda held: True) is None


def test_an_offer_ends_where_the_message_that_yields_is_deleted_meanwhile(pair):
    own, *_ = pair
    own.write("a", 1)
    assert own.offer("a", 2, int, yields=lambda held: own.store.delete_key("a")) is None
    assert own.read("a", int) == 2


def test_texts_of_others_lose_control_characters(pair):
    own, *_ = pair
    status = Status(1, "\x1b[31mhost\x1b]0;title\x07\x9b2J", 7, 1, counts={"t\x00p": (1, "a\u202eb\r")})
    own.write("a", asdict(status))
    assert own.read("a", decode_status) == Status(1, "host2J", 7, 1, counts={"tp": (1, "ab")})
    assert printable("two\nlines\tand é, \ud800") == "two\nlines\tand é, "


def test_keys_for_two_purposes_differ():
    keys = {derived_key(secret, *words) for secret in (b"", b"a") for words in (("x", 1), ("x", 2), ("y",))}
    assert len(keys) == 6


def test_a_rank_whose_host_a_stranger_changed_is_still_listed(monkeypatch):
    monkeypatch.setattr(stores, "rank_key", lambda: b"key")
    base = dist.HashStore()
    assert gather_ranks(base, 1, 3) == []
    base.set("ranks/2", json.dumps({"rank": 2, "host": "mine", "pid": 1}))
    own, first, second = gather_ranks(base, 0, 3)
    assert (own["rank"], first["rank"], first["host"]) == (0, 1, own["host"])
    assert second == {"rank": 2}
