"""The harness fails where it must: small mistakes put into a correct run, and ranks that raise, die or hang."""

import contextlib
import gc
import os
import re
import time
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from shardline.comm import collectives
from shardline.config.load import load_config
from shardline.models.dtensor import local
from tests.parity import pool as pool_module
from tests.parity.cases import BY_NAME
from tests.parity.harness import Harness, Mutation, Result, compare
from tests.parity.pool import CaseFailed, Pool

WEIGHT = "layers.1.attention.wo.weight"


# ---- mistakes --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def nothing(trainer: Any) -> Iterator[None]:
    yield


@contextlib.contextmanager
def scaled_gradient(trainer: Any) -> Iterator[None]:
    """One weight's gradient is 1 % too large."""
    backward = trainer.stepper.forward_backward
    weight = trainer.model.get_parameter(WEIGHT)

    def scaled(batches: Any) -> Any:
        loss = backward(batches)
        local(weight.grad).mul_(1.01)
        return loss

    with patch.object(trainer.stepper, "forward_backward", scaled):
        yield


@contextlib.contextmanager
def scaled_gradients(trainer: Any) -> Iterator[None]:
    """Gradients averaged over data ranks although the loss is already divided by all targets."""
    backward = trainer.stepper.forward_backward

    def scaled(batches: Any) -> Any:
        loss = backward(batches)
        for parameter in trainer.model.parameters():
            local(parameter.grad).div_(trainer.mesh.layout.data_ranks)
        return loss

    with patch.object(trainer.stepper, "forward_backward", scaled):
        yield


@contextlib.contextmanager
def mean_of_means(trainer: Any) -> Iterator[None]:
    """Each rank divides by its own number of targets."""
    total = collectives.sum_in_place

    def own(x: torch.Tensor, name: str) -> torch.Tensor:
        return x.mul_(collectives.axis(name).size) if name == "loss" else total(x, name)

    with patch.object(collectives, "sum_in_place", own):
        yield


@contextlib.contextmanager
def dropped_bucket(trainer: Any) -> Iterator[None]:
    """In the first step, one bucket of gradients is not summed between replicas."""
    start, calls = collectives.start_sum, []

    def forgetful(x: torch.Tensor, name: str) -> Any:
        calls.append(name)
        return start(torch.zeros_like(x) if len(calls) == 1 else x, name)

    with patch.object(collectives, "start_sum", forgetful):
        yield


@contextlib.contextmanager
def dropped_norm_gradients(trainer: Any) -> Iterator[None]:
    """Gradients of norm weights are not summed between tensor-parallel ranks."""
    with patch("shardline.training.step.sum_replicated_gradients"):
        yield


@contextlib.contextmanager
def no_clipping(trainer: Any) -> Iterator[None]:
    with patch("shardline.training.step.clip_"):
        yield


@contextlib.contextmanager
def sample_read_twice(trainer: Any, with_number: bool = True) -> Iterator[None]:
    """In step 3, data rank 1 reads its first sample again in the place of its second."""
    fetch, steps = trainer.loader.step, []

    def again() -> Any:
        batches = fetch()
        steps.append(batches)
        if len(steps) == 3 and trainer.mesh.data_rank == 1:
            batches[0].tokens[1], batches[0].labels[1] = batches[0].tokens[0], batches[0].labels[0]
            if with_number:
                batches[0].sample_ids[1] = batches[0].sample_ids[0]
        return batches

    with patch.object(trainer.loader, "step", again):
        yield


@contextlib.contextmanager
def sample_swapped(trainer: Any) -> Iterator[None]:
    """The same, while the numbers say that all is well."""
    with sample_read_twice(trainer, with_number=False):
        yield


@contextlib.contextmanager
def drifting_replica(trainer: Any) -> Iterator[None]:
    """Rank 1's copy of a weight is a little different from the start."""
    if trainer.mesh.rank == 1:
        local(trainer.model.get_parameter(WEIGHT)).data.mul_(1 + 1e-6)
    yield


@contextlib.contextmanager
def dropped_key_gradients(trainer: Any) -> Iterator[None]:
    """What other ranks add to the gradients of keys and values is not added up."""

    def forget(self: Any, own: torch.Tensor) -> None:
        for _, _, transfer in self.returning:
            transfer.wait()
        self.returning.clear()

    with patch("shardline.parallel.context.ring.BlockRing._add_up", forget):
        yield


