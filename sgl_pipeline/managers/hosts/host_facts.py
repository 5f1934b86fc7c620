"""The facts that a host sends when it offers to run workers. Imports neither torch nor sglang."""

import os
import socket
from pathlib import Path

from sgl_pipeline import __version__
from sgl_pipeline.args import ClusterArgs
from sgl_pipeline.cluster.host_messages import HostHello
from sgl_pipeline.host_memory import total_memory_bytes


def host_hello(cluster: ClusterArgs, address: str, interface: str, digest: str) -> HostHello:
    """The facts. `address` is HOST:PORT of the cluster port, on `interface`."""
    return HostHello(
        rank=cluster.rank,
        num_hosts=cluster.num_hosts,
        name=socket.gethostname(),
        address=address,
        interface=interface,
        cores=tuple(sorted(os.sched_getaffinity(0))),
        num_numa_nodes=len([*Path("/sys/devices/system/node").glob("node[0-9]*")]) or 1,
        num_gpus=len([*Path("/dev").glob("nvidia[0-9]*")]),
        memory_bytes=total_memory_bytes(),
        version=__version__,
        model_digest=digest,
    )
