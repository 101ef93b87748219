"""The order of compiled blocks: rows start to travel as soon as they are there, and other work runs meanwhile.

    backward   row gradients | put back | gradients of the experts' weights | gather

The compiler orders operations by the memory they need, which puts the two operations of a transfer next to each other,
and computes a product whose result is added to what arrives only after that. For blocks whose rows travel it keeps the
order of the graph, in which the starts of transfers are moved and such products are taken apart from the addition.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

import shardline.parallel.expert.dispatch  # noqa: F401 - defines the operations


class WorkDuringTransfers(CustomGraphPass):
    def __call__(self, graph: fx.Graph) -> None:
        self.start_early(graph)
        self.multiply_before(graph)

    def start_early(self, graph: fx.Graph) -> None:
        """Move what a transfer does not need, and stands before its start, behind that start."""
        ops = torch.ops.shardline
        starts = (ops.expert_put.default, ops.expert_put_back.default)
        ends = (ops.expert_land.default, ops.expert_land_again.default, ops.expert_gather.default)
        since: list[fx.Node] = []  # the last transfer
        for node in list(graph.nodes):
            if node.target in starts:
                needed = _needed_by(node)
                last: fx.Node = node
                for other in since:
                    if other not in needed:
                        last.append(other)
                        last = other
            if node.target in (*starts, *ends) or node.op == "placeholder":
                since = []
            else:
                since.append(node)

    def multiply_before(self, graph: fx.Graph) -> None:
        """Make arrived + a b of addmm(arrived, a, b), with the product before the end of the transfer."""
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
    """The operation that collects rows and gives this tensor, in another shape perhaps."""
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


def compiler_options() -> dict[str, Any]:
    """Options of the compiler, inductor, for a function whose rows travel."""
    return {"reorder_for_peak_memory": False, "post_grad_custom_post_pass": WorkDuringTransfers()}
