"""Decides which layers each pipeline stage holds, and which stages each rank holds.

    model     | embedding | layer 0 | layer 1 | layer 2 | layer 3 | layer 4 | norm, output |
    stages    |        stage 0      |       stage 1     |           stage 2              |

Stages hold consecutive modules. There are three rules for the cut; the values in the config alone choose the rule:

    by name     module_fqns_per_model_part names the modules of each stage
    by count    pipeline_parallel_layers_per_stage is set, or one of the two ..._less_layers is not 1, its default:
                equally many layers for each stage, where embedding and output count as `less_layers` layers
    by weight   otherwise: the cut whose heaviest stage is lightest

A module weighs the mean of its share of the model's FLOPs and its share of the parameters. This accounts for the
output layer, which is large and computes much, and for the embedding, which is only large.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

from shardline.config.architecture import Architecture
from shardline.config.layout import Layout
from shardline.config.schema import Config
from shardline.errors import ConfigError, blame
from shardline.models.decoder import Stage
from shardline.models.fused_weights import layer_sizes
from shardline.parallel.pipeline.schedules import build_schedule, theoretical_bubble
from shardline.parallel.pipeline.timeline import Schedule
from shardline.words import listed, ranges

SECTION = "parallelism"
LESS_LAYERS = ("pipeline_parallel_first_stage_less_layers", "pipeline_parallel_last_stage_less_layers")


class PipelinePlan(NamedTuple):
    """What each rank of the pp axis holds and runs."""

    schedule: Schedule
    stages: tuple[Stage, ...]
    microbatch_size: int

    def held(self, rank: int) -> tuple[Stage, ...]:
        """Return the stages of one rank of the pp axis, first to last."""
        return tuple(self.stages[index] for index in self.schedule.stages_of(rank))

    @property
    def ends(self) -> tuple[int, int]:
        """The ranks of the pp axis that have the first and the last stage."""
        return self.schedule.placement[0], self.schedule.placement[-1]

    def describe(self) -> str:
        """Return a log line with the schedule and the layers of each stage."""
        schedule = self.schedule
        cut = ", ".join(ranges(stage.layers) or "none" for stage in self.stages)
        return (
            f"pipeline of {schedule.ranks} ranks: {schedule.name}, {schedule.microbatches} micro-batches of"
            f" {self.microbatch_size}, {schedule.stages} stages, theoretical bubble"
            f" {theoretical_bubble(schedule):.1%}; layers of each stage: {cut}"
        )


def plan_pipeline(
    config: Config, arch: Architecture, layout: Layout, stages_per_rank: int | None = None
) -> PipelinePlan | None:
    """Return the plan of a run with pipeline stages, None without them; raise ConfigError if the plan cannot run.

    `stages_per_rank = None` takes the number that the config asks for.
    """
    if layout.pp == 1:
        return None
    section, count = config.parallelism, count_microbatches(config)
    csv = section.pipeline_parallel_schedule_csv or None
    per_rank = stages_per_rank or requested_stages_per_rank(config, arch, layout.pp)
    with blame(f"{SECTION}.pipeline_parallel_schedule{'_csv' if csv else ''}"):
        schedule = build_schedule(section.pipeline_parallel_schedule, layout.pp, count, per_rank, csv)
    if schedule.splits and config.compile.enable and "model" in config.compile.components:
        raise ConfigError(
            f"{schedule.name} computes weight gradients apart from input gradients, which compiled blocks cannot do;"
            ' set parallelism.pipeline_parallel_schedule = "Interleaved1F1B", or compile.enable = false'
        )
    stages = tuple(cut_stages(config, arch, schedule.stages))
    return PipelinePlan(schedule, stages, section.pipeline_parallel_microbatch_size)


def count_microbatches(config: Config) -> int:
    """Return the number of micro-batches into which the pipeline cuts a batch."""
    size, batch = config.parallelism.pipeline_parallel_microbatch_size, config.training.local_batch_size
    if batch % size:
        good = ", ".join(str(divisor) for divisor in range(1, batch + 1) if batch % divisor == 0)
        raise ConfigError(
            f"{SECTION}.pipeline_parallel_microbatch_size = {size} does not divide training.local_batch_size = {batch};"
            f" sizes that do: {good}"
        )
    return batch // size


def requested_stages_per_rank(config: Config, arch: Architecture, ranks: int) -> int | None:
    """Return the stages per rank if a key sets the number of stages; None leaves it to the schedule."""
    section = config.parallelism
    if section.module_fqns_per_model_part is not None:
        count, key = len(section.module_fqns_per_model_part), "module_fqns_per_model_part"
        reason = f"names {count} stages"
    elif section.pipeline_parallel_layers_per_stage is not None:
        each, key = section.pipeline_parallel_layers_per_stage, "pipeline_parallel_layers_per_stage"
        first, last = (getattr(section, name) for name in LESS_LAYERS)
        count = math.ceil((arch.n_layers + first + last) / each)
        reason = f"= {each} makes {count} stages of {arch.n_layers} layers (and {first} + {last} for embedding, output)"
    else:
        return None
    if count % ranks:
        raise ConfigError(f"{SECTION}.{key} {reason}, which {ranks} ranks cannot share evenly")
    return count // ranks


def cut_stages(config: Config, arch: Architecture, count: int) -> list[Stage]:
    """Cut the model into `count` stages."""
    section = config.parallelism
    if section.module_fqns_per_model_part is not None:
        return named_stages(section.module_fqns_per_model_part, arch, count)
    first, last = (getattr(section, key) for key in LESS_LAYERS)
    if section.pipeline_parallel_layers_per_stage is not None or (first, last) != (1, 1):
        return _stages(counted_layers(arch.n_layers, count, first, last))
    return _stages(balanced_layers(arch, config.training.seq_len, count))


def _stages(layers_of: Sequence[Sequence[int]]) -> list[Stage]:
    end = len(layers_of) - 1
    return [Stage(tuple(layers), index == 0, index == end) for index, layers in enumerate(layers_of)]


# ---- by count --------------------------------------------------------------------------------------------------------


def counted_layers(layers: int, count: int, first: int, last: int) -> list[range]:
    """Give all stages equally many layers, where the embedding counts as `first` layers and the output as `last`."""
    total = layers + first + last
    each, extra = divmod(total, count)
    heavy = [f"{key} = {less}" for key, less in zip(LESS_LAYERS, (first, last), strict=True) if less > each]
    if count > total or heavy:
        asked = f" ({SECTION}.{', '.join(heavy)})" if heavy else ""
        raise ConfigError(
            f"{layers} layers, plus {first} for the embedding and {last} for the output, make {each} for each of"
            f" {count} stages: too few{asked}; use fewer stages, or smaller {' and '.join(LESS_LAYERS)}"
        )
    sizes = [each + (index < extra) for index in range(count)]
    sizes[0] -= first
    sizes[-1] -= last
    return _ranges(sizes)


def _ranges(sizes: Sequence[int]) -> list[range]:
    return [range(end - size, end) for size, end in zip(sizes, itertools.accumulate(sizes), strict=True)]


# ---- by weight -------------------------------------------------------------------------------------------------------


class Weights(NamedTuple):
    """The weights of the embedding, of each layer, and of norm and output together; the whole model weighs 1."""

    embedding: float
    layers: tuple[float, ...]
    output: float

    def of(self, layers: range, first: bool, last: bool) -> float:
        return first * self.embedding + sum(self.layers[layers.start : layers.stop]) + last * self.output


def module_weights(arch: Architecture, seq_len: int) -> Weights:
    """Return the mean of each module's shares of FLOPs and parameters; a tied output counts as a second table.

    For a layer with experts, FLOPs count only the experts that a token uses.
    """
    attention = arch.n_heads * (arch.head_dim + arch.v_dim) // 2 * seq_len  # as a number of parameters of equal FLOPs
    held, met = zip(*layer_sizes(arch), strict=True)
    used = [size + attention for size in met]
    table = arch.vocab_size * arch.dim
    head = arch.dim + table
    all_held, all_used = table + sum(held) + head, sum(used) + head
    return Weights(
        embedding=table / all_held / 2,
        layers=tuple((own / all_held + work / all_used) / 2 for own, work in zip(held, used, strict=True)),
        output=(head / all_held + head / all_used) / 2,
    )


def balanced_layers(arch: Architecture, seq_len: int, count: int) -> list[range]:
    """Return the cut into consecutive layers whose heaviest stage is lightest.

    Each stage has at least one layer; if there are too few, the embedding or the output may be a stage of its own.
    """
    layers = arch.n_layers
    if count == 1:
        return [range(layers)]
    least = [1] * count
    if layers < count:
        least[0] = least[-1] = 0
    if layers < sum(least):
        raise ConfigError(
            f"{layers} layers, the embedding and the output cannot make {count} pipeline stages; set a smaller"
            f" {SECTION}.pipeline_parallel_degree, or choose a schedule with fewer stages per rank"
        )
    weights = module_weights(arch, seq_len)
    return _ranges(_of_equal_layers(weights, least) if len(set(weights.layers)) == 1 else _of_layers(weights, least))


def _of_equal_layers(weights: Weights, least: Sequence[int]) -> list[int]:
    """Return the numbers of layers of the best cut, as even as possible; all layers weigh the same."""
    count, layers = len(least), len(weights.layers)

    def fits(limit: float) -> list[int] | None:
        """Return the layers of each stage with no stage above the limit; None if there is no such cut."""
        ends = (weights.of(range(0), i == 0, i == count - 1) for i in range(count))
        most = [math.floor((limit - end) / weights.layers[0] + 1e-9) for end in ends]
        if any(high < low for high, low in zip(most, least, strict=True)) or sum(most) < layers:
            return None
        return _level(least, most, layers)

    loads = {weights.of(range(n), i == 0, i == count - 1) for i in (0, 1, count - 1) for n in range(layers + 1)}
    return next(found for limit in sorted(loads) if (found := fits(limit)) is not None)


def _of_layers(weights: Weights, least: Sequence[int]) -> list[int]:
    """Return the numbers of layers of the best cut; ties are broken by the smallest sum of squared weights."""
    count, layers = len(least), len(weights.layers)
    best: dict[int, tuple[float, float, list[int]]] = {0: (0.0, 0.0, [])}  # by the number of layers placed so far
    for stage, low in enumerate(least):
        found: dict[int, tuple[float, float, list[int]]] = {}
        for start, (heaviest, squares, sizes) in best.items():
            for stop in range(start + low, layers + 1):
                weight = weights.of(range(start, stop), stage == 0, stage == count - 1)
                option = (max(heaviest, weight), squares + weight**2, [*sizes, stop - start])
                found[stop] = min(found.get(stop, option), option)
        best = found
    return best[layers][2]


def _level(least: Sequence[int], most: Sequence[int], layers: int) -> list[int]:
    """Return numbers between `least` and `most` that add up to `layers`, with the largest as small as possible."""
    sizes = list(least)
    for _ in range(layers - sum(least)):
        room = [index for index, size in enumerate(sizes) if size < most[index]]
        sizes[min(room, key=lambda index: (sizes[index], index))] += 1
    return sizes


# ---- by name ---------------------------------------------------------------------------------------------------------


def named_stages(parts: Sequence[Sequence[str]], arch: Architecture, count: int) -> list[Stage]:
    """Build the stages whose modules `module_fqns_per_model_part` names."""
    key = f"{SECTION}.module_fqns_per_model_part"
    if len(parts) != count:
        raise ConfigError(f"{key} names {len(parts)} stages, but the schedule has {count}")
    ends = ["norm"] if arch.tie_word_embeddings else ["norm", "output"]
    expected = ["tok_embeddings", *(f"layers.{layer}" for layer in range(arch.n_layers)), *ends]
    named = [name for part in parts for name in part]
    if arch.tie_word_embeddings:  # the output is the embedding; a file may still name it
        named = [name for name in named if name != "output"]
    if named != expected:
        raise ConfigError(f"{key}: {_difference(named, expected)}")
    home = {"tok_embeddings": 0, "norm": count - 1, "output": count - 1}
    for index, part in enumerate(parts):
        wrong = [name for name in part if home.get(name, index) != index]
        if wrong:
            raise ConfigError(
                f"{key}: stage {index} has {', '.join(wrong)}; tok_embeddings belongs in the first stage,"
                " norm and output in the last"
            )
    return _stages([[int(name.removeprefix("layers.")) for name in part if name not in home] for part in parts])


def _difference(named: Sequence[str], expected: Sequence[str]) -> str:
    for word, names in (
        ("unknown", [name for name in named if name not in expected]),
        ("missing", [name for name in expected if name not in named]),
        ("named twice", [name for name in dict.fromkeys(named) if named.count(name) > 1]),
    ):
        if names:
            return f"{word}: {listed(names)}"
    at = next(index for index, (a, b) in enumerate(zip(named, expected, strict=True)) if a != b)
    return f"{named[at]} is where {expected[at]} belongs: list the modules in the order of the model"
