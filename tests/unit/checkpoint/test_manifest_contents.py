"""Manifests with a right checksum and wrong contents: an error names the file, and no memory is taken for it."""

import json
import random
import resource
import shutil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardline.checkpoint import format as files
from shardline.checkpoint.shards import Place, tile, whole_place
from shardline.cli.main import main
from shardline.errors import UserError
from shardline.storage.location import locate
from shardline.storage.safetensors import read_header
from tests import bad_values
from tests.e2e.tiny import run
from tests.examples import examples
from tests.unit.checkpoint.test_checkpoint_manifest import written

SAVING = {
    "checkpoint__enable": True,
    "checkpoint__interval": 2,
    "checkpoint__last_save_model_only": False,
    "checkpoint__async_mode": "disabled",
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained") / "run"
    run(folder, training__steps=4, **SAVING)
    return folder


def content_of(step):
    content = json.loads((step / "manifest.json").read_text())
    del content["crc32"]
    return content


def write(step, content):
    """Write a manifest with the checksum that its contents have; no checksum fits what is nested too deeply."""
    whole = {**content, "crc32": files.manifest_checksum(content)}
    (step / "manifest.json").write_text(bad_values.text_of(whole))


def read_all(step):
    """All that reads a manifest: listing, showing, and every tensor. None if all is well, else the error."""
    try:
        found = files.look_at(locate(step), any_step=True)
        if found.saved is None:
            return str(found.error)
        for problem in found.check():
            return str(problem)
        assert main(["checkpoint", "show", str(step), "--tensors"]) == 0
        assert main(["checkpoint", "ls", str(step)]) == 0
        for name in found.saved.shards:
            found.saved.shards.read(name)
    except UserError as error:
        return str(error)
    return None


def test_any_value_in_any_place_of_a_manifest_is_an_error_that_names_the_file(trained, tmp_path, capsys):
    step = shutil.copytree(trained, tmp_path / "run") / "checkpoint/step-4"
    good, chance = content_of(step), random.Random(0)
    tensors = {place for place in bad_values.places(good) if place[0] == "tensors" and len(place) > 1}
    some = {place for place in tensors if place[1] == "model/layers.0.attention.wq.weight"}
    places = [place for place in bad_values.places(good) if place not in tensors or place in some]
    cases = [(place, name) for place in places for name in bad_values.VALUES]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for place, name in chance.sample(cases, examples(800)):
        content = bad_values.changed(good, place, bad_values.VALUES[name])
        write(step, content)
        problem = read_all(step)
        capsys.readouterr()
        assert problem is None or str(step) in problem, f"{bad_values.words(place)} = {name}: {problem}"
        if place in some and len(place) > 2 and content != good:
            assert problem is not None, f"{bad_values.words(place)} = {name}"
    write(step, good)
    assert read_all(step) is None
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 400_000  # KiB


@pytest.mark.parametrize(
    ("pieces", "words"),
    [
        ([[0, 0, 7]], "do not cover it exactly once"),
        ([[0, 0, 3], [0, 2, 4]], "do not cover it exactly once"),  # overlapping, and larger together
        ([[0, 0, 3], [0, 2, 3]], "do not cover it exactly once"),  # overlapping, a hole at the end
        ([[0, 0, 3]], "do not cover it exactly once"),
        ([], "do not cover it exactly once"),
        ([[1, 0, 6]], "in no file or have other dimensions"),
        ([[0, 0, 0, 6, 6]], "in no file or have other dimensions"),
        ([[0, -1, 7]], "greater than or equal to 0"),
        ([[0, 0, 3], [0, 3, 3]], r"does not hold model/a\[0:3\] as .*manifest\.json says"),
    ],
)
def test_pieces_that_are_not_the_tensor(tmp_path, pieces, words):
    step = written(tmp_path)
    content = content_of(step)
    content["tensors"]["model/a"]["pieces"] = pieces
    write(step, content)
    with pytest.raises(UserError, match=rf"manifest\.json.*{words}|{words}"):
        files.find_checkpoint(step).shards.read("model/a")


@pytest.mark.parametrize(
    ("file", "change", "words"),
    [
        ("../other", {}, "files"),
        ("shard", {"size": 10**12}, "checksums for 238419 blocks"),
        ("shard", {"block_bytes": 0}, "block_bytes"),
        ("shard", {"crc32": []}, "0 checksums for 1 blocks"),
        ("shard", {"crc32": [None]}, "crc32"),
    ],
)
def test_files_that_cannot_be(tmp_path, file, change, words):
    step = written(tmp_path)
    content = content_of(step)
    (recorded,) = content["files"].values()
    content["files"] = {file: {**recorded, **change}}
    write(step, content)
    with pytest.raises(UserError, match=rf"manifest\.json cannot be read: .*{words}"):
        files.find_checkpoint(step)


@st.composite
def tilings(draw):
    """A shape cut into boxes: one of them is cut in two again and again."""
    shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    boxes = [whole_place(shape)]
    for _ in range(draw(st.integers(0, 5))):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        axis = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(0, box.size[axis]))
        for start, size in ((0, at), (at, box.size[axis] - at)):
            starts, sizes = list(box.start), list(box.size)
            starts[axis] += start
            sizes[axis] = size
            boxes.append(Place(tuple(starts), tuple(sizes)))
    return shape, boxes


