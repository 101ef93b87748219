"""Who takes part in a step of replica groups, what of a quorum is believed, what they refuse, and how state travels."""

import dataclasses
import threading
from types import SimpleNamespace

import pytest
import torch

from shardline.config.layout import Layout
from shardline.config.load import load_config
from shardline.errors import UserError
from shardline.models.flavors import resolve
from shardline.parallel.replicas import link
from shardline.parallel.replicas.groups import ReplicaGroups
from shardline.parallel.replicas.lighthouse import Lighthouse, derive_key, groups_key, host_and_port
from shardline.parallel.replicas.quorum import Member, check_same, plan_step
from shardline.training.replica_groups import for_groups, join_groups
from shardline.training.trainer import Trainer
from tests.e2e.tiny import tiny_config

SECOND = link.timedelta(seconds=20)


def member(number, step=3, history="h", **more):
    return Member(**{"name": f"{number}:x", "number": number, "step": step, "history": history, "store": "",
                     "attempt": 0, "link": "", **more})  # fmt: skip


def linked(members):
    plan = plan_step(members[0].name, members)
    return [member(one.number, step=one.step + 1, history=plan.history(), link=plan.link) for one in members]


def test_groups_share_the_batch_in_the_order_of_their_numbers():
    members = [member(10), member(2), member(0)]
    plans = {one.number: plan_step(one.name, members) for one in members}
    assert {number: plan.share for number, plan in plans.items()} == {0: (0, 3), 2: (1, 3), 10: (2, 3)}
    assert len({plan.link for plan in plans.values()}) == 1
    assert [plans[number].rank for number in (0, 2, 10)] == [0, 1, 2]


def test_a_group_that_is_behind_heals_and_reads_nothing():
    members = [member(0, step=1), member(1), member(2, step=2), member(3)]
    plan = plan_step("0:x", members)
    assert plan.share is None
    assert plan.source == members[1]
    assert plan_step("2:x", members).source == members[3]
    assert plan_step("1:x", members).share == (0, 2)
    assert plan_step("1:x", members).patients == [members[0]]
    assert plan.step == 3


def test_of_two_histories_the_one_that_most_groups_have_goes_on():
    members = [member(0, history="a"), member(1, history="b"), member(2, history="b")]
    assert plan_step("0:x", members).source == members[1]
    assert plan_step("2:x", members).share == (1, 2)


def test_a_connection_stays_until_somebody_comes_goes_or_fails():
    members = linked([member(0), member(1)])
    assert not plan_step("0:x", members).connects
    assert plan_step("0:x", members).link == members[0].link
    assert plan_step("0:x", members[:1]).connects
    assert plan_step("0:x", [*members, member(2)]).connects
    broken = [members[0], member(1, step=4, history=members[0].history, attempt=1)]
    again = [broken[0], member(1, step=4, history=members[0].history, attempt=2)]
    assert plan_step("0:x", broken).connects
    assert len({plan_step("0:x", some).link for some in (members, broken, again)}) == 3


def test_groups_that_were_started_differently_are_refused():
    own, first = member(1, same={"debug.seed": 1}), member(0, same={"debug.seed": 0})
    check_same(first, [own, first])
    with pytest.raises(UserError, match=r"debug.seed = 1 here, 0 in replica group 0"):
        check_same(own, [own, first])


def test_a_member_that_the_job_did_not_write_is_ignored_and_named_once(caplog):
    sealed = Lighthouse("http://127.0.0.1:1", "0:x", b"key")
    own = member(0)
    found = SimpleNamespace(replica_id="0:x", step=3, data=sealed.sealed(own))
    assert sealed._read(found) == own
    forged = Lighthouse("http://127.0.0.1:1", "0:x", b"other").sealed(own)
    for change in ({"data": forged}, {"replica_id": "1:x"}, {"step": 4}, {"data": None}, {"data": {"text": "{"}}):
        assert sealed._read(SimpleNamespace(**{**vars(found), **change})) is None
    assert caplog.text.count("is none of this job's groups") == 1


def test_the_key_of_groups_comes_from_the_secret(monkeypatch):
    assert groups_key() == b""
    monkeypatch.setenv("SHARDLINE_JOB_SECRET", "a secret of many letters")
    key = groups_key()
    assert key == derive_key(b"a secret of many letters") != b""
    monkeypatch.delenv("SHARDLINE_JOB_SECRET")
    monkeypatch.setenv("SHARDLINE_REPLICAS_KEY", key.hex())
    assert groups_key() == key


