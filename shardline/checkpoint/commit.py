"""How ranks write a checkpoint together, in two phases: every rank writes its shard, then rank 0 commits all of them.

    rank 0       makes step-200.partial
    every rank   writes its shard with checksums -> fsync -> reports to rank 0 what is in it
    rank 0       receives all reports -> merges them -> manifest -> fsync -> renames to step-200 -> prunes -> verdict
    every rank   receives the verdict: saved, or the same error on all

Writers run in background threads. They exchange messages through the job's store and never through process groups: a
collective issued by a background thread would interleave with those of training.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from shardline.adapters.lora import trained_shapes
from shardline.adapters.peft_files import write_peft
from shardline.checkpoint import format as files
from shardline.checkpoint.assets import assets_at, special_tokens
from shardline.checkpoint.background import Cancelled, SaveActivity
from shardline.checkpoint.mirror import Mirror
from shardline.checkpoint.reader import ShardFiles, TensorView
from shardline.checkpoint.shards import HeldTensor, Scratch, TensorPiece, take
from shardline.checkpoint.staging import Staging
from shardline.comm import collectives
from shardline.comm.mesh import Mesh
from shardline.comm.store import SignedStore, connect_store, rank_key
from shardline.config.schema import Checkpoint
from shardline.errors import UserError
from shardline.models.decoder import Decoder
from shardline.models.huggingface.files import copy_assets, write_hf
from shardline.storage.atomic import plain_file, sync_folder
from shardline.storage.blocks import record_file
from shardline.storage.crash_points import reach
from shardline.storage.safetensors import Entry, entries_from, name_of_type, write_tensors
from shardline.words import listed

log = logging.getLogger("shardline")
VERDICT_SECONDS = 30.0  # extra wait for the verdict: rank 0 is to be the first to notice that a rank is late
POLL = timedelta(seconds=1)  # how often a wait checks whether it was cancelled
Sizes = list[tuple[int, int]]  # (key, bytes) of each tensor that a rank holds


# ---- who writes what -------------------------------------------------------------------------------------------------


def share_out(held: list[Sizes]) -> list[set[int]]:
    """Return the keys that each rank writes: largest first, each to the holder with the fewest bytes so far.

    rank 0 holds a b c     rank 1 holds a b d     a is 6 bytes, b 3, c 2, d 5    ->   rank 0: a c, rank 1: b d
    """
    sizes: dict[int, int] = {}
    holders: dict[int, list[int]] = {}
    for rank, rows in enumerate(held):
        for key, size in rows:
            sizes[key] = size
            holders.setdefault(key, []).append(rank)
    load, owned = [0] * len(held), [set[int]() for _ in held]
    # Tensors that only one rank holds come first; the rest are balanced around them.
    for key in sorted(sizes, key=lambda key: (len(holders[key]) > 1, -sizes[key], key)):
        owner = min(holders[key], key=lambda rank: (load[rank], rank))
        load[owner] += sizes[key]
        owned[owner].add(key)
    return owned


class Owners:
    """This rank's share, which all ranks agree on once, and again whenever what some rank holds has changed."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self._known: dict[str, tuple[Sizes, set[int]]] = {}

    def owned(self, kind: str, held: list[HeldTensor]) -> list[HeldTensor]:
        """Return what this rank writes in a save of this kind; a collective of all ranks."""
        if self.mesh.world_size == 1:
            return held
        sizes = [(tensor.key, tensor.bytes) for tensor in held]
        known, mine = self._known.get(kind, ([], set()))
        changed = torch.tensor([float(sizes != known or not known)])  # on the host: the device may be busy
        collectives.max_in_place(changed, "world")
        if changed.item():
            mine = share_out(self.mesh.from_everyone(sizes))[self.mesh.rank]
            self._known[kind] = (sizes, mine)
        return [tensor for tensor in held if tensor.key in mine]


# ---- messages --------------------------------------------------------------------------------------------------------


class Messages:
    """Short messages between the writers of one job."""

    def __init__(self, store: SignedStore) -> None:
        self.signed, self.store = store, store.store

    def send(self, key: str, message: Any) -> None:
        self.signed.write(key, {"is": message})

    def receive(self, key: str, deadline: float, check: Callable[[], None], late: str) -> Any:
        """Wait for a message; raise a `UserError` with the text `late` after `deadline` (of `time.monotonic`).

        `check` is called every second; it raises to end the wait.
        """
        while True:
            check()
            with contextlib.suppress(dist.DistStoreError):
                self.store.wait([key], POLL)
                found = self.signed.opened(key, self.store.get(key), dict)
                if found is not None:
                    return found["is"]
                time.sleep(POLL.total_seconds())  # the message was not signed by this job
            if time.monotonic() > deadline:
                raise UserError(late)


