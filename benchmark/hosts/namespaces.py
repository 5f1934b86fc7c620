"""Hosts on one machine: a network namespace each, joined by cables of any speed, delay and loss.

`with hosts(2) as network:` gives two hosts that reach each other, and the caller them, over
`switch.py` alone, or over `bridge.py`. Needs root, iproute2 and /dev/net/tun; `why_no_hosts` says
what is missing. Names hold the process id of their maker, so what a killed one has left is found
and removed.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count as count_up
from pathlib import Path
from typing import Any

import msgspec

from benchmark.hosts.bridge import add_bridge, add_port, ip, remove_bridge, remove_left_bridges
from benchmark.hosts.switch import Setting

ROOT = Path(__file__).resolve().parents[2]
# For measurements between networks (RFC 2544): in use on no machine that has other work.
_SUBNETS = "198.18"
# A process may have several networks at once.
_serials = count_up()
_NAME = re.compile(r"sglp-(\d+)-\d+")


def why_no_hosts() -> str:
    """The reason why this machine cannot run hosts, for a test that is skipped; "" where it can."""
    if os.geteuid() != 0:
        return "hosts of namespaces need root"
    if shutil.which("ip") is None or shutil.which("ss") is None:
        return "hosts of namespaces need iproute2 (make setup-hosts)"
    if not Path("/dev/net/tun").exists():
        return "hosts of namespaces need /dev/net/tun"
    return ""


@dataclass
class Host:
    """One of them; `number` is its port of the switch, from 1 on. Its monotonic clock is
    `clock_offset_s` before the machine's, and it runs on `cores` alone, where these are given."""

    number: int
    namespace: str
    address: str
    directory: Path
    network: "Network"
    cores: Sequence[int] = ()
    clock_offset_s: float = 0.0

    @property
    def name(self) -> str:
        return f"host{self.number}"

    def command(self, *argv: str) -> list[str]:
        """The command that runs `argv` on the host, with its own /dev/shm and TMPDIR, from
        `ROOT`."""
        cores = ",".join(map(str, self.cores))
        enter = [sys.executable, "-S", "-m", "benchmark.hosts.enter"]
        enter += [f"--cores={cores}", f"--clock-offset-s={self.clock_offset_s}"]
        enter += [f"--parent={os.getpid()}"]
        return [*enter, self.namespace, self.name, str(self.directory), *argv]

    def start(self, *argv: str, **options: Any) -> "subprocess.Popen[str]":
        """A process on the host; it is killed with the caller's thread."""
        return subprocess.Popen(self.command(*argv), cwd=ROOT, text=True, **options)

    def run(self, *argv: str) -> str:
        """Runs a command on the host and returns its output. Raises CalledProcessError where it
        fails."""
        return subprocess.run(
            self.command(*argv), cwd=ROOT, text=True, capture_output=True, check=True
        ).stdout

    def power_off(self) -> None:
        """Kills all that runs on the host, at once."""
        _kill_all_of(self.namespace)

    def cable(self, *, delay_ms: float = 0.0, gbit_per_s: float = 0.0, loss: float = 0.0) -> None:
        """From now on: half the delay between two such hosts one way, the rate each way."""
        self.network.set_cable(
            Setting(port=self.number, delay_ms=delay_ms, gbit_per_s=gbit_per_s, loss=loss)
        )

    def cut_cable(self) -> None:
        """Nothing reaches the host or leaves it, and no process is notified; `cable` repairs it."""
        self.network.set_cable(Setting(port=self.number, is_cut=True))

    def listeners(self) -> list[str]:
        """`ADDRESS:PORT` of every TCP socket that listens on the host (`ss -ltnH`)."""
        lines = self.run("ss", "-ltnH").splitlines()
        return sorted(line.split()[3] for line in lines)


@dataclass
class Network:
    """The hosts and the switch between them, unless they are bridged; the caller is port 0, with
    `address`."""

    address: str
    hosts: list[Host] = field(default_factory=list)
    switch: "subprocess.Popen[str] | None" = None

    def set_cable(self, setting: Setting) -> None:
        """Changes one cable; holds for every frame that is sent after the return."""
        assert self.switch is not None
        assert self.switch.stdin is not None
        assert self.switch.stdout is not None
        self.switch.stdin.write(msgspec.json.encode(setting).decode() + "\n")
        self.switch.stdin.flush()
        answer = self.switch.stdout.readline()
        assert answer == "set\n", f"the switch ended: {answer}"