@contextlib.contextmanager
def unweighted_merge(trainer: Any) -> Iterator[None]:
    """Parts of attention are put together as if the softmax of each weighed the same."""

    def mean(out: torch.Tensor, lse: torch.Tensor, more: torch.Tensor, more_lse: torch.Tensor) -> None:
        seen = (lse > float("-inf")).to(out.dtype)[..., None]
        out.copy_((out * seen + more) / (seen + 1))
        lse.copy_(torch.logaddexp(lse, more_lse))

    with patch("shardline.parallel.context.ring.merge_", mean):
        yield


@contextlib.contextmanager
def wrong_positions(trainer: Any) -> Iterator[None]:
    """Every rank of a sequence takes its tokens for the first ones."""
    with patch(
        "shardline.parallel.context.context.ContextParallel.positions",
        lambda self, n, _: torch.arange(n // self.slices.ranks),
    ):
        yield


@contextlib.contextmanager
def document_seen_by_its_neighbour(trainer: Any) -> Iterator[None]:
    """Masks between ranks know no documents."""
    with patch("shardline.parallel.context.ring.PairMask.allowed", seen_by_order):
        yield


def seen_by_order(self: Any, queries: int, keys: int, device: torch.device) -> torch.Tensor:
    places = torch.arange(self.length)
    return ((queries - keys) * self.length + places[:, None] >= places[None, :])[None, None]


MISTAKES: list[tuple[Mutation, str, str]] = [
    (scaled_gradient, "ddp2-small-buckets", f"^gradient of {WEIGHT}: relative [^>]*e-03"),
    (scaled_gradient, "fsdp2", f"^gradient of {WEIGHT}: relative [^>]*e-03"),
    (scaled_gradient, "tp2", f"^gradient of {WEIGHT}: relative [^>]*e-03"),
    (scaled_gradients, "ddp2-small-buckets", r"grad_norm at step 1: [^\n]*relative 5.00e-01"),
    (mean_of_means, "ddp2-documents", "gradient of .*loss at step"),
    (dropped_bucket, "ddp2-small-buckets", "gradient_prints: rank 1 differs"),
    (dropped_norm_gradients, "tp2", "gradient_prints: rank 1 differs .*norm"),
    (dropped_key_gradients, "cp2-ring", r"^gradient of layers\.\d\.attention\.w[kv]\.weight"),
    (unweighted_merge, "cp2-ring", r"^gradient of layers\.\d\.attention"),
    (unweighted_merge, "cp2-allgather", r"^gradient of layers\.\d\.attention"),
    (wrong_positions, "cp2-ulysses", r"^gradient of layers\.\d\.attention"),
    (document_seen_by_its_neighbour, "cp2-ring-documents", "^loss at step 1"),
    (no_clipping, "fsdp2", r"^gradient of .*norm 1\.[56]\d+ of the reference's"),
    (sample_read_twice, "fsdp2", r"^samples at step 3: read twice \[20\], not read \[21\]"),
    (sample_swapped, "fsdp2", "^grad_norm at step 3"),
    (drifting_replica, "ddp2-small-buckets", "parameter_prints: rank 1 differs"),
]


@pytest.mark.parametrize(
    ("mutation", "name", "message"), [pytest.param(*row, id=f"{row[0].__name__}-{row[1]}") for row in MISTAKES]
)
def test_mistake_is_found(harness: Harness, mutation: Mutation, name: str, message: str) -> None:
    case = BY_NAME[name]
    reference = harness.reference(case.overrides)
    with pytest.raises(AssertionError) as caught:
        compare(reference, harness.run(case.overrides, case.ranks, mutation), case.tolerances)
    text = str(caught.value)
    assert re.search(message, text, re.DOTALL), text


@pytest.mark.parametrize("name", sorted({row[1] for row in MISTAKES}))
def test_without_a_mistake_nothing_is_found(harness: Harness, name: str) -> None:
    """Each mutation above is undone with its run: the same workers give the right numbers again."""
    case = BY_NAME[name]
    compare(harness.reference(case.overrides), harness.run(case.overrides, case.ranks, nothing), case.tolerances)


def test_reference_runs_once(harness: Harness, pool: Pool) -> None:
    harness.reference({})
    before = pool.cases
    harness.reference({"parallelism.tensor_parallel_degree": 2, "training.local_batch_size": 1})
    assert pool.cases == before


# ---- compare ---------------------------------------------------------------------------------------------------------


def make_result() -> Result:
    tensors = {"a": torch.tensor([3.0, 4.0]), "b": torch.ones(2, 2)}
    return Result(
        losses=[5.0, 4.0],
        grad_norms=[1.0, 2.0],
        gradients=dict(tensors),
        parameters=dict(tensors),
        samples=[[[0, 1], [2, 3]], [[4, 5], [6, 7]]],
        validation_losses=[5.0],
    )


def test_compare_accepts_what_is_within_the_band() -> None:
    other = make_result()
    other.losses = [5.0 * (1 + 9e-5), 4.0]
    other.grad_norms = [1.0, 2.0 * (1 - 9e-6)]
    other.gradients["a"] = torch.tensor([3.0, 4.0]) * (1 + 9e-4)
    other.samples = [[[3], [2], [1], [0]], [[4, 5, 6, 7]]]  # who reads a sample does not matter
    compare(make_result(), other)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"losses": [5.0, 4.0 * (1 + 2e-4)]}, "loss at step 2"),
        ({"losses": [5.0, float("nan")]}, "loss at step 2"),
        ({"losses": [5.0]}, "loss: 1 values"),
        ({"grad_norms": [1.0 + 2e-5, 2.0]}, "grad_norm at step 1"),
        ({"gradients": {"a": torch.tensor([3.0, 4.006]), "b": torch.ones(2, 2)}}, "gradient of a: relative 1.2"),
        ({"gradients": {"a": torch.tensor([3.0, 4.0])}}, "gradient b is only in the reference"),
        ({"gradients": {"a": torch.ones(3), "b": torch.ones(2, 2)}}, "gradient a: shape"),
        ({"parameters": {"a": torch.tensor([3.0, 4.0]), "b": torch.zeros(2, 2)}}, "parameter of b"),
        ({"samples": [[[0, 1], [2, 2]], [[4, 5], [6, 7]]]}, r"samples at step 1: read twice \[2\], not read \[3\]"),
        ({"samples": [[[0, 1], [2, 3]]]}, "1 steps read samples"),
        ({"validation_losses": [5.01]}, "validation_loss at step 1"),
        ({"validation_losses": []}, "validation_loss: 0 values"),
    ],
)
def test_compare_names_the_difference(change: dict[str, Any], message: str) -> None:
    with pytest.raises(AssertionError, match=f"^{message}"):
        compare(make_result(), replace(make_result(), **change))


