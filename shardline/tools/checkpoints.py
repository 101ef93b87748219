"""`shardline checkpoint ls | verify | show`: list, verify and describe checkpoints, without importing torch."""

from __future__ import annotations

import json as json_format
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from shardline.checkpoint.format import LEFTOVERS, MANIFEST, Found, Saved, TensorSummary, choose, find
from shardline.storage.location import locate
from shardline.storage.progress import Progress
from shardline.words import counted, listed, sized, table_lines, to_stderr, width_of


def ls(path: str, json: bool = False) -> int:
    """Print one line for each step and each leftover folder."""
    folder, every = find(locate(path))
    rows = [_row(found) for found in every]
    if json:
        _print_json(rows)
        return 0
    print(folder)
    columns = ("step", "kind", "size", "saved", "tensors", "ranks", "layout", "state")
    _print_table([columns] + [tuple(_cell(row[column], column) for column in columns) for row in rows])
    return 0


def verify(path: str, step: int | None = None, json: bool = False) -> int:
    """Read every block of every file, of all steps or of one; return 2 if anything is wrong."""
    folder, every = find(locate(path))
    chosen = [found for found in every if not found.leftover and step in (None, found.step)]
    if not chosen:
        choose(folder, every, -1 if step is None else step)  # raises an error that lists the available steps
    total, broken = sum(found.saved.size for found in chosen if found.saved is not None), 0
    with Progress("read", total) as progress:
        for found in chosen:
            problems = found.check() if found.saved is None else found.saved.find_damage(progress.advance)
            broken += bool(problems)
            if json:
                rows = [problem._asdict() for problem in problems]
                _print_json([{"step": found.step, "path": str(found.place), "whole": not problems, "problems": rows}])
                continue
            for problem in problems:
                to_stderr(str(problem))
            if problems or found.saved is None:
                print(f"{found.place}: broken")
            else:
                print(f"{found.place}: whole ({counted(len(found.saved.files), 'file')}, {sized(found.saved.size)})")
    if broken and not json:
        to_stderr(f"error: {broken} of {len(chosen)} checkpoints cannot be relied on")
    return 2 if broken else 0


def show(path: str, tensors: bool = False, json: bool = False) -> int:
    """Print the contents of the manifest of the newest step, or of the given one."""
    saved = choose(*find(locate(path)))
    stored = saved.summaries()
    if json:
        _print_json([_described(saved, stored, tensors)])
        return 0
    for left, right in table_lines(list(_summary(saved, stored).items()), width_of(sys.stdout)):
        print(left + right)
    if tensors:
        print()
        rows = [
            (name, row.dtype, " x ".join(map(str, row.shape)) or "-", str(row.pieces)) for name, row in stored.items()
        ]
        _print_table([("tensor", "type", "shape", "pieces"), *rows])
    return 0


# ---- the rows of ls --------------------------------------------------------------------------------------------------


def _row(found: Found) -> dict[str, Any]:
    unknown = dict.fromkeys(("kind", "size", "saved", "tensors", "ranks", "layout"))
    row: dict[str, Any] = {"step": found.step, "path": str(found.place), **unknown, "state": _state(found)}
    saved = found.saved
    if saved is None:
        return row
    written = (found.place / MANIFEST).written()
    row |= {"kind": saved.kind, "size": saved.size, "layout": saved.manifest["layout"]}
    row |= {"ranks": saved.manifest["world_size"], "saved": written and written.isoformat(timespec="seconds")}
    if not row["state"].startswith("broken"):
        try:
            row["tensors"] = len(saved.summaries())
        except (OSError, ValueError, KeyError, TypeError) as error:
            row["state"] = f"broken: its tensors cannot be listed ({error})"
    return row


def _state(found: Found) -> str:
    if found.leftover:
        return f"{found.leftover}: {LEFTOVERS[found.leftover]}"
    problems = found.check()
    return f"broken: {problems[0]}" if problems else "whole"


def _cell(value: Any, column: str) -> str:
    if value is None:
        return "-"
    shown = {"size": sized, "saved": lambda text: text.replace("T", " ")[:19], "layout": layout_in_words}
    return str(shown.get(column, str)(value))


