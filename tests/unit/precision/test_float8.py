"""Products in float8 against torchao's, which we did not write; what is converted, and what is refused."""

import dataclasses
import warnings
from unittest.mock import patch

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from shardline.comm.mesh import Mesh
from shardline.config.check import check, refuse_pending
from shardline.config.layout import Layout
from shardline.config.load import load_config
from shardline.errors import ConfigError
from shardline.models.experts.grouped import grouped_linear
from shardline.models.flavors import resolve
from shardline.models.init import init_weights
from shardline.models.products.linear import accumulate, weight_queue
from shardline.precision import convert, float8
from shardline.precision.convert import check_device, check_rows
from shardline.precision.float8 import E4M3, E5M2, LARGEST, Quantized, Recipe, quantize
from shardline.precision.float8_experts import emulated_linear
from shardline.precision.mixed import choose_precision
from shardline.training.setup import build_model
from tests.parity.cases import EXPERTS, FLOAT8_EXPERTS
from tests.parity.cases import float8 as keys
from tests.parity.harness import MODEL

CPU = torch.device("cpu")
RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
LINEAR = "quantize.linear.float8"


def drawn(*sizes: int) -> torch.Tensor:
    """Numbers of very different sizes, some rows of zeros among them."""
    source = torch.Generator().manual_seed(sum(sizes))
    x = torch.randn(*sizes, generator=source) * torch.exp(3 * torch.randn(sizes[0], 1, generator=source))
    x[1] = 0
    return x.requires_grad_()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", RECIPES)
def test_products_and_gradients_are_those_of_torchao(name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    x, weight, gradient = drawn(48, 64), drawn(80, 64), drawn(48, 80).detach()
    theirs = torch.nn.Sequential(torch.nn.Linear(64, 80, bias=False))
    theirs[0].weight.data.copy_(weight.detach())
    options = {"emulate": True, "round_scales_to_power_of_2": True}
    config = dataclasses.replace(Float8LinearConfig.from_recipe_name(name), **options)
    convert_to_float8_training(theirs, config=config)
    wanted = theirs(x)
    found = float8.linear(x, weight, Recipe(name, emulate=True))
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)
    of_wanted = torch.autograd.grad(wanted, (x, theirs[0].weight), gradient)
    of_found = torch.autograd.grad(found, (x, weight), gradient)
    for one, other in zip(of_found, of_wanted, strict=True):
        # We round once: gradients of weights see the numbers that were multiplied, also the smallest of a row.
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-4 * float(other.abs().max()))


@pytest.mark.parametrize("name", RECIPES)
def test_compiled_code_computes_the_same(name):
    x, weight, gradient = drawn(16, 32), drawn(48, 32), drawn(16, 48).detach()
    recipe = Recipe(name, emulate=True)
    compiled = torch.compile(lambda x, w: float8.linear(x, w, recipe), backend="aot_eager", fullgraph=True)
    for function in (compiled, lambda x, w: float8.linear(x, w, recipe)):
        out = function(x, weight)
        seen = [out, *torch.autograd.grad(out, (x, weight), gradient)]
        if function is compiled:
            wanted = seen
    assert all(torch.equal(a, b) for a, b in zip(seen, wanted, strict=True))


def test_weight_gradients_can_wait():
    x, weight = drawn(16, 32), drawn(48, 32)
    recipe = Recipe("rowwise", emulate=True)
    float8.linear(x, weight, recipe).sum().backward()
    wanted, weight.grad = weight.grad, None
    with weight_queue.deferring():
        float8.linear(x, weight, recipe).sum().backward()
    assert weight.grad is None
    accumulate(weight_queue.take())
    assert torch.equal(weight.grad, wanted)


# ---- factors ---------------------------------------------------------------------------------------------------------

SIZES = st.floats(min_value=1e-10, max_value=1e10)


