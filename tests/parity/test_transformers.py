"""Ten training steps against a plain loop around the transformers model, in float32: losses, gradients, weights."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from shardline.data.batch import Batch
from shardline.models.decoder import Decoder
from shardline.models.fused_weights import unfuse
from shardline.training.trainer import Trainer
from tests import proven
from tests.e2e.tiny import rows, tiny_config
from tests.model_state import hf_state

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("on_cpu")

STEPS, BATCH, LENGTH, MAX_NORM = 10, 6, 40, 2.5
LR_FACTORS = [0.5, 1.0, 1.0, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125]  # two steps of warmup, linear decay
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
    "mixtral": ("Mixtral", {"num_local_experts": 4, "head_dim": 16}),
    "gemma2": (
        "Gemma2",
        {
            "sliding_window": 11,
            "head_dim": 16,
            "query_pre_attn_scalar": 12,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 4.0,
        },
    ),
    "granite": (
        "Granite",
        {"embedding_multiplier": 6.0, "residual_multiplier": 0.5, "attention_multiplier": 0.2, "logits_scaling": 0.8},
    ),
    "starcoder2": ("Starcoder2", {"sliding_window": 11}),
    "cohere": ("Cohere", {"use_qk_norm": True, "logit_scale": 1.3}),
    "qwen3-moe": ("Qwen3Moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40}),
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
        "training__max_norm": MAX_NORM,
        "optimizer__lr": 4e-3,
        "optimizer__weight_decay": 0.2,
        **changes,
    }


def under_hf_names(model: Decoder, choose: Callable[[Any], Tensor]) -> dict[str, Tensor]:
    found = {}
    for name, parameter in model.named_parameters():
        for part, tensor in unfuse(model.arch, name, choose(parameter)).items():
            found[part] = tensor.detach().clone()
    return hf_state(model.arch, found)


def train_ours(run: Path, options: dict[str, Any], mutate: Mutation | None = None) -> tuple[Record, list[list[Batch]]]:
    """A whole run of the trainer, and the micro-batches of each step as its loader gave them."""
    trainer = Trainer(tiny_config(run, **options))
    steps: list[list[Batch]] = []
    gradients: dict[str, Tensor] = {}
    read, compute = trainer.loader.step, trainer.stepper.forward_backward

    def recorded_read() -> list[Batch]:
        steps.append(read())
        return steps[-1]

    def recorded_compute(batches: list[Batch]) -> Tensor:
        loss = compute(batches)
        if not gradients:
            gradients.update(under_hf_names(trainer.model, lambda parameter: parameter.grad))
        return loss

    trainer.loader.step = recorded_read
    trainer.stepper.forward_backward = recorded_compute
    if mutate is not None:
        mutate(trainer)
    trainer.train()
    written = rows(run)
    weights = under_hf_names(trainer.model, lambda parameter: parameter)
    return Record([row["loss"] for row in written], [row["grad_norm"] for row in written], gradients, weights), steps


def train_theirs(folder: Path, options: dict[str, Any], steps: list[list[Batch]]) -> Record:
    """The same samples through transformers and torch.optim, each step as one batch."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").train()
    optimizer = torch.optim.AdamW(
        model.parameters(), betas=(0.9, 0.95), eps=1e-8, weight_decay=options["optimizer__weight_decay"], foreach=False
    )
    record = Record([], [], {}, {})
    apart = options["model__overrides"].get("attn_mask_type") == "block_causal"
    for batches, factor in zip(steps, LR_FACTORS, strict=True):
        tokens = torch.cat([batch.tokens for batch in batches])
        labels = torch.cat([batch.labels for batch in batches])
        mask = separate_documents(tokens, getattr(model.config, "sliding_window", None) or LENGTH) if apart else None
        logits = model(tokens, attention_mask=mask).logits
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        record.gradients = record.gradients or as_stored(model, lambda parameter: parameter.grad.clone())
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), options["training__max_norm"])
        for group in optimizer.param_groups:
            group["lr"] = options["optimizer__lr"] * factor
        optimizer.step()
        record.losses.append(loss.item())
        record.norms.append(norm.item())
    record.weights = as_stored(model, lambda parameter: parameter.detach())
    return record


