"""What the first step of a run did, as it was seen; every feature leaves another trace when it is switched off."""

import json
from collections import Counter

import pytest
import torch

from shardline.parallel.apply import Applied
from shardline.parallel.compiled_graphs import operations_of
from shardline.telemetry import engaged
from shardline.training.trainer import Trainer
from tests.e2e.tiny import tiny_config

COMPILED = {"compile__enable": True, "compile__backend": "aot_eager"}


def engagement(folder, **changes):
    """`engaged.json` of a run of two steps, and its log."""
    Trainer(tiny_config(folder, training__steps=2, **changes)).train()
    return json.loads((folder / engaged.FILE).read_text()), (folder / "log" / "rank-0.log").read_text()


def test_a_plain_run(tmp_path):
    found, log = engagement(tmp_path / "run")
    assert (found["step"], found["compiled_graphs"], found["blocks"], found["offloaded_bytes"]) == (1, 0, 2, 0)
    assert "What the first step did" in log
    forward = [name for name in found["attention"] if "backward" not in name]
    assert [found["attention"][name] for name in forward] == [2]
    assert all(name.endswith("float32") for name in (*found["products"], *found["attention"]))
    assert (found["optimizer"], found["update"], found["other_ranks"]) == ("AdamW", "fused", {})


def test_what_blocks_keep_tells_the_modes_of_checkpointing_apart(tmp_path):
    modes = {
        "none": {},
        "op": {"activation_checkpoint__mode": "selective", "activation_checkpoint__selective_ac_option": "op"},
        "every second": {"activation_checkpoint__mode": "selective"},
        "full": {"activation_checkpoint__mode": "full"},
    }
    kept = {name: engagement(tmp_path / name, **mode)[0] for name, mode in modes.items()}
    whole, one = kept["none"]["kept_bytes"], kept["none"]["kept_bytes_of_a_block"]
    assert whole == 2 * one
    block_input = 4 * 32 * 64 * 4  # batch, length, dim, bytes
    assert kept["full"]["kept_bytes_of_a_block"] == block_input < one / 4
    assert one + block_input == kept["every second"]["kept_bytes"]
    assert kept["full"]["kept_bytes"] < kept["op"]["kept_bytes"] < whole


@pytest.mark.parametrize("mode", ["none", "full"])
def test_compiled_blocks_are_counted_and_their_operations_known(tmp_path, mode):
    found, log = engagement(tmp_path / "run", **COMPILED, activation_checkpoint__mode=mode)
    assert found["compiled_graphs"] == 1  # for both blocks
    assert found["attention"] == {"scaled_dot_product_attention float32": 1}
    assert found["products"] == {"linear float32": 4}
    assert "was compiled again" not in log, "watching a step must not cost another compilation"


@pytest.mark.parametrize(("components", "of_blocks"), [(["model"], 1), (["loss"], 0), (["model", "loss"], 1)])
def test_each_component_is_compiled_where_it_is_asked_for(tmp_path, components, of_blocks):
    torch._dynamo.reset()  # another test's loss would be used again
    graphs = torch._dynamo.utils.counters["stats"]
    graphs.clear()
    found, _ = engagement(tmp_path / "run", **COMPILED, compile__components=components)
    assert found["compiled_graphs"] == of_blocks
    assert (graphs["unique_graphs"] > of_blocks) == ("loss" in components)


def test_every_graph_counts_with_what_is_in_it():
    graphs = [Counter({("linear", "torch.float32"): 4}), Counter({("linear", "torch.float32"): 2})]
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
    found = engaged.StepObserver(None, optimizer, Applied(graphs=graphs))._found()
    assert (found["compiled_graphs"], found["products"]) == (2, {"linear float32": 6})


def test_a_memory_budget_is_kept(tmp_path):
    whole, _ = engagement(tmp_path / "whole", **COMPILED)
    budget = {"activation_checkpoint__mode": "memory_budget", "activation_checkpoint__memory_budget": 0.2}
    less, _ = engagement(tmp_path / "less", **COMPILED, **budget)
    assert less["kept_bytes"] < 0.6 * whole["kept_bytes"]


def test_a_compiler_that_was_never_asked_is_a_warning(tmp_path, monkeypatch):
    monkeypatch.setattr("shardline.parallel.apply._compile_blocks", lambda *arguments, **options: None)
    found, log = engagement(tmp_path / "run", **COMPILED)
    assert found["compiled_graphs"] == 0
    assert "WARNING compile.enable: no graph was compiled in the first step" in log


def test_offloaded_bytes(tmp_path):
    found, _ = engagement(tmp_path / "run", activation_checkpoint__mode="offload")
    whole, _ = engagement(tmp_path / "whole")
    assert 0 < found["offloaded_bytes"] < whole["kept_bytes"]


def test_types_of_products(tmp_path):
    found, _ = engagement(tmp_path / "run", training__mixed_precision_param="bfloat16")
    of_blocks = {name: count for name, count in found["products"].items() if count > 4}
    assert of_blocks
    assert all(name.endswith("bfloat16") for name in (*of_blocks, *found["attention"]))


@pytest.mark.parametrize(("changes", "optimizer", "update"), [
    ({"optimizer__implementation": "foreach"}, "AdamW", "foreach"),
    ({"optimizer__implementation": "for-loop"}, "AdamW", "tensor by tensor"),
    ({"optimizer__state_dtype": "int8"}, "NarrowAdam", "fused"),
])  # fmt: skip
def test_updates(tmp_path, changes, optimizer, update):
    found, _ = engagement(tmp_path / "run", **changes)
    assert (found["optimizer"], found["update"]) == (optimizer, update)


def test_a_step_in_backward(tmp_path):
    found, _ = engagement(tmp_path / "run", optimizer__early_step_in_backward=True, training__max_norm=0)
    assert found["update"] == "fused, inside backward"


def test_ranks_that_differ_are_named(tmp_path):
    first = {"compiled_graphs": 1, "update": "fused"}
    engaged.write(tmp_path, 1, [first, first, {**first, "compiled_graphs": 0}])
    assert json.loads((tmp_path / engaged.FILE).read_text())["other_ranks"] == {"2": {"compiled_graphs": 0}}


def test_graphs_inside_graphs_are_read():
    seen = []

    def backend(module, inputs):
        seen.append(operations_of(module))
        return module.forward

    def function(x, w):
        return torch.utils.checkpoint.checkpoint(lambda x: (x @ w).relu() @ w, x, use_reentrant=False)

    x, w = (torch.randn(4, 4, requires_grad=True) for _ in range(2))
    torch.compile(function, backend=backend, fullgraph=True)(x, w)
    assert sum(count for (name, _), count in seen[0].items() if name == "matmul") == 2


def test_an_observed_step_leaves_nothing_behind(tmp_path):
    trainer = Trainer(tiny_config(tmp_path / "run", training__steps=2))
    functions = [block.function for block in trainer.model.blocks()]
    hooks = list(trainer.optimizer._optimizer_step_pre_hooks)
    trainer.train()
    assert [block.function for block in trainer.model.blocks()] == functions
    assert list(trainer.optimizer._optimizer_step_pre_hooks) == hooks
    assert Applied().graphs is None
