"""`shardline explain`: what a config would do, as text and as a page, with the numbers of the dry run."""

import itertools
import json
import math
import re
from collections import Counter
from dataclasses import replace

import pytest

from shardline.cli.main import main
from shardline.config.layout import resolve_layout
from shardline.config.load import load_config
from shardline.models.flavors import resolve
from shardline.parallel.pipeline.stages import plan_pipeline
from shardline.plan.of_config import precision_on
from shardline.show.chapters import (
    config_chapter,
    memory_chapter,
    mesh_chapter,
    schedule_chapter,
    sent_chapter,
    shards_chapter,
)
from shardline.show.explain import read_subject
from shardline.show.explain_text import text_table
from shardline.show.token_life import TokenPath, token_life
from shardline.tools.dry_run.dry_run import describe
from tests.e2e.tiny import TINY

DEGREES = {
    "pp": "pipeline_parallel_degree",
    "dp_replicate": "data_parallel_replicate_degree",
    "dp_shard": "data_parallel_shard_degree",
    "cp": "context_parallel_degree",
    "tp": "tensor_parallel_degree",
    "ep": "expert_parallel_degree",
}
EXPERTS = {"n_experts": 4, "top_k": 2, "expert_dim": 32, "shared_dim": 32, "first_dense": 1}
CHAPTERS = ("mesh", "shards", "life", "schedule", "sent", "memory", "config")


def settings(moe=False, **degrees):
    shape = {**TINY["model.overrides"], **({"moe": EXPERTS} if moe else {})}
    known = {f"parallelism.{DEGREES[axis]}": degree for axis, degree in degrees.items()}
    return {**TINY, "model.overrides": shape, **known}


def config_of(moe=False, **degrees):
    return load_config(overrides=settings(moe, **degrees))


def words_of(moe=False, **degrees):
    """The same as flags."""
    found = []
    for key, value in settings(moe, **degrees).items():
        pairs = value.items() if isinstance(value, dict) else [(None, value)]
        for name, inner in pairs:
            below = inner.items() if isinstance(inner, dict) else [(None, inner)]
            found += [f"--{'.'.join(filter(None, (key, name, last)))}={leaf}" for last, leaf in below]
    return found


@pytest.fixture(scope="module")
def everything():
    """Four dimensions and experts at once."""
    return read_subject(config_of(moe=True, pp=2, cp=2, tp=2, ep=4), None)


# ---- text ------------------------------------------------------------------------------------------------------------


def test_a_config_is_explained_on_the_terminal(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "140")
    assert main(["explain", *words_of(moe=True, pp=2, cp=2, tp=2, ep=4)]) == 0
    out = capsys.readouterr().out
    assert "llama3 debugmodel on 8 ranks\n" in out
    for title in ("The mesh", "What each rank holds", "The life of one token", "The schedule", "What is sent when"):
        assert f"\n{title}\n{'-' * len(title)}\n" in out
    plain = re.sub(r"\s+", " ", out)
    assert "rank 0 1 2 3 4 5 6 7 pp 0 0 0 0 1 1 1 1" in plain
    assert "context of 32 tokens in 4 slices of 8: cp 0 has 0 and 3, cp 1 has 1 and 2" in plain
    assert "Each ep rank holds 1 expert, so up to 2 copies of the token, 128 bytes each," in plain
    assert "1F1B: 2 ranks, 1 stage on each, 4 micro-batches." in plain
    assert re.search(r"^rank 0  0F0-* 0F1", out, re.MULTILINE)
    assert "parallelism.tensor_parallel_degree 1 2" in plain


def test_one_rank_sends_nothing(capsys):
    assert main(["explain", *words_of()]) == 0
    out = capsys.readouterr().out
    assert "There is one rank" in out
    assert "Nothing is sent." in out
    assert "over tp" not in out
    assert "Each rank runs forward and backward of one micro-batch, and then the update." in out


def test_a_long_last_column_is_wrapped():
    lines = list(text_table([("a", "whole"), ("b", "text")], [[1000, "word " * 12], [None, ""]], 40))
    assert all(len(line) <= 40 for line in lines)
    assert lines[1].startswith("1,000  word word")
    assert lines[2].startswith("       word")
    assert lines[-1].split() == ["-"]


# ---- numbers ---------------------------------------------------------------------------------------------------------


