"""Servers share pages if, and only if, the same tokens give the same bytes."""

from dataclasses import replace
from typing import Any

import pytest
from support.tiny_models import tiny_model

from sgl_pipeline.args import PipelineArgs, SchedulingArgs, StageArgs
from sgl_pipeline.kv_store.object_names import DIGEST_NAME
from sgl_pipeline.managers.tiers.store_identity import StoreIdentity, store_identity
from sgl_pipeline.pp_runner.model.model_spec import read_model_spec


def identity(family: str = "qwen3", page_size: int = 16, **stages: Any) -> StoreIdentity:
    path = str(tiny_model(family))
    own = {"model_path": path, "dtype": "float32"} | stages
    args = PipelineArgs(stages=StageArgs(**own), scheduling=SchedulingArgs(page_size=page_size))
    return store_identity(args, read_model_spec(path))


def test_depth_and_split_are_nothing_to_a_page() -> None:
    assert DIGEST_NAME.fullmatch(identity().digest)
    assert identity() == identity(num_stages=2) == identity(num_stages=3, layer_partition="1,2,3")


@pytest.mark.parametrize(
    "other",
    [
        {"family": "llama"},
        {"page_size": 32},
        {"dtype": "bfloat16"},
        {"kv_cache_dtype": "int8"},
        {"quantization": "w8a8_int8"},
        {"rope_overrides": '{"rope_theta": 5}'},
        {"layer_kernels": "torch"},
    ],
    ids=str,
)
def test_what_changes_the_bytes_is_in_the_name(other: dict[str, Any]) -> None:
    assert identity(**other).digest != identity().digest


def test_an_object_has_room_for_a_page_of_its_largest_layer() -> None:
    small, large = identity(), identity(page_size=32)
    assert large == replace(large, object_bytes=2 * small.object_bytes)
