"""Saves behind the run: waited for by the next, named when they hang, heard of when they fail; buffers used again."""

import logging
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from shardline.checkpoint import background
from shardline.checkpoint.background import Background, Cancelled
from shardline.checkpoint.commit import LastSave, Messages
from shardline.checkpoint.saver import Saver
from shardline.checkpoint.shards import HeldTensor, TensorPiece, whole_place
from shardline.checkpoint.staging import Staging
from shardline.comm.store import SignedStore
from shardline.config.load import load_config
from shardline.errors import UserError


def at(*words):
    def job(position):
        position.at = " ".join(words)

    return job


def test_jobs_run_one_after_the_other():
    seen, gate, saver = [], threading.Event(), Background(60, 0)

    def first(position):
        gate.wait(10)
        seen.append("first")

    saver.submit("step-1", first)
    assert saver.busy
    saver.check()  # nothing to hear of yet
    threading.Timer(0.2, gate.set).start()
    saver.submit("step-2", lambda position: seen.append("second"))
    saver.wait()
    assert seen == ["first", "second"]
    assert not saver.busy


@pytest.mark.parametrize("error", [dist.DistNetworkError("Connection reset"), UserError("no space")])
def test_a_save_that_fails_after_the_run_has_does_not_replace_its_error(error, caplog):
    def fail(position):
        raise error

    saver = Saver.__new__(Saver)
    saver._background, saver.saved_step = Background(60, 0), 4
    saver._background.submit("step-4", fail)
    saver.let_finish()
    assert caplog.messages[0].startswith("the save of step 4 failed, too: ")
    assert str(error) in caplog.messages[0]


@pytest.mark.parametrize(
    ("step", "saved", "words"),
    [
        (20, LastSave(20, "full", 2**20), "step 20, 1.00 MiB: all of the run is in it"),
        (23, LastSave(20, "full"), "step 20: 3 steps since then are not in it"),
        (20, LastSave(20, "model"), "step 20: the weights alone"),
        (3, None, "none: nothing of the run is saved"),
    ],
)
def test_what_the_closing_table_says_of_the_last_save(step, saved, words):
    saver = Saver.__new__(Saver)
    saver.config, saver._background = load_config(overrides={"checkpoint.enable": True}), Background(60, 0)
    saver._writer, saver.saved_step = SimpleNamespace(last=saved), step
    assert saver.last_words(step) == words


def test_an_error_is_raised_once_where_the_run_hears_of_it():
    saver = Background(60, 0)

    def failing(position):
        raise UserError("the disk is full")

    saver.submit("step-1", failing)
    while saver.busy:
        time.sleep(0.01)
    with pytest.raises(UserError, match="the disk is full"):
        saver.check()
    saver.check()
    saver.submit("step-2", failing)
    with pytest.raises(UserError, match="the disk is full"):
        saver.submit("step-3", at("nowhere"))


def test_a_save_that_hangs_is_named_then_ends_the_run(monkeypatch, caplog):
    monkeypatch.setattr(background, "PATIENCE_SECONDS", 0.1)
    monkeypatch.setattr(background, "LAST_SECONDS", 0.1)
    release, saver = threading.Event(), Background(1.2, 3)

    def hanging(position):
        position.at = "writing step-8.partial/shard-00003-of-00004.safetensors"
        release.wait(20)

    saver.submit("step-8", hanging)
    began = time.monotonic()
    with caplog.at_level(logging.WARNING, "shardline"), pytest.raises(UserError) as said:
        saver.wait()
    release.set()
    assert time.monotonic() - began > 1
    place = "writing step-8.partial/shard-00003-of-00004.safetensors"
    assert f"waiting for the save of step-8, which is at: {place}" in caplog.text
    assert str(said.value).startswith("the save of step-8 has not ended after ")
    assert f"rank 3 is at {place}; earlier ones are intact. checkpoint.save_timeout_seconds" in str(said.value)


