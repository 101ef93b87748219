"""What is specific to a trainer: how much communication it hides, what its host costs, and what it keeps in memory.

`SHARDLINE` describes this package. `benchmarks/planner_traits.toml` describes other trainers, with constants that
`benchmarks/planner.py --fit` fits to published measurements.
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
    products_float8: float = 1.0  # the same for float8 and narrower types, including the cost of rounding
    products_experts: float = 1.0  # a further factor for grouped products of experts
    attention: str = "cudnn"
    attention_rate: float = 1.0
    moved: float = 1.0  # bytes of kernels between products, relative to full fusion
    rounding: float = 0.0  # added to `moved` where products compute in float8
    logit_bytes: float = 6.0  # bytes that the loss reads and writes for each logit, forward and backward
    score_bytes: float = 0.0  # the same for each attention score, if attention is not one kernel
    optimizer_bytes: float = 42.0  # bytes that the update reads and writes for each parameter

    # Host
    host_layer: float = 0.0  # seconds that the host needs for one layer, forward and backward
    host_forward: float = 1 / 3  # share of that time in forward
    host_tp: float = 0.0  # further seconds for each layer where tensor parallelism adds calls
    host_experts: float = 0.0  # further seconds for each layer with experts
    host_pass: float = 0.0  # seconds for each micro-batch, besides the layers
    step: float = 0.0  # seconds of a step in which the device is idle
    step_rank: float = 0.0  # further idle seconds for each doubling of the nodes

    # Communication
    network: float = 1.0  # share of the network's bandwidth that collectives reach
    scattered: float = 1.0  # a further factor for sums that a sharded optimizer waits for
    delay: float = 1.0  # latency of a hop between nodes, relative to the hardware's
    tp_hidden: float = 0.0  # share of tensor-parallel communication that products hide
    tp_again: bool = False  # backward gathers the inputs of products again
    cp_hidden: float = 0.8
    ep_hidden: float = 0.0
    ep_once: bool = False  # a token is sent once to each node with experts that it chose, not once per expert
    dp_hidden: tuple[int, ...] = (0, 1, 2, 3)  # stages of ZeRO whose gradient sums run beside backward
    gather_hidden: bool = True  # FSDP gathers weights ahead
    gather_bytes: float = 2.0  # bytes of each gathered weight
    reduce_bytes: float = 4.0  # bytes of each summed gradient
    slowdown: float = 1.13  # how many times as long computation takes beside communication
    p2p_blocks: bool = False  # ranks wait until the next stage has what they send
    p2p: float = 0.0  # further seconds of such a transfer between nodes
    tp_beside_pp: tuple[float, float] = (0.0, 0.0)  # host seconds of a layer, times tp and times tp squared

    # Memory
    weight_bytes: float = 4.0  # bytes of each stored weight
    gradient_bytes: float = 4.0
    master_bytes: float = 0.0  # of a further copy, sharded with the optimizer state
    bucket_bytes: tuple[float, float] = (0.0, 0.0)  # buffers per parameter: with replicas, with sharded optimizer state
    kept: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)  # factors per token: stream, gathered, heads, FFN
    kept_rotated: float = 0.0  # further numbers per token, times head_dim: tables that rotate queries and keys
    kept_piped: float = 0.0  # added to the first of `kept` in a pipeline
    kept_op: float = 1.0  # share of all these numbers that checkpointing by operation keeps
    keeps_gathered: float = 1.0  # share of the second of `kept` that counts
    logit_kept: float = 0.0  # bytes per logit at the peak
    working: float = 0.0  # bytes of backward's working memory per number of the stream
    reserved: float = 1.0  # ratio of reserved to allocated memory
    base_gib: float = 0.0
    reports_first: bool = False  # published memory is that of the first rank, not of the fullest one
    cut: str = "balanced"  # how pipeline stages are cut: balanced, even, or costs

    def with_values(self, values: Mapping[str, Any]) -> Traits:
        changes: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in values.items()}
        return replace(self, **changes)


SHARDLINE = Traits(rounding=0.9)
