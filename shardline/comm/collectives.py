"""All collectives that a rank issues, over named mesh axes, with the bytes that they send counted.

Bytes are those that a rank sends with ring algorithms, for n ranks and a whole tensor of `size` bytes:

    all_gather, reduce_scatter, all_to_all   (n - 1) / n x size        all_reduce   2 (n - 1) / n x size

`all_gather`, `reduce_scatter`, `copy`, `all_reduce` and `all_to_all` are differentiable and work on rows (dimension 0).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardline.comm import transfers
from shardline.comm.job import Axis, job
from shardline.comm.observe import Blocking, Observed, Started, described, runs_on_host
from shardline.comm.spans import now
from shardline.comm.watchdog import pass_over

pass_over(__file__)

# Dimension of a parameter's mesh -> the axis of its ranks, if that has another name.
AXIS_OF = {"dp_shard": "fsdp", "cp": "fsdp", "dp_shard_cp": "fsdp", "replicas": "dp_replicate"}


def axis(name: str) -> Axis:
    return job.axes[name]


def axis_size(name: str) -> int:
    return job.axes[name].size if name in job.axes else 1


def join_on_device(name: str, device: torch.device) -> None:
    """Call before the first transfer between some ranks of an axis: NCCL connects all of them in its first call."""
    over = job.axes[name]
    if name not in job.joined and not runs_on_host(over.group, device):
        dist.all_reduce(torch.zeros(1, device=device), group=over.group)
    job.joined.add(name)


# Plain collectives: fill `out` or change `x` in place, and return when the result may be used


def gather_into(out: Tensor, x: Tensor, name: str) -> None:
    """out (n * rows, ...) = the rows of all ranks, in rank order."""
    over, directly = job.axes[name], _directly(x, name)
    with Blocking(over, "all_gather", x, (over.size - 1) * x.nbytes, directly):
        if directly:
            job.direct[name].gather_into(out, x, name)
        else:
            _all_gather(out, x, group=over.group)


def scatter_sum_into(out: Tensor, x: Tensor, name: str) -> None:
    """out (rows / n, ...) = this rank's rows of the sum over ranks."""
    over, directly = job.axes[name], _directly(x, name)
    with Blocking(over, "reduce_scatter", x, (over.size - 1) * out.nbytes, directly):
        if directly:
            job.direct[name].scatter_sum_into(out, x, name)
        elif not scattered_by_host(out, x, name):
            _reduce_scatter(out, x, group=over.group)


def scattered_by_host(out: Tensor, x: Tensor, name: str) -> bool:
    """Reduce-scatter by our own transfers, uncounted, where gloo would send every row twice; else return False."""
    if x.device.type != "cpu" or "gloo" not in dist.get_backend(job.axes[name].group):
        return False
    transfers.scatter_sum(out, x, name)
    return True


def exchange_blocks(x: Tensor, name: str) -> Tensor:
    """x (n, ...) has a block for every rank; return the blocks that all ranks had for this one."""
    over, out = job.axes[name], torch.empty_like(x, memory_format=torch.contiguous_format)
    with Blocking(over, "all_to_all", x, (over.size - 1) / over.size * x.nbytes):
        dist.all_to_all_single(out, x.contiguous(), group=over.group)
    return out


def exchange_runs(x: Tensor, sent: list[int], received: list[int], dimension: str) -> Tensor:
    """Exchange runs of elements: x has a run for every rank along a dimension of a DTensor's mesh.

    The result has the runs of all ranks for this one. Traffic over FSDP's ranks, which may include cp, counts as
    dp_shard's, like all of FSDP's traffic.
    """
    name = AXIS_OF.get(dimension, dimension)
    over, counted = job.axes[name], "dp_shard" if name == "fsdp" else name
    on_host, size = runs_on_host(over.group, x.device), (sum(sent) - sent[over.rank]) * x.element_size()
    source = x.cpu() if on_host else x  # gloo's all-to-all does not accept GPU tensors
    out = source.new_empty(sum(received))
    with Observed(counted, "all_to_all", f"all_to_all over {counted} of parts of matrices", size, on_host):
        dist.all_to_all_single(out, source, received, sent, group=over.group)
    return out.to(x.device)


def sum_in_place(x: Tensor, name: str) -> Tensor:
    return _reduce_in_place(x, name, dist.ReduceOp.SUM)


def max_in_place(x: Tensor, name: str) -> Tensor:
    return _reduce_in_place(x, name, dist.ReduceOp.MAX)


def _reduce_in_place(x: Tensor, name: str, how: Any) -> Tensor:
    over, directly = job.axes[name], _directly(x, name)
    with Blocking(over, "all_reduce", x, 2 * (over.size - 1) / over.size * x.nbytes, directly):
        if directly:
            job.direct[name].reduce_in_place(x, name, largest=how == dist.ReduceOp.MAX)
        else:
            dist.all_reduce(x, how, group=over.group)
    return x


def start_sum(x: Tensor, name: str) -> Started:
    """Start to sum `x` in place over an axis."""
    over = job.axes[name]
    sent, on_host = 2 * (over.size - 1) / over.size * x.nbytes, runs_on_host(over.group, x.device)
    call = Observed(name, "all_reduce", described("all_reduce", name, x), sent, on_host, background=True)
    start = now()
    work = dist.all_reduce(x, group=over.group, async_op=True)
    assert work is not None
    return Started(start, work, call)


def start_gather(out: Tensor, x: Tensor, name: str) -> Started:
    """Start to all-gather the rows of all ranks into `out`, in rank order."""
    return _start("all_gather", _all_gather, out, x, name, axis_size(name) - 1)


