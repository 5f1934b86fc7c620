"""The flags of a store beyond the pool: what is taken, what is refused, and in which words."""

import re
from pathlib import Path
from typing import Any

import pytest

from sgl_pipeline.args import PipelineArgs, SchedulingArgs, StageArgs, TierArgs
from sgl_pipeline.args.flags import flags_of
from sgl_pipeline.args.store_config import KEYS, StoreConfig, store_config
from sgl_pipeline.args.tier_args import (
    PREFETCH_POLICIES,
    STORAGE_BACKENDS,
    WRITE_POLICIES,
)
from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.managers.upstream.upstream_checks import flag_of
from sgl_pipeline.managers.upstream.upstream_fields import NOTED

PAGE = Path(__file__).resolve().parents[2] / "docs" / "tiers.md"
FILE: dict[str, Any] = {"enabled": True, "backend": "file"}
GPU: dict[str, Any] = {"enabled": True, "backend": "host", "pool_is_on_gpu": True}


def test_tiers_are_off_by_default() -> None:
    assert TierArgs() == PipelineArgs(stages=StageArgs(model_path="m", dtype="float32")).tiers
    assert not TierArgs().enabled


@pytest.mark.parametrize("policy", WRITE_POLICIES)
def test_every_write_policy_of_upstream_is_taken(policy: str) -> None:
    assert TierArgs(**FILE, write_policy=policy).write_policy == policy


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"enabled": True}, "for --device cuda: .*--hicache-storage-backend file, or --admin"),
        ({"enabled": True, "backend": "host"}, "for --device cuda: on a CPU the pool is in host"),
        ({"host_ratio": 3.0}, "--hicache-ratio does nothing without --enable-hierarchical"),
        ({"host_size_gb": 8}, "--hicache-size does nothing without --enable-hierarchical"),
        (GPU | {"host_ratio": 0.0}, "--hicache-ratio 0.0 must be a number above 0"),
        (GPU | {"host_ratio": float("inf")}, "--hicache-ratio inf must be a number above 0"),
        (GPU | {"host_size_gb": -1}, "--hicache-size -1 must be at least 0"),
        ({"backend": "file"}, "--hicache-storage-backend does nothing without --enable-hier"),
        ({"write_policy": "write_back"}, "--hicache-write-policy does nothing without"),
        ({"store": StoreConfig(prefetch_threshold=1)}, "extra-config does nothing without"),
        (FILE | {"write_policy": "never"}, "--hicache-write-policy 'never' is unknown; choose"),
        (FILE | {"prefetch_policy": "x"}, "--hicache-storage-prefetch-policy 'x' is unknown"),
        (FILE | {"backend": "hf3fs"}, "--hicache-storage-backend hf3fs is not built; choose"),
        (FILE | {"store": store_config({"a_key": 1})}, "a_key is unknown to file; the keys are"),
        (GPU | {"store": store_config({"a_key": 1})}, "a_key is unknown to host; the keys are"),
    ],
)
def test_what_has_no_meaning_is_refused_by_name(values: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        TierArgs(**values)


def test_with_an_administrator_a_store_can_come_later() -> None:
    assert TierArgs(enabled=True, is_attachable=True).backend is None


def test_without_a_radix_cache_there_is_nothing_to_keep() -> None:
    with pytest.raises(ConfigurationError, match="--disable-radix-cache switches that off"):
        PipelineArgs(
            stages=StageArgs(model_path="m", dtype="float32"),
            scheduling=SchedulingArgs(radix_cache=False),
            tiers=TierArgs(**FILE),
        )


def test_pages_in_the_memory_of_a_gpu_have_host_memory_or_a_store() -> None:
    on_gpu = StageArgs(model_path="m", dtype="bfloat16", device="cuda")
    for values in (GPU, GPU | {"backend": "file"}):
        tiers = TierArgs(**values)
        assert PipelineArgs(stages=on_gpu, tiers=tiers).tiers is tiers


@pytest.mark.parametrize("backend", [one for one in STORAGE_BACKENDS if one != "file"])
def test_a_backend_of_upstreams_gets_its_own_keys(backend: str) -> None:
    store = store_config({"prefetch_threshold": 16, "module_path": "m"})
    args = TierArgs(enabled=True, backend=backend, store=store)
    assert (args.store.prefetch_threshold, args.store.backend_settings) == (
        16,
        {"module_path": "m"},
    )


@pytest.mark.parametrize(
    ("text", "size"),
    [
        *((4194304, 4194304), ("4194304", 4194304), ("20M", 20_000_000), ("1.5G", 1_500_000_000)),
        *(("4Mi", 2**22), ("2Gi", 2**31), ("1Ti", 2**40)),
    ],
)
def test_sizes_are_those_of_upstream(text: object, size: int) -> None:
    from sglang.srt.mem_cache.storage.file.lru_file_evictor import _parse_size_to_bytes

    assert store_config({"max_size": text}).max_size == size == _parse_size_to_bytes(text)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("max_size", value) for value in ("many", "1.5Kb", -1, True, None, 0, "1k")),
        *(("prefetch_threshold", value) for value in (0, 2.5, "256", True, None)),
        *(("prefetch_timeout_base", value) for value in (-1, float("nan"), "x", True, None, [])),
        *(("prefetch_timeout_max", value) for value in (float("inf"), 3601)),
        ("max_files", 0),
        *(("file_storage_path", value) for value in ("", 7, None)),
        ("save_bytes_per_s", 1),
        ("min_free_space", "-1"),
    ],
)
def test_a_value_that_its_key_does_not_take_is_named(key: str, value: object) -> None:
    with pytest.raises(ConfigurationError, match=rf"extra-config: {key} .*{re.escape(str(value))}"):
        store_config({key: value})


def test_an_unknown_key_is_refused_with_the_list_of_keys() -> None:
    store = store_config({"prefetch_treshold": 16})
    with pytest.raises(ConfigurationError, match="prefetch_treshold is unknown to file") as refusal:
        TierArgs(**FILE, store=store)
    assert [key for key in KEYS if key not in str(refusal.value)] == []


def test_the_page_of_tiers_has_every_key_and_its_default() -> None:
    text = PAGE.read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*?) \|", text, re.MULTILINE))
    assert {*KEYS} <= {*rows}
    defaults = {key: getattr(StoreConfig(), key) for key in KEYS}
    for key, default in defaults.items():
        shown = f"{default:g}" if isinstance(default, float) else str(default)
        assert default is None or shown in re.findall(r"[\w./-]+", rows[key]), key


def test_the_page_of_tiers_names_every_flag_and_refusal() -> None:
    text = PAGE.read_text(encoding="utf-8")
    names = [name for _, flag in flags_of(TierArgs) for name in flag.names]
    names += [flag_of(name) for name in NOTED if name.startswith("hicache")]
    names += [*STORAGE_BACKENDS, *WRITE_POLICIES, *PREFETCH_POLICIES]
    assert [name for name in names if f"`{name}`" not in text] == []
