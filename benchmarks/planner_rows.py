"""Converts rows of published measurements to planner workloads: models by name, layouts, precisions, trainers.

A row may lack any key. Missing values come from the tables in `planner_models.toml` and `planner_traits.toml`; a row
with too little information is left out and counted.
"""

from __future__ import annotations

import json
import math
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planner_memory import peak_memory
from planner_sweep import sweep_edition
from planner_trainers import TRAINERS, trainer_of, traits_of

from shardline.config.architecture import Architecture, build
from shardline.config.layout import Layout
from shardline.errors import UserError
from shardline.plan.hardware import GIB, Hardware, find_profile
from shardline.plan.simulate import step_time
from shardline.plan.traits import Traits
from shardline.plan.work import Workload

MODELS = tomllib.loads((Path(__file__).parent / "planner_models.toml").read_text())

# What reading a row raises if it is incomplete or contradictory.
UNKNOWN = (KeyError, ValueError, TypeError, AttributeError, ArithmeticError, IndexError, AssertionError, UserError)


@dataclass
class Measured:
    """One published row, with everything that the planner needs to predict it."""

    row: dict[str, Any]
    workload: Workload
    hardware: Hardware
    trainer: str
    speed: float | None  # tokens/s per GPU
    memory: float | None  # GiB
    predicted: float = 0.0
    predicted_gib: float = 0.0

    @property
    def group(self) -> tuple[str, int]:
        return str(self.row.get("model")), int(self.row["gpus"])

    @property
    def dataset(self) -> str:
        return str(self.row.get("dataset", "unknown"))

    @property
    def doubtful(self) -> bool:
        """Whether the collection marks the row as unreliable, or its numbers contradict each other."""
        row, layout = self.row, self.workload.layout
        if "INCONSISTENT" in str(row.get("notes", "")):
            return True
        parts = [row.get("grad_accum"), row.get("micro_batch"), row.get("global_batch")]
        if any(part is None for part in parts):
            return False
        return bool(parts[0] * parts[1] * layout.data_ranks != parts[2])

    @property
    def stalled(self) -> bool:
        """Whether similar rows show that something was broken during the measurement; see `mark_stalled`."""
        return bool(self.row.get("stalled"))


def read_rows(folder: Path, unknown: str = "") -> tuple[list[Measured], list[tuple[dict[str, Any], str]]]:
    """Return the rows that can be predicted, with predictions, and the others with the reason.

    Rows of the dataset `unknown` count as those of an unknown trainer.
    """
    found, left_out = [], []
    for row in _listed(folder / "measured_layouts.json"):
        try:
            one = measured(row, "default" if unknown and row.get("dataset") == unknown else None)
            found.append(predicted(one))
        except UNKNOWN as error:
            left_out.append((row, f"{type(error).__name__}: {error}"))
    mark_stalled(found)
    return found, left_out


def predicted(row: Measured) -> Measured:
    traits = traits_of(row.trainer)
    row.predicted, row.predicted_gib = speed(row, traits), gib(row, traits)
    if not (0 < row.predicted < math.inf and 0 < row.predicted_gib < math.inf):
        raise ValueError("there is no finite prediction")
    return row


def speed(row: Measured, traits: Traits) -> float:
    """Return the predicted tokens/s per GPU."""
    workload = row.workload
    seconds = step_time(workload, row.hardware, traits).total
    return workload.step_tokens / seconds / workload.layout.world_size


def gib(row: Measured, traits: Traits) -> float:
    return peak_memory(row.workload, traits).total / GIB


def mark_stalled(rows: list[Measured]) -> None:
    """Mark rows that are slower than a sibling by a factor that no layout explains. Only measurements are compared.

    Siblings have the same model, GPUs, tensor and pipeline degree. A micro-batch never takes 3 times as long as one of
    at least its size, nor 4 times as long per sequence as a smaller one.
    """
    groups: dict[tuple[Any, ...], list[Measured]] = {}
    for row in rows:
        layout = row.workload.layout
        key = (row.dataset, *row.group, row.hardware.name, row.workload.seq_len, layout.tp, layout.pp)
        groups.setdefault(key, []).append(row)
    for own in groups.values():
        timed = [(row.workload.micro_batch, pass_seconds(row), row) for row in own if row.speed]
        for size, seconds, row in timed:
            larger = (3 * other for other_size, other, _ in timed if other_size >= size)
            smaller = (4 * other * size / other_size for other_size, other, _ in timed if other_size < size)
            row.row["stalled"] = seconds > min((*larger, *smaller))


def pass_seconds(row: Measured) -> float:
    """Return the time of a step divided by its passes, including those that fill and drain a pipeline."""
    workload = row.workload
    step = workload.step_tokens / (row.speed or 1.0) / workload.layout.world_size
    return step / (workload.micro_batches + workload.layout.pp - 1)


