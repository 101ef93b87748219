"""The metrics of a run: rates from wall time, and rows in metrics.jsonl, TensorBoard and W&B."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import math
import netrc
import os
import time
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

import torch

from shardline.config.architecture import Architecture
from shardline.config.schema import Config
from shardline.errors import UserError
from shardline.json_text import parse_json
from shardline.run.device import flops_per_token, peak_flops
from shardline.run.folder import RunFolder
from shardline.storage.atomic import plain_file, read_plain, write_atomically

log = logging.getLogger("shardline")

# One object per logged step has these keys, in this order.
KEYS = (
    "step",
    "loss",
    "grad_norm",
    "lr",
    "tokens",
    "tokens_per_second",
    "tokens_per_second_per_device",
    "step_seconds",
    "data_seconds",
    "memory_gib",
    "mfu",
    "comm_bytes",
)
# Keys for some layouts: seconds that the step waited for data-parallel communication that was not hidden; seconds of
# tensor-parallel communication in the logged step, seconds of it that ranks waited for, and the share that was hidden;
# seconds of the logged step itself with async TP, and of a step that ran serially for comparison;
# the communication numbers for expert parallelism if it runs on the host; the share of the logged step in which the
# pipeline's ranks were idle; bytes of activations that the step sent to host memory. For mixtures of experts: the load
# of the most used expert relative to the mean, the largest of all layers and by layer; the routers' losses, means over
# the layers. For pairs of answers: by how much the reward of the better one is higher, and the share of pairs where it
# is higher.
# For independent workers, since this start of the run: fragments that were averaged, the seconds that rank 0's
# exchanges took, and how many of them it waited for (on a CPU).
# For workers that do not wait for each other: by how many steps the oldest contribution of the step was late, and the
# number of contributions from each worker.
# For replica groups: how many shared the step's batch, this one's place among them (-1: it healed), the steps and heals
# since its start, and how often this step had to be repeated.
OPTIONAL_KEYS = (
    "dp_exposed_seconds",
    "tp_comm_seconds",
    "tp_exposed_seconds",
    "tp_hidden_fraction",
    "tp_overlapped_step_seconds",
    "tp_serial_step_seconds",
    "ep_comm_seconds",
    "ep_exposed_seconds",
    "ep_hidden_fraction",
    "pp_bubble_fraction",
    "offloaded_bytes",
    "expert_load",
    "expert_load_layers",
    "aux_loss",
    "z_loss",
    "reward_margin",
    "reward_accuracy",
    "staleness",
    "contributions",
    "outer_steps",
    "outer_comm_seconds",
    "outer_exposed_seconds",
    "replica_groups",
    "replica_place",
    "replica_commits",
    "replica_heals",
    "replica_repeats",
)


class Meter:
    """Rates between logged steps. Time inside `paused()` (validation, saving) does not count.

    `stepped` gets the tokens of the global batch, each counted once, however many ranks work on it.
    """

    def __init__(
        self,
        arch: Architecture,
        seq_len: int,
        device: torch.device,
        dtype: torch.dtype,
        devices: int = 1,
        clock: Callable[[], float] = time.perf_counter,
        more_flops: float = 0.0,
    ) -> None:
        """`more_flops` is what LoRA adds to the model's FLOPs, minus those of gradients that are not computed."""
        self.flops, self.peak = flops_per_token(arch, seq_len) + more_flops, peak_flops(device, dtype)
        self.devices, self.clock = devices, clock
        self.restart()

    def restart(self) -> None:
        self.started = self.clock()
        self.steps = self.tokens = 0
        self.data = 0.0

    def fetched(self, seconds: float) -> None:
        """Add the time that a step waited for its data."""
        self.data += seconds

    def stepped(self, tokens: int) -> None:
        self.steps += 1
        self.tokens += tokens

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        began = self.clock()
        try:
            yield
        finally:
            self.started += self.clock() - began

    def rates(self) -> dict[str, float | None]:
        """Means over the steps since the last call. MFU: model FLOPs (`flops_per_token`) relative to the peak."""
        elapsed = max(self.clock() - self.started, 1e-9)
        steps = max(self.steps, 1)
        per_device = self.tokens / elapsed / self.devices
        row = {
            "tokens_per_second": self.tokens / elapsed,
            "tokens_per_second_per_device": per_device,
            "step_seconds": elapsed / steps,
            "data_seconds": self.data / steps,
            "mfu": None if self.peak is None else per_device * self.flops / self.peak,
        }
        self.restart()
        return row


class Sink(Protocol):
    """A destination for scalars besides metrics.jsonl."""

    def write(self, step: int, scalars: dict[str, float]) -> None: ...

    def write_texts(self, step: int, rows: Sequence[dict[str, Any]]) -> None: ...

    def close(self) -> None: ...


