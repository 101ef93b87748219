"""Small random Hugging Face folders with a tokenizer, as transformers saves them, for tests."""

from __future__ import annotations

import functools
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "bos_token_id": 0,
    "eos_token_id": [1, 2],
}
TEXTS = ["the green bottle on the wall", "the wall on the green hill", "ein grüner Hügel, 緑の丘, 😀"]


def write_model(
    folder: Path, family: str = "Llama", dtype: torch.dtype = torch.float32, shard: str = "5GB", **changes: Any
) -> Path:
    torch.manual_seed(3)
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **changes})
    model = getattr(transformers, f"{family}ForCausalLM")(config).to(dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):  # their constants would hide a swapped one
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder, max_shard_size=shard)
    shutil.copytree(tokenizer_folder(), folder, dirs_exist_ok=True)
    return folder


@functools.cache
def tokenizer_folder() -> Path:
    """A byte-level tokenizer of 300 ids: 0 begins a text, 1 ends it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=alphabet, special_tokens=["<s>", "</s>", "<end>"], show_progress=False
    )
    backend.train_from_iterator(TEXTS * 3, trainer)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    temporary.append(tempfile.TemporaryDirectory())
    fast.save_pretrained(temporary[-1].name)
    return Path(temporary[-1].name)


temporary: list[tempfile.TemporaryDirectory[str]] = []
