"""Rules: refused combinations, features that are not built yet, keys without effect, and the example files."""

import re
import sys
from pathlib import Path

import pytest

from shardline import registry
from shardline.config.architecture import SCALING_FIELDS, Architecture, RopeScaling
from shardline.config.assemble import annotation_of
from shardline.config.check import check, missing, notes, pending, refuse_pending, with_data_named
from shardline.config.features import compatibility_page
from shardline.config.files import preset_names
from shardline.config.layout import resolve_layout, with_degrees
from shardline.config.load import load_config
from shardline.config.names import SCHEDULES, SPLIT_SCHEDULES, has_window, scaling_type
from shardline.config.rules.table import RULES
from shardline.config.schema import leaves
from shardline.config.write import to_toml
from shardline.errors import ConfigError
from shardline.models.flavors import FLAVORS, resolve
from shardline.models.rope import inverse_frequencies
from shardline.optim.lr_schedule import lr_factor
from shardline.parallel.pipeline.schedules import build_schedule
from tests import deep_ep_over_gloo

ROOT = Path(__file__).parents[3]
SEEDS = Path(__file__).parent / "seeds"

DEEPEP = {"parallelism__expert_parallel_comm_backend": "deepep", "parallelism__expert_parallel_degree": 2}

SEEDS_THAT_LOAD = (
    *("async_tp_405b", "async_tp_70b", "async_tp_minimal", "mixed_precision", "compile_model", "tp_4"),
    *("float8_tensorwise", "fsdp_8", "fsdp_tp_64", "fsdp_tp_pp_512"),
)

GRAPHS = {"compile__enable": True, "compile__cuda_graphs": True}


def given(**keys):
    return load_config(overrides={key.replace("__", "."): value for key, value in keys.items()})


def test_every_example_file_is_listed():
    assert {path.stem for path in SEEDS.glob("*.toml")} == set(SEEDS_THAT_LOAD)


@pytest.mark.parametrize("name", SEEDS_THAT_LOAD)
def test_example_files_load_and_everything_they_want_is_built(name):
    config = load_config(SEEDS / f"{name}.toml")
    check(config)
    resolve(config.model)
    assert pending(config) == {}
    text = to_toml(config)
    assert "# not built yet: " not in text


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
    if config.model.name != "auto":
        resolve(config.model)
    assert notes(config) == []
    assert pending(config) == {}


def test_defaults_are_silent():
    config = load_config()
    check(config)
    refuse_pending(config)
    assert pending(config) == {}
    assert notes(config) == []


