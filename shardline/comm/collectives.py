"""Every collective a rank issues, named after the mesh axis it runs over, and counted.

Bytes are those a rank sends, by the ring algorithms' convention for n ranks and a whole tensor of `size` bytes:

    all_gather, reduce_scatter, all_to_all   (n - 1) / n x size        all_reduce   2 (n - 1) / n x size

`all_gather`, `reduce_scatter`, `copy` and `all_reduce` are differentiable and work on rows (dimension 0). In a compiled
function they are custom ops, so that the graph keeps them whole and the counters see every run; in eager code they are
plain autograd functions, which cost less.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from shardline.comm import watchdog
from shardline.comm.hidden_time import clock
from shardline.comm.spans import Running, labelled, now, runs_on_host, spans
from shardline.models import dtensor as local


@dataclass(frozen=True)
class Axis:
    """The ranks of one mesh dimension that this rank talks to."""

    name: str
    group: dist.ProcessGroup
    size: int
    rank: int


class Traffic:
    """Bytes sent and calls made per axis since the last `take`."""

    def __init__(self) -> None:
        self.bytes: dict[str, float] = defaultdict(float)
        self.calls: dict[str, int] = defaultdict(int)

    def add(self, axis: str, size: float) -> None:
        self.bytes[axis] += size
        self.calls[axis] += 1

    def planned(self, axis: str, kind: str, size: float) -> None:
        """An operation without values says what it would send; only a dry run listens."""

    @contextlib.contextmanager
    def uncounted(self) -> Iterator[None]:
        """Leave out what is sent meanwhile: a look at the run, not a part of it."""
        kept = dict(self.bytes), dict(self.calls)
        yield
        self.bytes.clear()
        self.calls.clear()
        self.bytes.update(kept[0])
        self.calls.update(kept[1])

    def take(self) -> dict[str, int]:
        taken = {axis: round(size) for axis, size in self.bytes.items()}
        self.bytes.clear()
        self.calls.clear()
        return taken


traffic = Traffic()
# Axis -> who gathers, scatters and sums tensors of a GPU there instead of the process group (see symmetric_memory.py)
direct: dict[str, Any] = {}
# Scatters sums of host memory (see transfers.py): gloo's own sends every row twice
host_scatter: Callable[[Tensor, Tensor, str], None] | None = None
_axes: dict[str, Axis] = {}
_joined: set[str] = set()  # axes whose ranks have met in a collective on a device


def register_axes(axes: dict[str, Axis]) -> None:
    """Called by the mesh; an op names its axis, so that compiled graphs hold a string and no process group."""
    _axes.clear()
    direct.clear()
    _joined.clear()
    _axes.update(axes)
    traffic.take()
    members = {name: dist.get_process_group_ranks(over.group) for name, over in axes.items()}
    if "fsdp" in members:
        members["dp_shard"] = members["fsdp"]  # FSDP's collectives have that name, and run over cp as well
    watchdog.set_members(members)


def axis(name: str) -> Axis:
    return _axes[name]


def axes() -> dict[str, Axis]:
    return dict(_axes)


def join_on_device(name: str, device: torch.device) -> None:
    """Before the first transfer between some ranks of an axis: NCCL joins all of them with their first operation."""
    over = _axes[name]
    if name not in _joined and not runs_on_host(over.group, device):
        dist.all_reduce(torch.zeros(1, device=device), group=over.group)
    _joined.add(name)


def groups() -> list[dist.ProcessGroup]:
    return [over.group for over in _axes.values()]


def axis_size(name: str) -> int:
    return _axes[name].size if name in _axes else 1


# Plain collectives: fill `out` or change `x` in place, return when the result may be used


def gather_into(out: Tensor, x: Tensor, name: str) -> None:
    """out (n * rows, ...) = the rows of all ranks, in their order."""
    over = _axes[name]
    directly = name in direct and x.is_cuda
    with _issued(name, "all_gather", x, (over.size - 1) * _bytes(x), directly):
        if directly:
            direct[name].gather_into(out, x, name)
        else:
            _all_gather(out, x, group=over.group)


def scatter_sum_into(out: Tensor, x: Tensor, name: str) -> None:
    """out (rows / n, ...) = this rank's rows of the sum over ranks."""
    over = _axes[name]
    directly = name in direct and x.is_cuda
    with _issued(name, "reduce_scatter", x, (over.size - 1) * _bytes(out), directly):
        if directly:
            direct[name].scatter_sum_into(out, x, name)
        elif not scattered_by_host(out, x, name):
            _reduce_scatter(out, x, group=over.group)


