"""What hosts say to the doctor, made up, and readings of their links."""

from typing import Any

from msgspec import structs

from sgl_pipeline import __version__
from sgl_pipeline.cluster.host_messages import HostHello
from sgl_pipeline.cluster.link_probe import LinkReading
from sgl_pipeline.managers.doctor.doctor_messages import HostFacts, Probed

DIGEST = "config-tensors-values"
VERSIONS = {"python": "3.11", "torch": "2.9", "sglang": "0.5"}


def facts_of(rank: int, /, **changes: Any) -> HostFacts:
    """Of a host; `changes` are to the facts, or to the hello in them."""
    hello = HostHello(
        rank=rank,
        num_hosts=2,
        name=f"name{rank}",
        address=f"10.0.0.{rank}:5000",
        interface="eth0",
        cores=(0, 1),
        num_numa_nodes=1,
        num_gpus=0,
        memory_bytes=2**34,
        version=__version__,
        model_digest=DIGEST,
    )
    of_hello = {
        name: changes.pop(name) for name in [*changes] if name in HostHello.__struct_fields__
    }
    facts = HostFacts(
        hello=structs.replace(hello, **of_hello),
        address_reason="the test says so",
        available_bytes=2**33,
        versions=VERSIONS,
        wall_s=1000.0,
    )
    return structs.replace(facts, **changes)


def probed(rank: int, gbit_per_s: float = 1.0, **changes: float) -> Probed:
    """What a host has found of its link to host `rank`."""
    reading = LinkReading(
        median_ms=2.0, worst_ms=5.0, gbit_per_s=gbit_per_s, offset_s=0.0, error_s=1e-3
    )
    return Probed(rank, structs.replace(reading, **changes))
