"""`metrics.prometheus_port`: rank 0 serves the newest row of a run at http://ADDRESS:PORT/metrics, as OpenMetrics.

    shardline_loss 2.25                                   the keys of metrics.jsonl, with a prefix
    shardline_tokens_total 4096                           `tokens` is a counter
    shardline_comm_bytes{axis="tp"} 2048                  tables have a label
    shardline_rank_seconds{rank="3",phase="compute"} 0.2  each rank's own work in the last logged step

It listens on the loopback if the job has one machine, else on the address at which the other machines reach rank 0.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from shardline.comm.store import ranks_from_environment
from shardline.errors import UserError
from shardline.telemetry.slow_ranks import OWN

CONTENT = "application/openmetrics-text; version=1.0.0; charset=utf-8"
LOOPBACK = "127.0.0.1"
LABELS = {"comm_bytes": "axis", "expert_load_layers": "layer"}
POLL_SECONDS = 0.1  # how soon the end of a run is noticed
REQUEST_SECONDS = 10  # before a silent client is dropped


class Exporter:
    """Serves the newest row, under the names of metrics.jsonl."""

    def __init__(self, info: Mapping[str, str]) -> None:
        self.info = dict(info)
        self.values: dict[str, Any] = {}
        self.ranks: Sequence[Sequence[float]] = ()
        self.server: MetricsServer | None = None

    def update(self, row: Mapping[str, Any], ranks: Sequence[Sequence[float]] = ()) -> None:
        """Serve this row from now on; keys that it lacks keep their value. `ranks`: seconds of each by OWN phase."""
        self.values = {**self.values, **{key: value for key, value in row.items() if value is not None}}
        self.ranks = ranks or self.ranks

    def text(self) -> str:
        return "\n".join([*self._lines(), "# EOF", ""])

    def _lines(self) -> Iterator[str]:
        labels = ",".join(f'{name}="{_escaped(value)}"' for name, value in self.info.items())
        yield from ("# TYPE shardline_run info", f"shardline_run_info{{{labels}}} 1")
        for key, value in self.values.items():
            name = f"shardline_{key}"
            if key == "tokens":
                yield from (f"# TYPE {name} counter", f"{name}_total {value}")
            elif isinstance(value, dict):
                yield f"# TYPE {name} gauge"
                for inner, number in value.items():
                    yield f'{name}{{{LABELS.get(key, "name")}="{_escaped(inner)}"}} {number}'
            else:
                yield from (f"# TYPE {name} gauge", f"{name} {value}")
        if self.ranks:
            yield "# TYPE shardline_rank_seconds gauge"
        for rank, seconds in enumerate(self.ranks):
            for phase, number in zip(OWN, seconds, strict=True):
                yield f'shardline_rank_seconds{{rank="{rank}",phase="{phase}"}} {number:.6g}'

    @contextlib.contextmanager
    def serving(self, port: int) -> Iterator[str]:
        """Serve while the block runs; yields the URL."""
        address = job_address()
        try:
            server = MetricsServer(self, address, port)
        except OSError as error:
            raise UserError(
                f"metrics.prometheus_port = {port}: cannot listen at {address}: {error.strerror or error}; set another"
                " port, or 0 for any free one"
            ) from error
        self.server = server
        thread = threading.Thread(target=server.serve_forever, args=(POLL_SECONDS,), name="prometheus", daemon=True)
        thread.start()
        try:
            yield server.url
        finally:
            server.shutdown()
            server.server_close()
            self.server = None


def _escaped(text: str) -> str:
    return str(text).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def job_address() -> str:
    """The loopback on one machine; with several, the address from which this machine reaches the first."""
    ranks = ranks_from_environment("WORLD_SIZE", 1)
    first = os.environ.get("MASTER_ADDR", "")
    if ranks_from_environment("LOCAL_WORLD_SIZE", ranks) == ranks or not first:
        return LOOPBACK
    family, _, _, _, there = socket.getaddrinfo(first, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(there)  # sends nothing
        return str(probe.getsockname()[0])


class MetricsServer(ThreadingHTTPServer):
    """Forked data workers close its socket: a worker that outlives its rank would block the port for the next start."""

    daemon_threads = True

    def __init__(self, exporter: Exporter, address: str, port: int) -> None:
        self.address_family = socket.AF_INET6 if ":" in address else socket.AF_INET
        super().__init__((address, port), partial(MetricsHandler, exporter))
        _open.add(self)
        self.url = f"http://{f'[{address}]' if ':' in address else address}:{self.server_address[1]}/metrics"


_open: weakref.WeakSet[MetricsServer] = weakref.WeakSet()


def _close_in_child() -> None:
    for server in _open:
        server.socket.close()


os.register_at_fork(after_in_child=_close_in_child)


class MetricsHandler(BaseHTTPRequestHandler):
    """Answers only /metrics. On the loopback, a request with another host name comes from a foreign page: refused."""

    timeout = REQUEST_SECONDS

    def __init__(self, exporter: Exporter, *arguments: Any) -> None:
        self.exporter = exporter
        super().__init__(*arguments)

    def do_GET(self) -> None:
        at = self.connection.getsockname()[0]
        if at == LOOPBACK and self.headers.get("Host", "").rpartition(":")[0] not in ("localhost", LOOPBACK):
            self.send_error(HTTPStatus.FORBIDDEN)
            return
        if self.path.partition("?")[0] != "/metrics":
            self.send_error(HTTPStatus.NOT_FOUND, "only /metrics is here")
            return
        body = self.exporter.text().encode()
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", CONTENT)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not logged: one comes every few seconds."""