# ---- one save --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Save:
    """One save, as handed to the background thread."""

    number: int
    step: int
    kind: files.Kind
    owned: list[HeldTensor]
    trainer: dict[str, Any]
    rng: dict[str, Any]
    hf_dtype: torch.dtype | None  # the weights' type, if the save is to be a Hugging Face folder
    staged: bool


class LastSave(NamedTuple):
    """The last save that was committed."""

    step: int
    kind: files.Kind
    size: int = 0  # bytes; 0 if it was saved before this start


class CheckpointWriter:
    """This rank's part in saves; `write` runs in a background thread."""

    def __init__(
        self, section: Checkpoint, model: Decoder, mesh: Mesh, mirror: Mirror | None, staging: Staging | None
    ) -> None:
        self.arch, self.shapes, self.how = model.arch, trained_shapes(model), model.adaptation
        self.section, self.mesh, self.mirror, self.staging = section, mesh, mirror, staging
        self._scratch = Scratch()
        self._shard = files.shard_name(mesh.rank, mesh.world_size)
        self._messages: Messages | None = None
        self.last: LastSave | None = None

    def connect(self) -> None:
        """Open this writer's own connection to the store; a collective. A single process has a store in its memory.

        Earlier runs of these processes may have used the store, so ranks agree on a prefix that is new.
        """
        if self._messages is None:
            token = self.mesh.from_rank_0(lambda: os.urandom(8).hex())
            store = connect_store() if self.mesh.world_size > 1 else dist.HashStore()
            self._messages = Messages(SignedStore(store, f"checkpoint/{token}", rank_key()))

    def write(self, save: Save, final: Path, activity: SaveActivity) -> None:
        began, messages = time.monotonic(), self._messages
        deadline = began + self.section.save_timeout_seconds
        assert messages is not None
        device = next((tensor.tensor.device for tensor in save.owned if tensor.tensor.is_cuda), None)
        if device is not None:
            torch.cuda.set_device(device)  # a new thread begins with device 0
        prefix, partial = f"{save.number}/", final.with_name(f"{final.name}.partial")
        if self.mesh.rank == 0:
            messages.send(prefix + "folder", _make_folder(partial))
        failed: BaseException | None = None
        try:
            activity.at = f"waiting for rank 0 to make {partial}"
            problem = messages.receive(prefix + "folder", deadline, activity.check, f"rank 0 did not make {partial}")
            report = {"error": problem} if problem else self._write_shard(save, partial, activity)
        except BaseException as error:
            failed = error
            cancelled = isinstance(error, Cancelled)
            report = {"error": "the save was interrupted" if cancelled else f"{reason(error)} ({self._shard})"}
        messages.send(f"{prefix}shard-{self.mesh.rank}", report)
        reach("shard-reported", partial / self._shard)
        if isinstance(failed, Cancelled):
            raise failed
        if self.mesh.rank == 0:
            verdict = self._commit(messages, save, final, partial, deadline, activity)
            reach("before-verdict", final)
            messages.send(prefix + "verdict", verdict)
            if save.number > 1:  # every rank has reported its shard, so it has received the previous verdict
                messages.store.delete_key(f"{save.number - 1}/verdict")
        else:
            activity.at = f"waiting for rank 0 to finish {final}"
            late = f"checkpoint {final} was not saved: rank 0 did not finish it; earlier ones are intact"
            verdict = messages.receive(prefix + "verdict", deadline + VERDICT_SECONDS, activity.check, late)
        if verdict["error"]:
            if failed is not None and not isinstance(failed, OSError | UserError):
                raise failed  # a bug, with its traceback
            raise UserError(f"checkpoint {final} was not saved: {verdict['error']}; earlier ones are intact")
        self.last = LastSave(save.step, save.kind, verdict["size"])
        older = f" (removed {verdict['removed']} older)" if verdict["removed"] else ""
        event = {"event": "save", **self.last._asdict(), "seconds": time.monotonic() - began, "staged": save.staged}
        log.info("saved %s%s", final, older, extra={"event": event})

    def _write_shard(self, save: Save, partial: Path, activity: SaveActivity) -> dict[str, Any]:
        """Write this rank's share; returns the report for rank 0."""
        if save.staged and self.staging is not None:
            activity.at = "copying the state to the host"
            self.staging.wait()
        report: dict[str, Any] = {"file": None, "tensors": {}, "rng": save.rng}
        if save.owned:
            path = partial / self._shard
            entries = [self._entry(held, piece, activity, path) for held in save.owned for piece in held.pieces]
            activity.at = f"opening {path}"
            report |= {"file": self._shard, "record": write_tensors(path, entries), "tensors": _table(save.owned)}
        return report

    def _entry(self, held: HeldTensor, piece: TensorPiece, activity: SaveActivity, path: Path) -> Entry:
        def read() -> Iterator[torch.Tensor]:
            activity.at = f"writing {path}, {piece.name}"
            for rows in take(held, piece, self._scratch):
                activity.check()
                yield rows

        return Entry(piece.key, piece.place.size, held.dtype, read)

    def _commit(
        self, messages: Messages, save: Save, final: Path, partial: Path, deadline: float, activity: SaveActivity
    ) -> dict[str, Any]:
        """Rank 0's second phase; returns the verdict.

        It is {"error": text, or "" if the save succeeded, "removed": count of older checkpoints, "size": bytes}.
        """
        try:
            reports = []
            for rank in range(self.mesh.world_size):
                shard = files.shard_name(rank, self.mesh.world_size)
                activity.at = f"waiting for rank {rank} to write {partial / shard}"
                late = f"rank {rank} did not write {shard} in {self.section.save_timeout_seconds} s"
                reports.append(messages.receive(f"{save.number}/shard-{rank}", deadline, activity.check, late))
            reach("reports-complete", partial)
            for key in ("folder", *(f"shard-{rank}" for rank in range(self.mesh.world_size))):
                messages.store.delete_key(f"{save.number}/{key}")
            errors = list(dict.fromkeys(report["error"] for report in reports if "error" in report))
            if errors:
                raise UserError("; ".join(errors))
            activity.check()
            activity.at = f"writing {partial / files.MANIFEST}"
            manifest = self._manifest(save, partial, merge(reports))
            publish(partial, final, manifest)
            removed = self._prune(save.step, final.parent, activity)
            if self.mirror is not None:
                self.mirror.nudge()
            size = sum(recorded["size"] for recorded in manifest["files"].values())
            return {"error": "", "removed": removed, "size": size}
        except Cancelled:
            raise
        except BaseException as error:
            shutil.rmtree(partial, ignore_errors=True)
            named = f" ({files.MANIFEST})" if isinstance(error, OSError) else ""
            return {"error": reason(error) + named, "removed": 0, "size": 0}

    def _manifest(self, save: Save, partial: Path, merged: Merged) -> dict[str, Any]:
        written = {name.removeprefix("model/") for name in merged.tensors if name.startswith("model/")}
        differing = sorted(written ^ self.shapes.keys())
        if differing:
            raise RuntimeError(f"the tensors that ranks wrote are not those of the model: {listed(differing)}")
        recorded, tensors = merged.files, merged.tensors
        if save.hf_dtype is not None:
            recorded, tensors = self._to_hf(partial, merged, save.hf_dtype, save.trainer), {}
        trainer = {**save.trainer, "rng": merged.rng}
        ranks, layout = self.mesh.world_size, asdict(self.mesh.layout)
        return files.manifest(save.step, save.kind, self.arch, trainer, recorded, tensors, ranks, layout)

    def _to_hf(self, partial: Path, merged: Merged, dtype: torch.dtype, trainer: dict[str, Any]) -> dict[str, Any]:
        """Turn the shards into a Hugging Face folder, one tensor at a time; returns the records of its files.

        A run with LoRA saves an adapter in the format of `peft`.
        """
        weights = TensorView(ShardFiles(partial, merged.files, merged.tensors), "model/")
        assets = assets_at(trainer["tokenizer"])
        if self.how is not None:
            records = write_peft(partial / "hf", weights, self.how, self.arch, trainer["lora"]["base"]["path"] or None)
            if assets is not None:
                copy_assets(assets, partial / "hf")
        else:
            records = write_hf(
                entries_from(weights, self.shapes),
                self.arch,
                partial / "hf",
                dtype,
                assets_from=assets,
                special_tokens=special_tokens(trainer["tokenizer"]),
            )
        for name in merged.files:
            (partial / name).unlink()
        for path in sorted((partial / "hf").iterdir()):
            path.rename(partial / path.name)
        (partial / "hf").rmdir()
        return {path.name: records.get(path.name) or record_file(path) for path in sorted(partial.iterdir())}

    def _prune(self, step: int, folder: Path, activity: SaveActivity) -> int:
        """Remove older checkpoints and return how many; failing to remove one does not make this save fail."""
        activity.at = f"removing older checkpoints of {folder}"
        copying = set() if self.mirror is None else self.mirror.protected()
        try:
            return len(files.prune(folder, self.section.keep_latest_k, protected={step, *copying}))
        except OSError as error:
            log.warning("older checkpoints of %s were not removed: %s", folder, reason(error))
            return 0


