"""The schema: TorchTitan's names, types and defaults, ranges, and what each key says about itself."""

import copy
import json
import pickle
from pathlib import Path

import pytest

from shardline.config.architecture import Architecture
from shardline.config.load import load_config
from shardline.config.rules.workers import OUTER_KEYS, OUTER_STEP_KEYS
from shardline.config.schema import Config, leaves
from shardline.config.types import short_type
from shardline.errors import ConfigError

REFERENCE = json.loads((Path(__file__).parent / "torchtitan_defaults.json").read_text())
OTHER_DEFAULTS = {
    "job.dump_folder": None,
    "training.dataset": "demo",
    "validation.dataset": "demo",
    "activation_checkpoint.mode": "none",
    "checkpoint.last_save_model_only": False,
}
OWN_KEYS = {
    "fault_tolerance.async_staleness",
    "fault_tolerance.async_steps",
    "fault_tolerance.async_lr_power",
    "fault_tolerance.async_late",
    "fault_tolerance.async_late_seconds",
    "compile.cuda_graphs",
    "parallelism.async_tensor_parallel_compare_freq",
    "activation_checkpoint.offload_every",
    "checkpoint.interval_ratio",
    "checkpoint.interval_type",
    "generation.freq",
    "generation.max_new_tokens",
    "generation.prompts",
    "generation.seed",
    "generation.temperature",
    "generation.top_k",
    "lr_scheduler.bend_on_resume",
    "lr_scheduler.cycles",
    "lr_scheduler.decay_end_ratio",
    "lr_scheduler.decay_power",
    "lr_scheduler.decay_steps",
    "lr_scheduler.include_ends",
    "lr_scheduler.momentum_range",
    "lr_scheduler.timescale",
    "lr_scheduler.warmup_start_factor",
    "optimizer.adafactor_clip_threshold",
    "optimizer.adafactor_decay_rate",
    "optimizer.adafactor_eps",
    "optimizer.adafactor_momentum",
    "optimizer.adafactor_relative_step",
    "optimizer.adafactor_scale_parameter",
    "optimizer.adafactor_warmup_init",
    "lr_scheduler.warmup_ratio",
    "lr_scheduler.warmup_type",
    "lora.alpha_pattern",
    "lora.bias",
    "lora.rank_pattern",
    "metrics.wandb_entity",
    "metrics.wandb_group",
    "metrics.prometheus_port",
    "metrics.wandb_mode",
    "metrics.wandb_name",
    "metrics.wandb_project",
    "model.implementation",
    "hf_transformers.model",
    "metrics.wandb_run_id",
    "metrics.wandb_tags",
    "training.gradient_accumulation_steps",
    "training.max_loss",
    "training.objective",
    "training.max_loss_steps",
    "training.neftune_alpha",
    "training.unfrozen_parameters",
    "training.tf32",
    "validation.freq_ratio",
    "validation.patience",
    *(key for key in leaves() if key.startswith(("data.", "dpo.", "lora."))),
    "checkpoint.mirror",
    "checkpoint.preempted_exit_code",
    "checkpoint.save_before",
    "checkpoint.save_timeout_seconds",
    "comm.bind_cpus",
    "comm.nccl.algorithm",
    "comm.nccl.buffer_size",
    "comm.nccl.env",
    "comm.nccl.max_channels",
    "comm.nccl.min_channels",
    "comm.nccl.net_gdr_level",
    "comm.nccl.protocol",
    "comm.stop_timeout_seconds",
    "comm.lost_machine_seconds",
    "debug.check_replicas_freq",
    "dpo.beta",
    "dpo.label_smoothing",
    "dpo.loss",
    "dpo.reference",
    "lora.enable",
    "lora.rank",
    "lora.alpha",
    "lora.dropout",
    "lora.use_rslora",
    "lora.use_dora",
    "lora.target_modules",
    "lora.modules_to_save",
    "lora.layers",
    "lora.base_dtype",
    "lora.double_quantization",
    "lora.adapter_path",
    "lora.lr_ratio",
    *(key for key in (*OUTER_KEYS, *OUTER_STEP_KEYS) if key != "fault_tolerance.semi_sync_method"),
    "parallelism.data_parallel_mode",
    "model.overrides",
    "optimizer.decay_norms",
    "parallelism.async_tensor_parallel_backend",
    "parallelism.expert_parallel_dispatch_dtype",
    "quantize.grouped_mm.float8.emulate",
    "optimizer.early_step_clipping",
    "optimizer.lr_scaling",
    "optimizer.lr_scaling_base_batch",
    "optimizer.muon_adjust_lr",
    "optimizer.muon_lr_factor",
    "optimizer.muon_momentum",
    "optimizer.muon_ns_steps",
    "optimizer.state_dtype",
    "optimizer.trust_coefficient",
    "parallelism.accumulation_sync",
    "parallelism.enable_sequence_parallel",
    "parallelism.fsdp_prefetch",
    "parallelism.gradient_bucket_mib",
    "parallelism.gradient_compression",
    "parallelism.overlap_gradient_reduction",
    "parallelism.powersgd_rank",
    "parallelism.topk_fraction",
    "profiling.record_shapes",
    "profiling.top_ops",
    "profiling.with_stack",
    "training.cache_folder",
    "training.verify_data",
    "training.dataset_split",
    "training.dataset_text_field",
    "training.epochs",
    "training.loss_chunk_tokens",
    "training.nonfinite",
    "validation.dataset_split",
    "validation.dataset_text_field",
}


