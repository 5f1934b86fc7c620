"""Finds the faults of a cluster in its hosts' facts and its links' readings. Pure.

A fault is one line: which host, and what to do. A fault that a server's head would find has the
head's words (`managers/hosts/host_checks.py`).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from sgl_pipeline.cluster.link_probe import LinkReading
from sgl_pipeline.managers.doctor.doctor_messages import HostFacts, Probed
from sgl_pipeline.managers.hosts.host_checks import model_fault, version_fault


@dataclass(frozen=True, slots=True)
class MeasuredLink:
    """Both ways of the link between two hosts, by rank."""

    one: int
    other: int
    gbit_per_s_there: float
    gbit_per_s_back: float
    median_ms: float
    worst_ms: float

    @property
    def gbit_per_s(self) -> float:
        """The rate that the link reaches in both directions: the lower of the two."""
        return min(self.gbit_per_s_there, self.gbit_per_s_back)


@dataclass(frozen=True, slots=True)
class Clock:
    """By how much a host's clocks are ahead of those of rank 0, within `error_ms`: the monotonic
    one, which stages are timed by, and the time of day."""

    monotonic_s: float
    wall_ms: float
    error_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """All that was found. `hosts` are those that are there, by rank, `probes` what each of a pair
    found of the link to the other; `connection_faults` come first in `faults`."""

    hosts: Mapping[int, HostFacts]
    probes: Mapping[tuple[int, int], Probed]
    connection_faults: tuple[str, ...] = ()

    @property
    def faults(self) -> tuple[str, ...]:
        return (*self.connection_faults, *self._host_faults(), *self._link_faults())

    @property
    def links(self) -> list[MeasuredLink]:
        """The links that were measured both ways."""
        found = []
        for one, other in self.probes:
            there, back = self._reading(other, one), self._reading(one, other)
            if one < other and there is not None and back is not None:
                found.append(
                    MeasuredLink(
                        one,
                        other,
                        there.gbit_per_s,
                        back.gbit_per_s,
                        (there.median_ms + back.median_ms) / 2,
                        max(there.worst_ms, back.worst_ms),
                    )
                )
        return found

    def clock(self, rank: int) -> Clock | None:
        """The clock of a host other than rank 0; None if the link was not measured from there."""
        reading = self._reading(0, rank)
        if reading is None:
            return None
        # What one adds to a moment of the other to have one's own is by how much it is behind.
        wall_s = self.hosts[rank].wall_s - self.hosts[0].wall_s - reading.offset_s
        return Clock(-reading.offset_s, wall_s * 1e3, reading.error_s * 1e3)

    def _reading(self, dialing: int, dialed: int) -> LinkReading | None:
        probed = self.probes.get((dialing, dialed))
        return None if probed is None else probed.reading

    def _host_faults(self) -> Iterator[str]:
        head = self.hosts[0]
        for facts in self.hosts.values():
            hello, title = facts.hello, facts.hello.title
            if fault := version_fault(title, hello.version):
                yield fault
            for name, version in facts.versions.items():
                if not version:
                    yield f"{title} has no {name}: install what sgl_pipeline needs on it"
                elif head.versions.get(name) not in ("", version):
                    yield (
                        f"{title} has {name} {version}, rank 0 {head.versions.get(name)}: install "
                        "the same version on every host"
                    )
            if facts.model_fault:
                yield f"{title}: {facts.model_fault}"
            elif not head.model_fault and (
                fault := model_fault(hello.model_digest, head.hello.model_digest, head.hello.title)
            ):
                yield f"{title}: {fault}"

    def _link_faults(self) -> Iterator[str]:
        for (one, other), probed in self.probes.items():
            if probed.reading is None and {one, other} <= {*self.hosts}:
                yield f"host {one} has no link to host {other}: {probed.fault}"
