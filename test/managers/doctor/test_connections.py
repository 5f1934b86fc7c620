"""Doctors of several hosts in one process: they meet, measure, and miss each other by name."""

import asyncio
import os
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.clusters import SECRET, host_directory
from support.doctor_hosts import facts_of

from sgl_pipeline.args import ClusterArgs
from sgl_pipeline.cluster.doors import DialError, dial
from sgl_pipeline.cluster.framed_stream import FramedStream
from sgl_pipeline.cluster.secure_stream import SecureStream
from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.managers.doctor import head
from sgl_pipeline.managers.doctor.command import follow, lead
from sgl_pipeline.managers.doctor.doctor_messages import DOCTOR_DOOR, HostFacts, Verdict
from sgl_pipeline.managers.doctor.findings import Findings

LONG_S = 20.0


@pytest.fixture(autouse=True)
def short_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head, "_MOST_WINDOW_S", 0.1)
    monkeypatch.setattr(head, "_LEAST_WINDOW_S", 0.1)


class Hosts:
    """Hosts that are all this machine, each with its own loopback address and directory."""

    def __init__(self, path: Path, count: int) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.path, self.count = path, count

    def cluster(self, rank: int) -> ClusterArgs:
        return ClusterArgs(num_hosts=self.count, rank=rank, head_address=f"127.0.0.1:{self.port}")

    def facts(self, rank: int, /, **changes: Any) -> HostFacts:
        address = f"127.0.0.{rank + 1}:{self.port}"
        return facts_of(rank, **({"num_hosts": self.count, "address": address} | changes))

    def directory(self, rank: int, secret: bytes = SECRET) -> str:
        return host_directory(self.path / f"{rank}-{os.urandom(4).hex()}", secret)

    async def lead(self, limit_s: float = LONG_S) -> Findings:
        return await lead(self.cluster(0), self.facts(0), self.directory(0), limit_s)

    async def follow(self, rank: int, /, limit_s: float = LONG_S, **changes: Any) -> Verdict:
        secret = changes.pop("secret", SECRET)
        own = self.facts(rank, **changes)
        return await follow(self.cluster(rank), own, self.directory(rank, secret), limit_s)


def run(*parts: Any) -> list[Any]:
    """What each part returns or raises."""

    async def all_parts() -> list[Any]:
        return await asyncio.gather(*parts, return_exceptions=True)

    return asyncio.run(all_parts())


def test_three_hosts_measure_all_links_and_hear_the_verdict(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path, 3)
    findings, *verdicts = run(hosts.lead(), hosts.follow(1), hosts.follow(2))
    assert findings.faults == ()
    assert verdicts == [Verdict(()), Verdict(())]
    assert [(link.one, link.other) for link in findings.links] == [(0, 1), (0, 2), (1, 2)]
    assert all(link.gbit_per_s > 0.0 for link in findings.links)
    # They are one machine.
    clock = findings.clock(2)
    assert clock is not None and abs(clock.monotonic_s) * 1e3 <= clock.error_ms


def test_a_host_that_does_not_come_is_named_and_the_others_are_measured(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path, 3)
    findings, verdict = run(hosts.lead(limit_s=1.0), hosts.follow(1))
    (fault,) = findings.faults
    assert fault.startswith("host 2 has not come within 1 s") and "--node-rank 2" in fault
    assert verdict == Verdict((fault,))
    assert len(findings.links) == 1


def test_rank_0_that_does_not_come_is_named(tmp_path: Path) -> None:
    (error,) = run(Hosts(tmp_path, 2).follow(1, limit_s=0.3))
    assert isinstance(error, ConfigurationError)
    assert "rank 0 at 127.0.0.1" in str(error) and "start the doctor there" in str(error)


def test_another_key_is_named_on_both_sides(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path, 2)
    findings, error = run(hosts.lead(limit_s=1.5), hosts.follow(1, secret=b"another" * 6))
    assert "another cluster key" in str(error)
    assert "host 1 has not come" in findings.faults[0]
    assert "has another key: give all hosts the same cluster key" in findings.faults[1]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_hosts": 5}, "it was started with --nnodes 5, the head with --nnodes 2"),
        ({"rank": 0}, "--node-rank 0 is the head"),
    ],
)
def test_a_host_that_counts_otherwise_is_sent_away_with_the_reason(
    tmp_path: Path, changes: dict[str, int], words: str
) -> None:
    hosts = Hosts(tmp_path, 2)
    findings, error = run(hosts.lead(limit_s=1.5), hosts.follow(1, **changes))
    assert isinstance(error, ConfigurationError) and words in str(error)
    assert any(words in fault for fault in findings.faults)


def test_two_hosts_of_one_rank_are_named(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path, 3)
    elsewhere = f"127.0.0.9:{hosts.port}"
    findings, *others = run(
        hosts.lead(limit_s=1.5), hosts.follow(1), hosts.follow(1, address=elsewhere)
    )
    assert sum(isinstance(other, ConfigurationError) for other in others) == 1
    assert any("--node-rank 1 belongs to host 1" in fault for fault in findings.faults)


def test_a_host_that_is_lost_while_it_measures_holds_nothing_up(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path, 2)

    def greet_and_go() -> None:
        directory = hosts.directory(1)
        connection = None
        while connection is None:
            with suppress(DialError):
                connection = dial(f"127.0.0.1:{hosts.port}", DOCTOR_DOOR, directory)
        stream = FramedStream(SecureStream(connection, directory, is_server=False))
        stream.send(msgspec.msgpack.encode(hosts.facts(1)))
        while stream.receive() is None:  # a ping: it has been taken in
            stream.flush()
            stream.wait(0.1)
        stream.close()

    findings, _ = run(hosts.lead(), asyncio.to_thread(greet_and_go))
    assert any("host 1" in fault and "is lost" in fault for fault in findings.faults)
