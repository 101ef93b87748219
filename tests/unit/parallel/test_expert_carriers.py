"""What sends rows to experts is chosen by its numbers and its speed."""

import pytest
import torch

from shardline.comm.job import job
from shardline.comm.mesh import Mesh
from shardline.config.architecture import MixtureOfExperts
from shardline.config.layout import Layout
from shardline.config.load import load_config
from shardline.models.flavors import resolve
from shardline.parallel.expert import choose
from shardline.parallel.expert.all_to_all import AllToAll
from shardline.run import numa
from tests.parity.pool import Pool

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
TRIP = choose.Trip
MOE = MixtureOfExperts(n_experts=4, top_k=2, expert_dim=8)


class Stale(AllToAll):
    """Brings back what the first trip brought."""

    def __init__(self):
        self.first = None

    def landed(self, *given):
        self.first = self.first or super().landed(*given)
        return self.first


def differences():
    mesh = Mesh(Layout(dp_shard=2, ep=2), "cpu")
    assert mesh.layout.ep == 2
    trip = choose.Trip(MOE, 16, 6, torch.float32, CPU)
    return trip.difference(AllToAll(), AllToAll()), trip.difference(Stale(), AllToAll())


def chosen(asked, seconds, other):
    """The carrier that a run takes, and what it says, where a trip takes so many seconds by each."""
    overrides = {"model.name": "deepseek_v3", "model.flavor": "debugmodel", "training.seq_len": 8}
    config = load_config(overrides={**overrides, "parallelism.expert_parallel_comm_backend": asked})
    mesh, kernels = Mesh(Layout(dp_shard=2, ep=2), "cpu"), other()
    job.carrier = None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choose, "carriers", lambda device: ({"all_to_all": AllToAll(), "symmetric": kernels}, {}))
        patch.setattr(TRIP, "times", lambda trip, found: dict(zip(found, seconds, strict=True)))
        patch.setattr(choose.symmetric_memory, "space", lambda *given: _Nothing())
        patch.setattr(choose, "Trip", lambda *given: TRIP(*given[:-1], CPU))  # the run says that it has a GPU
        line = choose.choose_carrier(config, resolve(config.model), mesh, torch.float32, CUDA)
    return job.carrier is kernels, line


class _Nothing:
    def keep(self, purposes):
        pass


@pytest.fixture(scope="module")
def pool():
    workers = Pool()
    yield workers
    workers.close()


def test_a_carrier_that_brings_something_else_is_refused(pool):
    for same, stale in pool.run(2, differences):
        assert same is None
        assert stale == "received rows differ from those sent"


@pytest.mark.parametrize(
    ("asked", "seconds", "other", "is_taken", "said"),
    [
        ("standard", (2e-3, 1e-3), AllToAll, True, "1.00 ms by kernels over shared memory, 2.00 ms by all-to-all"),
        ("standard", (1e-3, 2e-3), AllToAll, False, "are sent by all-to-all; a round trip takes 1.00 ms by all-to-all"),
        ("standard", (2e-3, 1e-3), Stale, False, "cannot be used here (received rows differ from those sent)"),
        ("symmetric", (1e-3, 2e-3), AllToAll, True, "Experts: rows are sent by kernels over shared memory"),
    ],
)
def test_the_faster_one_stays_if_its_numbers_are_right(pool, asked, seconds, other, is_taken, said):
    for taken, line in pool.run(2, chosen, asked, seconds, other):
        assert taken == is_taken
        assert said in line


@pytest.mark.parametrize("chosen_by_user", [False, True])
def test_segments_expand_unless_somebody_chose_otherwise(monkeypatch, chosen_by_user):
    settings = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", settings.append, raising=False)
    for name in numa.ALLOCATOR:
        monkeypatch.delenv(name, raising=False)
    if chosen_by_user:
        monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:False")
    assert numa.prepare_rank(load_config()) == []
    assert settings == ([] if chosen_by_user else ["expandable_segments:True"])