class Merged(NamedTuple):
    """The manifest's tables of files and tensors, and the random state of each rank."""

    files: dict[str, Any]
    tensors: dict[str, Any]
    rng: list[Any]


def merge(reports: list[dict[str, Any]]) -> Merged:
    """Merge the reports in rank order; together the ranks must have written every element once."""
    recorded: dict[str, Any] = {}
    tensors: dict[str, Any] = {}
    for report in reports:
        number = len(recorded)
        if report["file"] is not None:
            recorded[report["file"]] = report["record"]
        for name, row in report["tensors"].items():
            entry = tensors.setdefault(name, {"dtype": row["dtype"], "shape": row["shape"], "pieces": []})
            if (entry["dtype"], entry["shape"]) != (row["dtype"], row["shape"]):
                raise RuntimeError(f"ranks hold {name} as {entry['dtype']} {entry['shape']} and {row}")
            entry["pieces"] += [[number, *place] for place in row["places"]]
    for name, entry in tensors.items():
        dimensions = len(entry["shape"])
        held = sum(math.prod(piece[1 + dimensions :]) for piece in entry["pieces"])
        if held != math.prod(entry["shape"]):
            raise RuntimeError(f"ranks wrote {held} elements of {name} {entry['shape']}")
    return Merged(recorded, tensors, shortened_rng([report["rng"] for report in reports]))