def test_rules_name_real_keys():
    for key in (key for rule in RULES for key in rule.keys):
        below = any(known.startswith(key) for known in leaves())
        assert below if key.endswith(".") else annotation_of(key) is not None, key


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"training__epochs": 1.0, "training__steps": 5}, "training.epochs: conflicts with training.steps = 5"),
        ({"optimizer__name": "adamw"}, "did you mean 'AdamW'"),
        ({"model__converters": ["fp8"]}, "got 'fp8'"),
        ({"model__name": "flux", "model__flavor": "flux-de"}, "did you mean 'flux-dev'"),
        ({"profiling__enable_profiling": True, "profiling__profile_freq": 3}, "profiling.profile_freq: 3 steps"),
        (
            {"checkpoint__initial_load_in_hf": True, "checkpoint__initial_load_model_only": False},
            "initial_load_model_only = true",
        ),
        ({"activation_checkpoint__mode": "memory_budget"}, "compile.enable = true"),
        *(
            ({**GRAPHS, **keys}, f"compile.cuda_graphs: {what} needs the host in each pass")
            for keys, what in [
                ({"optimizer__early_step_in_backward": True, "training__max_norm": 0.0}, "a step in backward"),
                ({"training__enable_cpu_offload": True}, "training.enable_cpu_offload"),
                ({"activation_checkpoint__mode": "offload"}, 'activation_checkpoint.mode = "offload"'),
                ({"training__neftune_alpha": 5.0}, "training.neftune_alpha"),
                ({"lora__enable": True, "lora__dropout": 0.1}, "lora.dropout"),
            ]
        ),
        ({"checkpoint__create_seed_checkpoint": True}, "checkpoint.enable = true"),
        (
            {
                "activation_checkpoint__mode": "full",
                "activation_checkpoint__preserve_rng_state": False,
                "lora__enable": True,
                "lora__dropout": 0.1,
            },
            "activation_checkpoint.preserve_rng_state: recomputation would drop other elements",
        ),
        *(
            (
                {"training__mixed_precision_param": "float16", "parallelism__gradient_compression": kind},
                "parallelism.gradient_compression: what is left out of a step",
            )
            for kind in ("int8", "topk", "powersgd")
        ),
        *(
            (
                {
                    "parallelism__gradient_compression": kind,
                    "parallelism__data_parallel_replicate_degree": 2,
                    "parallelism__data_parallel_shard_degree": 2,
                    "optimizer__early_step_in_backward": True,
                    "optimizer__early_step_clipping": "two_pass",
                },
                "parallelism.gradient_compression: the pass that measures the norm would use up",
            )
            for kind in ("int8", "topk")
        ),
        *(
            (
                {
                    "parallelism__gradient_compression": kind,
                    "parallelism__data_parallel_replicate_degree": 2,
                    "parallelism__tensor_parallel_degree": 2,
                    "parallelism__enable_sequence_parallel": False,
                },
                "parallelism.gradient_compression: tensor-parallel ranks would round",
            )
            for kind in ("int8", "topk")
        ),
        (
            {"parallelism__pipeline_parallel_schedule": "1F2B"},
            "parallelism.pipeline_parallel_schedule: there is no schedule '1F2B', did you mean '1F1B'?",
        ),
        (
            {"optimizer__state_dtype": "bfloat16", "optimizer__name": "LAMB"},
            "optimizer.state_dtype: only AdamW and Adam can keep their moments in bfloat16",
        ),
        (
            {"lr_scheduler__decay_steps": 5, "lr_scheduler__decay_ratio": 0.5},
            "lr_scheduler.decay_steps: conflicts with lr_scheduler.decay_ratio = 0.5",
        ),
        (
            {"optimizer__name": "Adafactor", "lr_scheduler__momentum_range": [0.8, 0.9]},
            "lr_scheduler.momentum_range: Adafactor has no momentum",
        ),
        (
            {"optimizer__state_dtype": "int8", "optimizer__name": "Muon"},
            "optimizer.state_dtype: only AdamW and Adam can keep their moments in int8",
        ),
        (
            {"checkpoint__exclude_from_loading": ["model", "optimiser"]},
            "train_state, got 'optimiser', did you mean 'optimizer'?",
        ),
        (
            {**DEEPEP, "parallelism__expert_parallel_dispatch_dtype": "float8"},
            "parallelism.expert_parallel_dispatch_dtype: float8 is not supported with"
            " parallelism.expert_parallel_comm_backend = 'deepep'; set it to 'same'",
        ),
        (
            {**DEEPEP, "debug__deterministic": True},
            "debug.deterministic: it fills new memory first, and DeepEP's kernels write to that memory without waiting",
        ),
    ],
)
def test_refused(keys, expected):
    with pytest.raises(ConfigError, match=r"^overrides: ") as caught:
        check(given(**keys))
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({}, False),
        ({"training__dataset": "demo"}, True),
        ({"training__dataset": "c4"}, True),
        ({"training__dataset_path": "data/*.txt"}, True),
        ({"data__sources": [{"path": "chat.jsonl", "type": "alpaca"}]}, True),
    ],
)
def test_a_large_model_wants_its_data_named(keys, named, tmp_path):
    config = given(model__flavor="1B", **keys)
    large, small = with_data_named(config, 100_000_001), with_data_named(config, 100_000_000)
    assert small is config
    refuse_pending(small)
    assert (large is config) == named
    assert ("training.dataset" in missing(large)) != named
    (tmp_path / "run.toml").write_text(to_toml(large))
    again = load_config(tmp_path / "run.toml")
    assert again == large
    assert missing(again) == missing(large)
    (tmp_path / "early.toml").write_text(to_toml(config))  # written before the size is known
    again = load_config(tmp_path / "early.toml")
    assert again == config
    assert with_data_named(again, 100_000_001) == large
    if not named:
        check(large)
        lines = r"no data is named.*two lines:\n  \[training\]\n  dataset_path = \"data/\*\.jsonl\"\n\("  # to be copied
        with pytest.raises(ConfigError, match=rf"^training.dataset: {lines}"):
            refuse_pending(large)


