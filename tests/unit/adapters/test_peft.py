"""Adapters are `peft`'s, both ways: its folders give the logits that it gives, and it reads what a run has trained."""

import contextlib
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from shardline.adapters.peft_files import write_peft
from shardline.checkpoint.convert import export
from shardline.checkpoint.lora.adapter import Adapter, find_adapter
from shardline.errors import UserError
from shardline.tools.saved_model import of_adapter
from tests import bad_values

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "vocab_size": 64,
    "max_position_embeddings": 64,
}
MOE = SIZES | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True}
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
TOKENS = torch.arange(24).view(2, 12) % 60
# name -> class, fields of the model, fields of the adapter
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("Llama", {}, {"target_modules": LINEAR}),
    "llama-some": ("Llama", {}, {"target_modules": ["q_proj", "v_proj", "down_proj"], "layers_to_transform": [1]}),
    "llama-rslora": ("Llama", {}, {"target_modules": LINEAR, "use_rslora": True}),
    "llama-dora": ("Llama", {}, {"target_modules": LINEAR, "use_dora": True}),
    "llama-ends": (
        "Llama",
        {"tie_word_embeddings": False},
        {"target_modules": ["q_proj", "embed_tokens"], "modules_to_save": ["lm_head", "norm"]},
    ),
    "llama-patterns": (
        "Llama",
        {},
        {
            "target_modules": LINEAR,
            "rank_pattern": {"k_proj": 2, r"layers\.1\.mlp\.(up|down)_proj": 6, "up_proj": 3, "nothing": 9},
            "alpha_pattern": {"self_attn.v_proj": 32, "k_proj": 1},
        },
    ),
    "llama-patterns-rslora-dora": (
        "Llama",
        {},
        {"target_modules": LINEAR, "rank_pattern": {"q_proj": 7}, "use_rslora": True, "use_dora": True},
    ),
    "llama-patterns-ends": (
        "Llama",
        {"tie_word_embeddings": False},
        {
            "target_modules": ["q_proj", "embed_tokens", "lm_head"],
            "rank_pattern": {"embed_tokens": 2, "lm_head": 5},
            "alpha_pattern": {"lm_head": 3},
        },
    ),
    "llama-head": ("Llama", {"tie_word_embeddings": False}, {"target_modules": ["lm_head", "k_proj"]}),
    "qwen2": ("Qwen2", {}, {"target_modules": LINEAR}),
    "qwen2-biases": ("Qwen2", {}, {"target_modules": LINEAR, "bias": "lora_only"}),
    "starcoder2-biases": ("Starcoder2", {}, {"target_modules": ["o_proj", "c_fc"], "bias": "all"}),
    "qwen3-tied": ("Qwen3", {"tie_word_embeddings": True}, {"target_modules": ["v_proj", "embed_tokens"]}),
    "qwen3_moe": ("Qwen3Moe", MOE, {"target_modules": ["q_proj", "o_proj"]}),
    "mixtral-experts": (
        "Mixtral",
        {"num_local_experts": 4, "num_experts_per_tok": 2},
        {"target_modules": ["k_proj"], "target_parameters": ["mlp.experts.gate_up_proj"], "use_rslora": True},
    ),
    "mixtral-experts-patterns": (
        "Mixtral",
        {"num_local_experts": 4, "num_experts_per_tok": 2},
        {
            "target_modules": ["k_proj"],
            "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
            "rank_pattern": {"layers.0.mlp.experts.gate_up_proj": 2, "k_proj": 6, "down_proj": 3},
            "alpha_pattern": {"experts.*": 5},
        },
    ),
    "qwen3_moe-experts": (
        "Qwen3Moe",
        MOE,
        {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]},
    ),
}


def _folder(tmp_path: Path, kind: str, fields: dict[str, Any]) -> tuple[Path, Any]:
    torch.manual_seed(1)
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **fields})
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    model.save_pretrained(tmp_path / "base")
    return tmp_path / "base", model


def _logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        out = model(TOKENS)
    return out if isinstance(out, torch.Tensor) else out.logits