@given(SIZES, st.sampled_from([E4M3, E5M2]))
def test_factors_are_powers_of_two_that_leave_no_room(size, kind):
    x = torch.tensor([[size, -size / 3]])
    data, factors = quantize(x, kind)
    assert float(factors).hex().lstrip("-").startswith("0x1.0000000000000p")
    largest = float(data.float().abs().max())
    assert LARGEST[kind] / 2 <= largest * (1 + 2**-3) <= LARGEST[kind] * (1 + 2**-3)


@given(st.integers(-8, 8), st.integers(0, 1000))
def test_another_power_of_two_rounds_alike(power, seed):
    """Why layouts agree, and why numbers that have travelled can be given another factor."""
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(seed)) + torch.sign(torch.randn(4, 16))
    once = quantize(x)
    assert torch.equal(quantize(x * 2.0**power).wide(torch.float32), once.wide(torch.float32) * 2.0**power)
    assert torch.equal(quantize(once.wide(torch.float32), by_row=False).wide(torch.float32), once.wide(torch.float32))


@given(st.integers(1, 5), st.integers(1, 4))
def test_rows_travel_with_their_factors(rows, sixteens):
    one = quantize(drawn(rows + 1, 16 * sixteens).detach())
    there = float8.to_bytes(one)
    assert there.shape == (rows + 1, 16 * sixteens + 16)
    assert torch.equal(float8.from_bytes(there, E4M3).wide(torch.float32), one.wide(torch.float32))
    same = float8.from_bytes(float8.to_bytes(Quantized(one.data, one.factors[:1])), E4M3)
    assert torch.equal(same.factors, one.factors[:1].expand(rows + 1, 1))


# ---- what is converted -----------------------------------------------------------------------------------------------


def built(*changes, arch=MODEL):
    overrides = {"model.overrides": arch}
    for change in changes:
        overrides |= change
    config = load_config(overrides=overrides)
    model, applied = build_model(
        resolve(config.model), CPU, choose_precision(config, CPU, True), Mesh(Layout(), "cpu"), config
    )
    init_weights(model, 0)
    return model, applied


def rounded_in(model) -> int:
    """How many operands a forward rounds."""
    with patch.object(float8, "quantize", side_effect=quantize) as counted:
        model(torch.arange(32).view(2, 16))
    return counted.call_count


def test_the_four_products_of_each_block_are_in_float8():
    model, applied = built(keys("tensorwise"))
    assert rounded_in(model) == 2 * 4 * len(model.layers)
    assert len(applied.float8_modules) == 4 * len(model.layers)
    assert rounded_in(built()[0]) == 0


@pytest.mark.parametrize("name", RECIPES)
def test_the_recipe_is_that_of_the_config(name):
    assert built(keys(name))[1].recipes == {Recipe(name, emulate=True)}


@pytest.mark.parametrize(
    ("filters", "left"),
    [
        (["attention.wk"], {"attention.wo", "feed_forward.w13", "feed_forward.w2"}),
        (["layers.0", "w2"], {"attention.wqkv", "attention.wo", "feed_forward.w13"}),
        (["output", "tok_embeddings"], {"attention.wqkv", "attention.wo", "feed_forward.w13", "feed_forward.w2"}),
        (["auto_filter_small_kn"], set()),
    ],
)
def test_modules_that_are_named_stay_as_they_are(filters, left):
    _, applied = built(keys("tensorwise", *filters))
    first = {name.removeprefix("layers.0.") for name in applied.float8_modules if name.startswith("layers.0.")}
    second = {name.removeprefix("layers.1.") for name in applied.float8_modules if name.startswith("layers.1.")}
    assert second == left
    assert first == (set() if "layers.0" in filters else left)


