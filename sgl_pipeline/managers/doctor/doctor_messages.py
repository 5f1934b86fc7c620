"""Messages between the doctor's processes, and the facts that each host reports of itself.

A host greets rank 0 with its facts. Rank 0 pings, asks it to probe its links to the others, and in
the end says what was found. Frozen, tagged structs.
"""

import msgspec

from sgl_pipeline.cluster.host_messages import HostHello, Ping, Pong, Rejected
from sgl_pipeline.cluster.link_probe import LinkReading

DOCTOR_DOOR = "doctor"


class HostFacts(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """A host as it sees itself.

    `hello` is what a server's head would hear; `address_reason` says why its address was chosen.
    `versions` are those of what a server needs ("" of what is not installed).
    `wall_s` is what is added to a moment of the monotonic clock for the time of day.
    `model_fault` says why the model cannot be read. `step_ms` is what all parts of the model take
    for a typical step here, by the costs that were saved; `costs_missing` says why there are none.
    """

    hello: HostHello
    address_reason: str
    available_bytes: int
    versions: dict[str, str]
    wall_s: float
    model_fault: str = ""
    step_ms: float | None = None
    costs_missing: str = ""


class ProbeHost(msgspec.Struct, frozen=True, tag=True):
    """Measure the link to host `rank`, whose cluster port is at `address`."""

    rank: int
    address: str
    window_s: float


class Probed(msgspec.Struct, frozen=True, tag=True):
    """The answer to ProbeHost: a reading, or the reason why there is none."""

    rank: int
    reading: LinkReading | None
    fault: str = ""


class Verdict(msgspec.Struct, frozen=True, tag=True):
    """The end: what is wrong with the cluster, one line each."""

    faults: tuple[str, ...]


ToHost = Ping | ProbeHost | Rejected | Verdict
FromHost = HostFacts | Pong | Probed
