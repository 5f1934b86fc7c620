"""The hosts of a cluster on paper and the links between them, from a JSON file.

    {"hosts": [{"name": "a", "stages": 2}, {"name": "b", "stages": 2, "speed": 0.5}],
     "link": {"gbit_per_s": 10, "delay_ms": 0.1},
     "links": [{"between": ["a", "b"], "gbit_per_s": 1, "delay_ms": 1}]}

The first host is the head (`--node-rank 0`).
"""

from pathlib import Path

import msgspec

from sgl_pipeline.decoding import decode
from sgl_pipeline.errors import ConfigurationError, MalformedData


class NetworkLink(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """From one host to another and back, both ways at once: `delay_ms` one way, and Gbit/s of what
    a stage hands over."""

    gbit_per_s: float
    delay_ms: float

    def busy_ms(self, num_bytes: int) -> float:
        """Milliseconds that `num_bytes` bytes occupy the link."""
        return num_bytes * 8e-6 / self.gbit_per_s

    def transfer_ms(self, num_bytes: int) -> float:
        """From the first byte's leaving to the last one's arrival on an idle link."""
        return self.delay_ms + self.busy_ms(num_bytes)


class HostPair(NetworkLink, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The link `between` two hosts, by name."""

    between: tuple[str, str]


class PaperHost(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A host with `stages` stages, each on a device as in `plan --devices`: `speed` relative to the
    measured one, and `memory` such as 24GiB (None: as much as a stage has here)."""

    name: str
    stages: int = 1
    speed: float = 1.0
    memory: str | None = None


class HostNetwork(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`link` joins all pairs of hosts that `links` does not name."""

    hosts: tuple[PaperHost, ...]
    link: NetworkLink | None = None
    links: tuple[HostPair, ...] = ()

    @property
    def num_stages(self) -> int:
        return sum(host.stages for host in self.hosts)

    @property
    def host_of_stage(self) -> tuple[int, ...]:
        """The place in `hosts` of each stage's host."""
        return tuple(place for place, host in enumerate(self.hosts) for _ in range(host.stages))

    @property
    def stage_slowness(self) -> tuple[float, ...]:
        """Factors of each stage's times."""
        return tuple(1.0 / self.hosts[place].speed for place in self.host_of_stage)

    def between(self, one: int, other: int) -> NetworkLink | None:
        """The link between two hosts, by their places; None for a host and itself."""
        if one == other:
            return None
        names = {self.hosts[one].name, self.hosts[other].name}
        named = (link for link in self.links if set(link.between) == names)
        return next(named, self.link)

    def ordered(self, order: tuple[int, ...]) -> "HostNetwork":
        """The same hosts in another order."""
        return msgspec.structs.replace(self, hosts=tuple(self.hosts[place] for place in order))


def read_host_network(path: Path) -> HostNetwork:
    """Reads the file. Raises ConfigurationError, which names the fault."""
    try:
        network = decode(msgspec.json.Decoder(HostNetwork), path.read_bytes())
    except OSError as error:
        raise ConfigurationError(f"cannot read {path}: {error.strerror}") from error
    except MalformedData as error:
        raise ConfigurationError(f"{path}: {error}") from error
    if fault := _fault(network):
        raise ConfigurationError(f"{path}: {fault}")
    return network


def _fault(network: HostNetwork) -> str:
    """A fault that the types do not exclude, as one clause; "" if there is none."""
    names = [host.name for host in network.hosts]
    if not names or len({*names}) < len(names):
        return "hosts need to be one or more, each with a name of its own"
    for host in network.hosts:
        if host.stages < 1 or not 0.0 < host.speed < float("inf"):
            return f"host {host.name} needs stages of 1 or more and a speed above 0"
    for link in network.links:
        if unknown := {*link.between} - {*names}:
            return f"links name {', '.join(sorted(unknown))}, which is none of the hosts"
        if link.between[0] == link.between[1]:
            return f"a link joins {link.between[0]} with itself"
    links: list[NetworkLink | None] = [network.link, *network.links]
    for joint in filter(None, links):
        if not 0.0 < joint.gbit_per_s < float("inf") or not 0.0 <= joint.delay_ms < float("inf"):
            return "a link needs gbit_per_s above 0 and delay_ms of 0 or more"
    for one in range(len(names)):
        for other in range(one):
            if network.between(one, other) is None:
                return f"no link joins {names[other]} and {names[one]}; add it, or one for all"
    return ""