@pytest.mark.parametrize("address", ["", "http://", "host", "http://host:port"])
def test_an_address_of_no_lighthouse_is_refused(address):
    with pytest.raises(UserError, match="expected http://HOST:PORT"):
        host_and_port(address)
    assert host_and_port("http://10.0.0.1:29510") == host_and_port("10.0.0.1:29510") == ("10.0.0.1", 29510)


def both(work):
    """What `work(connection, rank)` returns at both ends of a connection."""
    store, place = link.serve_store("127.0.0.1")
    found = {}

    def end(rank):
        found[rank] = work(link.connect(place, "test", "127.0.0.1", rank, 2, SECOND), rank)

    threads = [threading.Thread(target=end, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    del store
    return found


def test_sums_over_groups_of_all_types(monkeypatch):
    monkeypatch.setattr(link, "CHUNK_BYTES", 16)

    def work(group, rank):
        tensors = [torch.full((2, 3), rank + 1.0), torch.ones(2, dtype=torch.bfloat16) * rank, torch.tensor(5.0)]
        return link.sum_over(group, tensors), tensors

    for sent, (first, second, third) in both(work).values():
        assert sent == first.nbytes + second.nbytes + third.nbytes
        assert first.tolist() == [[3.0] * 3] * 2
        assert second.tolist() == [1.0, 1.0]
        assert third.item() == 10.0


def test_a_state_arrives_bit_by_bit(monkeypatch):
    monkeypatch.setattr(link, "CHUNK_BYTES", 16)
    state = [torch.randn(5), torch.tensor(3, dtype=torch.int64), torch.randn(3).bfloat16(), torch.empty(0, 2)]

    def work(group, rank):
        if rank == 0:
            return link.send_state(group, state)
        return link.receive_state(group, [torch.zeros_like(one) for one in state])

    for one, other in zip(both(work)[1], state, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


def joined(model, optimizer):
    """The view of a rank that is not the first, which needs no lighthouse."""
    mesh = SimpleNamespace(
        rank=1, world_size=1, layout=Layout(), device_type="cpu", from_rank_0=lambda decide: decide()
    )
    return join_groups(load_config(overrides={}), mesh, model, optimizer)


def test_the_first_step_of_a_group_that_returns_is_that_of_the_others():
    """With their weights, buffers, moments and count of steps: with a count of its own, Adam's step would be longer."""
    store, place = link.serve_store("127.0.0.1")
    members = [member(0, step=3, store=place), member(1, step=0, history="", store=place)]
    weights, counts = {}, {}

    def live(number):
        torch.manual_seed(number)
        model = torch.nn.BatchNorm1d(3)
        torch.nn.init.normal_(model.weight)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False, fused=False)
        groups = joined(model, optimizer)
        for step in range(4):
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, 0.5**step)
            if step == 3:
                groups._start_healing(plan_step(f"{number}:x", members))
                assert groups.ready()
                groups.commit()
            if number == 0 or step == 3:
                model.running_mean += 1.0 if step < 3 else 0.0
                optimizer.step()
        weights[number] = torch.cat([model.running_mean, model.weight.detach(), model.bias.detach()])
        counts[number] = [float(state["step"]) for state in optimizer.state.values()], groups.heals

    threads = [threading.Thread(target=live, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    del store
    assert torch.equal(weights[0], weights[1])
    assert weights[1][:3].tolist() == [3.0] * 3
    assert counts == {0: ([4.0, 4.0], 0), 1: ([4.0, 4.0], 1)}


def test_an_optimizer_whose_state_comes_with_its_first_step_is_refused():
    """The state of the others would be longer than what a group that returns expects: gloo ends the process."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.RMSprop(model.parameters())
    with pytest.raises(UserError, match=r"RMSprop has no state of weight before its first step"):
        joined(model, optimizer)
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    joined(model, optimizer)


def test_a_failed_transfer_is_logged_once_and_fails_one_step(caplog):
    groups = joined(model := torch.nn.Linear(2, 2), torch.optim.Adam(model.parameters()))
    groups._heal_error = "receiving the state failed"
    assert not groups.ready()
    groups.fail()
    groups.broken = False  # the next meeting
    assert groups.ready()
    assert caplog.text.count("receiving the state failed") == 1


def test_a_save_that_was_requested_in_a_failed_step_follows_the_next_one(tmp_path, monkeypatch):
    """A signal counts once, so its request must outlive the step in which ranks agreed on it."""
    trainer = Trainer(tiny_config(tmp_path, checkpoint__enable=True, checkpoint__interval=100, training__steps=3))
    trainer.groups = SimpleNamespace(plan=None, fail=lambda: None)
    step, failures = trainer.stepper.step, [True]

    def meets(groups):
        trainer._before = dataclasses.replace(trainer.progress)
        return True

    def fails_once(*arguments, **options):
        trainer.requests.saves += len(failures)
        result = step(*arguments, **options)
        return result._replace(counts=False) if failures and failures.pop() else result

    monkeypatch.setattr(trainer, "_meet", meets)
    monkeypatch.setattr(trainer.stepper, "step", fails_once)
    trainer.train()
    assert sorted(path.name for path in (tmp_path / "checkpoint").glob("step-*")) == ["step-1", "step-3"]


def test_a_parameter_without_a_gradient_anywhere_keeps_none():
    def work(group, rank):
        groups = object.__new__(ReplicaGroups)
        groups.group, groups.broken, groups.sent_bytes = group, False, 0
        parameters = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
        if rank == 0:
            parameters[0].grad = torch.ones(2)
        groups.sum_gradients(parameters, numbers := torch.tensor([1.0]))
        return [None if one.grad is None else one.grad.tolist() for one in parameters], numbers.item()

    assert both(work) == {rank: ([[1.0, 1.0], None], 2.0) for rank in (0, 1)}


def test_a_row_says_who_took_part_and_what_happened_since_the_last_one():
    groups, members = object.__new__(ReplicaGroups), [member(10), member(2), member(0), member(5, step=2)]
    groups.commits, groups.heals, groups.repeats, groups.sent_bytes = 7, 1, 2, 48
    groups.plan = plan_step("2:x", members)
    row = {"replica_groups": 3, "replica_place": 1, "replica_commits": 7, "replica_heals": 1, "replica_repeats": 2}
    assert groups.row() == row
    assert groups.row() == row | {"replica_repeats": 0}
    assert groups.engaged() == {"participants": 3, "summed_bytes": 48}
    groups.plan = plan_step("5:x", members)
    assert groups.row()["replica_place"] == -1


def test_the_time_to_wait_for_another_group_is_that_of_the_config():
    second = SimpleNamespace(rank=1, from_rank_0=lambda decide: decide())
    section = load_config(overrides={"fault_tolerance.process_group_timeout_ms": 1234}).fault_tolerance
    assert ReplicaGroups(section, second, {}, dict).timeout == link.timedelta(seconds=1.234)


def test_fewer_groups_than_asked_for_wait_for_others(monkeypatch):
    groups = object.__new__(ReplicaGroups)
    groups.section = SimpleNamespace(replica_id=0, min_replica_size=3)
    groups.name, groups.place, groups.attempt, groups.linked, groups.same = "0:x", "", 0, "", {}
    there = [[member(0), member(1)], [member(0), member(1)], [member(0), member(1), member(2)]]
    groups.lighthouse = SimpleNamespace(quorum=lambda own, stop: there.pop(0))
    monkeypatch.setattr("shardline.parallel.replicas.groups.time.sleep", lambda seconds: None)
    assert [one.number for one in groups._ask(3, "h", {}, lambda: False)] == [0, 1, 2]
    assert not there


def test_the_global_batch_is_that_of_all_groups():
    layout, arch = Layout(dp_shard=2), None
    base = {"fault_tolerance.enable": True, "training.local_batch_size": 3}

    def batch(**more):
        config = load_config(overrides=base | {key.replace("__", "."): value for key, value in more.items()})
        return for_groups(config, layout, arch or resolve(config.model)).training.global_batch_size

    assert batch(fault_tolerance__group_size=4) == 24
    assert batch(fault_tolerance__group_size=4, training__gradient_accumulation_steps=2) == 48
    assert batch(training__global_batch_size=12) == 12
    with pytest.raises(UserError, match=r"fault_tolerance.group_size = 0"):
        batch()
    with pytest.raises(UserError, match="mixture of experts"):
        batch(fault_tolerance__group_size=4, model__name="deepseek_v3")