def test_every_reference_key_is_known_with_its_default():
    assert len(REFERENCE) == 149
    config = load_config()
    for key, (_, default) in REFERENCE.items():
        assert config.value(key) == OTHER_DEFAULTS.get(key, default), key
        assert leaves()[key].default == OTHER_DEFAULTS.get(key, default), key


def test_no_other_keys_than_the_reference_and_our_own():
    assert set(leaves()) - set(REFERENCE) == OWN_KEYS


@pytest.mark.parametrize(
    ("key", "kind"),
    [
        ("training.max_norm", "float"),
        ("optimizer.implementation", '"for-loop" | "foreach" | "fused"'),
        ("parallelism.module_fqns_per_model_part", "list of list of str or none"),
        ("quantize.grouped_mm.mx.fqns", "list of str or str"),
        ("parallelism.context_parallel_rotate_method", '"allgather" | "alltoall" | "ring" | "ulysses"'),
    ],
)
def test_types_are_named(key, kind):
    assert short_type(leaves()[key].annotation) == kind


def test_reference_types_match():
    simple = {"bool": "bool", "int": "int", "float": "float", "str": "str", "list[str]": "list of str"}
    simple |= {f"{name} or None": f"{kind} or none" for name, kind in simple.items()}
    for key, (kind, _) in REFERENCE.items():
        if kind in simple and key not in (
            "compile.components",
            "job.dump_folder",
            "training.dataset",
            "activation_checkpoint.determinism_check",
            "fault_tolerance.semi_sync_method",
        ):
            assert short_type(leaves()[key].annotation) == simple[kind], key


def test_every_key_has_one_line_of_meaning():
    for key, leaf in leaves().items():
        assert 10 < len(leaf.description) < 110, key
        assert leaf.description.endswith("."), key
        assert "\n" not in leaf.description, key


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("training.steps", -1),
        ("training.steps", 0),
        ("training.steps", 2**63),
        ("training.steps", 1.0),
        ("training.steps", True),
        ("training.steps", "5"),
        ("training.seq_len", 0),
        ("training.global_batch_size", 0),
        ("training.global_batch_size", -2),
        ("training.epochs", 0.0),
        ("training.max_norm", -1),
        ("optimizer.lr", -1e-9),
        ("optimizer.lr", float("nan")),
        ("optimizer.lr", float("inf")),
        ("optimizer.beta1", 1.0),
        ("optimizer.beta2", -0.1),
        ("lr_scheduler.decay_ratio", 1.5),
        ("lr_scheduler.momentum_range", [0.9, 0.8]),
        ("lr_scheduler.momentum_range", [0.9]),
        ("lora.rank_pattern", {"q_proj": 0}),
        ("lora.alpha_pattern", {"": 3.0}),
        ("optimizer.adafactor_decay_rate", 0.8),
        ("optimizer.adafactor_eps", [1e-30]),
        ("lr_scheduler.min_lr_factor", -0.1),
        ("lr_scheduler.warmup_steps", -1),
        ("parallelism.tensor_parallel_degree", 0),
        ("parallelism.tensor_parallel_degree", -1),
        ("parallelism.data_parallel_shard_degree", 0),
        ("parallelism.data_parallel_shard_degree", -2),
        ("checkpoint.load_step", -2),
        ("activation_checkpoint.memory_budget", 1.1),
        ("activation_checkpoint.selective_ac_option", "0"),
        ("activation_checkpoint.selective_ac_option", "second"),
        ("compile.components", ["model", "optimiser"]),
        ("checkpoint.folder", " "),
        ("debug.seed", -1),
        ("model.converters", "float8"),
        ("job.print_config", "yes"),
        ("job.description", "a\udc80b"),
    ],
)
def test_impossible_values_are_named(key, value):
    with pytest.raises(ConfigError, match=rf"{key}: expected .*, got ") as caught:
        load_config(overrides={key: value})
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("training.global_batch_size", -1),
        ("parallelism.data_parallel_shard_degree", -1),
        ("checkpoint.load_step", 0),
        ("checkpoint.keep_latest_k", 0),
        ("activation_checkpoint.selective_ac_option", "op"),
        ("lr_scheduler.decay_ratio", 0),
        ("training.max_norm", 1),
        ("validation.steps", -1),
        ("optimizer.beta1", 0.0),
    ],
)
def test_edge_values_are_accepted(key, value):
    assert load_config(overrides={key: value}).value(key) == value


