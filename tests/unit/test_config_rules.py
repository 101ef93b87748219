"""Rules: refused combinations, features that are not built yet, keys without effect, and the example files."""

from pathlib import Path

import pytest

from shardline import registry
from shardline.config.features import SPLIT_SCHEDULES, compatibility_page
from shardline.config.files import preset_names
from shardline.config.layout import resolve_layout, with_degrees
from shardline.config.load import load_config
from shardline.config.rules import RULES, check, notes, pending, refuse_pending
from shardline.config.schema import leaves
from shardline.config.write import to_toml
from shardline.errors import ConfigError
from shardline.models.flavors import resolve
from shardline.parallel.schedules import build_schedule, names

ROOT = Path(__file__).parents[2]
SEEDS = Path(__file__).parent / "seeds"

SEED_MARKS = {
    "async_tp_405b": set(),
    "async_tp_70b": {"model.converters"},
    "async_tp_minimal": {"model.converters"},
    "mixed_precision": set(),
    "compile_model": set(),
    "tp_4": set(),
    "float8_tensorwise": {"model.converters"},
    "fsdp_8": set(),
    "fsdp_tp_64": {
        "model.converters",
    },
    "fsdp_tp_pp_512": {
        "model.converters",
    },
}


def given(**keys):
    return load_config(overrides={key.replace("__", "."): value for key, value in keys.items()})


def test_every_example_file_has_its_marks_listed():
    assert {path.stem for path in SEEDS.glob("*.toml")} == set(SEED_MARKS)


@pytest.mark.parametrize("name", SEED_MARKS)
def test_example_files_load_and_are_marked(name):
    config = load_config(SEEDS / f"{name}.toml")
    check(config)
    resolve(config.model)
    assert {row.key for row in pending(config)} == SEED_MARKS[name]
    text = to_toml(config)
    assert text.count("# not built yet: ") == len(SEED_MARKS[name])


def test_float8_settings_without_converter_are_noted():
    lines = notes(load_config(SEEDS / "fsdp_8.toml"))
    assert len(lines) == 1  # one line for keys with one reason
    assert lines[0].endswith(
        ", quantize.linear.float8.filter_fqns have no effect: model.converters has no 'quantize.linear.float8'"
    )
    assert notes(load_config(SEEDS / "fsdp_tp_64.toml")) == []


@pytest.mark.parametrize("path", sorted((ROOT / "configs").iterdir()), ids=lambda path: path.name)
def test_our_examples_need_nothing_that_is_missing(path):
    config = load_config(path)
    check(config)
    refuse_pending(config)
    assert config.alias_notes == ()


@pytest.mark.parametrize("name", preset_names())
def test_presets_follow_the_rules(name):
    config = load_config(preset=name)
    check(config)
    resolve(config.model)
    assert notes(config) == []
    assert (pending(config) == []) == (name in ("demo", "llama3_8b"))


def test_defaults_are_silent():
    config = load_config()
    check(config)
    refuse_pending(config)
    assert pending(config) == []
    assert notes(config) == []


def test_rules_name_real_keys():
    for rule in RULES:
        assert any(key.startswith(rule.key) if rule.key.endswith(".") else key == rule.key for key in leaves()), (
            rule.key
        )


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"training__epochs": 1.0, "training__steps": 5}, "training.epochs: given together with training.steps = 5"),
        ({"optimizer__name": "adamw"}, "did you mean 'AdamW'"),
        ({"model__converters": ["fp8"]}, "got 'fp8'"),
        ({"model__name": "llama4", "model__flavor": "17bx16"}, "did you mean '17bx16e'"),
        ({"profiling__enable_profiling": True, "profiling__profile_freq": 3}, "profiling.profile_freq: 3 steps"),
        (
            {"checkpoint__last_save_in_hf": True, "checkpoint__last_save_model_only": False},
            "last_save_model_only = true",
        ),
        (
            {"checkpoint__initial_load_in_hf": True, "checkpoint__initial_load_model_only": False},
            "initial_load_model_only = true",
        ),
        ({"activation_checkpoint__mode": "memory_budget"}, "compile.enable = true"),
        ({"checkpoint__create_seed_checkpoint": True}, "checkpoint.enable = true"),
    ],
)
def test_refused(keys, expected):
    with pytest.raises(ConfigError, match=r"^overrides: ") as caught:
        check(given(**keys))
    assert expected in str(caught.value)


