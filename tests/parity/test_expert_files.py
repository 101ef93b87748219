"""Ranks that share experts and one Hugging Face folder: each reads its own experts, and the last save has them all."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from shardline.config.layout import resolve_layout
from shardline.config.load import load_config
from shardline.models.huggingface import files as hf
from shardline.models.huggingface.config import architecture_from_hf
from shardline.storage.safetensors import HeaderRow, header_of
from tests.model_state import hf_state
from tests.parity.cases import case
from tests.parity.harness import MODEL, Harness, Record, compare, join, train

transformers = pytest.importorskip("transformers")
EXPERTS = 4
SIZES = {
    "hidden_size": MODEL["dim"],
    "num_hidden_layers": MODEL["n_layers"],
    "num_attention_heads": MODEL["n_heads"],
    "num_key_value_heads": MODEL["n_kv_heads"],
    "head_dim": MODEL["head_dim"],
    "intermediate_size": MODEL["ffn_dim"],
    "vocab_size": MODEL["vocab_size"],
    "num_local_experts": EXPERTS,
    "num_experts_per_tok": 2,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mixtral")
    transformers.MixtralForCausalLM(transformers.MixtralConfig(**SIZES)).save_pretrained(path)
    return path


def train_and_map(settings: dict[str, Any]) -> tuple[Record, list[int]]:
    """On a rank: train, and write down where in the file the tensors begin that were mapped."""
    mapped: list[int] = []
    map_tensor = hf.map_tensor

    def recorded(path: Path, row: HeaderRow, *rows: slice) -> Tensor:
        mapped.append(row.start)
        return map_tensor(path, row, *rows)

    with patch.object(hf, "map_tensor", recorded):
        record = train(settings, None)
    return record, mapped


def test_ranks_read_their_experts_alone_and_save_all(folder: Path, harness: Harness, tmp_path: Path) -> None:
    start = {
        "model.name": "auto",
        "model.hf_assets_path": str(folder),
        "checkpoint.enable": True,
        "checkpoint.initial_load_in_hf": True,
        "checkpoint.last_save_in_hf": True,
        "training.steps": 2,
    }
    overrides = case("", start, {"parallelism.expert_parallel_degree": 2}, fsdp=2).overrides
    settings = harness.settings(overrides, 2) | {"job.dump_folder": str(tmp_path / "run")}
    outcomes = harness.pool.run(2, train_and_map, settings)
    layout = resolve_layout(load_config(overrides=settings).parallelism, 2)
    result = join([record for record, _ in outcomes], layout, tmp_path / "run")
    compare(harness.reference(overrides), result)

    file = folder / "model.safetensors"
    with file.open("rb") as content:
        header = header_of(content, file.stat().st_size)
    names = {row.start: name for name, row in header.items()}
    for rank, (_, mapped) in enumerate(outcomes):
        read = {names[place].split(".experts.")[1] for place in mapped if ".experts." in names[place]}
        first = rank * EXPERTS // 2
        assert read == {f"{first + n}.{part}.weight" for n in range(EXPERTS // 2) for part in ("w1", "w2", "w3")}

    # The last save brings the experts of both ranks into one folder again.
    saved = tmp_path / "run" / "checkpoint" / "step-2"
    stored, expected = load_file(saved / "model.safetensors"), hf_state(architecture_from_hf(saved), result.parameters)
    assert stored.keys() == expected.keys() == header.keys()
    for name, tensor in expected.items():
        assert torch.equal(stored[name], tensor), name
    _, report = transformers.AutoModelForCausalLM.from_pretrained(saved, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
