"""The tier of a GPU's pool in host memory: the place that stages and scheduler use."""

from sgl_pipeline.args import TierArgs
from sgl_pipeline.args.store_config import StoreConfig
from sgl_pipeline.kv_store.host_pages import host_page_count
from sgl_pipeline.kv_store.open_store import HOST_BACKEND
from sgl_pipeline.pipeline.pipeline_capacity import PipelineCapacity
from sgl_pipeline.wire.store_orders import StorePlace

# What a stage may save where the configuration does not say: a share of its bus, and not of a disk.
# A prefill of 20,000 tokens/s of 128 KiB each takes 2.6 GB/s.
HOST_SAVE_BYTES_PER_S = 4 << 30


def host_place(args: TierArgs, digest: str, capacity: PipelineCapacity) -> StorePlace:
    """The place for the pages of stages of that capacity.

    Raises ConfigurationError where `args` leave no room for a page.
    """
    num_pages = host_page_count(
        args.host_ratio,
        args.host_size_gb * 10**9,
        capacity.num_pages,
        [stage.page_bytes for stage in capacity.stages],
    )
    save_bytes_per_s = args.store.save_bytes_per_s
    if save_bytes_per_s == StoreConfig().save_bytes_per_s:
        save_bytes_per_s = HOST_SAVE_BYTES_PER_S
    return StorePlace(
        backend=HOST_BACKEND,
        address="",
        digest=digest,
        save_bytes_per_s=save_bytes_per_s,
        host_pages=num_pages,
    )