def layout_in_words(layout: Any) -> str:
    """`dp_shard 2 x tp 2`; `-` for a single rank."""
    if not isinstance(layout, Mapping):
        return str(layout) if layout else "-"
    degrees = {axis: degree for axis, degree in layout.items() if degree != 1}
    return " x ".join(f"{axis} {degree}" for axis, degree in degrees.items()) or "-"


# ---- the words of show -----------------------------------------------------------------------------------------------


def _summary(saved: Saved, stored: Mapping[str, TensorSummary]) -> dict[str, str]:
    trainer, manifest = saved.trainer, saved.manifest
    kinds = {"full": "full: can be resumed", "model": "weights only"}
    written = (saved.place / MANIFEST).written()
    weights = {name: tensor for name, tensor in stored.items() if "/" not in name or name.startswith("model/")}
    pieces = sum(tensor.pieces for tensor in stored.values())
    blocks = sum(len(recorded["crc32"]) for recorded in saved.files.values())
    problems = saved.check_sizes()
    return {
        "checkpoint": str(saved.place),
        "step": str(saved.step),
        "kind": kinds.get(saved.kind, str(saved.kind)),
        "saved": "-" if written is None else f"{written:%Y-%m-%d %H:%M:%S}",
        "tokens": f"{trainer['tokens']:,}" if "tokens" in trainer else "-",
        "data": _data(trainer, trainer.get("data", {})),
        "optimizer": trainer.get("optimizer", "-"),
        "tokenizer": trainer.get("tokenizer") or "-",
        "torch": trainer.get("torch", "-"),
        "config": f"sha256 {trainer['config_sha256'][:16]}..." if "config_sha256" in trainer else "-",
        "ranks": _ranks(manifest),
        "model": _model(manifest["architecture"], sum(tensor.elements for tensor in weights.values())),
        "tensors": f"{len(stored)} in {pieces} pieces, {len(weights)} of them weights",
        "files": listed([f"{name} {sized(row['size'])}" for name, row in saved.files.items()], 4),
        "format": f"version {manifest['version']}, checksums of {blocks} blocks",
        "state": "; ".join(map(str, problems)) if problems else "whole (`verify` reads the checksums)",
    }


def _data(trainer: Mapping[str, Any], data: Mapping[str, Any]) -> str:
    if "samples" not in trainer:
        return "-"
    position = f"{trainer['samples']:,} samples read"
    known = {"seq_len": "of {} tokens", "global_batch_size": "in batches of {}", "seed": "seed {}"}
    words = [text.format(data[key]) for key, text in known.items() if key in data]
    return ", ".join([" ".join([position, *words[:1]]), *words[1:]])


def _ranks(manifest: Mapping[str, Any]) -> str:
    layout = layout_in_words(manifest["layout"])
    return str(manifest["world_size"]) + ("" if layout == "-" else f" ({layout})")


def _model(arch: Mapping[str, Any], parameters: int) -> str:
    names = ("n_layers", "dim", "n_heads", "n_kv_heads", "head_dim", "ffn_dim", "vocab_size", "rope_theta")
    sizes = [f"{name} {arch.get(name)}" for name in names]
    return ", ".join([f"{arch.get('family')}", f"{parameters:,} parameters", *sizes])


def _described(saved: Saved, stored: Mapping[str, TensorSummary], tensors: bool) -> dict[str, Any]:
    """Return the manifest without its long parts (checksums and random states); tensors only on request."""
    content = {key: value for key, value in saved.manifest.items() if key not in ("files", "tensors")}
    content["trainer"] = {key: value for key, value in saved.trainer.items() if key != "rng"}
    content["path"] = str(saved.place)
    content["files"] = {name: recorded["size"] for name, recorded in saved.files.items()}
    content["problems"] = [problem._asdict() for problem in saved.check_sizes()]
    content["tensor_count"] = len(stored)
    if tensors:
        content["tensors"] = {name: row._asdict() for name, row in stored.items()}
    return content


def _print_table(rows: Sequence[Sequence[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())


def _print_json(rows: Iterable[Mapping[str, Any]]) -> None:
    for row in rows:
        print(json_format.dumps(row))
