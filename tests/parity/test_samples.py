"""Samples of every layout are what one process generates from the saved weights, and training does not notice them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from shardline.config.load import load_config
from shardline.config.names import SCHEDULES
from shardline.data.formats.prompts import prompt_tokens
from shardline.models.generate import generate
from shardline.tools.saved_model import open_model, tokenizer_at
from tests.parity import cases
from tests.parity.cases import Case, case
from tests.parity.harness import Harness, _chosen_device, _own_logging

PROMPTS = ["The sea", "a", "Once upon a time"]
NEW = 6
GREEDY = {"generation.prompts": PROMPTS, "generation.max_new_tokens": NEW, "generation.freq": 2}
DRAWN = GREEDY | {"generation.temperature": 0.9, "generation.top_k": 40, "generation.seed": 3}
SAVED = {"checkpoint.enable": True, "training.steps": 3}

LAYOUTS = [
    case("one-documents", cases.DOCUMENTS),
    case("tp2-cp2", tp=2, cp=2),
    case("fsdp2-pp2", cases.LOOPED, cases.layers(4), fsdp=2, pp=2),
    case("ddp2", ddp=2, slow=True),
    case("ddp2-accumulation-tied", cases.SMALL_BATCHES, cases.TIED, ddp=2, slow=True),
    case("hsdp2x2", ddp=2, fsdp=2, slow=True),
    case("tp2", tp=2, slow=True),
    case("tp2-odd-vocabulary", cases.ODD_VOCABULARY, tp=2, slow=True),
    case("tp2-no-loss-parallel", cases.NO_LOSS_PARALLEL, tp=2, slow=True),
    case("tp2-no-sequence", cases.NO_SEQUENCE, tp=2, slow=True),
    case("tp2-neither", cases.NO_SEQUENCE, cases.NO_LOSS_PARALLEL, tp=2, slow=True),
    case("async-tp2", cases.ASYNC, tp=2, slow=True),
    case("cp2-ring", cases.RING, cp=2, slow=True),
    case("cp2-allgather", cases.ALLGATHER, cp=2, slow=True),
    case("cp2-ulysses", cases.ULYSSES, cp=2, slow=True),
    *(case(f"pp2-{name}", cases.schedule(name), cases.layers(4), pp=2, slow=True) for name in SCHEDULES),
    case("pp2-cp2-tied", cases.TIED, pp=2, cp=2, slow=True),
    case("fsdp2-ep2", cases.EXPERTS, cases.ep(2), fsdp=2, slow=True),
    case("tp2-ep2", cases.EXPERTS, cases.ep(2), tp=2, slow=True),
    case("fsdp2-lora", cases.lora("all-linear", dropout=0.1), fsdp=2, slow=True),
    case("tp2-pp2-lora", cases.LORA, tp=2, pp=2, slow=True),
    case("transformers-fsdp2", cases.FOREIGN, fsdp=2, slow=True),
    case("transformers-ddp2-tied", cases.FOREIGN, cases.TIED, ddp=2, slow=True),
    case("fsdp2-compile", cases.COMPILE, fsdp=2, slow=True, timeout=300),
    case("offload", cases.OFFLOAD, slow=True),
    case("fsdp2-dpo", cases.DPO, fsdp=2, slow=True),
]


def trained(settings: dict[str, Any]) -> tuple[list[float], list[float]]:
    """On a rank: losses and gradient norms of each step."""
    from shardline.training.trainer import Trainer

    with _chosen_device(), _own_logging():
        trainer = Trainer(load_config(overrides=settings))
        step, seen = trainer.train_step, ([], [])

        def watched(*arguments: Any) -> Any:
            result = step(*arguments)
            seen[0].append(result.loss)
            seen[1].append(result.grad_norm)
            return result

        trainer.train_step = watched
        trainer.train()
        return seen


def run(harness: Harness, layout: Case, folder: Path, more: dict[str, Any]) -> list[Any]:
    settings = harness.settings({**layout.overrides, **SAVED, **more}, layout.ranks)
    return harness.pool.run(layout.ranks, trained, settings | {"job.dump_folder": str(folder)}, timeout=layout.timeout)


def samples(folder: Path, step: int) -> list[list[int]]:
    rows = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    assert sorted({row["step"] for row in rows}) == [1, 2, 3]
    chosen = [row for row in rows if row["step"] == step]
    assert [row["prompt"] for row in chosen] == PROMPTS
    return [row["tokens"] for row in chosen]


def generated(folder: Path, **sampling: Any) -> list[list[int]]:
    """What `shardline generate` makes of the same prompts, in one process with a cache."""
    saved = open_model(folder)
    words, model = tokenizer_at(saved.tokenizer, folder, saved.architecture), saved.build(torch.device("cpu"))
    prompts = [torch.tensor([prompt_tokens(words, text)]) for text in PROMPTS]
    return [list(generate(model, prompt, NEW, eos_id=words.eos_id, **sampling)) for prompt in prompts]


@pytest.mark.parametrize(
    "layout", [pytest.param(one, id=one.name, marks=[pytest.mark.slow] if one.slow else []) for one in LAYOUTS]
)
def test_samples_are_what_one_process_generates(harness: Harness, tmp_path: Path, layout: Case) -> None:
    greedy = run(harness, layout, tmp_path / "greedy", GREEDY)
    assert samples(tmp_path / "greedy", 3) == generated(tmp_path / "greedy")
    plain = run(harness, layout, tmp_path / "plain", {})
    assert not (tmp_path / "plain" / "samples.jsonl").exists()
    assert plain == greedy  # of every rank, bit by bit
    if layout.slow or layout.ranks == 1:
        drawn = run(harness, layout, tmp_path / "drawn", DRAWN)
        wanted = generated(tmp_path / "drawn", temperature=0.9, top_k=40, seed=3)
        assert samples(tmp_path / "drawn", 3) == wanted != samples(tmp_path / "greedy", 3)
        assert plain == drawn
