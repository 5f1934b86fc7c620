"""Which activation link a stage gets: its addresses in `StageAssignment.links` say so."""

from sgl_pipeline.pp_runner.links.activation_link import ActivationLink, ActivationShape
from sgl_pipeline.pp_runner.links.cuda_ipc_link import CudaIpcLink
from sgl_pipeline.pp_runner.links.distributed_link import DistributedLink
from sgl_pipeline.pp_runner.links.host_link import HostLink


def open_activation_link(
    shape: ActivationShape, links: tuple[str, ...], stage: int
) -> ActivationLink:
    """The link of `stage`, given an address for each boundary.

    `unix:PATH` for each makes HostLinks; one `nccl:PATH` or `gloo:PATH` for all boundaries makes
    DistributedLinks with their rendezvous at PATH; `cuda-ipc:PATH` for each makes CudaIpcLinks.
    """
    kinds, paths = zip(*(link.split(":", 1) for link in links), strict=True) if links else ((), ())
    if kinds and kinds[0] in ("nccl", "gloo"):
        return DistributedLink(shape, kinds[0], paths[0], stage, len(links) + 1)
    on_host = HostLink if "cuda-ipc" not in kinds else CudaIpcLink
    return on_host(
        shape,
        upstream=paths[stage - 1] if stage > 0 else None,
        downstream=paths[stage] if stage < len(links) else None,
    )
