"""Tokens added by `[data]`: ids, rows of the model, and the tokenizer that a run keeps."""

import json

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from shardline.config.load import load_config
from shardline.data.formats.template import choose_template, without_generation
from shardline.data.tokenizer import JsonTokenizer, choose_tokenizer
from shardline.models.added_rows import AddedRows
from shardline.storage.safetensors import LazyTensors
from shardline.training.trainer import Trainer
from tests.unit.data import chat_tokenizers as chats


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("SHARDLINE_CACHE", str(tmp_path / "cache"))
    folder = chats.write_tokenizer(tmp_path / "model")
    size = JsonTokenizer(folder / "tokenizer.json").vocab_size
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=size, num_key_value_heads=2, **sizes)).save_pretrained(folder)
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello there"}]
    (tmp_path / "chat.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
    return folder


def settings(folder, **changes):
    return {
        "job.dump_folder": str(folder.parent / "run"),
        "model.name": "auto",
        "model.hf_assets_path": str(folder),
        "checkpoint.enable": True,
        "checkpoint.initial_load_in_hf": True,
        "checkpoint.last_save_model_only": True,
        "checkpoint.last_save_in_hf": True,
        "training.seq_len": 64,
        "training.local_batch_size": 1,
        "training.steps": 1,
        "optimizer.lr": 0.0,
        "data.sources": [{"path": str(folder.parent / "chat.jsonl"), "type": "chat_template"}],
        "data.chat_template": "chatml",
    } | changes


def test_new_rows_are_the_mean_of_the_old_ones_and_the_tokenizer_is_kept(folder):
    added = {"data.added_tokens": ["<new>", "<newer>"], "data.special_tokens": {"eos_token": "<|im_end|>"}}
    config = load_config(None, settings(folder, **added))
    before = LlamaForCausalLM.from_pretrained(folder).model.embed_tokens.weight.detach()
    trainer = Trainer(config)
    weights = {"tok_embeddings": trainer.model.tok_embeddings.weight, "output": trainer.model.output.weight}
    state = {f"{name}.weight": weight.detach().clone() for name, weight in weights.items()}
    trainer.train()
    for name in ("tok_embeddings.weight", "output.weight"):
        assert len(state[name]) == len(before) + 2
    embedding = state["tok_embeddings.weight"]
    assert torch.equal(embedding[: len(before)], before)
    assert torch.allclose(embedding[len(before) :], before.mean(0).expand(2, -1), atol=1e-6)
    kept = folder.parent / "run" / "tokenizer"
    again = JsonTokenizer(kept / "tokenizer.json")
    assert again.token_id("<new>") == len(before)
    assert again.special_tokens["eos_token"] == "<|im_end|>"
    exported = folder.parent / "run" / "checkpoint" / "step-1"
    messages = [{"role": "user", "content": "Hi"}]
    text = chats.load_in_transformers(exported).apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert LlamaForCausalLM.from_pretrained(exported).config.vocab_size == len(before) + 2


def test_a_vocabulary_with_room_keeps_its_size(folder):
    config = load_config(None, settings(folder, **{"data.special_tokens": {"pad_token": "</s>"}}))
    tokenizer = choose_tokenizer(config)
    assert tokenizer.pad_id == tokenizer.token_id("</s>")
    assert tokenizer.vocab_size == JsonTokenizer(folder / "tokenizer.json").vocab_size


def test_a_template_without_its_marks_renders_the_same(folder):
    tokenizer = JsonTokenizer(folder / "tokenizer.json")
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello there"}]
    for name in ("chatml", "qwen3", "llama3", "gemma"):
        template = choose_template(name, None, tokenizer)
        plain = choose_template("jinja", without_generation(template.text), tokenizer)
        assert plain.render(messages).text == template.render(messages).text
        assert "generation %" not in plain.text


class Stored(LazyTensors):
    """Tensors in memory."""

    def __init__(self, tensors):
        self._rows = tensors

    def __getitem__(self, name):
        return self._rows[name]

    def dtype(self, name):
        return self._rows[name].dtype


@pytest.mark.parametrize("place", [slice(0, 3), slice(3, 6), slice(5, 9), slice(8, 9), slice(None)])
def test_a_rank_reads_its_rows_of_old_and_new_tokens(place):
    torch.manual_seed(0)
    old = torch.randn(7, 4)
    whole = torch.cat([old, old.mean(0).expand(2, -1)])
    tensors = AddedRows(Stored({"tok_embeddings.weight": old, "norm.weight": old[0]}), 7, 2)
    assert torch.allclose(tensors.part("tok_embeddings.weight", (place, slice(1, 3))), whole[place, 1:3], atol=1e-6)
    assert torch.equal(tensors["norm.weight"], old[0])


def test_frozen_weights_get_rows_for_added_tokens_too(folder):
    added = {"data.added_tokens": ["<new>", "<newer>"], "lora.enable": True}
    added |= {"lora.rank": 4, "lora.modules_to_save": ["tok_embeddings", "output"]}
    trainer = Trainer(load_config(None, settings(folder, **added)))
    before = LlamaForCausalLM.from_pretrained(folder).model.embed_tokens.weight.detach()
    embedding = trainer.model.tok_embeddings.weight.detach().clone()
    assert len(embedding) == len(before) + 2
    torch.testing.assert_close(embedding[len(before) :].float(), before.mean(0).expand(2, -1), atol=1e-2, rtol=0)
    trainer.train()