@contextmanager
def hosts(
    count: int,
    *,
    cores: Sequence[Sequence[int]] = (),
    clock_offsets_s: Sequence[float] = (),
    is_bridged: bool = False,
) -> Iterator[Network]:
    """`count` hosts with cables that take no time. All that runs on them is killed at the end.

    Args:
        is_bridged: the kernel joins them, and their cables cannot be set.

    Raises RuntimeError where `why_no_hosts` has a reason.
    """
    if reason := why_no_hosts():
        raise RuntimeError(reason)
    remove_leftovers()
    subnet = _free_subnet()
    network = Network(f"{subnet}.254")
    with tempfile.TemporaryDirectory(prefix="sglp-hosts-") as directory:
        try:
            serials = [next(_serials) for _ in range(count + 1)]
            taps = [f"sglp{os.getpid()}.{serial}" for serial in serials]
            if is_bridged:
                add_bridge(taps[0])
                for tap in taps[1:]:
                    add_port(taps[0], tap)
            else:
                network.switch = _start_switch(taps)
            _address(taps[0], network.address, 0)
            for number in range(1, count + 1):
                place = Path(directory, f"host{number}")
                place.mkdir()
                host = Host(
                    number=number,
                    namespace=f"sglp-{os.getpid()}-{serials[number]}",
                    address=f"{subnet}.{number}",
                    directory=place,
                    network=network,
                    cores=cores[number - 1] if cores else (),
                    clock_offset_s=clock_offsets_s[number - 1] if clock_offsets_s else 0.0,
                )
                network.hosts.append(host)
                _join(host, taps[number])
            yield network
        finally:
            if is_bridged:
                remove_bridge(taps[0])
            for host in network.hosts:
                _remove(host.namespace)
            if network.switch is not None:
                network.switch.communicate("")


def remove_leftovers() -> list[str]:
    """Removes the hosts of processes that have ended without doing so; returns their names."""
    left = remove_left_bridges()
    for line in ip("netns", "list").splitlines():
        found = _NAME.match(line)
        if found and not Path("/proc", found[1]).exists():
            _remove(found[0])
            left.append(found[0])
    return left


def _start_switch(taps: Sequence[str]) -> "subprocess.Popen[str]":
    switch = subprocess.Popen(
        [sys.executable, "-m", "benchmark.hosts.switch", *taps],
        cwd=ROOT,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert switch.stdout is not None
    if switch.stdout.readline() != "ready\n":
        switch.wait()
        raise RuntimeError("the switch between the hosts did not start; it says why above")
    return switch


def _join(host: Host, tap: str) -> None:
    """A namespace whose `eth0` is the far end of that device."""
    ip("netns", "add", host.namespace)
    ip("link", "set", tap, "netns", host.namespace)
    inside = ("-n", host.namespace)
    ip(*inside, "link", "set", tap, "name", "eth0")
    ip(*inside, "link", "set", "lo", "up")
    _address("eth0", host.address, host.number, *inside)


def _address(device: str, address: str, port: int, *inside: str) -> None:
    mac = f"02:00:00:00:00:{port:02x}"
    for what in (
        ("address", "add", f"{address}/24", "dev", device),
        ("link", "set", device, "address", mac, "txqueuelen", "10000", "up"),
    ):
        ip(*inside, *what)


def _remove(namespace: str) -> None:
    _kill_all_of(namespace)
    ip("netns", "delete", namespace)


def _kill_all_of(namespace: str) -> None:
    while pids := ip("netns", "pids", namespace).split():
        for pid in pids:
            try:
                os.kill(int(pid), signal.SIGKILL)
            except ProcessLookupError:
                continue
            _reap(int(pid))


def _reap(pid: int) -> None:
    """Waits for a child's end; another's is waited for by its parent."""
    if Path("/proc", str(pid)).exists():
        with suppress(ChildProcessError):
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


def _free_subnet() -> str:
    """The first three bytes of addresses that no device of the machine has."""
    taken = ip("-o", "-4", "address")
    for number in range(os.getpid(), os.getpid() + 256):
        if f" {_SUBNETS}.{number % 256}." not in taken:
            return f"{_SUBNETS}.{number % 256}"
    raise RuntimeError("256 other networks of hosts are there already")
