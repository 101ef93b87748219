"""Which layers each pipeline stage has: by weight, by count, by name, and what is refused."""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from shardline.config.layout import Layout
from shardline.config.load import load_config
from shardline.config.names import SCHEDULES
from shardline.config.write import to_toml
from shardline.errors import ConfigError
from shardline.models.decoder import Decoder, Stage
from shardline.models.flavors import resolve
from shardline.parallel.apply import _check_trained
from shardline.parallel.pipeline.channels import Channel, Channels, messages_of
from shardline.parallel.pipeline.schedules import build_schedule
from shardline.parallel.pipeline.stages import (
    balanced_layers,
    counted_layers,
    cut_stages,
    module_weights,
    named_stages,
    plan_pipeline,
)
from shardline.parallel.pipeline.timeline import Action

PREFIX = "parallelism.pipeline_parallel_"
MODEL = {"dim": 64, "n_layers": 8, "n_heads": 4, "n_kv_heads": 2, "head_dim": 16, "ffn_dim": 128, "vocab_size": 300}


def architecture(**changes):
    return resolve(load_config(overrides={"model.overrides": MODEL | changes}).model)


def plan(ranks=2, model=None, **keys):
    """A plan of a tiny model; keys are those of `parallelism`, without their prefix, or whole ones with `__`."""
    overrides = {"training.local_batch_size": 4, f"{PREFIX}degree": ranks, "model.overrides": MODEL | (model or {})}
    for name, value in keys.items():
        overrides[name.replace("__", ".") if "__" in name else f"{PREFIX}{name}"] = value
    config = load_config(overrides=overrides)
    return plan_pipeline(config, resolve(config.model), Layout(pp=ranks))


def layers_of(stages):
    return [list(stage.layers) for stage in stages]


@given(
    layers=st.integers(1, 24),
    count=st.integers(1, 8),
    vocabulary=st.sampled_from((300, 5000, 128000)),
    length=st.sampled_from((32, 8192)),
    moe=st.sampled_from((None, {"first_dense": 2}, {"every": 2}, {"first_dense": 1, "every": 3})),
)
def test_the_heaviest_stage_is_as_light_as_can_be(layers, count, vocabulary, length, moe):
    experts = None if moe is None else {"n_experts": 16, "top_k": 2, "expert_dim": 64, **moe}
    arch = architecture(n_layers=layers, vocab_size=vocabulary, moe=experts)
    if layers < count - 2:
        with pytest.raises(ConfigError, match=f"{layers} layers, .* cannot make {count} pipeline stages"):
            balanced_layers(arch, length, count)
        return
    weights = module_weights(arch, length)
    cut = balanced_layers(arch, length, count)
    assert [layer for part in cut for layer in part] == list(range(layers))
    assert len(cut) == count
    assert all(len(part) > 0 for part in (cut if layers >= count else cut[1:-1]))

    def heaviest(parts):
        return max(weights.of(part, i == 0, i == count - 1) for i, part in enumerate(parts))

    reached = heaviest(cut)
    if count <= layers <= 12:  # every other cut, one by one
        others = (
            [range(a, b) for a, b in itertools.pairwise((0, *ends, layers))]
            for ends in itertools.combinations(range(1, layers), count - 1)
        )
        assert reached <= min(map(heaviest, others)) + 1e-9
    assert weights.of(range(layers), True, True) == pytest.approx(1.0)


def test_embedding_and_output_count():
    """A vocabulary that weighs as much as several layers takes layers away from both ends, more from the last."""
    sizes = [len(part) for part in balanced_layers(architecture(n_layers=24, vocab_size=1000), 32, 4)]
    assert sizes[-1] < sizes[0] < sizes[1]


@given(layers=st.integers(1, 40), count=st.integers(2, 8), first=st.integers(0, 3), last=st.integers(0, 3))
def test_counted_layers_differ_by_one_at_most(layers, count, first, last):
    each = (layers + first + last) // count
    if max(first, last) > each or each == 0:
        with pytest.raises(ConfigError, match=f"{layers} layers, plus {first} for the embedding and {last}"):
            counted_layers(layers, count, first, last)
        return
    cut = counted_layers(layers, count, first, last)
    assert [layer for part in cut for layer in part] == list(range(layers))
    sizes = [len(part) for part in cut]
    sizes[0] += first
    sizes[-1] += last
    assert max(sizes) - min(sizes) <= 1


