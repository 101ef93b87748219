"""Judges the readings: a finding for each topic, with a remedy if something is wrong.

error     a run would break, or start without something that it needs
warning   a run works, but slower or with a risk
ok        what was found
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from shardline.tools.doctor.gpus import worst_pairs
from shardline.tools.doctor.readings import Examination, GPUState, HostState, Rate, StorageState
from shardline.words import counted, listed, roughly, sized

Level = Literal["ok", "warning", "error"]
PYTHON, TORCH = ((3, 11), (3, 14)), ((2, 11), (2, 15))  # at least, and below
LEAST_FILES, FILES_OF_RANK = 1024, 16  # descriptors: a comfortable limit; needed per rank for connections
LEAST_SHARED = 32 * 2**20  # bytes of /dev/shm for each rank that NCCL connects with others
USUAL_SHARED = 2**30
SKEW_SECONDS = 1.0
SLOW_WRITE, SLOW_SYNC = 100e6, 0.1  # bytes/s, seconds: below and above these, saves take long
LEAST_MEMORY = 2 * 2**30  # bytes for Python, torch and a small model
BUSY_MEMORY = 2**30  # bytes of a GPU's memory used by others
SHARE = 0.7  # of the rate that a device should reach
BEHIND = 0.9  # of the median rate of equal devices


@dataclass(frozen=True)
class Finding:
    level: Level
    topic: str
    text: str
    remedy: str = ""


Findings = Iterator[Finding]


def findings(seen: Examination) -> list[Finding]:
    """Return the findings; equal findings of several machines appear once."""
    found: dict[Finding, None] = {}
    for rule in HOST_RULES:
        for host in seen.hosts:
            found |= dict.fromkeys(rule(host, seen))
    for other in JOB_RULES:
        found |= dict.fromkeys(other(seen))
    return list(found)


def _version(text: str | None) -> tuple[int, int]:
    major, minor, *_ = (text or "0.0").split(".")
    return int(major), int(minor)


# ---- each machine ----------------------------------------------------------------------------------------------------


def _versions(host: HostState, seen: Examination) -> Findings:
    had = {name: text for name, text in host.versions.items() if text}
    yield Finding("ok", "versions", ", ".join(f"{name} {text}" for name, text in had.items()))
    for name, (low, high) in (("python", PYTHON), ("torch", TORCH)):
        if not low <= _version(host.versions.get(name)) < high:
            span = f"{low[0]}.{low[1]} to {high[0]}.{high[1] - 1}"
            text = f"{host.host}: {name} {host.versions.get(name)} is not supported"
            yield Finding("error", "versions", text, f"install {name} {span}")


def _devices(host: HostState, seen: Examination) -> Findings:
    if host.cards == 0 and not host.gpus:
        yield Finding("ok", "devices", "no GPU: runs compute on the CPU, with gloo")
    elif host.hidden:
        yield Finding(
            "ok", "devices", f"{counted(host.cards, 'GPU')}, hidden by CUDA_VISIBLE_DEVICES: the CPU computes"
        )
    elif host.cuda_problem:
        text = f"{host.host}: {counted(host.cards, 'GPU')} that cannot be used: {host.cuda_problem}"
        driver = host.versions.get("driver") or "unknown"
        remedy = (
            f"install a CUDA build of torch that driver {driver} supports, or set CUDA_VISIBLE_DEVICES= to use the CPU"
        )
        yield Finding("error", "devices", text, remedy)
    elif host.gpus:
        names = listed(sorted({gpu.name for gpu in host.gpus}))
        yield Finding("ok", "devices", f"{host.host}: {len(host.gpus)} x {names}")
        for number, gpu in enumerate(host.gpus):
            yield from _gpu(f"{host.host}: GPU {number}", gpu)


def _gpu(where: str, gpu: GPUState) -> Findings:
    if gpu.uncorrected_errors:
        text = f"{where} has had {counted(gpu.uncorrected_errors, 'uncorrected memory error')}"
        yield Finding("error", "devices", text, "drain the machine and reset the GPU: nvidia-smi --gpu-reset")
    if gpu.slowed:
        text = f"{where} is slowed down by its temperature or its power supply"
        yield Finding("warning", "devices", text, "check cooling and power: nvidia-smi -q -d PERFORMANCE")
    if gpu.link_width and gpu.link_width_most and gpu.link_width < gpu.link_width_most:
        text = f"{where} uses {gpu.link_width} of {gpu.link_width_most} PCIe lanes"
        yield Finding("warning", "devices", text, "reseat the card, or check the slot and its riser")
    if gpu.memory_used is not None and gpu.memory_used > BUSY_MEMORY:
        text = f"{where}: other programs hold {roughly(gpu.memory_used)} of its memory"
        yield Finding("warning", "devices", text, "end them (nvidia-smi shows their pids)")


def _links(host: HostState, seen: Examination) -> Findings:
    if len(host.gpus) < 2:
        return
    closed = worst_pairs(host.peers, True)
    if closed:
        text = f"{host.host}: GPUs {listed(closed)} cannot access each other's memory"
        remedy = "switch off ACS in the BIOS, and give a container all GPUs; without it symmetric memory is not used"
        yield Finding("warning", "peer access", text, remedy)
    else:
        yield Finding("ok", "peer access", f"{host.host}: every GPU can access the memory of every other")
    by_link = [[way.startswith("NV") or way == "X" for way in row] for row in host.paths]
    others = worst_pairs(by_link, True)
    if not host.paths:
        yield Finding("ok", "NVLink", f"{host.host}: unknown to nvidia-smi")
    elif others:
        ways = sorted({way for row in host.paths for way in row if not way.startswith("NV") and way != "X"})
        text = f"{host.host}: GPUs {listed(others)} are connected by {listed(ways)} instead of NVLink"
        yield Finding("warning", "NVLink", text, "keep tensor_parallel_degree within GPUs that share NVLink")
    else:
        yield Finding("ok", "NVLink", f"{host.host}: between all GPUs ({host.paths[0][1]})")


def _transport(host: HostState, seen: Examination) -> Findings:
    if not host.gloo:
        yield Finding("error", "gloo", f"{host.host}: this torch has no gloo", "install torch from PyPI or pytorch.org")
    elif not host.interface:
        text = f"{host.host}: no network interface leads to the other ranks"
        yield Finding("error", "gloo", text, "name one: GLOO_SOCKET_IFNAME=eth0")
    else:
        met = f": {counted(len(seen.ranks), 'rank')} connected" if seen.job else ""
        yield Finding("ok", "gloo", f"over {host.interface}{met}")
    if host.gpus:
        if host.nccl:
            yield Finding("ok", "NCCL", host.versions.get("nccl") or "available")
        else:
            level: Level = "error" if len(seen.ranks) > 1 else "warning"
            text = f"{host.host}: this torch has no NCCL, which ranks with GPUs need"
            yield Finding(level, "NCCL", text, "install torch with CUDA from PyPI or pytorch.org")


def _shared_memory(host: HostState, seen: Examination) -> Findings:
    topic, remedy = "shared memory", "docker run --shm-size=8g, or mount -o remount,size=8G /dev/shm"
    if host.shared_memory is None:
        yield Finding("warning", topic, f"{host.host}: there is no /dev/shm", "mount a tmpfs there")
        return
    size, free = host.shared_memory
    connected = seen.ranks_on(host.host) if host.gpus else 0
    if connected > 1 and free < LEAST_SHARED * connected:
        text = f"{host.host}: {roughly(free)} free in /dev/shm, too little for NCCL between {connected} ranks"
        yield Finding("error", topic, text, remedy)
    elif size < USUAL_SHARED and host.gpus:
        yield Finding("warning", topic, f"{host.host}: /dev/shm has only {roughly(size)}", remedy)
    else:
        yield Finding("ok", topic, f"{roughly(free)} of {roughly(size)} free")


def _limits(host: HostState, seen: Examination) -> Findings:
    needed = 64 + FILES_OF_RANK * len(seen.ranks)
    remedy = f"ulimit -n {max(65536, needed)}, or LimitNOFILE= of the service"
    text = f"{host.host}: at most {host.open_files} open files"
    if 0 <= host.open_files < needed:
        yield Finding("error", "limits", f"{text}, and {counted(len(seen.ranks), 'rank')} need about {needed}", remedy)
    elif 0 <= host.open_files < LEAST_FILES:
        yield Finding("warning", "limits", text, remedy)
    else:
        yield Finding("ok", "limits", f"open files {_limit(host.open_files)}, processes {_limit(host.processes)}")
    if host.infiniband and host.locked_memory >= 0:
        text = f"{host.host}: with InfiniBand, a process may lock only {roughly(host.locked_memory)} of memory"
        yield Finding("warning", "limits", text, "ulimit -l unlimited (LimitMEMLOCK=infinity of the service)")


def _limit(number: int) -> str:
    return "unlimited" if number < 0 else f"{number:,}"


def _cores(host: HostState, seen: Examination) -> Findings:
    ranks = max(1, seen.ranks_on(host.host))
    usable = min(host.cores, host.cpu_quota or host.cores)
    quota = "" if host.cpu_quota is None else f", {host.cpu_quota:g} by the control group"
    text = f"{host.host}: {counted(ranks, 'rank')} on {counted(host.cores, 'core')}{quota}"
    if usable < ranks:
        remedy = "start fewer ranks, or give the job more cores (srun --cpus-per-task, docker run --cpus)"
        yield Finding("warning", "cores", f"{text}: {usable / ranks:.2g} per rank", remedy)
    elif host.cpu_quota is not None and host.cpu_quota < host.cores:
        remedy = f"set OMP_NUM_THREADS={max(1, int(usable / ranks))}: torch starts a thread for each core that it sees"
        yield Finding("warning", "cores", text, remedy)
    else:
        yield Finding("ok", "cores", text)


def _memory(host: HostState, seen: Examination) -> Findings:
    if host.memory_left is None:
        return
    ranks = max(1, seen.ranks_on(host.host))
    text = f"{host.host}: {roughly(host.memory_left)} for new programs"
    if host.memory_left < LEAST_MEMORY * ranks:
        text += f", little for {counted(ranks, 'rank')}"
        yield Finding("warning", "memory", text, "end other programs, or raise the limit of the control group")
    else:
        yield Finding("ok", "memory", text)


# ---- the job ---------------------------------------------------------------------------------------------------------


def _same_versions(seen: Examination) -> Findings:
    for name in ("shardline", "torch", "cuda", "nccl"):
        by_version: dict[str | None, list[str]] = {}
        for host in seen.hosts:
            by_version.setdefault(host.versions.get(name), []).append(host.host)
        if len(by_version) > 1:
            shown = "; ".join(f"{version} on {listed(hosts)}" for version, hosts in by_version.items())
            text = f"machines differ in {name}: {shown}"
            yield Finding("error", "versions", text, "start every machine from the same environment or image")


def _clocks(seen: Examination) -> Findings:
    machines = {rank.host: rank for rank in seen.ranks}
    if len(machines) < 2:
        return
    worst = max(machines.values(), key=lambda rank: abs(rank.clock_ahead))
    text = f"{worst.host} is {worst.clock_ahead:+.6f} s off the first machine (± {worst.clock_error:.6f} s)"
    if abs(worst.clock_ahead) - worst.clock_error > SKEW_SECONDS:
        remedy = "synchronize clocks (chrony, ntpd): logs, reports and time limits would not agree"
        yield Finding("warning", "clocks", text, remedy)
    else:
        yield Finding("ok", "clocks", f"largest difference: {text}")


def _storage(seen: Examination) -> Findings:
    for host, place in zip(seen.hosts, seen.storage, strict=False):
        where = f"{host.host}: {place.path}"
        if place.problem:
            yield Finding("error", "storage", f"{where}: {place.problem}", "set --job.dump_folder to a writable folder")
            continue
        speed = f"writes {place.write / 1e6:,.0f} MB/s, reads {place.read / 1e6:,.0f} MB/s"
        text = f"{where} ({place.kind or 'unknown'}) {speed}, a small file is safe in {place.sync_seconds * 1e3:.1f} ms"
        if place.write < SLOW_WRITE or place.sync_seconds > SLOW_SYNC:
            remedy = "save less often or in the background (checkpoint.async_mode), or to a faster disk"
            yield Finding("warning", "storage", text, remedy)
        else:
            yield Finding("ok", "storage", text)
        yield _locking(where, place)


def _locking(where: str, place: StorageState) -> Finding:
    if not place.lock_problem:
        return Finding("ok", "locking", f"{where} keeps a second run out")
    text = f"{where} has no locks ({place.lock_problem}): a heartbeat keeps other runs out, but only after seconds"
    return Finding("warning", "locking", text, "mount it with locks (nfs: without nolock; lustre: with flock)")


def _free_space(seen: Examination) -> Findings:
    need = seen.need
    for host, place in list(zip(seen.hosts, seen.storage, strict=False))[:1] if need else ():
        assert need is not None
        if not need.enabled or place.problem:
            continue
        kept = need.keep or 1
        most = need.size * (kept + 1)  # a new one is complete before the oldest is removed
        text = f"{host.host}: {sized(place.free)} free, a checkpoint is {roughly(need.size)}"
        remedy = "keep fewer (checkpoint.keep_latest_k), or set checkpoint.folder to another disk"
        if place.free < need.size:
            yield Finding("error", "free space", text, remedy)
        elif place.free < most:
            yield Finding("warning", "free space", f"{text}, {kept} and a new one are {roughly(most)}", remedy)
        else:
            yield Finding("ok", "free space", text)


def _rates(seen: Examination) -> Findings:
    for what in dict.fromkeys(rate.what for rate in seen.rates):
        some = [rate for rate in seen.rates if rate.what == what]
        usual = statistics.median(rate.measured for rate in some)
        for rate in some:
            yield from _rate(rate, usual if len(some) > 1 else None)


def _rate(rate: Rate, usual: float | None) -> Findings:
    where = "" if usual is None else f" (rank {rate.rank})"
    shown = f"{rate.measured:,.3g}" if rate.measured < 1000 else f"{rate.measured:,.0f}"
    text = f"{rate.what}{where}: {shown} {rate.unit}"
    if rate.expected is not None:
        text += f", {rate.measured / rate.expected:.0%} of the {rate.expected:,.0f} that this kind of device reaches"
    if rate.expected is not None and rate.measured < SHARE * rate.expected:
        remedy = "check for other programs, power limits and lost links (nvidia-smi, nvidia-smi nvlink -s)"
        yield Finding("warning", "rates", text, remedy)
    elif usual is not None and rate.measured < BEHIND * usual:
        text += f", and the median of all ranks is {usual:,.3g}"
        yield Finding("warning", "rates", text, "this rank would hold up all others: replace or exclude its device")
    else:
        yield Finding("ok", "rates", text)


HostRule = Callable[[HostState, Examination], Findings]
JobRule = Callable[[Examination], Findings]
HOST_RULES: tuple[HostRule, ...] = (
    *(_versions, _devices, _links, _transport, _shared_memory, _limits, _cores, _memory),
)
JOB_RULES: tuple[JobRule, ...] = (_same_versions, _clocks, _storage, _free_space, _rates)
