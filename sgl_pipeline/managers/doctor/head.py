"""The doctor of rank 0: takes the others in, and has each pair of hosts measure its link.

Links are measured one after the other, so that none takes from another. Nothing is waited for
without a limit: who does not come, falls silent or does not answer is a fault of the cluster's.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import permutations

import msgspec

from sgl_pipeline.args import ClusterArgs
from sgl_pipeline.cluster.cluster_port import HINTS, ClusterPort
from sgl_pipeline.cluster.doors import DIAL_TIMEOUT_S, Door
from sgl_pipeline.cluster.framed_stream import FramedStream
from sgl_pipeline.cluster.host_messages import Ping, Pong, Rejected
from sgl_pipeline.cluster.link_probe import LIMIT_S
from sgl_pipeline.cluster.secure_stream import SecureStream
from sgl_pipeline.managers.doctor.doctor_messages import (
    DOCTOR_DOOR,
    FromHost,
    HostFacts,
    Probed,
    ProbeHost,
    ToHost,
    Verdict,
)
from sgl_pipeline.managers.doctor.host_end import PING_INTERVAL_S, SILENCE_S, probe
from sgl_pipeline.managers.hosts.frame_pump import FramePump
from sgl_pipeline.managers.hosts.host_checks import (
    count_fault,
    how_to_bring,
    rank_fault,
    version_fault,
)

logger = logging.getLogger(__name__)

# Of all windows in which a rate is measured, together; and of one.
_ALL_WINDOWS_S = 60.0
_LEAST_WINDOW_S, _MOST_WINDOW_S = 0.3, 1.5

# For what the streams have not taken yet, on links of whatever delay.
PARTING_S = 2.0

# The host that measured, and the one that it dialed.
Pair = tuple[int, int]


@dataclass(slots=True, eq=False)
class _CheckedHost:
    """A connection to another host's doctor; `facts` is None until it has greeted."""

    sender: str
    heard_s: float
    pump: FramePump | None = None
    facts: HostFacts | None = None
    # What is to come of the probes that it was asked for, by rank.
    probes: dict[int, "asyncio.Future[Probed]"] = field(default_factory=dict)

    def send(self, message: ToHost) -> None:
        assert self.pump is not None
        self.pump.send(msgspec.msgpack.encode(message))

    def end(self, reason: str) -> None:
        """Closes the connection; who waits for an answer gets the reason."""
        assert self.pump is not None
        self.pump.close()
        for rank, answer in self.probes.items():
            if not answer.done():
                answer.set_result(Probed(rank, None, reason))