def scattered_by_host(out: Tensor, x: Tensor, name: str) -> bool:
    """Scatter a sum by transfers of our own, uncounted, where gloo would send every row twice; False elsewhere."""
    if host_scatter is None or x.device.type != "cpu" or "gloo" not in dist.get_backend(_axes[name].group):
        return False
    host_scatter(out, x, name)
    return True


def exchange_blocks(x: Tensor, name: str) -> Tensor:
    """x (n, ...) has a block for every rank; the result the blocks that every rank had for this one."""
    over, out = _axes[name], torch.empty_like(x, memory_format=torch.contiguous_format)
    with _issued(name, "all_to_all", x, (over.size - 1) / over.size * _bytes(x)):
        dist.all_to_all_single(out, x.contiguous(), group=over.group)
    return out


def sum_in_place(x: Tensor, name: str) -> Tensor:
    return _reduce_in_place(x, name, dist.ReduceOp.SUM)


def sum_over_group(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Sum over a group that somebody else's mesh names, None for all ranks; counted under its axis."""
    if group is None:
        return sum_in_place(x, "world") if "world" in _axes else x
    return sum_in_place(x, _name_of(group))


def gather_over_group(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The values of all ranks of a group that a DTensor's mesh names, one rank's after the other's."""
    return gather_rows(x, _name_of(group))


def _name_of(group: dist.ProcessGroup) -> str:
    return next(over.name for over in _axes.values() if over.group is group)


local.gather_over_group = gather_over_group  # models know of no process groups


def max_in_place(x: Tensor, name: str) -> Tensor:
    return _reduce_in_place(x, name, dist.ReduceOp.MAX)


class Started(NamedTuple):
    """A collective that was issued and runs on."""

    work: dist.Work
    name: str
    tag: str
    sequence: int
    running: Running | None = None  # its span, where spans are recorded
    on_device: bool = False

    def wait(self) -> None:
        """Return when the result may be used."""
        if watchdog.current is not None:
            watchdog.current.wait(self.sequence, self.tag, self.name)
        if self.running is None:
            self.work.wait()
        else:
            with spans.waiting(self.name, self.running.what):
                self.work.wait()
            self.running.end()
        if watchdog.current is not None:
            watchdog.current.leave(self.on_device)


def start_sum(x: Tensor, name: str) -> Started:
    """Begin summing `x` in place over an axis."""
    over = _axes[name]
    tag = _issued(name, "all_reduce", x, 2 * (over.size - 1) / over.size * _bytes(x)).tag
    sequence = watchdog.current.issue(tag, name) if watchdog.current is not None else 0
    start = now()
    work = dist.all_reduce(x, group=over.group, async_op=True)
    assert work is not None
    on_host = runs_on_host(over.group, x.device)
    running = Running(work, name, "all_reduce", start) if spans.enabled and on_host else None
    return Started(work, name, tag, sequence, running, on_device=not on_host)


def _reduce_in_place(x: Tensor, name: str, how: Any) -> Tensor:
    over = _axes[name]
    directly = name in direct and x.is_cuda
    with _issued(name, "all_reduce", x, 2 * (over.size - 1) / over.size * _bytes(x), directly):
        if directly:
            direct[name].reduce_in_place(x, name, largest=how == dist.ReduceOp.MAX)
        else:
            dist.all_reduce(x, how, group=over.group)
    return x


class _issued:
    """Counts a collective, and lets the watchdog and the spans know where this rank is while it waits in it."""

    def __init__(self, name: str, what: str, x: Tensor, size: float, directly: bool = False) -> None:
        traffic.add(name, size)
        self.name, self.what, self.device, self.directly = name, what, x.device, directly
        self.start: int | None = None
        self.timed = contextlib.ExitStack()
        self.tag = f"{what} over {name} of {tuple(x.shape)} {str(x.dtype).removeprefix('torch.')}"

    def __enter__(self) -> None:
        if watchdog.current is not None:
            watchdog.current.enter(self.tag, self.name)
        if self.directly:
            self.timed.enter_context(labelled(self.name, self.what))
        elif spans.enabled and runs_on_host(_axes[self.name].group, self.device):
            if self.device.type == "cuda":  # it would wait for the values as well, and that is not communication
                torch.cuda.current_stream(self.device).synchronize()
            self.start = now()
        if clock.axis == self.name:
            self.timed.enter_context(clock.around(self.name))

    def __exit__(self, *error: object) -> None:
        self.timed.close()
        if self.start is not None:
            spans.blocked(self.name, self.what, self.start)
        if watchdog.current is not None:
            on_device = self.device.type == "cuda" and not runs_on_host(_axes[self.name].group, self.device)
            watchdog.current.leave(self.directly or on_device)


def _bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()


# Newer releases have another name for the same call and warn about the old one.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


# Differentiable collectives over rows


def all_gather(x: Tensor, name: str) -> Tensor:
    """(t, ...) -> (n t, ...): the rows of all ranks. Backward: this rank's rows of the sum of the gradients."""
    out: Tensor = _gather_op(x, name) if torch.compiler.is_compiling() else _Gather.apply(x, name)
    return out


def reduce_scatter(x: Tensor, name: str) -> Tensor:
    """(n t, ...) -> (t, ...): this rank's rows of the sum. Backward: the gradient's rows of all ranks."""
    out: Tensor = _scatter_op(x, name) if torch.compiler.is_compiling() else _Scatter.apply(x, name)
    return out


def all_reduce(x: Tensor, name: str) -> Tensor:
    """The sum over ranks on every rank. Backward: the gradient as it is, which every rank has whole."""
    out: Tensor = _sum_op(x, name) if torch.compiler.is_compiling() else _Sum.apply(x, name)
    return out


def copy(x: Tensor, name: str) -> Tensor:
    """x itself, where every rank goes on with its own part of the work. Backward: the sum of the gradients."""
    out: Tensor = _copy_op(x, name) if torch.compiler.is_compiling() else _Copy.apply(x, name)
    return out


def gather_rows(x: Tensor, name: str) -> Tensor:
    out = x.new_empty(_axes[name].size * x.shape[0], *x.shape[1:])
    gather_into(out, x.contiguous(), name)
    return out


def scatter_rows(x: Tensor, name: str) -> Tensor:
    out = x.new_empty(x.shape[0] // _axes[name].size, *x.shape[1:])
    scatter_sum_into(out, x.contiguous(), name)
    return out


def _sum_rows(x: Tensor, name: str) -> Tensor:
    return sum_in_place(x.clone(memory_format=torch.contiguous_format), name)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str) -> Tensor:
        ctx.name = name
        return gather_rows(x, name)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return scatter_rows(gradient, ctx.name), None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str) -> Tensor:
        ctx.name = name
        return scatter_rows(x, name)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gather_rows(gradient, ctx.name), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str) -> Tensor:
        return _sum_rows(x, name)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str) -> Tensor:
        ctx.name = name
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _sum_rows(gradient, ctx.name), None


