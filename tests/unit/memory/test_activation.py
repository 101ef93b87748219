"""Every activation checkpointing mode gives the gradients of `none`, keeps less, and recomputes what it says."""

import contextlib
import logging
from collections import Counter
from unittest.mock import patch

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from shardline.comm.mesh import Mesh
from shardline.config.architecture import Architecture
from shardline.config.layout import Layout
from shardline.config.load import load_config
from shardline.config.schema import ActivationCheckpoint
from shardline.errors import ConfigError
from shardline.memory import activation
from shardline.models.decoder import Decoder
from shardline.models.feed_forward import FeedForwardWeights, Products, feed_forward
from shardline.models.init import init_weights
from shardline.parallel.apply import apply
from shardline.precision.mixed import Precision, choose_precision
from shardline.training.setup import build_model
from tests.parity.pool import Pool

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


@contextlib.contextmanager
def collected_log():
    """The lines that are logged inside; as a list, since a fixture of a whole module has no caplog."""
    lines, log = [], logging.getLogger("shardline")
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        log.removeHandler(handler)
        log.setLevel(level)


def run(overrides):
    torch._dynamo.reset()
    config = load_config(overrides=overrides)
    model = Decoder(ARCH)
    init_weights(model, seed=1)
    precision = Precision(torch.float32, torch.float32, torch.float32)
    with collected_log() as lines:
        apply(model, config, Mesh(Layout(), "cpu"), precision)
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


def test_options_of_a_recomputation_reach_torch(monkeypatch):
    """Of a compiled block the compiler decides them itself, but for the random state."""
    given = []

    def noted(function, *arguments, **options):  # nothing is recomputed: torch's debugging takes seconds
        given.append({name: value for name, value in options.items() if name in wanted})
        return function(*arguments)

    wanted = {"preserve_rng_state": False, "determinism_check": "none", "early_stop": True, "debug": True}
    monkeypatch.setattr(activation, "checkpoint", noted)
    for options in (wanted, {**wanted, "preserve_rng_state": True, "early_stop": False, "debug": False}):
        given.clear()
        run([*MODES["full"], *(f"--activation_checkpoint.{name}={str(one).lower()}" for name, one in options.items())])
        assert given == [options] * ARCH.n_layers


def test_the_memory_budget_and_its_plot_reach_the_compiler(monkeypatch):
    import torch._functorch.config as functorch

    for name in ("activation_memory_budget", "visualize_memory_budget_pareto", "ban_recompute_materialized_backward"):
        monkeypatch.setattr(functorch, name, getattr(functorch, name))
    wanted = {"mode": "memory_budget", "memory_budget": 0.25, "visualize_memory_budget_pareto": True}
    activation._set_memory_budget(ActivationCheckpoint(**wanted), compiled=True)
    assert (functorch.activation_memory_budget, functorch.visualize_memory_budget_pareto) == (0.25, True)
    activation._set_memory_budget(ActivationCheckpoint(**(wanted | {"mode": "full"})), compiled=True)
    assert (functorch.activation_memory_budget, functorch.visualize_memory_budget_pareto) == (1.0, False)


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


def test_a_module_name_that_matches_nothing_is_an_error():
    key = "activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns"
    with pytest.raises(ConfigError, match="no_such_module"):
        run([*MODES["selective op"], f"--{key}=no_such_module"])


class Computed(TorchDispatchMode):
    """Counts products by the shape (in, out) of their weight, and attention."""

    def __init__(self):
        super().__init__()
        self.seen = Counter()

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        shape = activation.product_shape(function, arguments)
        what = "attention" if function in activation.kept_attention_ops() else shape
        self.seen.update([] if what is None else [what])
        return function(*arguments, **(options or {}))


def computed_again(overrides):
    """What a step computes more often than one without checkpointing."""
    with Computed() as plainly:
        run([])
    with Computed() as checkpointed:
        run(overrides)
    return dict(checkpointed.seen - plainly.seen)


WQKV, WO, W13, W2 = (64, 128), (64, 64), (64, 192), (96, 64)


