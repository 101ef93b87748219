"""The files of a checkpoint: pieces that `safetensors` alone can place, reads that verify what they need, pruning."""

import json
import os
import zlib
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from shardline.checkpoint import format as files
from shardline.checkpoint.commit import merge, publish, share_out, shortened_rng
from shardline.checkpoint.reader import ShardFiles, VerifiedFile
from shardline.checkpoint.resume import Start
from shardline.checkpoint.shards import Place, place_key
from shardline.config.architecture import Architecture
from shardline.config.load import load_config
from shardline.errors import UserError
from shardline.storage import blocks
from shardline.storage.blocks import Damaged
from shardline.storage.safetensors import Entry, name_of_type, write_tensors
from tests.reads import counted_reads

ARCH = Architecture(dim=8, n_layers=1, n_heads=2, n_kv_heads=1, head_dim=4, ffn_dim=16, vocab_size=16)


def write_pieces(folder, tensors, places):
    """Shards as ranks would write them: `places[rank][name]` lists what a rank writes of a tensor."""
    parts = []
    for rank, owned in enumerate(places):
        name, entries, table = files.shard_name(rank, len(places)), [], {}
        for tensor, held in owned.items():
            whole = tensors[tensor]
            for place in held:
                key = place_key(tensor, whole.shape, place)
                entries.append(Entry(key, place.size, whole.dtype, lambda w=whole, p=place: w[p.slices]))
            rows = [[*place.start, *place.size] for place in held]
            table[tensor] = {"dtype": name_of_type(whole.dtype), "shape": list(whole.shape), "places": rows}
        record = write_tensors(folder / name, entries)
        parts.append({"file": name, "record": record, "tensors": table, "rng": {}})
    merged = merge(parts)
    return ShardFiles(folder, merged.files, merged.tensors)


@pytest.fixture
def tensors():
    return {
        "model/a": torch.randn(37, 19),
        "model/b": torch.randn(11).bfloat16(),
        "optimizer/step/a": torch.tensor(7.0),
    }


def read_part(shards, name, wanted):
    out = torch.empty(wanted.size, dtype=shards.stored(name).dtype)
    for place, block in shards.blocks(name, wanted):
        out[place.within(wanted).slices] = block
    return out


HALVES = [
    {"model/a": [Place((0, 0), (20, 19)), Place((20, 0), (17, 6))], "optimizer/step/a": [Place((), ())]},
    {"model/a": [Place((20, 6), (17, 13))], "model/b": [Place((0,), (11,))]},
]


def test_tensors_are_put_together_from_pieces_of_several_files(tmp_path, tensors, monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 256)
    shards = write_pieces(tmp_path, tensors, HALVES)
    for name, tensor in tensors.items():
        read = shards.read(name)
        assert read.dtype == tensor.dtype
        assert torch.equal(read, tensor)
    for wanted in (Place((3, 2), (28, 7)), Place((25, 0), (1, 19)), Place((33, 0), (4, 19)), Place((5, 0), (0, 19))):
        assert torch.equal(read_part(shards, "model/a", wanted), tensors["model/a"][wanted.slices])


def test_large_reads_come_in_chunks(tmp_path, tensors, monkeypatch):
    monkeypatch.setattr("shardline.checkpoint.reader.CHUNK_BYTES", 100)
    shards = write_pieces(tmp_path, tensors, HALVES)
    assert torch.equal(shards.read("model/a"), tensors["model/a"])
    assert len(list(shards.blocks("model/a", Place((0, 0), (20, 19))))) == 20


def test_safetensors_alone_reads_and_places_the_pieces(tmp_path, tensors):
    write_pieces(tmp_path, tensors, HALVES)
    rebuilt = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
    for path in tmp_path.glob("shard-*"):
        for key, piece in load_file(path).items():
            name, _, place = key.partition("[")
            slices = tuple(slice(*map(int, part.split(":"))) for part in place.rstrip("]").split(",")) if place else ...
            rebuilt[name][slices] = piece
    assert all(torch.equal(rebuilt[name], tensor) for name, tensor in tensors.items())
    with safe_open(tmp_path / files.shard_name(1, 2), framework="pt") as file:
        assert sorted(file.keys()) == ["model/a[20:37,6:19]", "model/b"]


