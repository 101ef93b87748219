"""`shardline checkpoint ls | verify | show`: what is saved, whether it is whole, and what is in it. Without torch."""

from __future__ import annotations

import json as json_format
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from shardline.checkpoint.folders import LEFTOVERS, MANIFEST, Found, Progress, Tensor, find, in_words
from shardline.errors import UserError
from shardline.storage.location import locate


def ls(path: str, json: bool = False) -> int:
    """One line for each step and each thing left behind."""
    folder, every = find(locate(path))
    rows = [_row(found) for found in every]
    if json:
        _print_json(rows)
        return 0
    print(folder)
    columns = ("step", "kind", "size", "saved", "tensors", "ranks", "layout", "state")
    table = [columns] + [tuple(_cell(row[column], column) for column in columns) for row in rows]
    widths = [max(len(line[column]) for line in table) for column in range(len(columns))]
    for line in table:
        print("  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip())
    return 0


def verify(path: str, step: int | None = None, json: bool = False) -> int:
    """Read every block of every file, of all steps or of one; 2 if anything is wrong."""
    folder, every = find(locate(path))
    chosen = [found for found in every if not found.left and step in (None, found.step)]
    if not chosen:
        steps = ", ".join(str(found.step) for found in every if not found.left) or "none"
        wanted = "no checkpoint" if step is None else f"no checkpoint of step {step}"
        raise UserError(f"{folder} holds {wanted} (steps there: {steps})")
    report, broken = Progress("read", sum(found.size for found in chosen)), 0
    for found in chosen:
        problems = found.verify(report.advance)
        broken += bool(problems)
        if json:
            rows = [problem._asdict() for problem in problems]
            _print_json([{"step": found.step, "path": str(found.place), "whole": not problems, "problems": rows}])
            continue
        for problem in problems:
            print(problem, file=sys.stderr)
        size = f"{len(found.files)} {'file' if len(found.files) == 1 else 'files'}, {in_words(found.size)}"
        print(f"{found.place}: {'broken' if problems else f'whole ({size})'}")
    if broken and not json:
        print(f"error: {broken} of {len(chosen)} checkpoints cannot be relied on", file=sys.stderr)
    return 2 if broken else 0


def show(path: str, tensors: bool = False, json: bool = False) -> int:
    """The manifest of the newest step, or of the step folder, in words."""
    folder, every = find(locate(path))
    readable = [found for found in every if found.manifest is not None and not found.left]
    if not readable:
        raise UserError(f"{folder} holds no checkpoint whose {MANIFEST} can be read")
    found = readable[-1]
    assert found.manifest is not None
    stored = found.tensors()
    if json:
        _print_json([_described(found, stored, tensors)])
        return 0
    _print_pairs(_summary(found, found.manifest, stored))
    if tensors:
        _print_tensors(stored)
    return 0


# ---- the rows of ls --------------------------------------------------------------------------------------------------


def _row(found: Found) -> dict[str, Any]:
    manifest = found.manifest
    state = _state(found)
    row: dict[str, Any] = {"step": found.step, "path": str(found.place), "kind": None, "size": None, "saved": None}
    row |= {"tensors": None, "ranks": None, "layout": None, "state": state}
    if manifest is None:
        return row
    written = (found.place / MANIFEST).written()
    row |= {"kind": manifest["kind"], "size": found.size, "ranks": manifest.get("world_size")}
    row |= {"saved": None if written is None else written.isoformat(timespec="seconds")}
    row |= {"layout": manifest.get("layout")}
    if not state.startswith("broken"):
        try:
            row["tensors"] = len(found.tensors())
        except (OSError, ValueError, KeyError, TypeError) as error:
            row["state"] = f"broken: its tensors cannot be listed ({error})"
    return row


def _state(found: Found) -> str:
    if found.left == "partial" or (found.left and found.manifest is None):
        return f"{found.left}: {LEFTOVERS[found.left]}"
    problems = found.check()
    state = f"broken: {problems[0]}" if problems else "whole"
    return f"{found.left}: {LEFTOVERS[found.left]}" if found.left else state


def _cell(value: Any, column: str) -> str:
    if value is None:
        return "-"
    if column == "size":
        return in_words(value)
    if column == "saved":
        return str(value).replace("T", " ")[:19]
    return layout_in_words(value) if column == "layout" else str(value)


def layout_in_words(layout: Any) -> str:
    """`dp_shard 2 x tp 2`; a layout of one rank has nothing to say."""
    if not isinstance(layout, Mapping):
        return str(layout) if layout else "-"
    degrees = {axis: degree for axis, degree in layout.items() if degree != 1}
    return " x ".join(f"{axis} {degree}" for axis, degree in degrees.items()) or "-"


# ---- the words of show -----------------------------------------------------------------------------------------------


def _summary(found: Found, manifest: Mapping[str, Any], stored: Mapping[str, Tensor]) -> dict[str, str]:
    trainer, data = manifest["trainer"], manifest["trainer"].get("data", {})
    kinds = {"full": "full: can be resumed", "model": "weights only"}
    written = (found.place / MANIFEST).written()
    weights = {name: tensor for name, tensor in stored.items() if "/" not in name or name.startswith("model/")}
    pieces = sum(tensor.pieces for tensor in stored.values())
    lines = {
        "checkpoint": str(found.place),
        "step": str(found.step),
        "kind": kinds.get(manifest["kind"], str(manifest["kind"])),
        "saved": "-" if written is None else f"{written:%Y-%m-%d %H:%M:%S}",
        "tokens": f"{trainer['tokens']:,}" if "tokens" in trainer else "-",
        "data": _data(trainer, data),
        "optimizer": trainer.get("optimizer", "-"),
        "tokenizer": trainer.get("tokenizer") or "-",
        "torch": trainer.get("torch", "-"),
        "config": f"sha256 {trainer['config_sha256'][:16]}..." if "config_sha256" in trainer else "-",
        "ranks": _ranks(manifest),
        "model": _model(manifest["architecture"], sum(tensor.numbers for tensor in weights.values())),
        "tensors": f"{len(stored)} in {pieces} pieces, {len(weights)} of them weights",
        "files": ", ".join(f"{name} {in_words(row['size'])}" for name, row in list(found.files.items())[:4])
        + (f" and {len(found.files) - 4} more" if len(found.files) > 4 else ""),
        "format": f"version {manifest['version']}, checksums of {_blocks(found)} blocks",
    }
    problems = found.check()
    lines["state"] = "; ".join(map(str, problems)) if problems else "whole (`verify` reads the checksums)"
    return lines


def _data(trainer: Mapping[str, Any], data: Mapping[str, Any]) -> str:
    if "samples" not in trainer:
        return "-"
    position = f"{trainer['samples']:,} samples read"
    known = {"seq_len": "of {} tokens", "global_batch_size": "in batches of {}", "seed": "seed {}"}
    words = [text.format(data[key]) for key, text in known.items() if key in data]
    return ", ".join([" ".join([position, *words[:1]]), *words[1:]])


def _ranks(manifest: Mapping[str, Any]) -> str:
    if "world_size" not in manifest:
        return "-"
    layout = layout_in_words(manifest.get("layout"))
    return str(manifest["world_size"]) + ("" if layout == "-" else f" ({layout})")


def _model(arch: Mapping[str, Any], parameters: int) -> str:
    words = [f"{arch.get('family')}", f"{parameters:,} parameters"]
    for name in ("n_layers", "dim", "n_heads", "n_kv_heads", "head_dim", "ffn_dim", "vocab_size", "rope_theta"):
        words.append(f"{name} {arch.get(name)}")
    return ", ".join(words)


def _blocks(found: Found) -> int:
    return sum(len(recorded["crc32"]) for recorded in found.files.values())


def _print_pairs(pairs: Mapping[str, str]) -> None:
    width = max(map(len, pairs))
    for name, text in pairs.items():
        print(f"{name:<{width}}  {text}")


def _print_tensors(stored: Mapping[str, Tensor]) -> None:
    print()
    rows = [("tensor", "type", "shape", "pieces")]
    rows += [(name, one.dtype, " x ".join(map(str, one.shape)) or "-", str(one.pieces)) for name, one in stored.items()]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    for row in rows:
        print("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())


def _described(found: Found, stored: Mapping[str, Tensor], tensors: bool) -> dict[str, Any]:
    """The manifest without what is long: checksums and random states; tensors only when asked for."""
    assert found.manifest is not None
    content = {key: value for key, value in found.manifest.items() if key not in ("files", "tensors")}
    content["trainer"] = {key: value for key, value in content["trainer"].items() if key != "rng"}
    content["path"] = str(found.place)
    content["files"] = {name: recorded["size"] for name, recorded in found.files.items()}
    content["problems"] = [problem._asdict() for problem in found.check()]
    content["tensor_count"] = len(stored)
    if tensors:
        content["tensors"] = {name: one._asdict() for name, one in stored.items()}
    return content


def _print_json(rows: Iterable[Mapping[str, Any]]) -> None:
    for row in rows:
        print(json_format.dumps(row))
