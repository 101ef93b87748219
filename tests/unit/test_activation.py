"""Every activation checkpointing mode gives the gradients of `none`, keeps less, and recomputes what it says."""

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from shardline.config.architecture import Architecture
from shardline.config.layout import Layout
from shardline.config.load import load_config
from shardline.errors import ConfigError
from shardline.models.decoder import Decoder
from shardline.models.init import init_weights
from shardline.parallel.apply import apply
from shardline.parallel.mesh import Mesh
from shardline.precision.mixed import Precision

ARCH = Architecture(
    dim=64,
    n_layers=4,
    n_heads=4,
    n_kv_heads=2,
    head_dim=16,
    ffn_dim=96,
    vocab_size=64,
    rope_theta=10000.0,
    norm_eps=1e-5,
)


def run(overrides):
    torch._dynamo.reset()
    config = load_config(overrides=overrides)
    model = Decoder(ARCH)
    init_weights(model, seed=1)
    precision = Precision(torch.float32, torch.float32, torch.float32)
    lines = apply(model, config, Mesh(Layout(), "cpu"), precision).lines
    tokens = torch.randint(64, (2, 32), generator=torch.Generator().manual_seed(0))
    kept = {}

    def pack(tensor):
        kept[tensor.data_ptr()] = tensor.numel()
        return tensor

    parameters = {p.data_ptr() for p in model.parameters()}
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(tokens).square().mean()
    loss.backward()
    size = sum(n for pointer, n in kept.items() if pointer not in parameters)
    return loss.item(), {name: p.grad for name, p in model.named_parameters()}, size, lines


@pytest.fixture(scope="module")
def plain():
    return run([])


MODES = {
    "full": ["--activation_checkpoint.mode=full"],
    "selective 2": ["--activation_checkpoint.mode=selective", "--activation_checkpoint.selective_ac_option=2"],
    "selective op": ["--activation_checkpoint.mode=selective", "--activation_checkpoint.selective_ac_option=op"],
}


@pytest.mark.parametrize("mode", MODES)
def test_same_gradients_as_none(plain, mode):
    loss, gradients, size, lines = run(MODES[mode])
    assert loss == pytest.approx(plain[0], rel=1e-6)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, plain[1][name], rtol=1e-5, atol=1e-8)
    assert size < plain[2], "checkpointing kept as much as none"
    assert "activation checkpointing" in lines[0]


def test_modes_differ_in_what_they_keep(plain):
    sizes = {mode: run(MODES[mode])[2] for mode in ("full", "selective 2")}
    assert sizes["full"] < sizes["selective 2"] < plain[2]


@pytest.mark.parametrize("mode", [[], *MODES.values(), ["--activation_checkpoint.mode=memory_budget"]])
def test_compiled_blocks_give_the_same(plain, mode):
    loss, gradients, _, lines = run([*mode, "--compile.enable", "--compile.backend=aot_eager"])
    assert loss == pytest.approx(plain[0], rel=1e-5)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, plain[1][name], rtol=1e-4, atol=1e-7)
    assert any("compiling 4 blocks" in line for line in lines)


def test_memory_budget_needs_compile():
    with pytest.raises(ConfigError, match=r"compile\.enable"):
        run(["--activation_checkpoint.mode=memory_budget"])


def test_a_module_name_that_matches_nothing_is_an_error():
    key = "activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns"
    with pytest.raises(ConfigError, match="no_such_module"):
        run([*MODES["selective op"], f"--{key}=no_such_module"])


@pytest.mark.parametrize("name", ["attention.wq", "attention.wk", "feed_forward.w3", "w2"])
def test_products_of_named_modules_are_computed_again(name):
    """TorchTitan's names, which here are parts of fused weights."""
    key = "activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns"
    assert run([*MODES["selective op"], f"--{key}={name}"])[0] == pytest.approx(run([])[0], rel=1e-6)


def test_an_option_that_is_no_number_is_an_error():
    with pytest.raises(ConfigError, match="every"):
        run(["--activation_checkpoint.mode=selective", "--activation_checkpoint.selective_ac_option=every"])
