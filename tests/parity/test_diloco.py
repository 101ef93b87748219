"""Workers that train apart, against a plain simulation of all of them in this process."""

from __future__ import annotations

import copy
import json
import shutil
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from shardline.comm.fake import fake_group
from shardline.comm.mesh import Mesh
from shardline.config.layout import Layout
from shardline.config.load import load_config
from shardline.models.decoder import Decoder
from shardline.models.flavors import resolve
from shardline.models.fused_weights import unfuse
from shardline.optim.lr_schedule import learning_rate
from shardline.optim.optimizer import build_optimizer
from shardline.parallel.data.average import BLOCK, Code, average_over
from shardline.parallel.data.diloco import Arrived, Rhythm, fragment_of, outer_loop
from shardline.parallel.tensor.tensor import is_whole
from shardline.precision.mixed import choose_precision
from shardline.training.setup import build_model
from tests.parity import cases
from tests.parity.cases import Case, case, layers
from tests.parity.harness import MODEL, Harness, _chosen_device, _own_logging, _whole
from tests.parity.test_checkpoint import SAVED, assert_same, losses, tensors, train_to

MODE = {"parallelism.data_parallel_mode": "diloco"}
TWO = MODE | {"parallelism.data_parallel_replicate_degree": 2}
FT = "fault_tolerance."
OF_LAYOUT = ("parallelism.", FT, "training.local_batch_size")


def outer(**keys):
    return {FT + key: value for key, value in keys.items()}


# ---- the simulation --------------------------------------------------------------------------------------------------


@dataclass
class Simulated:
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    validation_losses: list[float] = field(default_factory=list)
    parameters: dict[str, Tensor] = field(default_factory=dict)


def simulate(harness: Harness, overrides, workers: int = 2) -> Simulated:
    """All workers one after the other: own AdamW each, torch's SGD as the outer optimizer."""
    from shardline.training.trainer import Trainer

    settings = harness.settings({k: v for k, v in overrides.items() if not k.startswith(OF_LAYOUT)}, 1)
    settings["job.dump_folder"] = str(harness.folder / f"simulated-{next(harness._numbers)}")
    with _chosen_device(), _own_logging():
        trainer = Trainer(load_config(overrides=settings))
        batches = [trainer.loader.step()[0] for _ in range(trainer.total_steps)]
        rates = [rate_of(trainer, step) for step in range(trainer.total_steps)]
        arch = trainer.arch
        models = [copy.deepcopy(trainer.model) for _ in range(workers)]
        optimizers = [build_optimizer(trainer.config, model) for model in models]
        trainer.close()
    section = load_config(overrides={k: v for k, v in overrides.items() if k.startswith(FT)}).fault_tolerance
    found = Simulated()
    whole = copy.deepcopy(models[0])
    plain = section.semi_sync_method == "local_sgd"
    steps = {
        name: torch.optim.SGD(
            [parameter],
            lr=1.0 if plain else section.outer_lr,
            momentum=0.0 if plain else section.outer_momentum,
            nesterov=not plain and section.outer_momentum > 0,
        )
        for name, parameter in whole.named_parameters()
    }
    order, under_way = Rhythm(section.sync_steps, section.num_fragments, section.fragment_sync_delay), {}

    def names(number):
        found = [name for name in steps if fragment_of(name, arch.n_layers, section.num_fragments) == number]
        assert found
        return found

    def send(number):
        for name in names(number):
            own = [dict(model.named_parameters())[name].detach() for model in models]
            under_way[name] = whole.get_parameter(name).detach() - torch.stack(own).mean(0)

    def apply(number):
        for name in [name for name in names(number) if name in under_way]:
            parameter = whole.get_parameter(name)
            parameter.grad = under_way.pop(name)
            steps[name].step()
            for model in models:
                own, share = model.get_parameter(name), section.fragment_update_alpha
                own.data = parameter.detach() + share * (own.detach() - parameter.detach())

    for step, (batch, rate) in enumerate(zip(batches, rates, strict=True), start=1):
        total, targets, norms = 0.0, 0, []
        for worker, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            rows = rows_of(worker, workers, len(batch.tokens), overrides)
            loss, count = loss_of(model, batch.tokens[rows], batch.labels[rows])
            optimizer.zero_grad()
            (loss / count).backward()
            norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), settings["training.max_norm"])))
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
            total, targets = total + float(loss), targets + count
        found.losses.append(total / targets)
        found.norms.append(sum(norms) / len(norms))
        sent, applied = order.sent_after(step), order.applied_after(step)
        send(sent) if sent is not None else None
        apply(applied) if applied is not None else None
        if step == len(batches):
            fresh = set(names(applied)) if applied is not None else set()
            for number in range(section.num_fragments):
                late = [name for name in names(number) if name not in fresh and name not in under_way]
                send(number) if late else None
                apply(number)
    for name, parameter in whole.named_parameters():
        found.parameters |= {part: value.detach() for part, value in unfuse(arch, name, parameter.detach()).items()}
    return found