def test_an_interrupted_wait_stops_the_save(monkeypatch):
    saver, stopped = Background(60, 0), threading.Event()

    def job(position):
        try:
            while True:
                position.check()
                time.sleep(0.01)
        except Cancelled:
            stopped.set()
            raise

    saver.submit("step-1", job)
    monkeypatch.setattr(saver._done, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        saver.wait()
    assert stopped.wait(5)
    saver.check()  # a save that was given up is no error


def interrupted(seconds):
    if seconds == 0.5:
        raise KeyboardInterrupt
    time.sleep(0.2)


# ---- messages between writers ----------------------------------------------------------------------------------------


def test_messages_arrive_and_what_is_late_is_named():
    store = dist.HashStore()
    one, two = (Messages(SignedStore(store, "checkpoint", b"key")) for _ in range(2))
    store.set("checkpoint/1/verdict", '{"is": {"error": "of a stranger"}}')
    threading.Timer(0.3, lambda: one.send("1/verdict", {"error": ""})).start()
    assert two.receive("1/verdict", time.monotonic() + 30, lambda: None, "late") == {"error": ""}
    with pytest.raises(UserError, match="rank 1 is late"):
        two.receive("1/shard-1", time.monotonic(), lambda: None, "rank 1 is late")

    def given_up():
        raise Cancelled

    with pytest.raises(Cancelled):
        two.receive("1/shard-1", time.monotonic() + 60, given_up, "late")


# ---- copies ----------------------------------------------------------------------------------------------------------


def held(tensor):
    piece = TensorPiece("a", tuple(tensor.shape), whole_place(tensor.shape), None)
    return HeldTensor(0, tensor, tensor.dtype, (piece,))


def test_buffers_are_made_once_and_hold_what_was_there(monkeypatch):
    monkeypatch.setattr("shardline.checkpoint.staging.PINNED_CHUNK", 1000)
    state = [torch.randn(17, 3), torch.tensor(4.0), torch.randn(400), torch.randn(5).bfloat16(), torch.zeros(0, 3)]
    before = [tensor.clone() for tensor in state]
    parameter = torch.nn.Parameter(torch.zeros(2))
    staging = Staging(torch.optim.SGD([parameter]), pinned=False)
    tensors = [held(tensor) for tensor in state]
    staging.prepare(tensors)
    staged = staging.stage(tensors)
    addresses = [one.tensor.data_ptr() for one in staged]
    for tensor in state:
        tensor.add_(1)
    assert all(torch.equal(one.tensor, old) for one, old in zip(staged, before, strict=True))
    again = staging.stage(tensors)
    assert [one.tensor.data_ptr() for one in again] == addresses
    assert all(torch.equal(one.tensor, tensor) for one, tensor in zip(again, state, strict=True))
    assert len({address for one, address in zip(staged, addresses, strict=True) if one.tensor.numel()}) == 4


def test_other_parts_get_other_buffers():
    staging = Staging(torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))]), pinned=False)
    first = staging.prepare([held(torch.zeros(4))])
    assert staging.prepare([held(torch.ones(4))])[0] is first[0]
    second = staging.prepare([held(torch.zeros(4)), held(torch.zeros(6))])
    assert [tuple(view.shape) for view in second] == [(4,), (6,)]


@pytest.mark.gpu
@pytest.mark.parametrize("pinned", [True, False])
def test_a_step_right_after_does_not_change_the_copies(pinned):
    """The copies run beside; the optimizer's step has to wait for them on the device."""
    parameter = torch.nn.Parameter(torch.ones(256 << 20, device="cuda"))
    parameter.grad = torch.ones_like(parameter)
    left_out = torch.zeros(32 << 20, device="cuda")  # backward changes it
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    staging = Staging(optimizer, pinned)
    tensors = [held(parameter.detach()), replace(held(left_out), changes_in_backward=True)]
    staging.prepare(tensors)
    for step in range(3):
        staged = staging.stage(tensors)
        left_out += 1
        optimizer.step()
        staging.wait()
        assert bool((staged[0].tensor == 1.0 - step).all())
        assert bool((staged[1].tensor == step).all())
        assert staged[0].tensor.is_pinned() == pinned
    staging.close()
