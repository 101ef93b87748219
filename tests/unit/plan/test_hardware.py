"""Profiles of devices: what ships, what is refused, and the rates and collectives that follow from one."""

from __future__ import annotations

import math
import tomllib
from dataclasses import replace

import pytest

from shardline.config.layout import Layout
from shardline.errors import UserError
from shardline.plan import collectives, hardware
from shardline.plan.collectives import Group, axis_group
from shardline.plan.hardware import PROFILES, find_profile, local_gpu, profile_for, profile_names, read_profile

H100 = find_profile("h100")


def numbers(table, prefix=""):
    for key, value in table.items():
        if isinstance(value, dict):
            yield from numbers(value, f"{prefix}{key}.")
        elif not isinstance(value, str):
            yield prefix + key


@pytest.mark.parametrize("name", profile_names())
def test_every_number_that_ships_has_a_source(name):
    given = tomllib.loads((PROFILES / f"{name}.toml").read_text())
    sources = given.pop("sources")
    assert set(sources) == set(numbers(given))
    assert all(text.strip() for text in sources.values())
    assert read_profile(PROFILES / f"{name}.toml").memory > 0


def test_the_profiles_that_are_promised_ship():
    assert {"a100", "h100", "h200", "b200", "rtx4090", "mi300x", "cpu"} <= set(profile_names())


@pytest.mark.parametrize(
    ("name", "profile"),
    [("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA A100-SXM4-40GB", "a100_40gb"), ("NVIDIA A100-SXM4-80GB", "a100")],
)
def test_a_device_finds_its_profile_by_name(name, profile):
    assert profile_for(name) == find_profile(profile)


def test_an_unknown_gpu_is_an_error_that_helps():
    with pytest.raises(UserError, match=r"did you mean 'h100'\?.*bench device --write mine.toml"):
        find_profile("h10")


