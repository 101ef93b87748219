"""Ten training steps against a plain loop around the transformers model, in float32: losses, gradients, weights."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from shardline.data.loader import Batch
from shardline.models.decoder import Decoder
from shardline.models.fused import unfuse
from shardline.models.hf import hf_name
from shardline.models.state import logical_state
from shardline.training.trainer import Trainer
from tests.e2e.tiny import rows, tiny_config

transformers = pytest.importorskip("transformers")

STEPS, BATCH, LENGTH = 10, 6, 40
BOS = 256  # of the byte tokenizer: it opens every document
SIZES = {
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 264,
    "max_position_embeddings": 128,
    "initializer_range": 0.08,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"attention_bias": True}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "mistral": ("Mistral", {"sliding_window": 11, "head_dim": 16}),
}


@dataclass
class Record:
    """What ten steps leave behind; gradients (of step 1, before clipping) and weights by Hugging Face's names."""

    losses: list[float]
    norms: list[float]
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]


Mutation = Callable[[Trainer], None]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents shorter than a sample, of unequal length: every sample holds the ends of some."""
    lines = [f"{n} green bottles " * (1 + n * 7 % 5) for n in range(400)]
    path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    path.write_text("\n".join(json.dumps({"text": line}) for line in lines))
    return path


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A small random checkpoint of each family, as transformers saves it."""
    folder = tmp_path_factory.mktemp("checkpoints")
    for case, (family, changes) in FAMILIES.items():
        torch.manual_seed(11)
        config = getattr(transformers, f"{family}Config")(**{**SIZES, **changes})
        model = getattr(transformers, f"{family}ForCausalLM")(config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "norm" in name or name.endswith("bias"):  # their constants would hide a swapped one
                    parameter.add_(torch.randn_like(parameter) * 0.1)
        model.save_pretrained(folder / case)
    return {case: folder / case for case in FAMILIES}


def settings(folder: Path, corpus: Path, **changes: Any) -> dict[str, Any]:
    return {
        "model__name": "auto",
        "model__hf_assets_path": str(folder),
        "model__tokenizer_path": "bytes",
        "model__overrides": {},
        "checkpoint__enable": True,
        "checkpoint__load_only": True,
        "checkpoint__initial_load_in_hf": True,
        "training__dataset_path": str(corpus),
        "training__cache_folder": str(corpus.parent / "cache"),
        "training__steps": STEPS,
        "training__seq_len": LENGTH,
        "training__local_batch_size": BATCH,
        "training__max_norm": 0.8,
        "optimizer__lr": 4e-3,
        "optimizer__weight_decay": 0.2,
        **changes,
    }


def under_hf_names(model: Decoder, choose: Callable[[Any], Tensor]) -> dict[str, Tensor]:
    found = {}
    for name, parameter in model.named_parameters():
        for part, tensor in unfuse(model.arch, name, choose(parameter)).items():
            found[hf_name(part)] = tensor.detach().clone()
    return found


def train_ours(run: Path, options: dict[str, Any], mutate: Mutation | None = None) -> tuple[Record, Trainer, list[Any]]:
    """A whole run of the trainer; also the micro-batches of each step, as its loader gave them."""
    trainer = Trainer(tiny_config(run, **options))
    steps: list[list[Batch]] = []
    gradients: dict[str, Tensor] = {}
    read, compute = trainer.loader.step, trainer.forward_backward

    def recorded_read() -> list[Batch]:
        steps.append(read())
        return steps[-1]

    def recorded_compute(batches: list[Batch]) -> Tensor:
        loss = compute(batches)
        if not gradients:
            gradients.update(under_hf_names(trainer.model, lambda parameter: parameter.grad))
        return loss

    trainer.loader.step = recorded_read
    trainer.forward_backward = recorded_compute
    if mutate is not None:
        mutate(trainer)
    trainer.train()
    written = rows(run)
    weights = {hf_name(name): tensor for name, tensor in logical_state(trainer.model).items()}
    record = Record([row["loss"] for row in written], [row["grad_norm"] for row in written], gradients, weights)
    return record, trainer, steps


def train_theirs(folder: Path, trainer: Trainer, steps: list[list[Batch]], lrs: list[float]) -> Record:
    """The same samples through transformers and torch.optim, each step as one batch."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").train()
    section = trainer.config.optimizer
    optimizer = torch.optim.AdamW(
        model.parameters(),
        betas=(section.beta1, section.beta2),
        eps=section.eps,
        weight_decay=section.weight_decay,
        foreach=False,
        fused=False,
    )
    record = Record([], [], {}, {})
    apart = trainer.arch.attn_mask_type == "block_causal"
    for batches, lr in zip(steps, lrs, strict=True):
        tokens = torch.cat([batch.tokens for batch in batches])
        labels = torch.cat([batch.labels for batch in batches])
        mask = separate_documents(tokens, trainer.arch.sliding_window or LENGTH) if apart else None
        logits = model(tokens, attention_mask=mask).logits
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        record.gradients = record.gradients or {n: p.grad.clone() for n, p in model.named_parameters()}
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), trainer.config.training.max_norm)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        record.losses.append(loss.item())
        record.norms.append(norm.item())
    record.weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return record


def separate_documents(tokens: Tensor, window: int) -> Tensor:
    """An additive mask (B, 1, S, S), from the tokens alone: a document begins at its start token."""
    documents = (tokens == BOS).cumsum(1)
    seen = (documents[:, :, None] == documents[:, None, :]).tril().triu(1 - window)
    return torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)[:, None]


def compare(ours: Record, theirs: Record) -> None:
    """Loss and norm of every step within 1e-4, each gradient of step 1 and each final weight within 1e-3."""
    assert len(ours.losses) == len(theirs.losses) == STEPS
    for step in range(STEPS):
        assert ours.losses[step] == pytest.approx(theirs.losses[step], rel=1e-4), f"loss of step {step + 1}"
        assert ours.norms[step] == pytest.approx(theirs.norms[step], rel=1e-4), f"norm of step {step + 1}"
    for what, found, expected in (
        ("gradient", ours.gradients, theirs.gradients),
        ("weight", ours.weights, theirs.weights),
    ):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert value.norm() > 0
            assert (found[name] - value).norm() < 1e-3 * value.norm(), f"{what} {name}"


def both(
    run: Path, folder: Path, corpus: Path, mutate: Mutation | None = None, **changes: Any
) -> tuple[Record, Record, list[list[Batch]]]:
    ours, trainer, steps = train_ours(run, settings(folder, corpus, **changes), mutate)
    theirs = train_theirs(folder, trainer, steps, [row["lr"] for row in rows(run)])
    return ours, theirs, steps


VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "tied": ("llama-tied", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "mistral": ("mistral", {}),
    "accumulation": ("qwen3", {"training__local_batch_size": 2, "training__global_batch_size": BATCH}),
    "documents": ("llama-tied", {"model__overrides": {"attn_mask_type": "block_causal"}}),
    "documents-window-accumulation": (
        "mistral",
        {
            "model__overrides": {"attn_mask_type": "block_causal"},
            "training__local_batch_size": 1,
            "training__global_batch_size": BATCH,
        },
    ),
    "checkpointing": ("qwen3", {"activation_checkpoint__mode": "full"}),
    "compiled": ("llama", {"compile__enable": True, "compile__backend": "aot_eager"}),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_ten_steps_equal_transformers(variant: str, corpus: Path, checkpoints: dict[str, Path], tmp_path: Path) -> None:
    family, changes = VARIANTS[variant]
    ours, theirs, steps = both(tmp_path / "run", checkpoints[family], corpus, **changes)
    print(
        max(abs(a - b) / b for a, b in zip(ours.losses, theirs.losses)),
        max(abs(a - b) / b for a, b in zip(ours.norms, theirs.norms)),
        max(((ours.gradients[n] - v).norm() / v.norm()).item() for n, v in theirs.gradients.items()),
        max(((ours.weights[n] - v).norm() / v.norm()).item() for n, v in theirs.weights.items()),
        theirs.losses,
        theirs.norms,
    )
    compare(ours, theirs)