def start_exchange(out: Tensor, x: Tensor, name: str) -> Started:
    """Start `exchange_blocks` of x (n, ...) into `out`."""
    return _start("all_to_all", dist.all_to_all_single, out, x, name, (axis_size(name) - 1) / axis_size(name))


def _start(what: str, issue: Callable[..., Any], out: Tensor, x: Tensor, name: str, times: float) -> Started:
    """Issue a collective that sends `times` the bytes of `x`, and let it run in the background."""
    over = job.axes[name]
    on_host = runs_on_host(over.group, x.device)
    call = Observed(name, what, described(what, name, x), times * x.nbytes, on_host, background=True)
    start = now()
    return Started(start, issue(out, x, group=over.group, async_op=True), call)


def sum_over_group(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Sum over a group from a DTensor's mesh, None for all ranks; the bytes count for the group's axis."""
    if group is None:
        return sum_in_place(x, "world") if "world" in job.axes else x
    return sum_in_place(x, next(over.name for over in job.axes.values() if over.group is group))


def _directly(x: Tensor, name: str) -> bool:
    return name in job.direct and x.is_cuda


# Newer releases of torch rename these calls and warn about the old names.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


Run = Callable[[Tensor, str], Tensor]  # (tensor, name of an axis) -> tensor


class RowOp:
    """A collective with a gradient: an autograd function in eager code, a custom op in compiled code.

    The op stays whole in the graph, and the counters see each of its runs; in eager code it would cost 60 us per call.
    `run` executes the collective, and `fake` returns a result of the same shape. A custom op must not return its input:
    if `run` does, `compiled` replaces it there.
    """

    def __init__(self, name: str, run: Run, fake: Run, compiled: Run | None = None) -> None:
        schema = "(Tensor x, str axis) -> Tensor"
        self.name, self.run = name, run
        self.op = torch.library.custom_op(f"shardline::{name}", compiled or run, mutates_args=(), schema=schema)
        self.op.register_fake(fake)

    def differentiate(self, eager: Run, compiled: Run) -> None:
        """Register functions that compute the gradient of the input from the gradient of the result."""
        run = self.run

        def keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
            ctx.axis = inputs[1]

        class RowFunction(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor, axis: str) -> Tensor:
                ctx.axis = axis
                return run(x, axis)

            @staticmethod
            def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
                return eager(gradient, ctx.axis), None

        RowFunction.__name__ = self.name
        self.function = RowFunction
        self.op.register_autograd(lambda ctx, g: (compiled(g, ctx.axis), None), setup_context=keep)

    def __call__(self, x: Tensor, axis: str) -> Tensor:
        out: Tensor = self.op(x, axis) if torch.compiler.is_compiling() else self.function.apply(x, axis)
        return out


def gather_rows(x: Tensor, name: str) -> Tensor:
    out = _gathered(x, name)
    gather_into(out, x.contiguous(), name)
    return out


def scatter_rows(x: Tensor, name: str) -> Tensor:
    out = _scattered(x, name)
    scatter_sum_into(out, x.contiguous(), name)
    return out


def own_rows(x: Tensor, name: str) -> Tensor:
    """(n t, ...) -> (t, ...): this rank's rows of a tensor that every rank has whole."""
    over = job.axes[name]
    return x.chunk(over.size)[over.rank]


def _sum_rows(x: Tensor, name: str) -> Tensor:
    return sum_in_place(x.clone(memory_format=torch.contiguous_format), name)


def _gathered(x: Tensor, name: str) -> Tensor:
    return x.new_empty(job.axes[name].size * x.shape[0], *x.shape[1:])


def _scattered(x: Tensor, name: str) -> Tensor:
    return x.new_empty(x.shape[0] // job.axes[name].size, *x.shape[1:])


def _same_shape(x: Tensor, name: str) -> Tensor:
    return x.new_empty(x.shape)


def _clone(x: Tensor, name: str) -> Tensor:
    return x.clone()


# (t, ...) -> (n t, ...): the rows of all ranks. Backward: this rank's rows of the sum of the gradients.
all_gather = RowOp("all_gather", gather_rows, _gathered)
# (n t, ...) -> (t, ...): this rank's rows of the sum. Backward: the gradient rows of all ranks.
reduce_scatter = RowOp("reduce_scatter", scatter_rows, _scattered)
# The sum over ranks, on every rank. Backward: the gradient unchanged, as every rank has all of it.
all_reduce = RowOp("all_reduce", _sum_rows, _same_shape)
# x itself, before every rank does its own part of the work. Backward: the sum of the gradients.
copy = RowOp("copy", lambda x, name: x.view_as(x), lambda x, name: torch.empty_like(x), compiled=_clone)
# x (n, ...) has a block for every rank; the result has the blocks of all ranks for this one. Backward: the same.
all_to_all = RowOp("all_to_all", exchange_blocks, _same_shape)
# (n t, ...), which every rank has whole -> (t, ...): this rank's rows. Backward: the rows of all ranks.
split = RowOp("split", lambda x, name: own_rows(x, name).clone(), _scattered)
# (t, ...) -> (n t, ...): the rows of all ranks, which then all do the same work. Backward: this rank's rows.
join = RowOp("join", gather_rows, _gathered)

all_gather.differentiate(scatter_rows, reduce_scatter.op)
reduce_scatter.differentiate(gather_rows, all_gather.op)
all_reduce.differentiate(lambda gradient, name: gradient, _clone)
copy.differentiate(_sum_rows, all_reduce.op)
all_to_all.differentiate(exchange_blocks, all_to_all.op)
split.differentiate(gather_rows, join.op)
join.differentiate(own_rows, split.op)
