"""Axolotl configs: what each key becomes, where errors point, and the files that come with the project."""

import contextlib
import itertools
import json
import re
from pathlib import Path

import pytest
from transformers.trainer_utils import SchedulerType
from transformers.training_args import OptimizerNames

from shardline.cli.main import main
from shardline.config.axolotl.datasets import OF_TOKENIZERS
from shardline.config.axolotl.reader import source_of
from shardline.config.axolotl.table import BY_RULE, DIRECT, PLUGINS, REFUSED, WITHOUT_EFFECT, keys_page, known_keys
from shardline.config.axolotl.update import OPTIMIZERS, REFUSED_OPTIMIZERS, REFUSED_SCHEDULERS, SCHEDULERS
from shardline.config.check import check, checked_layout
from shardline.config.load import load_config
from shardline.config.schema import leaves
from shardline.config.write import to_toml
from shardline.data.formats.choose import format_types
from shardline.data.formats.template import template_names
from shardline.errors import ConfigError
from tests import bad_values
from tests.unit.config.axolotl_corpus import COMMON, EXAMPLES, FULL, SEEDS, WRONG, Example

LATER = {"training.objective", "lora.base_dtype", "lora.double_quantization"} - set(leaves())
ROOT = Path(__file__).parents[3]
TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": 512,
    "max_position_embeddings": 600000,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def write(text: str, name: str = "axolotl.yml") -> str:
    Path(name).write_text(text)
    return name


def load(text: str, *flags: str):
    return load_config(write(text), list(flags))


def named(examples: list[Example]) -> list:
    return [pytest.param(one, id=one.name) for one in examples if not LATER & one.expected.keys()]


@pytest.mark.parametrize("example", named(EXAMPLES))
def test_an_example_becomes_native_keys(example):
    config = load(example.text)
    check(config)
    for key, value in example.expected.items():
        found = config.value(key)
        assert found == (pytest.approx(value) if isinstance(value, float) else value), key
    if example.ranks > 1:
        assert checked_layout(config, example.ranks).world_size == example.ranks


@pytest.mark.parametrize("example", named(EXAMPLES))
def test_the_written_config_is_the_same(example):
    config = load(example.text)
    text = to_toml(config, sources=True)
    Path("native.toml").write_text(text)
    assert load_config("native.toml") == config


def test_there_are_enough_examples():
    assert len(EXAMPLES) >= 30


@pytest.mark.parametrize("added", WRONG)
def test_what_is_wrong_is_named_with_its_line(added):
    with pytest.raises(ConfigError) as caught:
        check(load(FULL + added + "\n"))
    text = str(caught.value)
    line = FULL.count("\n") + 1
    assert re.search(r"^axolotl\.yml(:\d+)?: ", text, re.MULTILINE)
    assert any(f"axolotl.yml:{number}" in text for number in range(line, line + added.count("\n") + 1)), text
    for words in WRONG[added]:
        assert words in text or words == "line", text


def test_required_keys_are_asked_for():
    with pytest.raises(ConfigError) as caught:
        load("base_model: x\n")
    assert "axolotl.yml: learning_rate: is missing" in str(caught.value)
    assert "datasets: is missing: set datasets or pretraining_dataset" in str(caught.value)


def test_every_key_of_the_reference_is_in_one_list():
    names = known_keys()
    assert len(names) == len(set(names))
    assert set(DIRECT) | set(BY_RULE) | set(WITHOUT_EFFECT) | set(REFUSED) == set(names)
    for to in DIRECT.values():
        assert to.native in leaves()
    for words in BY_RULE.values():
        for key in re.findall(r"\b(?:model|training|data|lora|parallelism|checkpoint|validation)\.[a-z_0-9.]+", words):
            assert key in leaves() or key in LATER, key


@pytest.mark.parametrize("name", [name for name in REFUSED if name not in ("peft", "qat", "quantization", "diffusion")])
def test_a_refused_key_is_accepted_where_it_is_off(name):
    load(FULL + f"{name}: false\n")
    load(FULL + f"{name}:\n")
    with pytest.raises(ConfigError, match=f"{name}: .* is refused: "):
        load(FULL + f"{name}: 3\n")


@pytest.mark.parametrize("name", sorted(WITHOUT_EFFECT))
def test_a_key_without_effect_is_listed_with_its_reason(name):
    notes = load(FULL + f"{name}: true\n").alias_notes
    (line,) = [note for note in notes if "without effect" in note]
    assert line.endswith(f"without effect: {name} (line {FULL.count(chr(10)) + 1}): {WITHOUT_EFFECT[name]}")


