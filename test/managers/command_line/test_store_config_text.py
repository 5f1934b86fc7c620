"""The configuration of a store, from text, files and variables; upstream's parser is the oracle."""

import json
from pathlib import Path

import pytest
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController

from sgl_pipeline.args.store_config import StoreConfig
from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.managers.command_line.store_config_text import read_store_config

VALUES = {"file_storage_path": "/x", "prefetch_threshold": 64, "prefetch_timeout_base": 2}
PREFIX = "SGLANG_HICACHE_FILE_BACKEND_"
FILES = {
    "c.json": json.dumps(VALUES),
    "c.yaml": "".join(f"{key}: {value}\n" for key, value in VALUES.items()),
    "c.YML": "".join(f"{key}: {value}\n" for key, value in VALUES.items()),
    "c.toml": "".join(f"{key} = {value!r}\n" for key, value in VALUES.items()),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_says_what_upstream_reads_in_it(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(FILES[name])
    text = f"@{tmp_path / name}"
    config = read_store_config(text)
    backend, threshold, base_s, per_ki_s, _ = (
        HybridCacheController.parse_storage_backend_extra_config(text)
    )
    assert (backend["file_storage_path"], threshold) == ("/x", 64)
    assert config == StoreConfig(
        file_storage_path="/x",
        prefetch_threshold=threshold,
        prefetch_timeout_base=base_s,
        prefetch_timeout_per_ki_token=per_ki_s,
    )


def test_without_text_the_defaults_are_upstreams() -> None:
    _, threshold, base_s, per_ki_s, _ = HybridCacheController.parse_storage_backend_extra_config("")
    config = read_store_config(None)
    assert config == StoreConfig() == read_store_config("{}")
    assert (threshold, base_s) == (config.prefetch_threshold, config.prefetch_timeout_base)
    assert per_ki_s == config.prefetch_timeout_per_ki_token


def test_the_folder_variable_comes_first_and_the_others_last(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(f"{PREFIX}STORAGE_DIR", "/by/variable")
    monkeypatch.setenv(f"{PREFIX}MAX_SIZE", "2G")
    monkeypatch.setenv(f"{PREFIX}EVICTION_RATIO", "0.5")
    monkeypatch.setenv("SGLANG_HICACHE_MOONCAKE_REUSE_TE", "1")
    monkeypatch.setenv(f"{PREFIX}MIN_FREE_SPACE", "3G")
    config = read_store_config('{"file_storage_path": "/x", "min_free_space": "1M"}')
    assert config == StoreConfig(
        file_storage_path="/by/variable",
        max_size=2 * 10**9,
        min_free_space=10**6,
    )
    [record] = caplog.records
    others = f"{PREFIX}EVICTION_RATIO, SGLANG_HICACHE_MOONCAKE_REUSE_TE"
    assert record.getMessage().startswith(f"no effect here: {others};")


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("{", "extra-config cannot be read"),
        ("[" * 100_000, "extra-config cannot be read"),
        ("[1]", "must be an object"),
        ("7", "must be an object"),
        ("@c.ini", r"must end in \.json"),
        ("@/nowhere/c.json", "@/nowhere/c.json: .*No such file"),
    ],
)
def test_what_cannot_be_read_is_named(text: str, named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        read_store_config(text)


def test_a_route_reads_no_files(tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text("{}")
    with pytest.raises(ConfigurationError, match="send its content"):
        read_store_config(f"@{tmp_path / 'c.json'}", takes_files=False)


@pytest.mark.parametrize("name", [name for name in FILES if not name.endswith("json")])
def test_a_broken_file_is_named(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("a: [1\n= b")
    with pytest.raises(ConfigurationError, match=f"{name} cannot be read"):
        read_store_config(f"@{tmp_path / name}")
