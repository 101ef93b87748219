"""What products over shared memory tell the rest of a run; the products themselves need GPUs (test_fused_gpu.py)."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from shardline.comm import collectives, symmetric_memory
from shardline.comm.job import Traffic, job


class Dog:
    def __init__(self):
        self.told = []

    def issue(self, tag, axis):
        return 7

    def record(self, axis, sequence, tag, size):
        return None

    def wait(self, sequence, tag, axis, flight):
        self.told.append((axis, tag, sequence))

    def leave(self, on_device):
        self.told.append(on_device)


@pytest.fixture
def dog(monkeypatch):
    monkeypatch.setattr(collectives, "axis_size", {"tp": 4}.get)
    monkeypatch.setattr(job, "traffic", Traffic())
    monkeypatch.setattr(job, "watchdog", Dog())
    return job.watchdog


TAG = "reduce_scatter over tp, inside a product of (8, 3) bfloat16"


def test_a_product_counts_what_it_sends_and_is_watched_until_the_device_is_through(dog):
    with symmetric_memory.inside_product("tp", "reduce_scatter", torch.zeros(8, 3, dtype=torch.bfloat16), 10):
        assert dog.told == [("tp", TAG, 7)]
    assert dog.told == [("tp", TAG, 7), True]
    assert job.traffic.take() == {"tp": 3 * 10 * 2}


def test_a_product_that_fails_is_left(dog):
    with (
        pytest.raises(ValueError, match="refused"),
        symmetric_memory.inside_product("tp", "all_gather", torch.ones(2), 2),
    ):
        raise ValueError("refused")
    assert dog.told[-1] is True


def test_without_cuda_it_says_so():
    assert symmetric_memory.unusable(torch.device("cpu")) == "it needs CUDA"


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("count", [2, 3, 4])
def test_parts_are_added_without_losing_what_their_type_holds(kind, count):
    parts = list(torch.randn(count, 64, generator=torch.Generator().manual_seed(count), dtype=torch.float64).to(kind))
    out, kept = torch.empty(64, dtype=kind), [part.clone() for part in parts]
    symmetric_memory.add_up(parts, out)
    exact = torch.stack(parts).double().sum(0)
    torch.testing.assert_close(out.double(), exact, rtol=2 * torch.finfo(kind).eps, atol=4 * torch.finfo(kind).eps)
    assert all(torch.equal(a, b) for a, b in zip(parts, kept, strict=True))


@pytest.mark.parametrize("count", [2, 3, 4])
def test_whole_numbers_are_added_as_such(count):
    parts = [torch.tensor([2**40 + part, -part, 2**24 + 1]) for part in range(count)]
    out = torch.empty(3, dtype=torch.int64)
    symmetric_memory.add_up(parts, out)
    assert out.equal(torch.stack(parts).sum(0))


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError("libcuda.so.1: cannot open\nmore"), "libcuda.so.1: cannot open"),
        (Exception(), "Exception"),
        (None, None),
    ],
)
def test_whatever_goes_wrong_in_a_try_is_a_reason_and_no_crash(monkeypatch, error, said):
    def attempt():
        if error is not None:
            raise error

    monkeypatch.setattr(collectives, "axis", lambda name: SimpleNamespace(size=2, group=None))
    monkeypatch.setattr(dist, "all_gather_object", lambda all_said, reason, group: all_said.__setitem__(1, reason))
    assert symmetric_memory.agreed_reason(attempt) == said


@pytest.mark.parametrize("who", ["this rank", "another"])
def test_no_rank_waits_for_one_that_has_no_memory_to_share(monkeypatch, who):
    import torch.distributed._symmetric_memory as memory

    def empty(size, dtype, device):
        if who == "this rank":
            raise torch.OutOfMemoryError("CUDA out of memory.\nmore")
        return torch.empty(size, dtype=dtype)

    def gather(said, reason, group):
        said[:] = [reason, "" if reason else "CUDA out of memory."]

    monkeypatch.setattr(memory, "empty", empty)
    monkeypatch.setattr(memory, "rendezvous", lambda *arguments: pytest.fail("one is not there"))
    monkeypatch.setattr(dist, "all_gather_object", gather)
    monkeypatch.setattr(collectives, "axis", lambda name: SimpleNamespace(size=2, rank=0, group="ranks of tp"))
    with pytest.raises(RuntimeError, match=r"^no 3 MiB for ranks to share: CUDA out of memory\.$"):
        symmetric_memory.Region("tp", 3 << 20, torch.device("cuda"))


def test_regions_that_are_not_used_are_given_back_when_all_ranks_are_through(monkeypatch):
    done = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: done.append("device"))
    monkeypatch.setattr(dist, "barrier", lambda group: done.append(group))
    monkeypatch.setattr(collectives, "axis", lambda name: SimpleNamespace(group="ranks of tp"))
    one = symmetric_memory.Space.__new__(symmetric_memory.Space)
    one.axis, one.device, one.regions = "tp", torch.device("cuda"), dict.fromkeys(("gather", "scatter", "parts"))
    monkeypatch.setattr(job, "spaces", {"group": one})
    symmetric_memory.keep({"gather", "parts", "flags"})
    assert list(one.regions) == ["gather", "parts"]
    assert done == ["device", "ranks of tp"]
    symmetric_memory.keep({"gather", "parts"})
    assert done == ["device", "ranks of tp"]  # nothing to do


def test_ranks_on_different_hosts_are_told_so(monkeypatch):
    def gather(answers, own, group):
        answers[:] = [own, "elsewhere"] if group == "ranks of tp" else [own] * len(answers)

    monkeypatch.setattr(dist, "all_gather_object", gather)
    monkeypatch.setattr(collectives, "axis_size", lambda name: 2)
    monkeypatch.setattr(collectives, "axis", lambda name: SimpleNamespace(size=2, group=f"ranks of {name}"))
    assert symmetric_memory.unusable(torch.device("cuda")) == "ranks of one tp group are on different hosts"


@pytest.mark.parametrize(("local", "gpus", "shared"), [(8, 8, False), (2, 1, True), (4, 2, True), (None, 1, True)])
def test_more_ranks_than_gpus_on_a_host_share_them(monkeypatch, local, gpus, shared):
    """However many there are in all."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if local is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(local))
    assert symmetric_memory.share_a_gpu(2 if local != 8 else 16) == shared
