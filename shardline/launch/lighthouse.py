"""`shardline lighthouse`: torchft's server, in which the replica groups of a job find each other."""

from __future__ import annotations

import signal
import socket

from shardline.errors import UserError
from shardline.parallel.replicas.lighthouse import VARIABLE, import_coordination


def serve(bind: str, min_replicas: int, join_timeout: float, heartbeat_timeout: float) -> int:
    """Serve at `bind` until a signal ends it."""
    host, _, port = bind.rpartition(":")
    if not host or not port.isdecimal() or int(port) >= 2**16:
        raise UserError(f"--bind {bind}: expected HOST:PORT, such as 127.0.0.1:29510 or 10.0.0.1:29510")
    coordination = import_coordination()
    number = _free_port(host.strip("[]"), int(port))
    server = coordination.LighthouseServer(
        bind=f"{host}:{number}",
        min_replicas=min_replicas,
        join_timeout_ms=round(join_timeout * 1000),
        quorum_tick_ms=100,
        heartbeat_timeout_ms=round(heartbeat_timeout * 1000),
    )
    print(f"export {VARIABLE}=http://{host}:{number}", flush=True)
    try:
        signal.sigwait({signal.SIGINT, signal.SIGTERM})
    finally:
        server.shutdown()
    return 0


def _free_port(host: str, port: int) -> int:
    """The port, or any free one for 0; if it is taken, torchft's server would end the process with a traceback."""
    try:
        with socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            return int(probe.getsockname()[1])
    except OSError as error:
        raise UserError(f"--bind {host}:{port}: {error.strerror or error}") from error