def test_what_is_sent_is_what_the_dry_run_counts(everything):
    rows = sent_chapter(everything).rows
    found = Counter()
    for _, axis, kind, times, size, _ in rows:
        found[axis, kind, "times"] += times
        found[axis, kind, "bytes"] += size
    for axis, kind, times, size in re.findall(
        r"^  (\w+) +([\w-]+) +([\d,]+) x +([\d,]+) bytes", _dry_run(), re.MULTILINE
    ):
        assert found.pop((axis, kind, "times")) == int(times.replace(",", ""))
        assert found.pop((axis, kind, "bytes")) == int(size.replace(",", ""))
    assert not found
    assert all(why for *_, why in rows)


def _dry_run():
    return describe(config_of(moe=True, pp=2, cp=2, tp=2, ep=4))


def test_phases_tell_when_things_are_sent():
    sent = {(when, axis, what): times for when, axis, what, times, *_ in sent_chapter(_subject(dp_shard=2, tp=2)).rows}
    layers = TINY["model.overrides"]["n_layers"]
    assert sent["forward", "tp", "all-gather"] == 2 * layers + 1  # before wqkv and w13, and before the output
    assert sent["forward", "tp", "reduce-scatter"] == 2 * layers + 1  # after wo and w2, and after the embedding
    assert sent["backward", "tp", "all-gather"] == sent["backward", "tp", "reduce-scatter"] == 2 * layers + 1
    assert ("backward", "dp_shard", "reduce-scatter") in sent
    assert ("end", "world", "all-reduce") in sent
    assert ("forward", "dp_shard", "reduce-scatter") not in sent


def _subject(**degrees):
    return read_subject(config_of(**degrees), None)


