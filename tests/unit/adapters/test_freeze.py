"""Weights that are trained by name: which ones a pattern means, and what cannot be trained by itself."""

import pytest
import torch

from shardline.adapters.freeze import freeze_except, trained_names
from shardline.adapters.lora import more_flops
from shardline.config.architecture import Architecture, MixtureOfExperts
from shardline.errors import ConfigError
from shardline.models.decoder import Decoder
from shardline.models.fused_weights import logical_shapes

ARCH = Architecture(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8, ffn_dim=48, vocab_size=64)
MIXTRAL = ARCH.model_copy(update={"family": "mixtral", "moe": MixtureOfExperts(n_experts=4, top_k=2, expert_dim=16)})
TIED = ARCH.model_copy(update={"tie_word_embeddings": True})


@pytest.mark.parametrize(
    ("arch", "pattern", "wanted"),
    [
        (ARCH, "^lm_head.weight$", ["output.weight"]),
        (ARCH, "^model.embed_tokens.weight$", ["tok_embeddings.weight"]),
        (ARCH, "model.layers.1.mlp.down_proj", ["layers.1.feed_forward.w2.weight"]),
        (ARCH, r"^model\.language_model\.layers\.0\.self_attn\.o_proj", ["layers.0.attention.wo.weight"]),
        (ARCH, r"layers\.\d\.attention\.wo", ["layers.0.attention.wo.weight", "layers.1.attention.wo.weight"]),
        (TIED, "^lm_head.weight$", ["tok_embeddings.weight"]),
        (MIXTRAL, "model.layers.[1-9]+.block_sparse_moe.gate", ["layers.1.moe.router.gate.weight"]),
        (
            MIXTRAL,
            "model.layers.1.block_sparse_moe.experts",
            [f"layers.1.moe.experts.{part}.weight" for part in ("w1", "w2", "w3")],
        ),
    ],
)
def test_names_are_ours_and_those_of_hugging_face(arch: Architecture, pattern: str, wanted: list[str]) -> None:
    assert sorted(trained_names(arch, [pattern])) == wanted


def test_everything_may_be_named() -> None:
    assert trained_names(ARCH, [r"model\.language_model\..*", r"lm_head\..*"]) == set(logical_shapes(ARCH))


@pytest.mark.parametrize(
    ("arch", "pattern", "words"),
    [
        (ARCH, "down_proj", "matches no weight of this model; its names: model.embed_tokens.weight"),
        (ARCH, "^model.embed_tokens.weight$[:32]", "names rows of a weight"),
        (ARCH, "(", "not a regular expression"),
        (MIXTRAL, "model.layers.0.block_sparse_moe.experts.1.", "names only some experts of a layer"),
    ],
)
def test_what_cannot_be_trained_by_itself_is_named(arch: Architecture, pattern: str, words: str) -> None:
    with torch.device("meta"), pytest.raises(ConfigError, match=words):
        freeze_except(Decoder(arch), [pattern])


def test_frozen_weights_have_no_gradient_to_compute() -> None:
    with torch.device("meta"):
        model = Decoder(ARCH)
        freeze_except(model, ["model.layers.1.mlp.down_proj"])
    assert [name for name, one in model.named_parameters() if one.requires_grad] == ["layers.1.feed_forward.w2.weight"]
    frozen = sum(one.numel() for one in model.parameters()) - 32 * 48 - 64 * 32
    assert more_flops(model) == -2.0 * frozen