def test_accepted_neighbours_of_refused_values():
    check(given(training__epochs=0.5))
    check(given(profiling__profile_freq=3))
    check(given(activation_checkpoint__mode="memory_budget", compile__enable=True))
    check(given(checkpoint__last_save_in_hf=True))


@pytest.mark.parametrize(
    ("keys", "key", "feature"),
    [
        ({"parallelism__expert_parallel_degree": 2}, None, "expert parallel"),
        ({"comm__mode": "fake_backend"}, None, "simulated communication"),
        ({"fault_tolerance__enable": True}, None, "replica groups"),
        ({"job__custom_config_module": "mine"}, None, "keys of one's own"),
        ({"model__name": "deepseek_v3", "model__flavor": "16B"}, "model.name", "latent attention, mixture of experts"),
        ({"model__flavor": "30B-A3B", "model__name": "qwen3"}, "model.flavor", "mixture of experts"),
    ],
)
def test_pending(keys, key, feature):
    config = given(**keys)
    key = key or next(iter(keys)).replace("__", ".")
    assert [(row.key, row.feature) for row in pending(config)] == [(key, feature)]
    with pytest.raises(ConfigError, match=rf"overrides: {key}: .* is not built yet"):
        refuse_pending(config)
    assert f"# not built yet: {feature}" in to_toml(config)


@pytest.mark.parametrize(
    "keys",
    [
        {"parallelism__data_parallel_shard_degree": 1},
        {"parallelism__pipeline_parallel_schedule_csv": "none"},
        {"parallelism__enable_async_tensor_parallel": False},
        {"model__name": "qwen3", "model__flavor": "0.6B"},
    ],
)
def test_not_pending(keys):
    assert pending(given(**keys)) == []


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ({"checkpoint__interval": 5}, "checkpoint.interval has no effect: checkpoint.enable is false"),
        ({"validation__freq": 5}, "validation.freq has no effect: validation.enable is false"),
        ({"compile__backend": "eager"}, "compile.backend has no effect: compile.enable is false"),
        ({"profiling__with_stack": True}, "profiling.with_stack has no effect: profiling.enable_profiling is false"),
        ({"metrics__save_tb_folder": "x"}, "metrics.save_tb_folder has no effect: metrics.enable_tensorboard is false"),
        (
            {"training__dataloader__prefetch_factor": 2},
            "training.dataloader.prefetch_factor has no effect: training.dataloader.num_workers is 0",
        ),
        (
            {"comm__train_timeout_seconds": 5, "parallelism__data_parallel_shard_degree": 1},
            "comm.train_timeout_seconds has no effect: the layout has one rank",
        ),
        (
            {"parallelism__disable_loss_parallel": True, "parallelism__enable_sequence_parallel": False},
            "parallelism.disable_loss_parallel, parallelism.enable_sequence_parallel have no effect:"
            " parallelism.tensor_parallel_degree is 1",
        ),
        ({"model__name": "auto", "model__flavor": "8B"}, "model.flavor has no effect: model.name is 'auto'"),
        (
            {"activation_checkpoint__selective_ac_option": "op"},
            "activation_checkpoint.selective_ac_option has no effect: activation_checkpoint.mode is not 'selective'",
        ),
        (
            {"checkpoint__enable": True, "checkpoint__load_only": True, "checkpoint__interval": 5},
            "checkpoint.interval has no effect: checkpoint.load_only is true",
        ),
        (
            {
                "checkpoint__enable": True,
                "checkpoint__last_save_model_only": False,
                "checkpoint__export_dtype": "bfloat16",
            },
            "checkpoint.export_dtype has no effect: checkpoint.last_save_model_only is false",
        ),
        (
            {"checkpoint__enable": True, "checkpoint__initial_load_model_only": False},
            "checkpoint.initial_load_model_only has no effect: checkpoint.initial_load_path is not given",
        ),
        (
            {"profiling__profile_freq": 7},
            "profiling.profile_freq has no effect:"
            " neither profiling.enable_profiling nor profiling.enable_memory_snapshot is true",
        ),
        (
            {"model__tokenizer_path": "bytes", "model__hf_assets_path": "there"},
            "model.hf_assets_path has no effect: model.tokenizer_path is given, and no weights are read from there",
        ),
        ({"training__dataset_split": "x"}, "training.dataset_split has no effect: training.dataset is 'demo'"),
        ({"training__cache_folder": "x"}, "training.cache_folder has no effect: no raw data is prepared"),
        (
            {"training__gc_debug": True, "training__gc_freq": 5},
            "training.gc_freq has no effect: training.gc_debug collects every step",
        ),
        (
            {"compile__enable": True, "compile__components": []},
            "compile.enable has no effect: compile.components is empty",
        ),
        ({"training__steps": 50}, "lr_scheduler.warmup_steps = 200 is longer than the schedule: cut to 50"),
        (
            {"lr_scheduler__total_steps": 250, "lr_scheduler__decay_ratio": 0.5},
            "lr_scheduler.decay_ratio = 0.5 with 200 steps of warmup is longer than the schedule:"
            " decay starts right after warmup",
        ),
    ],
)
def test_notes(keys, line):
    config = given(**keys)
    assert notes(config) == [line]
    assert notes(load_config(overrides={key: config.value(key) for key in leaves() if config.is_set(key)})) == [line]


