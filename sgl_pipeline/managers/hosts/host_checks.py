"""Reasons that keep a host out of a cluster, and remedies: the words that people read.

Asked by the head of a server (`head_process.py`) and by the doctor, so that both say the same. Each
function returns one clause, "" where all is well.
"""

from sgl_pipeline import __version__
from sgl_pipeline.cluster.host_messages import HostHello
from sgl_pipeline.cluster.model_digest import digest_difference


def version_fault(who: str, version: str) -> str:
    """The fault of another sgl_pipeline than the head's; empty if there is none."""
    if version == __version__:
        return ""
    return (
        f"{who} runs sgl_pipeline {version}, the head {__version__}; install the same version "
        "on every host"
    )


def count_fault(hello: HostHello, num_hosts: int) -> str:
    """The fault of a host whose number of hosts is not the head's, or that takes itself for it."""
    if hello.num_hosts != num_hosts:
        return (
            f"it was started with --nnodes {hello.num_hosts}, the head with --nnodes {num_hosts}; "
            "use the same on every host"
        )
    if hello.rank == 0:
        return "--node-rank 0 is the head; give this host a rank of its own"
    return ""


def model_fault(digest: str, head_digest: str, head: str) -> str:
    """The fault of another model than that of the host that people call `head`."""
    if digest == head_digest:
        return ""
    return (
        f"its model is not that of {head}: {digest_difference(digest, head_digest)} (digest "
        f"{digest}, the head's {head_digest}); put the same files at --model-path"
    )


def rank_fault(hello: HostHello, before: HostHello | None) -> str:
    """The fault of a host whose rank another has, which came `before`."""
    if before is None or before.address == hello.address:
        return ""
    return f"--node-rank {hello.rank} belongs to {before.title}; give each host a rank of its own"


def how_to_bring(rank: int, head_address: str | None, *, by_ray: bool = False) -> str:
    """Advice for a host that has not come."""
    start = f"run the same command on it with --node-rank {rank}"
    return (
        f"{'Ray has been asked for it' if by_ray else start} (--dist-init-addr {head_address} must "
        "be reachable from there)"
    )
