"""The place of host memory follows from the arguments and what the stages have loaded."""

import dataclasses

import msgspec
import pytest
from support.worker_messages import loaded

from sgl_pipeline import args
from sgl_pipeline.args import TierArgs
from sgl_pipeline.args.store_config import StoreConfig
from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.kv_store import open_store
from sgl_pipeline.managers.tiers.host_tier import HOST_SAVE_BYTES_PER_S, host_place
from sgl_pipeline.pipeline.pipeline_capacity import PipelineCapacity
from sgl_pipeline.stage_plan import StagePlan

ON = TierArgs(enabled=True, backend=args.HOST_BACKEND, pool_is_on_gpu=True)
MIB = 2**20


def capacity() -> PipelineCapacity:
    """Of two stages, the second of which has more layers."""
    stages = tuple(
        msgspec.structs.replace(loaded(stage), page_bytes=(2 + stage) * MIB) for stage in range(2)
    )
    return PipelineCapacity(StagePlan(0, (2, 3)), None, 1000, stages, "torch", "torch", MIB)


def test_host_memory_has_a_number_of_pages_for_all_stages() -> None:
    place = host_place(ON, "d", capacity())
    assert (place.backend, place.address, place.digest) == (open_store.HOST_BACKEND, "", "d")
    assert place.host_pages == 2000
    assert place.save_bytes_per_s == HOST_SAVE_BYTES_PER_S
    sized = dataclasses.replace(ON, host_size_gb=3, host_ratio=7.0)
    assert host_place(sized, "d", capacity()).host_pages == 3 * 10**9 // (3 * MIB)
    slow = dataclasses.replace(ON, store=StoreConfig(save_bytes_per_s=2**20))
    assert host_place(slow, "d", capacity()).save_bytes_per_s == 2**20


def test_room_for_no_page_is_refused_by_name() -> None:
    with pytest.raises(ConfigurationError, match="--hicache-ratio leaves no room"):
        host_place(dataclasses.replace(ON, host_ratio=1e-4), "d", capacity())


def test_the_name_of_host_memory_is_one() -> None:
    assert args.HOST_BACKEND == open_store.HOST_BACKEND
