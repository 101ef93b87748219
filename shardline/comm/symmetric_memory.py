"""GPU memory that the ranks of an axis share: each rank reads and writes the others' memory directly.

Private APIs of torch (`torch.distributed._symmetric_memory`, `torch.ops.symm_mem`) are used only here and in
tools/bench/torch_fused.py; if they are missing or fail, `unusable` returns the reason and other backends run.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import os
import socket
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardline.comm import collectives
from shardline.comm.job import job
from shardline.comm.observe import Observed, labelled
from shardline.comm.store import ranks_from_environment

SHARED_DEVICE = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
READY, READ = 0, 1  # signals: a rank's rows can be read; they have been read
CHANNELS = 2
ALIGNMENT = 1 << 20
WORD = 4  # bytes of a signal


def unusable(device: torch.device, axis: str = "tp") -> str | None:
    """Return why symmetric memory cannot be used over an axis, None if it can; every rank gets the same answer."""
    if device.type != "cuda":
        return "it needs CUDA"
    return agreed_reason(lambda: _try_out(axis))


def agreed_reason(attempt: Callable[[], None], axis: str = "world") -> str | None:
    """Return why `attempt` failed on some rank of an axis, None if it succeeded on all; every rank gets the same."""
    reason = ""
    try:
        attempt()
    except Exception as error:  # any error of torch, the driver or a compiler means that it cannot be used
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    over = collectives.axis(axis)
    said: list[str] = [""] * over.size
    dist.all_gather_object(said, reason, group=over.group)
    return next((text for text in said if text), None)


def share_a_gpu(ranks: int) -> bool:
    """Whether a host has more ranks than GPUs, as in tests. `ranks` is used if no launcher sets the number."""
    return ranks_from_environment("LOCAL_WORLD_SIZE", ranks) > torch.cuda.device_count()


def _try_out(axis: str) -> None:
    """Share a little memory with the peers of an axis; raise if that is impossible."""
    hosts: list[str] = [""] * collectives.axis_size(axis)
    dist.all_gather_object(hosts, socket.gethostname(), group=collectives.axis(axis).group)
    if len(set(hosts)) > 1:
        raise RuntimeError(f"ranks of one {axis} group are on different hosts")
    if share_a_gpu(collectives.axis_size(axis)) and os.environ.get(SHARED_DEVICE) != "1":
        raise RuntimeError(f"ranks share a GPU and {SHARED_DEVICE} is not 1")
    region = Region(axis, ALIGNMENT, torch.device("cuda", torch.cuda.current_device()))
    stream = torch.cuda.current_stream()
    for peer in region.peers:
        region.signal(peer, READY, stream)
    for peer in region.peers:
        region.wait(peer, READY, stream)
    torch.cuda.synchronize()


# ---- words of device memory ------------------------------------------------------------------------------------------
#
# A stream can write a word of device memory, or wait for one, in stream order and without a kernel. PyTorch cannot wait
# like this, so the driver's functions are called (cuStreamWriteValue32, cuStreamWaitValue32). The word may lie in the
# mapped memory of another GPU: one rank's stream can then wait until another rank's stream has reached some point. A
# stream that has seen the word also sees everything that the writer's stream wrote before it.


@functools.cache
def _driver() -> Any:
    library = ctypes.CDLL("libcuda.so.1")
    for name in ("cuStreamWriteValue32_v2", "cuStreamWaitValue32_v2"):
        function = getattr(library, name)
        function.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint]
        function.restype = ctypes.c_int
    return library


def write_word(stream: torch.cuda.Stream, address: int, value: int) -> None:
    _check(_driver().cuStreamWriteValue32_v2(stream.cuda_stream, address, value, 0), "write")


def wait_for_word(stream: torch.cuda.Stream, address: int, value: int) -> None:
    """Hold the stream until the word has that value."""
    equal = 1
    _check(_driver().cuStreamWaitValue32_v2(stream.cuda_stream, address, value, equal), "wait for")


def _check(code: int, what: str) -> None:
    if code:
        raise RuntimeError(f"the driver cannot {what} a word of memory in a stream (error {code})")


# ---- shared memory ---------------------------------------------------------------------------------------------------


class Region:
    """Memory of the same size on every rank of an axis, which all of them can access, and signals between the ranks.

    A signal is a word in the memory of the waiting rank: another rank's stream sets it, and its own stream clears it.
    Callers ensure that it is cleared before it is set again.
    """

    def __init__(self, axis: str, size: int, device: torch.device) -> None:
        import torch.distributed._symmetric_memory as memory

        over = collectives.axis(axis)
        self.rank, self.ranks, self.size = over.rank, over.size, size

        def take() -> None:
            self.memory = memory.empty(size + CHANNELS * over.size * WORD, dtype=torch.uint8, device=device)
            self.memory.zero_()

        missing = agreed_reason(take, axis)  # before the rendezvous, where torch would wait for a rank without memory
        if missing is not None:
            raise RuntimeError(f"no {size / 2**20:.0f} MiB for ranks to share: {missing}")
        torch.cuda.synchronize(device)
        self.shared = memory.rendezvous(self.memory, over.group.group_name)
        places = [self.shared.buffer_ptrs[rank] for rank in range(over.size)]
        self.addresses = torch.tensor(places, device=device)
        self.peers = [(over.rank - distance) % over.size for distance in range(1, over.size)]
        self.signals = [place + size for place in places]
        self._views: dict[Any, Tensor] = {}
        dist.barrier(over.group)  # no rank signals before all words are zero

    def of(self, rank: int, shape: Sequence[int], dtype: torch.dtype, offset: int = 0) -> Tensor:
        """Return a view of a rank's memory, `offset` bytes from its start."""
        key = (rank, shape, dtype, offset)
        view = self._views.get(key)
        if view is None:
            view = self.shared.get_buffer(rank, list(shape), dtype, offset // dtype.itemsize)
            self._views[key] = view
        return view

    def signal(self, rank: int, channel: int, stream: torch.cuda.Stream) -> None:
        write_word(stream, self._word(rank, channel, self.rank), 1)

    def wait(self, rank: int, channel: int, stream: torch.cuda.Stream) -> None:
        """Hold the stream until that rank has signalled, then clear the signal."""
        word = self._word(self.rank, channel, rank)
        wait_for_word(stream, word, 1)
        write_word(stream, word, 0)

    def _word(self, rank: int, channel: int, source: int) -> int:
        place: int = self.signals[rank] + (channel * self.ranks + source) * WORD
        return place


class Space:
    """The regions of one axis, which grow on demand, and streams for copies and products."""

    def __init__(self, axis: str, device: torch.device) -> None:
        self.axis, self.device = axis, device
        self.side = torch.cuda.Stream(device, priority=-1)  # for copies; its small kernels must not queue up
        self.second = torch.cuda.Stream(device)  # for products
        self._forked, self._ended = torch.cuda.Event(), torch.cuda.Event()
        self.regions: dict[str, Region] = {}
        self.state: Any = None  # of the fused kernels

    def fork(self) -> None:
        """Make the side stream wait for the work in the current stream."""
        self._forked.record()
        self.side.wait_event(self._forked)

    def join(self) -> None:
        """Make the current stream wait for the side stream."""
        self._ended.record(self.side)
        torch.cuda.current_stream(self.device).wait_event(self._ended)

    @property
    def bytes(self) -> int:
        return sum(region.size for region in self.regions.values())

    def region(self, purpose: str, size: int, credit: bool = False) -> Region:
        """Return a region of at least `size` bytes for a purpose; every rank must request the same size.

        With `credit`, each rank may write once before any READ signal.
        """
        known = self.regions.get(purpose)
        if known is not None and known.size >= size:
            return known
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("shared memory cannot grow in a CUDA graph: run the products once beforehand")
        del known
        self.keep(self.regions.keys() - {purpose})
        made = Region(self.axis, math.ceil(size / ALIGNMENT) * ALIGNMENT, self.device)
        if credit:
            for peer in made.peers:
                made.signal(peer, READ, torch.cuda.current_stream(self.device))
        self.regions[purpose] = made
        return made

    def keep(self, purposes: Collection[str]) -> None:
        unused = self.regions.keys() - set(purposes)
        if unused:
            torch.cuda.synchronize(self.device)
            dist.barrier(collectives.axis(self.axis).group)  # no rank reads there any more
        for purpose in unused:
            del self.regions[purpose]


def space(axis: str, device: torch.device) -> Space:
    name = collectives.axis(axis).group.group_name
    if name not in job.spaces:
        job.spaces[name] = Space(axis, device)
    return job.spaces[name]


def torch_workspace(axis: str, size: int) -> Any:
    """Return the workspace of PyTorch's fused operations over an axis: at least `size` bytes per rank."""
    import torch.distributed._symmetric_memory as memory

    name = collectives.axis(axis).group.group_name
    job.workspaces[name] = max(job.workspaces.get(name, 0), size)
    return memory.get_symm_mem_workspace(name, min_size=size)


def shared_gib() -> float:
    """Return the GiB of memory shared with peers, which the allocator of ordinary tensors does not count."""
    return (sum(one.bytes for one in job.spaces.values()) + sum(job.workspaces.values())) / 2**30


def keep(purposes: Collection[str]) -> None:
    """Free all regions for other purposes; all ranks call it together."""
    for one in job.spaces.values():
        one.keep(purposes)


def start_anew() -> None:
    """Free the shared memory after a failure midway: a flag may be set that nothing clears.

    All ranks call it together.
    """
    for one in job.spaces.values():
        one.keep(())
        one.state = None


def release() -> None:
    """Free the shared memory at the end of a run."""
    job.spaces.clear()
    while job.workspaces:
        import torch.distributed._symmetric_memory as memory

        name, _ = job.workspaces.popitem()
        getattr(memory, "_group_name_to_workspace_tensor", {}).pop(name, None)


def pull(x: Tensor, full: Tensor, over: Space, arrived: Callable[[int], None]) -> None:
    """Start to copy the rows of all ranks into `full` on the side stream, in the order of use: the previous rank's rows
    first, as parallel/tensor/tile_order.py multiplies them.

    `arrived` is called in that stream after the copy of each other rank's rows. `full` is complete once the caller's
    stream has waited for the side stream.
    """
    region = over.region("gather", x.nbytes, credit=True)
    blocks, side = full.view(region.ranks, *x.shape), over.side
    over.fork()
    with torch.cuda.stream(side):
        for peer in region.peers:
            region.wait(peer, READ, side)
        region.of(region.rank, x.shape, x.dtype).copy_(x)
        for peer in region.peers:
            region.signal(peer, READY, side)
        for turn in range(1, region.ranks):
            source = (region.rank - turn) % region.ranks
            region.wait(source, READY, side)
            blocks[source].copy_(region.of(source, x.shape, x.dtype))
            arrived(source)
            region.signal(source, READ, side)
        blocks[region.rank].copy_(x)


class Direct:
    """Collectives by copies between GPU memories, for ranks that share a GPU, where NCCL does not run."""

    regions = ("gather", "sum")

    def gather_into(self, out: Tensor, x: Tensor, axis: str) -> None:
        over = space(axis, x.device)
        pull(x.contiguous(), out, over, lambda source: None)
        over.join()

    def scatter_sum_into(self, out: Tensor, x: Tensor, axis: str) -> None:
        with self._shared(x, axis) as region:
            first = region.rank * out.numel() * x.element_size()
            add_up([region.of(rank, out.shape, x.dtype, first) for rank in range(region.ranks)], out)

    def reduce_in_place(self, x: Tensor, axis: str, largest: bool) -> None:
        """Sum x over ranks, or take the maximum if `largest`; every rank adds in the same order."""
        with self._shared(x, axis) as region:
            parts = [region.of(rank, x.shape, x.dtype) for rank in range(region.ranks)]
            if largest:
                x.copy_(functools.reduce(torch.maximum, parts))
            else:
                add_up(parts, x)

    @contextlib.contextmanager
    def _shared(self, x: Tensor, axis: str) -> Iterator[Region]:
        """Inside this context, every rank can read x of all ranks; no rank writes there again before all have read."""
        region = space(axis, x.device).region("sum", x.nbytes)
        region.of(region.rank, x.shape, x.dtype).copy_(x)
        region.shared.barrier(channel=0)
        yield region
        region.shared.barrier(channel=0)


def add_up(parts: Sequence[Tensor], out: Tensor) -> None:
    """out = the sum of parts, added in float32 if their type is narrower."""
    if len(parts) == 2:
        torch.add(parts[0], parts[1], out=out)
        return
    wide = torch.promote_types(out.dtype, torch.float32) if out.is_floating_point() else out.dtype
    total = parts[0].to(wide, copy=True)
    for part in parts[1:]:
        total += part
    out.copy_(total)


@contextlib.contextmanager
def inside_product(axis: str, what: str, x: Tensor, elements: int) -> Iterator[None]:
    """Use around a product that sends `elements` of x's type to each other rank.

    The watchdog sees this rank in the product until its device has finished it.
    """
    kind = str(x.dtype).removeprefix("torch.")
    tag = f"{what} over {axis}, inside a product of {tuple(x.shape)} {kind}"
    sent = (collectives.axis_size(axis) - 1) * elements * x.element_size()
    with Observed(axis, what, tag, sent, on_host=False), labelled(axis, what, copies_only=True):
        yield