def test_the_405b_of_a_512_rank_file():
    """126 layers, embedding and output as one layer each, 16 stages: 7 layers at the ends, 8 between."""
    sizes = [len(part) for part in counted_layers(126, 16, 1, 1)]
    assert sizes == [7, *[8] * 14, 7]


def test_the_embedding_and_the_output_are_stages_of_their_own_where_layers_are_few():
    """TorchTitan cuts 6 layers into 8 stages like this; with 7 layers one of the two ends has a layer."""
    for cut in (balanced_layers(architecture(n_layers=6), 32, 8), counted_layers(6, 8, 1, 1)):
        assert [len(part) for part in cut] == [0, 1, 1, 1, 1, 1, 1, 0]
    large = balanced_layers(architecture(n_layers=7, vocab_size=128000), 32, 8)
    assert [len(part) for part in large] == [1, 1, 1, 1, 1, 1, 1, 0]  # the output is heavier than the embedding
    six = plan(4, {"n_layers": 6}, schedule="Interleaved1F1B")
    assert layers_of(six.stages) == [[], [0], [1], [2], [3], [4], [5], []]
    assert [len(six.held(rank)) for rank in range(4)] == [2, 2, 2, 2]


def read_back(config):
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "resolved.toml"
        file.write_text(to_toml(config))
        return load_config(file)


def test_the_resolved_8b_over_8_stages_is_cut_as_before():
    overrides = {"model.flavor": "8B", f"{PREFIX}degree": 8, "training.local_batch_size": 8}
    config = load_config(overrides=overrides)
    cuts = [cut_stages(one, resolve(one.model), 8) for one in (config, read_back(config))]
    assert cuts[0] == cuts[1]
    assert [list(stage.layers) for stage in cuts[0][:2]] == [[0, 1, 2], [3, 4, 5, 6, 7]]


@settings(deadline=None)
@given(
    keys=st.fixed_dictionaries(
        {f"{PREFIX}degree": st.integers(2, 6), f"{PREFIX}schedule": st.sampled_from(SCHEDULES)},
        optional={
            f"{PREFIX}first_stage_less_layers": st.integers(0, 3),
            f"{PREFIX}last_stage_less_layers": st.integers(0, 3),
            f"{PREFIX}layers_per_stage": st.integers(1, 6),
            "training.seq_len": st.sampled_from((32, 8192)),
        },
    ),
    layers=st.integers(2, 40),
    vocabulary=st.sampled_from((300, 128000)),
)
def test_a_config_that_is_written_and_read_back_has_the_same_stages(keys, layers, vocabulary):
    model = {"model.overrides": MODEL | {"n_layers": layers, "vocab_size": vocabulary}}
    config = load_config(overrides={"training.local_batch_size": 8, **model, **keys})

    def planned(config):
        try:
            return plan_pipeline(config, resolve(config.model), Layout(pp=config.parallelism.pipeline_parallel_degree))
        except ConfigError as error:
            return str(error)

    assert planned(read_back(config)) == planned(config)


def test_how_the_keys_are_read():
    assert layers_of(plan(layers_per_stage=5).stages) == [[0, 1, 2, 3], [4, 5, 6, 7]]  # 8 + 1 + 1 in 2 stages
    assert layers_of(plan(first_stage_less_layers=2, last_stage_less_layers=0).stages) == [
        [0, 1, 2],
        [3, 4, 5, 6, 7],
    ]
    by_weight = plan().stages
    assert plan(first_stage_less_layers=1, last_stage_less_layers=1).stages == by_weight  # the defaults, given
    four = plan(layers_per_stage=3, schedule="Interleaved1F1B").stages
    assert layers_of(four) == [[0, 1], [2, 3, 4], [5, 6], [7]]  # 10 in 4 stages: 3 3 2 2
    assert plan(schedule="Interleaved1F1B").schedule.stages == 4
    assert plan(microbatch_size=2).schedule.microbatches == 2
    assert plan_pipeline(load_config(), architecture(), Layout()) is None


