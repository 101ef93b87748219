"""Every configuration that comes with the project passes the dry run of the ranks it is meant for."""

import re
from pathlib import Path

import pytest

from shardline.config.load import load_config
from shardline.tools.dry_run.dry_run import describe

CONFIGS = Path(__file__).parents[3] / "configs"
PARAMETERS = {"8B": 8_030_261_248, "70B": 70_553_706_496, "405B": 405_853_388_800}
# File -> ranks, what the lines must say
WANTED = {
    "llama3_8b": (8, ["on 8 ranks: dp_shard 8"]),
    "llama3_8b_128k": (8, ["dp_shard 4 x cp 2", "context of 131,072 tokens in 4 slices of 32,768: cp 0 has 0 and 3"]),
    "llama3_8b_1m": (64, ["cp 64", "context of 1,048,576 tokens in 128 slices of 8,192", "  cp           all-gather"]),
    "llama3_70b": (64, ["dp_shard 8 x tp 8"]),
    "llama3_70b_async_tp": (256, ["dp_shard 32 x tp 8"]),
    "llama3_405b": (
        512,
        ["pp 8 x dp_shard 8 x tp 8", "Interleaved1F1B, 8 micro-batches of 1, 16 stages", "warning: Int"],
    ),
    "llama3_405b_1f1b": (
        512,
        ["1F1B, 8 micro-batches of 1, 8 stages, theoretical bubble 46.7%", "  pp           send"],
    ),
    "llama3_405b_128k": (
        512,
        ["pp 8 x dp_shard 4 x cp 2 x tp 8", "16 stages", "context of 131,072 tokens in 4 slices"],
    ),
    "llama3_405b_256k": (
        512,
        ["pp 8 x dp_shard 2 x cp 4 x tp 8", "16 stages", "context of 262,144 tokens in 8 slices"],
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WANTED)
def test_the_dry_run_of_a_configuration(name):
    ranks, wanted = WANTED[name]
    config = load_config(CONFIGS / f"{name}.toml")
    text = describe(config, ranks)
    for words in wanted:
        assert words in text, text
    held = re.search(r"with copies counted once: ([\d,]+), the parameters of the model", text)
    assert held is not None
    assert int(held[1].replace(",", "")) == PARAMETERS[config.model.flavor]


def test_no_configuration_is_left_out():
    assert {path.stem for path in CONFIGS.glob("llama3_*.toml")} == set(WANTED)
