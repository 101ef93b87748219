"""Named sizes: their published parameter counts, and what `model.*` resolves to."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from shardline import registry
from shardline.config.architecture import Architecture, MixtureOfExperts
from shardline.config.names import NOT_BUILT
from shardline.errors import ConfigError
from shardline.models.decoder import Decoder
from shardline.models.flavors import FLAVORS, resolve
from shardline.models.fused_weights import active_parameter_count, parameter_count
from shardline.models.huggingface.config import architecture_from_dict, export_family, hf_config

PUBLISHED = {
    ("llama3", "1B"): 1_235_814_400,
    ("llama3", "3B"): 3_212_749_824,
    ("llama3", "8B"): 8_030_261_248,
    ("llama3", "70B"): 70_553_706_496,
    ("llama3", "405B"): 405_853_388_800,
    ("qwen3", "0.6B"): 596_049_920,
    ("qwen3", "1.7B"): 1_720_574_976,
    ("qwen3", "4B"): 4_022_468_096,
    ("qwen3", "8B"): 8_190_735_360,
    ("qwen3", "14B"): 14_768_307_200,
    ("qwen3", "32B"): 32_762_123_264,
    ("qwen3", "30B-A3B"): 30_532_122_624,
    ("qwen3", "235B-A22B"): 235_093_634_560,
    ("mixtral", "8x7B"): 46_702_792_704,
    ("mixtral", "8x22B"): 140_620_634_112,
    ("deepseek_v3", "16B"): 15_706_484_224,
    ("deepseek_v3", "236B"): 235_741_434_880,
    ("deepseek_v3", "671B"): 671_026_419_200,
    ("llama4", "17bx16e"): 107_769_861_120,  # of the text model
    ("llama4", "17bx128e"): 400_711_848_960,
    ("llama4", "17bx16e_irope"): 107_769_861_120,
    ("llama4", "17bx128e_irope"): 400_711_848_960,
    ("gemma2", "2B"): 2_614_341_888,
    ("gemma2", "9B"): 9_241_705_984,
    ("gemma2", "27B"): 27_227_128_320,
    ("gemma3", "1B"): 999_885_952,
    ("gemma3", "4B"): 4_300_079_472 - 416_866_032 - 1152 * 2561,  # without the tower of images and the way to it
    ("gemma3", "12B"): 12_187_325_040 - 416_866_032 - 1152 * 3841,
    ("gemma3", "27B"): 27_432_406_640 - 416_866_032 - 1152 * 5377,
    ("phi3", "mini"): 3_821_079_552,
    ("phi3", "medium"): 13_960_238_080,
    ("phi4", "14B"): 14_659_507_200,
    ("olmo2", "7B"): 7_298_617_344,
    ("olmo2", "13B"): 13_716_198_400,
    ("olmo2", "32B"): 32_234_279_936,
    ("granite", "2B"): 2_533_531_648,
    ("granite", "8B"): 8_170_848_256,
    ("smollm3", "3B"): 3_075_098_624,
    ("glm4", "9B"): 9_400_279_040,
    ("starcoder2", "3B"): 3_030_371_328,
    ("starcoder2", "7B"): 7_173_923_840,
    ("command_r", "35B"): 34_980_831_232,
    ("command_r", "7B"): 8_028_033_024,
    ("falcon3", "1B"): 1_669_408_768,
    ("falcon3", "3B"): 3_227_655_168,
    ("falcon3", "7B"): 7_455_550_464,
    ("falcon3", "10B"): 10_305_653_760,
    ("gpt_oss", "20b"): 20_914_757_184,
    ("gpt_oss", "120b"): 116_829_156_672,
}
ACTIVE = {  # in billions, as published
    ("qwen3", "8B"): 8.2,
    ("qwen3", "30B-A3B"): 3.3,
    ("qwen3", "235B-A22B"): 22,
    ("mixtral", "8x7B"): 12.9,
    ("mixtral", "8x22B"): 39,
}


@dataclass
class Section:
    name: str = "llama3"
    flavor: str = "debugmodel"
    hf_assets_path: str = ""
    implementation: str = "auto"
    overrides: dict[str, Any] = field(default_factory=dict)


@pytest.mark.parametrize(("model", "flavor"), PUBLISHED)
def test_parameter_counts(model: str, flavor: str) -> None:
    arch = FLAVORS[model][flavor]
    if arch.moe is not None and arch.family != "deepseek_v3":  # the published weights of V3 alone have the bias
        arch = arch.with_overrides({"moe": {"balance_coeff": 0.0}})
    assert parameter_count(arch) == PUBLISHED[model, flavor]
    with torch.device("meta"):
        assert sum(parameter.numel() for parameter in Decoder(arch).parameters()) == PUBLISHED[model, flavor]


DENSE = "gemma2 gemma3 phi3 phi4 olmo2 granite smollm3 glm4 starcoder2 command_r falcon3"


@pytest.mark.parametrize("model", DENSE.split())
def test_dense_flavors_have_a_family_of_transformers(model: str) -> None:
    """The config.json of a flavor is one of its own family, and reads back as the flavor."""
    for arch in FLAVORS[model].values():
        assert export_family(arch) == arch.family
        assert architecture_from_dict(hf_config(arch)) == arch


@pytest.mark.parametrize(("model", "flavor"), ACTIVE)
def test_active_parameter_counts(model: str, flavor: str) -> None:
    found = active_parameter_count(FLAVORS[model][flavor]) / 1e9
    assert found == pytest.approx(ACTIVE[model, flavor], rel=0.02)


def test_llama4_and_gpt_oss() -> None:
    llama, gpt = FLAVORS["llama4"]["debugmodel_irope"], FLAVORS["gpt_oss"]["20b"]
    assert (llama.dim, llama.n_layers, llama.n_heads, llama.ffn_dim, llama.vocab_size) == (256, 6, 16, 768, 2048)
    assert (llama.rope_layers, llama.sliding_window_layers) == ((1, 2, 3, 5), (1, 2, 3, 5))
    assert (llama.sliding_window, llama.window_kind, llama.attn_mask_type) == (256, "chunked", "block_causal")
    assert llama.moe is not None
    assert [llama.moe.holds(layer) for layer in range(6)] == [False, True] * 3
    assert (llama.moe.expert_dim, llama.moe.shared_dim, llama.moe.scale_input) == (512, 512, True)
    plain = FLAVORS["llama4"]["debugmodel"]
    assert (plain.rope_layers, plain.sliding_window, plain.rope_pairs) == (None, None, "neighbors")
    assert (gpt.sinks, gpt.sliding_window, gpt.sliding_window_layers) == (True, 128, tuple(range(0, 24, 2)))
    assert gpt.moe is not None
    assert (gpt.moe.top_k, gpt.moe.activation, gpt.moe.router_bias) == (4, "clamped", True)


def test_debug_models() -> None:
    llama, qwen = FLAVORS["llama3"]["debugmodel"], FLAVORS["qwen3"]["debugmodel"]
    assert (llama.dim, llama.n_layers, llama.n_heads, llama.head_dim, llama.ffn_dim) == (256, 6, 16, 16, 768)
    assert (llama.vocab_size, llama.rope_theta) == (2048, 500000.0)
    assert (qwen.dim, qwen.n_layers, qwen.vocab_size, qwen.qk_norm, qwen.head_dim) == (256, 8, 2048, True, 128)
    flex = FLAVORS["llama3"]["debugmodel_flex_attn"]
    assert flex == llama.with_overrides({"attn_backend": "flex", "attn_mask_type": "block_causal"})
    assert FLAVORS["llama3"]["8B_varlen"].attn_backend == "varlen"
    moe = FLAVORS["qwen3"]["debugmodel_moe"].moe
    assert moe is not None
    assert (moe.n_experts, moe.top_k, moe.expert_dim, moe.shared_dim, moe.normalize) == (64, 8, 768, 0, True)
    assert moe.balance_coeff == 1e-3  # TorchTitan's default
    assert FLAVORS["mixtral"]["debugmodel"].moe == MixtureOfExperts(
        n_experts=8, top_k=2, expert_dim=384, normalize=True
    )


def test_overrides() -> None:
    arch = resolve(Section(overrides={"n_layers": 2, "dim": 512}))
    assert (arch.n_layers, arch.dim, arch.head_dim) == (2, 512, 32)
    moe = resolve(Section("qwen3", "debugmodel_moe", overrides={"moe": {"n_experts": 16}})).moe
    assert moe is not None
    assert (moe.n_experts, moe.top_k, moe.expert_dim) == (16, 8, 768)
    with pytest.raises(ConfigError, match=r"n_layer\b.*did you mean 'n_layers'"):
        resolve(Section(overrides={"n_layer": 2}))


def test_unknown_names() -> None:
    with pytest.raises(ConfigError, match=r"model\.name = 'lama3': no such model, did you mean 'llama3'"):
        resolve(Section(name="lama3"))
    with pytest.raises(ConfigError, match=r"model\.flavor = '8b': llama3 has no such flavor, did you mean '8B'"):
        resolve(Section(flavor="8b"))


def test_known_names_that_are_not_built() -> None:
    for model, flavor in NOT_BUILT:
        assert flavor not in FLAVORS.get(model, {})
        with pytest.raises(ConfigError, match="not built yet"):
            resolve(Section(name=model, flavor=flavor))
    with pytest.raises(ConfigError, match="not built yet"):
        resolve(Section(name="flux", flavor="strange"))


def test_registered_flavors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "flavors", {})
    fields = {"dim": 32, "n_layers": 1, "n_heads": 2, "ffn_dim": 40, "vocab_size": 9}
    registry.register_flavor("mine", "tiny", fields)
    registry.register_flavor("llama3", "own", Architecture(**fields))
    registry.register_flavor("mine", "wrong", {**fields, "dim": -1})
    registry.register_flavor("mine", "strange", 5)
    assert resolve(Section("mine", "tiny")) == Architecture(**fields)
    assert resolve(Section("llama3", "own", overrides={"dim": 64})).dim == 64
    assert resolve(Section("llama3", "8B")).dim == 4096
    with pytest.raises(ConfigError, match=r"flavor 'wrong' of 'mine'.*dim"):
        resolve(Section("mine", "wrong"))
    with pytest.raises(ConfigError, match="registered as int"):
        resolve(Section("mine", "strange"))


def test_a_folder_by_auto(tmp_path: Path) -> None:
    config = {
        "model_type": "qwen2",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 99,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    arch = resolve(Section("auto", "", str(tmp_path), overrides={"n_layers": 2}))
    assert (arch.family, arch.n_layers, arch.qkv_bias) == ("qwen2", 2, True)
    with pytest.raises(ConfigError, match=r"there is no folder .*nowhere: set one that has config.json"):
        resolve(Section("auto", "", str(tmp_path / "nowhere")))