@pytest.mark.parametrize("name", preset_names())
def test_only_demos_train_on_generated_text(name):
    config = load_config(preset=name, overrides=["--model.flavor=debugmodel"])
    wanting = not (name.endswith("demo") or config.training.dataset_path)
    assert ("training.dataset" in missing(config)) == wanting
    refuse_pending(load_config(preset=name, overrides=["--training.dataset=demo"]))


@pytest.mark.parametrize(
    ("package", "keys", "expected"),
    [
        ("wandb", {"metrics__enable_wandb": True}, "metrics.enable_wandb: true needs the package wandb"),
        ("tensorboard", {"metrics__enable_tensorboard": True}, "metrics.enable_tensorboard: true needs the package"),
        ("pyarrow", {"training__dataset_path": "a.txt, b.parquet"}, "training.dataset_path: 'b.parquet' needs the"),
        ("pyarrow", {"training__dataset_path": "files"}, "training.dataset_path: 'files' needs the package pyarrow"),
        (
            "pyarrow",
            {"validation__enable": True, "validation__dataset_path": "*.parquet", "training__dataset": "c4"},
            "validation.dataset_path: '*.parquet' needs the package pyarrow",
        ),
        (
            "pyarrow",
            {"data__sources": [{"path": "x.jsonl"}, {"path": "y", "data_files": ["a.parquet"]}]},
            "data.sources: 'y/a.parquet' needs the package pyarrow",
        ),
        ("datasets", {"training__dataset_path": "saved"}, "training.dataset_path: 'saved' needs the package datasets"),
    ],
)
def test_a_missing_package_is_named_before_anything_runs(package, keys, expected, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for file in ("files/part.parquet", "saved/state.json"):
        (tmp_path / file).parent.mkdir()
        (tmp_path / file).touch()
    config = given(**keys)
    monkeypatch.setitem(sys.modules, package, None)  # as if it were not installed
    with pytest.raises(ConfigError, match=rf"{re.escape(expected)}.*; pip install 'shardline\[\w+\]'"):
        refuse_pending(config)


def test_a_package_is_missed_where_it_would_be_used():
    key = "parallelism.expert_parallel_comm_backend"
    config = given(**DEEPEP)
    check(config)
    words = "'deepep' needs the package deep_ep, which is not installed; 'standard' sends tokens without it"
    assert missing(config) == {key: words}
    with pytest.raises(ConfigError) as caught:
        refuse_pending(config)
    assert str(caught.value) == f"overrides: {key}: {words}"
    unused = given(**DEEPEP | {"parallelism__expert_parallel_degree": 1, "debug__deterministic": True})
    check(unused)
    refuse_pending(unused)
    with deep_ep_over_gloo.installed():
        refuse_pending(config)


def test_accepted_neighbours_of_refused_values():
    check(given(**GRAPHS))
    check(given(compile__cuda_graphs=True, training__neftune_alpha=5.0))
    check(given(training__epochs=0.5))
    check(given(profiling__profile_freq=3))
    check(given(activation_checkpoint__mode="memory_budget", compile__enable=True))
    check(given(checkpoint__last_save_in_hf=True))
    check(given(checkpoint__exclude_from_loading=["model", "train_state"]))
    name, file = "parallelism__pipeline_parallel_schedule", "parallelism__pipeline_parallel_schedule_csv"
    check(given(**{name: "interleaved1f1b"}))
    check(given(**{name: "PipelineScheduleMulti", file: "mine.csv"}))
    check(given(**{name: "mine", file: "mine.csv"}))


@pytest.mark.parametrize(
    ("keys", "key", "feature"),
    [
        ({"model__converters": ["quantize.grouped_mm.mx"]}, None, "MX formats"),
        ({"comm__mode": "fake_backend"}, None, "simulated communication"),
        (
            {"fault_tolerance__semi_sync_method": "diloco", "fault_tolerance__enable": True},
            None,
            "semi-synchronous training of replica groups",
        ),
        (
            {"fault_tolerance__process_group": "nccl", "fault_tolerance__enable": True},
            None,
            "replica groups connected by anything but gloo",
        ),
        (
            {"optimizer__early_step_in_backward": True, "fault_tolerance__enable": True, "training__max_norm": 0.0},
            None,
            "replica groups with updates in backward",
        ),
        (
            {"compile__cuda_graphs": True, "compile__enable": True, "fault_tolerance__enable": True},
            "compile.cuda_graphs",
            "replica groups with CUDA graphs",
        ),
        (
            {"parallelism__gradient_compression": "bfloat16", "fault_tolerance__enable": True},
            None,
            "replica groups with compressed gradients",
        ),
        (
            {"training__objective": "dpo", "fault_tolerance__enable": True},
            None,
            "replica groups with pairs of answers",
        ),
        ({"job__custom_config_module": "mine"}, None, "custom config keys"),
        ({"model__name": "flux", "model__flavor": "flux-dev"}, "model.name", "image generation"),
    ],
)
def test_pending(keys, key, feature):
    config = given(**keys)
    key = key or next(iter(keys)).replace("__", ".")
    assert pending(config) == {key: feature}
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
    assert pending(given(**keys)) == {}


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ({"checkpoint__interval": 5}, "checkpoint.interval has no effect: checkpoint.enable is false"),
        (
            {"parallelism__expert_tensor_parallel_degree": 2},
            "parallelism.expert_tensor_parallel_degree has no effect: parallelism.expert_parallel_degree is 1",
        ),
        (
            {
                "parallelism__expert_parallel_degree": 2,
                "parallelism__pipeline_parallel_expert_parallel_overlap": False,
            },
            "parallelism.pipeline_parallel_expert_parallel_overlap has no effect: tokens are sent to their experts and"
            " back within their own micro-batch",
        ),
        (
            {
                "parallelism__expert_parallel_degree": 2,
                "parallelism__pipeline_parallel_degree": 2,
                "parallelism__pipeline_parallel_schedule": "DualPipeV",
            },
            "parallelism.pipeline_parallel_expert_parallel_overlap has no effect: tokens are sent to their experts and"
            " back within their own micro-batch",
        ),
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
            {"checkpoint__enable": True, "checkpoint__export_dtype": "bfloat16"},
            "checkpoint.export_dtype has no effect: checkpoint.last_save_model_only and checkpoint.last_save_in_hf"
            " are false",
        ),
        (
            {"checkpoint__enable": True, "checkpoint__initial_load_model_only": False},
            "checkpoint.initial_load_model_only has no effect: checkpoint.initial_load_path is not set",
        ),
        (
            {"profiling__profile_freq": 7},
            "profiling.profile_freq has no effect:"
            " neither profiling.enable_profiling nor profiling.enable_memory_snapshot is true",
        ),
        (
            {"model__tokenizer_path": "bytes", "model__hf_assets_path": "there"},
            "model.hf_assets_path has no effect: model.tokenizer_path is set, and no weights are read from this folder",
        ),
        ({"training__dataset_split": "x"}, "training.dataset_split has no effect: training.dataset is 'demo'"),
        ({"training__cache_folder": "x"}, "training.cache_folder has no effect: no raw data is prepared"),
        ({"training__verify_data": False}, "training.verify_data has no effect: no prepared data is read"),
        (
            {"training__gc_debug": True, "training__gc_freq": 5},
            "training.gc_freq has no effect: training.gc_debug collects garbage every step",
        ),
        (
            {"compile__enable": True, "compile__components": []},
            "compile.enable has no effect: compile.components is empty",
        ),
        (
            {"training__steps": 50},
            "lr_scheduler.warmup_steps = 200 is longer than the schedule: cut to 50, the learning rate rises until the"
            " last step",
        ),
        (
            {"training__steps": 200},
            "lr_scheduler.warmup_steps = 200 lasts for the whole schedule: the learning rate rises until the last step",
        ),
        (
            {"lr_scheduler__warmup_ratio": 1.0},
            "lr_scheduler.warmup_ratio = 1 lasts for the whole schedule: the learning rate rises until the last step",
        ),
        (
            {"lr_scheduler__total_steps": 250, "training__steps": 250, "lr_scheduler__decay_ratio": 0.5},
            "lr_scheduler.decay_ratio = 0.5 is 125 of 250 steps, which do not fit after 200 of warmup:"
            " the decay takes 50",
        ),
        (
            {"lr_scheduler__total_steps": 250, "training__steps": 250, "lr_scheduler__decay_steps": 60},
            "lr_scheduler.decay_steps = 60 of 250 steps, which do not fit after 200 of warmup: the decay takes 50",
        ),
        (
            {"lr_scheduler__cycles": 2, "lr_scheduler__decay_type": "inverse_sqrt"},
            "lr_scheduler.cycles has no effect: lr_scheduler.decay_type is 'constant' or 'inverse_sqrt'",
        ),
        (
            {"lr_scheduler__decay_power": 2.0},
            "lr_scheduler.decay_power has no effect: lr_scheduler.decay_type is not 'polynomial'",
        ),
        (
            {"lr_scheduler__timescale": 2},
            "lr_scheduler.timescale has no effect: lr_scheduler.decay_type is not 'inverse_sqrt'",
        ),
        (
            {"lr_scheduler__momentum_range": [0.8, 0.9], "optimizer__beta1": 0.5},
            "optimizer.beta1 has no effect: lr_scheduler.momentum_range sets it",
        ),
        (
            {"optimizer__adafactor_momentum": 0.9},
            "optimizer.adafactor_momentum has no effect: optimizer.name is not 'Adafactor'",
        ),
        (
            {"optimizer__name": "Adafactor", "optimizer__eps": 1e-6},
            "optimizer.eps has no effect: optimizer.name is 'LARS' or 'SGD' or 'Adafactor'",
        ),
        (
            {"optimizer__name": "Adafactor", "optimizer__adafactor_relative_step": True, "optimizer__lr": 1e-3},
            "optimizer.lr has no effect: optimizer.adafactor_relative_step sets the learning rate",
        ),
        (
            {"lr_scheduler__total_steps": 1000, "lr_scheduler__min_lr_factor": 0.1},
            "lr_scheduler.total_steps = 1000 is shorter than training.steps = 10000:"
            " from step 1001 on the learning rate stays at 0.1 of its peak",
        ),
        (
            {
                "parallelism__pipeline_parallel_degree": 2,
                "parallelism__module_fqns_per_model_part": [["tok_embeddings"], ["norm"]],
                "parallelism__pipeline_parallel_layers_per_stage": 4,
                "parallelism__pipeline_parallel_last_stage_less_layers": 0,
            },
            "parallelism.pipeline_parallel_last_stage_less_layers, parallelism.pipeline_parallel_layers_per_stage"
            " have no effect: parallelism.module_fqns_per_model_part names the modules of each stage",
        ),
        (
            {"parallelism__pipeline_parallel_first_stage_less_layers": 1},
            "parallelism.pipeline_parallel_first_stage_less_layers has no effect:"
            " parallelism.pipeline_parallel_degree is 1",
        ),
        (
            {
                "parallelism__pipeline_parallel_degree": 2,
                "parallelism__pipeline_parallel_first_stage_less_layers": 1,
                "parallelism__pipeline_parallel_last_stage_less_layers": 1,
            },
            "parallelism.pipeline_parallel_first_stage_less_layers,"
            " parallelism.pipeline_parallel_last_stage_less_layers"
            " have no effect: 1 for both ends of the pipeline splits stages by weights",
        ),
        (
            {
                "parallelism__pipeline_parallel_degree": 2,
                "parallelism__pipeline_parallel_schedule": "GPipe",
                "parallelism__pipeline_parallel_schedule_csv": "mine.csv",
            },
            "parallelism.pipeline_parallel_schedule has no effect:"
            " parallelism.pipeline_parallel_schedule_csv defines the schedule",
        ),
        (
            {"metrics__save_for_all_ranks": True},
            "metrics.save_for_all_ranks has no effect:"
            " neither metrics.enable_tensorboard nor metrics.enable_wandb is true",
        ),
        (
            {"parallelism__gradient_compression": "int8"},
            "parallelism.gradient_compression has no effect: there are no replicas that sum gradients",
        ),
        (
            {
                "parallelism__data_parallel_replicate_degree": 2,
                "parallelism__gradient_compression": "int8",
                "parallelism__topk_fraction": 0.5,
            },
            "parallelism.topk_fraction has no effect: parallelism.gradient_compression is not 'topk'",
        ),
        (
            {"parallelism__accumulation_sync": "scatter"},
            "parallelism.accumulation_sync has no effect:"
            " only HSDP (both data parallel degrees above 1) has reductions between replicas to postpone",
        ),
        (
            {"debug__check_replicas_freq": 5},
            "debug.check_replicas_freq has no effect: no two ranks hold the same weights",
        ),
        (
            {
                "debug__check_replicas_freq": 5,
                "parallelism__pipeline_parallel_degree": 2,
                "model__overrides": {"tie_word_embeddings": False},
            },
            "debug.check_replicas_freq has no effect: no two ranks hold the same weights",
        ),
        (
            {"model__overrides": {"sliding_window_layers": [0, 1]}},
            "model.overrides.sliding_window_layers has no effect: the model has no sliding_window",
        ),
        (
            {"model__overrides": {"window_kind": "chunked"}},
            "model.overrides.window_kind has no effect: the model has no sliding_window",
        ),
        (
            {"model__overrides": {"window_rope_theta": 100.0}},
            "model.overrides.window_rope_theta has no effect: the model has no sliding_window",
        ),
        (
            {"model__overrides": {"qk_norm_over": "width"}},
            "model.overrides.qk_norm_over has no effect: the model has no norm of queries and keys (qk_norm)",
        ),
        (
            {"model__overrides": {"query_scale": 0.1}},
            "model.overrides.query_scale has no effect: every layer has rotary positions (rope_layers)",
        ),
        (
            {"model__overrides": {"rope_scaling": {"type": "linear", "factor": 2.0, "beta_fast": 8.0, "mscale": 1.0}}},
            "model.overrides.rope_scaling.beta_fast, model.overrides.rope_scaling.mscale have no effect:"
            " rope_scaling.type is 'linear'",
        ),
        (
            {"model__flavor": "1B", "model__overrides": {"rope_scaling": {"beta_slow": 2.0}}},
            "model.overrides.rope_scaling.beta_slow has no effect: rope_scaling.type is 'llama3'",
        ),
        (
            {"validation__dataset_split": "test"},
            "validation.dataset_split has no effect: validation.enable is false",
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
    assert notes(given(lr_scheduler__total_steps=10000)) == []
    assert notes(given(lr_scheduler__total_steps=1000, training__epochs=1.0)) == []  # the data says how long
    assert notes(given(metrics__save_for_all_ranks=True, metrics__enable_wandb=True)) == []
    assert notes(given(parallelism__pipeline_parallel_degree=2)) == []
    ends = {"parallelism__pipeline_parallel_degree": 2, "parallelism__pipeline_parallel_first_stage_less_layers": 1}
    assert notes(given(**ends, parallelism__pipeline_parallel_layers_per_stage=2)) == []
    assert notes(given(**ends, parallelism__pipeline_parallel_last_stage_less_layers=0)) == []


@pytest.mark.parametrize("degree", ["data_parallel_replicate", "tensor_parallel", "pipeline_parallel"])
def test_copies_are_checked_where_there_may_be_some(degree):
    assert notes(given(**{"debug__check_replicas_freq": 5, f"parallelism__{degree}_degree": 2})) == []


@pytest.mark.parametrize("ratio", [None, 0.0, 0.0001, 0.5, 1.0])
@pytest.mark.parametrize("warmup", [0, 20, 100, 300])
def test_the_rate_after_a_short_schedule_is_the_one_that_is_said(warmup, ratio):
    keys = {"warmup_steps": warmup, "total_steps": 100, "decay_ratio": ratio, "min_lr_factor": 0.25}
    config = given(training__steps=200, **{f"lr_scheduler__{key}": value for key, value in keys.items()})
    (said,) = [line for line in notes(config) if line.startswith("lr_scheduler.total_steps")]
    assert "from step 101 on" in said  # which 100 finished ones precede
    for finished in (100, 150, 199):
        assert f"stays at {lr_factor(finished, config):g} of its peak" in said


# ---- what the model reads --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        {"sliding_window_layers": [0], "sliding_window": 8},
        {"rope_scaling": {"type": "yarn", "factor": 2.0, "beta_fast": 8.0}},
        {"rope_scaling": {"type": "linear", "factor": 2.0, "beta_fast": 32.0}},  # given, but the default
    ],
    ids=str,
)
def test_overrides_that_have_an_effect_are_not_noted(fields):
    assert notes(given(model__overrides=fields)) == []


