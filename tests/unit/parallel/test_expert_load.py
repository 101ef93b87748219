"""What a run reports of its experts' loads, and how the biases of routers follow from them."""

import pytest
import torch

from shardline.adapters.freeze import freeze_except
from shardline.adapters.lora import NOTHING
from shardline.config.architecture import Architecture, MixtureOfExperts
from shardline.models.decoder import Decoder
from shardline.parallel.expert.balance import ExpertLoad
from shardline.precision.mixed import Precision, apply_precision
from shardline.telemetry.summary import expert_summary

MOE = MixtureOfExperts(
    n_experts=4, top_k=2, expert_dim=16, first_dense=1, balance_coeff=0.25, aux_loss_coeff=0.01, z_loss_coeff=0.01
)
SIZES = {"dim": 16, "n_layers": 3, "n_heads": 2, "n_kv_heads": 2, "head_dim": 8, "ffn_dim": 16, "vocab_size": 16}


@pytest.fixture
def load():
    """Of a step whose tallies are known: tokens of each expert, then the losses, of two layers."""
    model = Decoder(Architecture(**SIZES, rope_theta=10000.0, norm_eps=1e-5, moe=MOE))
    for block in model.blocks():
        if block.moe is not None:
            block.moe.router.balance.data.zero_()
    return ExpertLoad(model, torch.device("cpu"))


def tallied(load):
    return load.summary(torch.tensor([40.0, 40.0, 0.0, 0.0, 0.5, 3.0, 10.0, 30.0, 20.0, 20.0, 1.5, 5.0])).tolist()


def test_loads_are_the_largest_over_the_mean_of_each_layer(load):
    assert load.row(tallied(load)) == {
        "expert_load": 2.0,
        "expert_load_layers": {"1": 2.0, "2": 1.5},
        "aux_loss": 1.0,
        "z_loss": 4.0,
    }


def test_biases_move_towards_equal_loads(load):
    tallied(load)
    load.balance()
    assert load.biases[1].tolist() == [-0.25, -0.25, 0.25, 0.25]
    assert load.biases[2].tolist() == [0.25, -0.25, 0.0, 0.0]


def test_the_mean_of_biases_stays(load):
    load.summary(torch.tensor([10.0, 10.0, 10.0, 50.0, 0.0, 0.0, 20.0, 20.0, 20.0, 20.0, 0.0, 0.0]))
    load.balance()
    assert load.biases[1].tolist() == [0.125, 0.125, 0.125, -0.375]
    assert load.biases[2].tolist() == [0.0] * 4


def test_losses_of_workers_are_means_over_them_and_frozen_routers_keep_their_biases():
    model = Decoder(Architecture(**SIZES, rope_theta=10000.0, norm_eps=1e-5, moe=MOE))
    two = ExpertLoad(model, torch.device("cpu"), batches=2)
    row = two.row(tallied(two))
    assert (row["expert_load"], row["aux_loss"], row["z_loss"]) == (2.0, 0.5, 2.0)
    model.adaptation = NOTHING
    assert ExpertLoad(model, torch.device("cpu")).biases == {}


def test_the_closing_table_has_the_last_and_the_worst_step():
    said = "1.50 times the mean at most (layer 2), 3.00 in the worst step"
    assert expert_summary([1.25, 3.0, 1.5], {"1": 1.25, "2": 1.5}) == said


def test_routers_outside_of_what_is_trained_keep_their_biases():
    model = Decoder(Architecture(**SIZES, rope_theta=10000.0, norm_eps=1e-5, moe=MOE))
    freeze_except(model, [r"layers\.2\."])
    assert list(ExpertLoad(model, torch.device("cpu")).biases) == [2]


def test_biases_keep_their_type_whatever_weights_are_stored_in():
    model = Decoder(Architecture(**SIZES, rope_theta=10000.0, norm_eps=1e-5, moe=MOE))
    apply_precision(model, Precision(torch.bfloat16, torch.bfloat16, torch.float32, ()))
    types = {name.endswith("router.balance"): parameter.dtype for name, parameter in model.named_parameters()}
    assert types == {True: torch.float32, False: torch.bfloat16}
