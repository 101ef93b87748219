"""The collectives on NCCL, one rank: calls, streams and types are real, the sums trivial.

Several ranks on one GPU: the layouts with SHARDLINE_PARITY_BACKEND=nccl (pool.py), and tests/faults/test_nccl.py.
"""

import os

import pytest
import torch
import torch.distributed as dist

from shardline.comm import collectives
from shardline.comm.job import job
from shardline.comm.mesh import Mesh
from shardline.config.layout import Layout

pytestmark = pytest.mark.gpu


@pytest.fixture
def nccl(tmp_path, monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    torch.cuda.set_device(0)
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1, device_id=torch.device("cuda", 0))
    group = dist.group.WORLD
    job.set_axes({name: collectives.Axis(name, group, 1, 0) for name in ("tp", "world", "dp_replicate")})
    yield
    job.set_axes({})
    dist.destroy_process_group()
    os.environ.pop("TORCH_NCCL_ASYNC_ERROR_HANDLING", None)


@pytest.mark.usefixtures("nccl")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("compiled", [False, True])
def test_collectives_and_their_gradients(dtype, compiled):
    def function(x):
        gathered = collectives.all_gather(collectives.copy(x, "tp"), "tp")
        return collectives.all_reduce(collectives.reduce_scatter(gathered * 2, "tp"), "tp")

    run = torch.compile(function, fullgraph=True) if compiled else function
    x = torch.randn(64, 32, device="cuda", dtype=dtype, requires_grad=True)
    out = run(x)
    out.sum().backward()
    assert torch.equal(out, 2 * x)
    assert torch.equal(x.grad, torch.full_like(x, 2))


@pytest.mark.usefixtures("nccl")
def test_sums_that_run_on():
    x = torch.ones(1000, device="cuda")
    started = collectives.start_sum(x, "dp_replicate")
    started.wait()
    assert torch.equal(x, torch.ones_like(x))
    assert collectives.max_in_place(torch.tensor([3.0], device="cuda"), "world").item() == 3.0


def test_a_mesh_of_one_rank_has_no_axes():
    assert Mesh(Layout(), "cuda").axis("tp") is None
