"""Generation with kept keys and values gives what the whole forward pass gives."""

import pytest
import torch

from shardline.config.architecture import Architecture
from shardline.errors import UserError
from shardline.models.attention import KVCache
from shardline.models.decoder import Decoder
from shardline.models.generate import generate
from shardline.models.init import init_weights

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


def build(**changes: object) -> Decoder:
    fields = {"dim": 32, "n_layers": 3, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 48, "vocab_size": 60, "init_std": 0.3}
    model = Decoder(Architecture(**{**fields, **changes}))
    init_weights(model, 1)
    return model


def greedy(model: Decoder, prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": True, "qk_norm": True},
        {"sliding_window": 5},
        {"sliding_window": 5, "sliding_window_layers": (1,)},
        {"attn_mask_type": "block_causal"},
        {"attn_mask_type": "block_causal", "attn_backend": "flex"},
    ],
)
def test_same_tokens_as_without_a_cache(changes: dict[str, object]) -> None:
    model = build(**changes)
    reference = build(**{**changes, "attn_backend": "sdpa"})
    expected = greedy(reference, PROMPT, 16)
    assert len(set(expected)) > 3
    assert list(generate(model, PROMPT, 16)) == expected


def test_cached_logits_in_pieces() -> None:
    """A prompt fed in pieces of any length gives the logits of one pass."""
    model = build(sliding_window=4)
    tokens = torch.randint(0, 60, (2, 14))
    cache = KVCache(model.arch, 2, 14, torch.device("cpu"), torch.float32)
    with torch.no_grad():
        pieces = torch.cat([model(piece, cache=cache) for piece in tokens.split([5, 1, 6, 2], dim=1)], dim=1)
        torch.testing.assert_close(pieces, model(tokens), atol=1e-5, rtol=1e-5)
    assert cache.used == 14


def test_documents_and_a_cache_exclude_each_other() -> None:
    model = build(attn_mask_type="block_causal")
    cache = KVCache(model.arch, 1, 4, torch.device("cpu"), torch.float32)
    with pytest.raises(ValueError, match="one document per row"):
        model(torch.zeros(1, 4, dtype=torch.int64), documents=torch.zeros(1, 4), cache=cache)


def test_sampling_is_reproducible_and_varies_with_the_seed() -> None:
    model = build()

    def draw(seed: int, **options: float) -> list[int]:
        return list(generate(model, PROMPT, 12, temperature=1.5, seed=seed, **options))

    torch.manual_seed(0)
    first = draw(7)
    torch.manual_seed(1)
    assert draw(7) == first
    assert draw(8) != first
    assert draw(7, top_k=1) == list(generate(model, PROMPT, 12))
    assert draw(7, top_p=1e-6) == list(generate(model, PROMPT, 12))


def test_sampling_stays_within_top_k_and_top_p() -> None:
    model = build(init_std=0.1)
    with torch.no_grad():
        probabilities = (model(torch.tensor([PROMPT]))[0, -1] / 2.0).softmax(0)
    order = probabilities.argsort(descending=True).tolist()
    nucleus = 1 + int((probabilities.sort(descending=True).values.cumsum(0) < 0.3).sum())
    for options, allowed in (({"top_k": 4}, order[:4]), ({"top_p": 0.3}, order[:nucleus])):
        drawn = {next(generate(model, PROMPT, 1, temperature=2.0, seed=seed, **options)) for seed in range(80)}
        assert drawn <= set(allowed)
        assert len(drawn) > 1


def test_stops_at_the_end_token() -> None:
    model = build()
    tokens = list(generate(model, PROMPT, 16))
    stop = tokens[4]
    upto = tokens[: tokens.index(stop) + 1]
    assert list(generate(model, PROMPT, 16, eos_id=stop)) == upto
    assert list(generate(model, PROMPT, 16, eos_id=[59, stop])) == upto
    assert list(generate(model, PROMPT, 0)) == []


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="the prompt is empty"):
        next(generate(build(), [], 1))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_weights_that_are_not_finite_are_named(bad: float, temperature: float) -> None:
    model = build()
    with torch.no_grad():
        model.block(1).attention.wo.weight[0, 0] = bad
    with pytest.raises(UserError, match="not finite: its weights are damaged"):
        next(generate(model, PROMPT, 4, temperature=temperature))
