"""Our Triton kernels, but for those of tensor parallelism, against torch: python -m tests.unit.optim.kernels_program.

On a GPU where there is one, else in Triton's interpreter. Ends with 0 where every result is right.
"""

import math
import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

ON_GPU = torch.cuda.is_available()
if not ON_GPU:
    os.environ["TRITON_INTERPRET"] = "1"

from shardline.models.dtensor import local  # noqa: E402
from shardline.models.experts.row_kernels import add_up_kernel, swiglu_gradient_kernel, swiglu_kernel  # noqa: E402
from shardline.models.products.narrow import keep_narrow, narrow_copy  # noqa: E402
from shardline.optim.gpu_adam import GPUAdam  # noqa: E402
from shardline.optim.kernels import SMALL, adam_kernel, squares_kernel  # noqa: E402
from shardline.optim.narrow_adam import NarrowAdam  # noqa: E402
from shardline.optim.norms import _squared_sums_by_kernel  # noqa: E402
from shardline.parallel.expert.row_transfer_kernels import (  # noqa: E402
    routes_kernel,
    send_rows_kernel,
    share_counts_kernel,
)
from shardline.precision.float8 import E4M3, LARGEST, TINY, Quantized, Recipe, quantize, transposed  # noqa: E402
from shardline.precision.float8_kernels import largest_kernel, turn_kernel  # noqa: E402
from shardline.training.loss_kernel import loss_kernel  # noqa: E402

DEVICE = "cuda" if ON_GPU else "cpu"


