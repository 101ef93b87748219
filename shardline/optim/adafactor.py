"""Adafactor: Adam without first moments, and with second moments of one number for each row and each column.

    R = b R + (1 - b) mean over columns of g^2 + eps        C = b C + (1 - b) mean over rows of g^2 + eps
    u = g / sqrt(R C / mean(R))                             b = 1 - step ** decay_rate
    w = w - lr decay w - lr u / max(1, rms(u) / threshold)  (Shazeer and Stern 2018, algorithm 4)

With `adafactor_scale_parameter`, lr is multiplied by rms(w), but by no less than eps[1]. Norm weights and biases have a
second moment for each element. Formulas and results are those of transformers, applied to logical weights: wq, wk and
wv each have their own C and rms although they are rows of one fused parameter, and every expert has R and C of its own,
while rms is over all experts of a layer.

R and C are sharded like the rows and columns of the weight. Sums over other ranks' shards take one all-reduce for each
mesh dimension that shards weights: once for R and C, once for mean(R) and once for rms.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from shardline.models.dtensor import local, local_slices
from shardline.models.fused_weights import is_halved, logical_rows
from shardline.optim.lamb import cuts, sums_along, whole_sums
from shardline.optim.narrow_adam import SCRATCH

ROWS, COLUMNS = "exp_avg_sq_row", "exp_avg_sq_col"


@dataclass(frozen=True)
class Parts:
    """The logical weights in a parameter: those fused in it, gate and up of each expert in turn, or the parameter."""

    factored: bool
    heights: Tensor  # (1 or parts, 1, 1): rows of each full matrix
    rows: tuple[Tensor, ...] | None = None  # in a fused matrix, this rank's rows of each part
    alternating: int = 1  # logical tensors whose matrices alternate


def parts_of(model: nn.Module, plain: set[nn.Parameter]) -> dict[nn.Parameter, Parts]:
    """The parts of each trained parameter; the `plain` ones, norm weights and biases, are not factored."""
    arch: Any = getattr(model, "arch", None)
    found = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        factored, device = parameter.ndim > 1 and parameter not in plain, local(parameter).device
        heights, rows = [parameter.shape[-2] if factored else parameter.shape[-1]], None
        if arch is not None and not is_halved(name):
            pieces = logical_rows(arch, name, parameter.shape[0], local_slices(parameter)[0])
            if len(pieces) > 1:
                heights, rows = [piece.size for piece in pieces], tuple(piece.places.to(device) for piece in pieces)
        sizes = torch.tensor(heights, dtype=torch.float32).view(-1, 1, 1).to(device)
        found[parameter] = Parts(factored, sizes, rows, 2 if is_halved(name) else 1)
    return found


class Adafactor(torch.optim.Optimizer):
    """`parts` says which logical weights a parameter holds; without an entry it holds one."""

    def __init__(
        self, groups: list[dict[str, Any]], options: dict[str, Any], parts: Mapping[nn.Parameter, Parts]
    ) -> None:
        super().__init__(groups, options)
        self.parts = parts

    def initial_state(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        parts = self.parts[parameter]
        state = {"step": torch.zeros((), dtype=torch.float32)}
        if not parts.factored:
            state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=torch.float32, requires_grad=False)
        else:
            state[ROWS] = _without(parameter, -1, 1)
            state[COLUMNS] = _without(parameter, -2, len(parts.heights))
        if self.defaults["beta1"]:
            state["exp_avg"] = torch.zeros_like(parameter, dtype=torch.float32, requires_grad=False)
        return state

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        held = [
            _Weights(parameter, self._state(parameter), self.parts[parameter], group)
            for group in self.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        _advance([one for one in held if one.parts.factored])
        for one in held:
            if not one.parts.factored:
                one.advance_elements()
        updates = whole_sums([one.squared_update() for one in held], [one.parameter for one in held])
        scaled = [one for one in held if one.group["scale_parameter"]]
        sizes = whole_sums([one.squared_weight() for one in scaled], [one.parameter for one in scaled])
        by_parameter = {one.parameter: size for one, size in zip(scaled, sizes, strict=True)}
        for one, update in zip(held, updates, strict=True):
            one.apply(update, by_parameter.get(one.parameter))

    def _state(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        if not self.state[parameter]:
            self.state[parameter] = self.initial_state(parameter)
        self.state[parameter]["step"] += 1
        return self.state[parameter]


def state_bytes(name: str, shard: tuple[int, ...], momentum: bool) -> int:
    """The size of the state for a parameter's shard; columns of fused weights count once."""
    elements, factored = math.prod(shard), len(shard) > 1 and not name.endswith(".bias")
    second = math.prod(shard[:-1]) + math.prod(shard[:-2]) * shard[-1] if factored else elements
    return (second + momentum * elements) * torch.float32.itemsize