@pytest.mark.parametrize("name", DIRECT)
def test_an_empty_key_has_the_default(name):
    text = "\n".join(line for line in FULL.splitlines() if not line.startswith(name))
    if name == "learning_rate":
        return
    config = load(text + f"\n{name}:\n")
    default = DIRECT[name].default
    assert config.value(DIRECT[name].native) == (leaves()[DIRECT[name].native].default if default is None else default)


def test_every_name_of_optimizers_and_schedulers_is_known_or_refused():
    """The names that transformers and Axolotl's enumeration have."""
    own = "optimi_adamw ao_adamw_4bit ao_adamw_8bit ao_adamw_fp8 adopt_adamw came_pytorch muon dion sinkgd flash_adamw"
    own += " flash_adam flash_sgd flash_sgdw flash_lion q_galore_adamw8bit"
    for name in (*(one.value for one in OptimizerNames), *own.split()):
        assert (name in OPTIMIZERS) != (name in REFUSED_OPTIMIZERS), name
    for name in (*(one.value for one in SchedulerType), "one_cycle", "rex"):
        assert (name in SCHEDULERS) != (name in REFUSED_SCHEDULERS), name


def test_plugins_are_known_by_the_end_of_their_name():
    plugins = "\n".join(f"  - axolotl.integrations.some.{name}" for name in PLUGINS)
    notes = load(FULL + f"plugins:\n{plugins}\n").alias_notes
    assert any("plugins.LigerPlugin" in note and "Shardline's own kernels" in note for note in notes)


def test_every_chat_template_of_axolotl_is_known_or_refused():
    names = "alpaca chatml mistral_v1 mistral_v2v3 mistral_v3_tekken mistral_v7_tekken gemma cohere llama3 llama4 phi_3"
    names += " llama3_2_vision phi_35 deepseek_v2 deepseek_v3 jamba qwen_25 qwen3 qwen3_5 falcon_h1 nemotron_h exaone"
    names += " exaone4 qwen2_vl gemma3 gemma3n gemma4 gemma4_unified command_a command_a_tool_use command_a_rag aya"
    for name in names.split():
        assert (name in template_names()) != (name in OF_TOKENIZERS), name


def test_a_template_that_is_not_packaged_is_the_tokenizers_own():
    config = load(
        FULL.replace("type: alpaca", "type: chat_template\n    chat_template: jamba") + "chat_template: gemma4\n"
    )
    assert config.data.chat_template == "tokenizer_default"
    assert config.data.sources[0]["chat_template"] == "tokenizer_default"
    assert any("gemma4 is not packaged: the tokenizer's own template is used" in note for note in config.alias_notes)


def test_a_key_given_twice_is_noted_and_the_last_one_counts():
    config = load(FULL + "seed: 1\nseed: 2\n")
    assert config.debug.seed == 2
    assert "axolotl.yml:10: seed: given twice, first on line 9: the last one counts" in config.alias_notes
    assert source_of(config.origin("debug.seed")) == "from seed (line 10)"


def test_a_stray_key_without_a_value_is_no_error():
    assert any("empty, so the default: some_stray_key" in note for note in load(FULL + "some_stray_key:\n").alias_notes)


def test_numbers_that_stand_for_a_default():
    config = load(FULL + "save_total_limit: 0\ngc_steps: -1\ngc_collect_steps: 0\n")
    assert config.checkpoint.keep_latest_k == 4, "0 is no number of checkpoints in Axolotl"
    assert config.training.gc_freq == leaves()["training.gc_freq"].default
    assert any("without effect: gc_steps (line 10), gc_collect_steps" in note for note in config.alias_notes)
    assert load(FULL + "gc_steps: 20\n").training.gc_freq == 20


def test_beta_under_trl_comes_before_rl_beta():
    pairs = FULL.replace("type: alpaca", "type: chat_template.default") + "rl_beta: 0.3\n"
    config = load(pairs + "rl: dpo\ntrl:\n  beta: 0.02\n  num_generations: 4\n")
    assert config.dpo.beta == 0.02
    assert any("trl.num_generations (line 13): it is for another method" in note for note in config.alias_notes)
    assert load(pairs + "rl: dpo\n").dpo.beta == 0.3
    config = load(pairs + "rl: ipo\ndpo_label_smoothing: 0.1\n")
    assert (config.dpo.loss, config.dpo.label_smoothing) == ("ipo", 0.0)