# ---- the pool --------------------------------------------------------------------------------------------------------


def sum_of_ranks() -> tuple[int, int, str]:
    total = torch.tensor(dist.get_rank())
    dist.all_reduce(total)
    return int(total), os.getpid(), os.environ["RANK"]


def alone() -> tuple[bool, str | None, int]:
    return dist.is_initialized(), os.environ.get("WORLD_SIZE"), torch.get_num_threads()


def fail(rank: int, how: str) -> None:
    if dist.get_rank() == rank and how == "raise":
        raise ValueError(f"from rank {rank}")
    if dist.get_rank() == rank and how == "die":
        print("last words", flush=True)
        os._exit(7)
    if dist.get_rank() == rank and how == "hang":
        time.sleep(600)
    dist.barrier()


def gathered(groups_before: int) -> list[float]:
    """A sum of sharded tensors on a mesh that is equal in every case, but whose groups have other names."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    for _ in range(groups_before):
        dist.new_group()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))["inner"]
    x = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
    return (x + x).full_tensor().tolist()


@pytest.fixture(scope="module")
def small_pool() -> Iterator[Pool]:
    """Of its own, so that workers which are killed here do not have to be started anew for the layouts."""
    workers = Pool()
    yield workers
    workers.close()


def test_pool_starts_only_what_is_needed_and_keeps_it(small_pool: Pool) -> None:
    assert small_pool.run(1, alone) == [(False, None, 1)]
    assert small_pool.started == 1
    first = small_pool.run(2, sum_of_ranks)
    second = small_pool.run(2, sum_of_ranks)
    assert [(total, rank) for total, _, rank in first] == [(1, "0"), (1, "1")]
    assert first == second
    assert small_pool.started == 2
    assert small_pool.run(1, alone) == [(False, None, 1)]  # the environment of the case before is gone


def test_pool_shows_the_traceback_of_the_rank_that_raised(small_pool: Pool) -> None:
    small_pool.run(2, sum_of_ranks)
    started = small_pool.started
    with pytest.raises(CaseFailed, match="ValueError: from rank 1") as caught:
        small_pool.run(2, fail, 1, "raise")
    assert caught.value.rank == 1
    small_pool.run(2, sum_of_ranks)
    assert small_pool.started == started, "ranks that answered are kept"


def test_pool_tries_again_where_ranks_did_not_connect(small_pool: Pool) -> None:
    small_pool.run(2, sum_of_ranks)
    started, cases = small_pool.started, small_pool.cases
    # The first try's file for rendezvous cannot be one.
    (small_pool.folder / f"store-{cases + 1}").mkdir()
    assert [total for total, _, _ in small_pool.run(2, sum_of_ranks)] == [1, 1]
    assert (small_pool.started, small_pool.cases) == (started + 2, cases + 2)


def test_pool_replaces_a_rank_that_died(small_pool: Pool) -> None:
    before = small_pool.run(2, sum_of_ranks)
    with pytest.raises(CaseFailed, match=r"(?s)rank 1 died, exit code 7.*last words"):
        small_pool.run(2, fail, 1, "die")
    after = small_pool.run(2, sum_of_ranks)
    assert after[1][1] != before[1][1]


@pytest.mark.parametrize(("free", "kept"), [(0.1, False), (0.9, True)])
def test_pool_lets_waiting_ranks_go_if_memory_is_short(
    small_pool: Pool, monkeypatch: pytest.MonkeyPatch, free: float, kept: bool
) -> None:
    small_pool.run(2, sum_of_ranks)
    monkeypatch.setattr(pool_module, "_pools", [small_pool])
    monkeypatch.setattr(pool_module, "_free_share", lambda: free)
    pool_module.free_memory()
    assert (small_pool.workers[0] is not None) == kept
    assert [total for total, _, _ in small_pool.run(2, sum_of_ranks)] == [1, 1]


def test_pool_ends_a_hang_and_says_where(small_pool: Pool) -> None:
    small_pool.run(2, sum_of_ranks)
    began = time.monotonic()
    with pytest.raises(CaseFailed, match=r"(?s)did not finish in 2 s.*in fail"):
        small_pool.run(2, fail, 1, "hang", timeout=2)
    assert time.monotonic() - began < 60  # it would hang for 600
    assert [total for total, _, _ in small_pool.run(2, sum_of_ranks)] == [1, 1]


def test_pool_forgets_the_meshes_of_a_case(small_pool: Pool) -> None:
    for groups_before in (3, 0):
        assert small_pool.run(4, gathered, groups_before) == [[0.0, 2.0, 4.0, 6.0]] * 4


# ---- what a case leaves behind ---------------------------------------------------------------------------------------


def parameters_left(settings: dict[str, Any]) -> int:
    """How many of its parameters outlive a trainer that nobody holds any more."""
    from shardline.training.trainer import Trainer

    trainer = Trainer(load_config(overrides=settings))
    trainer.train()
    parameters = [weakref.ref(parameter) for parameter in trainer.model.parameters()]
    del trainer
    gc.collect()
    return sum(parameter() is not None for parameter in parameters)


@pytest.mark.parametrize("name", ["ddp2", "fsdp2-early-step-clipped"])
def test_a_trainer_that_is_gone_leaves_no_model_in_memory(harness: Harness, name: str, tmp_path: Path) -> None:
    case = BY_NAME[name]
    short = {"training.steps": 1, "lr_scheduler.warmup_steps": 0, "job.dump_folder": str(tmp_path / "run")}
    settings = harness.settings(case.overrides, case.ranks) | short
    assert harness.pool.run(case.ranks, parameters_left, settings) == [0, 0]