@settings(max_examples=examples(100), deadline=None, derandomize=True)
@given(tilings(), st.integers(0, 5), st.sampled_from(["drop", "double", "move"]), st.data())
def test_boxes_that_tile_a_shape(case, number, damage, data):
    shape, boxes = case
    assert tile(shape, boxes)
    box = boxes[number % len(boxes)]
    if not box.elements:
        return
    axis = data.draw(st.integers(0, len(shape) - 1))
    moved = Place(tuple(at + (axis == place) for place, at in enumerate(box.start)), box.size)
    rest = [one for one in boxes if one is not box]
    wrong = {"drop": rest, "double": [*boxes, box], "move": [*rest, moved]}[damage]
    assert not tile(shape, wrong)
    assert not tile((), [whole_place(())] * 2)
    assert tile((0, 3), [])


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("tensors", "optimizer/exp_avg/norm.weight"), bad_values.GONE),
        (("tensors", "model/norm.weight"), bad_values.GONE),
        (("tensors", "model/norm.weight", "shape"), [32]),
        (("trainer", "rng", 0, "torch"), "00"),
        (("trainer", "schedule_start"), bad_values.GONE),
        (("trainer", "last_step"), bad_values.GONE),
        (("trainer", "lr"), "high"),
        (("trainer", "data", "global_batch_size"), 10**15),
        (("architecture", "n_layers"), 10**9),
    ],
)
def test_a_run_goes_on_with_the_step_before_and_says_why(tmp_path, trained, caplog, place, value):
    folder = shutil.copytree(trained, tmp_path / "run")
    step = folder / "checkpoint/step-4"
    write(step, bad_values.changed(content_of(step), place, value))
    caplog.set_level("INFO")
    rows = run(folder, training__steps=5, **SAVING)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    warned = [record.message for record in caplog.records if "skipping a damaged checkpoint" in record.message]
    assert len(warned) == 1
    assert f"{step / 'manifest.json'}" in warned[0]
    assert "resumed from" in caplog.text
    assert "step-2" in caplog.text


def test_a_step_that_was_asked_for_is_an_error(tmp_path, trained):
    folder = shutil.copytree(trained, tmp_path / "run")
    step = folder / "checkpoint/step-4"
    write(step, bad_values.changed(content_of(step), ("tensors", "model/norm.weight", "shape"), [32]))
    with pytest.raises(UserError, match=r"step-4/manifest\.json: the pieces of model/norm\.weight do not cover it"):
        run(folder, training__steps=5, checkpoint__load_step=4, **SAVING)


@pytest.mark.parametrize(
    "header",
    [
        "[" * 50_000,
        '{"a": ' + "[" * 50_000 + "]" * 50_000 + "}",
        '{"a": {"dtype": "F32", "shape": [-1, -1], "data_offsets": [0, 4]}}',
        '{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0.0, 4.0]}}',
        '{"a": {"dtype": [], "shape": [1], "data_offsets": [0, 4]}}',
        '{"a": {"dtype": "F32", "shape": ["1"], "data_offsets": [0, 4]}}',
        '{"a": {"dtype": "F32", "shape": 1, "data_offsets": {}}}',
        '{"a": 1e400}',
    ],
)
def test_headers_of_safetensors_that_cannot_be(header):
    content = len(header).to_bytes(8, "little") + header.encode() + bytes(4)
    with pytest.raises(ValueError, match=r"header|nested|cannot be|JSON|Expecting"):
        read_header(lambda start, end: content[start:end], len(content))