def _without(parameter: nn.Parameter, dim: int, size: int) -> Tensor:
    """Zeros with a parameter's shape and sharding, except that dimension `dim` has `size` and is not sharded."""
    shape, own = list(parameter.shape), list(local(parameter).shape)
    shape[dim] = own[dim] = size
    zeros = torch.zeros(own, dtype=torch.float32, device=local(parameter).device)
    if not isinstance(parameter, DTensor):
        return zeros
    placements = [
        Replicate() if cuts(parameter, at, dim) else placement for at, placement in enumerate(parameter.placements)
    ]
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        zeros, parameter.device_mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
    )


def _advance(held: list[_Weights]) -> None:
    """Update R and C of the factored weights, and mean(R)."""
    parameters = [one.parameter for one in held]
    rows, columns = [], []
    for one in held:
        of_rows, of_columns = one.sums()
        rows.append(of_rows)
        columns.append(of_columns)
    dims = [-1] * len(held) + [-2] * len(held)
    sums = sums_along([*rows, *columns], [*parameters, *parameters], dims)
    for one, of_rows, of_columns in zip(held, sums, sums[len(held) :], strict=False):
        one.advance(of_rows, of_columns)
    means = sums_along([one.row_sums() for one in held], parameters, [-2] * len(held))
    for one, mean in zip(held, means, strict=True):
        one.set_factors(mean)


class _Piece(NamedTuple):
    """Some rows of a logical matrix, or some whole matrices: the unit of computation."""

    matrices: slice
    rows: Tensor | None  # of the only matrix; None: all

    def of(self, tensor: Tensor) -> Tensor:
        """This piece of a tensor (matrices, rows, ...): a view, or a copy of rows."""
        return tensor[self.matrices] if self.rows is None else tensor[0].index_select(0, self.rows)[None]

    def write(self, tensor: Tensor, values: Tensor) -> None:
        if self.rows is None:
            tensor[self.matrices].copy_(values)
        else:
            tensor[0].index_copy_(0, self.rows, values[0].to(tensor.dtype))