@pytest.mark.parametrize(
    ("mode", "forced", "again"),
    [
        ("full", [], {WQKV: 4, "attention": 4, WO: 4, W13: 4, W2: 4}),
        ("selective 2", [], {WQKV: 2, "attention": 2, WO: 2, W13: 2, W2: 2}),
        ("selective op", [], {WO: 4, W2: 4}),
        # The product that is forced does not count: of the other three, every other one is kept.
        ("selective op", ["attention.wq"], {WQKV: 4, W13: 4}),
    ],
    ids=["full", "every-second", "op", "op-forced"],
)
def test_what_is_computed_again(mode, forced, again):
    key = "activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns"
    assert computed_again([*MODES[mode], *(f"--{key}={name}" for name in forced)]) == again


@pytest.mark.parametrize("name", ["attention.wq", "attention.wk", "feed_forward.w3", "w2"])
def test_products_of_named_modules_are_computed_again(name):
    """TorchTitan's names, which here are parts of fused weights."""
    key = "activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns"
    assert run([*MODES["selective op"], f"--{key}={name}"])[0] == pytest.approx(run([])[0], rel=1e-6)


@pytest.fixture(scope="module")
def pool():
    workers = Pool()
    yield workers
    workers.close()


def forced_products(name):
    """On two tensor-parallel ranks: the shapes that are forced to be computed again, and those of all products."""
    key = "activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns"
    config = load_config(overrides=[*MODES["selective op"], f"--{key}={name}"])
    forced, seen, device = [], set(), torch.device("cpu")
    contexts, product_shape = activation._per_op_contexts, activation.product_shape

    def noted_contexts(shapes):
        forced.append(shapes)
        return contexts(shapes)

    def noted_shape(*arguments):
        shape = product_shape(*arguments)
        seen.add(shape)
        return shape

    with patch.object(activation, "_per_op_contexts", noted_contexts):
        model, _ = build_model(ARCH, device, choose_precision(config, device, True), Mesh(Layout(tp=2), "cpu"), config)
    init_weights(model, seed=1)
    with patch.object(activation, "product_shape", noted_shape):
        model.hidden(torch.arange(16).view(2, 8)).square().sum().backward()
    return set().union(*forced), seen - {None}


@pytest.mark.parametrize(("name", "shape"), [("attention.wo", (32, 64)), ("feed_forward.w2", (48, 64))])
def test_tensor_parallel_ranks_compute_products_of_their_own_parts_again(pool, name, shape):
    for forced, seen in pool.run(2, forced_products, name):
        assert forced == {shape}
        assert shape in seen


def test_an_option_that_is_no_number_is_an_error():
    with pytest.raises(ConfigError, match="every"):
        run(["--activation_checkpoint.mode=selective", "--activation_checkpoint.selective_ac_option=every"])


def test_a_compiled_block_keeps_no_middle_of_its_feed_forward_part():
    """SwiGLU's output is one pass over the product before it, which is kept."""
    with torch.device("meta"):
        model = Decoder(ARCH)
    activation.apply_activation_checkpoint(model, ActivationCheckpoint(mode="none"), compiled=True)
    torch._dynamo.reset()
    x, w13, w2 = torch.randn(6, 8, requires_grad=True), torch.randn(2 * 20, 8), torch.randn(8, 20)
    weights = FeedForwardWeights(w13.requires_grad_(), None, w2.requires_grad_(), None)
    kept = []

    def keep(tensor):
        kept.append(tuple(tensor.shape))
        return tensor

    block = torch.compile(lambda x: feed_forward(x, weights, 20, Products()), backend="aot_eager_decomp_partition")
    with saved_tensors_hooks(keep, lambda tensor: tensor):
        block(x).sum().backward()
    assert (6, 1, 20) in kept  # gate and up
    assert (6, 20) not in kept


def test_products_in_float8_are_products():
    a, b = torch.empty(8, 16), torch.empty(32, 16).t()
    assert activation.product_shape(torch.ops.aten._scaled_mm.default, (a, b)) == (16, 32)
    assert activation.product_shape(torch.ops.aten.mm.default, (a, b)) == (16, 32)
