"""`shardline report --watch`: serves the page, only on this machine, and updates its data while a run goes on."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from shardline.errors import UserError
from shardline.show.page import to_json
from shardline.show.report import report_data, watched_page

ADDRESS = "127.0.0.1"
NAMES = ("localhost", ADDRESS)  # host names in allowed requests: a page of another site cannot read this one


class WatchServer(ThreadingHTTPServer):
    daemon_threads = True


class WatchHandler(BaseHTTPRequestHandler):
    """`/` is the page, `/data.json` its data; a browser that already has the same data gets no second copy."""

    def __init__(self, folders: Sequence[Path], *arguments: Any) -> None:
        self.folders = folders
        super().__init__(*arguments)

    def do_GET(self) -> None:
        host = self.headers.get("Host", "").rpartition(":")[0]
        if host not in NAMES:
            self.send_error(HTTPStatus.FORBIDDEN)
            return
        try:
            if self.path == "/":
                self._send("text/html", watched_page(self.folders))
            elif self.path == "/data.json":
                data = report_data(self.folders, watch=True)
                self._send("application/json", to_json(data), to_json({**data, "made": None}))
            else:
                self.send_error(HTTPStatus.NOT_FOUND)
        except UserError as error:  # the run was moved away meanwhile
            self.send_error(HTTPStatus.SERVICE_UNAVAILABLE, str(error))

    def _send(self, kind: str, text: str, content: str = "") -> None:
        """`content` is the part of the text whose changes matter to a browser; by default all of it."""
        body = text.encode()
        tag = f'"{hashlib.sha256((content or text).encode()).hexdigest()}"'
        same = self.headers.get("If-None-Match") == tag
        self.send_response(HTTPStatus.NOT_MODIFIED if same else HTTPStatus.OK)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("ETag", tag)
        self.send_header("Cache-Control", "no-cache")
        self.send_header("Content-Length", str(0 if same else len(body)))
        self.end_headers()
        if not same:
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not logged: a page makes one every few seconds."""


def make_server(folders: Sequence[Path], port: int) -> WatchServer:
    try:
        return WatchServer((ADDRESS, port), partial(WatchHandler, folders))
    except (OSError, OverflowError) as error:
        why = error.strerror if isinstance(error, OSError) else "ports end at 65535"
        raise UserError(f"--port {port}: {why}; use another one, or 0 for any free one") from error


def serve(folders: Sequence[Path], port: int) -> int:
    """Serve until Ctrl-C."""
    report_data(folders)  # reports a folder without a run now rather than in the browser
    with make_server(folders, port) as server:
        print(f"http://{ADDRESS}:{server.server_address[1]}/ shows the run live; Ctrl-C stops this server", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()
    return 0
