"""Tiny models of every type that `transformers` can build, and whether they train through its code.

`python -m tests.foreign_types` writes the table of docs/models.md: each type is built with a few thousand parameters,
trained for three steps beside a plain loop around the same weights, saved, exported and opened again.
"""

from __future__ import annotations

import logging
import re
import resource
import signal
import sys
import tempfile
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from shardline.config.names import is_built
from shardline.data.loader import Batch
from shardline.errors import UserError
from shardline.models.huggingface.files import read_hf
from shardline.models.state import load_logical_state
from shardline.precision.mixed import Precision
from shardline.training.setup import build_model
from shardline.training.trainer import Trainer
from tests.e2e.tiny import rows, tiny_config

STEPS = 3
SECONDS = 60  # for one type
MOST_BYTES = 12 * 2**30
PAGE = Path(__file__).parents[1] / "docs" / "models.md"
BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"

# By the names that transformers has in common for all configs, where a config has them.
SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 272,
    "max_position_embeddings": 64,
    "head_dim": 8,
}
# Names that only some configs have.
OTHER_SIZES = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "moe_shared_expert_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "qk_head_dim": 16,
    "v_head_dim": 8,
    "state_size": 8,
    "mamba_d_state": 8,
    "mamba_d_head": 8,
    "mamba_n_heads": 8,
    "mamba_num_heads": 8,
    "mamba_head_dim": 8,
    "num_heads": 4,
    "n_groups": 1,
    "n_mamba_heads": 4,
    "mamba_n_groups": 1,
    "mamba_dt_rank": 4,
    "time_step_rank": 4,
    "word_embed_proj_dim": 32,
    "embedding_size": 32,
    "sliding_window": 16,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "attention_hidden_size": 32,
    "lru_width": 32,
    "chunk_size": 16,
    "mamba_chunk_size": 16,
    "index_head_dim": 8,
    "index_n_heads": 2,
    "index_topk": 8,
}
# What the defaults of a type say otherwise, or cannot say.
SPECIAL: dict[str, dict[str, Any]] = {
    "big_bird": {"attention_type": "original_full"},
    "bigbird_pegasus": {"attention_type": "original_full"},
    "falcon": {"num_kv_heads": 4},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    "bamba": {"attn_layer_indices": [1], "mamba_expand": 2},
    "ernie4_5_moe": {"moe_k": 2},
    "kimi_linear": {"num_experts_per_token": 2},
    "phimoe": {"router_jitter_noise": 0.0, "input_jitter_noise": 0.0},
    "plbart": {"decoder_attention_heads": 4, "encoder_attention_heads": 4},
    "whisper": {"decoder_attention_heads": 4, "encoder_attention_heads": 4},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"layers_block_type": ["mamba", "hybrid"], "attention_hidden_size": 64, "attention_head_dim": 16},
    "zamba2": {
        "layers_block_type": ["linear_attention", "hybrid"],
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "mamba_headdim": 16,
    },
    "xlstm": {"num_heads": 4, "qk_dim_factor": 0.5},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "mpt": {"n_heads": 4, "d_model": 32, "n_layers": 2, "expansion_ratio": 2},
    "dbrx": {
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
    },
    "mamba2": {"num_heads": 8, "head_dim": 8, "expand": 2},
    "falcon_mamba": {"expand": 2},
    "codegen": {"rotary_dim": 8},
    "gptj": {"rotary_dim": 8},
    "moshi": {"num_codebooks": 2},
    "bailing_hybrid": {
        "num_expert_group": 1,
        "num_experts_per_token": 2,
        "linear_head_dim": 8,
        "linear_num_heads": 4,
    },
    "cohere_compass_text": {
        "rope_parameters": {
            name: {"rope_type": "default", "rope_theta": 10000.0} for name in ("full_attention", "sliding_attention")
        },
    },
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1},
    "falcon_h1": {"mamba_d_ssm": 64},
    "gemma3n_text": {
        "num_kv_shared_layers": 0,
        "vocab_size_per_layer_input": 272,
        "hidden_size_per_layer_input": 8,
        "laurel_rank": 8,
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "longcat_flash": {
        "moe_topk": 2,
        "ffn_hidden_size": 48,
        "expert_ffn_hidden_size": 16,
        "zero_expert_num": 2,
        "num_layers": 1,
        "head_dim": 8,
    },
    "zaya": {"num_experts_per_tok": 1},
}


