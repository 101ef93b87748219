"""The manifest of a checkpoint protects itself, and removing a checkpoint leaves nothing that looks like one."""

import json
import shutil

import pytest
import torch

from shardline.checkpoint import format as files
from shardline.checkpoint.commit import publish
from shardline.config.architecture import Architecture
from shardline.errors import UserError
from shardline.storage.safetensors import Entry

ARCH = Architecture(dim=8, n_layers=1, n_heads=2, n_kv_heads=1, head_dim=4, ffn_dim=8, vocab_size=16)


def written(folder, step=2, samples=8):
    final = folder / f"step-{step}"
    partial = folder / f"step-{step}.partial"
    partial.mkdir(parents=True)
    tensor = torch.arange(6.0)
    recorded, tensors = files.write_whole(partial, [Entry("model/a", (6,), torch.float32, lambda: tensor)])
    trainer = {"step": step, "samples": samples}
    publish(partial, final, files.manifest(step, "full", ARCH, trainer, recorded, tensors))
    return final


def test_every_flipped_bit_of_a_manifest_is_found(tmp_path):
    path = written(tmp_path)
    good = (path / "manifest.json").read_bytes()
    assert files.find_checkpoint(path).step == 2
    for position in range(len(good)):
        for bit in range(8) if position > len(good) - 40 else (position % 8,):
            changed = bytes([good[position] ^ 1 << bit])
            if (good[position : position + 1] + changed).lower() == b"ee":  # 1e-05 and 1E-05 are the same
                continue
            (path / "manifest.json").write_bytes(good[:position] + changed + good[position + 1 :])
            with pytest.raises(UserError, match=r"manifest\.json"):
                files.find_checkpoint(path)


def test_every_cut_of_a_manifest_is_found(tmp_path):
    path = written(tmp_path)
    good = (path / "manifest.json").read_bytes()
    for length in range(0, len(good) - 2, 7):
        (path / "manifest.json").write_bytes(good[:length])
        with pytest.raises(UserError, match=r"manifest\.json"):
            files.find_checkpoint(path)


def test_a_changed_number_is_found_though_it_is_good_json(tmp_path):
    path = written(tmp_path)
    text = (path / "manifest.json").read_text()
    (path / "manifest.json").write_text(text.replace('"samples": 8', '"samples": 9'))
    with pytest.raises(UserError, match="fails its checksum"):
        files.find_checkpoint(path)


def test_a_manifest_without_its_checksum_is_refused(tmp_path):
    path = written(tmp_path)
    content = json.loads((path / "manifest.json").read_text())
    del content["crc32"]
    (path / "manifest.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match="crc32"):
        files.find_checkpoint(path)


def test_a_checkpoint_in_the_folder_of_another_step_is_none(tmp_path):
    written(tmp_path, 2)
    shutil.copytree(tmp_path / "step-2", tmp_path / "step-4")
    assert [saved.path.name for saved in files.list_checkpoints(tmp_path)] == ["step-2"]
    problems = [str(found.error) for found in files.list_folder(tmp_path) if found.saved is None]
    assert problems == [f"{tmp_path}/step-4/manifest.json is of step 2"]


def test_what_is_half_removed_is_no_checkpoint(tmp_path, monkeypatch):
    for step in (1, 2, 3):
        written(tmp_path, step)
    rmtree = shutil.rmtree

    def torn(path, **options):
        if path.name == "step-1.removed" and path.exists():
            (path / files.shard_name(0, 1)).unlink()
            raise KeyboardInterrupt
        rmtree(path, **options)

    monkeypatch.setattr(shutil, "rmtree", torn)
    with pytest.raises(KeyboardInterrupt):
        files.prune(tmp_path, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-1.removed", "step-2", "step-3"]
    assert [found.step for found in files.list_folder(tmp_path)] == [2, 3]
    assert all(found.saved is not None for found in files.list_folder(tmp_path))
    monkeypatch.undo()
    files.prune(tmp_path, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-2", "step-3"]