def test_keys_that_have_an_effect_are_not_noted():
    assert notes(given(checkpoint__enable=True, checkpoint__interval=5)) == []
    assert notes(given(checkpoint__interval=500)) == []  # given, but the default
    assert notes(given(training__epochs=1.0)) == []
    assert notes(given(profiling__enable_memory_snapshot=True, profiling__profile_freq=7)) == []
    assert notes(given(model__hf_assets_path="there")) == []
    assert notes(given(training__dataset_path="there", training__cache_folder="x")) == []


def test_registered_names_count(monkeypatch):
    monkeypatch.setitem(registry.optimizers, "Mine", lambda groups, section: None)
    monkeypatch.setitem(registry.flavors, "llama4", {"tiny": {}})
    check(given(optimizer__name="Mine", model__name="llama4", model__flavor="tiny"))
    assert pending(given(model__name="llama4", model__flavor="tiny")) == []


@pytest.mark.parametrize("name", ["initial_load_path=x", "initial_load_in_hf"])
def test_weights_without_checkpointing_are_refused(name):
    with pytest.raises(ConfigError, match=r"checkpoint\.enable = true"):
        check(load_config(overrides=[f"--checkpoint.{name}"]))


def test_validating_on_generated_text_while_training_on_ones_own_is_refused():
    own = {"training.dataset_path": "data.jsonl", "validation.enable": True}
    with pytest.raises(ConfigError, match=r"validation\.dataset_path"):
        check(load_config(overrides=own))
    check(load_config(overrides={**own, "validation.dataset_path": "held_out.jsonl"}))


def test_settings_of_a_pipeline_have_an_effect_with_it():
    config = given(parallelism__pipeline_parallel_degree=2, parallelism__pipeline_parallel_schedule="GPipe")
    assert not pending(config)
    assert not any("pipeline" in line for line in notes(config))


@pytest.mark.parametrize("name", SPLIT_SCHEDULES)
def test_schedules_that_split_backward_are_refused_with_compiled_blocks(name):
    keys = {"parallelism__pipeline_parallel_degree": 2, "parallelism__pipeline_parallel_schedule": name.lower()}
    check(given(**keys))
    with pytest.raises(ConfigError, match="Interleaved1F1B"):
        check(given(**keys, compile__enable=True))


def test_the_rules_know_which_schedules_split_backward():
    assert {name for name in names() if build_schedule(name, 2, 4).splits} == set(SPLIT_SCHEDULES)


def test_a_step_in_backward_is_refused_with_a_pipeline():
    keys = {"optimizer__early_step_in_backward": True, "training__max_norm": 0.0}
    with pytest.raises(ConfigError, match=r"PP with|with PP"):
        check(given(parallelism__pipeline_parallel_degree=2, **keys))


def test_settings_of_a_pipeline_that_is_not_there_are_notes():
    config = load_config(overrides={"parallelism.pipeline_parallel_schedule": "GPipe"})
    assert not pending(config)
    assert any("pipeline_parallel_degree is 1" in line for line in notes(config))


