"""What the real W&B package writes of a run that is offline: the names and the numbers of metrics.jsonl."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shardline.config.schema import Config
from shardline.run.folder import RunFolder
from shardline.telemetry.metrics import KEYS, OPTIONAL_KEYS, MetricsLog

wandb = pytest.importorskip("wandb")
HEADER, BLOCK = 7, 32768  # bytes of a file's and of each piece's header; a piece lies within a block
TABLES = {"comm_bytes": {"dp": 8, "tp": 16}, "expert_load_layers": {"0": 1.5, "1": 2.0}}


def pieces(data: bytes) -> Iterator[bytes]:
    """The records of a `.wandb` file: pieces of checksum, length and kind (1 whole, 2 first, 3 middle, 4 last)."""
    place, record = HEADER, b""
    while place + HEADER <= len(data):
        left = BLOCK - place % BLOCK
        if left < HEADER:
            place += left
            continue
        size, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        record += data[place + HEADER : place + HEADER + size]
        place += HEADER + size
        if kind in (1, 4):
            yield record
            record = b""


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """Each logged row of the run, without what W&B adds."""
    from wandb.proto.wandb_internal_pb2 import Record

    (file,) = folder.glob("log/wandb/offline-run-*/run-*.wandb")
    found = []
    for piece in pieces(file.read_bytes()):
        record = Record()
        record.ParseFromString(piece)
        if record.HasField("history"):
            items = [(".".join(item.nested_key) or item.key, item.value_json) for item in record.history.item]
            found.append({name: json.loads(value) for name, value in items if not name.startswith("_")})
    return found


def flat(row: dict[str, Any]) -> dict[str, float]:
    """A row of metrics.jsonl: tables as NAME/PART, and without what is null."""
    found = {}
    for name, value in row.items():
        parts = {f"{name}/{part}": one for part, one in value.items()} if isinstance(value, dict) else {name: value}
        found |= {name: one for name, one in parts.items() if one is not None}
    return found


def test_wandb_and_tensorboard_get_the_names_and_numbers_of_the_file(tmp_path, monkeypatch) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("WANDB_SILENT", "true")
    options = {"enable_wandb": True, "wandb_mode": "offline", "enable_tensorboard": True}
    metrics = MetricsLog(Config.model_validate({"metrics": options}), RunFolder(tmp_path))
    numbers = {name: number + 0.5 for number, name in enumerate((*KEYS, *OPTIONAL_KEYS))}
    try:
        for step in (1, 2):
            metrics.log(numbers | TABLES | {"step": step, "mfu": None if step == 1 else 0.25})
        metrics.log_validation(2, {"loss": 2.25})
    finally:
        metrics.close()
        wandb.teardown()
    written = [flat(json.loads(line)) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert len(written) == 3
    assert len(written[1]) == len(KEYS) + len(OPTIONAL_KEYS) + 2
    assert rows_of(tmp_path) == written
    board = EventAccumulator(str(tmp_path / "tb")).Reload()
    assert set(board.Tags()["scalars"]) == set().union(*written) - {"step"}
    for name in board.Tags()["scalars"]:
        assert [(one.step, one.value) for one in board.Scalars(name)] == [
            (row["step"], row[name]) for row in written if name in row
        ]