class _Weights:
    """A parameter's shard on this rank, as (matrices, rows, columns), in one step; if not factored, with one column.

    For a fused matrix, C and all sums have one matrix for each part.
    """

    def __init__(self, parameter: nn.Parameter, state: dict[str, Tensor], parts: Parts, group: dict[str, Any]) -> None:
        self.parameter, self.state, self.parts, self.group = parameter, state, parts, group
        self.height, self.width = parameter.shape[-2:] if parts.factored else (parameter.shape[-1], 1)
        self.weight = self._matrices(parameter.detach())
        assert parameter.grad is not None
        self.gradient = self._matrices(local(parameter.grad).contiguous())
        self.decay = 1 - float(state["step"]) ** group["decay_rate"]
        self.row_factor, self.column_factor = torch.ones(()), torch.ones(())

    def _matrices(self, tensor: Tensor) -> Tensor:
        held = local(tensor)
        inner = held.shape[-2:] if self.parts.factored else (held.shape[-1], 1)
        return held.view(math.prod(held.shape[: -2 if self.parts.factored else -1]), *inner)

    def _of_columns(self) -> Tensor:
        """C as (matrices or parts, 1, columns)."""
        held = local(self.state[COLUMNS])
        return held.view(math.prod(held.shape[:-1]), 1, held.shape[-1])

    def pieces(self) -> Iterator[tuple[slice, _Piece]]:
        """All pieces of the weight, each with its indices among matrices or parts."""
        count, rows, columns = self.gradient.shape
        limit = SCRATCH[self.gradient.device.type]
        if self.parts.rows is not None:
            step = max(1, limit // max(1, columns))
            for part, places in enumerate(self.parts.rows):
                for some in places.split(step) if len(places) else ():
                    yield slice(part, part + 1), _Piece(slice(0, 1), some)
        elif count == 1 and rows * columns > limit:
            step = max(1, limit // columns)
            for some in torch.arange(rows, device=self.gradient.device).split(step):
                yield slice(0, 1), _Piece(slice(0, 1), some)
        else:
            step = max(1, limit // max(1, rows * columns))
            for first in range(0, count, step):
                matrices = slice(first, min(count, first + step))
                yield matrices, _Piece(matrices, None)

    # ---- second moments ----------------------------------------------------------------------------------------------

    def sums(self) -> tuple[Tensor, Tensor]:
        """This rank's squared gradients, summed over its columns (matrices, rows, 1) and over its rows."""
        of_rows = torch.zeros_like(self.gradient[..., :1], dtype=torch.float32)
        of_columns = torch.zeros_like(self._of_columns())
        for place, piece in self.pieces():
            squares = piece.of(self.gradient).float().square()
            piece.write(of_rows, squares.sum(-1, keepdim=True))
            of_columns[place] += squares.sum(-2, keepdim=True)
        return of_rows, of_columns

    def advance(self, of_rows: Tensor, of_columns: Tensor) -> None:
        """Update R and C with a step's sums over full rows and columns."""
        for state, means in (
            (local(self.state[ROWS]).view(of_rows.shape), of_rows / self.width),
            (self._of_columns(), of_columns / self.parts.heights),
        ):
            state.mul_(self.decay).add_(means.add_(self.group["eps"][0]), alpha=1 - self.decay)

    def row_sums(self) -> Tensor:
        """(matrices or parts, 1, 1): sums of R over this rank's rows."""
        rows = local(self.state[ROWS]).view(*self.gradient.shape[:2], 1)
        if self.parts.rows is None:
            return rows.sum(1, keepdim=True)
        return torch.stack([rows[0].index_select(0, places).sum().view(1, 1) for places in self.parts.rows])

    def set_factors(self, row_sums: Tensor) -> None:
        """Set the factors of the gradient, from R, C and the sums of R over full matrices."""
        rows = local(self.state[ROWS]).view(*self.gradient.shape[:2], 1)
        means = row_sums / self.parts.heights
        if self.parts.rows is None:
            self.row_factor = (rows / means).rsqrt_()
        else:
            self.row_factor = torch.empty_like(rows)
            for mean, places in zip(means, self.parts.rows, strict=True):
                of_part = (rows[0].index_select(0, places) / mean).rsqrt_()
                self.row_factor[0].index_copy_(0, places, of_part)
        self.column_factor = self._of_columns().rsqrt()

    def advance_elements(self) -> None:
        """Update the second moment of each element of a weight that is not factored."""
        moments = self._matrices(self.state["exp_avg_sq"])
        squares = self.gradient.float().square() + self.group["eps"][0]
        moments.mul_(self.decay).add_(squares, alpha=1 - self.decay)
        self.row_factor = moments.rsqrt()
        self.column_factor = moments.new_ones(len(self.parts.heights) if self.parts.rows else len(moments), 1, 1)

    # ---- the update --------------------------------------------------------------------------------------------------

    def _update(self, place: slice, piece: _Piece) -> Tensor:
        return piece.of(self.gradient).float() * piece.of(self.row_factor) * self.column_factor[place]

    def squared_update(self) -> Tensor:
        """(logical tensors,): this rank's part of the squared norm of each tensor's update."""
        return self._squares(self._update)

    def squared_weight(self) -> Tensor:
        return self._squares(lambda place, piece: piece.of(self.weight).float())

    def _squares(self, values: Any) -> Tensor:
        found = self.column_factor.new_zeros(len(self.column_factor))
        for place, piece in self.pieces():
            found[place] += values(place, piece).square().sum((-2, -1))
        return found if self.parts.rows is not None else found.view(-1, self.parts.alternating).sum(0)

    def _root_mean_squares(self, squares: Tensor) -> Tensor:
        """(matrices or parts, 1, 1): the rms of the logical tensor that each belongs to, from its full squared norm."""
        if self.parts.rows is not None:
            return (squares.view(-1, 1, 1) / (self.parts.heights * self.width)).sqrt()
        elements = self.parameter.numel() // self.parts.alternating
        of_tensors = (squares / elements).sqrt()
        return of_tensors.repeat(len(self.gradient) // len(of_tensors)).view(-1, 1, 1)

    def apply(self, squared_update: Tensor, squared_weight: Tensor | None) -> None:
        """Take the step, given the squared norms of full logical tensors."""
        group = self.group
        sizes = self._root_mean_squares(squared_update) / group["clip_threshold"]
        rates = group["lr"] / sizes.clamp_(min=1.0)
        decays = torch.full_like(rates, group["lr"] * group["weight_decay"])
        if squared_weight is not None:
            scales = self._root_mean_squares(squared_weight).clamp_(min=group["eps"][1])
            rates, decays = rates * scales, decays * scales
        momentum = self._matrices(self.state["exp_avg"]) if group["beta1"] else None
        for place, piece in self.pieces():
            update = self._update(place, piece) * rates[place]
            if momentum is not None:
                update = piece.of(momentum).lerp(update, 1 - group["beta1"])
                piece.write(momentum, update)
            weight = piece.of(self.weight)
            piece.write(self.weight, weight.float() * (1 - decays[place]) - update)