class MetricsLog:
    """Writes a run's rows on rank 0; with `metrics.save_for_all_ranks`, every rank writes to TensorBoard and W&B."""

    def __init__(self, config: Config, run_folder: RunFolder, start_step: int = 0, rank: int = 0) -> None:
        self.path, self.samples_path, self.rank = run_folder.metrics_path, run_folder.samples_path, rank
        self.file: Any = None
        if rank == 0:
            if run_folder.resume or run_folder.again:
                move_rows_after(run_folder.metrics_path, start_step)
                move_rows_after(run_folder.samples_path, start_step)
            with _writing(self.path):
                self.file = open(self.path, "ab", buffering=0, opener=plain_file)  # noqa: SIM115
        self.sinks: list[Sink] = []
        if rank == 0 or config.metrics.save_for_all_ranks:
            if config.metrics.enable_tensorboard:
                self.sinks.append(TensorBoard(config, run_folder, start_step, rank))
            if config.metrics.enable_wandb:
                self.sinks.append(WandB(config, run_folder, rank))

    def log(self, row: dict[str, Any]) -> None:
        """Record a logged step. `row` has all of KEYS, may have some of OPTIONAL_KEYS, and no other keys."""
        differing = set(row).difference(OPTIONAL_KEYS) ^ set(KEYS)
        if differing:
            raise ValueError(f"metrics row: missing or unknown keys: {', '.join(sorted(differing))}")
        self._write({key: row[key] for key in (*KEYS, *OPTIONAL_KEYS) if key in row})

    def log_validation(self, step: int, found: dict[str, float]) -> None:
        self._write({"step": step} | {f"validation_{name}": value for name, value in found.items()})

    def log_samples(self, rows: Sequence[dict[str, Any]]) -> None:
        """Add samples, each with its `step`, `prompt` and `text`, to samples.jsonl, TensorBoard and W&B."""
        if self.rank == 0:
            lines = b"".join(json.dumps(row, ensure_ascii=False).encode("utf-8", "replace") + b"\n" for row in rows)
            with _writing(self.samples_path), open(self.samples_path, "ab", buffering=0, opener=plain_file) as file:
                _append(file, lines)
        self._tell_sinks(lambda sink: sink.write_texts(rows[0]["step"], rows))

    def close(self) -> None:
        if self.file is not None:
            self.file.close()
            self.file = None
        for sink in self.sinks:
            try:
                sink.close()
            except OSError as error:
                log.warning("%s is incomplete: %s", type(sink).__name__, error)
        self.sinks = []

    def _write(self, row: dict[str, Any]) -> None:
        if self.file is not None:
            with _writing(self.path):
                _append(self.file, to_line(row))
        scalars = dict(_scalars(row))
        step = scalars.pop("step")
        self._tell_sinks(lambda sink: sink.write(int(step), scalars))

    def _tell_sinks(self, tell: Callable[[Sink], None]) -> None:
        for sink in list(self.sinks):
            try:
                tell(sink)
            except OSError as error:  # metrics.jsonl has the row: the run goes on
                log.warning("%s is no longer written: %s", type(sink).__name__, error)
                self.sinks.remove(sink)


def to_line(row: dict[str, Any]) -> bytes:
    """One line of standard JSON: NaN and infinity, which it cannot express, become null."""
    strange = {key: value for key, value in row.items() if isinstance(value, float) and not math.isfinite(value)}
    if strange:
        values = ", ".join(f"{key} {value}" for key, value in strange.items())
        log.warning("step %s: %s; null in metrics.jsonl", row["step"], values)
    return json.dumps({**row, **dict.fromkeys(strange)}, allow_nan=False).encode() + b"\n"