def test_only_the_blocks_that_are_needed_are_read_and_verified(tmp_path, monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 1024)
    tensors = {"model/a": torch.randn(1024, 16)}
    shards = write_pieces(tmp_path, tensors, [{"model/a": [Place((0, 0), (1024, 16))]}])
    with counted_reads() as sizes:
        read_part(shards, "model/a", Place((0, 0), (256, 16)))
    assert 64 * 256 <= sum(sizes) <= 64 * 256 + 3 * 1024
    path = tmp_path / files.shard_name(0, 1)
    content = bytearray(path.read_bytes())
    content[-10] ^= 1
    path.write_bytes(content)
    shards = ShardFiles(tmp_path, shards.files, shards._table)
    assert torch.equal(read_part(shards, "model/a", Place((0, 0), (512, 16))), tensors["model/a"][:512])
    with pytest.raises(Damaged, match=r"shard-00000-of-00001.safetensors is damaged: bytes \d+ to \d+ fail"):
        read_part(shards, "model/a", Place((1000, 0), (24, 16)))


def test_neighbours_in_one_block_read_it_once(tmp_path):
    tensors = {f"model/{i}": torch.randn(5, 5) for i in range(50)}
    shards = write_pieces(tmp_path, tensors, [{name: [Place((0, 0), (5, 5))] for name in tensors}])
    with counted_reads() as sizes:
        for name in tensors:
            shards.read(name)
    assert sum(sizes) == (tmp_path / files.shard_name(0, 1)).stat().st_size


def test_a_shard_that_is_not_what_the_manifest_says(tmp_path, tensors):
    shards = write_pieces(tmp_path, tensors, HALVES)
    table = json.loads(json.dumps(shards._table))
    table["model/a"]["pieces"].pop()
    with pytest.raises(Damaged, match="the pieces of model/a do not cover it"):
        ShardFiles(tmp_path, shards.files, table).read("model/a")
    table = json.loads(json.dumps(shards._table))
    table["model/b"]["pieces"][0][0] = 0  # says the other file
    with pytest.raises(Damaged, match=r"shard-00000-of-00002.safetensors does not hold model/b"):
        ShardFiles(tmp_path, shards.files, table).read("model/b")


def test_a_file_that_shrinks_after_it_was_opened_is_torn(tmp_path):
    path = tmp_path / "x.safetensors"
    record = write_tensors(path, [Entry("a", (64, 64), torch.float32, lambda: torch.zeros(64, 64))])
    opened = VerifiedFile(path, record)
    os.truncate(path, 100)
    with pytest.raises(Damaged, match="it is torn"):
        opened.read(0, record["size"])


def test_checksums_are_those_of_zlib(tmp_path, monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 4096)
    path = tmp_path / "x.safetensors"
    record = write_tensors(path, [Entry("a", (3000,), torch.float32, lambda: torch.randn(3000))])
    content = path.read_bytes()
    assert record["size"] == len(content)
    assert record["crc32"] == [zlib.crc32(content[i : i + 4096]) for i in range(0, len(content), 4096)]


# ---- who writes what -------------------------------------------------------------------------------------------------


def test_parts_that_several_ranks_hold_are_shared_out():
    sizes = {1: 60, 2: 30, 3: 20, 4: 50, 5: 0}
    held = [[(key, sizes[key]) for key in keys] for keys in ((1, 2, 3, 5), (1, 2, 4, 5))]
    owned = share_out(held)
    assert owned[0] | owned[1] == set(sizes)
    assert not owned[0] & owned[1]
    assert owned == [{1, 3, 5}, {2, 4}]


def test_replicas_write_about_the_same_each():
    sizes = {key: 1 + key * 7919 % 100 for key in range(300)}
    owned = share_out([list(sizes.items())] * 8)
    loads = [sum(sizes[key] for key in keys) for keys in owned]
    assert sum(loads) == sum(sizes.values())
    assert max(loads) - min(loads) <= max(sizes.values())


def test_ranks_that_do_not_cover_a_tensor_are_noticed(tmp_path):
    row = {"dtype": "F32", "shape": [4, 2], "places": [[0, 0, 3, 2]]}
    part = {"file": "x", "record": {}, "tensors": {"model/a": row}, "rng": {}}
    with pytest.raises(RuntimeError, match="wrote 6 elements of model/a"):
        merge([part])
    other = {**part, "file": "y", "tensors": {"model/a": {**row, "dtype": "BF16", "places": [[3, 0, 1, 2]]}}}
    with pytest.raises(RuntimeError, match="ranks hold model/a as F32"):
        merge([part, other])