def rows_of(worker: int, workers: int, batch: int, overrides) -> list[int]:
    """The rows of the global batch that a worker's ranks read: micro-batches go through all ranks in their order."""
    inside = overrides.get("parallelism.data_parallel_shard_degree", 1)
    size = overrides.get("training.local_batch_size", batch // workers // inside)
    return [row for row in range(batch) if row // size % (workers * inside) // inside == worker]


def rate_of(trainer, step: int) -> float:
    return learning_rate(trainer.base_lr, step, trainer.config, trainer.total_steps)


def loss_of(model: Decoder, tokens: Tensor, labels: Tensor) -> tuple[Tensor, int]:
    logits = model.logits(model.hidden(tokens)).float()
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
    return loss, int((labels != -100).sum())


def check(result, wanted: Simulated, bound: float = 1e-4) -> None:
    assert result.losses == pytest.approx(wanted.losses, rel=bound)
    assert result.grad_norms == pytest.approx(wanted.norms, rel=bound)
    for name, value in wanted.parameters.items():
        distance = (result.parameters[name] - value).norm() / value.norm()
        assert distance < 10 * bound, (name, float(distance))


DILOCO = MODE | outer(sync_steps=4)
LOCAL_SGD = MODE | outer(sync_steps=3, semi_sync_method="local_sgd")
STREAMING = MODE | outer(sync_steps=4, num_fragments=2, fragment_sync_delay=1, fragment_update_alpha=0.5, outer_lr=0.5)
THREE = {"training.global_batch_size": 12}


def simulated_as(harness: Harness, run: Case) -> None:
    workers = run.overrides["parallelism.data_parallel_replicate_degree"]
    check(harness.run(run.overrides, run.ranks), simulate(harness, run.overrides, workers))


@pytest.mark.parametrize(
    "run",
    [
        case("diloco", DILOCO, ddp=2),
        case("local-sgd", LOCAL_SGD, ddp=2),
        case("streaming", STREAMING, ddp=2),
        case("fsdp", STREAMING, ddp=2, fsdp=2),
        pytest.param(case("three", DILOCO | THREE, ddp=3), marks=pytest.mark.slow),
        pytest.param(case("three-pp", STREAMING | THREE, cases.TIED, layers(4), ddp=3, pp=2), marks=pytest.mark.slow),
        pytest.param(case("tp", STREAMING, ddp=2, tp=2), marks=pytest.mark.slow),
        pytest.param(case("cp", DILOCO, cases.RING, ddp=2, cp=2), marks=pytest.mark.slow),
        pytest.param(case("pp", STREAMING, layers(4), ddp=2, pp=2), marks=pytest.mark.slow),
        pytest.param(case("pp-tied", STREAMING, layers(4), cases.TIED, ddp=2, pp=2), marks=pytest.mark.slow),
        pytest.param(case("fsdp-tp", LOCAL_SGD, ddp=2, fsdp=2, tp=2), marks=pytest.mark.slow),
        pytest.param(case("pp-fsdp", STREAMING, layers(4), ddp=2, fsdp=2, pp=2), marks=pytest.mark.slow),
        pytest.param(case("accumulation", DILOCO, {"training.local_batch_size": 2}, ddp=2), marks=pytest.mark.slow),
        pytest.param(
            case("accumulation-fsdp", DILOCO, {"training.local_batch_size": 1}, ddp=2, fsdp=2), marks=pytest.mark.slow
        ),
    ],
    ids=lambda run: run.name,
)
def test_workers_do_what_a_simulation_of_them_does(harness, run):
    simulated_as(harness, run)


def test_a_worker_has_its_own_mean_and_the_log_that_of_all(harness):
    """Packed documents: workers have different numbers of targets."""
    result = harness.run(TWO | DILOCO | cases.DOCUMENTS, 2)
    alone = harness.reference(cases.DOCUMENTS)
    assert result.losses[0] == pytest.approx(alone.losses[0], rel=1e-5)


def test_meeting_after_every_step_is_ddp(harness):
    """Plain SGD inside (momentum 0), and an outer step of rate 1."""
    plain = {"optimizer.name": "SGD", "optimizer.lr": 0.1, "training.max_norm": 0.0}
    ddp = harness.run(plain | {"parallelism.data_parallel_replicate_degree": 2}, 2)
    keys = TWO | outer(sync_steps=1, outer_lr=1.0, outer_momentum=0.0)
    workers = harness.run(plain | keys, 2)
    assert workers.losses == pytest.approx(ddp.losses, rel=1e-6)
    for name, value in ddp.parameters.items():
        torch.testing.assert_close(workers.parameters[name], value, rtol=1e-5, atol=1e-6)


def test_what_is_sent_is_counted(harness):
    """Between meetings a few numbers; in 8 bits about a quarter of what float32 takes."""
    whole = harness.run(TWO | DILOCO, 2)
    coded = harness.run(TWO | DILOCO | outer(should_quantize=True), 2)
    ddp = harness.run({"parallelism.data_parallel_replicate_degree": 2}, 2)
    sent = [row.get("workers", 0) for row in whole.comm_bytes]
    assert [step for step, size in enumerate(sent, start=1) if size] == [4, 8, 10]
    assert sent[3] == ddp.comm_bytes[0]["dp_replicate"]
    share = coded.comm_bytes[3]["workers"] / sent[3]
    assert 0.25 < share < 0.26
    assert all(row["world"] < 200 for row in whole.comm_bytes)


def test_changes_in_8_bits_train_as_well(harness):
    whole = harness.run(TWO | STREAMING, 2)
    codes = [{}, *(outer(should_quantize=True, quantized_dtype=code) for code in ("int8", "float8"))]
    results = [harness.run(TWO | STREAMING | code, 2) for code in codes]
    for result in results:
        assert result.losses == pytest.approx(whole.losses, rel=1e-3)
    assert len({result.losses[-1] for result in results}) == 3


# ---- in 8 bits -------------------------------------------------------------------------------------------------------


def averaged(code: Code) -> tuple[Tensor, Tensor, list[float]]:
    """A tensor of each worker, and what they average it to."""
    mesh = Mesh(Layout(dp_replicate=3), "cpu", apart=True)
    generator = torch.Generator().manual_seed(mesh.rank)
    own = torch.randn(1000, generator=generator) * torch.logspace(-3, 1, 1000)
    sent = average_over("workers", code)([own[:300].view(30, 10), own[300:]])
    first, rest = sent.wait()
    assert sent.wait()[0] is first
    return own, torch.cat([first.flatten(), rest]), [sent.seconds]


@pytest.mark.parametrize("code", ["int8", "float8"])
def test_an_average_in_8_bits_is_near_and_the_same_everywhere(pool, code):
    results = pool.run(3, averaged, code)
    owns, first = torch.stack([own for own, _, _ in results]), results[0][1]
    assert all(torch.equal(first, other) for _, other, _ in results)
    assert all(seconds[0] > 0 for *_, seconds in results)
    exact = owns.mean(0)
    bound = rounding(owns, code).mean(0) + rounding(first[None], code)[0] * 1.01
    assert bool(((first - exact).abs() <= bound + 1e-7).all())
    assert float((first - exact).abs().max()) > 0


def rounding(x: Tensor, code: Code) -> Tensor:
    """Half a step of each number: of its block's scale, or of the number itself and of the smallest one there is."""
    padded = torch.nn.functional.pad(x, (0, -x.shape[1] % BLOCK))
    largest = padded.view(len(x), -1, BLOCK).abs().amax(-1).repeat_interleave(BLOCK, 1)[:, : x.shape[1]]
    if code == "int8":
        return largest / 127 / 2 * 1.02
    return torch.maximum(x.abs() / 16 * 1.07, largest / 448 * 2**-10)


def test_weights_that_all_tensor_parallel_ranks_hold_are_sent_without_shards():
    """They must stay equal, and in 8 bits a number's rounding depends on its neighbours."""
    keys = {"model.overrides": MODEL, "parallelism.tensor_parallel_degree": 2} | TWO
    config, cpu = load_config(overrides=keys), torch.device("cpu")
    arch = resolve(config.model)
    with fake_group(0, 4):
        mesh = Mesh(Layout(dp_replicate=2, tp=2), "cpu", apart=True)
        model, _ = build_model(arch, cpu, choose_precision(config, cpu, True), mesh, config)
        loop = outer_loop(config, model, arch.n_layers, lambda tensors: Arrived([one * 0 for one in tensors]))
    whole = {name for name, parameter in model.named_parameters() if is_whole(parameter)}
    names = [set(fragment.names) for fragment in loop.fragments]
    assert {len(some & whole) for some in names} == {0, len(whole)} == {0, 2 * arch.n_layers + 1}
    loop.begin()
    loop.after_step(1, last=True)
    assert loop.synchronisations == 1  # of one fragment, in two parts


# ---- checkpoints -----------------------------------------------------------------------------------------------------

IN_FLIGHT = outer(sync_steps=6, num_fragments=2, fragment_sync_delay=1, fragment_update_alpha=0.25)


@pytest.mark.parametrize(
    ("layout", "mode"),
    [
        ({"ddp": 2}, "disabled"),
        pytest.param({"ddp": 2, "fsdp": 2}, "async", marks=pytest.mark.slow),
        pytest.param({"ddp": 2, "tp": 2}, "disabled", marks=pytest.mark.slow),
        pytest.param({"ddp": 2, "pp": 2}, "disabled", marks=pytest.mark.slow),
    ],
)
def test_a_resumed_run_is_bitwise_the_uninterrupted_one(harness, tmp_path, layout, mode):
    """Saved after step 2, when a fragment is under way."""
    runs = Runs(harness, tmp_path, MODE | IN_FLIGHT | {"checkpoint.async_mode": mode}, layout)
    whole = runs.train("whole")
    assert any(name.startswith("outer/average/") for name in tensors(whole, 2))
    runs.train("resumed", {"training.steps": 3})
    shutil.rmtree(tmp_path / "resumed" / "checkpoint" / "step-3")
    resumed = runs.train("resumed")
    assert losses(resumed) == losses(whole)
    assert_same(tensors(whole, 4), tensors(resumed, 4), mode)
    assert_same(tensors(whole, 2), tensors(resumed, 2), mode)
    rows = [json.loads(line) for line in (whole.parent / "metrics.jsonl").read_text().splitlines()]
    fragments_at_the_end = 1 if "pp" in layout else 2  # rank 0 counts those of its own stage
    assert [row["outer_steps"] for row in rows] == [0, 0, 1, 1 + fragments_at_the_end]
    assert 0 < rows[2]["outer_comm_seconds"] < rows[3]["outer_comm_seconds"]
    assert 0 < rows[2]["outer_exposed_seconds"] < rows[3]["outer_exposed_seconds"]
    theirs = [tensors(whole, 2)[f"workers/{worker}/model/norm.weight"] for worker in range(2)]
    assert not torch.equal(*theirs)


def test_other_numbers_of_workers_begin_with_the_global_weights(harness, tmp_path):
    """Also none: a checkpoint of workers is one of a model like any other."""
    runs = Runs(harness, tmp_path, MODE | outer(sync_steps=3), {"ddp": 2})
    saved = tensors(runs.train("saved"), 2)
    for ddp, mode in ((1, "sync"), (4, "diloco"), (2, "sync")):
        shutil.copytree(tmp_path / "saved", tmp_path / f"{ddp}-{mode}")
        shutil.rmtree(tmp_path / f"{ddp}-{mode}" / "checkpoint" / "step-4")
        keys = {"parallelism.data_parallel_mode": mode, "training.steps": 3, "lr_scheduler.total_steps": 4}
        other = Runs(harness, tmp_path, MODE | outer(sync_steps=3) | keys, {"ddp": ddp})
        begun = other.loaded(f"{ddp}-{mode}")
        assert len(begun) == ddp
        for weights in begun:
            for name in weights:
                assert torch.equal(weights[name], saved[f"model/{name}"]), (ddp, mode, name)


class Runs:
    def __init__(self, harness, folder, changes, degrees):
        self.harness, self.folder = harness, folder
        self.case = case("x", SAVED, changes, **degrees)

    def settings(self, name, more):
        overrides = self.case.overrides | more
        return self.harness.settings(overrides, self.case.ranks) | {"job.dump_folder": str(self.folder / name)}

    def train(self, name, more=None):
        self.harness.pool.run(self.case.ranks, train_to, self.settings(name, more or {}))
        return self.folder / name / "checkpoint"

    def loaded(self, name):
        """Each rank's weights when it begins."""
        return self.harness.pool.run(self.case.ranks, weights_at_start, self.settings(name, {}))


def weights_at_start(settings):
    from shardline.training.trainer import Trainer

    with _chosen_device(), _own_logging():
        trainer = Trainer(load_config(overrides=settings))
        found = _whole(trainer, lambda parameter: parameter.detach())[0]
        trainer.close()
    return found


def test_validation_reads_the_global_weights(harness):
    """No meeting before the end: the global weights are the first ones until then."""
    result = harness.run(TWO | outer(sync_steps=20) | cases.VALIDATION | {"validation.freq": 4}, 2)
    before, between, at_8, last = result.validation_losses
    assert before == between == at_8
    assert last < before


# ---- the parts -------------------------------------------------------------------------------------------------------


def test_each_fragment_meets_once_in_a_round():
    rhythm = Rhythm(steps=6, fragments=2, delay=1)
    assert [rhythm.sent_after(step) for step in range(1, 13)] == [None, 0, None, None, 1, None] * 2
    assert [rhythm.applied_after(step) for step in range(1, 13)] == [None, None, 0, None, None, 1] * 2


def test_a_fragment_is_a_run_of_layers():
    names = ["tok_embeddings.weight", *(f"layers.{layer}.ffn.weight" for layer in range(5)), "norm.weight", "output.w"]
    assert [fragment_of(name, 5, 2) for name in names] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [fragment_of(name, 5, 1) for name in names] == [0] * 8