@pytest.mark.parametrize(
    ("recipe", "fitting", "small"),
    [
        (Recipe("tensorwise", emulate=False), [(1040, 4096), (1024, 4112)], [(1024, 4096), (16, 16)]),
        (Recipe("rowwise", emulate=False), [(4112, 2048), (4096, 2064)], [(4096, 2048), (2048, 8192), (8192, 1024)]),
    ],
    ids=["tensorwise", "rowwise"],
)
def test_which_weights_are_large_enough(recipe, fitting, small):
    def suits(shape, automatic, how=recipe):
        return convert._suits(["layers.0.attention.wo"], torch.empty(shape, device="meta"), [], how, automatic)

    assert [suits(shape, True) for shape in (*fitting, *small)] == [True] * len(fitting) + [False] * len(small)
    assert all(suits(shape, False) for shape in small)
    for odd in ((4112, 4104), (4104, 4112)):  # the kernels take multiples of 16
        assert not suits(odd, False)
        assert suits(odd, False, recipe._replace(emulate=True))


def test_a_filter_that_names_nothing_is_an_error():
    with pytest.raises(ConfigError, match=r"filter_fqns: no module is named 'attention.wx'"):
        built(keys("tensorwise", "attention.wx"))


def test_experts_are_converted_by_name():
    model, _ = built(FLOAT8_EXPERTS, arch=MODEL | EXPERTS["model.overrides"])
    (products,) = {block.spec.expert_products for block in model.blocks()}
    assert products.linear is emulated_linear


def test_experts_that_are_not_named_stay_as_they_are():
    named = {"quantize.grouped_mm.float8.fqns": ["layers.1.moe"]}
    model, _ = built(FLOAT8_EXPERTS | named, arch=MODEL | EXPERTS["model.overrides"])
    converted = [block.spec.expert_products.linear is emulated_linear for block in model.blocks()]
    assert converted == [number == 1 for number in range(len(model.layers))]


def test_products_of_experts_are_near_those_in_float32():
    rows, weight = drawn(20, 32), torch.randn(3, 48, 32, requires_grad=True)
    ends = torch.tensor([4, 4, 20], dtype=torch.int32)
    found, wanted = (function(rows, weight, ends) for function in (emulated_linear, grouped_linear))
    assert 0 < float((found - wanted).norm() / wanted.norm()) < 0.06
    gradient = torch.randn_like(wanted)
    of_found, of_wanted = (torch.autograd.grad(out, (rows, weight), gradient) for out in (found, wanted))
    assert 0 < float((of_found[0] - of_wanted[0]).norm() / of_wanted[0].norm()) < 0.06
    assert torch.equal(of_found[1], of_wanted[1])


# ---- what is refused -------------------------------------------------------------------------------------------------


def test_a_device_without_float8_wants_emulation():
    config = load_config(overrides={"model.converters": [LINEAR]})
    with pytest.raises(ConfigError, match=r"cpu has no float8 products.*--quantize.linear.float8.emulate"):
        check_device(config, CPU, torch.float32)
    check_device(load_config(overrides=keys("tensorwise")), CPU, torch.float32)


def test_the_number_of_tokens_must_suit_the_kernels():
    with pytest.raises(ConfigError, match="multiplies 24 tokens at a time, which is not a multiple of 16"):
        check_rows(load_config(overrides={"model.converters": [LINEAR]}), 24)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            keys("rowwise") | {f"{LINEAR}.enable_fsdp_float8_all_gather": True},
            "one scale cannot be scaled row by row",
        ),
        (
            keys("tensorwise") | {f"{LINEAR}.enable_fsdp_float8_all_gather": True, "training.enable_cpu_offload": True},
            "kept in host memory are gathered as they are",
        ),
        ({"model.converters": ["quantize.grouped_mm.float8"]}, "no module is named"),
    ],
)
def test_combinations_that_cannot_work(overrides, words):
    with pytest.raises(ConfigError, match=words):
        check(load_config(overrides=overrides))


def test_mx_formats_are_not_built_yet():
    with pytest.raises(ConfigError, match="MX formats"):
        refuse_pending(load_config(overrides={"model.converters": ["quantize.linear.mx"]}))


def test_experts_of_a_model_without_any():
    with pytest.raises(ConfigError, match="has nothing to convert: the model has no experts"):
        built(FLOAT8_EXPERTS)
