"""A flipped bit in a token store, finished or not, is found with the name of its file when it is read."""

from __future__ import annotations

import json
import random
import re
import shutil
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardline.cli.main import main
from shardline.config.load import load_config
from shardline.data import chunks, prepare, token_store
from shardline.data.chunks import chunks_of_texts
from shardline.data.prepare import store_for
from shardline.data.sources import Source
from shardline.data.token_store import TokenStore, manifest_checksum
from shardline.data.tokenizer import ByteTokenizer
from shardline.errors import UserError

BYTES = ByteTokenizer()
DOCUMENTS = [f"document number {i} " + "words " * (i % 7) for i in range(60)]


@pytest.fixture(autouse=True, scope="module")
def small_blocks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_store, "BLOCK_BYTES", 256)
        patch.setattr(chunks, "CHUNK_BYTES", 200)
        yield


def written(out: Path) -> Path:
    source = Source("mine", "mine 1", None, lambda: chunks_of_texts(DOCUMENTS))
    prepare.prepare(source, BYTES, out, workers=1, part_tokens=900)
    return out


class Interrupted(Exception):
    """Ends a preparation before it is finished."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, small_blocks: None) -> dict[str, Path]:
    """A finished store, and one that lacks only its end."""

    def stop(*_: Any) -> None:
        raise Interrupted

    folder = tmp_path_factory.mktemp("stores")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepare, "_finish", stop)
        with pytest.raises(Interrupted):
            written(folder / "half")
    return {"whole": written(folder / "whole"), "half": folder / "half"}


@pytest.fixture
def folder(made: dict[str, Path], tmp_path: Path) -> Path:
    """A finished store to damage."""
    return Path(shutil.copytree(made["whole"], tmp_path / "out"))


@pytest.fixture
def half(made: dict[str, Path], tmp_path: Path) -> Path:
    """An unfinished store to damage."""
    return Path(shutil.copytree(made["half"], tmp_path / "half"))


def everything(folder: Path) -> list[list[Any]]:
    """All that a run can read of a store."""
    store = TokenStore.open(folder)
    numbers = store.document_numbers(0, store.tokens)
    parts = [store.read(0, store.tokens), store.trained(0, store.tokens), store.document_ends(), store.has_trained()]
    return [array.tolist() for array in (*parts, numbers)]


def outcome(folder: Path) -> list[list[Any]] | str:
    """What is read, or the error."""
    try:
        return everything(folder)
    except UserError as error:
        return str(error)


def flipped(file: Path, bit: int) -> bytes:
    content = bytearray(file.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    return bytes(content)


def test_every_flipped_bit_is_found_when_it_is_read_or_does_not_matter(folder: Path) -> None:
    good, chance = everything(folder), random.Random(0)
    files = sorted(file for file in folder.iterdir() if file.name != ".lock")
    assert {file.suffix for file in files} == {".json", ".tokens", ".ends"}
    for file in files:
        content = file.read_bytes()
        for bit in chance.sample(range(8 * len(content)), 100 if file.suffix == ".json" else 30):
            file.write_bytes(flipped(file, bit))
            found = outcome(folder)
            if isinstance(found, str):
                assert str(file) in found
            else:  # white space, say; no bit of the other files is without meaning
                assert (found, file.suffix) == (good, ".json")
            file.write_bytes(content)


def test_the_error_names_the_block_and_only_a_read_block_is_compared(folder: Path) -> None:
    file = folder / "part-00000.tokens"
    file.write_bytes(flipped(file, 8 * 600))
    store = TokenStore.open(folder)
    assert store.read(0, 256).tolist() == everything_before(folder, 256)  # bytes 0 to 512
    with pytest.raises(
        UserError, match=r"part-00000\.tokens is damaged: bytes 512 to 768 fail their checksum: prepare"
    ):
        store.read(200, 100)


def everything_before(folder: Path, count: int) -> list[int]:
    return np.fromfile(folder / "part-00000.tokens", "<u2")[:count].tolist()


def test_a_block_is_compared_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[str, int]] = []
    check = token_store.check_block
    monkeypatch.setattr(
        token_store, "check_block", lambda f, r, i, b: (compared.append((Path(f).name, i)), check(f, r, i, b))
    )
    store = TokenStore.open(folder)
    for _ in range(2):
        store.read(0, store.tokens)
        store.document_numbers(5, store.tokens - 5)
    sizes = {file.name: -(-recorded["size"] // 256) for file, recorded in store.files()}
    assert sorted(compared) == sorted((name, block) for name, count in sizes.items() for block in range(count))


def test_a_key_turns_it_off(folder: Path) -> None:
    file = folder / "part-00000.tokens"
    file.write_bytes(flipped(file, 8 * 600))
    keys = {"training.dataset_path": str(folder), "model.tokenizer_path": "bytes"}
    with pytest.raises(UserError, match="is damaged"):
        store_for(load_config(overrides=keys), "training", BYTES).read(0, 400)
    assert len(store_for(load_config(overrides=keys | {"training.verify_data": False}), "training", BYTES).read(0, 400))


def as_version_1(folder: Path) -> None:
    """What version 1 wrote: blocks of 8 MiB, and their checksums as numbers."""
    manifest = json.loads((folder / "store.json").read_text())
    manifest |= {"version": 1, "block_bytes": 8 << 20}
    for part in manifest["parts"]:
        for kind, key in (("tokens", "token_checksums"), ("ends", "end_checksums")):
            part[key] = [zlib.crc32((folder / f"{part['name']}.{kind}").read_bytes())]
    manifest["checksum"] = manifest_checksum(manifest)
    (folder / "store.json").write_text(json.dumps(manifest))


def test_an_older_store_is_read_and_verified_with_what_it_has(folder: Path, said: Callable[[], str]) -> None:
    good = everything(folder)
    assert "older version" not in said()
    as_version_1(folder)
    assert everything(folder) == good
    assert "is a store of an older version, of which 8.00 MiB are verified at a time" in said()
    file = folder / "part-00001.ends"
    file.write_bytes(flipped(file, 3))
    with pytest.raises(UserError, match=r"part-00001\.ends is damaged: bytes 0 to \d+ fail"):
        everything(folder)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dtype": "float64"}, "dtype"),
        ({"block_bytes": 0}, "block_bytes"),
        ({"parts": [{"name": "../../etc/passwd", "tokens": 1, "documents": 1}]}, "name"),
        ({"parts": [{"name": "part-00000", "tokens": -1, "documents": 1}]}, "tokens"),
        ({"parts": 7}, "parts"),
        ({"source": []}, "source"),
        ({"tokenizer": {"name": 1}}, "tokenizer"),
        ({"strange": 1}, "strange"),
    ],
)
def test_a_manifest_with_a_right_checksum_and_wrong_contents(folder: Path, change: Any, words: str) -> None:
    manifest = json.loads((folder / "store.json").read_text()) | change
    (folder / "store.json").write_text(json.dumps(manifest | {"checksum": manifest_checksum(manifest)}))
    with pytest.raises(UserError, match=rf"store\.json is damaged: .*{words}"):
        TokenStore.open(folder)


def test_a_manifest_that_is_nested_deeply_or_lacks_checksums(folder: Path) -> None:
    manifest = json.loads((folder / "store.json").read_text())
    (folder / "store.json").write_text("[" * 100_000)
    with pytest.raises(UserError, match=r"store\.json cannot be read: nested more than 100 deep: prepare it again"):
        TokenStore.open(folder)
    (folder / "store.json").write_text("[]")
    with pytest.raises(UserError, match=r"store\.json is not the manifest of a token store: prepare it again"):
        TokenStore.open(folder)
    manifest["parts"][1]["token_checksums"] = manifest["parts"][1]["token_checksums"][:-8]
    (folder / "store.json").write_text(json.dumps(manifest | {"checksum": manifest_checksum(manifest)}))
    with pytest.raises(UserError, match=r"store\.json has no checksum for every block of part-00001\.tokens"):
        TokenStore.open(folder)


def test_the_command_names_every_damaged_range(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "verify", str(folder)]) == 0
    assert f"{folder}: whole (" in capsys.readouterr().out
    for name, bit in (("part-00000.tokens", 8 * 300), ("part-00001.ends", 1)):
        (folder / name).write_bytes(flipped(folder / name, bit))
    assert main(["data", "verify", str(folder)]) == 2
    said = capsys.readouterr().err
    assert f"{folder / 'part-00000.tokens'} is damaged: bytes 256 to 512 fail their checksum" in said
    assert f"{folder / 'part-00001.ends'} is damaged: bytes 0 to" in said
    assert main(["data", "verify", str(folder.parent)]) == 2
    assert "holds no token store: a store has a store.json" in capsys.readouterr().err


# ---- what an interrupted preparation left ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["part-00001.json", "part-00001.tokens", "part-00001.ends"])
def test_a_damaged_part_is_made_again(made: dict[str, Path], half: Path, said: Callable[[], str], name: str) -> None:
    (half / name).write_bytes(flipped(half / name, 8 * 20))
    assert everything(written(half)) == everything(made["whole"])
    lines = said()
    assert re.search(rf"{half / name} is damaged.*: this part and those after it are prepared again", lines)
    assert "continuing after 1 finished part" in lines


@pytest.mark.parametrize("text", ["[" * 100_000, "[]", "null", "{}", '{"name": "part', b"\xff"])
@pytest.mark.parametrize("name", ["part-00001.json", "prepare.json"])
def test_notes_that_are_no_notes(half: Path, said: Callable[[], str], name: str, text: str | bytes) -> None:
    (half / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    job = prepare._job(Source("mine", "mine 1", None, list), BYTES)
    _, notes = prepare._start(half, job)
    assert len(notes) == (1 if name == "part-00001.json" else 0)
    assert f"{half / name} is damaged" in said()


def test_notes_that_another_job_left_are_not_believed(half: Path) -> None:
    (half / "prepare.json").write_text("damaged")
    other = Source("other", "other 1", None, lambda: chunks_of_texts(["another text"] * 40))
    store = prepare.prepare(other, BYTES, half, workers=1, part_tokens=900)
    assert store.read(0, 14).tolist() == [256, *b"another text", 257]
    assert (store.documents, sorted(half.glob("*.json"))) == (40, [half / "store.json"])
