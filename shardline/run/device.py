"""The device of a run: its choice, its peak speed, its memory, and the arithmetic that a token costs."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import resource
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shardline.errors import UserError
from shardline.models.dtensor import local
from shardline.models.fused_weights import layer_sizes
from shardline.words import sized

if TYPE_CHECKING:
    from shardline.config.architecture import Architecture

GIB = 1024**3

# Dense (not sparse) peak of bf16 products with float32 accumulation, in TFLOP/s, as the vendors state it.
# The first pattern found in the device's name counts.
PEAK_TFLOPS: tuple[tuple[str, float], ...] = (
    (r"\bGB[23]00\b", 2500.0),
    (r"\bB[23]00\b", 2250.0),
    (r"\bH200 NVL\b", 835.5),
    (r"\bG?H200\b", 989.4),
    (r"\bH100 PCIe\b", 756.0),
    (r"\bH100 NVL\b", 835.5),
    (r"\bH[18]00\b", 989.4),
    (r"\bH20\b", 148.0),
    (r"\bA[18]00\b", 312.0),
    (r"\bA30\b", 165.0),
    (r"\bA40\b", 149.7),
    (r"\bA10\b", 125.0),
    (r"\bRTX A6000\b", 154.8),
    (r"\bL40S\b", 362.1),
    (r"\bL40\b", 181.1),
    (r"\bL4\b", 121.0),
    (r"\bRTX 6000 Ada\b", 364.3),
    (r"\bRTX 5090$", 209.5),
    (r"\bRTX 4090$", 165.2),
    (r"\bRTX 3090$", 71.2),
    (r"\bMI355X\b", 2516.6),
    (r"\bMI350X\b", 2306.9),
    (r"\bMI3(00|25)X\b", 1307.4),
    (r"\bMI250X?\b", 191.5),  # one of the two dies of the package: what torch sees as a device
)
# A slice of a card or a slower namesake has another peak than the card whose name it carries.
NOT_THE_CARD = re.compile(r"\bMIG\b|Laptop|Max-Q")


def device_identity(device: torch.device, rank: int) -> str:
    """A name that ranks on the same device share; on CPU each rank counts as a device of its own."""
    if device.type != "cuda":
        return f"rank {rank}"
    return f"{platform.node()} {torch.cuda.get_device_properties(device).uuid}"


def choose_device() -> torch.device:
    """`cuda:LOCAL_RANK` where CUDA is there, else the CPU; more ranks than GPUs share them in turn."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def device_name(device: torch.device) -> str:
    """The vendor's name of the device, such as `NVIDIA H200`; for a CPU its model name."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = re.findall(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(), re.MULTILINE)
        if names:
            return names[0].strip()
    return platform.processor() or platform.machine()


def peak_flops(device: torch.device, dtype: torch.dtype = torch.bfloat16) -> float | None:
    """Dense peak in FLOP/s for 16-bit products; None where the device or the type has no entry in the table."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return None
    return peak_by_name(device_name(device))


def peak_by_name(name: str) -> float | None:
    if NOT_THE_CARD.search(name):
        return None
    return next((tflops * 1e12 for pattern, tflops in PEAK_TFLOPS if re.search(pattern, name)), None)


def supports_bf16(device: torch.device) -> bool:
    """Whether bf16 runs in the hardware; a CPU always computes it right, if slowly."""
    return device.type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False)


def total_memory(device: torch.device) -> int:
    """Bytes that the device has; of the host also those that it can swap."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return 1024 * sum(_kib(Path("/proc/meminfo"), name) or 0 for name in ("MemTotal", "SwapTotal"))


def check_memory(weights: Iterable[Tensor], device: torch.device) -> None:
    """Refuse a model whose weights alone do not fit: filling memory until the system ends the process takes long."""
    held = [local(one.detach()) for one in weights]
    needed, there = sum(one.numel() * one.element_size() for one in held), total_memory(device)
    if 0 < there < needed:  # 0: not known
        raise UserError(
            f"the weights of this rank take {sized(needed)}, and the {device.type.upper()} has {sized(there)}: make the"
            " model smaller (model.flavor, model.overrides), or split it over more ranks ([parallelism])"
        )


def peak_memory_gib(device: torch.device) -> float:
    """CUDA: most bytes allocated since `reset_peak`. CPU: most bytes resident, data workers not counted."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / GIB
    return _peak_resident() / GIB


def reset_peak(device: torch.device) -> None:
    """Restart the count of the peak; where the kernel does not allow it for resident memory, the old peak stays."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def available_memory(device: torch.device, ranks: int) -> int | None:
    """Bytes that a rank can still get, where `ranks` share the machine's memory; None where that is not known."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    free = _kib(Path("/proc/meminfo"), "MemAvailable")
    limits = [None if free is None else free * 1024, _left_in_group()]
    known = [limit for limit in limits if limit is not None]
    return min(known) // ranks if known else None


def _left_in_group() -> int | None:
    """Bytes below the memory limit of this process's control group, whose root a container sees; None without one."""
    try:
        folder = Path("/sys/fs/cgroup")
        return int((folder / "memory.max").read_text()) - int((folder / "memory.current").read_text())
    except (OSError, ValueError):  # "max": there is no limit
        return None


def resident_memory() -> int:
    """Bytes of this process that are in memory now."""
    return (_kib(Path("/proc/self/status"), "VmRSS") or 0) * 1024


def _peak_resident() -> int:
    """Bytes. `ru_maxrss` survives exec, so a rank started by a large process would report its parent's peak."""
    peak = _kib(Path("/proc/self/status"), "VmHWM")
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss if peak is None else peak) * 1024


def _kib(file: Path, name: str) -> int | None:
    """A number in KiB from a file of the kernel; None where it is not there."""
    try:
        found = re.search(rf"^{name}:\s*(\d+) kB", file.read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(found.group(1)) if found else None


def flops_per_token(arch: Architecture, seq_len: int) -> float:
    """FLOPs of forward and backward for one token, by torchtitan's convention.

    6 x parameters that a token passes through, without the embedding + 6 x layers x heads x (width of a key + of a
    value) x sequence. The attention term counts the whole square of scores, as if there were no causal mask;
    recomputation by activation checkpointing is not counted. The output projection is a product and counts, even if
    it shares the embedding's weight.
    """
    layers, output = flops_by_part(arch, seq_len)
    return sum(layers) + output


def flops_by_part(arch: Architecture, seq_len: int) -> tuple[list[float], float]:
    """What `flops_per_token` counts for each layer, and for norm and output together."""
    attention = arch.n_heads * (arch.head_dim + arch.v_dim) * seq_len
    layers = [6.0 * (met + attention) for _, met in layer_sizes(arch)]
    return layers, 6.0 * (arch.dim + arch.vocab_size * arch.dim)


def read(numbers: Tensor) -> list[float]:
    """Copy numbers from a device, waiting by an event: a plain read would keep the watchdog from asking the device."""
    if numbers.device.type != "cuda":
        return list(numbers.tolist())
    host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
    host.copy_(numbers, non_blocking=True)
    done = torch.cuda.Event()
    done.record()
    done.synchronize()
    return list(host.tolist())
