"""`shardline train`: refuse what cannot run, then start the ranks, or be one of them."""

from __future__ import annotations

import functools
import os
import socket
import time
from pathlib import Path

from shardline.config.load import handed_over
from shardline.config.names import LAUNCHER_VARIABLE
from shardline.config.schema import Config, leaves
from shardline.errors import UserError
from shardline.launch.preflight import check_data, check_start, fitting_layout
from shardline.launch.secret import job_secret
from shardline.run.downloads import downloaded
from shardline.run.enforcer import enforced_stop
from shardline.run.options import TrainOptions, node_range
from shardline.run.signals import starting_job
from shardline.run.stop import exit_code, why_not_saved
from shardline.words import to_stderr

BACKENDS = ("static", "c10d")
NAME_SECONDS = 10.0  # where machines start together, the name of the first one may resolve a little later


def train(config: Config, options: TrainOptions) -> int:
    """Train, and return the exit code: docs/preemption.md has the list."""
    least, nodes = node_range(options.nnodes)
    started = started_ranks()
    is_elastic = least < nodes or options.max_restarts > 0
    if started or not is_elastic:
        fitting_layout(config, started or nodes * options.nproc)
    else:  # the launcher later takes as many machines as fit
        reasons = [misfit(config, number * options.nproc) for number in range(least, nodes + 1)]
        if all(reasons):
            raise UserError(reasons[-1])
    _note_idle(options, nodes, bool(started))
    _note_lost_machine(config, is_elastic and not started)
    if is_elastic and not started and not config.checkpoint.enable:
        to_stderr("warning: checkpoint.enable is false: every restart begins at step 0")
    starts = not started and (is_elastic or nodes * options.nproc > 1)
    if starts or started > 1:
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # read when torch is imported; ranks inherit it
    if starts:
        check_start(config, options, alone=nodes == 1)
    config = downloaded(config)
    if starts:
        check_data(config)
    with starting_job(LAUNCHER_VARIABLE in os.environ):
        return start("train", config, options) if starts else _run(config, options)


def misfit(config: Config, ranks: int) -> str:
    """Why this number of ranks cannot run the layout or the batch; "" if it can."""
    try:
        fitting_layout(config, ranks)
    except UserError as error:
        return str(error)
    return ""