def read_failed(folder: Path) -> tuple[list[Measured], list[tuple[dict[str, Any], str]]]:
    """Return layouts that crashed or ran out of memory, and the incomplete ones with the reason."""
    found, left_out = [], []
    for row in _listed(folder / "failed_layouts.json"):
        try:
            found.append(predicted(measured(_full(row))))
        except UNKNOWN as error:
            left_out.append((row, f"{type(error).__name__}: {error}"))
    return found, left_out


def _listed(path: Path) -> list[Any]:
    """Return the rows of a file, a list or an object with `rows`; none if there is no such file."""
    if not path.is_file():
        return []
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path}: is no JSON: {error}") from error
    rows = data.get("rows", []) if isinstance(data, dict) else data
    if not isinstance(rows, list):
        raise UserError(f"{path}: has no list of rows")
    return rows


def _full(row: dict[str, Any]) -> dict[str, Any]:
    """Return a failed layout, completed with what all rows of the sweep share."""
    known = {"dataset": "ultrascale-playbook", "gpu_type": "H100-80GB", "precision": "bf16", "seq_len": 4096}
    known |= {"zero_stage": 0, "ac": "none"}
    full = known | {key: value for key, value in row.items() if value is not None}
    full["gpus"] = row.get("gpus") or 8 * int(row["nodes"])
    if re.fullmatch(r"[\d.]+B", str(row.get("model"))):
        full["model"] = f"Llama-like {row['model']}"
    return full


def measured(row: dict[str, Any], trainer: str | None = None) -> Measured:
    row = with_numbers(row)
    trainer = trainer or trainer_of(row)
    table = TRAINERS[trainer]
    hardware = find_profile(gpu_name(str(row.get("gpu_type", ""))))
    if "40gb" in str(row.get("gpu_type", "")).lower():
        hardware = find_profile("a100_40gb")
    arch = architecture(row)
    layout, micro, count = degrees(row)
    zero = int(row.get("zero_stage") if row.get("zero_stage") is not None else table.get("zero", 1))
    if row.get("fsdp") and zero < 2:
        zero = 3
    layout = data_parallel(layout, zero, row.get("fsdp"))
    workload = Workload(
        arch=arch,
        layout=layout,
        seq_len=int(row["seq_len"]),
        micro_batch=micro,
        micro_batches=count,
        zero=zero,
        schedule="Interleaved1F1B" if stages_per_rank(row, arch, layout) > 1 else "1F1B",
        stages_per_rank=stages_per_rank(row, arch, layout),
        recompute=recompute(row, table),
        compute=precision(str(row.get("precision", "bf16"))),
        experts_compute=precision(str(row.get("precision", "bf16"))),
        sequence_parallel=bool(row.get("sequence_parallel", table.get("sequence_parallel", True))) and layout.tp > 1,
        reshard=zero == 3,
        ring=layout.cp > 1,
        lora_rank=16 if "lora" in str(row.get("model", "")).lower() else 0,
    )
    if trainer == "nanotron":
        trainer = sweep_edition(workload, hardware)
    return Measured(row, workload, hardware, trainer, measured_speed(row), row.get("mem_gib"))


COUNTS = ("gpus", "seq_len", "tp", "pp", "cp", "ep", "vp", "micro_batch", "global_batch", "grad_accum", "fsdp", "nodes")
COUNTS += ("zero_stage",)
RESULTS = ("tokens_per_s_per_gpu", "mem_gib", "step_time_s")


def with_numbers(row: dict[str, Any]) -> dict[str, Any]:
    """Return the row with text converted to numbers.

    Counts must be whole numbers and results positive. A count of 0 is treated as missing.
    """
    row = {key: _plain(value) if key in (*COUNTS, *RESULTS, *FIELDS) else value for key, value in row.items()}
    for key in (*COUNTS, *FIELDS):
        value = row.get(key)
        if value is not None and (not _is_number(value) or value != int(value) or not 0 <= value <= MOST):
            raise ValueError(f"{key} = {value!r} is not a count")
    for key in RESULTS:
        value = row.get(key)
        if value is not None and (not _is_number(value) or value <= 0):
            raise ValueError(f"{key} = {value!r} is not a positive number")
    if not row.get("gpus") or not row.get("seq_len"):
        raise ValueError("gpus or seq_len is missing")
    return row


def _plain(value: Any) -> Any:
    """Return the number in a text, None if it is empty, and anything else unchanged."""
    if not isinstance(value, str):
        return value
    text = value.strip().replace(",", "")
    if text.lower() in ("", "null", "none", "nan", "n/a", "-"):
        return None
    return float(text) if re.fullmatch(r"[-+]?\d*\.?\d+([eE][-+]?\d+)?", text) else value


MOST = 10**8


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def measured_speed(row: dict[str, Any]) -> float | None:
    """Return tokens/s per GPU, computed from the time of a step if only that is published."""
    if row.get("tokens_per_s_per_gpu"):
        return float(row["tokens_per_s_per_gpu"])
    if row.get("step_time_s") and row.get("global_batch"):
        return float(row["global_batch"] * row["seq_len"] / row["step_time_s"] / row["gpus"])
    return None


# GPUs without a profile of their own, and the nearest one that has a profile: the same chip or its predecessor.
NEAREST = {"gh200": "h200", "h800": "h100", "a800": "a100", "mi325x": "mi300x", "4090": "rtx4090"}