def as_stored(model: Any, choose: Callable[[Any], Tensor]) -> dict[str, Tensor]:
    """Tensors under the names of files, in which every expert has its own."""
    tensors = {name: choose(parameter) for name, parameter in model.named_parameters()}
    return transformers.core_model_loading.revert_weight_conversion(model, tensors)


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
    options = settings(folder, corpus, **changes)
    ours, steps = train_ours(run, options, mutate)
    return ours, train_theirs(folder, options, steps), steps


PACKED = {"model__overrides": {"attn_mask_type": "block_causal"}}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "tied": ("llama-tied", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "mistral": ("mistral", {}),
    "mixtral": ("mixtral", {}),
    "gemma2": ("gemma2", {}),
    "granite": ("granite", {}),
    "starcoder2": ("starcoder2", {}),
    "cohere": ("cohere", {}),
    "qwen3-moe": ("qwen3-moe", {"training__local_batch_size": 3, "training__global_batch_size": BATCH}),
    "accumulation": ("qwen3", {"training__local_batch_size": 2, "training__global_batch_size": BATCH}),
    "documents": ("llama-tied", PACKED),
    # Micro-batches of one sample each, with unequal numbers of targets: a mean of their means would differ.
    "documents-accumulation": (
        "mistral",
        {**PACKED, "training__local_batch_size": 1, "training__global_batch_size": BATCH},
    ),
    "checkpointing": ("qwen3", {"activation_checkpoint__mode": "full"}),
    "compiled": ("llama", {"compile__enable": True, "compile__backend": "aot_eager"}),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_ten_steps_equal_transformers(variant: str, corpus: Path, checkpoints: dict[str, Path], tmp_path: Path) -> None:
    family, changes = VARIANTS[variant]
    ours, theirs, steps = both(tmp_path / "run", checkpoints[family], corpus, **changes)
    compare(ours, theirs)
    assert theirs.losses[-1] < 0.7 * theirs.losses[0]
    clipped = [norm > MAX_NORM for norm in theirs.norms]
    assert any(clipped)
    assert not all(clipped)
    proven.note("family", FAMILIES[family][0])
    samples = torch.cat([batch.sample_ids for batches in steps for batch in batches])
    assert sorted(samples.tolist()) == list(range(STEPS * BATCH))
    if variant == "documents-accumulation":
        assert len({int((batch.labels != -100).sum()) for batch in steps[0]}) > 1


def scale_a_gradient(trainer: Trainer) -> None:
    trainer.model.layers["1"].ffn_norm.weight.register_hook(lambda gradient: gradient * 1.01)


def drop_the_clipping(trainer: Trainer) -> None:
    trainer.stepper.config = trainer.config.replace({"training.max_norm": 1e9})


def read_a_sample_twice(trainer: Trainer) -> None:
    read = trainer.loader.step

    def twice() -> list[Batch]:
        batch = read()[0]
        double = Batch(batch.tokens.clone(), batch.labels.clone(), batch.documents, batch.sample_ids)
        double.tokens[1], double.labels[1] = batch.tokens[0], batch.labels[0]
        return [double]

    trainer.loader.step = twice


def see_other_documents(trainer: Trainer) -> None:
    trainer.model.arch = trainer.arch.with_overrides({"attn_mask_type": "causal"})


def forget_weight_decay(trainer: Trainer) -> None:
    for group in trainer.optimizer.param_groups:
        group["weight_decay"] = 0.0


def step_late(trainer: Trainer) -> None:
    """The learning rate of the step before."""
    step = trainer.train_step

    def late(batches: list[Batch], asked_to_stop: bool) -> Any:
        trainer.progress.step -= 1
        result = step(batches, asked_to_stop)
        trainer.progress.step += 1
        return result

    trainer.train_step = late


NOTICED = {
    scale_a_gradient: r"gradient model\.layers\.1\.post_attention_layernorm\.weight",
    drop_the_clipping: "loss of step 3",
    read_a_sample_twice: "loss of step 1",
    see_other_documents: "loss of step 1",
    forget_weight_decay: "norm of step 2",
    step_late: "loss of step 2",
}


@pytest.mark.parametrize("mutate", NOTICED)
def test_the_comparison_notices(mutate: Mutation, corpus: Path, checkpoints: dict[str, Path], tmp_path: Path) -> None:
    changes = PACKED if mutate is see_other_documents else {}
    ours, theirs, _ = both(tmp_path / "run", checkpoints["llama-tied"], corpus, mutate, **changes)
    with pytest.raises(AssertionError, match=NOTICED[mutate]):
        compare(ours, theirs)
