"""The types and ranges that a checkpoint's manifest may hold. Torch-free.

A checksum protects a manifest from flipped bits, but not from someone who recomputes it: reading one must not raise
anything but `Damaged`, nor allocate memory that no file could fill. Pieces are compared with their tensor only when it
is read (`checkpoint/reader.py`), because there may be millions of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, ValidationError, model_validator

from shardline.config.types import LARGEST, Section, show
from shardline.storage.safetensors import TYPES

Whole = Annotated[int, Field(ge=-LARGEST, le=LARGEST)]
Count = Annotated[int, Field(ge=0, le=LARGEST)]
MOST_SAMPLES = 2**24  # in one step
FileName = Annotated[str, Field(pattern=r"^[^/\x00]+$", max_length=255)]


class FileRecord(Section):
    """A file with a checksum for each of its blocks."""

    size: Count
    block_bytes: int = Field(ge=1, le=LARGEST)
    crc32: list[Count]

    @model_validator(mode="after")
    def _check(self) -> FileRecord:
        blocks = -(-self.size // self.block_bytes)
        if len(self.crc32) != blocks:
            raise ValueError(f"{len(self.crc32)} checksums for {blocks} blocks")
        return self


class TensorRecord(Section):
    """A tensor; each piece is its file's number, then its start and then its size in every dimension."""

    dtype: Literal[*TYPES]  # type: ignore[valid-type]
    shape: list[Count] = Field(max_length=8)
    pieces: list[list[Count]]


class DataRecord(Section):
    """What the samples of a run depend on."""

    model_config = ConfigDict(extra="allow")
    seed: Whole = 0
    dataset: str = ""
    seq_len: Count = 0
    global_batch_size: int = Field(default=1, ge=1, le=MOST_SAMPLES)
    tokenizer: str = ""


class TrainerRecord(Section):
    """How far a run has come, and what it ran with."""

    model_config = ConfigDict(extra="allow")
    step: Count | None = None
    samples: Count = 0
    tokens: Count = 0
    schedule_start: Whole = 0
    lr: float = Field(default=0.0, ge=0, allow_inf_nan=False)  # in the last step
    last_step: Count = 0  # the step at which the run was to end
    validated: Count = 0
    best_validation: float | None = None
    worse_validations: Count = 0
    loss_scale: list[float | Count] = Field(default=[0.0, 0], min_length=2, max_length=2)
    excluded: list[str] = Field(default=[])
    history: str = ""
    data: DataRecord = DataRecord()
    optimizer: str = ""
    tokenizer: str | None = None
    config_sha256: str = ""
    torch: str = ""
    rng: list[dict[str, Any] | Count] = Field(default=[])
    lora: dict[str, Any] | None = None
    reference: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _check(self) -> TrainerRecord:
        batch = self.data.global_batch_size
        if 0 < self.samples < batch:
            raise ValueError(f"{self.samples} samples were read, fewer than one batch of {batch}")
        if "lr" in self.model_fields_set and "last_step" not in self.model_fields_set:
            raise ValueError("last_step is missing")
        return self


class ManifestRecord(Section):
    """Everything in a manifest except its architecture, which has a type of its own."""

    model_config = ConfigDict(extra="allow")
    step: Count
    kind: Literal["full", "model"]
    trainer: TrainerRecord
    world_size: int = Field(ge=1, le=LARGEST)
    layout: dict[str, Count] | None
    files: dict[FileName, FileRecord]
    tensors: dict[str, TensorRecord]

    @model_validator(mode="after")
    def _check(self) -> ManifestRecord:
        if self.trainer.step not in (None, self.step):
            raise ValueError(f"it is of step {self.step}, but its trainer is at {self.trainer.step}")
        return self


def check_manifest(content: Mapping[str, Any]) -> None:
    """Raise a ValueError that names the first invalid field of a manifest."""
    try:
        ManifestRecord.model_validate(content)
    except ValidationError as error:
        row = error.errors(include_url=False)[0]
        place = ".".join(map(str, row["loc"]))
        seen = f", got {show(row['input'])}" if row["type"] != "value_error" else ""
        raise ValueError(f"{place}: {row['msg'].removeprefix('Value error, ')}{seen}".removeprefix(": ")) from None