@pytest.mark.parametrize(
    "degrees",
    [
        {"dp_shard": 2, "tp": 2},
        {"moe": True, "pp": 2, "cp": 2, "tp": 2, "ep": 4},
        pytest.param({"dp_replicate": 2, "dp_shard": 3}, marks=pytest.mark.slow),
        pytest.param({"moe": True, "dp_shard": 4, "ep": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_pieces_cover_each_parameter_once_and_every_rank_holds_one(degrees):
    subject = _subject(**degrees)
    chapter = shards_chapter(subject)
    assert {row[0]: row[1] for row in chapter.rows}["layers.*.attention.wqkv"] == subject.arch.n_layers
    in_stage = subject.layout.world_size // subject.layout.pp
    for matrix, row in zip(chapter.picture["matrices"], chapter.rows, strict=True):
        covered = sum(math.prod(stop - start for start, stop in piece["region"]) for piece in matrix["pieces"])
        assert covered == matrix["elements"]
        for one, other in itertools.combinations([piece["region"] for piece in matrix["pieces"]], 2):
            assert any(a[1] <= b[0] or b[1] <= a[0] for a, b in zip(one, other, strict=True))
        first = matrix["pieces"][0]["region"]
        assert row[3] == " x ".join(str(stop - start) for start, stop in first)
        assert len(matrix["pieces"]) * row[4] == in_stage


def life_of(config, **degrees):
    """The moments of a token, by their names."""
    layout = resolve_layout(config.parallelism, math.prod(degrees.values()))
    arch, plan = resolve(config.model), plan_pipeline(config, resolve(config.model), layout)
    return dict(token_life(TokenPath(config, arch, layout, precision_on(config, "cuda"), plan)))


def test_the_life_of_a_token_has_the_numbers_of_its_layout():
    degrees = {"dp_replicate": 2, "dp_shard": 2, "tp": 2}
    life = life_of(config_of(**degrees).replace({"training.max_norm": 0.5}), **degrees)
    heads = "its 2 of 4 query heads and 1 key head."
    numbers = {
        "batch": ["micro-batch of 4 x 32 tokens on one of 4 data ranks", "The 2 ranks of its cp and tp groups"],
        "weights": ["gathered from the 2 ranks", "are freed after it"],
        "embedding": ["64 numbers, 128 bytes.", "136 of the 272 rows", "64 of the 128 tokens (reduce-scatter)."],
        "attention": ["In each of 2 layers", "The tokens of the 2 tp ranks are gathered.", heads],
        "feed-forward": ["its 48 of 96 hidden columns"],
        "loss": ["the 272 rows of the output, 136 on each tp rank."],
        "backward": ["gradients are scattered"],
        "gradients": ["summed over 2 ranks", "between 2 replicas (all-reduce)."],
        "update": ["AdamW updates the weights", "clipped to a norm of 0.5 over all ranks."],
    }
    assert list(life) == list(numbers)
    for moment, parts in numbers.items():
        assert [part for part in parts if part not in life[moment]] == [], life[moment]


def test_what_travels_between_stages_is_a_micro_batch():
    degrees = {"pp": 2, "cp": 2, "tp": 1, "dp_shard": 1}
    settings = {"parallelism.pipeline_parallel_microbatch_size": 2, "parallelism.fsdp_reshard_after_forward": "never"}
    life = life_of(config_of(**degrees).replace(settings), **degrees)
    assert "micro-batch of 2 x 32 tokens." in life["batch"]
    assert "one rank in 2 has the token" in life["context"]
    assert "stay until the end of the step" in life["weights"]
    assert "split into 2 stages (0, 1)" in life["next stage"]
    assert "4.00 KiB from each rank." in life["next stage"]  # 2 x 16 tokens of 64 numbers of 2 bytes


def test_memory_is_that_of_each_pipeline_position(everything):
    chapter = memory_chapter(everything)
    for row, built in zip(chapter.rows, everything.stages, strict=True):
        rank, layers, weights, state, gradients, activations, peak = row
        assert (rank, layers) == (built.rank, built.layers)
        assert weights == built.elements * 4
        assert state == 2 * weights
        assert min(gradients, activations) > 0
        assert weights + state < peak
    assert len({row[-1] for row in chapter.rows}) == 1  # the planner's, of the fullest rank


def test_the_schedule_has_every_action_once(everything):
    picture = schedule_chapter(everything, 100).picture
    actions = [tuple(span[:3]) for row in picture["spans"] for span in row]
    assert sorted(actions) == sorted((kind, stage, micro) for kind in "FB" for stage in (0, 1) for micro in range(4))
    assert picture["ranks"] == [0, 4]


def test_the_table_of_the_schedule_has_the_numbers_of_its_drawing(everything):
    chapter = schedule_chapter(everything, 100)
    total, spans = chapter.picture["total"], chapter.picture["spans"]
    busy = [sum(end - start for *_, start, end in row) for row in spans]
    rank, stages, layers, idle, held = zip(*chapter.rows, strict=True)
    assert (rank, stages, layers) == ((0, 4), ("0", "1"), ("0", "1"))
    assert idle == pytest.approx([1 - of_rank / total for of_rank in busy])
    assert held == (2, 1)  # 1F1B: as many as there are stages from here to the end
    assert not any("repeats" in words for words in chapter.words)
    again = replace(everything, config=everything.config.replace({"training.gradient_accumulation_steps": 3}))
    assert "A step repeats this 3 times before the update." in schedule_chapter(again, 100).words


def test_the_mesh_has_all_bytes_of_an_axis(everything):
    sent = Counter()
    for _, axis, _, _, size, _ in sent_chapter(everything).rows:
        sent[axis] += size
    rows = {axis: (ranks, size) for axis, ranks, _, size, _ in mesh_chapter(everything).rows}
    assert rows == {axis: (size, sent[axis]) for axis, size in (("pp", 2), ("cp", 2), ("tp", 2), ("ep", 4))}


def test_what_differs_from_the_defaults_is_shown_and_what_has_no_effect_is_noted(everything):
    chapter = config_chapter(replace(everything, config=everything.config.replace({"lora.rank": 8})))
    rows = {key: (default, value) for key, default, value in chapter.rows}
    assert rows["parallelism.tensor_parallel_degree"] == ("1", "2")
    assert rows["lora.rank"] == ("16", "8")
    assert not {"optimizer.beta1", "validation.freq", "checkpoint.enable"} & set(rows)
    assert any(words.startswith("lora.rank has no effect") for words in chapter.words)


# ---- the page, and what is refused -----------------------------------------------------------------------------------


def test_the_page_holds_all_chapters_and_needs_no_network(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["explain", "--html", *words_of(tp=2)]) == 0
    text = (tmp_path / "explain.html").read_text()
    data = json.loads(re.search(r'id="data">(.*?)</script>', text, re.DOTALL)[1])
    assert tuple(chapter["key"] for chapter in data["chapters"]) == CHAPTERS
    assert not re.search(r'(?:src|href)="(?!#|data:)|@import|url\((?!data:)', text)
    assert len(text.encode()) < 3_000_000


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["none.toml"], "none.toml"),
        (["--out", "x.html"], "--out names the file of --html; pass both"),
        (["--world-size", "3", "--parallelism.tensor_parallel_degree=2"], "does not match 3 ranks"),
        (["--html", "--out", "."], "--out .: is a folder"),
        (["--parallelism.tensor_parallel_degree=3"], "3"),
    ],
)
def test_what_cannot_be_explained_is_one_sentence(tmp_path, monkeypatch, capsys, words, message):
    monkeypatch.chdir(tmp_path)
    assert main(["explain", *words_of(), *words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