def test_named_stages():
    parts = [["tok_embeddings", "layers.0", "layers.1", "layers.2"], [f"layers.{i}" for i in range(3, 8)]]
    parts[1] += ["norm", "output"]
    stages = plan(parallelism__module_fqns_per_model_part=parts).stages
    assert stages == (Stage((0, 1, 2), True, False), Stage((3, 4, 5, 6, 7), False, True))
    tied = architecture(tie_word_embeddings=True)
    assert named_stages(parts, tied, 2) == list(stages)  # files that name an output mean the embedding
    assert named_stages([parts[0], parts[1][:-1]], tied, 2) == list(stages)
    alone = [["tok_embeddings"], [f"layers.{i}" for i in range(8)] + ["norm", "output"]]
    assert named_stages(alone, architecture(), 2)[0] == Stage((), True, False)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda parts: parts[0].remove("layers.1"), "missing: layers.1"),
        (lambda parts: parts[0].append("layers.9"), "unknown: layers.9"),
        (lambda parts: parts[0].append("layers.7"), "named twice: layers.7"),
        (lambda parts: parts[0].reverse(), "layers.3 is where tok_embeddings belongs"),
        (lambda parts: parts.append([]), "names 3 stages, which 2 ranks cannot share evenly"),
        (lambda parts: parts[1].insert(0, parts[0].pop(0)) or parts[0].clear(), "missing: layers.0"),
    ],
)
def test_wrong_names_are_refused(change, expected):
    parts = [["tok_embeddings", *(f"layers.{i}" for i in range(4))], [f"layers.{i}" for i in range(4, 8)]]
    parts[1] += ["norm", "output"]
    change(parts)
    with pytest.raises(ConfigError, match=expected):
        plan(parallelism__module_fqns_per_model_part=parts)


def test_the_embedding_is_the_first_stages():
    parts = [[], ["tok_embeddings", *(f"layers.{i}" for i in range(8)), "norm", "output"]]
    with pytest.raises(ConfigError, match="stage 1 has tok_embeddings"):
        plan(parallelism__module_fqns_per_model_part=parts)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"microbatch_size": 3}, "microbatch_size = 3 does not divide .*local_batch_size = 4; sizes that do: 1, 2, 4"),
        ({"schedule": "1F2B"}, "pipeline_parallel_schedule: there is no schedule '1F2B'"),
        ({"schedule": "PipelineScheduleMulti"}, "pipeline_parallel_schedule: PipelineScheduleMulti comes from a file"),
        ({"layers_per_stage": 3}, "1F1B runs with exactly 1 stage per rank, got 2 on 2 ranks"),
        ({"layers_per_stage": 4}, r"= 4 makes 3 stages of 8 layers \(and 1 \+ 1 for .* 2 ranks cannot share evenly"),
        ({"ranks": 16}, "8 layers, the embedding and the output cannot make 16 pipeline stages"),
        ({"first_stage_less_layers": 12}, "first_stage_less_layers = 12"),
        (
            {"schedule": "ZBVZeroBubble", "compile__enable": True},
            'compiled blocks cannot do; set parallelism.pipeline_parallel_schedule = "Interleaved1F1B"',
        ),
    ],
)
def test_what_cannot_run_is_refused(keys, expected):
    with pytest.raises(ConfigError, match=expected):
        plan(**keys)


def test_a_file_that_splits_backward_is_refused_with_compiled_blocks(tmp_path):
    file = tmp_path / "mine.csv"
    file.write_text("0F0,0I0,0W0\n1F0,1I0,1W0\n")
    keys = {"schedule_csv": str(file), "microbatch_size": 4}
    assert plan(**keys).schedule.splits
    with pytest.raises(ConfigError, match=r"mine\.csv computes weight gradients apart"):
        plan(**keys, compile__enable=True)