def test_which_weights_early_stopping_ends_with_is_said():
    config = load(FULL + "val_set_size: 0.1\nearly_stopping_patience: 3\n")
    assert config.validation.patience == 3
    assert any("early_stopping_patience: the run ends with its last weights" in note for note in config.alias_notes)


@pytest.mark.parametrize(
    ("given", "wanted"),
    [("", "float16"), ("bf16: auto", "float16"), ("bf16: false", "float16"), ("bf16: true", "bfloat16")],
)
def test_half_precision_beside_bfloat16(given, wanted):
    assert load(FULL + f"fp16: true\n{given}\n").training.mixed_precision_param == wanted


def test_a_zero_does_not_conflict_with_the_key_that_is_used():
    config = load(FULL + "saves_per_epoch: 0\nsave_steps: 100\nwarmup_ratio: 0\nwarmup_steps: 10\n")
    assert (config.checkpoint.interval, config.lr_scheduler.warmup_steps) == (100, 10)


@pytest.mark.parametrize(("name", "given"), [("reshard_after_forward", "false"), ("fsdp_reshard_after_forward", "no")])
def test_fsdp2s_resharding_takes_precedence_over_fsdp1s_words(name, given):
    fsdp = FULL + "fsdp: [full_shard, auto_wrap]\n"
    assert load(fsdp).parallelism.fsdp_reshard_after_forward == "always"
    assert load(fsdp + f"fsdp_config: {{{name}: {given}}}\n").parallelism.fsdp_reshard_after_forward == "never"


def test_names_of_recomputed_layers_and_the_rate_of_an_embeddings_adapter():
    lora = FULL + "adapter: lora\nlora_r: 8\nlora_alpha: 8\n"
    wrapped = "22._checkpoint_wrapped_module.mlp.experts.down_proj"
    config = load(f"{lora}lora_target_modules: [q_proj]\nlora_target_parameters: [{wrapped}]\n")
    assert config.lora.target_modules == ["q_proj", "22.mlp.experts.down_proj"]
    notes = load(f"{lora}lora_target_modules: [q_proj, embed_tokens]\nloraplus_lr_ratio: 8\n").alias_notes
    assert any("loraplus_lr_ratio: the adapter of embed_tokens" in note for note in notes)


def test_rows_that_axolotl_makes_up_are_refused_by_name():
    made_up = (
        "type: _synthetic\n    length: 9\n    sequence_length: 8\n    min_input_id: 1\n    max_input_id: 9\n    seed: 1"
    )
    with pytest.raises(ConfigError) as caught:
        load(FULL.replace("type: alpaca", made_up))
    for key in ("length", "sequence_length", "min_input_id", "max_input_id", "seed"):
        assert f"datasets[0].{key}: rows are read from data, not made up" in str(caught.value)


@pytest.mark.parametrize("kind", ["bradley_terry.chat_template", "_synthetic", "creative_acr.x", "context_qa.load_v2"])
def test_types_that_are_not_built_are_refused_by_name(kind):
    with pytest.raises(ConfigError, match=f"datasets.0..type: '{kind}' is refused: "):
        load(FULL.replace("type: alpaca", f"type: {kind}"))
    assert kind not in format_types()


def test_flags_change_native_keys():
    config = load(COMMON, "--training.local_batch_size=1", "--training.global_batch_size=8", "--training.steps=5")
    assert config.training.local_batch_size == 1
    assert config.training.global_batch_size == 8
    assert config.training.gradient_accumulation_steps is None
    assert (config.training.steps, config.training.epochs) == (5, None)
    check(config)


def test_the_sizes_must_fit_the_ranks():
    config = load(SEEDS[1].text)
    with pytest.raises(ConfigError) as caught:
        checked_layout(config, 6)
    text = str(caught.value)
    assert text.startswith(
        "axolotl.yml:4: dp_shard_size 4 x tensor_parallel_size 2 = 8 must divide the number of ranks"
    )
    good = text.partition("; write ")[2].split("; or ")
    assert len(good) == 2
    for settings in good:
        sizes = {name: int(size) for name, _, size in (part.partition(": ") for part in settings.split(", "))}
        keys = "\n".join(f"{name}: {size}" for name, size in sizes.items())
        assert checked_layout(load(FULL + "fsdp_version: 2\n" + keys), 6).world_size == 6