def test_what_a_flavor_of_ones_own_has_counts(monkeypatch):
    sizes = {"dim": 64, "n_layers": 2, "n_heads": 2, "ffn_dim": 64, "vocab_size": 64, "sliding_window": 8}
    stretched = Architecture(**sizes, rope_scaling=RopeScaling(type="yarn", factor=2.0))
    monkeypatch.setitem(registry.flavors, "mine", {"dict": sizes, "built": stretched})
    for flavor in ("dict", "built"):
        assert notes(given(model__name="mine", model__flavor=flavor, model__overrides__sliding_window_layers=[0])) == []
    yarn = {"model__name": "mine", "model__flavor": "built", "model__overrides__rope_scaling__beta_fast": 8.0}
    assert notes(given(**yarn)) == []
    off = given(**yarn, model__overrides__sliding_window="none", model__overrides__sliding_window_layers=[0])
    assert [line.split()[0] for line in notes(off)] == ["model.overrides.sliding_window_layers"]


def test_a_model_that_is_not_read_yet_may_use_what_is_overridden():
    fields = {"sliding_window_layers": [0], "rope_scaling": {"beta_fast": 8.0}}
    assert notes(given(model__name="auto", model__overrides=fields)) == []


def test_the_rules_know_what_named_flavors_have():
    for name, flavor, arch in ((name, *item) for name, flavors in FLAVORS.items() for item in flavors.items()):
        config = given(model__name=name, model__flavor=flavor)
        assert has_window(config) == (arch.sliding_window is not None)
        assert arch.rope_scaling is None or arch.rope_scaling.type == scaling_type(config)


