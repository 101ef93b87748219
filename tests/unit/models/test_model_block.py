"""The decoder's seams: one pure function per block, compiled once, checkpointable, in the compute type asked for."""

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

from shardline.config.architecture import Architecture
from shardline.models.decoder import Decoder, block_function
from shardline.models.init import init_weights

ARCH = Architecture(
    dim=32, n_layers=3, n_heads=4, n_kv_heads=2, ffn_dim=40, vocab_size=50, qk_norm=True, qkv_bias=True, init_std=0.2
)


def build(arch: Architecture = ARCH) -> Decoder:
    model = Decoder(arch)
    init_weights(model, 3)
    return model


def tokens(length: int = 16) -> Tensor:
    return torch.randint(0, 50, (2, length), generator=torch.Generator().manual_seed(1))


def gradients(model: Decoder, documents: Tensor | None = None) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad(set_to_none=True)
    loss = model(tokens(), documents=documents).float().square().mean()
    loss.backward()
    return loss.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


def use(model: Decoder, function: object) -> None:
    for block in model.layers.values():
        block.function = function


def checkpointed(*arguments: object) -> Tensor:
    return checkpoint(block_function, *arguments, use_reentrant=False)


@pytest.mark.parametrize("mask", ["causal", "block_causal"])
@pytest.mark.parametrize("function", [block_function, checkpointed])
def test_compiled_block_is_one_graph_with_the_same_gradients(mask: str, function: object) -> None:
    model = build(ARCH.with_overrides({"attn_mask_type": mask}))
    documents = torch.tensor([[0] * 5 + [1] * 11, [0] * 9 + [1] * 7])
    loss, expected = gradients(model, documents)
    torch._dynamo.reset()
    counters.clear()
    use(model, torch.compile(function, backend="aot_eager", fullgraph=True))
    compiled_loss, found = gradients(model, documents)
    assert counters["stats"]["unique_graphs"] == 1  # three layers, one graph
    torch.testing.assert_close(compiled_loss, loss)
    torch.testing.assert_close(found, expected)


def test_backward_keeps_queries_keys_and_values_and_not_the_product_that_they_are_cut_from() -> None:
    model, kept = build(ARCH.with_overrides({"qk_norm": False})), []
    with torch.autograd.graph.saved_tensors_hooks(lambda one: kept.append(one) or one, lambda one: one):
        model(tokens(24)).sum().backward()
    fused = 2 * 24 * ARCH.head_dim * (ARCH.n_heads + 2 * ARCH.n_kv_heads) * 4  # bytes
    assert fused not in {one.untyped_storage().nbytes() for one in kept}


@pytest.mark.parametrize("function", [block_function, checkpointed])
def test_compiled_block_with_sinks_has_the_same_gradients(function: object) -> None:
    model = build(ARCH.with_overrides({"sinks": True, "sliding_window": 4, "sliding_window_layers": (0, 2)}))
    loss, expected = gradients(model)
    torch._dynamo.reset()
    counters.clear()
    use(model, torch.compile(function, backend="aot_eager", fullgraph=True))
    compiled_loss, found = gradients(model)
    assert counters["stats"]["unique_graphs"] == 2
    torch.testing.assert_close(compiled_loss, loss)
    torch.testing.assert_close(found, expected)
    assert all(found[f"layers.{layer}.attention.sinks"].abs().min() > 0 for layer in range(3))


def test_layers_without_rotary_positions_see_no_order() -> None:
    """But for their mask: a token that moves within what a query sees changes nothing."""
    row = tokens()[:1]
    swapped = row[:, [1, 0, *range(2, 16)]]
    fields = {"n_layers": 1, "rope_layers": ()}
    without, with_positions = build(ARCH.with_overrides(fields)), build(ARCH.with_overrides({"n_layers": 1}))
    torch.testing.assert_close(without(swapped)[:, 2:], without(row)[:, 2:])
    assert (with_positions(swapped)[:, 2:] - with_positions(row)[:, 2:]).abs().max() > 1e-3
    scaled = build(ARCH.with_overrides({**fields, "query_scale": 0.5, "query_scale_step": 4}))
    torch.testing.assert_close(scaled(row)[:, :3], without(row)[:, :3])  # until the first step
    assert (scaled(row)[:, 4:] - without(row)[:, 4:]).abs().max() > 1e-4


def test_layers_with_another_window_add_one_graph() -> None:
    model = build(ARCH.with_overrides({"sliding_window": 4, "sliding_window_layers": (1,)}))
    torch._dynamo.reset()
    counters.clear()
    use(model, torch.compile(block_function, backend="aot_eager", fullgraph=True))
    gradients(model)
    gradients(model)
    assert counters["stats"]["unique_graphs"] == 2


def test_eager_checkpointing_gives_the_same_gradients() -> None:
    model = build()
    _, expected = gradients(model)
    use(model, checkpointed)
    _, found = gradients(model)
    torch.testing.assert_close(found, expected)


def test_compute_type_leaves_parameters_alone() -> None:
    model = build()
    seen: list[torch.dtype] = []

    def spy(x: Tensor, *rest: object) -> Tensor:
        out = block_function(x, *rest)
        seen.extend((x.dtype, out.dtype))
        return out

    use(model, spy)
    model.compute_dtype = torch.bfloat16
    assert model(tokens()).dtype == torch.bfloat16
    assert set(seen) == {torch.bfloat16}
    model(tokens()).float().sum().backward()
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert {parameter.grad.dtype for parameter in model.parameters()} == {torch.float32}


def test_built_on_meta_computes_after_it_gets_memory() -> None:
    with torch.device("meta"):
        model = Decoder(ARCH)
        assert model(torch.zeros(1, 8, dtype=torch.int64)).shape == (1, 8, 50)
    assert not list(model.buffers())
    model.to_empty(device="cpu")
    init_weights(model, 3)
    torch.testing.assert_close(model(tokens()), build()(tokens()))


def test_packed_documents_do_not_see_each_other() -> None:
    model = build(ARCH.with_overrides({"attn_mask_type": "block_causal", "sliding_window": 6}))
    row = tokens()[:1]
    documents = torch.tensor([[0] * 7 + [1] * 9])
    together = model(row, documents=documents)
    apart = torch.cat([model(row[:, :7]), model(row[:, 7:])], dim=1)
    torch.testing.assert_close(together, apart, atol=1e-5, rtol=1e-5)
    assert (model(row)[:, 8:] - apart[:, 8:]).abs().max() > 1e-3


def test_positions_shift_without_effect_and_permute_with_one() -> None:
    """Attention looks at distances alone: a shift changes nothing, another spacing does."""
    model, row = build(), tokens()
    places = torch.arange(16)
    torch.testing.assert_close(model(row, positions=places + 5), model(row), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(model(row, positions=places.expand(2, -1)), model(row))
    assert (model(row, positions=places * 2) - model(row)).abs().max() > 1e-2


def test_tables_follow_the_sequence_length() -> None:
    model = build()
    long = model(tokens(16))
    model(tokens(8))
    torch.testing.assert_close(model(tokens(16)), long)


def test_tied_output_is_the_embedding() -> None:
    model = build(ARCH.with_overrides({"tie_word_embeddings": True}))
    assert model.output is None
    assert model.output_weight() is model.tok_embeddings.weight
    torch.testing.assert_close(model(tokens()), model.hidden(tokens()) @ model.tok_embeddings.weight.T)