def test_the_parts_of_a_model_are_the_model():
    arch = architecture()
    whole = {name: tuple(p.shape) for name, p in Decoder(arch).named_parameters()}
    config = load_config(overrides={"model.overrides": MODEL})
    stages = cut_stages(config, arch, 4)
    parts = [Decoder(arch, stages=[stages[rank], stages[rank + 2]]) for rank in range(2)]
    found = [(name, tuple(p.shape)) for part in parts for name, p in part.named_parameters()]
    assert dict(found) == whole
    assert len(found) == len(whole)


def test_a_tied_embedding_is_with_the_first_and_the_last_stage():
    arch = architecture(tie_word_embeddings=True)
    first, middle, last = (Decoder(arch, stages=[stage]) for stage in cut_stages(load_config(), arch, 3))
    assert [part.tok_embeddings is None for part in (first, middle, last)] == [False, True, False]
    assert last.output_weight() is last.tok_embeddings.weight


# ---- what stages send each other -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 8), (3, 2)])
def test_messages_go_where_they_are_needed(name, ranks, microbatches):
    schedule = build_schedule(name, ranks, microbatches)
    found = messages_of(schedule.orders, schedule.placement)
    assert len({message.key for message in found}) == len(found)
    crossings = sum(a != b for a, b in itertools.pairwise(schedule.placement))
    assert len(found) == 2 * crossings * microbatches
    for message in found:
        user = schedule.orders[message.target][message.used]
        assert (user.stage, user.microbatch) == (message.key.stage, message.key.microbatch)
        assert user.kind == "F" if message.key.what == "activation" else user.kind in "BI"
        maker = schedule.orders[message.source][message.made]
        assert maker.stage == message.key.stage + (-1 if message.key.what == "activation" else 1)
    of_channel = [m.made for m in found if (m.source, m.target) == (0, 1)]
    assert of_channel == sorted(of_channel)  # in the sender's order


def test_forward_alone_sends_activations_alone():
    orders = [[Action("F", stage, number) for number in range(3)] for stage in range(2)]
    assert {message.key.what for message in messages_of(orders, (0, 1))} == {"activation"}


@pytest.mark.parametrize(
    ("stages", "patterns", "refused"),
    [
        ([Stage((0, 1), True, False)], ["layers.7"], "layers 0 to 1"),
        ([Stage((), True, False)], ["layers.7"], "only the embedding"),
        ([Stage((0, 1), True, False), Stage((6, 7), False, True)], ["layers.7"], "layers 0 to 1"),
        ([Stage((4, 5), False, False)], ["layers.7"], "layers 4 to 5"),
        ([Stage((0, 1), True, False)], ["layers.1"], None),
        ([Stage((6, 7), False, True)], ["layers.7"], None),
    ],
)
def test_a_stage_without_anything_to_train_is_refused(stages, patterns, refused):
    with torch.device("meta"):
        model = Decoder(architecture(), stages=stages)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(any(name.startswith(pattern) for pattern in patterns))
    if refused is None:
        _check_trained(model, stages)
        return
    with pytest.raises(ConfigError, match=rf"\({refused}\) has no weight to train"):
        _check_trained(model, stages)


class Wire:
    """A message that is there at once."""

    def wait(self):
        pass


def test_gradients_in_host_memory_are_swapped_between_gpus():
    """With CPU offload the gradient of a tied embedding is in host memory, and NCCL's receive is on the GPU."""
    sent = []

    def channel():
        made = object.__new__(Channel)
        made.device, made.name, made.on_host = torch.device("cuda", 0), "pp", False
        made._isend, made._irecv = lambda x: sent.append(x) or Wire(), lambda x: Wire()
        return made

    both = object.__new__(Channels)
    both.rank, both.by_pair = 0, {(0, 1): channel(), (1, 0): channel()}
    with FakeTensorMode():
        received = both.swap(torch.ones(4), 1, "tied embedding's gradient")
    assert [x.device.type for x in sent] == ["cuda"]
    assert received.device.type == "cpu"
