"""What the host does around recorded passes, with a stand-in that repeats the passes where a GPU replays kernels.

The real recordings are compared bit by bit in `tests/e2e/test_gpu.py`.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace

import pytest
import torch

from shardline.config.layout import check_cuda_graphs, resolve_layout
from shardline.config.load import load_config
from shardline.errors import ConfigError, UserError
from shardline.models.flavors import resolve
from shardline.models.products.narrow import keep_narrow, narrow_copy
from shardline.training.trainer import Trainer
from shardline.training.whole_model import WholeModel
from tests.e2e.tiny import run, tiny_config

EAGER = {"compile__enable": True, "compile__backend": "eager"}
GRAPHS = {**EAGER, "compile__cuda_graphs": True}
PASSES = WholeModel.forward_backward


class Tape:
    """Holds a pass that was recorded: what it writes has one place, and is written by `replay` alone."""

    current = None

    def record(self, model, batch, scale):
        self.model, self.batch, self.scale = model, batch, scale
        self.numbers = torch.zeros(1)
        self.first = all(one.grad is None for one in model.trained)
        if self.first:
            for one in model.trained:
                one.grad = torch.full_like(one, torch.nan)
        self.places = [one.grad for one in model.trained]
        return self.numbers

    def replay(self):
        before = [torch.zeros_like(place) if self.first else place.clone() for place in self.places]
        for one in self.model.trained:
            one.grad = None
        self.numbers.copy_(PASSES(self.model, self.batch, self.scale, True))
        for one, place, old in zip(self.model.trained, self.places, before, strict=True):
            place.copy_(old + one.grad)
            one.grad = None  # whoever wants it must say where it is


@pytest.fixture
def tapes(monkeypatch):
    made = []

    @contextlib.contextmanager
    def graph(tape, pool):
        made.append(tape)
        Tape.current = tape
        yield
        Tape.current = None

    def passes(model, batch, scale, last):
        return PASSES(model, batch, scale, last) if Tape.current is None else Tape.current.record(model, batch, scale)

    monkeypatch.setattr(WholeModel, "forward_backward", passes)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Tape)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr("shardline.training.setup.check_cuda_graphs", lambda *arguments: None)
    return made


def numbers(written):
    return [[row[key] for key in ("loss", "grad_norm", "validation_loss") if key in row] for row in written]


@pytest.mark.parametrize(
    ("settings", "recorded"),
    [
        ({}, 1),
        ({"training__gradient_accumulation_steps": 3, "training__local_batch_size": 1}, 2),
        ({"validation__enable": True, "validation__freq": 1, "validation__steps": 1, "validation__seq_len": 16}, 1),
        ({"optimizer__name": "SGD", "training__mixed_precision_param": "bfloat16"}, 1),
    ],
    ids=["plain", "accumulation", "validation", "bfloat16"],
)
def test_every_replay_reads_its_own_batch(tmp_path, tapes, settings, recorded):
    plain = run(tmp_path / "plain", **EAGER, **settings)
    replayed = run(tmp_path / "recorded", **GRAPHS, **settings)
    for a, b in zip(numbers(replayed), numbers(plain), strict=True):
        assert a == pytest.approx(b, rel=1e-6)
    assert len(tapes) == recorded
    assert json.loads((tmp_path / "recorded" / "engaged.json").read_text())["cuda_graphs"] == recorded
    assert "recorded as a CUDA graph" in (tmp_path / "recorded" / "log" / "rank-0.log").read_text()


def test_nothing_is_recorded_unless_asked(tmp_path, tapes):
    run(tmp_path / "run", compile__cuda_graphs=True, training__steps=3)
    assert tapes == []
    assert json.loads((tmp_path / "run" / "engaged.json").read_text())["cuda_graphs"] == 0


def test_batches_of_another_shape_are_refused(tmp_path, tapes):
    trainer = Trainer(tiny_config(tmp_path / "run", **GRAPHS))
    trainer.train()
    passes = trainer.stepper.passes
    shorter = replace(passes.batch, tokens=passes.batch.tokens[:1])
    with pytest.raises(UserError, match=r"a batch of shape \(1, 32\) follows batches of shape \(4, 32\)"):
        passes.forward_backward(shorter, torch.ones(()), True)


def test_replays_read_weights_that_torch_has_changed(tmp_path, tapes):
    trainer = Trainer(tiny_config(tmp_path / "run", **GRAPHS))
    trainer.train()
    passes = trainer.stepper.passes
    weight = passes.trained[0]
    keep_narrow(weight, torch.bfloat16)
    passes._fill(passes.batch, passes.scale)
    assert torch.equal(narrow_copy(weight), weight.detach().bfloat16())


def test_kernels_that_cannot_be_recorded_end_the_run_with_the_key(tmp_path, tapes, monkeypatch):
    def fails(self, model, batch, scale):
        raise RuntimeError("operation not permitted when stream is capturing\nmore of it")

    monkeypatch.setattr(Tape, "record", fails)
    with pytest.raises(UserError, match=r"cannot be recorded \(operation not permitted when stream is capturing\);"):
        run(tmp_path / "run", **GRAPHS)


@pytest.mark.parametrize(
    ("ranks", "changes", "reason"),
    [
        (2, {}, "2 ranks communicate in each pass"),
        (1, {"model__name": "mixtral", "model__flavor": "debugmodel"}, "experts count their tokens in each pass"),
        (1, {"model__overrides": {"attn_mask_type": "block_causal"}}, "block_causal finds the documents of each batch"),
    ],
)
def test_passes_that_need_the_host_are_refused_with_the_reason(ranks, changes, reason):
    config = load_config(overrides={key.replace("__", "."): value for key, value in {**GRAPHS, **changes}.items()})
    with pytest.raises(ConfigError, match=f"compile.cuda_graphs = true: {reason}; set compile.cuda_graphs = false"):
        check_cuda_graphs(config, resolve(config.model), resolve_layout(config.parallelism, ranks))


def test_a_cpu_has_none(tmp_path):
    with pytest.raises(ConfigError, match=r"compile.cuda_graphs = true: the device is a CPU, which has no CUDA graphs"):
        run(tmp_path / "run", **GRAPHS)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
