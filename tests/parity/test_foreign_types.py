"""Models of many types train through the code of transformers as in a plain loop, and export what they have."""

import re
from pathlib import Path

import pytest
import torch

from shardline.adapters.lora import adaptation
from shardline.adapters.peft_files import write_peft
from shardline.checkpoint.convert import export
from shardline.checkpoint.lora.adapter import find_adapter
from shardline.config.schema import Lora
from shardline.errors import UserError
from shardline.models.huggingface.config import architecture_from_hf
from shardline.tools.saved_model import of_adapter

transformers = pytest.importorskip("transformers")
from tests.foreign_types import BEGIN, END, PAGE, check_training, write_tiny  # noqa: E402

pytestmark = pytest.mark.usefixtures("on_cpu")
FAST = ("gpt2", "phi", "stablelm")
# Types with linear layers in their blocks that their code does not call, and one whose code changes weights in place.
PASSED_BY = (
    *("bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "marian", "mbart", "mvp", "pegasus", "plbart"),
    *("prophetnet", "trocr", "whisper", "falcon_mamba", "jamba", "mamba", "longcat_flash"),
)
WITHOUT_TARGETS = ("rwkv",)


def listed() -> list[str]:
    """The types that docs/models.md says to train."""
    table = PAGE.read_text().partition(BEGIN)[2].partition(END)[0]
    line = next(line for line in table.splitlines() if "train as a plain loop does" in line)
    return re.findall(r"`([^`]+)`", line)


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind in FAST else [pytest.mark.slow]) for kind in listed()]
)
def test_a_type_trains_as_in_a_plain_loop(kind: str, tmp_path: Path) -> None:
    check_training(kind, tmp_path)


def test_the_page_lists_the_fast_ones() -> None:
    assert set(FAST) <= set(listed())


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in listed() if kind not in WITHOUT_TARGETS])
def test_an_adapter_beside_all_linear_layers_computes_what_its_merged_folder_does(kind: str, tmp_path: Path) -> None:
    before = write_tiny(kind, tmp_path / "base").eval()
    arch = architecture_from_hf(tmp_path / "base")
    how = adaptation(Lora(rank=4, alpha=8.0), arch)
    torch.manual_seed(0)
    tensors = {name: torch.randn(shape) * 0.1 for name, shape in how.shapes(arch).items()}
    write_peft(tmp_path / "adapter", tensors, how, arch, str(tmp_path / "base"))
    adapter = find_adapter(tmp_path / "adapter", None)
    assert adapter is not None
    ours = of_adapter(adapter).build(torch.device("cpu"))
    if kind in PASSED_BY:
        with pytest.raises(UserError, match="does not call"):
            ours.check_masks(torch.device("cpu"))
        return
    ours.check_masks(torch.device("cpu"))
    export(tmp_path / "adapter", tmp_path / "merged", merge=True)
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    tokens = torch.arange(24).view(2, 12) + 3
    with torch.no_grad():
        seen = ours(tokens)
        first, second = (model(input_ids=tokens, use_cache=False).logits for model in (merged, before))
    assert (seen - first).norm() <= 1e-4 * first.norm()
    assert (seen - second).norm() > 1e-2 * second.norm()
