"""The job's store, through which ranks rendezvous: connections to it, signed messages, time-outs of groups.

Anyone who can connect to the store can read, change and delete its content. So every message has a signature that only
the processes of the job can make; a message without a valid signature counts as absent.
"""

from __future__ import annotations

import functools
import hmac
import json
import logging
import os
import socket
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from shardline.errors import UserError
from shardline.words import printable

T = TypeVar("T")
log = logging.getLogger("shardline")

KEY_VARIABLE = "SHARDLINE_RANK_KEY"  # in the environment of a rank: the key of this round's messages, in hexadecimal
SIGNATURE = 64  # length of a signature in characters
MARGIN = 1.2  # the backends' own time-outs name no rank, so they are set above the watchdog's
LEAST_MARGIN_SECONDS = 20


def ranks_from_environment(name: str, otherwise: int) -> int:
    """Return a number of ranks that the launcher set in the environment."""
    text = os.environ.get(name, str(otherwise))
    if not text.isdecimal() or int(text) == 0:
        raise UserError(f"{name}={text} in the environment: expected a number of ranks, set by a launcher; unset it")
    return int(text)


def connect_store(timeout_seconds: float = 60) -> dist.Store:
    """Open a separate connection to the job's store: while a collective waits on one, all other users are blocked."""
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=False,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_seconds),
    )
    return dist.PrefixStore(f"shardline/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


# ---- signed messages -------------------------------------------------------------------------------------------------


def derived_key(key: bytes, *words: object) -> bytes:
    """Derive a key for one purpose, from which neither `key` nor keys for other purposes can be computed."""
    return hmac.digest(key, "/".join(map(str, words)).encode(), "sha256")


@functools.cache
def rank_key() -> bytes:
    """Return the key of this round's messages between ranks; under other launchers it is empty and protects nothing."""
    return bytes.fromhex(os.environ.pop(KEY_VARIABLE, ""))  # removed, so that child processes do not get it


def _log_stranger(name: str) -> None:
    log.warning("%s in the job's store was not written by this job: ignored", name)


class SignedStore:
    """Messages under names that begin with `scope`: a signature (HMAC-SHA256 of scope, name and text), then JSON.

    A message that does not verify or cannot be decoded counts as absent; `on_stranger` is called with the first such
    name. Deleted or changed messages are no error either: a process that has something to report writes it again.
    """

    def __init__(
        self, store: dist.Store, scope: str, key: bytes, on_stranger: Callable[[str], None] = _log_stranger
    ) -> None:
        self.base, self.store = store, dist.PrefixStore(scope, store)
        self.scope, self.key, self.on_stranger, self.met_stranger = scope, key, on_stranger, False

    def sealed(self, name: str, message: Any) -> str:
        """Return the message in the form in which it is stored."""
        text = json.dumps(message)
        return self._signature(name, text.encode()) + text

    def opened(self, name: str, sealed: bytes, decode: Callable[[Any], T]) -> T | None:
        """Return the content of a sealed message, without control characters; None if this job did not write it."""
        if not sealed:
            return None
        signature, text = sealed[:SIGNATURE], sealed[SIGNATURE:]
        if hmac.compare_digest(signature, self._signature(name, text).encode()):
            try:
                return decode(_printable_texts(json.loads(text)))
            except (ValueError, TypeError, KeyError, RecursionError):
                pass
        if not self.met_stranger:
            self.met_stranger = True
            self.on_stranger(f"{self.scope}/{name}")
        return None

    def _signature(self, name: str, text: bytes) -> str:
        return hmac.digest(self.key, b"\0".join((self.scope.encode(), name.encode(), text)), "sha256").hex()

    def write(self, name: str, message: Any) -> None:
        self.store.set(name, self.sealed(name, message))

    def read(self, name: str, decode: Callable[[Any], T]) -> T | None:
        """Return the message under a name, None if there is none now (`get` would wait for it)."""
        return self.opened(name, self.store.compare_set(name, "", ""), decode)

    def offer(
        self, name: str, message: Any, decode: Callable[[Any], T], yields: Callable[[T], bool] = lambda held: False
    ) -> T | None:
        """Write a message unless the job has one there that does not `yield`; in that case return that message."""
        sealed, expected = self.sealed(name, message), ""
        while True:
            found = self.store.compare_set(name, expected, sealed)
            if found == sealed.encode():
                return None
            held = self.opened(name, found, decode)
            gone = found == expected.encode()  # if the key is gone, the store returns the expected value
            if held is None or gone:  # a stranger's message may be too long to send back for a comparison
                self.store.set(name, sealed)
                return None
            if not yields(held):
                return held
            expected = found.decode()


def _printable_texts(value: Any) -> Any:
    """Return the same JSON value with every text printable."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, list):
        return [_printable_texts(one) for one in value]
    if isinstance(value, dict):
        return {printable(name): _printable_texts(one) for name, one in value.items()}
    return value


# ---- ranks -----------------------------------------------------------------------------------------------------------


def start_groups(backend: str, timeout: timedelta) -> None:
    """Join the ranks of this attempt. The launcher's store outlives attempts, and torch's keys do not name the attempt:
    without a prefix, a restarted rank would find keys of the previous attempt.
    """
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        dist.init_process_group(backend, timeout=timeout)
        return
    store = dist.PrefixStore("groups", connect_store(timeout.total_seconds()))
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=timeout)


def gather_ranks(store: dist.Store, rank: int, world_size: int) -> list[dict[str, Any]]:
    """Return rank, host and pid of every worker on rank 0; other ranks only report theirs and get an empty list."""
    own = {"rank": rank, "host": socket.gethostname(), "pid": os.getpid()}
    signed, names = SignedStore(store, "ranks", rank_key()), [str(other) for other in range(world_size)]
    signed.write(str(rank), own)
    if rank != 0:
        return []
    found = [signed.opened(*pair, dict) for pair in zip(names, signed.store.multi_get(names), strict=True)]
    return [{"rank": number} if row is None else row for number, row in enumerate(found)]


def backend_timeout(seconds: float) -> timedelta:
    """Return the time-out of a process group for a watchdog limit of `seconds`."""
    return timedelta(seconds=max(seconds * MARGIN, seconds + LEAST_MARGIN_SECONDS))


def set_group_timeouts(groups: Iterable[dist.ProcessGroup], timeout: timedelta) -> None:
    """Change the time-out of collectives that are issued from now on, if this release of torch supports it."""
    from torch.distributed import distributed_c10d

    change = getattr(distributed_c10d, "_set_pg_timeout", None)
    if change is not None:
        for group in groups:
            change(timeout, group)