def gpu_name(text: str) -> str:
    plain = text.lower()
    for name in (
        "gb300",
        "gb200",
        "b300",
        "b200",
        "gh200",
        "h200",
        "h100",
        "h800",
        "a100",
        "a800",
        "mi300x",
        "mi325x",
        "4090",
    ):
        if name in plain:
            return NEAREST.get(name, name)
    raise ValueError(f"unknown GPU {text!r}")


def precision(text: str) -> str:
    plain = text.lower()
    if "fp4" in plain:
        return "float4"
    return "float8" if "fp8" in plain or "float8" in plain else "bfloat16"


def recompute(row: dict[str, Any], table: dict[str, Any]) -> str:
    text = str(row.get("ac") or table.get("recompute", "none")).lower()
    if "full" in text:
        return "full"
    if "op" in text:
        return "op"
    return table.get("selective", "none") if "selective" in text else "none"


def degrees(row: dict[str, Any]) -> tuple[Layout, int, int]:
    gpus = int(row["gpus"])
    tp, pp, cp, ep = (int(row.get(key) or 1) for key in ("tp", "pp", "cp", "ep"))
    if row.get("tp") is None and row.get("pp") is None:
        tp, pp = _model_parallel(row, tp, pp)
    dp = gpus // (tp * pp * cp)
    if dp * tp * pp * cp != gpus:
        raise ValueError(f"{tp} x {pp} x {cp} does not divide {gpus} GPUs")
    batch = row.get("global_batch")
    accumulation = row.get("grad_accum")
    micro = row.get("micro_batch")
    if micro is None:
        micro = 1 if batch is None or accumulation is None else max(1, int(batch) // (dp * int(accumulation)))
    if batch is not None:
        count = max(1, round(int(batch) / (dp * int(micro))))
        if accumulation and int(accumulation) * dp * int(micro) != int(batch):
            count = int(accumulation)
    else:
        count = int(accumulation or 1)
    shared = math.gcd(ep, dp * cp * tp)
    return Layout(pp=pp, dp_shard=dp, cp=cp, tp=tp, ep=shared), int(micro), count


def _model_parallel(row: dict[str, Any], tp: int, pp: int) -> tuple[int, int]:
    found = re.search(r"tp\*pp=(\d+)", str(row.get("notes")))
    if not found:
        return tp, pp
    both = int(found.group(1))
    return (both, 1) if both <= 8 else (8, both // 8)


def data_parallel(layout: Layout, zero: int, fsdp: Any) -> Layout:
    """Return the layout: data ranks that shard something are `dp_shard`, copies are `dp_replicate`."""
    dp = layout.dp_shard
    if zero == 0:
        return Layout(layout.pp, dp, 1, layout.cp, layout.tp) if layout.ep == 1 else layout
    size = int(fsdp) if fsdp else dp
    if 1 < size < dp and dp % size == 0:
        return Layout(layout.pp, dp // size, size, layout.cp, layout.tp, layout.ep)
    return layout


def stages_per_rank(row: dict[str, Any], arch: Architecture, layout: Layout) -> int:
    vp = int(row.get("vp") or 1)
    return vp if layout.pp > 1 and arch.n_layers >= vp * layout.pp else 1


def architecture(row: dict[str, Any]) -> Architecture:
    fields = known_model(str(row.get("model", "")))
    for key, name in FIELDS.items():
        if row.get(key) is not None:
            fields[name] = int(row[key])
    if "dim" not in fields or "n_layers" not in fields:
        raise ValueError(f"the sizes of {row.get('model')!r} are not known")
    fields.setdefault("n_heads", max(1, fields["dim"] // 128))
    fields.setdefault("vocab_size", 51200)
    if "ffn_dim" not in fields:
        fields["ffn_dim"] = 4 * fields["dim"]
        fields.setdefault("gated", False)
    if fields.get("moe"):
        fields["gated"] = True
    if "gated" not in fields:
        name = str(row.get("model", "")).lower()
        fields["gated"] = (
            not ("gpt" in name or "mpt" in name) and fields["ffn_dim"] != 4 * fields["dim"]
        ) or "llama" in name
    if not fields["gated"]:
        fields.setdefault("activation", "gelu_tanh")
    if "nanotron" in trainer_of(row):
        fields["tie_word_embeddings"] = fields["ffn_dim"] < 10_000
    return build(fields)


FIELDS = {
    "hidden": "dim",
    "layers": "n_layers",
    "heads": "n_heads",
    "kv_heads": "n_kv_heads",
    "ffn": "ffn_dim",
    "vocab": "vocab_size",
}


def known_model(name: str) -> dict[str, Any]:
    """Return the table with the longest pattern that matches the name."""
    found = [table for table in MODELS.values() if re.search(table["pattern"], name, re.IGNORECASE)]
    if not found:
        return {}
    table = max(found, key=lambda one: len(one["pattern"]))
    return {key: value for key, value in table.items() if key != "pattern"}
