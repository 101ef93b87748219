"""The address at which launchers meet, and the store that the launcher of the first machine serves there.

    --rdzv-backend static   numbers are given (--node-rank); number 0 serves the store
    --rdzv-backend c10d     the machine that has the endpoint's address serves it and is 0, others count as they come

The ranks use the same store, so the endpoint is the only address that every machine must be able to reach by name.
"""

from __future__ import annotations

import contextlib
import fcntl
import socket
import struct
import sys
import threading
import time
from datetime import timedelta

import torch.distributed as dist

from shardline.errors import UserError

PERIOD = 0.2
PATIENCE = 5.0  # seconds after which a launcher prints what it waits for
CONNECT_SECONDS = 30
STORE_SECONDS = 300
SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface


class Endpoint:
    """`number` is this machine's --node-rank, None where machines are numbered as they come."""

    def __init__(self, address: str, number: int | None, timeout_seconds: float) -> None:
        host, _, port = address.rpartition(":")
        self.address, self.host, self.port = address, host.strip("[]"), int(port)
        self.number, self.timeout_seconds = number, timeout_seconds
        self.server: dist.TCPStore | None = None
        self.announce_after("")

    def open(self) -> dist.TCPStore:
        """Serve the store where this is the machine for it, and connect to it."""
        if self.server is None:
            self._serve()
        return self._connect()

    def announce_after(self, reason: str) -> None:
        """Begin to wait: after a moment of patience, `pause` prints what for, and after what."""
        self.patience, self.printed, self.reason = time.monotonic() + PATIENCE, "", reason

    def pause(self, what: str, seconds: float = PERIOD) -> None:
        """Sleep for a moment, and print what is waited for where that has lasted a while."""
        if time.monotonic() > self.patience and self.printed != what:
            print_line(f"{self.reason}{'; ' if self.reason else ''}waiting for {what} at {self.address}")
            self.printed, self.reason = what, ""
        time.sleep(seconds)

    def _serve(self) -> None:
        is_here = self._is_here()
        if not (is_here if self.number is None else self.number == 0):
            return
        if not is_here:
            print(f"note: {self.host} is no address of this machine, which has --node-rank 0", file=sys.stderr)
        try:
            self.server = dist.TCPStore("127.0.0.1", self.port, is_master=True, wait_for_workers=False)
        except RuntimeError as error:
            if self.number is None:  # another launcher of this job runs on this machine, too
                return
            raise UserError(
                f"--rdzv-endpoint {self.address}: port {self.port} of this machine is taken, by another job or"
                " by another machine's launcher with --node-rank 0"
            ) from error
        self.port = self.server.port

    def _is_here(self) -> bool:
        """Whether the endpoint is an address of this machine: no other address can be bound."""
        try:
            found = socket.getaddrinfo(self.host, 0, type=socket.SOCK_STREAM)
        except OSError as error:
            raise UserError(f"--rdzv-endpoint {self.address}: {self.host!r} has no address: {error}") from error
        for family, kind, _, _, address in found:
            with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
                probe.bind(address)
                return True
        return False

    def _connect(self) -> dist.TCPStore:
        """Wait until the store answers. The attempts are made in Python, because torch's ignore a Ctrl-C.

        The machine that serves the store uses the loopback, which stays when the network goes.
        """
        deadline = time.monotonic() + self.timeout_seconds
        host = "127.0.0.1" if self.server is not None else self.host
        while True:
            try:
                socket.create_connection((host, self.port), timeout=PATIENCE).close()
                break
            except OSError as error:
                if time.monotonic() > deadline:
                    hint = ", or no machine has that address" if self.number is None else ""
                    raise UserError(
                        f"--rdzv-endpoint {self.address}: no answer within {self.timeout_seconds:g} s ({error}): the"
                        f" first machine has not started, or a firewall is between{hint}"
                    ) from error
                self.pause("the first machine")
        stores: list[dist.TCPStore] = []

        def open_store() -> None:
            seconds = timedelta(seconds=STORE_SECONDS)
            with contextlib.suppress(RuntimeError):
                stores.append(dist.TCPStore(host, self.port, is_master=False, wait_for_workers=False, timeout=seconds))

        # In a thread: something else may listen there and never answer.
        thread = threading.Thread(target=open_store, name="shardline-store", daemon=True)
        thread.start()
        thread.join(CONNECT_SECONDS)
        if not stores:
            raise UserError(f"--rdzv-endpoint {self.address}: what answers there is no launcher")
        return stores[0]


def interface_towards(host: str) -> str | None:
    """The interface that leads to `host`, or that has its address; None where only a loopback does, or for IPv6.

    Gloo takes the address that this machine's own name stands for, which on many systems is a loopback's.
    """
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # sends nothing
        address = probe.getsockname()[0]
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                answer = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(answer[20:24]) == address and not address.startswith("127."):
                    return name
    return None


def print_line(line: str) -> None:
    """Print a line of the launcher on stderr, over a bar of rank 0 that may stand there."""
    if sys.stderr.isatty():
        sys.stderr.write("\r\x1b[K")
    print(line, file=sys.stderr, flush=True)
