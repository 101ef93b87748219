"""A server that speaks the protocol of the Hugging Face Hub, for tests: repositories in memory, on this machine."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

TOKEN = "hf_secretsecretsecret"
_API = re.compile(
    r"/api/(?P<kind>models|datasets)/(?P<repo>[^/]+/[^/]+)(?:/(?P<what>revision|tree)/(?P<revision>[^/]+))?"
)
_FILE = re.compile(r"/(?:(?P<kind>datasets)/)?(?P<repo>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<path>.+)")


@dataclass
class Repository:
    """Files at one commit, which `main` and `v1` name."""

    files: dict[str, bytes]
    gated: bool = False
    private: bool = False

    @property
    def commit(self) -> str:
        return hashlib.sha1(repr(sorted(self.files.items())).encode()).hexdigest()


@dataclass
class Hub:
    """What is served, what was asked for, and which downloads break: file -> bytes after which the connection ends."""

    repositories: dict[str, Repository] = field(default_factory=dict)  # "models/owner/name" -> its files
    requests: list[str] = field(default_factory=list)
    breaks: dict[str, int] = field(default_factory=dict)
    address: str = ""

    def downloads(self) -> list[str]:
        """The files that were sent, in order."""
        files = [_FILE.fullmatch(line.removeprefix("GET ")) for line in self.requests]
        return [found["path"] for found in files if found is not None]


@contextlib.contextmanager
def serving() -> Iterator[Hub]:
    hub = Hub()
    handler = type("HubHandler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    hub.address = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append(f"{self.command} {path}")
        found = _API.fullmatch(path) or _FILE.fullmatch(path)
        if found is None:
            return self.fail(404, "EntryNotFound")
        parts = found.groupdict()
        repository = self.hub.repositories.get(f"{parts['kind'] or 'models'}/{parts['repo']}")
        allowed = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        if repository is None or (repository.private and not allowed):
            return self.fail(401 if repository else 404, "RepoNotFound")
        if parts["revision"] not in (None, "main", "v1", repository.commit):
            return self.fail(404, "RevisionNotFound")
        if "path" in parts:
            return self.send_file(repository, parts["path"], allowed)
        if parts["what"] == "tree":
            rows = [self.row(name, content) for name, content in repository.files.items()]
            return self.send_json(rows)
        names = [{"rfilename": name} for name in repository.files]
        self.send_json({"id": parts["repo"], "sha": repository.commit, "siblings": names, "private": False})
        return None

    @staticmethod
    def row(name: str, content: bytes) -> dict[str, Any]:
        return {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}

    def send_file(self, repository: Repository, name: str, allowed: bool) -> None:
        if repository.gated and not allowed:
            return self.fail(401, "GatedRepo")
        if name not in repository.files:
            return self.fail(404, "EntryNotFound")
        content = repository.files[name]
        start = 0
        if (given := self.headers.get("Range")) and (asked := re.match(r"bytes=(\d+)-", given)):
            start = int(asked[1])
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", repository.commit)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        if self.command == "GET":
            stop = self.hub.breaks.get(name, len(content))
            self.wfile.write(content[start : max(start, stop)])
            if stop < len(content):
                self.wfile.flush()
                self.close_connection = True
        return None

    def send_json(self, value: Any) -> None:
        content = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def fail(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", f"{code} at {self.path}")
        self.send_header("Content-Length", "0")
        self.end_headers()