def test_optimizer_in_backward_never_skips_clipping_in_silence():
    early = {"optimizer__early_step_in_backward": True}
    with pytest.raises(ConfigError, match="two_pass"):
        check(given(**early))
    check(given(**early, optimizer__early_step_clipping="two_pass"))
    check(given(**early, training__max_norm=0.0))
    with pytest.raises(ConfigError, match="cannot be taken back"):
        check(given(**early, training__max_norm=0.0, training__nonfinite="skip"))
    with pytest.raises(ConfigError, match=r'optimizer in backward with LAMB: .*set optimizer.name = "AdamW"'):
        check(given(**early, optimizer__name="LAMB", training__max_norm=0.0))


def test_features_that_do_not_go_together_are_refused_with_a_remedy():
    layout = {"parallelism__data_parallel_replicate_degree": 2, "parallelism__data_parallel_shard_degree": 1}
    with pytest.raises(ConfigError, match=r"DDP with CPU offload: .*data_parallel_shard_degree"):
        check(given(**layout, training__enable_cpu_offload=True))
    check(given(training__enable_cpu_offload=True))
    check(given(training__enable_cpu_offload=True, parallelism__tensor_parallel_degree=2))


def test_one_rank_with_offload_has_shards_to_free():
    never = {"parallelism__fsdp_reshard_after_forward": "never"}
    assert any("fsdp_reshard_after_forward has no effect" in line for line in notes(on(1, **never)))
    assert not notes(on(1, **never, training__enable_cpu_offload=True))


def on(ranks, **keys):
    config = given(**keys)
    return with_degrees(config, resolve_layout(config.parallelism, ranks))


REPLICAS = {"parallelism__data_parallel_replicate_degree": 2}
TENSOR = {"parallelism__tensor_parallel_degree": 2}
IDLE = [  # keys, number of ranks -> what is said of them
    ({"parallelism__gradient_compression": "powersgd", **REPLICAS}, {2: "", 4: "only plain replicas (DDP)"}),
    ({"parallelism__gradient_bucket_mib": 1.0, **REPLICAS}, {2: "", 4: "only plain replicas (DDP)"}),
    ({"parallelism__accumulation_sync": "scatter", **REPLICAS}, {2: "only HSDP", 4: ""}),
    ({"parallelism__accumulation_sync": "micro_batch"}, {1: "gradients are not summed", 2: ""}),
    ({"parallelism__accumulation_sync": "micro_batch", **TENSOR}, {2: "gradients are not summed", 4: ""}),
    ({"parallelism__fsdp_prefetch": 3}, {1: "nothing is sharded", 2: ""}),
    ({"parallelism__fsdp_prefetch": 3, **TENSOR}, {2: "nothing is sharded", 4: ""}),
    ({"parallelism__fsdp_prefetch": 3, **REPLICAS}, {2: "nothing is sharded", 4: ""}),
    ({"parallelism__fsdp_reshard_after_forward": "never", **REPLICAS}, {2: "nothing is sharded", 4: ""}),
    ({"parallelism__fsdp_reshard_after_forward": "never"}, {1: "nothing is sharded", 2: ""}),
    ({"comm__train_timeout_seconds": 8}, {1: "the layout has one rank", 2: ""}),
    ({"comm__init_timeout_seconds": 8, "metrics__save_for_all_ranks": True}, {1: "the layout has one rank", 2: ""}),
]


@pytest.mark.parametrize(("keys", "said"), IDLE)
def test_what_has_no_effect_is_judged_with_the_number_of_ranks(keys, said):
    assert notes(given(**keys)) == []  # nobody knows yet
    for ranks, reason in said.items():
        found = notes(on(ranks, **keys))
        assert len(found) == bool(reason)
        assert all(f"no effect: {reason}" in line for line in found)


@pytest.mark.parametrize("more", [{"training__enable_cpu_offload": True}, {"optimizer__early_step_in_backward": True}])
def test_replicas_are_refused_what_shards_are_not(more):
    keys = {**REPLICAS, **more, "training__max_norm": 0.0}
    check(given(**keys))
    check(on(4, **keys))
    with pytest.raises(ConfigError, match=r"DDP with .*; shard instead: .*lower data_parallel_replicate_degree"):
        check(on(2, **keys))


def test_the_compatibility_page_is_up_to_date():
    page = Path(__file__).parents[2] / "docs" / "compatibility.md"
    assert page.read_text() == compatibility_page(), "run `make docs`"