def test_config_is_read_only_and_replace_copies():
    config = load_config(overrides={"training.steps": 5})
    with pytest.raises(ValueError, match="frozen"):
        config.training.steps = 6
    changed = config.replace({"training.seq_len": 16})
    assert load_config(preset="demo").replace({"training.steps": 1}).model.overrides["dim"] == 128
    assert (changed.training.steps, changed.training.seq_len, config.training.seq_len) == (5, 16, 2048)
    assert changed.is_set("training.seq_len")
    assert changed.is_set("training.steps")
    assert not changed.is_set("training.local_batch_size")
    assert changed != config
    with pytest.raises(ConfigError, match=r"training\.stepz"):
        config.replace({"training.stepz": 1})
    with pytest.raises(ConfigError, match=r"training\.steps: expected"):
        config.replace({"training.steps": 0})


def test_configs_travel_to_other_processes():
    config = load_config(overrides={"training.steps": 5, "training.batch_size": 2})
    for copied in (pickle.loads(pickle.dumps(config)), copy.deepcopy(config)):
        assert copied == config
        assert copied.is_set("training.steps")
        assert copied.alias_notes == config.alias_notes


def test_default_tables_are_not_shared_between_configs():
    first, second = load_config(), load_config()
    assert first.model.overrides is not second.model.overrides
    assert first == second == Config()


TINY = Architecture(dim=64, n_layers=2, n_heads=4, ffn_dim=128, vocab_size=100)


def test_derived_sizes_follow_overrides():
    assert (TINY.n_kv_heads, TINY.head_dim) == (4, 16)
    assert TINY.with_overrides({"n_heads": 8}).n_kv_heads == 8
    assert TINY.with_overrides({"dim": 128}).head_dim == 32
    fixed = TINY.with_overrides({"head_dim": 24, "n_kv_heads": 2})
    wider = fixed.with_overrides({"dim": 256, "n_heads": 8})
    assert (wider.head_dim, wider.n_kv_heads) == (24, 2)


def test_rope_scaling_can_be_changed_in_part():
    scaled = TINY.with_overrides({"rope_scaling": {"type": "linear", "factor": 2.0}})
    assert scaled.with_overrides({"rope_scaling": {"factor": 4.0}}).rope_scaling.factor == 4.0
    assert scaled.with_overrides({"rope_scaling": None}).rope_scaling is None


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"n_layer": 3}, "did you mean 'n_layers'"),
        ({"n_kv_heads": 3}, "must divide n_heads"),
        ({"head_dim": 15}, "must be even"),
        ({"dim": 0}, r"model\.overrides\.dim"),
        ({"n_layers": True}, r"model\.overrides\.n_layers"),
        ({"rope_theta": float("nan")}, r"model\.overrides\.rope_theta"),
        ({"sliding_window_layers": [0, 2]}, "the layers are 0 to 1"),
        ({"rope_scaling": {"type": "llama3", "factor": 2.0}}, "original_max_position_embeddings"),
        ({"rope_scaling": {"factor": 2.0}}, "rope_scaling.type"),
    ],
)
def test_wrong_architectures_name_the_field(overrides, message):
    with pytest.raises(ConfigError, match=message):
        TINY.with_overrides(overrides)
