"""`shardline doctor`: examine machines, ranks and storage before a run, and say what would break it or slow it down.

Every rank takes its own readings; rank 0 judges them and prints. Exit code 1 if something would break a run.
"""

from __future__ import annotations

import contextlib
import json as json_lines
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import torch

from shardline.comm.mesh import Mesh
from shardline.config.layout import KEYS
from shardline.config.names import LAUNCHER_VARIABLE
from shardline.config.schema import Config, leaves
from shardline.data.loader import fitted
from shardline.models.flavors import resolve
from shardline.parallel.apply import make_model
from shardline.precision.mixed import choose_precision
from shardline.run.device import choose_device, device_identity
from shardline.run.options import TrainOptions
from shardline.tools.bench.ranks import on_ranks, rank_count
from shardline.tools.doctor.findings import Finding, findings
from shardline.tools.doctor.host import read_host
from shardline.tools.doctor.ranks import device_rates, link_rate, read_ranks
from shardline.tools.doctor.readings import CheckpointNeed, Examination, HostState, Rate, StorageState
from shardline.tools.doctor.storage import read_storage
from shardline.training.memory_need import save_bytes
from shardline.words import counted, width_of, wrapped

MARKS = {"ok": "ok", "warning": "WARN", "error": "ERROR"}
COLUMNS = 100  # of a finding's text
LEAST_COLUMNS = 30
VERDICT_VARIABLE = "SHARDLINE_DOCTOR_VERDICT"  # names a file


def run(config: Config, start: TrainOptions, named: bool, json: bool) -> int:
    """Examine one process, or every rank of a job. `named`: a config was given, so the size of checkpoints is known."""
    need = checkpoint_need(config) if named else None
    folder = Path(config.job.dump_folder or "outputs")
    if rank_count(start, 1) == 1:
        return finish(examine(None, choose_device(), folder, need), json)

    def work(mesh: Mesh, device: torch.device) -> int:
        seen = examine(mesh, device, folder, need)
        return leave_verdict(mesh.from_rank_0(lambda: finish(seen, json)))

    with verdict_of_ranks() as verdict:
        return on_ranks("doctor", _without_layout(config), start, 1, work) or int(verdict.read_text() or 0)


@contextlib.contextmanager
def verdict_of_ranks() -> Iterator[Path]:
    """Provide, in the launcher, a file for the exit code: ranks exit with 0, because none of them has failed."""
    if LAUNCHER_VARIABLE in os.environ:
        yield Path(os.devnull)
        return
    with tempfile.TemporaryDirectory(prefix="shardline-doctor-") as folder:
        file = Path(folder) / "verdict"
        file.write_text("")
        os.environ[VERDICT_VARIABLE] = str(file)
        try:
            yield file
        finally:
            del os.environ[VERDICT_VARIABLE]


def leave_verdict(code: int) -> int:
    """Pass the exit code to this machine's launcher; under another launcher, return it as the rank's own."""
    if LAUNCHER_VARIABLE not in os.environ:
        return code
    if os.environ.get("LOCAL_RANK") == "0":
        Path(os.environ[VERDICT_VARIABLE]).write_text(str(code))
    return 0


def _without_layout(config: Config) -> Config:
    """Return the config without its degrees, for any number of ranks: the layout does not affect the examination."""
    keys = [f"parallelism.{key}" for key in KEYS.values()]
    return config.replace({key: leaves()[key].default for key in keys})


def checkpoint_need(config: Config) -> CheckpointNeed:
    """Return the space that checkpoints need; the whole model is built without memory."""
    precision = choose_precision(config, choose_device(), has_bfloat16=True)
    arch = fitted(resolve(config.model), config)
    model, _ = make_model(arch, config, None, precision)
    size = save_bytes(model, config, precision)
    return CheckpointNeed(size, config.checkpoint.keep_latest_k, config.checkpoint.enable)


# ---- looking ---------------------------------------------------------------------------------------------------------


def examine(mesh: Mesh | None, device: torch.device, folder: Path, need: CheckpointNeed | None) -> Examination:
    """Return all readings, on every rank. The first rank on a machine reads it; the first on a device measures it."""
    ranks = read_ranks(mesh, device)
    rank = 0 if mesh is None else mesh.rank
    hosts = [state.host for state in ranks]
    leads = hosts.index(hosts[rank]) == rank
    own: tuple[HostState, StorageState] | None = (read_host(), read_storage(folder)) if leads else None
    identity = device_identity(device, rank) if device.type == "cuda" else hosts[rank]
    identities = [identity] if mesh is None else mesh.from_everyone(identity)
    rates: list[Rate] = device_rates(rank, device) if identities.index(identity) == rank else []
    if mesh is not None and mesh.world_size > 1:
        link = link_rate(mesh, device, len(set(hosts)))
        everyone = mesh.from_everyone((own, rates))
        states = [of_host for of_host, _ in everyone if of_host is not None]
        rates = [rate for _, some in everyone for rate in some] + [link]
    else:
        states = [own] if own is not None else []
    return Examination(
        [host for host, _ in states], ranks, [place for _, place in states], rates, need, job=len(ranks) > 1
    )


# ---- telling ---------------------------------------------------------------------------------------------------------


def finish(seen: Examination, json: bool) -> int:
    """Print the findings; return the exit code."""
    found = findings(seen)
    broken = sum(one.level == "error" for one in found)
    if json:
        print(json_lines.dumps({"findings": [asdict(one) for one in found], "readings": seen.as_json()}))
    else:
        print(report(found))
    sys.stdout.flush()
    return 1 if broken else 0


def report(found: list[Finding]) -> str:
    width = max(len(one.topic) for one in found)
    indent = " " * (width + 9)
    terminal = width_of(sys.stdout)
    columns = COLUMNS if terminal is None else max(min(COLUMNS, terminal - len(indent)), LEAST_COLUMNS)
    lines = []
    for one in found:
        text = wrapped(one.text, columns).replace("\n", f"\n{indent}")
        lines.append(f"{MARKS[one.level]:<5}  {one.topic:<{width}}  {text}")
        if one.remedy:
            lines.append(indent + wrapped(f"remedy: {one.remedy}", columns).replace("\n", f"\n{indent}"))
    count = {level: sum(one.level == level for one in found) for level in MARKS}
    verdict = f"{counted(count['error'], 'finding')} would break a run" if count["error"] else "nothing breaks a run"
    slow = f", {counted(count['warning'], 'warning')}" if count["warning"] else ""
    return "\n".join([*lines, "", verdict + slow])