# name -> type, fields of the adapter, of models that transformers computes; more cases of one fact are slow
FOREIGN: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", {"target_modules": ["c_attn", "c_proj", "c_fc"]}),
    "gpt2-dora": ("gpt2", {"target_modules": ["c_attn", "mlp.c_proj"], "use_dora": True}),
    "gpt2-patterns-biases": (
        "gpt2",
        {"target_modules": ["c_attn", "c_proj"], "rank_pattern": {"attn.c_proj": 2}, "bias": "all"},
    ),
    "gpt2-tied": ("gpt2", {"target_modules": ["c_attn", "wte"], "modules_to_save": ["ln_f"]}),
    "phi": ("phi", {"target_modules": "all-linear", "use_rslora": True}),
    "phi-head": ("phi", {"target_modules": ["q_proj", "lm_head", "embed_tokens"], "modules_to_save": ["fc1"]}),
    "stablelm": ("stablelm", {"target_modules": ["q_proj", "down_proj"], "layers_to_transform": [1]}),
    "olmoe": ("olmoe", {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}),
}
SLOW = ("gpt2-tied", "phi-head")
ALL = {**CASES, **{f"transformers-{name}": case for name, case in FOREIGN.items()}}


def _foreign_folder(tmp_path: Path, kind: str) -> tuple[Path, Any]:
    from tests.foreign_types import write_tiny

    return tmp_path / "base", write_tiny(kind, tmp_path / "base").eval()


@pytest.mark.parametrize(
    "case", [pytest.param(name, marks=[pytest.mark.slow] if name[13:] in SLOW else []) for name in ALL], ids=str
)
def test_an_adapter_of_peft_gives_its_logits_and_goes_back_to_it(tmp_path: Path, case: str, capsys: Any) -> None:
    *about, options = ALL[case]
    base, model = _foreign_folder(tmp_path, *about) if len(about) == 1 else _folder(tmp_path, *about)
    before = _logits(model)
    theirs = peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=8, task_type="CAUSAL_LM", **options)).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    wanted = _logits(theirs)
    assert (wanted - before).abs().max() > 1e-2
    theirs.save_pretrained(tmp_path / "adapter")
    adapter = find_adapter(tmp_path / "adapter", str(base))
    assert isinstance(adapter, Adapter)
    seen = _logits(of_adapter(adapter).build(torch.device("cpu")))
    assert (seen - wanted).abs().max() < 1e-4
    # back to peft
    write_peft(tmp_path / "ours", adapter.tensors, adapter.how, adapter.architecture, str(base))
    again = transformers.AutoModelForCausalLM.from_pretrained(base)
    reread = peft.PeftModel.from_pretrained(again, tmp_path / "ours").eval()
    assert (_logits(reread) - wanted).abs().max() < 1e-4
    # merged
    assert export(tmp_path / "adapter", tmp_path / "merged", merge=True, base=str(base)) == 0
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    assert (_logits(merged) - wanted).abs().max() < 1e-4


def test_a_folder_that_is_no_adapter_of_the_model_is_refused(tmp_path: Path) -> None:
    base, model = _folder(tmp_path, "Llama", {})
    peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj"])).save_pretrained(tmp_path / "adapter")
    other, _ = _folder(tmp_path / "other", "Llama", {"num_hidden_layers": 1, "hidden_size": 16})
    with pytest.raises(UserError, match="does not fit the model"):
        find_adapter(tmp_path / "adapter", str(other))
    config = tmp_path / "adapter" / "adapter_config.json"
    content = json.loads(config.read_text())
    for change, words in (
        ({"rank_pattern": {"q_proj": 8}}, "does not fit the model"),
        ({"rank_pattern": {"q_proj": "many"}}, "rank_pattern cannot be read"),
        ({"alpha_pattern": {"(q_proj": 8}}, "alpha_pattern cannot be read"),
        ({"bias": "some"}, "bias is 'some'"),
        ({"lora_bias": True}, "lora_bias = true is not supported"),
    ):
        config.write_text(json.dumps(content | change))
        with pytest.raises(UserError, match=words):
            find_adapter(tmp_path / "adapter", str(base))
    config.write_text(json.dumps(content | {"peft_type": "IA3"}))
    with pytest.raises(UserError, match="IA3"):
        find_adapter(tmp_path / "adapter", str(base))
    for name, value in itertools.product(content, bad_values.VALUES.values()):
        config.write_text(bad_values.text_of(bad_values.changed(content, (name,), value)))
        with contextlib.suppress(UserError):
            find_adapter(tmp_path / "adapter", str(base))
    for name, value in (
        ("r", 0),
        ("r", 2.5),
        ("lora_alpha", float("nan")),
        ("use_dora", "yes"),
        ("r", bad_values.DEEP),
    ):
        config.write_text(bad_values.text_of(content | {name: value}))
        with pytest.raises(UserError, match=rf"adapter_config\.json(: {name} = | cannot be read)"):
            find_adapter(tmp_path / "adapter", str(base))
    config.write_text(json.dumps(content))
    (tmp_path / "adapter" / "adapter_model.safetensors").unlink()
    with pytest.raises(UserError, match=r"no adapter_model.safetensors"):
        find_adapter(tmp_path / "adapter", str(base))
