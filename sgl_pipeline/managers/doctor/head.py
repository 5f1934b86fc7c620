"""The doctor of rank 0: gathers the others, and has each pair of hosts measure its link.

It measures one link at a time, so that none takes from another. Each wait has a limit: a host that
does not come, falls silent or does not answer is a fault of the cluster.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from itertools import permutations

import msgspec

from sgl_pipeline.args import ClusterArgs
from sgl_pipeline.cluster.cluster_port import HINTS, ClusterPort
from sgl_pipeline.cluster.doors import DIAL_TIMEOUT_S
from sgl_pipeline.cluster.host_messages import Rejected
from sgl_pipeline.cluster.link_probe import LIMIT_S
from sgl_pipeline.managers.doctor.doctor_messages import (
    DOCTOR_DOOR,
    FromHost,
    HostFacts,
    Probed,
    ProbeHost,
    Verdict,
)
from sgl_pipeline.managers.doctor.host_end import PING_INTERVAL_S, SILENCE_S, probe
from sgl_pipeline.managers.hosts.host_checks import count_fault, how_to_bring, rank_fault
from sgl_pipeline.managers.hosts.host_gathering import GatheredHost, HostGathering
from sgl_pipeline.managers.hosts.host_stream import HostStream

logger = logging.getLogger(__name__)

# Of all windows in which a rate is measured, together; and of one.
_ALL_WINDOWS_S = 60.0
_LEAST_WINDOW_S, _MOST_WINDOW_S = 0.3, 1.5

# For what the streams have not taken yet, on links of whatever delay.
PARTING_S = 2.0

# The host that measured, and the one that it dialed.
Pair = tuple[int, int]


@dataclass(slots=True, eq=False, kw_only=True)
class _CheckedHost(GatheredHost):
    """Another host's doctor. `probes` are the answers that it owes, by rank of the other end."""

    facts: HostFacts
    probes: dict[int, "asyncio.Future[Probed]"] = field(default_factory=dict)


class DoctorHead(HostGathering[_CheckedHost]):
    """The hosts that have come, beside this one. `faults` are what the connections have shown.

    Args:
        own: the facts of this host.
    """

    def __init__(self, cluster: ClusterArgs, own: HostFacts, run_directory: str) -> None:
        super().__init__(DOCTOR_DOOR, run_directory, FromHost, PING_INTERVAL_S, SILENCE_S)
        self.faults: list[str] = []
        self._is_over = False
        self._cluster = cluster
        self._own = own

    @property
    def facts(self) -> dict[int, HostFacts]:
        """The facts of all present hosts, by rank."""
        found = {rank: host.facts for rank, host in sorted(self.hosts.items())}
        return {0: self._own, **found}

    async def gather(self, limit_s: float) -> None:
        """Returns when all hosts have come, or after `limit_s`; then who has not is a fault."""
        deadline_s = time.monotonic() + limit_s
        while len(self.facts) < self._cluster.num_hosts and time.monotonic() < deadline_s:
            await asyncio.sleep(0.05)
        for rank in range(1, self._cluster.num_hosts):
            if rank not in self.hosts:
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
        for host in self.hosts.values():
            host.send(verdict)
        deadline_s = time.monotonic() + PARTING_S
        while self.hosts and time.monotonic() < deadline_s:
            await asyncio.sleep(0.02)

    async def _probe(self, one: int, other: int, window_s: float) -> Probed:
        facts = self.facts
        if not {one, other} <= {*facts}:
            return Probed(other, None, "the host is lost")
        address = facts[other].hello.address
        if one == 0:
            return await probe(other, address, self._run_directory, window_s)
        host = self.hosts[one]
        host.probes[other] = answer = self._loop.create_future()
        host.send(ProbeHost(other, address, window_s))
        try:
            return await asyncio.wait_for(answer, DIAL_TIMEOUT_S + LIMIT_S + SILENCE_S)
        except TimeoutError:
            return Probed(other, None, f"host {one} does not answer when it is asked to measure")

    def _greeted(
        self, message: msgspec.Struct, stream: HostStream[msgspec.Struct]
    ) -> _CheckedHost | None:
        if not isinstance(message, HostFacts):
            return None
        return _CheckedHost(hello=message.hello, facts=message, stream=stream)

    def _objection(self, host: _CheckedHost, before: _CheckedHost | None) -> Rejected | None:
        known = None if before is None else before.hello
        fault = count_fault(host.hello, self._cluster.num_hosts) or rank_fault(host.hello, known)
        return Rejected(fault) if fault else None

    def _on_host(self, host: _CheckedHost) -> None:
        logger.info("%s is there", host.hello.title)

    def _take(self, host: _CheckedHost, message: msgspec.Struct) -> None:
        if isinstance(message, Probed):
            answer = host.probes.get(message.rank)
            if answer is not None and not answer.done():
                answer.set_result(message)

    def _on_lost(self, host: _CheckedHost, reason: str) -> None:
        fault = f"{host.hello.title} is lost: {reason}"
        for rank, answer in host.probes.items():
            if not answer.done():
                answer.set_result(Probed(rank, None, fault))
        if not self._is_over and host.hello.rank not in self.hosts:
            self._add_fault(f"{fault}; look at its output")

    def _complain(self, text: str) -> None:
        self._add_fault(text)

    def _add_fault(self, text: str) -> None:
        """Says it at once: the rest may take a while."""
        if text not in self.faults:
            self.faults.append(text)
            logger.warning("%s", text)


@asynccontextmanager
async def doctor_head(
    cluster: ClusterArgs, own: HostFacts, run_directory: str
) -> AsyncIterator[DoctorHead]:
    """A head that pings its hosts."""
    head = DoctorHead(cluster, own, run_directory)
    serving = asyncio.get_running_loop().create_task(head.serve())
    try:
        yield head
    finally:
        serving.cancel()
        with suppress(asyncio.CancelledError):
            await serving
        head.close()
