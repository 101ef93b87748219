"""Checkpoints between layouts: what one layout saved another loads and saves, bit by bit, reading what it needs."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path

import pytest
import torch

from shardline.checkpoint import format as files
from shardline.cli.main import main as command
from shardline.config.load import load_config
from shardline.optim.int8_moments import code_step, decode, spread, stored_block
from shardline.storage import blocks
from shardline.storage import crash_points as save_points
from tests.parity import cases
from tests.parity.cases import case, layers
from tests.parity.harness import _chosen_device, _own_logging
from tests.reads import counted_reads

SAVED = {
    "checkpoint.enable": True,
    "checkpoint.interval": 2,
    "checkpoint.last_save_model_only": False,
    "training.steps": 4,
    "training.seq_len": 16,
    "lr_scheduler.total_steps": 4,
}
LAYOUTS = {
    "one": ((), {}),
    "ddp2": ((), {"ddp": 2}),
    "fsdp2": ((), {"fsdp": 2}),
    "fsdp4": ((), {"fsdp": 4}),
    "tp2": ((), {"tp": 2}),
    "tp4": ((), {"tp": 4}),
    "hsdp2x2": ((), {"ddp": 2, "fsdp": 2}),
    "fsdp2-tp2": ((), {"fsdp": 2, "tp": 2}),
    "pp2": ((), {"pp": 2}),
    "pp2-tp2": ((), {"pp": 2, "tp": 2}),
    "pp2-fsdp2-interleaved": ((cases.INTERLEAVED,), {"pp": 2, "fsdp": 2}),
    "cp2": ((cases.RING,), {"cp": 2}),
    "offload": ((cases.OFFLOAD,), {}),
    "fsdp2-offload": ((cases.OFFLOAD,), {"fsdp": 2}),
    "fsdp2-early": ((cases.EARLY,), {"fsdp": 2}),
}
EXPERT_LAYOUTS = {
    "fsdp2-ep2": ((cases.ep(2),), {"fsdp": 2}),
    "fsdp4-ep2": ((cases.ep(2),), {"fsdp": 4}),
    "fsdp4-ep4": ((cases.ep(4),), {"fsdp": 4}),
    "tp2-ep2": ((cases.ep(2),), {"tp": 2}),
    "fsdp2-tp2-ep2-etp2": ((cases.ep(2, 2),), {"fsdp": 2, "tp": 2}),
    "pp2-fsdp2-ep2": ((cases.ep(2),), {"pp": 2, "fsdp": 2}),
}
# Every neighbour in a row is a change of layout; the model and the optimizer are the same all along.
CHAINS = {
    "plain": ((layers(4), cases.UNCLIPPED), [*LAYOUTS, "one"]),
    # fewer KV heads than ranks: q and kv are separate there, fused elsewhere; rows do not divide evenly
    "few-heads": (
        (cases.TWO_KV_HEADS, cases.ODD_VOCABULARY, cases.BIASES, cases.QK_NORM, cases.UNCLIPPED),
        ["tp4", "fsdp4", "fsdp2-tp2", "tp4", "one"],
    ),
    "norms-over-heads": (
        (cases.TWO_KV_HEADS, cases.model(qk_norm=True, qk_norm_over="width", norm_places="both")),
        ["tp4", "tp2", "one"],
    ),
    "no-gate": (
        (cases.BIASES, cases.model(n_layers=4, norm_kind="layer", norm_bias=True, gated=False, activation="gelu_tanh")),
        ["tp2", "pp2", "one"],
    ),
    "tied": ((layers(4), cases.TIED), ["pp2", "tp2", "pp2-tp2", "one", "pp2-fsdp2-interleaved"]),
    "narrow": ((layers(4), cases.NARROW_STATE), ["fsdp2-tp2", "one", "pp2", "fsdp2-offload"]),
    "experts": ((cases.EXPERTS,), ["one", "fsdp2-ep2", "fsdp4-ep4", "tp2", *EXPERT_LAYOUTS, "one"]),
    "lora": (
        (layers(4), cases.lora("all-linear", "embed_tokens", modules_to_save=["lm_head"], use_rslora=True)),
        ["one", "fsdp2-tp2", "pp2", "ddp2", "tp4", "pp2-fsdp2-interleaved", "one"],
    ),
    "lora-patterns": (
        (layers(4), cases.BIASES, cases.PATTERNS | cases.BIASED),
        ["fsdp2-tp2", "pp2", "tp4", "one"],
    ),
    "lora-experts": ((cases.EXPERTS, cases.lora("experts", "wk")), ["one", "fsdp2-ep2", "tp2", "fsdp4-ep4", "one"]),
    "lamb": ((layers(4), cases.LAMB), ["fsdp2-tp2", "pp2", "ddp2", "offload"]),
    "muon": ((layers(4), cases.MUON), ["fsdp2-tp2", "pp2", "ddp2", "offload"]),
    "adafactor": (
        (layers(4), cases.TWO_KV_HEADS, cases.BIASES, cases.SCALED_ADAFACTOR),
        ["fsdp2-tp2", "pp2", "tp4", "ddp2", "offload"],
    ),
    "adafactor-experts": ((cases.EXPERTS, cases.ADAFACTOR), ["one", "fsdp4-ep2", "fsdp2-tp2-ep2-etp2", "one"]),
    "int8": ((layers(4), cases.INT8_STATE, cases.WHOLE_BLOCKS), ["fsdp2-tp2", "one", "pp2", "fsdp2-offload"]),
    "transformers-lora": (
        (cases.FOREIGN, cases.lora("all-linear", "embed_tokens", modules_to_save=["norm"])),
        ["fsdp2", "one", "ddp2", "hsdp2x2", "offload", "one"],
    ),
    "transformers": ((cases.FOREIGN, cases.TIED), ["fsdp2", "one", "ddp2", "hsdp2x2", "fsdp4", "offload", "one"]),
}


def train_to(settings, block_bytes=blocks.BLOCK_BYTES):
    from shardline.training.trainer import Trainer

    with _chosen_device(), _own_logging(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "BLOCK_BYTES", block_bytes)
        Trainer(load_config(overrides=settings)).train()


def load_and_save(settings, target):
    """Resume, and save the same step elsewhere; how many bytes this rank read."""
    from shardline.training.trainer import Trainer

    with _chosen_device(), _own_logging(), counted_reads() as sizes:
        trainer = Trainer(load_config(overrides=settings))
        trainer.saver.folder = Path(target)
        trainer.saver.save(trainer.progress, wait=True)
        trainer.close()
    return sum(sizes)


class Runs:
    def __init__(self, harness, folder):
        self.harness, self.folder = harness, folder

    def settings(self, layout, folder, *changes):
        own, degrees = (LAYOUTS | EXPERT_LAYOUTS)[layout]
        entry = case("x", SAVED, *changes, *own, **degrees)
        return entry.ranks, self.harness.settings(entry.overrides, entry.ranks) | {"job.dump_folder": str(folder)}

    def train(self, name, layout, *changes, block_bytes=blocks.BLOCK_BYTES):
        """Train under a layout; the folder of its checkpoints."""
        ranks, settings = self.settings(layout, self.folder / name, *changes)
        self.harness.pool.run(ranks, train_to, settings, block_bytes)
        return self.folder / name / "checkpoint"

    def through(self, source, name, layout, *changes):
        """Load `source` under a layout and save it again; the new folder, and the bytes each rank read."""
        shutil.copytree(source, self.folder / name / "checkpoint")
        target = self.folder / f"{name}-out" / "checkpoint"
        ranks, settings = self.settings(layout, self.folder / name, *changes)
        return target, self.harness.pool.run(ranks, load_and_save, settings, str(target))


def tensors(folder, step=2):
    return dict(files.find_checkpoint(folder, step).tensors(""))


def assert_same(a, b, words):
    assert a.keys() == b.keys(), words
    differing = [name for name in a if a[name].dtype != b[name].dtype or not torch.equal(a[name], b[name])]
    assert not differing, f"{words}: {len(differing)} differ, such as {differing[:3]}"


QUICK_CHAINS = ("plain", "experts", "lora", "tied", "int8")


@pytest.mark.parametrize(
    "name", [name if name in QUICK_CHAINS else pytest.param(name, marks=pytest.mark.slow) for name in CHAINS]
)
def test_from_layout_to_layout_bit_by_bit(harness, tmp_path, name):
    """Each layout loads what the one before saved; the last one has what the first one trained."""
    changes, chain = CHAINS[name]
    runs = Runs(harness, tmp_path)
    folder = runs.train("first", chain[0], *changes, {"training.steps": 2})
    trained = tensors(folder)
    assert any(name.startswith("optimizer/") for name in trained)
    assert all(bool(tensor.any()) for name, tensor in trained.items() if name.startswith("optimizer/exp_avg/"))
    for number, (before, layout) in enumerate(itertools.pairwise(chain)):
        folder, _ = runs.through(folder, f"{number}-{layout}", layout, *changes)
        files.find_checkpoint(folder, 2).verify()
        assert_same(trained, tensors(folder), f"{before} to {layout}")


def test_a_rank_reads_the_share_that_it_holds(harness, tmp_path):
    """With blocks that are small beside the tensors, as 4 MiB are beside those of a large model."""
    wide = cases.model(dim=128, ffn_dim=512, vocab_size=2048)
    runs = Runs(harness, tmp_path)
    folder = runs.train("first", "one", wide, {"training.steps": 2}, block_bytes=2048)
    total = sum(path.stat().st_size for path in folder.glob("step-2/shard-*"))
    for layout, share in (("fsdp4", 1 / 4), ("fsdp2-tp2", 1 / 4), ("fsdp2", 1 / 2), ("ddp2", 1)):
        _, read = runs.through(folder, layout, layout, wide)
        assert all(share * total * 0.9 < count < share * total * 1.2 for count in read), (layout, read, total)


def test_ranks_share_the_writing(harness, tmp_path):
    wide = cases.model(dim=128, ffn_dim=512, n_layers=4)
    for layout, ranks in (("ddp2", 2), ("hsdp2x2", 4), ("fsdp4", 4)):
        step = Runs(harness, tmp_path / layout).train("run", layout, wide, {"training.steps": 2}) / "step-2"
        sizes = [(step / files.shard_name(rank, ranks)).stat().st_size for rank in range(ranks)]
        assert max(sizes) < 1.1 * sum(sizes) / ranks, (layout, sizes)


# ---- going on --------------------------------------------------------------------------------------------------------


def losses(folder):
    return [json.loads(line)["loss"] for line in (folder.parent / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("layout", "mode"),
    [
        pytest.param(layout, mode, marks=[] if at % 3 == mode_at else [pytest.mark.slow])
        for at, layout in enumerate(["one", "fsdp2-tp2", "pp2", "fsdp2-early"])
        for mode_at, mode in enumerate(["disabled", "async", "async_with_pinned_mem"])
    ],
)
def test_a_resumed_run_is_bitwise_the_uninterrupted_one(harness, tmp_path, layout, mode):
    changes = (layers(4), cases.UNCLIPPED, {"checkpoint.async_mode": mode})
    runs = Runs(harness, tmp_path)
    whole = runs.train("whole", layout, *changes)
    runs.train("resumed", layout, *changes, {"training.steps": 3, "checkpoint.interval": 2})
    shutil.rmtree(tmp_path / "resumed" / "checkpoint" / "step-3")  # so that it goes on from what was saved behind
    resumed = runs.train("resumed", layout, *changes)
    assert losses(resumed) == losses(whole)
    assert_same(tensors(whole, 4), tensors(resumed, 4), layout)


@pytest.mark.parametrize("layout", ["one", "fsdp2", pytest.param("ddp2", marks=pytest.mark.slow)])
def test_a_model_of_transformers_resumes_bitwise(harness, tmp_path, layout):
    runs = Runs(harness, tmp_path)
    whole = runs.train("whole", layout, cases.FOREIGN)
    runs.train("resumed", layout, cases.FOREIGN, {"training.steps": 2})
    resumed = runs.train("resumed", layout, cases.FOREIGN)
    assert losses(resumed) == losses(whole)
    assert_same(tensors(whole, 4), tensors(resumed, 4), layout)


@pytest.mark.parametrize(
    "change",
    [
        cases.MUON,
        pytest.param(cases.SCALED_ADAFACTOR | cases.ONE_CYCLE_LR, marks=pytest.mark.slow),
        pytest.param(cases.INT8_STATE | cases.ONE_CYCLE, marks=pytest.mark.slow),
    ],
    ids=["muon", "adafactor", "int8-one-cycle"],
)
def test_other_optimizer_state_resumes_bitwise(harness, tmp_path, change):
    runs = Runs(harness, tmp_path)
    whole = runs.train("whole", "fsdp2-tp2", change)
    runs.train("resumed", "fsdp2-tp2", change, {"training.steps": 2})
    resumed = runs.train("resumed", "fsdp2-tp2", change)
    assert losses(resumed) == losses(whole)
    assert_same(tensors(whole, 4), tensors(resumed, 4), change)


def decoded(folder):
    """Moments in 8 bits as the values that they stand for, and the bound of what coding them again may change."""
    saved, found = tensors(folder), {}
    for name in (name for name in saved if name.startswith(("optimizer/exp_avg/", "optimizer/exp_avg_sq/"))):
        scales = saved.get(name.replace("/exp_avg/", "/exp_avg_scale/").replace("/exp_avg_sq/", "/exp_avg_sq_scale/"))
        if scales is not None:
            columns = saved[name].shape[-1]
            found[name] = decode(saved[name], spread(scales, stored_block(columns, scales.shape[-1]), columns))
    return found


def test_other_blocks_change_8_bit_moments_by_one_code_at_most(harness, tmp_path):
    """Two ranks of tp cut rows of 64 and 128 elements in halves: the blocks of one rank are twice as long."""
    runs = Runs(harness, tmp_path)
    first = runs.train("first", "tp2", cases.INT8_STATE, {"training.steps": 2})
    second, _ = runs.through(first, "second", "one", cases.INT8_STATE)
    before, after = decoded(first), decoded(second)
    assert before.keys() == after.keys()
    assert len(before) == 2 * 16  # two layers of seven matrices, embedding and head
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert {name.split(".", 2)[2] for name in changed} == {"attention.wo.weight", "feed_forward.w2.weight"}
    for name in changed:
        step = 2 ** code_step(torch.int8 if "/exp_avg/" in name else torch.uint8)
        largest = before[name].abs().amax(-1, keepdim=True)
        close = (after[name] - before[name]).abs() <= (step**0.5 - 1) * 1.01 * before[name].abs()
        assert (close | (before[name].abs() < largest * 2.0**-15)).all(), name


def test_experts_go_on_where_others_left_off(harness, tmp_path):
    """On 4 ranks: all experts on every rank, then a half, then a quarter; the biases that balance them go along."""
    runs, length = Runs(harness, tmp_path), {"training.steps": 6, "lr_scheduler.total_steps": 6}
    whole = runs.train("whole", "fsdp4", cases.EXPERTS, length)
    for layout, steps in (("fsdp4", 2), ("fsdp4-ep2", 4), ("fsdp4-ep4", 6)):
        resumed = runs.train("resumed", layout, cases.EXPERTS, length | {"training.steps": steps})
    assert losses(resumed) == pytest.approx(losses(whole), rel=1e-6)
    saved = tensors(resumed, 6)
    for name, tensor in tensors(whole, 6).items():
        assert torch.allclose(saved[name], tensor, rtol=1e-3, atol=1e-5), name


def test_pairs_keep_their_reference_on_other_ranks(harness, tmp_path):
    """The copy of the first weights is in no checkpoint: every layout makes it again."""
    runs, length = Runs(harness, tmp_path), {"training.seq_len": 32}
    whole = runs.train("whole", "one", cases.DPO, length)
    for layout, steps in (("fsdp2", 2), ("tp2", 4)):
        resumed = runs.train("resumed", layout, cases.DPO, length | {"training.steps": steps})
    assert losses(resumed) == pytest.approx(losses(whole), rel=1e-5)
    assert losses(whole)[0] > losses(whole)[-1] + 0.1


THIN = {"parallelism.gradient_compression": "powersgd", "parallelism.powersgd_rank": 2}
EIGHT_BITS = {"parallelism.gradient_compression": "int8"}
LARGEST = {"parallelism.gradient_compression": "topk", "parallelism.topk_fraction": 0.2}
THIN_LAYOUTS = {
    "ddp2": {"ddp": 2},
    "ddp2-tp2": {"ddp": 2, "tp": 2},
    "pp2-ddp2": {"pp": 2, "ddp": 2},
    "hsdp4": {"ddp": 2, "fsdp": 2},
    "hsdp4-tp2": {"ddp": 2, "fsdp": 2, "tp": 2},
    "pp2-hsdp4": {"pp": 2, "ddp": 2, "fsdp": 2},
    "hsdp4-ep2": {"ddp": 2, "fsdp": 2},
}


@pytest.mark.parametrize(
    ("kind", "layout", "model", "mode"),
    [
        (THIN, "ddp2", {}, "async"),
        # its gradients are added up over tp: errors differ there
        pytest.param(THIN, "ddp2-tp2", cases.ONE_KV_HEAD, "disabled", marks=pytest.mark.slow),
        pytest.param(THIN, "pp2-ddp2", cases.TIED, "disabled", marks=pytest.mark.slow),
        pytest.param(EIGHT_BITS, "ddp2-tp2", cases.ONE_KV_HEAD, "async", marks=pytest.mark.slow),
        (EIGHT_BITS, "hsdp4", {}, "disabled"),
        pytest.param(LARGEST, "hsdp4", {}, "async", marks=pytest.mark.slow),
        pytest.param(EIGHT_BITS, "pp2-hsdp4", cases.TIED, "disabled", marks=pytest.mark.slow),
        pytest.param(LARGEST, "hsdp4-tp2", cases.ONE_KV_HEAD, "disabled", marks=pytest.mark.slow),
        pytest.param(LARGEST, "pp2-ddp2", cases.TIED, "disabled", marks=pytest.mark.slow),
        pytest.param(EIGHT_BITS, "hsdp4-ep2", cases.EXPERTS | cases.ep(2), "disabled", marks=pytest.mark.slow),
    ],
)
def test_what_replicas_left_out_of_their_gradients_is_not_forgotten(
    harness, tmp_path, monkeypatch, capsys, kind, layout, model, mode
):
    """Errors belong to the run: without them the resumed losses are others."""
    monkeypatch.setitem(LAYOUTS, layout, ((kind, model), THIN_LAYOUTS[layout]))
    changes = (layers(4), cases.UNCLIPPED, {"checkpoint.async_mode": mode})
    runs = Runs(harness, tmp_path)
    whole = runs.train("whole", layout, *changes)
    runs.train("resumed", layout, *changes, {"training.steps": 3, "checkpoint.interval": 2})
    shutil.rmtree(tmp_path / "resumed" / "checkpoint" / "step-3")
    resumed = runs.train("resumed", layout, *changes)
    assert losses(resumed) == losses(whole)
    assert_same(tensors(whole, 4), tensors(resumed, 4), layout)
    held = [name for name in tensors(whole, 4) if name.startswith("compression/error/")]
    assert "compression/error/output.weight" in held  # of a tied one where its rank is not the first
    assert len(held) > 8
    assert command(["checkpoint", "show", str(whole / "step-4")]) == 0
    weights = [name for name in tensors(whole, 4) if name.startswith("model/")]
    assert f"{len(weights)} of them weights" in capsys.readouterr().out


@pytest.mark.slow
def test_what_was_left_out_is_shared_out_among_other_replicas(harness, tmp_path, monkeypatch):
    four, tied = {"ddp": 4}, {"pp": 2, "ddp": 2}
    for name, degrees in {
        "ddp2": {"ddp": 2},
        "ddp4": four,
        "pp2-ddp2": tied,
        "ddp2-tp2": THIN_LAYOUTS["ddp2-tp2"],
    }.items():
        monkeypatch.setitem(LAYOUTS, name, ((THIN, cases.TIED), degrees))
    runs, changes = Runs(harness, tmp_path), (layers(4), cases.UNCLIPPED)

    def left_out(folder, replicas):
        found = tensors(folder)
        sums = {
            name: error.view(replicas, -1, error.shape[1]).sum(0)
            for name, error in found.items()
            if name.startswith("compression/error/")
        }
        if "compression/error/output.weight" in sums:
            sums["compression/error/tok_embeddings.weight"] += sums.pop("compression/error/output.weight")
        return sums

    folder = runs.train("run", "pp2-ddp2", *changes)
    shutil.rmtree(folder / "step-4")
    wanted = left_out(folder, 2)
    assert all(error.abs().max() > 0 for error in wanted.values())
    for layout in ("ddp2", "ddp4", "ddp2-tp2", "pp2-ddp2"):
        folder, _ = runs.through(folder, layout, layout, *changes)
        found = left_out(folder, 4 if layout == "ddp4" else 2)
        assert "errors are not loaded" not in (tmp_path / layout / "log" / "rank-0.log").read_text()
        assert found.keys() == wanted.keys()
        for name, error in wanted.items():
            torch.testing.assert_close(found[name], error, rtol=1e-5, atol=1e-7, msg=f"{layout}: {name}")
    monkeypatch.setitem(LAYOUTS, "wider", ((THIN | {"parallelism.powersgd_rank": 40}, cases.TIED), {"ddp": 2}))
    folder, _ = runs.through(folder, "wider", "wider", *changes)
    gone = len(wanted) - len(left_out(folder, 2))  # thin matrices of that width are no smaller than some parameters
    said = (tmp_path / "wider" / "log" / "rank-0.log").read_text()
    assert gone > 0
    assert f"compression errors are not loaded for {gone} parameters" in said


@pytest.mark.slow
def test_what_shards_left_out_is_shared_out_among_other_replicas(harness, tmp_path, monkeypatch):
    """Errors of every parameter, vectors too, cut by FSDP on the one side and whole on the other."""
    degrees = {
        "hsdp4": {"ddp": 2, "fsdp": 2},
        "ddp2": {"ddp": 2},
        "ddp4": {"ddp": 4},
        "fsdp2-hsdp": {"ddp": 2, "fsdp": 4},
    }
    for name, these in degrees.items():
        monkeypatch.setitem(LAYOUTS, name, ((EIGHT_BITS,), these))
    runs, changes = Runs(harness, tmp_path), (layers(4), cases.UNCLIPPED)

    def left_out(folder, replicas):
        errors = {name: error for name, error in tensors(folder).items() if name.startswith("compression/error/")}
        return {name: error.view(replicas, -1).sum(0) for name, error in errors.items()}

    folder = runs.train("run", "hsdp4", *changes)
    shutil.rmtree(folder / "step-4")
    wanted = left_out(folder, 2)
    assert "compression/error/norm.weight" in wanted
    assert all(error.abs().max() > 0 for error in wanted.values())
    for layout in ("ddp2", "fsdp2-hsdp", "ddp4", "hsdp4"):
        folder, _ = runs.through(folder, layout, layout, *changes)
        found = left_out(folder, degrees[layout]["ddp"])
        assert found.keys() == wanted.keys()
        for name, error in wanted.items():
            torch.testing.assert_close(found[name], error, rtol=1e-5, atol=1e-7, msg=f"{layout}: {name}")


def random_numbers(settings, step):
    """Draw something different on every rank, save, draw on; resume, draw on: the same."""
    import random

    import numpy as np

    from shardline.training.trainer import Trainer

    def draw():
        return [float(torch.rand(())), random.random(), float(np.random.rand())]

    with _chosen_device(), _own_logging():
        if step == 2:
            trainer = Trainer(load_config(overrides=settings))
            torch.manual_seed(100 + trainer.mesh.rank)
            trainer.progress.step = 2
            trainer.saver.save(trainer.progress, wait=True)
        else:
            trainer = Trainer(load_config(overrides=settings))
        numbers = draw()
        trainer.close()
        return numbers


def test_every_rank_gets_its_own_random_state_back_or_rank_0s(harness, tmp_path):
    runs = Runs(harness, tmp_path)
    ranks, settings = runs.settings("fsdp2", tmp_path / "run")
    drawn = harness.pool.run(ranks, random_numbers, settings, 2)
    assert drawn[0] != drawn[1]
    assert harness.pool.run(ranks, random_numbers, settings, 4) == drawn
    for layout in ("ddp2", "tp2", "one"):
        ranks, settings = runs.settings(layout, tmp_path / "run")
        assert harness.pool.run(ranks, random_numbers, settings, 4) == [drawn[0]] * ranks


# ---- what goes wrong -------------------------------------------------------------------------------------------------


def resume(settings):
    from shardline.errors import UserError
    from shardline.training.trainer import Trainer

    with _chosen_device(), _own_logging():
        try:
            trainer = Trainer(load_config(overrides=settings))
        except UserError as error:
            return str(error)
        trainer.close()
        return trainer.progress.step


def flip(path, place):
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def test_what_one_rank_finds_damaged_all_ranks_leave(harness, tmp_path):
    runs = Runs(harness, tmp_path)
    ranks, settings = runs.settings("fsdp4", tmp_path / "run", {"checkpoint.keep_latest_k": 3})
    folder = runs.train("run", "fsdp4")
    flip(folder / "step-4" / files.shard_name(2, 4), -30)  # only rank 2 reads it
    later = settings | {"training.steps": 8, "lr_scheduler.total_steps": 8}
    asked = harness.pool.run(ranks, resume, later | {"checkpoint.load_step": 4})
    assert len(set(asked)) == 1
    assert "shard-00002-of-00004.safetensors is damaged: bytes" in asked[0]
    assert harness.pool.run(ranks, resume, later) == [2] * 4
    assert (folder / "step-4.damaged").is_dir()
    said = (tmp_path / "run" / "log" / "rank-0.log").read_text()
    assert "skipping a damaged checkpoint" in said
    assert "shard-00002-of-00004.safetensors" in said
    flip(folder / "step-2" / files.shard_name(0, 4), -30)
    asked = harness.pool.run(ranks, resume, later)
    assert len(set(asked)) == 1
    assert "holds no checkpoint that can be resumed" in asked[0]


def fail_on_rank(settings, rank, point):
    """The disk of one rank is full at the second save."""
    from shardline.errors import UserError
    from shardline.training.trainer import Trainer

    with _chosen_device(), _own_logging(), pytest.MonkeyPatch.context() as patch:
        trainer = Trainer(load_config(overrides=settings))

        def listener(reached, path):
            if reached == point and "step-4" in str(path) and trainer.mesh.rank == rank:
                raise OSError(28, "No space left on device")

        patch.setattr(save_points, "listener", listener)
        try:
            trainer.train()
        except UserError as error:
            return str(error)
        return ""


@pytest.mark.parametrize(
    ("rank", "point"),
    [(1, "tensor-written"), pytest.param(0, "shard-synced", marks=pytest.mark.slow), (0, "manifest-written")],
)
def test_a_writer_that_fails_tells_every_rank(harness, tmp_path, rank, point):
    runs = Runs(harness, tmp_path)
    ranks, settings = runs.settings("fsdp2", tmp_path / "run")
    said = harness.pool.run(ranks, fail_on_rank, settings, rank, point)
    assert len(set(said)) == 1
    assert f"{tmp_path}/run/checkpoint/step-4 was not saved: No space left on device" in said[0]
    assert said[0].endswith("; earlier ones are intact")
    assert (f"(shard-0000{rank}-of-00002.safetensors)" in said[0]) == (point != "manifest-written")
    assert [path.name for path in (tmp_path / "run" / "checkpoint").iterdir()] == ["step-2"]
    files.find_checkpoint(tmp_path / "run").verify()
