"""Predicted against measured memory: a real step on the CPU, with every tensor counted while it lives."""

from __future__ import annotations

import weakref
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardline.comm.mesh import Mesh
from shardline.config.layout import Layout
from shardline.config.load import load_config
from shardline.data.batch import Batch
from shardline.models.flavors import resolve
from shardline.optim.optimizer import build_optimizer
from shardline.parallel.apply import make_model
from shardline.plan.memory import peak_memory
from shardline.plan.of_config import kept_by, precision_on, workload_of
from shardline.plan.work import Workload
from shardline.training.step import Stepper
from tests.unit.plan.test_work import LLAMA, MODELS

SIZES = {"dim": 256, "n_layers": 4, "n_heads": 8, "n_kv_heads": 4, "head_dim": 32, "ffn_dim": 768, "vocab_size": 2048}
BASE = ["--model.name=llama3", "--model.flavor=debugmodel", "--training.seq_len=256", "--training.local_batch_size=4"]
BASE += [f"--model.overrides.{key}={value}" for key, value in SIZES.items()]
OP = ("--activation_checkpoint.mode=selective", "--activation_checkpoint.selective_ac_option=op")
EVERY_2ND = ("--activation_checkpoint.mode=selective", "--activation_checkpoint.selective_ac_option=2")


class Alive(TorchDispatchMode):
    """Counts the bytes of tensors while they are alive."""

    def __init__(self):
        super().__init__()
        self.sizes, self.now, self.peak = {}, 0, 0

    def note(self, x):
        storage = x.untyped_storage()
        key = storage._cdata
        if key not in self.sizes:
            self.sizes[key] = storage.nbytes()
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self.free, key)

    def free(self, key):
        self.now -= self.sizes.pop(key, 0)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor):
                self.note(x)
        return out


def measured(config):
    """The peak of the second step, when the optimizer has its state."""
    arch, mesh = resolve(config.model), Mesh(Layout(), "cpu")
    model, applied = make_model(arch, config, mesh, precision_on(config, "cpu"))
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    optimizer = build_optimizer(config, model)
    stepper = Stepper(config, model, optimizer, mesh, applied, torch.device("cpu"))
    training, alive = config.training, Alive()
    count = max(1, training.global_batch_size // training.local_batch_size)
    shape = (training.local_batch_size, training.seq_len)
    rows = [torch.randint(0, arch.vocab_size, shape) for _ in range(count)]
    batches = [Batch(tokens, tokens, None, torch.zeros(shape[0], dtype=torch.int64)) for tokens in rows]
    for parameter in model.parameters():
        alive.note(parameter)
    with alive:
        stepper.step(batches, 1e-3, 1)
        for state in optimizer.state.values():
            for x in state.values():
                if isinstance(x, torch.Tensor):
                    alive.note(x)
        alive.peak = alive.now
        stepper.step(batches, 1e-3, 2)
    return alive.peak


def predicted(config):
    arch = resolve(config.model)
    return peak_memory(workload_of(config, arch, Layout(), "cpu"), kept_by(config, arch, "cpu"), "cpu")


CASES = {
    "none": (),
    "full": ("--activation_checkpoint.mode=full",),
    "few tokens": ("--training.local_batch_size=1", "--training.seq_len=64"),
}
MORE = {
    "op": OP,
    "every 2nd": EVERY_2ND,
    "accumulation": ("--training.global_batch_size=8",),
    "narrow moments": ("--optimizer.state_dtype=bfloat16",),
    "lora": ("--lora.enable", "--lora.rank=8"),
    "experts": ("--model.name=deepseek_v3", "--training.local_batch_size=2"),
}


def compare(flags):
    config = load_config(None, [*BASE, *flags] if "--model.name=deepseek_v3" not in flags else [*BASE[1:4], *flags])
    assert predicted(config).total == pytest.approx(measured(config), rel=0.05)


@pytest.mark.parametrize("flags", CASES.values(), ids=CASES)
def test_memory_is_what_a_real_step_takes(flags):
    compare(flags)


@pytest.mark.slow
@pytest.mark.parametrize("flags", MORE.values(), ids=MORE)
def test_memory_is_what_a_real_step_takes_in_more_cases(flags):
    compare(flags)


# ---- what changes it -------------------------------------------------------------------------------------------------

CONFIG = load_config(None, ["--model.name=llama3", "--model.flavor=8B"])
KEPT = kept_by(CONFIG, LLAMA)


def held(layout=Layout(), batches=1, **fields):  # noqa: B008
    return peak_memory(Workload(LLAMA, layout, 4096, 8, batches, zero=3, **fields), KEPT)


def test_sharding_divides_what_ranks_share():
    alone, shared = held(), held(Layout(dp_shard=8))
    assert shared.weights == pytest.approx(alone.weights / 8)
    assert shared.optimizer == pytest.approx(alone.optimizer / 8)
    assert shared.activations == pytest.approx(alone.activations, rel=0.05)
    assert shared.buffers > alone.buffers  # gathered layers


def test_accumulation_keeps_whole_gradients_unless_they_are_summed_each_time():
    once, twice, summed = (
        held(Layout(dp_shard=8), batches=1),
        held(Layout(dp_shard=8), batches=2),
        held(Layout(dp_shard=8), batches=2, reduce_each=True),
    )
    assert twice.gradients > 6 * once.gradients
    assert summed.gradients < twice.gradients / 4


def test_weights_that_stay_gathered_take_the_place_of_all_layers():
    freed, kept = held(Layout(dp_shard=8), reshard=True), held(Layout(dp_shard=8), reshard=False)
    assert kept.buffers - freed.buffers == pytest.approx(30 * 218_112_000 * 2, rel=0.02)


def test_the_first_stage_of_a_pipeline_holds_the_most_micro_batches():
    shallow, deep = (held(Layout(pp=pp), batches=32) for pp in (2, 8))
    assert deep.activations == pytest.approx(shallow.activations, rel=0.35)  # fewer layers, more micro-batches
    interleaved = held(Layout(pp=8), batches=32, schedule="Interleaved1F1B", stages_per_rank=2)
    assert interleaved.activations > 1.2 * deep.activations


def test_offload_and_recomputation_keep_less():
    plain = held()
    for mode in ("op", "2", "full", "offload"):
        assert held(recompute=mode).activations < plain.activations
    assert held(cpu_offload=True).optimizer == 0


def test_experts_are_shared_by_their_own_ranks():
    arch = MODELS["experts"]
    config = load_config(None, ["--model.name=qwen3", "--model.flavor=30B-A3B"])
    kept = kept_by(config, arch)
    wide = Workload(arch, Layout(dp_shard=8), 4096, 1, 1)
    narrow = replace(wide, layout=Layout(dp_shard=8, ep=8))
    assert peak_memory(wide, kept).weights == pytest.approx(peak_memory(narrow, kept).weights, rel=0.01)
    assert peak_memory(narrow, kept).buffers < 0.5 * peak_memory(wide, kept).buffers
