"""Where the launchers of several machines meet: a store at an address of the first one, in which each takes a number.

    --rdzv-backend static   numbers are given (--node-rank); number 0 serves the store
    --rdzv-backend c10d     the machine that has the endpoint's address serves it and is 0, others count as they come

The ranks use the same store, so the endpoint is the only address that every machine must be able to reach by name.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from shardline.errors import UserError
from shardline.words import ranges

PERIOD = 0.2
PATIENCE = 5.0  # seconds after which a launcher says what it waits for
CONNECT_SECONDS = 30
STORE_SECONDS = 300
SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface


@dataclass(frozen=True)
class Machine:
    """What a launcher tells the others."""

    host: str
    pid: int
    nodes: int
    job: str

    def is_gone(self) -> bool:
        """It ran here and ended before the others came."""
        return self.host == socket.gethostname() and not os.path.exists(f"/proc/{self.pid}")


class Meeting(RendezvousHandler):
    """`number` None: taken in the order of arrival. One machine meets nobody, on a free port."""

    def __init__(self, endpoint: str, nodes: int, number: int | None, job: str, timeout_seconds: float) -> None:
        host, _, port = endpoint.rpartition(":")
        self.endpoint, self.host, self.port = endpoint, host.strip("[]"), int(port)
        self.nodes, self.number, self.job, self.timeout_seconds = nodes, number, job, timeout_seconds
        self.machine = Machine(socket.gethostname(), os.getpid(), nodes, job)
        self.server: dist.TCPStore | None = None
        self.said = ""

    def next_rendezvous(self) -> RendezvousInfo:
        self.deadline = time.monotonic() + self.timeout_seconds
        self.patience = time.monotonic() + PATIENCE
        self._serve()
        client = self._connect()
        if self.nodes == 1:
            return RendezvousInfo(client, 0, 1, RendezvousStoreInfo(self.host, self.port))
        store = dist.PrefixStore("shardline/machines", client)
        try:
            number = self._take_number(store)
            self._wait_for_all(store, number)
            if number == 0:
                store.set("met", "1")
        except RuntimeError as error:  # of the store
            raise UserError(f"--rdzv-endpoint {self.endpoint}: the machine there has ended") from error
        return RendezvousInfo(client, number, self.nodes, RendezvousStoreInfo(self.host, self.port))

    # ---- the store ---------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        """Serve the store, where this is the machine for it."""
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
                f"--rdzv-endpoint {self.endpoint}: port {self.port} of this machine is taken, by another job or"
                " by another machine's launcher with --node-rank 0"
            ) from error
        self.port = self.server.port

    def _is_here(self) -> bool:
        """Whether the endpoint is an address of this machine: only such a one can be bound."""
        try:
            found = socket.getaddrinfo(self.host, 0, type=socket.SOCK_STREAM)
        except OSError as error:
            raise UserError(f"--rdzv-endpoint {self.endpoint}: {self.host!r} has no address: {error}") from error
        for family, kind, _, _, address in found:
            with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
                probe.bind(address)
                return True
        return False

    def _connect(self) -> dist.TCPStore:
        """Wait until the store is there. The attempts are Python's: torch's would not hear a Ctrl-C.

        Who serves it goes by the loopback, which stays when the network does not.
        """
        host = "127.0.0.1" if self.server is not None else self.host
        while True:
            try:
                socket.create_connection((host, self.port), timeout=PATIENCE).close()
                break
            except OSError as error:
                if time.monotonic() > self.deadline:
                    hint = ", or no machine has that address" if self.number is None else ""
                    raise UserError(
                        f"--rdzv-endpoint {self.endpoint}: no answer within {self.timeout_seconds:g} s ({error}): the"
                        f" first machine has not started, or a firewall is between{hint}"
                    ) from error
                self._pause("the first machine")
        stores: list[dist.TCPStore] = []

        def open_store() -> None:
            seconds = timedelta(seconds=STORE_SECONDS)
            with contextlib.suppress(RuntimeError):
                stores.append(dist.TCPStore(host, self.port, is_master=False, wait_for_workers=False, timeout=seconds))

        # Something else may listen there and never answer
        thread = threading.Thread(target=open_store, name="shardline-store", daemon=True)
        thread.start()
        thread.join(CONNECT_SECONDS)
        if not stores:
            raise UserError(f"--rdzv-endpoint {self.endpoint}: what answers there is no launcher")
        return stores[0]

    # ---- the machines ------------------------------------------------------------------------------------------------

    def _take_number(self, store: dist.Store) -> int:
        if store.check(["met"]):
            raise UserError(f"--rdzv-endpoint {self.endpoint}: a job is under way there")
        free = range(0 if self.server else 1, self.nodes) if self.number is None else (self.number,)
        for number in free:
            if self._claim(store, f"machine/{number}"):
                return number
        if self.number is None:
            raise UserError(f"--rdzv-endpoint {self.endpoint}: {self.nodes} machines are there already (--nnodes)")
        holder = _decode(store.get(f"machine/{self.number}"))
        raise UserError(
            f"--node-rank {self.number}: {holder.host} (pid {holder.pid}) has this number;"
            f" give each machine its own, 0 to {self.nodes - 1}"
        )

    def _claim(self, store: dist.Store, key: str) -> bool:
        own = json.dumps(asdict(self.machine))
        held = store.compare_set(key, "", own)
        if held.decode() != own and _decode(held).is_gone():
            held = store.compare_set(key, held.decode(), own)
        return bool(held.decode() == own)

    def _wait_for_all(self, store: dist.Store, number: int) -> None:
        """Machine 0 looks at each of the others, they at machine 0 alone: there may be a thousand."""
        everyone = range(self.nodes)
        while True:
            complete = store.check([f"machine/{one}" for one in everyone])
            there = self._present(store, everyone if number == 0 else (0,))
            for other in there.values():
                self._compare(other)
            if complete:
                return
            if time.monotonic() > self.deadline:
                there = self._present(store, everyone)
                names = ", ".join(f"{one} is {machine.host}" for one, machine in there.items())
                raise UserError(
                    f"{_named(set(everyone) - set(there))} of {self.nodes} did not come to {self.endpoint} within"
                    f" {self.timeout_seconds:g} s ({names})"
                )
            what = _named(set(everyone) - set(there)) if number == 0 else "others"
            self._pause(f"{what} of {self.nodes}")

    def _present(self, store: dist.Store, numbers: Iterable[int]) -> dict[int, Machine]:
        keys = {number: f"machine/{number}" for number in numbers}
        return {number: _decode(store.get(key)) for number, key in keys.items() if store.check([key])}

    def _compare(self, other: Machine) -> None:
        for name, own, theirs in (("nnodes", self.nodes, other.nodes), ("rdzv-id", self.job, other.job)):
            if own != theirs:
                raise UserError(f"--{name} differs: {own} on this machine, {theirs} on {other.host}")

    def _pause(self, what: str) -> None:
        """A moment; after a while say what for."""
        if time.monotonic() > self.patience and self.said != what:
            print(f"waiting for {what} at {self.endpoint}", file=sys.stderr)
            self.said = what
        time.sleep(PERIOD)

    # ---- what torchrun's agent asks besides --------------------------------------------------------------------------

    def get_backend(self) -> str:
        return "shardline"

    @property
    def use_agent_store(self) -> bool:
        return True

    def get_run_id(self) -> str:
        return self.job

    def num_nodes_waiting(self) -> int:
        return 0

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def shutdown(self) -> bool:
        return True


def _decode(text: bytes) -> Machine:
    return Machine(**json.loads(text))


def _named(numbers: Collection[int]) -> str:
    return f"machine{'s' if len(numbers) > 1 else ''} {ranges(numbers)}"


def interface_towards(host: str) -> str | None:
    """The interface that leads to `host`, or that has its address; None where only a loopback does, or it is IPv6.

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
