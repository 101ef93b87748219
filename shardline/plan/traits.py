"""What is peculiar to a trainer: how far it hides communication, what its host costs, and what it keeps in memory.

`SHARDLINE` describes this package. `benchmarks/planner_traits.toml` describes other trainers, with constants that
`benchmarks/planner.py --fit` has fitted to published measurements.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Traits:
    name: str = "shardline"

    # Kernels
    products: float = 1.0  # rate of products, relative to the hardware's sustained rate
    products_float8: float = 1.0  # the same for float8 and narrower types, with what rounding costs
    products_experts: float = 1.0  # and once more for grouped products of experts
    attention: str = "cudnn"
    attention_rate: float = 1.0
    moved: float = 1.0  # bytes of kernels between products, relative to full fusion
    rounding: float = 0.0  # more of them where products compute in float8
    logit_bytes: float = 6.0  # bytes that the loss reads and writes for each logit, forward and backward
    score_bytes: float = 0.0  # the same for each attention score, where attention is not one kernel
    optimizer_bytes: float = 42.0  # bytes that the update reads and writes for each parameter

    # Host
    host_layer: float = 0.0  # seconds that the host needs for one layer, forward and backward
    host_forward: float = 1 / 3  # share of that time in forward
    host_tp: float = 0.0  # more of them for each layer where tensor parallelism adds calls
    host_experts: float = 0.0  # more of them for each layer with experts
    host_pass: float = 0.0  # seconds for each micro-batch, beside the layers
    step: float = 0.0  # seconds of a step in which nothing is computed
    step_rank: float = 0.0  # more of them for each doubling of the nodes

    # Communication
    network: float = 1.0  # share of the network's bandwidth that collectives reach
    scattered: float = 1.0  # share of that share for sums that a sharded optimizer waits for
    delay: float = 1.0  # latency of a hop between nodes, relative to the hardware's
    tp_hidden: float = 0.0  # share of tensor-parallel communication that products hide
    tp_again: bool = False  # backward gathers the inputs of products again
    cp_hidden: float = 0.8
    ep_hidden: float = 0.0
    ep_once: bool = False  # a token travels once to each node that has experts of its choice, not once for each
    dp_hidden: tuple[int, ...] = (0, 1, 2, 3)  # stages of ZeRO whose sums of gradients run beside backward
    gather_hidden: bool = True  # FSDP gathers weights ahead
    gather_bytes: float = 2.0  # of a weight that is gathered
    reduce_bytes: float = 4.0  # of a gradient that is summed
    slowdown: float = 1.13  # of computation beside communication
    p2p_blocks: bool = False  # ranks wait for what they send to the next stage
    p2p: float = 0.0  # more seconds of such a transfer between nodes
    tp_beside_pp: tuple[float, float] = (0.0, 0.0)  # seconds of a layer for each tp rank, and its square, see docs

    # Memory
    weight_bytes: float = 4.0  # of a stored weight
    gradient_bytes: float = 4.0
    master_bytes: float = 0.0  # of another copy, sharded with the optimizer state
    bucket_bytes: tuple[float, float] = (0.0, 0.0)  # of buffers for each parameter: replicas, sharded optimizer state
    kept: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)  # numbers that a layer keeps of each token
    kept_rotated: float = 0.0  # more of them for each of a head's, of tables that rotate queries and keys
    kept_piped: float = 0.0  # more of the stream's numbers in a pipeline
    kept_op: float = 1.0  # share of all of it that checkpointing by operation leaves
    keeps_gathered: float = 1.0  # share of the second of `kept` that counts
    logit_kept: float = 0.0  # bytes of each logit at the peak
    working: float = 0.0  # bytes of each number of the stream that backward works with
    reserved: float = 1.0  # reserved over allocated
    base_gib: float = 0.0
    reports_first: bool = False  # its memory is that of the first rank, not of the fullest one
    cut: str = "balanced"  # how pipeline stages are cut: balanced, even, or costs

    def with_values(self, values: Mapping[str, Any]) -> Traits:
        changes: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in values.items()}
        return replace(self, **changes)


SHARDLINE = Traits(rounding=0.9)
