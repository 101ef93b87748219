"""How many ranks each axis of the mesh has: numbers only, no process groups."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace

from shardline.config.architecture import Architecture
from shardline.config.schema import Config, Parallelism
from shardline.errors import ConfigError
from shardline.words import counted

# Outermost first. Ranks of the last axis are neighbors, so that its traffic, the heaviest, stays inside a node.
AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
KEYS = {
    "pp": "pipeline_parallel_degree",
    "dp_replicate": "data_parallel_replicate_degree",
    "dp_shard": "data_parallel_shard_degree",
    "cp": "context_parallel_degree",
    "tp": "tensor_parallel_degree",
}


# Axes of the experts, outermost first: another split of the same dp_shard x cp x tp ranks.
EXPERT_AXES = ("expert_shard", "ep", "etp")


@dataclass(frozen=True)
class Layout:
    """Degrees by axis. Rank = ((((pp * dp_replicate + r) * dp_shard + s) * cp + c) * tp + t.

    For experts, the dp_shard x cp x tp ranks of a replica are expert_shard x ep x etp: `ep` ranks split the experts,
    `etp` (1 or tp) ranks split each expert's matrices, and `expert_shard` ranks shard the rest.
    """

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    etp: int = 1

    @property
    def degrees(self) -> tuple[int, ...]:
        return tuple(getattr(self, axis) for axis in AXES)

    @property
    def world_size(self) -> int:
        return math.prod(self.degrees)

    @property
    def data_ranks(self) -> int:
        """Ranks that read different samples."""
        return self.dp_replicate * self.dp_shard

    def coordinates(self, rank: int) -> dict[str, int]:
        found = {}
        for axis in reversed(AXES):
            rank, found[axis] = divmod(rank, getattr(self, axis))
        return found

    def expert_coordinates(self, rank: int) -> dict[str, int]:
        """Where a rank is on the experts' axes."""
        rank %= self.dp_shard * self.cp * self.tp
        found = {}
        for axis in reversed(EXPERT_AXES):
            rank, found[axis] = divmod(rank, getattr(self, axis))
        return found

    @property
    def expert_shard(self) -> int:
        return self.dp_shard * self.cp * self.tp // (self.ep * self.etp)

    def __str__(self) -> str:
        named = [f"{axis} {degree}" for axis, degree in zip(AXES, self.degrees, strict=True) if degree > 1]
        experts = [f"{axis} {getattr(self, axis)}" for axis in ("ep", "etp") if getattr(self, axis) > 1]
        among = f" (experts: {' x '.join(experts)})" if experts else ""
        return (" x ".join(named) or "one rank") + among


def resolve_layout(section: Parallelism, world_size: int) -> Layout:
    """The layout for `world_size` ranks; a degree of -1, for sharding or for replicas, takes the remaining ranks.

    If replicas take all of them, the result is plain replicas (DDP).
    """
    degrees = {axis: getattr(section, key) for axis, key in KEYS.items()}
    given = math.prod(degree for degree in degrees.values() if degree != -1)
    open_axes = [axis for axis, degree in degrees.items() if degree == -1]
    if len(open_axes) > 1:
        raise ConfigError(
            "parallelism.data_parallel_replicate_degree = -1: data_parallel_shard_degree is -1 too, and only one of"
            " them can take the remaining ranks; set a number for the other"
        )
    for axis in open_axes:
        degrees[axis] = max(world_size // given, 1)
    layout = Layout(**degrees)
    if layout.world_size != world_size:
        raise ConfigError(_mismatch(section, degrees, world_size))
    return _with_experts(layout, section.expert_parallel_degree, section.expert_tensor_parallel_degree)


def fewest_ranks(section: Parallelism) -> int:
    """The ranks that the degrees need; `data_parallel_shard_degree = -1` is as small as expert parallelism allows."""
    ranks = math.prod(max(1, getattr(section, key)) for key in KEYS.values())
    ep, among = section.expert_parallel_degree, section.context_parallel_degree * section.tensor_parallel_degree
    if section.data_parallel_shard_degree == -1 and ep > 1:
        ranks *= math.lcm(among, ep * section.expert_tensor_parallel_degree) // among
    return ranks


def with_degrees(config: Config, layout: Layout) -> Config:
    """The config with a number for every degree, so that rules that depend on them can be checked."""
    known = {f"parallelism.{KEYS[axis]}": getattr(layout, axis) for axis in ("dp_replicate", "dp_shard")}
    changes = {key: degree for key, degree in known.items() if config.value(key) != degree}
    return config.replace(changes) if changes else config


def _with_experts(layout: Layout, ep: int, etp: int) -> Layout:
    """The layout with its experts' axes, which must split the ranks of a replica evenly."""
    if ep == 1:
        return layout  # without expert parallelism, the other degree means nothing
    ranks = layout.dp_shard * layout.cp * layout.tp
    if etp not in (1, layout.tp):
        raise ConfigError(
            f"parallelism.expert_tensor_parallel_degree = {etp}: expected 1 or tensor_parallel_degree, {layout.tp}"
        )
    if ranks % (ep * etp):
        good = ", ".join(str(d) for d in range(1, ranks // etp + 1) if ranks % (d * etp) == 0)
        raise ConfigError(
            f"parallelism.expert_parallel_degree = {ep}: dp_shard {layout.dp_shard} x cp {layout.cp} x tp {layout.tp} ="
            f" {ranks} ranks cannot be split into ep {ep} x etp {etp}; degrees that fit: {good}"
        )
    return replace(layout, ep=ep, etp=etp)


def check_experts(arch: Architecture, layout: Layout) -> None:
    """Raise if the experts cannot be split this way; the message names degrees that fit."""
    if arch.moe is not None and routes_together(layout) and arch.moe.expert_dim % layout.tp:
        key = "tensor_parallel_degree" if layout.ep == 1 else "expert_tensor_parallel_degree"
        raise ConfigError(
            f"parallelism.{key} = {layout.tp}: an expert's width, {arch.moe.expert_dim}, is not a multiple of it; with"
            " an expert_parallel_degree above 1 and an expert_tensor_parallel_degree of 1 experts stay whole"
        )
    if layout.ep == 1:
        return
    key = f"parallelism.expert_parallel_degree = {layout.ep}"
    if arch.moe is None:
        raise ConfigError(f"{key}: the model has no experts")
    ranks = layout.dp_shard * layout.cp * layout.tp // layout.etp
    experts = arch.moe.n_experts
    if experts % layout.ep:
        good = [degree for degree in range(1, ranks + 1) if experts % degree == 0 and ranks % degree == 0]
        raise ConfigError(
            f"{key}: {experts} experts cannot be divided evenly among {layout.ep} ranks; degrees that fit:"
            f" {', '.join(map(str, good))}"
        )


def check_cuda_graphs(config: Config, arch: Architecture, layout: Layout, device: str = "cuda") -> None:
    """Raise where a recorded pass would leave out what the host does in each pass."""
    if not (config.compile.enable and config.compile.cuda_graphs):
        return
    reasons = {
        f"the device is a {device.upper()}, which has no CUDA graphs": device != "cuda",
        f"{layout.world_size} ranks communicate in each pass": layout.world_size > 1,
        "experts count their tokens in each pass": arch.moe is not None,
        "block_causal finds the documents of each batch": arch.attn_mask_type == "block_causal",
        "a model of transformers may do anything in a pass": arch.foreign is not None,
    }
    for reason, holds in reasons.items():
        if holds:
            raise ConfigError(f"compile.cuda_graphs = true: {reason}; set compile.cuda_graphs = false")


def routes_together(layout: Layout) -> bool:
    """Whether the ranks of tp share each expert, and so route the same tokens."""
    return layout.tp > 1 and (layout.ep == 1 or layout.etp == layout.tp)


def _mismatch(section: Parallelism, degrees: dict[str, int], world_size: int) -> str:
    """The equation with its numbers, and layouts for which it holds."""
    wanted = {axis: getattr(section, key) for axis, key in KEYS.items()}
    numbers = " x ".join(f"{axis} {degree}" for axis, degree in wanted.items())
    product, rest = math.prod(degrees.values()), ""
    for axis in [axis for axis, degree in wanted.items() if degree == -1]:
        named = [degree for other, degree in degrees.items() if other != axis]
        product, rest = math.prod(named), f", which it must divide ({axis} -1 takes the remaining ranks)"
        numbers += f": {' x '.join(map(str, named))}"
        wanted[axis] = 0
    good = [_flags(layout, wanted) for layout in suggestions(wanted, world_size)]
    if world_size == 1:  # there is only one layout
        good.append(f"{product} ranks: --nproc {product}")
    ranks = counted(world_size, "rank")
    return f"parallelism: {numbers} = {product} does not match {ranks}{rest}; try {'; or '.join(good)}"


def suggestions(wanted: dict[str, int], world_size: int) -> list[Layout]:
    """Two layouts of this many ranks (one for 1 rank), as close as possible to the requested degrees.

    pp, cp and tp stay or become smaller; the data axes take the remaining ranks. 0 for a data axis stands for any.
    """
    model = (_up_to(wanted[axis], world_size) for axis in ("pp", "cp", "tp"))
    found = [
        Layout(pp=pp, dp_replicate=replicas, dp_shard=world_size // (pp * cp * tp * replicas), cp=cp, tp=tp)
        for pp, cp, tp in itertools.product(*model)
        if world_size % (pp * cp * tp) == 0
        for replicas in _up_to(world_size, world_size // (pp * cp * tp))
    ]
    return sorted(found, key=lambda layout: _distance(layout, wanted))[:2]


def _up_to(most: int, number: int) -> list[int]:
    return [divisor for divisor in range(1, min(most, number) + 1) if number % divisor == 0]


def _distance(layout: Layout, wanted: dict[str, int]) -> tuple[int, float, int, float]:
    """How many axes differ from the requested ones, and by how much; those that split the model count first."""
    return *_change(layout, wanted, ("pp", "cp", "tp")), *_change(layout, wanted, ("dp_replicate", "dp_shard"))


def _change(layout: Layout, wanted: dict[str, int], axes: tuple[str, ...]) -> tuple[int, float]:
    """The number of changed axes and the sum of their changes in doublings; a fractional factor counts more."""
    ratios = [getattr(layout, axis) / wanted[axis] for axis in axes if wanted[axis] not in (0, getattr(layout, axis))]
    odd = sum(1 for ratio in ratios if ratio % 1 and (1 / ratio) % 1)
    return len(ratios), 0.75 * odd + sum(abs(math.log2(ratio)) for ratio in ratios)


def _flags(layout: Layout, wanted: dict[str, int]) -> str:
    """Flags that set this layout whatever the config holds: degrees above 1, and those that were requested."""
    degrees = dict(zip(AXES, layout.degrees, strict=True))
    named = [axis for axis in AXES if degrees[axis] > 1 or wanted[axis] != 1]
    return " ".join(f"--parallelism.{KEYS[axis]}={degrees[axis]}" for axis in named)