class DoctorHead:
    """The hosts that have come, beside this one. `faults` are what the connections have shown.

    Args:
        own: the facts of this host.
    """

    def __init__(self, cluster: ClusterArgs, own: HostFacts, run_directory: str) -> None:
        self.faults: list[str] = []
        self._is_over = False
        self._cluster = cluster
        self._own = own
        self._run_directory = run_directory
        self._hosts: dict[int, _CheckedHost] = {}
        self._strangers: set[_CheckedHost] = set()
        self._decoder = msgspec.msgpack.Decoder(FromHost)
        self._loop = asyncio.get_running_loop()
        self._door = Door(run_directory, DOCTOR_DOOR)
        self._loop.add_reader(self._door, self._accept)

    @property
    def facts(self) -> dict[int, HostFacts]:
        """Of all hosts that are there, by rank."""
        found = {rank: host.facts for rank, host in sorted(self._hosts.items()) if host.facts}
        return {0: self._own, **found}

    async def gather(self, limit_s: float) -> None:
        """Returns when all hosts have come, or after `limit_s`; then who has not is a fault."""
        deadline_s = time.monotonic() + limit_s
        while len(self.facts) < self._cluster.num_hosts and time.monotonic() < deadline_s:
            await asyncio.sleep(0.05)
        for rank in range(1, self._cluster.num_hosts):
            if rank not in self._hosts:
                self._add_fault(
                    f"host {rank} has not come within {limit_s:g} s: "
                    f"{how_to_bring(rank, self._cluster.head_address)}"
                )

    async def measure(self) -> Mapping[Pair, Probed]:
        """Each link, from either end."""
        pairs = [*permutations(self.facts, 2)]
        window_s = min(_MOST_WINDOW_S, max(_LEAST_WINDOW_S, _ALL_WINDOWS_S / max(1, len(pairs))))
        found = {}
        for number, (one, other) in enumerate(pairs, 1):
            logger.info(
                "measuring link %d of %d: host %d to host %d", number, len(pairs), one, other
            )
            found[one, other] = await self._probe(one, other, window_s)
        return found

    def name_dropped(self, port: ClusterPort) -> None:
        """Books connections that the port has dropped, although they may be of the cluster."""
        for reason, hint in HINTS.items():
            if sender := port.last_sender.get(reason):
                self._add_fault(f"the host at {sender} has {reason}: {hint}")

    async def say(self, verdict: Verdict) -> None:
        """Ends the doctors of the other hosts: returns when they have left, or after a moment."""
        self._is_over = True
        for host in self._hosts.values():
            host.send(verdict)
        deadline_s = time.monotonic() + PARTING_S
        while self._hosts and time.monotonic() < deadline_s:
            await asyncio.sleep(0.02)

    def close(self) -> None:
        self._loop.remove_reader(self._door)
        self._door.close()
        for host in (*self._hosts.values(), *self._strangers):
            host.end("the doctor has ended")

    async def watch(self) -> None:
        """Pings, and gives up who is silent, until it is cancelled."""
        while True:
            now_s = time.monotonic()
            for rank, host in [*self._hosts.items()]:
                host.send(Ping(now_s))
                if now_s - host.heard_s > SILENCE_S:
                    self._lose(rank, f"it has been silent for {SILENCE_S:g} s")
            await asyncio.sleep(PING_INTERVAL_S)

    async def _probe(self, one: int, other: int, window_s: float) -> Probed:
        facts = self.facts
        if not {one, other} <= {*facts}:
            return Probed(other, None, "the host is lost")
        address = facts[other].hello.address
        if one == 0:
            return await probe(other, address, self._run_directory, window_s)
        host = self._hosts[one]
        host.probes[other] = answer = self._loop.create_future()
        host.send(ProbeHost(other, address, window_s))
        try:
            return await asyncio.wait_for(answer, DIAL_TIMEOUT_S + LIMIT_S + SILENCE_S)
        except TimeoutError:
            return Probed(other, None, f"host {one} does not answer when it is asked to measure")

    def _accept(self) -> None:
        while (accepted := self._door.accept()) is not None:
            connection, sender = accepted
            host = _CheckedHost(sender, time.monotonic())
            stream = SecureStream(connection, self._run_directory, is_server=True)
            host.pump = FramePump(
                FramedStream(stream), partial(self._take, host), partial(self._closed, host)
            )
            self._strangers.add(host)

    def _take(self, host: _CheckedHost, frame: bytes) -> None:
        host.heard_s = time.monotonic()
        try:
            message = self._decoder.decode(frame)
        except msgspec.DecodeError:
            self._reject(host, version_fault(f"the host at {host.sender}", "another version"))
            return
        if isinstance(message, HostFacts):
            self._greet(host, message)
        elif isinstance(message, Probed):
            answer = host.probes.get(message.rank)
            if answer is not None and not answer.done():
                answer.set_result(message)
        else:
            assert isinstance(message, Pong)  # that it was heard is all that counts

    def _greet(self, host: _CheckedHost, facts: HostFacts) -> None:
        hello = facts.hello
        before = self._hosts.get(hello.rank)
        known = None if before is None or before.facts is None else before.facts.hello
        fault = count_fault(hello, self._cluster.num_hosts) or rank_fault(hello, known)
        if fault:
            self._reject(host, fault, f"{hello.title}: ")
            return
        if before is not None:
            before.end("its doctor was started again")
        self._strangers.discard(host)
        host.facts = facts
        self._hosts[hello.rank] = host
        logger.info("%s is there", hello.title)

    def _reject(self, host: _CheckedHost, fault: str, who: str = "") -> None:
        self._add_fault(who + fault)
        host.send(Rejected(fault))

    def _closed(self, host: _CheckedHost, reason: str) -> None:
        self._strangers.discard(host)
        host.end(reason)
        rank = None if host.facts is None else host.facts.hello.rank
        if rank is None or self._hosts.get(rank) is not host:
            return
        if self._is_over:
            del self._hosts[rank]
        else:
            self._lose(rank, reason)

    def _lose(self, rank: int, reason: str) -> None:
        host = self._hosts.pop(rank)
        assert host.facts is not None
        host.end(f"{host.facts.hello.title} is lost: {reason}")
        self._add_fault(f"{host.facts.hello.title} is lost: {reason}; look at its output")

    def _add_fault(self, text: str) -> None:
        """Says it at once: the rest may take a while."""
        if text not in self.faults:
            self.faults.append(text)
            logger.warning("%s", text)


@asynccontextmanager
async def doctor_head(
    cluster: ClusterArgs, own: HostFacts, run_directory: str
) -> AsyncIterator[DoctorHead]:
    """A head whose hosts are watched."""
    head = DoctorHead(cluster, own, run_directory)
    watching = asyncio.get_running_loop().create_task(head.watch())
    try:
        yield head
    finally:
        watching.cancel()
        with suppress(asyncio.CancelledError):
            await watching
        head.close()
