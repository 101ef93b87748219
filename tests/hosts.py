"""Hosts on one machine: network namespaces with veth pairs between them, shaped to the speed of a real link.

    with two_hosts(rate="1gbit") as (a, b):
        job = b.start([sys.executable, "program.py"], {"MASTER_ADDR": a.address})
        a.run([...])
        a.sent_bytes()

Two are joined by one link. More have a link each to a switch (`joined_hosts`): what one host sends and what it receives
is shaped, whoever is at the other end. Each has a name of its own, and knows all. Needs root and iproute2; a test that
asks for hosts where they cannot be made is skipped, and says why.
"""

import contextlib
import dataclasses
import os
import shutil
import string
import subprocess
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests import processes

NETWORK = "10.77.0"
FILES = Path("/etc/netns")  # `ip netns exec NAME` shows the files in FILES/NAME as those in /etc
NAMED = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"']


@dataclass(frozen=True)
class Host:
    name: str  # of its namespace, and its hostname
    interface: str
    address: str

    def start(self, words: Sequence[str], env: Mapping[str, str] | None = None, **options) -> subprocess.Popen:
        """A process on this host."""
        command = ["ip", "netns", "exec", self.name, *NAMED, self.name, *words]
        return processes.start(command, env={**os.environ, **(env or {})}, **options)

    def run(
        self, words: Sequence[str], env: Mapping[str, str] | None = None, timeout: float = 60, **options
    ) -> subprocess.CompletedProcess:
        """Run a process on this host to its end."""
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **options}
        process = self.start(words, env, **options)
        try:
            stdout, stderr = process.communicate(timeout=timeout)
        finally:
            processes.end(process)
        return subprocess.CompletedProcess(list(words), process.returncode, stdout, stderr)

    def sent_bytes(self) -> int:
        return self._counter("tx_bytes")

    def received_bytes(self) -> int:
        return self._counter("rx_bytes")

    def cut(self) -> None:
        """Take the link down; both sides stop hearing of each other, without a word."""
        _ip("netns", "exec", self.name, "ip", "link", "set", self.interface, "down")

    def mend(self) -> None:
        """The link is there again."""
        _ip("netns", "exec", self.name, "ip", "link", "set", self.interface, "up")

    def _counter(self, name: str) -> int:
        # sysfs belongs to the network namespace it was mounted in: `ip netns exec` mounts its own.
        path = f"/sys/class/net/{self.interface}/statistics/{name}"
        return int(_ip("netns", "exec", self.name, "cat", path))


@contextlib.contextmanager
def two_hosts(
    rate: str | None = "1gbit", delay: str | None = None, loopback_names: bool = False
) -> Iterator[tuple[Host, Host]]:
    """Two hosts and their link: `rate` and `delay` as tc writes them ("1gbit", "2ms"), None for no limit.

    `loopback_names`: a host's own name stands for its loopback, as many systems are installed.
    """
    with joined_hosts(2, rate, delay, loopback_names) as (a, b):
        yield a, b


@contextlib.contextmanager
def joined_hosts(
    count: int, rate: str | None = "1gbit", delay: str | None = None, loopback_names: bool = False
) -> Iterator[tuple[Host, ...]]:
    """So many hosts, two at least, which all reach each other."""
    reason = missing()
    if reason:
        pytest.skip(reason)
    mark = uuid.uuid4().hex[:6]
    sides = string.ascii_lowercase[:count]
    hosts = tuple(Host(f"shl-{mark}-{s}", f"v{mark}{s}", f"{NETWORK}.{n}") for n, s in enumerate(sides, start=1))
    switch = Host(f"shl-{mark}-switch", f"v{mark}", "")
    made = []
    try:
        for host in (*hosts, *([switch] if count > 2 else [])):
            _ip("netns", "add", host.name)
            made.append(host)
        for host in hosts:
            _name_hosts(host, hosts, "127.0.1.1" if loopback_names else host.address)
        if count == 2:
            _link(*hosts)
        else:
            _ip("-n", switch.name, "link", "add", switch.interface, "type", "bridge")
            _ip("-n", switch.name, "link", "set", switch.interface, "up")
        for host in hosts:
            if count > 2:
                port = dataclasses.replace(switch, interface=host.interface)
                _link(host, port)
                _ip("-n", port.name, "link", "set", port.interface, "master", switch.interface, "up")
                _shape(port, rate, delay=None)
            _set_up(host, rate, delay)
        yield hosts
    finally:
        for host in made:
            _end_processes(host)
            subprocess.run(["ip", "netns", "delete", host.name], capture_output=True)
            shutil.rmtree(FILES / host.name, ignore_errors=True)


def missing() -> str:
    """Why two hosts cannot be made here, or nothing."""
    absent = [name for name in ("ip", "tc", "unshare", "hostname") if shutil.which(name) is None]
    if absent:
        return f"two hosts need the commands {', '.join(absent)}: apt-get install iproute2 util-linux hostname"
    if os.geteuid() != 0:
        return "two hosts need root, to make network namespaces"
    probe = f"shl-{uuid.uuid4().hex[:6]}"
    tried = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True)
    subprocess.run(["ip", "netns", "delete", probe], capture_output=True)
    return f"two hosts need network namespaces: {tried.stderr.strip()}" if tried.returncode else ""


def _name_hosts(host: Host, hosts: Sequence[Host], own: str) -> None:
    folder = FILES / host.name
    folder.mkdir(parents=True)
    addresses = {one.name: one.address for one in hosts} | {host.name: own}
    lines = ["127.0.0.1 localhost", *(f"{address} {name}" for name, address in addresses.items())]
    (folder / "hosts").write_text("\n".join(lines) + "\n")


def _link(a: Host, b: Host) -> None:
    _ip("link", "add", a.interface, "netns", a.name, "type", "veth", "peer", "name", b.interface, "netns", b.name)


def _set_up(host: Host, rate: str | None, delay: str | None) -> None:
    _ip("-n", host.name, "link", "set", "lo", "up")
    _ip("-n", host.name, "address", "add", f"{host.address}/24", "dev", host.interface)
    _ip("-n", host.name, "link", "set", host.interface, "up")
    _shape(host, rate, delay)


def _shape(host: Host, rate: str | None, delay: str | None) -> None:
    # netem outside delays each packet, tbf inside lets them go at the rate.
    parent = ["root", "handle", "1:"]
    if delay is not None:
        _tc(host, *parent, "netem", "delay", delay, "limit", "100000")
        parent = ["parent", "1:", "handle", "2:"]
    if rate is not None:
        _tc(host, *parent, "tbf", "rate", rate, "burst", "256kb", "latency", "100ms")


def _tc(host: Host, *words: str) -> None:
    _checked(["tc", "-n", host.name, "qdisc", "add", "dev", host.interface, *words])


def _ip(*words: str) -> str:
    return _checked(["ip", *words])


def _checked(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


def _end_processes(host: Host) -> None:
    """What still runs on the host would keep the namespace alive."""
    pids = subprocess.run(["ip", "netns", "pids", host.name], capture_output=True, text=True).stdout.split()
    for pid in pids:
        if Path(f"/proc/{pid}").exists():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), 9)