def kinds() -> list[str]:
    """The types that have a causal language model and that the decoder does not compute itself."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(kind for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if not is_built(kind))


def tiny_options(kind: str) -> tuple[Any, dict[str, Any]]:
    from transformers import CONFIG_MAPPING

    default = CONFIG_MAPPING[kind]()
    if type(default).sub_configs and kind not in SPECIAL:  # each part has sizes of its own, most of them large
        raise NotImplementedError("a model of several parts")
    content, renamed = default.to_dict(), type(default).attribute_map
    options = {renamed.get(name, name): size for name, size in SIZES.items() if hasattr(default, name)}
    options = {
        name: size for name, size in options.items() if not isinstance(getattr(type(default), name, None), property)
    }
    options |= {name: size for name, size in OTHER_SIZES.items() if isinstance(content.get(name), int)}
    if "kv_lora_rank" in options:  # latent attention
        options = {name: size for name, size in options.items() if name not in ("head_dim", "num_key_value_heads")}
        options["num_key_value_heads"] = 4
    options |= {name: True for name in ("is_decoder", "causal") if name in content}
    layers = getattr(default, "num_hidden_layers", None)
    for name, value in content.items():
        if isinstance(value, list) and value and len(value) == layers:
            options[name] = [value[0], value[-1]]
        if "drop" in name and isinstance(value, float):
            options[name] = 0.0
        if name in ("bos_token_id", "eos_token_id", "pad_token_id") and isinstance(value, int):
            options[name] = 1
    return CONFIG_MAPPING[kind], options | SPECIAL.get(kind, {})


def write_tiny(kind: str, folder: Path, **changes: Any) -> Any:
    """Save a random model of a type, with norms and biases that are no constants; returns it."""
    from transformers import AutoModelForCausalLM

    config, options = tiny_options(kind)
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(config(**{**options, **changes}), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(folder)
    return model


def settings(folder: Path, **changes: Any) -> dict[str, Any]:
    return {
        "model__name": "auto",
        "model__hf_assets_path": str(folder),
        "model__tokenizer_path": "bytes",
        "model__overrides": {},
        "checkpoint__enable": True,
        "checkpoint__initial_load_in_hf": True,
        "checkpoint__last_save_in_hf": True,
        "checkpoint__last_save_model_only": True,
        "training__steps": STEPS,
        "training__seq_len": 24,
        "training__local_batch_size": 2,
        "training__max_norm": 1.0,
        "optimizer__lr": 1e-3,
        **changes,
    }


@dataclass
class Record:
    """Losses, and the gradients of the first step."""

    losses: list[float] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)


def train_ours(run: Path, folder: Path, **changes: Any) -> tuple[Record, list[tuple[list[Batch], float]]]:
    """What a run computes, and the batches and the learning rate of each step."""
    trainer = Trainer(tiny_config(run, **settings(folder, **changes)))
    batches: list[list[Batch]] = []
    record = Record()
    read, compute = trainer.loader.step, trainer.stepper.forward_backward

    def recorded_read() -> list[Batch]:
        batches.append(read())
        return batches[-1]

    def recorded_compute(given: list[Batch]) -> Tensor:
        loss = compute(given)
        record.losses.append(float(loss))
        record.gradients = record.gradients or _gradients(trainer.model)
        return loss

    trainer.loader.step = recorded_read
    trainer.stepper.forward_backward = recorded_compute
    trainer.train()
    return record, [(some, row["lr"]) for some, row in zip(batches, rows(run), strict=True)]


def _gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def train_theirs(model: Any, steps: list[tuple[list[Batch], float]]) -> Record:
    """The same samples through a plain loop."""
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, foreach=False)
    record = Record()
    model.train()
    for batches, lr in steps:
        tokens, labels = (torch.cat([getattr(batch, name) for batch in batches]) for name in ("tokens", "labels"))
        logits = model(input_ids=tokens, use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        record.losses.append(loss.item())
        record.gradients = record.gradients or _gradients(model)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
    return record


def compare(ours: Record, theirs: Record) -> None:
    for step, (one, other) in enumerate(zip(ours.losses, theirs.losses, strict=True), start=1):
        assert abs(one - other) <= 1e-4 * abs(other), f"loss of step {step}: {one} and {other}"
    assert ours.gradients.keys() == theirs.gradients.keys(), "other parameters have gradients"
    largest = max(float(gradient.norm()) for gradient in theirs.gradients.values())
    for name, gradient in theirs.gradients.items():
        difference = float((ours.gradients[name] - gradient).norm())
        assert difference <= 1e-3 * float(gradient.norm()) + 1e-6 * largest, f"gradient of {name}"


def check_training(kind: str, place: Path) -> None:
    """Three steps equal those of a plain loop; what the run exports opens and computes what the loop's model does."""
    from transformers import AutoModelForCausalLM

    theirs = write_tiny(kind, place / "folder")
    record, steps = train_ours(place / "run", place / "folder")
    compare(record, train_theirs(theirs, steps))
    exported = place / "run" / "checkpoint" / f"step-{STEPS}"
    again = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32).eval()
    tensors = read_hf(exported)
    ours, _ = build_model(tensors.arch, torch.device("cpu"), Precision(torch.float32, torch.float32, torch.float32))
    load_logical_state(ours, tensors)
    ours.eval()
    tokens = torch.arange(16)[None]
    with torch.no_grad():
        first, third = (model(tokens, use_cache=False).logits for model in (again, theirs.eval()))
        second = ours(tokens)
    assert (first - second).norm() <= 1e-5 * first.norm(), "the exported folder computes something else"
    assert (first - third).norm() <= 1e-3 * third.norm(), "the weights after the last step differ"


