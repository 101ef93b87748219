"""The address at which launchers meet, and the store that the launcher of the first machine serves there.

    --rdzv-backend static   numbers are given (--node-rank); number 0 serves the store
    --rdzv-backend c10d     the machine that has the endpoint's address serves it and is 0, others count as they join

The ranks use the same store, so the endpoint is the only address that every machine must be able to reach by name. The
store listens at that address alone, and that of a single machine on the loopback.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import ipaddress
import socket
import struct
import sys
import threading
import time
from datetime import timedelta

import torch.distributed as dist

from shardline.errors import UserError
from shardline.words import to_stderr

PERIOD = 0.2
PATIENCE = 5.0  # seconds after which a launcher prints what it waits for
CONNECT_SECONDS = 30
STORE_SECONDS = 300
BACKLOG = 2048  # connections that may wait: all ranks come at once
LOOPBACK, EVERYWHERE = "127.0.0.1", ""
SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface


class Endpoint:
    """`number` is this machine's --node-rank, None where machines are numbered as they join."""

    def __init__(self, address: str, number: int | None, timeout_seconds: float) -> None:
        host, _, port = address.rpartition(":")
        self.address, self.host, self.port = address, host.strip("[]"), int(port)
        self.number, self.timeout_seconds = number, timeout_seconds
        self.server: dist.TCPStore | None = None
        self.near = self.host  # the address of the store as this machine reaches it
        self.announce_after("")

    def open(self) -> dist.TCPStore:
        """Serve the store where this is the machine for it, and connect to it."""
        if self.server is None:
            self._serve()
        return self._connect()

    def announce_after(self, reason: str) -> None:
        """Begin to wait: if it takes longer than a moment, `pause` prints what for, and `reason`."""
        self.patience, self.printed, self.reason = time.monotonic() + PATIENCE, "", reason

    def pause(self, what: str, seconds: float = PERIOD) -> None:
        """Sleep for a moment, and print what this waits for if it has lasted a while."""
        if time.monotonic() > self.patience and self.printed != what:
            print_line(f"{self.reason}{'; ' if self.reason else ''}waiting for {what} at {self.address}")
            self.printed, self.reason = what, ""
        time.sleep(seconds)

    def _serve(self) -> None:
        addresses = self._addresses()
        listener = self._listener(addresses) if self.number in (None, 0) else None
        if listener is None:
            return
        bound, self.port = listener.getsockname()[:2]
        self.address = f"{self.address.rpartition(':')[0]}:{self.port}"  # port 0 stood for any free port
        wildcard = ipaddress.ip_address(bound).is_unspecified
        self.near = LOOPBACK if wildcard else bound
        # torch cannot bind a given address: it gets a socket that listens, and closes it in the end.
        self.server = dist.TCPStore(
            self.near, self.port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )

    def _listener(self, addresses: list[str]) -> socket.socket | None:
        """A socket that listens at the endpoint; None if another machine or launcher serves the store."""
        named = self.host != "localhost" and not _is_address(self.host)
        here = [address for address in addresses if not (named and ipaddress.ip_address(address).is_loopback)]
        why = ""  # to listen everywhere: only other machines know which address they have for the name of this one
        if len(here) < len(addresses):
            why = f"{self.host} stands for a loopback here"
        elif self.number == 0:
            why = f"{self.host} is no address of this one"
        taken: OSError | None = None
        for address in (*here, EVERYWHERE) if why else here:
            try:
                listener = self._bind(address)
            except OSError as error:
                taken = error if error.errno == errno.EADDRINUSE else taken
                continue
            if address == EVERYWHERE:
                to_stderr(f"note: the store listens on all addresses of this machine: {why}")
            return listener
        if self.number is None:
            return None
        raise UserError(
            f"--rdzv-endpoint {self.address}: port {self.port} of this machine is taken, by another job or"
            " by another machine's launcher with --node-rank 0"
        ) from taken

    def _addresses(self) -> list[str]:
        """What the host of the endpoint stands for on this machine."""
        try:
            found = socket.getaddrinfo(self.host, 0, type=socket.SOCK_STREAM)
        except OSError as error:
            raise UserError(f"--rdzv-endpoint {self.address}: {self.host!r} has no address: {error}") from error
        return list(dict.fromkeys(str(address[0]) for *_, address in found))

    def _bind(self, address: str) -> socket.socket:
        if address == EVERYWHERE and socket.has_dualstack_ipv6():
            return socket.create_server(("", self.port), family=socket.AF_INET6, backlog=BACKLOG, dualstack_ipv6=True)
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        return socket.create_server((address, self.port), family=family, backlog=BACKLOG)

    def _connect(self) -> dist.TCPStore:
        """Wait until the store answers. The attempts are made in Python, because torch's ignore a Ctrl-C."""
        deadline, host = time.monotonic() + self.timeout_seconds, self.near
        while True:
            try:
                socket.create_connection((host, self.port), timeout=PATIENCE).close()
                break
            except OSError as error:
                if time.monotonic() > deadline:
                    hint = ", or no machine has that address" if self.number is None else ""
                    raise UserError(
                        f"--rdzv-endpoint {self.address}: no answer within {self.timeout_seconds:g} s ({error}): the"
                        f" first machine has not started, or a firewall is in between{hint}"
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
            raise UserError(f"--rdzv-endpoint {self.address}: what answers there is not a launcher")
        return stores[0]


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def gloo_interface(host: str, alone: bool) -> str | None:
    """The interface that gloo listens on: the loopback of a machine that is alone, else the one that leads to `host`.

    By default gloo takes the address of this machine's own name: on many systems a loopback's, which other machines
    cannot reach, on others one that they can reach although nobody needs to. None where no interface is right, or for
    IPv6.
    """
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((LOOPBACK if alone else host, 9))  # sends nothing
        address = probe.getsockname()[0]
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                answer = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(answer[20:24]) == address and (alone or not address.startswith("127.")):
                    return name
    return None


def print_line(line: str) -> None:
    """Print a line of the launcher on stderr, over a progress bar that rank 0 may show."""
    if sys.stderr.isatty():
        sys.stderr.write("\r\x1b[K")
    to_stderr(line)
