"""The job's store, through which ranks find each other: connections to it, signed messages, time-outs of groups.

Whoever reaches the store can read, change and delete what is in it. So a message carries a signature that only the
processes of the job can make, and what carries none counts as absent.
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
SIGNATURE = 64  # its characters
MARGIN = 1.2  # the backends' own time-outs name no rank: they come after the watchdog's
LEAST_MARGIN_SECONDS = 20


def ranks_from_environment(name: str, otherwise: int) -> int:
    """A number of ranks that the launcher set in the environment."""
    text = os.environ.get(name, str(otherwise))
    if not text.isdecimal() or int(text) == 0:
        raise UserError(f"{name}={text} in the environment: a launcher sets it to a number of ranks; unset it")
    return int(text)


def connect_store(timeout_seconds: float = 60) -> dist.Store:
    """A separate connection to the job's store: one on which a collective waits is blocked for all other users."""
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
    """A key for one purpose, from which neither `key` nor those for other purposes can be computed."""
    return hmac.digest(key, "/".join(map(str, words)).encode(), "sha256")


@functools.cache
def rank_key() -> bytes:
    """The key of this round's messages between ranks; empty, and so known to everybody, under another launcher."""
    return bytes.fromhex(os.environ.pop(KEY_VARIABLE, ""))  # not for processes that this one starts


def _log_stranger(name: str) -> None:
    log.warning("%s in the job's store was not written by this job: ignored", name)


class SignedStore:
    """Messages under the names that begin with `scope`: a signature (HMAC-SHA256 of scope, name and text), then JSON.

    What does not verify or cannot be decoded counts as absent; `on_stranger` is called with the first such name. Names
    that are gone or changed are no error either: whoever has something to report writes it again.
    """

    def __init__(
        self, store: dist.Store, scope: str, key: bytes, on_stranger: Callable[[str], None] = _log_stranger
    ) -> None:
        self.base, self.store = store, dist.PrefixStore(scope, store)
        self.scope, self.key, self.on_stranger, self.met_stranger = scope, key, on_stranger, False

    def sealed(self, name: str, message: Any) -> str:
        """The message as it stands in the store."""
        text = json.dumps(message)
        return self._signature(name, text.encode()) + text

    def opened(self, name: str, sealed: bytes, decode: Callable[[Any], T]) -> T | None:
        """What is in a sealed message, its texts without control characters; None where it is not the job's own."""
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
        """The message under a name, None where there is none now; `get` would wait for it."""
        return self.opened(name, self.store.compare_set(name, "", ""), decode)

    def offer(
        self, name: str, message: Any, decode: Callable[[Any], T], yields: Callable[[T], bool] = lambda held: False
    ) -> T | None:
        """Write a message where none of the job stands, or one that `yields`; returns the one that stands instead."""
        sealed, expected = self.sealed(name, message), ""
        while True:
            found = self.store.compare_set(name, expected, sealed)
            if found == sealed.encode():
                return None
            held = self.opened(name, found, decode)
            gone = found == expected.encode()  # then the store answers with what was expected
            if held is None or gone:  # a stranger's may be too long to be sent back for a comparison
                self.store.set(name, sealed)
                return None
            if not yields(held):
                return held
            expected = found.decode()


def _printable_texts(value: Any) -> Any:
    """The same JSON with every text printable."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, list):
        return [_printable_texts(one) for one in value]
    if isinstance(value, dict):
        return {printable(name): _printable_texts(one) for name, one in value.items()}
    return value


# ---- ranks -----------------------------------------------------------------------------------------------------------


def start_groups(backend: str, timeout: timedelta) -> None:
    """Join the ranks of this attempt. The launcher's store outlives attempts and torch's keys in it do not name them:
    a restarted rank would find those of the attempt before.
    """
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        dist.init_process_group(backend, timeout=timeout)
        return
    store = dist.PrefixStore("groups", connect_store(timeout.total_seconds()))
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=timeout)


def gather_ranks(store: dist.Store, rank: int, world_size: int) -> list[dict[str, Any]]:
    """Rank, host and pid of every worker, on rank 0; the other ranks only report theirs and get an empty list."""
    own = {"rank": rank, "host": socket.gethostname(), "pid": os.getpid()}
    signed, names = SignedStore(store, "ranks", rank_key()), [str(other) for other in range(world_size)]
    signed.write(str(rank), own)
    if rank != 0:
        return []
    found = [signed.opened(*pair, dict) for pair in zip(names, signed.store.multi_get(names), strict=True)]
    return [{"rank": number} if row is None else row for number, row in enumerate(found)]


def backend_timeout(seconds: float) -> timedelta:
    """The time-out to give a process group where the watchdog has `seconds`."""
    return timedelta(seconds=max(seconds * MARGIN, seconds + LEAST_MARGIN_SECONDS))


def set_group_timeouts(groups: Iterable[dist.ProcessGroup], timeout: timedelta) -> None:
    """Change the time-out of collectives that are issued from now on, where this release of torch can."""
    from torch.distributed import distributed_c10d

    change = getattr(distributed_c10d, "_set_pg_timeout", None)
    if change is not None:
        for group in groups:
            change(timeout, group)