def shortened_rng(states: list[dict[str, Any]]) -> list[Any]:
    """Replace a state equal to an earlier rank's by that rank's number: most often all ranks have the same."""
    first = [states.index(state) for state in states]
    return [state if first[rank] == rank else first[rank] for rank, state in enumerate(states)]


def _table(owned: list[HeldTensor]) -> dict[str, Any]:
    """Rows of the manifest's `tensors` for one file: start and size of each piece."""
    table: dict[str, Any] = {}
    for held in owned:
        for piece in held.pieces:
            row = {"dtype": name_of_type(held.dtype), "shape": list(piece.shape), "places": list[list[int]]()}
            table.setdefault(piece.name, row)["places"].append([*piece.place.start, *piece.place.size])
    return table


def _make_folder(partial: Path) -> str:
    """Make an empty folder; returns what went wrong, or ""."""
    try:
        if partial.is_symlink():
            partial.unlink()
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    except OSError as error:
        return reason(error)
    return ""


def publish(partial: Path, final: Path, content: dict[str, Any]) -> None:
    """Write the manifest into `partial`, make everything durable and rename the folder to `final`."""
    with open(partial / files.MANIFEST, "w", opener=plain_file) as file:
        file.write(files.manifest_text(content))
        file.flush()
        os.fsync(file.fileno())
    sync_folder(partial)
    reach("manifest-written", partial)
    put_in_place(partial, final)


def put_in_place(partial: Path, final: Path) -> None:
    """Rename `partial` to `final`, replacing what is there."""
    reach("before-rename", partial)
    if final.exists():
        replaced = final.with_name(final.name + ".replaced")
        shutil.rmtree(replaced, ignore_errors=True)
        final.rename(replaced)
        partial.rename(final)
        with contextlib.suppress(OSError):  # the next pruning removes it
            files.remove(replaced)
    else:
        partial.rename(final)
    sync_folder(final.parent)
    reach("renamed", final)


def reason(error: BaseException) -> str:
    """Why something failed, in the words of the operating system or of our own error."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