CHANGED = {
    "low_freq_factor": 2.0,
    "high_freq_factor": 8.0,
    "original_max_position_embeddings": 64,
    "attention_factor": 2.0,
    "beta_fast": 8.0,
    "beta_slow": 2.0,
    "mscale": 2.0,
    "mscale_all_dim": 3.0,
    "truncate": False,
    "short_factor": tuple(float(n) for n in range(1, 33)),
    "long_factor": tuple(float(n) for n in range(2, 34)),
}


@pytest.mark.parametrize("kind", SCALING_FIELDS)
@pytest.mark.parametrize("field", CHANGED)
def test_the_rules_know_what_each_scaling_reads(kind, field):
    assert set(CHANGED) == set(RopeScaling.model_fields) - {"type", "factor"}
    plain = {"type": kind, "factor": 4.0, "original_max_position_embeddings": 128}
    plain |= {"short_factor": (1.0,) * 32, "long_factor": (2.0,) * 32} if kind == "longrope" else {}
    plain |= {"mscale": 1.0, "mscale_all_dim": 0.5} if field.startswith("mscale") else {}  # read together

    def frequencies(scaling):
        arch = Architecture(dim=64, n_layers=1, n_heads=1, ffn_dim=64, vocab_size=64, rope_scaling=scaling)
        return [(found.tolist(), factor) for found, factor in (inverse_frequencies(arch, n) for n in (8, 256))]

    same = frequencies(plain) == frequencies(plain | {field: CHANGED[field]})
    assert same == (field not in SCALING_FIELDS[kind])