def check_adam(kind: type[torch.optim.Adam], dtype: torch.dtype) -> None:
    source = torch.Generator(DEVICE).manual_seed(0)
    wanted = torch.nn.Parameter(torch.randn(37, 11, generator=source, device=DEVICE))
    found, m, v = wanted.detach().clone(), torch.zeros_like(wanted), torch.zeros_like(wanted)
    narrow = torch.empty_like(found, dtype=torch.bfloat16)
    lr, decay, eps, scale = 1e-2, 0.1, 1e-8, 0.25
    optimizer = kind([wanted], lr=lr, betas=(0.9, 0.95), eps=eps, weight_decay=decay)
    for count in range(1, 6):
        gradient = torch.randn(37, 11, generator=source, device=DEVICE).to(dtype)
        wanted.grad = gradient.float() * scale
        optimizer.step()
        numbers = (lr, 0.9, 0.95, eps, decay, lr / (1 - 0.9**count), math.sqrt(1 - 0.95**count), scale)
        adam_kernel[(-(-found.numel() // 128),)](
            found, gradient, m, v, narrow, found.numel(), *numbers,
            DECOUPLED=kind is torch.optim.AdamW, NARROW=True, BLOCK=128,
        )  # fmt: skip
    torch.testing.assert_close(found, wanted.detach(), rtol=1e-5, atol=1e-6)
    cut_off = 0 if ON_GPU else 2**-7  # the interpreter does not round
    torch.testing.assert_close(narrow, found.to(torch.bfloat16), rtol=cut_off, atol=0)


def check_many() -> None:
    """Parameters of several sizes in few launches; one begins to learn later, one has a group of its own."""
    source = torch.Generator().manual_seed(6)
    sizes = [(37, 11), (5000,), (1,), (9, 130), (70_000,), *([(SMALL + 1,)] if ON_GPU else [])]
    wanted = [torch.nn.Parameter(torch.randn(size, generator=source).to(DEVICE)) for size in sizes]
    found = [torch.nn.Parameter(parameter.detach().clone()) for parameter in wanted]
    groups = [[{"params": one[:-1], "lr": 1e-2}, {"params": one[-1:], "lr": 2e-2}] for one in (wanted, found)]
    theirs, pattern = (torch.optim.AdamW(one, betas=(0.9, 0.95), weight_decay=0.1) for one in groups)
    ours = GPUAdam(pattern)
    ours.scale = 0.5
    for step in range(4):
        for place, (a, b) in enumerate(zip(wanted, found, strict=True)):
            if place == 1 and step < 2:
                continue
            a.grad = torch.randn(a.shape, generator=source).to(DEVICE)
            b.grad = 2 * a.grad
        theirs.step()
        before = [b._version for b in found]
        ours.step()
        assert [b._version > old for b, old in zip(found, before, strict=True)] == [b.grad is not None for b in found]
    for a, b in zip(wanted, found, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-6)
    mixed = [wanted[0].grad, wanted[1].grad.to(torch.bfloat16), wanted[3].grad[:, 1:], wanted[2].grad, wanted[-1].grad]
    sums = _squared_sums_by_kernel(mixed)
    torch.testing.assert_close(sums, torch.stack([one.float().square().sum() for one in mixed]))


def check_shards() -> None:
    """A rank steps what it holds of a DTensor; one that holds nothing steps nothing."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh(DEVICE, (1,))
    values = torch.randn(37, 11, generator=torch.Generator().manual_seed(8)).to(DEVICE)
    wanted = torch.nn.Parameter(values.clone())
    found = torch.nn.Parameter(distribute_tensor(values, mesh, [Shard(0)]))
    nothing = torch.nn.Parameter(distribute_tensor(values[:0], mesh, [Shard(0)]))
    theirs = torch.optim.AdamW([wanted], lr=1e-2)
    ours = GPUAdam(torch.optim.AdamW([found, nothing], lr=1e-2))
    for _ in range(2):
        wanted.grad = torch.sin(wanted.detach())
        found.grad = distribute_tensor(wanted.grad, mesh, [Shard(0)])
        nothing.grad = torch.zeros_like(nothing)
        theirs.step()
        ours.step()
    torch.testing.assert_close(found.to_local(), wanted, rtol=1e-5, atol=1e-6)
    assert isinstance(ours.state[found]["exp_avg"], DTensor)
    assert [local(ours.state[one]["step"]).item() for one in (found, nothing)] == [2, 2]
    nothing.grad = torch.zeros_like(nothing)
    ours.prepare()
    ours.zero_grad()
    ours.step()
    assert local(ours.state[nothing]["step"]).item() == 2, "a step that was planned and left out does not count"
    dist.destroy_process_group()


def check_int8_adam() -> None:
    """The numbers of the optimizer that widens moments, steps and rounds; codes may differ by one at a border."""
    source = torch.Generator().manual_seed(7)
    first = torch.randn(5, 512, generator=source).to(DEVICE)
    theirs, ours = torch.nn.Parameter(first.clone()), torch.nn.Parameter(first.clone())
    options = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1}
    wanted = NarrowAdam(torch.optim.AdamW([theirs], foreach=True, **options), torch.int8)
    found = GPUAdam(torch.optim.AdamW([ours], **options), int8=True)
    keep_narrow(ours, torch.bfloat16)
    ours.grad_dtype = torch.float32
    found.scale = 0.5
    for step in range(5):
        theirs.grad = torch.randn(5, 512, generator=source).to(DEVICE)
        theirs.grad[:, :300] *= 1e-4
        theirs.grad[2] = 0  # its scales stay 0 where they are
        ours.grad = 2 * theirs.grad
        wanted.step()
        found.step()
        close = {"rtol": 1e-5, "atol": 1e-6} if step == 0 else {"rtol": 0.02, "atol": 2e-4}
        torch.testing.assert_close(ours, theirs, **close)
        for kind in ("exp_avg", "exp_avg_sq"):
            a, b = (one.state[p][kind].int() for one, p in ((found, ours), (wanted, theirs)))
            assert (a - b).abs().max() <= 1 + step
            assert (a != b).float().mean() < 0.02
            scales = [one.state[p][kind + "_scale"] for one, p in ((found, ours), (wanted, theirs))]
            torch.testing.assert_close(*scales, rtol=0.05, atol=0)
    cut_off = 0 if ON_GPU else 2**-7
    torch.testing.assert_close(narrow_copy(ours), ours.detach().to(torch.bfloat16), rtol=cut_off, atol=0)
    assert not found.state[ours]["exp_avg"][2].any()


def check_add_up() -> None:
    source = torch.Generator().manual_seed(1)
    tokens, k, width = 5, 3, 20
    rows = torch.randn(tokens * k, width, generator=source).to(DEVICE)
    inverse = torch.randperm(tokens * k, generator=source).to(DEVICE)
    out = torch.empty(tokens, width, device=DEVICE)
    add_up_kernel[(tokens, 2)](rows, inverse, out, width, K=k, BLOCK=16)
    torch.testing.assert_close(out, rows[inverse].view(tokens, k, width).sum(1))
    without = inverse.masked_fill(inverse % 4 == 0, -1)
    add_up_kernel[(tokens, 2)](rows, without, out, width, K=k, BLOCK=16)
    kept = rows[inverse] * (without >= 0)[:, None]
    torch.testing.assert_close(out, kept.view(tokens, k, width).sum(1))


def check_swiglu(run: int, weighted: bool, block: int) -> None:
    """Gate and up alternate in runs; with weights a program has a whole row."""
    source = torch.Generator().manual_seed(2)
    rows, width = 5, 24
    product = torch.randn(rows, 2 * width, generator=source).to(DEVICE).requires_grad_()
    weights = torch.rand(rows, 1, generator=source).to(DEVICE).requires_grad_()
    gate, up = (half.flatten(1) for half in product.unflatten(1, (-1, 2, run)).unbind(2))
    wanted = torch.nn.functional.silu(gate) * up * (weights if weighted else 1 + 0 * weights)
    given = torch.randn(rows, width, generator=source).to(DEVICE)
    of_product, of_weights = torch.autograd.grad(wanted, (product, weights), given)
    inputs = product.detach(), weights.detach()
    out, of_one, of_other = torch.empty_like(wanted), torch.empty_like(product), torch.empty_like(weights)
    grid, options = (rows, -(-width // block)), {"RUN": run, "WEIGHTED": weighted, "BLOCK": block}
    swiglu_kernel[grid](*inputs, out, width, **options)
    torch.testing.assert_close(out, wanted.detach())
    again = torch.empty_like(out)
    swiglu_gradient_kernel[grid](given, *inputs, of_one, of_other, again, width, **options)
    torch.testing.assert_close(again, wanted.detach())
    torch.testing.assert_close(of_one, of_product)
    if weighted:
        torch.testing.assert_close(of_other, of_weights)


def check_float8_turn() -> None:
    """Rows that differ by orders of magnitude, one of them zeros, in tiles that do not divide them."""
    source = torch.Generator().manual_seed(4)
    rows, depth = 21, 13
    wide = torch.randn(rows, depth, generator=source) * torch.logspace(-3, 3, rows)[:, None]
    wide[5] = 0
    given = quantize(wide)
    wanted = transposed(given, Recipe("rowwise", emulate=False))
    data, factors = (tensor.to(DEVICE) for tensor in given)
    largest = torch.zeros(depth, device=DEVICE)
    found = Quantized(data.new_empty(depth, rows), factors.new_empty(depth, 1))
    largest_kernel[(2, 2)](data, factors, largest, rows, depth, ROWS=8, COLUMNS=8, TILES=2)
    tile = {"ROWS": 8, "COLUMNS": 8}
    turn_kernel[(2, 3)](data, factors, largest, *found, rows, depth, LARGEST[E4M3], TINY, **tile)
    assert torch.equal(found.factors.cpu(), wanted.factors)
    one, other = found.data.cpu().float(), wanted.data.float()
    exact = (other.abs() >= 2**-6) | ON_GPU  # the interpreter does not know numbers whose exponent has run out
    assert torch.equal(one[exact], other[exact])
    assert exact.float().mean() > 0.5


def check_row_transfers() -> None:
    """Three ranks in one process, two experts each, one of which gets nothing: rows go to their experts and back."""
    ranks, experts, tokens, k, width = 3, 6, 5, 2, 20
    source = torch.Generator().manual_seed(3)
    scores = torch.rand(ranks, tokens, experts, generator=source)
    scores[:, :, 4] = -1
    chosen = scores.topk(k, dim=2).indices.flatten(1)
    rows = torch.randn(ranks, tokens, width, generator=source).to(DEVICE)
    side = torch.rand(ranks, tokens * k, 2, generator=source).to(DEVICE)
    order = chosen.argsort(dim=1, stable=True)
    counts = torch.nn.functional.one_hot(chosen, experts).sum(1).to(DEVICE)
    room = ranks * tokens * k
    begins = room * width * 4

    def routed(rank: int) -> torch.Tensor:
        table = torch.cat([counts, torch.zeros(4, experts, dtype=torch.int64, device=DEVICE)])
        routes_kernel[(experts, 2)](table, rank, ranks, experts, RANKS=4, EXPERTS=8)
        return table

    def memory(size: int) -> tuple[torch.Tensor, torch.Tensor]:
        whole = torch.zeros(ranks, size, dtype=torch.uint8, device=DEVICE)
        return whole, torch.tensor([one.data_ptr() for one in whole], device=DEVICE)

    tables, addresses = memory(ranks * experts * 8)
    for rank in range(ranks):
        share_counts_kernel[(ranks,)](counts[rank], addresses, rank, experts, BLOCK=8)
    for table in tables:
        assert torch.equal(table.view(torch.int64).view(ranks, experts), counts)

    there, addresses = memory(begins + room * 2 * 4)
    for rank in range(ranks):
        send_rows_kernel[(3,)](  # ten rows: the last program has fewer than the others
            rows[rank].view(torch.int32), side[rank], order[rank].to(DEVICE), routed(rank), addresses,
            begins, width, experts, ranks, tokens * k,
            K=k, SIDE=2, BACK=False, BLOCKS=8, BLOCK=16, ROWS=4,
        )  # fmt: skip
    arrived = []
    for rank in range(ranks):
        wanted = [(e, r, i) for e in (2 * rank, 2 * rank + 1) for r in range(ranks) for i in order[r].tolist()
                  if chosen[r, i] == e]  # fmt: skip
        n = len(wanted)
        found = there[rank, : n * width * 4].view(torch.float32).view(n, width)
        beside = there[rank, begins : begins + n * 8].view(torch.float32).view(n, 2)
        assert torch.equal(found, torch.stack([rows[r, i // k] for _, r, i in wanted]))
        assert torch.equal(beside, torch.stack([side[r, i] for _, r, i in wanted]))
        arrived.append((found.clone(), beside.clone()))

    back, addresses = memory(begins + room * 2 * 4)
    for rank, (found, beside) in enumerate(arrived):
        send_rows_kernel[(-(-len(found) // 4),)](
            found.view(torch.int32), beside, found, routed(rank), addresses, begins, width, experts, ranks, len(found),
            K=1, SIDE=2, BACK=True, BLOCKS=8, BLOCK=16, ROWS=4,
        )  # fmt: skip
    for rank in range(ranks):
        returned = back[rank, : tokens * k * width * 4].view(torch.float32).view(-1, width)
        beside = back[rank, begins : begins + tokens * k * 8].view(torch.float32).view(-1, 2)
        assert torch.equal(returned, rows[rank][order[rank].to(DEVICE) // k])
        assert torch.equal(beside, side[rank][order[rank].to(DEVICE)])


def check_squares() -> None:
    x = torch.randn(1000, generator=torch.Generator().manual_seed(4)).to(DEVICE)
    for parts in (1, 3, 8):
        sums = torch.empty(parts, device=DEVICE)
        squares_kernel[(parts,)](x, sums, x.numel(), parts, BLOCK=128)
        torch.testing.assert_close(sums.sum(), x.square().sum())


def check_loss(cap: float | None, weighted: bool = False) -> None:
    """Also where the target has nearly all of the probability, and where it is in the last, unfinished block."""
    rows, width = 4, 37
    logits = 3 * torch.randn(rows, width, generator=torch.Generator().manual_seed(5)).to(DEVICE)
    target = torch.tensor([0, 36, 20, 5], device=DEVICE)
    logits[2, 20] += 17
    scale = torch.tensor(0.25, device=DEVICE)
    if weighted:  # every row has its own
        scale = torch.tensor([[0.25], [-2.0], [0.0], [1.0]], device=DEVICE)
    exact = logits.double().requires_grad_()
    inside = exact if cap is None else cap * torch.tanh(exact / cap)
    wanted = torch.nn.functional.cross_entropy(inside, target, reduction="none")
    (of_logits,) = torch.autograd.grad((wanted * scale.flatten()).sum(), exact)
    losses, options = torch.empty(rows, device=DEVICE), {"CAPPED": cap is not None, "WEIGHTED": weighted, "BLOCK": 16}
    loss_kernel[(rows,)](logits, target, losses, losses, width, cap or 1.0, GRADIENT=False, **options)
    torch.testing.assert_close(losses, wanted.float().detach(), rtol=1e-5, atol=1e-7)
    assert torch.equal(logits, exact.float())
    loss_kernel[(rows,)](logits, target, losses, scale, width, cap or 1.0, GRADIENT=True, **options)
    torch.testing.assert_close(losses, wanted.float().detach(), rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(logits, of_logits.float(), rtol=1e-5, atol=1e-12 if cap is None else 1e-7)


if __name__ == "__main__":
    check_squares()
    check_loss(None)
    check_loss(4.0)
    check_loss(None, weighted=True)
    check_row_transfers()
    check_float8_turn()
    check_swiglu(run=24, weighted=True, block=32)
    check_swiglu(run=8, weighted=False, block=16)
    for optimizer in (torch.optim.AdamW, torch.optim.Adam):
        for of_gradient in (torch.float32, torch.bfloat16):
            check_adam(optimizer, of_gradient)
    check_many()
    check_int8_adam()
    check_shards()
    check_add_up()
