"""Records the operations of every graph given to the compiler: what compiled blocks compute, and in which types."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

Operations = Counter[tuple[str, str]]  # (operation, type of its first operand) -> calls


def noting(compiler: Any, graphs: list[Operations]) -> Callable[..., Any]:
    """Wrap a compiler, given by name or as a function, so that it records the operations of each graph in `graphs`."""
    from torch._dynamo.backends.registry import lookup_backend

    compile_graph = lookup_backend(compiler)

    def compile_noted(module: fx.GraphModule, inputs: Any, **options: Any) -> Any:
        graphs.append(operations_of(module))
        return compile_graph(module, inputs, **options)

    return compile_noted


def operations_of(module: fx.GraphModule) -> Operations:
    """Count the operations of a graph and of the graphs inside it (checkpointed functions, autograd functions)."""
    found: Operations = Counter()
    for part in module.modules():
        if isinstance(part, fx.GraphModule):
            found.update(_named(node) for node in part.graph.nodes if node.op in ("call_function", "call_method"))
    return found


def _named(node: fx.Node) -> tuple[str, str]:
    target: Any = node.target
    if isinstance(target, torch._ops.OpOverloadPacket):
        name = target._qualified_op_name
    elif isinstance(target, torch._ops.OperatorBase):
        name = target.name()
    else:
        name = target if isinstance(target, str) else getattr(target, "__name__", str(target))
    values = (one.meta.get("example_value") for one in node.all_input_nodes)
    first = next((value for value in values if isinstance(value, Tensor)), None)
    return name, "" if first is None else str(first.dtype)