def test_a_file_that_is_no_profile_is_an_error(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text('name = "mine"\n[device]\n')
    with pytest.raises(UserError, match="is no profile of a device"):
        find_profile(str(file))
    with pytest.raises(UserError, match="cannot be read"):
        find_profile(str(tmp_path / "none.toml"))


def test_a_profile_can_extend_another(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text('extends = "h100"\nname = "mine"\n[memory]\ncapacity_gib = 40.0\n')
    mine = find_profile(str(file))
    assert mine.memory == 40 * 2**30
    assert mine.copy == H100.copy


def test_this_machines_gpu_is_known_without_waking_it(tmp_path, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(hardware, "NVIDIA", tmp_path)
    assert local_gpu() is None
    (tmp_path / "0000:01:00.0").mkdir()
    (tmp_path / "0000:01:00.0" / "information").write_text("Model: \t\t NVIDIA H200\nIRQ: 1\n")
    assert local_gpu() == "NVIDIA H200"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert local_gpu() is None


def test_products_reach_less_where_the_last_wave_of_tiles_is_not_full():
    def rate(rows, columns, inner):
        return 2 * rows * columns * inner / H100.product_seconds(rows, columns, inner, "bfloat16")

    large = rate(8192, 28672, 4096)
    assert 0.85 < large / (H100.products["bfloat16"].achieved * H100.sustained) <= 1.0
    assert rate(8192, 4096, 64) < 0.6 * large  # a short inner size
    assert rate(128 * 133, 256, 4096) < 0.6 * large  # one tile more than there are multiprocessors
    assert rate(64, 4096, 4096) < 0.3 * large  # bound by memory


def test_float8_products_are_faster_and_unknown_types_count_as_bfloat16():
    shape = (8192, 8192, 8192)
    assert H100.product_seconds(*shape, "float8") < 0.7 * H100.product_seconds(*shape, "bfloat16")
    assert find_profile("a100").product_seconds(*shape, "float8") == pytest.approx(
        find_profile("a100").product_seconds(*shape, "bfloat16"), rel=0.01
    )


def test_attention_slows_down_on_narrow_heads_short_sequences_and_backward():
    """Seconds of 1e15 FLOPs, which take so long that a kernel's start does not count."""
    wide, narrow = (H100.attention_seconds(1e15, False, "cudnn", dim, 8192) for dim in (128, 64))
    ahead, back = H100.attention["cudnn"]
    assert wide == pytest.approx(1e15 / (ahead * H100.sustained) * (8192 + 800) / 8192, rel=1e-4)
    assert narrow / wide == pytest.approx(2**0.35, rel=1e-4)
    assert H100.attention_seconds(1e15, False, "cudnn", 256, 8192) == wide
    assert H100.attention_seconds(1e15, True, "cudnn", 128, 8192) / wide == pytest.approx(ahead / back, rel=1e-4)
    assert H100.attention_seconds(1e15, False, "cudnn", 128, 800) / wide == pytest.approx(2 * 8192 / 8992, rel=1e-4)


# ---- collectives -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("axis", "group"),
    [("tp", Group(4, 4)), ("cp", Group(2, 2)), ("dp_shard", Group(8, 2)), ("pp", Group(2, 1)), ("dp", Group(8, 2))],
)
def test_an_axis_knows_how_many_of_its_ranks_share_a_node(axis, group):
    assert axis_group(Layout(pp=2, dp_shard=4, cp=2, tp=4), axis, 8) == group


def test_a_large_ring_inside_a_node_runs_at_its_bandwidth():
    size = 2**34
    seconds = collectives.seconds(H100, Group(8, 8), "all_gather", size)
    assert seconds == pytest.approx(size * 7 / 8 / H100.node.bandwidth, rel=0.01)


def test_switches_speed_up_all_reduce_alone():
    size, group = 2**34, Group(8, 8)
    gather = collectives.seconds(H100, group, "all_gather", size)
    assert collectives.seconds(H100, group, "reduce_scatter", size) == gather
    assert collectives.seconds(H100, group, "all_reduce", size) == pytest.approx(
        2 * gather / H100.node.reduce, rel=0.01
    )


def test_between_nodes_the_ranks_of_a_node_send_side_by_side():
    size, slow = 2**34, replace(H100, network=H100.network._replace(bandwidth=10e9))
    alone = collectives.seconds(slow, Group(4, 1), "all_gather", size)
    together = collectives.seconds(slow, Group(32, 8), "all_gather", size)
    assert alone == pytest.approx(size * 3 / 4 / 10e9, rel=0.01)
    assert alone / together == pytest.approx(8, rel=0.02)


def test_rows_to_experts_and_between_stages_take_the_slowest_link_on_their_way():
    size, h100 = 2**34, replace(H100, network=H100.network._replace(bandwidth=10e9))
    inside, apart, mixed = (
        collectives.seconds(h100, group, "all_to_all", size) for group in (Group(8, 8), Group(4, 1), Group(16, 8))
    )
    assert inside == pytest.approx(size * 7 / 8 / H100.node.bandwidth, rel=0.01)
    assert apart == pytest.approx(size * 3 / 4 / 10e9, rel=0.01)
    assert mixed == pytest.approx(size / 2 / 10e9, rel=0.01)  # half of the rows leave the node
    near, far = (collectives.seconds(h100, group, "send", size) for group in (Group(2, 2), Group(2, 1)))
    assert near == pytest.approx(size / H100.node.bandwidth, rel=0.01)
    assert far == pytest.approx(size / 10e9, rel=0.01)


def test_small_messages_cost_hops():
    few, many = (collectives.seconds(H100, Group(n, 8), "all_gather", 1024) for n in (16, 64))
    assert many / few == pytest.approx(63 / 15, rel=0.05)
    assert collectives.seconds(H100, Group(1, 1), "all_reduce", 1024) == 0
    assert math.isclose(collectives.seconds(H100, Group(8, 8), "all_reduce", 0), 0)
