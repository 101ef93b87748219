"""Workers that train apart, against a plain simulation of all of them in this process."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from shardline.config.load import load_config
from shardline.models.decoder import Decoder
from shardline.models.fused_weights import unfuse
from shardline.optim.optimizer import build_optimizer
from shardline.parallel.data.diloco import Rhythm, fragment_of
from tests.parity.harness import Harness, _chosen_device, _own_logging
from tests.unit.parallel.test_data_parallel import ranks

WORKERS = {"parallelism.data_parallel_mode": "diloco", "parallelism.data_parallel_replicate_degree": 2}
FT = "fault_tolerance."
BATCH = 8


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

    settings = harness.settings({k: v for k, v in overrides.items() if not k.startswith(("parallelism.", FT))}, 1)
    settings["job.dump_folder"] = str(harness.folder / "simulated")
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
            share = BATCH // workers
            rows = slice(worker * share, (worker + 1) * share)
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


def rate_of(trainer, step: int) -> float:
    from shardline.optim.lr_schedule import learning_rate

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


CASES = {
    "diloco": outer(sync_steps=4),
    "local_sgd": outer(sync_steps=3, semi_sync_method="local_sgd"),
    "streaming": outer(sync_steps=4, num_fragments=2, fragment_sync_delay=1, fragment_update_alpha=0.5, outer_lr=0.5),
}


@pytest.mark.parametrize("case", CASES)
def test_workers_do_what_a_simulation_of_them_does(tmp_path, case):
    harness, keys = Harness(ranks(), tmp_path), WORKERS | CASES[case]
    check(harness.run(keys, 2), simulate(harness, keys))