def test_the_sizes_of_experts_are_named_as_they_are_written():
    config = load(FULL + "expert_parallel_size: 4\ndp_shard_size: 2\n")
    with pytest.raises(ConfigError, match="expert_parallel_size 4 x dp_shard_size 2 = 8"):
        checked_layout(config, 4)


def test_a_file_of_zero_settings_beside_the_config_is_read(tmp_path):
    settings = {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}, "gradient_clipping": "auto"}
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "mine.json").write_text(json.dumps(settings))
    (tmp_path / "folder" / "a.yml").write_text(FULL + "deepspeed: mine.json\n")
    config = load_config("folder/a.yml")
    assert config.parallelism.fsdp_reshard_after_forward == "always"
    assert config.training.enable_cpu_offload


def test_a_file_of_zero_settings_with_any_value_in_any_place(tmp_path):
    good = {
        "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}, "overlap_comm": True},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}},
        "bf16": {"enabled": True},
        "gradient_clipping": "auto",
        "train_micro_batch_size_per_gpu": "auto",
    }
    (tmp_path / "a.yml").write_text(FULL + "deepspeed: mine.json\n")
    for place, value in itertools.product(list(bad_values.places(good)), bad_values.VALUES.values()):
        (tmp_path / "mine.json").write_text(bad_values.text_of(bad_values.changed(good, place, value)))
        with contextlib.suppress(ConfigError):
            load_config(tmp_path / "a.yml")
    (tmp_path / "mine.json").write_text("[" * 50_000)
    with pytest.raises(ConfigError, match=r"mine\.json: not a JSON file: nested more than 100 deep"):
        load_config(tmp_path / "a.yml")


def test_where_a_native_key_comes_from():
    config = load(FULL)
    assert source_of(config.origin("training.local_batch_size")) == "from micro_batch_size (line 7)"
    assert source_of(config.origin("optimizer.weight_decay")) == "Axolotl's default of weight_decay"
    assert source_of(config.origin("data.sources")) == "from datasets (line 3)"
    assert source_of(load_config(None, {"training.steps": 3}).origin("training.steps")) == ""
    assert source_of("folder/run.yaml:12") == ""


def test_a_wrong_source_is_named_by_its_place():
    with pytest.raises(ConfigError) as caught:
        load(FULL.replace("type: alpaca", "typ: alpaca"))
    assert "axolotl.yml:5: datasets[0].typ: there is no such key, did you mean 'type'" in str(caught.value)
    with pytest.raises(ConfigError) as caught:
        load(FULL.replace("type: alpaca", "shards: many"))
    assert "axolotl.yml:5: datasets[0].shards: data.sources[0].shards: expected a whole number" in str(caught.value)


def test_a_native_yaml_file_is_not_translated():
    assert load_config(write("training:\n  steps: 3\n")).training.steps == 3


def test_the_page_of_keys_is_up_to_date():
    assert (ROOT / "docs" / "axolotl-keys.md").read_text() == keys_page(), "run `make docs`"


# ---- the commands ----------------------------------------------------------------------------------------------------


@pytest.fixture
def tiny(tmp_path):
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TINY))
    return "./tiny"


def on(model: str, text: str) -> str:
    return re.sub(r"base_model: \S+", f"base_model: {model}", text)


@pytest.mark.parametrize("example", named(SEEDS))
def test_the_seeds_pass_the_dry_run(example, tiny, capsys):
    file = write(on(tiny, example.text))
    assert main(["config", file]) == 0
    shown = capsys.readouterr()
    assert "# from micro_batch_size (line" in shown.out
    assert "note: axolotl.yml: an Axolotl config; understood: base_model" in shown.err
    assert main(["train", file, "--dry-run", "--world-size", str(example.ranks)]) == 0
    assert f"on {example.ranks} ranks" in capsys.readouterr().out
    assert main(["train", file, "--dry-run", "--world-size", "3"]) == 2


def test_a_model_of_the_hub_is_not_checked_by_config(capsys):
    assert main(["config", write(FULL)]) == 0
    assert "NousResearch/Llama-3.2-1B is a model on the Hub" in capsys.readouterr().err


def test_an_unknown_key_ends_with_code_2(capsys):
    assert main(["config", write(FULL + "learning_rat: 1\n")]) == 2
    assert "axolotl.yml:9: learning_rat: Axolotl has no such key" in capsys.readouterr().err
