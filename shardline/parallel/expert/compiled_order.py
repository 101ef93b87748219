"""Compiles blocks that send rows to experts: transfers start as soon as their rows exist, and other work overlaps.

    backward   row gradients | put back | gradients of the experts' weights | gather

By default, the compiler orders operations by their memory, which puts the two operations of a transfer next to each
other. And if a product is added to the rows that arrive, it computes the product only after they have arrived. For
blocks that send rows, the compiler keeps the order of the graph instead; a pass moves transfers to start early, and
splits such products from the addition.

The rows that arrive are kept for backward, however small the memory budget: a transfer cannot be received twice.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.utils.checkpoint import CheckpointPolicy

import shardline.parallel.expert.dispatch  # noqa: F401 - defines the operations

_OPS = torch.ops.shardline
STARTS = (_OPS.expert_put.default, _OPS.expert_put_back.default)
ENDS = (_OPS.expert_land.default, _OPS.expert_land_again.default, _OPS.expert_gather.default)
KEPT = (_OPS.expert_plan.default, *STARTS, *ENDS)


class WorkDuringTransfers(CustomGraphPass):
    def __call__(self, graph: fx.Graph) -> None:
        self.start_early(graph)
        self.multiply_before(graph)

    def start_early(self, graph: fx.Graph) -> None:
        """Move operations that a transfer does not need from before its start to behind it."""
        since: list[fx.Node] = []  # operations since the last transfer
        for node in list(graph.nodes):
            if node.target in STARTS:
                needed = _needed_by(node)
                last: fx.Node = node
                for other in since:
                    if other not in needed:
                        last.append(other)
                        last = other
            if node.target in (*STARTS, *ENDS) or node.op == "placeholder":
                since = []
            else:
                since.append(node)

    def multiply_before(self, graph: fx.Graph) -> None:
        """Rewrite addmm(arrived, a, b) as arrived + a b, with the product before the end of the transfer."""
        aten = torch.ops.aten
        places = {node: place for place, node in enumerate(graph.nodes)}
        for node in graph.find_nodes(op="call_function", target=aten.addmm.default):
            end = _gathers(node.args[0])
            if end is None or node.kwargs or any(places[one] > places[end] for one in node.args[1:]):
                continue
            with graph.inserting_before(end):
                product = graph.call_function(aten.mm.default, node.args[1:])
            with graph.inserting_before(node):
                total = graph.call_function(aten.add.Tensor, (node.args[0], product))
            product.meta, total.meta = dict(node.meta), dict(node.meta)
            node.replace_all_uses_with(total)
            graph.erase_node(node)

    def uuid(self) -> Any:
        return get_hash_for_files((str(Path(__file__)),))


def _gathers(node: fx.Node) -> fx.Node | None:
    """Return the operation that collects the rows in this tensor, possibly reshaped; None if there is none."""
    while node.target is not torch.ops.shardline.expert_gather.default:
        if node.op != "call_function" or len(node.all_input_nodes) != 1:
            return None
        (node,) = node.all_input_nodes
    return node


def _needed_by(node: fx.Node) -> set[fx.Node]:
    needed, waiting = set(), [node]
    while waiting:
        for other in waiting.pop().all_input_nodes:
            if other not in needed:
                needed.add(other)
                waiting.append(other)
    return needed


def compiler(backend: str) -> Callable[..., Any]:
    """Return the compiler `backend`, set up for functions that send rows."""
    compile_graph = torch._dynamo.lookup_backend(backend)
    options = {"config_patches": inductor_options()} if backend == "inductor" else {}

    def compile_transfers(graph: fx.GraphModule, inputs: list[Any]) -> Any:
        for node in graph.graph.nodes:
            if node.target in KEPT:
                node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        return compile_graph(graph, inputs, **options)

    return compile_transfers


def inductor_options() -> dict[str, Any]:
    return {"reorder_for_peak_memory": False, "post_grad_custom_post_pass": WorkDuringTransfers()}
