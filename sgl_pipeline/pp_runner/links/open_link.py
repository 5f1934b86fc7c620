"""Opens the activation link of a stage, by its addresses in `StageAssignment.links`."""

from sgl_pipeline.pp_runner.links.activation_link import ActivationLink, ActivationShape
from sgl_pipeline.pp_runner.links.buffered_link import (
    Inbox,
    Outbox,
    RowInbox,
    RowLink,
    RowOutbox,
)
from sgl_pipeline.pp_runner.links.distributed_link import DistributedLink
from sgl_pipeline.pp_runner.links.host_link import HostLink, SharedMemory
from sgl_pipeline.pp_runner.links.tcp_link import TcpInbox, TcpOutbox, split_link


def open_activation_link(
    shape: ActivationShape, links: tuple[str, ...], stage: int, run_directory: str = ""
) -> ActivationLink:
    """The link of `stage`, given an address for each boundary.

    `unix:PATH` for each makes HostLinks; one `nccl:RENDEZVOUS` or `gloo:RENDEZVOUS` for all
    boundaries makes DistributedLinks.
    Where stages have several hosts, each boundary has its own kind: `unix:PATH`, or
    `tcp:HOST:PORT/DOOR` at the cluster port of the host downstream. The doors of this host are in
    `run_directory`.
    """
    kinds, paths = zip(*(link.split(":", 1) for link in links), strict=True) if links else ((), ())
    if kinds and kinds[0] in ("nccl", "gloo"):
        return DistributedLink(shape, kinds[0], paths[0], stage, len(links) + 1)
    if "tcp" in kinds:
        return RowLink(
            open_inbox(links[stage - 1], shape, run_directory) if stage > 0 else None,
            open_outbox(links[stage], shape, run_directory) if stage < len(links) else None,
        )
    return HostLink(
        shape,
        upstream=paths[stage - 1] if stage > 0 else None,
        downstream=paths[stage] if stage < len(links) else None,
    )


def open_inbox(address: str, shape: ActivationShape, run_directory: str) -> RowInbox:
    """The downstream end at `unix:PATH` or `tcp:HOST:PORT/DOOR`."""
    kind, path = address.split(":", 1)
    if kind == "tcp":
        return TcpInbox(split_link(path)[1], shape, run_directory)
    return Inbox(path, SharedMemory(shape))


def open_outbox(address: str, shape: ActivationShape, run_directory: str) -> RowOutbox:
    """The upstream end of the same."""
    kind, path = address.split(":", 1)
    if kind == "tcp":
        return TcpOutbox(path, shape, run_directory)
    return Outbox(path, SharedMemory(shape))
