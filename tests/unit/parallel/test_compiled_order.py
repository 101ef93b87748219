"""What the compiler does with blocks whose rows travel: other work stands between the two ends of a transfer."""

import operator
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from shardline.parallel import apply
from shardline.parallel.expert.compiled_order import WorkDuringTransfers, inductor_options

OPS, ATEN = torch.ops.shardline, torch.ops.aten
PUT_BACK, GATHER = OPS.expert_put_back.default, OPS.expert_gather.default
ROWS, WEIGHT = OPS.grouped_linear_backward_rows.default, OPS.grouped_linear_backward_weight.default


def backward_graph() -> fx.Graph:
    """Gradients of the experts, of which those of rows travel; a product is added to what arrives."""
    graph = fx.Graph()
    gradient, weight, ends, table, sizes, a, b = map(graph.placeholder, ("g", "w", "ends", "table", "sizes", "a", "b"))
    of_weight = graph.call_function(WEIGHT, (gradient, gradient, ends, torch.float32))
    of_rows = graph.call_function(ROWS, (gradient, weight, ends))
    wide = graph.call_function(ATEN.relu.default, (a,))
    ticket = graph.call_function(PUT_BACK, (of_rows, None, table, sizes))
    arrived = graph.call_function(GATHER, (ticket, ends, ends, table, sizes, 2, 8, torch.float32, False))
    total = graph.call_function(operator.getitem, (arrived, 0))
    out = graph.call_function(ATEN.addmm.default, (total, wide, b))
    out.meta["val"] = "a shape"
    graph.output((out, of_weight))
    return graph


def test_work_that_a_transfer_does_not_need_runs_after_its_start_and_before_its_end():
    graph = backward_graph()
    WorkDuringTransfers()(graph)
    graph.lint()
    targets = [node.target for node in graph.nodes if node.op == "call_function"]
    between = [ATEN.relu.default, ATEN.mm.default]
    assert targets == [ROWS, PUT_BACK, WEIGHT, *between, GATHER, operator.getitem, ATEN.add.Tensor]
    (product,) = graph.find_nodes(op="call_function", target=ATEN.mm.default)
    assert product.meta["val"] == "a shape"


def test_a_product_that_needs_what_arrives_stays_where_it_is():
    graph = backward_graph()
    (addmm,) = graph.find_nodes(op="call_function", target=ATEN.addmm.default)
    addmm.args = (addmm.args[0], addmm.args[0], addmm.args[2])
    WorkDuringTransfers()(graph)
    graph.lint()
    assert graph.find_nodes(op="call_function", target=ATEN.addmm.default)


def test_the_compiler_takes_the_options_and_keeps_the_order():
    options = inductor_options()
    assert options["reorder_for_peak_memory"] is False
    torch.compile(torch.relu, options=options)  # refuses options that it does not know
    assert options["post_grad_custom_post_pass"].uuid()


@pytest.mark.parametrize("backend", ["inductor", "aot_eager"])
def test_blocks_whose_rows_travel_have_a_compiler_of_their_own(backend):
    block = SimpleNamespace(function=torch.relu, module=torch.nn.Module())
    model = SimpleNamespace(blocks=lambda: [block, block], layers=[block, block], arch=SimpleNamespace(foreign=None))
    graph = fx.GraphModule(torch.nn.Module(), backward_graph())
    unnoted = patch.object(apply, "noting", lambda compiler, graphs: compiler)
    with patch("torch.compile") as compile_, patch("torch._dynamo.lookup_backend") as found, unnoted:
        apply._compile_blocks(model, backend, [], rows_travel=True)
        compile_.call_args.kwargs["backend"](graph, [])
        apply._compile_blocks(model, backend, [], rows_travel=False)
    assert compile_.call_args.kwargs["backend"] == backend
    ordered = found.return_value.call_args.kwargs.get("config_patches", {}).get("post_grad_custom_post_pass")
    assert isinstance(ordered, WorkDuringTransfers) == (backend == "inductor")
    kept = {node.target for node in graph.graph.nodes if node.meta.get("recompute") == CheckpointPolicy.MUST_SAVE}
    assert kept == {PUT_BACK, GATHER}