def _main() -> None:
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    outcomes = {}
    for kind in sys.argv[1:] or kinds():
        with tempfile.TemporaryDirectory() as place:
            outcomes[kind] = _outcome(kind, Path(place))
        print(f"{kind:<28} {outcomes[kind]}", file=sys.stderr, flush=True)
    if not sys.argv[1:]:
        head, _, rest = PAGE.read_text().partition(BEGIN)
        table = "\n".join([BEGIN, *_table(outcomes), END])
        PAGE.write_text(head + table + rest.partition(END)[2])


def _outcome(kind: str, place: Path) -> str:
    """Empty if the type trains; otherwise why not."""
    resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, resource.RLIM_INFINITY))

    def stop(*_: Any) -> None:
        raise TimeoutError(f"more than {SECONDS} seconds")

    signal.signal(signal.SIGALRM, stop)
    try:
        signal.alarm(SECONDS)
        write_tiny(kind, place / "built")(input_ids=torch.arange(24)[None], use_cache=False).logits.sum().backward()
    except BaseException as error:
        return f"not tried: {_first_line(error)}"
    finally:
        signal.alarm(0)
    try:
        signal.alarm(SECONDS)
        check_training(kind, place)
    except BaseException as error:
        return _first_line(error)
    finally:
        signal.alarm(0)
    return ""


def _first_line(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        raise error
    text = (str(error).splitlines() or [""])[0]
    text = re.sub(r"/\S*/(\S+)", r"\1", text)
    text = text.partition(", so that")[0]
    if isinstance(error, UserError):
        return f"{text}, and is refused"
    return f"{type(error).__name__}: {text}"[:160]


def _table(rows: dict[str, str]) -> list[str]:
    import transformers

    works = [kind for kind, why in rows.items() if not why]
    tried = {kind: why for kind, why in rows.items() if why and not why.startswith("not tried")}
    others = {kind: why.removeprefix("not tried: ") for kind, why in rows.items() if why.startswith("not tried")}
    lines = [
        f"With transformers {transformers.__version__}, of {len(rows)} types that are not built here:",
        "",
        f"- **{len(works)} train as a plain loop does**: {', '.join(f'`{kind}`' for kind in works)}.",
        f"- **{len(tried)} do not**:",
        "",
        "| type | why |",
        "|---|---|",
        *(f"| `{kind}` | {why.replace('|', '/')} |" for kind, why in tried.items()),
        "",
        f"- **{len(others)} were not tried**, because no tiny model of the type could be made from its defaults:"
        f" {', '.join(f'`{kind}`' for kind in others)}.",
    ]
    return lines


if __name__ == "__main__":
    _main()