# ---- what the data reads ---------------------------------------------------------------------------------------------

ALL_READ, NO_FIELDS = "every named file is read", "plain text has no fields"


@pytest.mark.parametrize(
    ("path", "split", "field"),
    [
        ("corpus.jsonl", ALL_READ, ""),
        ("data/**/*.parquet", ALL_READ, ""),
        ("corpus.jsonl.gz, corpus.txt", ALL_READ, ""),
        ("corpus.txt", ALL_READ, NO_FIELDS),
        ("a.md, b*.txt.gz", ALL_READ, NO_FIELDS),
        ("some*", ALL_READ, ""),
        ("folder", "", ""),
        ("corpus.txt, folder", "", ""),
        ("not_there", "", ""),
        ("store", "{part}.dataset_path is a prepared store", "{part}.dataset_path is a prepared store"),
    ],
)
@pytest.mark.parametrize("part", ["training", "validation"])
def test_keys_that_the_named_data_does_not_read_are_noted(tmp_path, monkeypatch, part, path, split, field):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "store.json").write_text("{}")
    on = {"validation__enable": True} if part == "validation" else {}
    for name, expected in (("dataset_split", split), ("dataset_text_field", field)):
        config = given(**on, **{f"{part}__dataset_path": path, f"{part}__{name}": "other"})
        reason = expected.format(part=part)
        assert notes(config) == ([f"{part}.{name} has no effect: {reason}"] if expected else [])