def test_equal_random_states_are_kept_once():
    a, b = {"torch": "00"}, {"torch": "01"}
    assert shortened_rng([a, a, b, a, b]) == [a, 0, b, 0, 2]


# ---- folders ---------------------------------------------------------------------------------------------------------


def make(folder, step, kind="full"):
    """A checkpoint of one small tensor."""
    partial = folder / f"step-{step}.partial"
    partial.mkdir(parents=True)
    entries = [Entry("model/norm.weight", (8,), torch.float32, lambda: torch.full((8,), float(step)))]
    recorded, table = files.write_whole(partial, entries)
    publish(partial, folder / f"step-{step}", files.manifest(step, kind, ARCH, {"step": step}, recorded, table))
    return folder / f"step-{step}"


def steps(folder):
    return [saved.step for saved in files.list_checkpoints(folder)]


def test_a_manifest_is_json_with_a_line_for_each_tensor(tmp_path):
    text = (make(tmp_path, 3) / "manifest.json").read_text()
    assert json.loads(text)["version"] == 2
    assert [line for line in text.splitlines() if "model/norm.weight" in line] == [
        '  "model/norm.weight": {"dtype": "F32", "shape": [8], "pieces": [[0, 0, 8]]}'
    ]


def test_pruning_leaves_the_newest_that_can_be_resumed(tmp_path):
    for step in (1, 2, 3):
        make(tmp_path, step)
    make(tmp_path, 4, "model")
    files.prune(tmp_path, keep=1)
    assert steps(tmp_path) == [3, 4]
    files.prune(tmp_path, keep=0)
    assert steps(tmp_path) == [3, 4]


def test_pruning_does_not_count_on_a_torn_one(tmp_path):
    for step in (1, 2, 3):
        path = make(tmp_path, step)
    (path / files.shard_name(0, 1)).write_bytes(b"")
    files.prune(tmp_path, keep=1)
    assert steps(tmp_path) == [2, 3]


def test_pruning_leaves_what_is_protected(tmp_path):
    for step in (1, 2, 3, 4):
        make(tmp_path, step)
    files.prune(tmp_path, keep=1, protected={2})
    assert steps(tmp_path) == [2, 4]


def test_pruning_removes_what_earlier_attempts_left(tmp_path):
    for step in (1, 2, 8):
        make(tmp_path, step)
    for name in ("step-9.partial", "step-3.damaged", "step-4.damaged", "step-30.damaged", "step-5.abandoned"):
        (tmp_path / name).mkdir()
    for name in ("step-6.abandoned", "step-8.replaced", "step-7.replaced", "step-x.damaged", "notes"):
        (tmp_path / name).mkdir()
    files.prune(tmp_path, keep=2)
    left = {path.name for path in tmp_path.iterdir()}
    # step-7.replaced stands for a rename that was cut short: it is all there is of step 7
    assert left == {
        *("step-2", "step-8", "step-30.damaged", "step-6.abandoned", "step-7.replaced", "step-x.damaged", "notes")
    }


def test_every_rank_takes_the_initial_weights_that_rank_0_has_found(tmp_path):
    """A run that still saves there has shown this rank a newer step."""
    for step in (1, 2):
        make(tmp_path, step)
    nothing, mesh = (
        SimpleNamespace(),
        SimpleNamespace(from_rank_0=lambda find: find() - 1, from_everyone=lambda value: [value]),
    )
    config = load_config(None, [f"--checkpoint.initial_load_path={tmp_path}"])
    start = Start(config, tmp_path / "run", nothing, nothing, nothing, 8, mesh)
    assert start._initial_checkpoint(str(tmp_path)).step == 1
    assert start._initial_checkpoint(f"file://{tmp_path}").step == 1
    with pytest.raises(UserError, match=r"initial_load_path: .* does not exist"):
        start._initial_checkpoint(str(tmp_path / "run"))


@pytest.mark.parametrize("version", [1, 3])
def test_another_version_is_refused(version, tmp_path):
    path = make(tmp_path, 1) / "manifest.json"
    path.write_text(path.read_text().replace('"version": 2', f'"version": {version}'))
    with pytest.raises(UserError, match=rf"{path} has .* version {version}, but this program reads only version"):
        files.find_checkpoint(path.parent)