def read_rows(text: str, name: str = "metrics.jsonl") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (line, row) for each complete line; an incomplete line, such as a crash leaves, is logged and skipped."""
    for number, line in enumerate(text.split("\n"), start=1):  # not splitlines: a text may hold other line separators
        if not line:
            continue
        try:
            row = parse_json(line)
            if not isinstance(row["step"], int):
                raise TypeError
        except (ValueError, KeyError, TypeError):
            log.warning("%s line %d is incomplete and skipped: %.60r", name, number, line)
            continue
        yield line + "\n", row


def move_rows_after(path: Path, step: int) -> None:
    """Move rows of steps that will be trained again to the end of NAME.before-resume.jsonl."""
    if not path.exists():
        return
    moved_path = path.with_name(f"{path.stem}.before-resume{path.suffix}")
    rows = list(read_rows(read_plain(path), path.name))
    moved = [line for line, row in rows if row["step"] > step]
    if moved:
        # First copy durably, then remove: a crash in between duplicates rows but loses none.
        with _writing(moved_path), open(moved_path, "a", encoding="utf-8", opener=plain_file) as file:
            file.writelines(moved)
            file.flush()
            os.fsync(file.fileno())
        log.info("%d %s rows after step %d moved to %s", len(moved), path.stem, step, moved_path.name)
    write_atomically(path, "".join(line for line, row in rows if row["step"] <= step))


def _append(file: Any, line: bytes) -> None:
    """Write a complete line or nothing, unbuffered: it has left this process when the call returns."""
    written = file.write(line)
    if written < len(line):  # this happens when a disk fills up
        file.truncate(file.seek(0, os.SEEK_END) - written)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@contextlib.contextmanager
def _writing(path: Path, what: str = "") -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(f"{what}cannot write {path}: {error.strerror or error}") from error


def _scalars(row: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """The numbers of a row, with tables flattened: `comm_bytes/DIMENSION`."""
    for key, value in row.items():
        if isinstance(value, dict):
            yield from ((f"{key}/{name}", inner) for name, inner in value.items())
        elif value is not None:
            yield key, value


class TensorBoard:
    """Event files under `metrics.save_tb_folder`, in rank_N if every rank writes."""

    def __init__(self, config: Config, run_folder: RunFolder, start_step: int, rank: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise UserError(
                "metrics.enable_tensorboard needs a package that is not installed: pip install 'shardline[tensorboard]'"
            ) from error
        folder = run_folder.path / config.metrics.save_tb_folder
        if config.metrics.save_for_all_ranks:
            folder = folder / f"rank_{rank}"
        # After a resume, TensorBoard hides the old rows of steps that are trained again.
        purge = start_step + 1 if run_folder.resume or run_folder.again else None
        with _writing(folder, "metrics.save_tb_folder: "):
            self.writer = SummaryWriter(str(folder), purge_step=purge)

    def write(self, step: int, scalars: dict[str, float]) -> None:
        for name, value in scalars.items():
            self.writer.add_scalar(name, value, step)

    def write_texts(self, step: int, rows: Sequence[dict[str, Any]]) -> None:
        for number, row in enumerate(rows, start=1):
            self.writer.add_text(f"sample/{number}", f"{row['prompt']}{row['text']}", step)

    def close(self) -> None:
        self.writer.close()


def check_wandb(config: Config) -> None:
    """Refuse W&B without a login before data is read; otherwise it would ask for one, or fail, much later."""
    if not config.metrics.enable_wandb:
        return
    try:
        settings = import_module("wandb").setup().settings
    except Exception as error:  # a package without settings will start, or fail with a reason, when the run starts
        log.debug("settings of W&B: %s", error)
        return
    mode = config.metrics.wandb_mode or getattr(settings, "mode", None) or "online"
    keys = [getattr(settings, name, None) for name in ("api_key", "identity_token_file")]
    if mode in ("online", "shared", "run") and not any(keys) and not _has_netrc(getattr(settings, "base_url", "")):
        raise UserError(
            "metrics.enable_wandb: W&B has no login here: run `wandb login`, set WANDB_API_KEY, or write the run to"
            " disk with metrics.wandb_mode = 'offline' (`wandb sync` sends it later)"
        )


def _has_netrc(url: str) -> bool:
    """Whether a netrc file, such as `wandb login` writes, has a password for the host."""
    places = [os.environ.get("NETRC") or "~/.netrc", "~/_netrc"]
    for place in places:
        with contextlib.suppress(OSError, netrc.NetrcParseError):
            if netrc.netrc(os.path.expanduser(place)).authenticators(urlsplit(url).hostname or "api.wandb.ai"):
                return True
    return False


class WandB:
    """One W&B run per run folder; a resumed run continues it. W&B reads its own WANDB_* variables too."""

    def __init__(self, config: Config, run_folder: RunFolder, rank: int) -> None:
        try:
            import wandb
        except ImportError as error:
            raise UserError(
                "metrics.enable_wandb needs a package that is not installed: pip install 'shardline[wandb]'"
            ) from error
        id_path = run_folder.path / "log" / f"wandb-{rank}.txt"
        earlier = read_plain(id_path).strip() if (run_folder.resume or run_folder.again) and id_path.exists() else None
        section, known = config.metrics, os.environ.get
        name = section.wandb_name or known("WANDB_NAME") or known("WANDB_RUN_NAME") or run_folder.path.resolve().name
        every_rank = section.save_for_all_ranks
        try:
            self.run = wandb.init(
                project=section.wandb_project or known("WANDB_PROJECT", "shardline"),
                entity=section.wandb_entity or known("WANDB_ENTITY") or known("WANDB_TEAM"),
                name=f"{name}-rank{rank}" if every_rank else name,
                group=section.wandb_group or (name if every_rank else known("WANDB_RUN_GROUP")),
                id=earlier or section.wandb_run_id or known("WANDB_RUN_ID"),
                tags=section.wandb_tags or None,
                mode=section.wandb_mode,
                resume="allow",
                dir=str(run_folder.path / "log"),
                config=config.model_dump(mode="json"),
            )
        except Exception as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise UserError(
                f"metrics.enable_wandb: W&B did not start: {reason} (metrics.wandb_mode = 'offline' needs no account or"
                " network)"
            ) from error
        write_atomically(id_path, f"{self.run.id}\n")
        # Rows are ordered by our step: W&B's own counter cannot go back when a run resumes from an earlier one.
        self.run.define_metric("*", step_metric="step")

    def write(self, step: int, scalars: dict[str, float]) -> None:
        self.run.log({"step": step, **scalars})

    def write_texts(self, step: int, rows: Sequence[dict[str, Any]]) -> None:
        import wandb

        cells = [[step, row["prompt"], row["text"]] for row in rows]
        self.run.log({"step": step, "samples": wandb.Table(columns=["step", "prompt", "text"], data=cells)})

    def close(self) -> None:
        self.run.finish()
