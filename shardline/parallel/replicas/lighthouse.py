"""A client for torchft's lighthouse, which knows which groups are there.

A thread sends it a heartbeat four times a second. Another thread requests the quorum, so that the group can be asked
to stop while it waits for the others. Groups sign what they send: the lighthouse itself checks nothing, and a message
that this job did not write is ignored.
"""

from __future__ import annotations

import hmac
import json
import logging
import os
import queue
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

from shardline.comm.store import derived_key
from shardline.errors import UserError
from shardline.parallel.replicas.quorum import Member

log = logging.getLogger("shardline")

KEY_VARIABLE = "SHARDLINE_REPLICAS_KEY"  # set by the launcher in a rank's environment: signs the groups' messages
SECRET_VARIABLE = "SHARDLINE_JOB_SECRET"  # used by a single rank, which has no launcher
VARIABLE, DEFAULT = "TORCHFT_LIGHTHOUSE", "http://localhost:29510"
PERIOD = 0.25
CONNECT = timedelta(seconds=5)
BEAT = timedelta(seconds=5)
QUORUM = timedelta(minutes=1)  # limit of one request, which is then repeated; a signal ends the wait at once
PATIENCE = 5.0  # seconds before a wait is logged


def import_coordination() -> Any:
    """Import torchft's clients and servers; the package is optional."""
    os.environ.setdefault("RUST_LOG", "warn")  # otherwise it logs every request
    try:
        from torchft import coordination
    except ImportError as error:
        raise UserError(
            "fault_tolerance.enable needs the package torchft, which is not installed: pip install 'shardline[ft]'"
        ) from error
    return coordination


def groups_key() -> bytes:
    """Return the key that the groups of a job share. Without a secret it is empty, so it protects nothing."""
    given, secret = os.environ.get(KEY_VARIABLE), os.environ.get(SECRET_VARIABLE, "").strip()
    return bytes.fromhex(given) if given else derive_key(secret.encode()) if secret else b""


def derive_key(secret: bytes) -> bytes:
    return derived_key(secret, "replica groups of a job")


def host_and_port(address: str) -> tuple[str, int]:
    """Return the host and port of a lighthouse."""
    parts = urlsplit(address if "//" in address else f"http://{address}")
    try:
        if parts.hostname and parts.port:
            return parts.hostname, parts.port
    except ValueError:
        pass
    raise UserError(f"{VARIABLE}={address}: expected http://HOST:PORT, as `shardline lighthouse` prints it")


def own_address(address: str) -> str:
    """Return this machine's address on the route to the lighthouse; the group listens only there."""
    host, port = host_and_port(address)
    try:
        family, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(place)  # sends nothing
            return str(probe.getsockname()[0])
    except OSError as error:
        raise UserError(f"{VARIABLE}={address}: {error.strerror or error}") from error


class Lighthouse:
    """The connection of one group, made by its rank 0."""

    def __init__(self, address: str, name: str, key: bytes) -> None:
        self.coordination = import_coordination()
        host, port = host_and_port(address)
        self.address, self.name, self.key = f"http://{f'[{host}]' if ':' in host else host}:{port}", name, key
        self.met_stranger = False
        self._client: Any = None
        self._closed = threading.Event()
        self._heart: threading.Thread | None = None

    def quorum(self, own: Member, stop: Callable[[], bool]) -> list[Member] | None:
        """Return the groups of the next quorum, this one among them, or None once `stop` returns true."""
        self._start_beating()
        spoken, since = False, time.monotonic()
        while True:
            answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
            threading.Thread(target=self._ask, args=(own, answers), name="shardline-quorum", daemon=True).start()
            while True:
                try:
                    answer = answers.get(timeout=0.2)
                    break
                except queue.Empty:
                    if stop():
                        return None
                if not spoken and time.monotonic() - since > PATIENCE:
                    log.info("step %d: waiting for the other replica groups", own.step + 1)
                    spoken = True
            if isinstance(answer, list):
                members = [one for one in map(self._read, answer) if one is not None]
                if any(one.name == own.name for one in members):
                    return members
            elif not spoken:
                log.warning("no answer from the lighthouse at %s: still trying", self.address)
                spoken = True
            if stop():
                return None
            time.sleep(PERIOD)

    def close(self) -> None:
        """Stop sending heartbeats."""
        self._closed.set()
        if self._heart is not None:
            self._heart.join(BEAT.total_seconds())

    def _ask(self, own: Member, answers: queue.SimpleQueue[Any]) -> None:
        try:
            if self._client is None:
                self._client = self.coordination.LighthouseClient(self.address, connect_timeout=CONNECT)
            found = self._client.quorum(
                self.name,
                QUORUM,
                address=own.store,
                store_address=own.store,
                step=own.step,
                world_size=1,
                shrink_only=False,
                data=self.sealed(own),
            )
            answers.put(list(found.participants))
        except Exception as error:  # a transport error: the lighthouse is out of reach
            self._client = None
            answers.put(error)

    # ---- signed messages ---------------------------------------------------------------------------------------------

    def sealed(self, own: Member) -> dict[str, str]:
        text = json.dumps(own.message())
        return {"text": text, "signature": self._signature(text)}

    def _signature(self, text: str) -> str:
        return hmac.digest(self.key, text.encode(), "sha256").hex()

    def _read(self, found: Any) -> Member | None:
        """Return a member's message, or None if this job did not write it."""
        try:
            text, signature = found.data["text"], found.data["signature"]
            if hmac.compare_digest(signature, self._signature(text)):
                member = Member(**json.loads(text))
                if member.name == found.replica_id and member.step == found.step:
                    return member
        except (TypeError, KeyError, ValueError, AttributeError):
            pass
        if not self.met_stranger:
            self.met_stranger = True
            log.warning("note: a member of the quorum at %s is none of this job's groups: ignored", self.address)
        return None

    # ---- heartbeats --------------------------------------------------------------------------------------------------

    def _start_beating(self) -> None:
        """Start with the first request, not before: others wait for a group that beats but requests no quorum."""
        if self._heart is None:
            self._heart = threading.Thread(target=self._beat, name="shardline-heartbeat", daemon=True)
            self._heart.start()

    def _beat(self) -> None:
        client: Any = None
        while not self._closed.wait(PERIOD):
            try:
                client = client or self.coordination.LighthouseClient(self.address, connect_timeout=CONNECT)
                client.heartbeat(self.name, BEAT)
            except Exception:  # out of reach; the quorum request reports that
                client = None