def test_registered_sources_read_neither_fields_nor_splits(monkeypatch):
    monkeypatch.setitem(registry.sources, "letters", lambda path: ["a"])
    keys = {"training__dataset_text_field": "x", "training__dataset_split": "x"}
    assert notes(given(training__dataset="letters", training__dataset_path="a.txt", **keys)) == [
        "training.dataset_text_field, training.dataset_split have no effect:"
        " training.dataset is a registered source, which yields whole texts"
    ]
    assert notes(given(training__dataset="owner/name", **keys)) == []


def test_a_prepared_store_needs_no_cache(tmp_path):
    (tmp_path / "store.json").write_text("{}")
    keys = {"training__dataset_path": str(tmp_path), "training__cache_folder": "x"}
    assert notes(given(**keys)) == ["training.cache_folder has no effect: no raw data is prepared"]
    assert notes(given(**keys, validation__enable=True, validation__dataset_path="held_out")) == []


def test_registered_names_count(monkeypatch):
    monkeypatch.setitem(registry.optimizers, "Mine", lambda groups, section: None)
    known = "AdamW, Adam, Adafactor, SGD, Lion, LAMB, LARS, Muon, Mine"
    with pytest.raises(ConfigError, match=rf"{known}, got 'AdmaW', did you mean 'AdamW'"):
        check(given(optimizer__name="AdmaW"))
    monkeypatch.setitem(registry.flavors, "llama4", {"tiny": {}})
    check(given(optimizer__name="Mine", model__name="llama4", model__flavor="tiny"))
    assert pending(given(model__name="llama4", model__flavor="tiny")) == {}


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
    assert {name for name in SCHEDULES if build_schedule(name, 2, 4).splits} == set(SPLIT_SCHEDULES)


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
    with pytest.raises(ConfigError, match="cannot be undone"):
        check(given(**early, training__max_norm=0.0, training__nonfinite="skip"))
    with pytest.raises(ConfigError, match=r'optimizer in backward with LAMB: .*set optimizer.name = "AdamW"'):
        check(given(**early, optimizer__name="LAMB", training__max_norm=0.0))
    with pytest.raises(ConfigError, match=r"optimizer in backward with Muon: ranks divide the matrices"):
        check(given(**early, optimizer__name="Muon", training__max_norm=0.0))


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
    ({"parallelism__gradient_compression": "int8", **REPLICAS}, {2: "", 4: ""}),
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
    (
        {
            "comm__init_timeout_seconds": 8,
            "metrics__save_for_all_ranks": True,
            "metrics__enable_tensorboard": True,
        },
        {1: "the layout has one rank", 2: ""},
    ),
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
    page = Path(__file__).parents[3] / "docs" / "compatibility.md"
    assert page.read_text() == compatibility_page(), "run `make docs`"