@torch.library.custom_op("shardline::all_gather", mutates_args=())
def _gather_op(x: Tensor, name: str) -> Tensor:
    return gather_rows(x, name)


@torch.library.custom_op("shardline::reduce_scatter", mutates_args=())
def _scatter_op(x: Tensor, name: str) -> Tensor:
    return scatter_rows(x, name)


@torch.library.custom_op("shardline::all_reduce", mutates_args=())
def _sum_op(x: Tensor, name: str) -> Tensor:
    return _sum_rows(x, name)


@torch.library.custom_op("shardline::copy", mutates_args=())
def _copy_op(x: Tensor, name: str) -> Tensor:
    return x.clone()


@_gather_op.register_fake
def _(x: Tensor, name: str) -> Tensor:
    return x.new_empty(_axes[name].size * x.shape[0], *x.shape[1:])


@_scatter_op.register_fake
def _(x: Tensor, name: str) -> Tensor:
    return x.new_empty(x.shape[0] // _axes[name].size, *x.shape[1:])


@_sum_op.register_fake
def _(x: Tensor, name: str) -> Tensor:
    return x.new_empty(x.shape)


@_copy_op.register_fake
def _(x: Tensor, name: str) -> Tensor:
    return torch.empty_like(x)


def _remember_name(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.name = inputs[1]


_gather_op.register_autograd(lambda ctx, g: (_scatter_op(g, ctx.name), None), setup_context=_remember_name)
_scatter_op.register_autograd(lambda ctx, g: (_gather_op(g, ctx.name), None), setup_context=_remember_name)
_sum_op.register_autograd(lambda ctx, g: (g.clone(), None), setup_context=_remember_name)
_copy_op.register_autograd(lambda ctx, g: (_sum_op(g, ctx.name), None), setup_context=_remember_name)