def started_ranks() -> int:
    """The number of ranks in the job that this process is a rank of; 0 where it is to start the ranks itself."""
    given = {name: os.environ[name] for name in ("RANK", "WORLD_SIZE") if name in os.environ}
    if not given:
        return 0
    if len(given) == 1 or not all(text.isdecimal() for text in given.values()):
        shown = ", ".join(f"{name}={text}" for name, text in given.items())
        raise UserError(f"a launcher must set RANK and WORLD_SIZE to whole numbers: found {shown}")
    rank, ranks = int(given["RANK"]), int(given["WORLD_SIZE"])
    if rank >= ranks:
        raise UserError(f"RANK={rank}: expected a number below WORLD_SIZE={ranks}")
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if ranks > 1 and missing:
        raise UserError(f"{ranks} ranks connect to rank 0 at MASTER_ADDR and MASTER_PORT: set {' and '.join(missing)}")
    if ranks > 1:
        _check_address(os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"])
    return ranks


def _check_address(host: str, port: str) -> None:
    if not port.isdecimal() or not 0 < int(port) < 2**16:
        raise UserError(f"MASTER_PORT={port}: expected a port of rank 0's machine, 1 to 65535")
    problem = late_name_problem(host)
    if problem:
        raise UserError(f"MASTER_ADDR={host} has no address: {problem}; set it to that of rank 0's machine")


@functools.cache
def late_name_problem(host: str) -> str:
    """Why a host name does not resolve within a few seconds; "" where it does."""
    deadline = time.monotonic() + NAME_SECONDS
    while problem := name_problem(host):
        if time.monotonic() >= deadline:
            return problem
        time.sleep(0.5)
    return ""


def name_problem(host: str) -> str:
    """Why a host name does not resolve now; "" where it does."""
    try:
        socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
        return ""
    except (OSError, UnicodeError) as error:  # UnicodeError: a label of the name is empty or too long
        return str(getattr(error, "strerror", None) or error)


def _run(config: Config, options: TrainOptions) -> int:
    saving = 0 if why_not_saved(config) else config.checkpoint.save_timeout_seconds
    try:
        with enforced_stop(config.comm.stop_timeout_seconds, saving, is_rank=started_ranks() > 0):
            from shardline.training.trainer import Trainer  # after the fork of the enforcer

            result = Trainer(config, options).train()
    except RuntimeError as error:
        if started_ranks() < 2 or LAUNCHER_VARIABLE in os.environ or options.debug:
            raise
        from shardline.launch.failures import explain

        explanation = explain(error)
        if explanation is None:
            raise
        to_stderr(f"error: {explanation}")
        return 1
    return exit_code(result.stopped_by, config)


def start(command: str, config: Config, options: TrainOptions) -> int:
    """Start this machine's ranks, each with the same command line and this config, and return the exit code."""
    least, nodes = node_range(options.nnodes)
    if nodes > 1:
        _check_endpoint(options, nodes)
    if least < nodes and options.rdzv_backend != "c10d":
        raise UserError(f"--nnodes {options.nnodes}: machines that come and go need --rdzv-backend c10d")
    secret = job_secret(options)
    from shardline.launch.agent import Launch, start_ranks

    return start_ranks(
        Launch(
            entry="shardline.cli.main:dispatch",
            words=(*command.split(), *options.words),
            options=options,
            secret=secret,
            environment=handed_over(config),
            stop_timeout_seconds=config.comm.stop_timeout_seconds,
            save_timeout_seconds=config.checkpoint.save_timeout_seconds,
            preempted_exit_code=exit_code("SIGTERM", config),
            lost_machine_seconds=config.comm.lost_machine_seconds,
            saves=config.checkpoint.enable,
            misfit=functools.partial(misfit, config),
            way_on=functools.partial(_way_on, config, options),
        )
    )


def _way_on(config: Config, options: TrainOptions, folder: str) -> list[str]:
    """What a run that failed has saved, and the command that continues it; nothing where it has saved nothing."""
    from shardline.checkpoint.format import list_folder
    from shardline.run.next_steps import resume_command

    found = list_folder(Path(folder) / config.checkpoint.folder) if config.checkpoint.enable else []
    steps = [one.step for one in found if one.saved is not None and one.saved.kind == "full"]
    if not steps:
        return []
    command = resume_command(Path(folder), config, options)
    return [f"the last save is of step {max(steps)}; to continue from there:", command]


def nodes_of(text: str) -> int:
    """The number of machines of a command that does not take a range of them."""
    least, most = node_range(text)
    if least < most:
        raise UserError(f"--nnodes {text}: only training takes a range of machines: give one number")
    return most


def _check_endpoint(options: TrainOptions, nodes: int) -> None:
    host, _, port = options.rdzv_endpoint.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise UserError(
            f"--nnodes {nodes} needs --rdzv-endpoint HOST:PORT, an address of the first machine,"
            f" got {options.rdzv_endpoint!r}"
        )
    if options.rdzv_backend not in BACKENDS:
        raise UserError(f"--rdzv-backend: expected one of {', '.join(BACKENDS)}, got {options.rdzv_backend!r}")
    if options.node_rank >= nodes:
        raise UserError(f"--node-rank {options.node_rank}: expected a number below --nnodes {nodes}")


def _note_lost_machine(config: Config, restarts: bool) -> None:
    """Print a note where comm.lost_machine_seconds is set and no machine is ever given up."""
    key = "comm.lost_machine_seconds"
    if restarts or config.value(key) == leaves()[key].default:
        return
    if LAUNCHER_VARIABLE not in os.environ and os.environ.get("RANK", "0") == "0":  # our own launcher has printed it
        to_stderr(f"note: {key} has no effect: neither --max-restarts nor --nnodes MIN:MAX is set")


def _note_idle(options: TrainOptions, nodes: int, is_rank: bool) -> None:
    """Print a note that names the options of the start that have no effect."""
    names, why = ["node_rank", "rdzv_id", "rdzv_backend", "rdzv_endpoint"], "on one machine"
    if is_rank and (LAUNCHER_VARIABLE in os.environ or os.environ["RANK"] != "0"):
        return  # our own launcher gives its ranks its own command line, and has printed it
    if is_rank:
        names, why = ["nproc", "nnodes", *names, "rdzv_secret_file", "max_restarts"], "under another launcher"
    elif nodes > 1:
        names, why = ["node_rank"], "with --rdzv-backend c10d, where machines are numbered as they join"
        if options.rdzv_backend != "c10d":
            return
    given = [f"--{name.replace('_', '-')}" for name in names if getattr(options, name) != getattr(TrainOptions, name)]
    if given:
        to_stderr(f"note: no effect {why}: {', '.join(given)}")
