"""Text generation, one token at a time, with a cache of keys and values (models of transformers run without one)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from shardline.errors import UserError
from shardline.models.attention import KVCache
from shardline.models.decoder import Decoder
from shardline.models.rope import rope_changes


def generate(
    model: Decoder,
    tokens: Sequence[int] | Tensor,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    eos_id: int | Sequence[int] | None = None,
    seed: int = 0,
) -> Iterator[int]:
    """Yield the tokens that follow a prompt of at least one token, up to and including `eos_id`.

    Temperature 0 takes the likeliest token. Otherwise a CPU generator seeded with `seed` draws among the `top_k`
    likeliest tokens and the smallest set that holds `top_p` of the probability.
    """
    prompt = torch.as_tensor(tokens, dtype=torch.int64).flatten()
    if prompt.numel() == 0:
        raise ValueError("the prompt is empty: give at least one token")
    stops = set(eos_id if isinstance(eos_id, Sequence) else [] if eos_id is None else [eos_id])
    weight = next(model.parameters())
    length = prompt.numel() + max_new_tokens
    cache = None
    if model.arch.foreign is None:
        cache = KVCache(model.arch, 1, length, weight.device, model.compute_dtype or weight.dtype)
    elif length > model.arch.max_seq_len:
        raise UserError(
            f"{length} tokens are more than the {model.arch.max_seq_len} positions that config.json states: set a"
            " smaller --max-new-tokens"
        )
    generator = torch.Generator("cpu").manual_seed(seed)
    step = known = prompt.to(weight.device)[None]
    for _ in range(max_new_tokens):
        if cache is not None and cache.used > 0 and rope_changes(model.arch, cache.used, known.shape[1]):
            step, cache.used = known, 0  # cached keys were rotated by other frequencies
        logits = _next_logits(model, step, cache)
        if not logits.isfinite().all():  # on the CPU: no wait for the device
            raise UserError(
                "the model's logits are not finite: its weights are damaged, or too large for their type;"
                " use another checkpoint"
            )
        token = choose(logits, temperature, top_k, top_p, generator)
        yield token
        if token in stops:
            return
        new = torch.tensor([[token]], device=weight.device)
        known = torch.cat([known, new], dim=1)
        step = known if cache is None else new


@torch.no_grad()
def _next_logits(model: Decoder, step: Tensor, cache: KVCache | None) -> Tensor:
    """Logits (V,) of the next token, in float32 on the CPU; `step` (1, n) holds the new tokens; without cache, all."""
    if cache is None:
        logits: Tensor = model(step)[0, -1].float().cpu()
        return logits
    hidden = model.hidden(step, cache=cache)[0, -1]
    return model.logits(hidden).float().cpu()


def choose(
    logits: Tensor, temperature: float, top_k: int | None, top_p: float | None, generator: torch.Generator
) -> int:
    """The next token, from finite logits (V,) on the CPU; `generate` says what the options mean."""
    if temperature == 0:
        return int(logits.argmax())
    logits = logits / temperature
    if top_k is not None and top_k < logits.numel():
        logits = logits.masked_fill(logits < logits.topk(top_k).values[-1], float("-inf"))
    probabilities = logits.softmax(dim=-1)
    if top_p is not None and top_p < 1:
        ordered, places = probabilities.sort(descending=True)
        beyond = ordered.cumsum(0) - ordered >= top_p  # the likeliest token always stays
        probabilities[places[beyond]] = 0.0
    return int(torch.multinomial(probabilities, 1, generator=generator))
