"""TorchTitan's experiment with torchft: its file loads, and says what is read in other words."""

import pytest

from shardline.config.check import notes, pending
from shardline.config.load import load_config

# What its file for the small model says, but for keys that are the same everywhere.
FILE = """
[job]
description = "Llama 3 fault-tolerant debug training"
print_config = false
custom_config_module = "{module}"

[model]
name = "llama3_ft"
flavor = "debugmodel"
hf_assets_path = "./tests/assets/tokenizer"

[training]
local_batch_size = 8
seq_len = 2048
steps = 100
dataset = "c4_test"

[activation_checkpoint]
mode = "selective"
selective_ac_option = "2"

[comm]
train_timeout_seconds = 15

[fault_tolerance]
enable = true
sync_steps = 10
num_fragments = 2
fragment_sync_delay = 1
fragment_update_alpha = 0.25
should_quantize = true
semi_sync_method = "diloco"
process_group = "nccl"
process_group_timeout_ms = 10000
"""
MODULES = ["torchtitan.experiments.ft.config.job_config", "torchtitan.components.ft.config"]


@pytest.mark.parametrize("module", MODULES)
def test_the_file_of_torchtitans_groups_loads(tmp_path, module):
    file = tmp_path / "llama3_ft.toml"
    file.write_text(FILE.format(module=module))
    config = load_config(file)
    assert (config.model.name, config.model.flavor) == ("llama3", "debugmodel")
    assert config.job.custom_config_module == ""
    section = config.fault_tolerance
    assert (section.sync_steps, section.num_fragments, section.fragment_sync_delay) == (10, 2, 1)
    assert (section.fragment_update_alpha, section.should_quantize) == (0.25, True)
    said = "\n".join(config.alias_notes)
    assert "llama3_ft.toml:8: model.name = 'llama3_ft' is read as 'llama3'" in said
    assert f"llama3_ft.toml:5: job.custom_config_module = '{module}' is not needed" in said
    assert set(pending(config)) == {"fault_tolerance.semi_sync_method", "fault_tolerance.process_group"}


def test_its_workers_are_those_of_one_job(tmp_path):
    file = tmp_path / "llama3_ft.toml"
    file.write_text(FILE.format(module=MODULES[0]))
    words = ["--fault_tolerance.no_enable", "--parallelism.data_parallel_mode=diloco"]
    config = load_config(file, [*words, "--parallelism.data_parallel_replicate_degree=2"])
    assert pending(config) == {}
    assert not any("fault_tolerance.sync_steps" in line for line in notes(config))


def test_other_modules_are_not_taken_for_it():
    for module in ("torchtitan.experiments.ftx.config", "mine"):
        config = load_config(overrides={"job.custom_config_module": module})
        assert config.job.custom_config_module == module
        assert pending(config) == {"job.custom_config_module": "custom config keys"}
