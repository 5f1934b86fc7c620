"""What a host says of itself when it offers to run workers. Imports neither torch nor sglang."""

import os
import socket
from pathlib import Path

from sgl_pipeline import __version__
from sgl_pipeline.args import ClusterArgs
from sgl_pipeline.cluster.host_messages import HostHello


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
        memory_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        version=__version__,
        model_digest=digest,
    )
