"""Adam as one kernel, and the narrow copies of weights that it writes."""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from shardline.models.products.narrow import keep_narrow, narrow_copy, narrowed
from shardline.optim.clip import clip_, clipping_factor
from shardline.optim.gpu_adam import GPUAdam

ROOT = Path(__file__).parents[3]
TRITON = ROOT / ".venv" / "triton"


@pytest.mark.skipif(not (TRITON / "triton").is_dir(), reason="Triton's interpreter is not installed")
def test_the_kernels_in_the_interpreter():
    environment = {**os.environ, "PYTHONPATH": f"{TRITON}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.unit.optim.kernels_program"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.gpu
def test_the_kernels_on_a_gpu():
    subprocess.run([sys.executable, "-m", "tests.unit.optim.kernels_program"], cwd=ROOT, check=True, timeout=300)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam])
def test_steps_are_those_of_torch(kind):
    torch.manual_seed(0)
    wanted = [nn.Parameter(torch.randn(300, 70, device="cuda")) for _ in range(3)]
    found = [nn.Parameter(parameter.detach().clone()) for parameter in wanted]
    theirs = kind(wanted, lr=1e-2, weight_decay=0.1, fused=True)
    ours = GPUAdam(kind(found, lr=1e-2, weight_decay=0.1))
    for _ in range(10):
        for a, b in zip(wanted, found, strict=True):
            a.grad = torch.randn_like(a)
            b.grad = 2 * a.grad
        ours.scale = 0.5
        theirs.step()
        ours.step()
    for a, b in zip(wanted, found, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-5)


def test_no_kernel_on_a_cpu():
    assert not GPUAdam.serves(torch.optim.AdamW([nn.Parameter(torch.zeros(3))]))


@pytest.mark.parametrize(("norm", "limit"), [(2.0, 1.0), (0.5, 1.0), (2.0, 0.0), (2.0, math.inf)])
def test_the_factor_is_that_of_clipping(norm, limit):
    parameter = nn.Parameter(torch.zeros(4))
    parameter.grad = torch.ones(4)
    clip_([parameter], norm, limit)
    assert parameter.grad[0].item() == pytest.approx(clipping_factor(norm, limit))


def test_a_narrow_copy_follows_its_weight_and_takes_its_gradient():
    weight = nn.Parameter(torch.randn(8, 4))
    keep_narrow(weight, torch.bfloat16)
    x = torch.randn(3, 4, dtype=torch.bfloat16)
    for _ in range(2):
        out = x @ narrowed(weight).t()
        assert torch.equal(out, x @ weight.detach().to(torch.bfloat16).t())
        with torch.no_grad():
            weight.add_(1.0)  # the copy is old, and made again
    out.float().sum().backward()
    assert weight.grad is not None
    assert weight.grad.dtype == torch.bfloat16
    assert torch.equal(weight.grad[0], x.float().sum(0).to(torch.bfloat16))


def test_a_copy_that_the_optimizer_wrote_is_used_as_it_is():
    weight = nn.Parameter(torch.zeros(2, 2))
    keep_narrow(weight, torch.bfloat16)
    narrowed(weight)
    copy = narrow_copy(weight)
    assert copy is not None
    copy.fill_(3.0)  # as a kernel does, which leaves the weight's version alone
    assert torch.equal(narrowed(weight), torch.full((2, 2), 3.0, dtype=torch.bfloat16))


def test_without_a_copy_the_weight_is_used_itself():
    weight = nn.Parameter(torch.zeros(2, 2))
    assert narrowed(weight) is weight
    assert narrow_copy(weight) is None


@pytest.mark.parametrize(("momentum", "served"), [(0.0, True), (0.95, True), (0.98, False)])
def test_codes_must_follow_the_highest_momentum_of_a_schedule(momentum, served):
    pattern = torch.optim.AdamW([torch.nn.Parameter(torch.empty(2, 256))], betas=(0.9, 0.95))
    assert GPUAdam.serves_int8(pattern, momentum) == served
