"""Samples of a weights file are taken once, again when it changes, and whatever the cache holds."""

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from support.weight_files import write_weights

from sgl_pipeline.cluster import digest_cache
from sgl_pipeline.cluster.digest_cache import cached_samples
from sgl_pipeline.cluster.tensor_samples import TensorSample, sample_tensors

TENSORS = {"norm": bytes(64), "head": bytes(range(256)) * 1024}
DEEP = b'{"other": ' + b"[" * 100_000
OTHER = TENSORS | {"norm": b"\1" * 64}


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    write_weights(path, TENSORS)
    return path


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "sgl_pipeline" / "digests"


@pytest.fixture
def readings(cache: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files that were read, one entry for each time."""
    read = list[str]()

    def sample(file: int, path: str) -> dict[str, TensorSample]:
        read.append(path)
        return sample_tensors(file, path)

    monkeypatch.setattr(digest_cache, "sample_tensors", sample)
    return read


def test_the_second_time_no_tensor_is_read(
    weights: Path, readings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = cached_samples(weights)
    monkeypatch.setattr(os, "pread", lambda *_: pytest.fail("the file was read"))
    assert cached_samples(weights) == first
    assert len(readings) == 1


def write_another_size(path: Path) -> None:
    status = path.stat()
    write_weights(path, OTHER | {"bias": b"1"})
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def write_with_the_time_set_back(path: Path) -> None:
    status = path.stat()
    write_weights(path, OTHER)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.parametrize("write", [write_another_size, write_with_the_time_set_back])
def test_a_file_that_was_written_again_is_read_again(
    weights: Path, readings: list[str], write: Callable[[Path], None]
) -> None:
    before = cached_samples(weights)
    write(weights)
    assert cached_samples(weights)["norm"] != before["norm"]
    assert len(readings) == 2


@pytest.mark.parametrize("field", ["size", "mtime_ns", "ctime_ns"])
def test_a_record_holds_for_one_size_and_time(
    weights: Path, cache: Path, readings: list[str], field: str
) -> None:
    cached_samples(weights)
    (path,) = cache.iterdir()
    record = json.loads(path.read_text())
    assert record["stamp"][field] == getattr(weights.stat(), f"st_{field}")
    record["stamp"][field] += 1
    path.write_text(json.dumps(record))
    cached_samples(weights)
    assert len(readings) == 2


@pytest.mark.parametrize(
    "damage",
    [
        lambda record: b"",
        lambda record: b"\x80\x04N.",
        lambda record: b"{}",
        lambda record: b'{"stamp": 1, "tensors": {}}',
        lambda record: record.replace(b"norm", b"nor\xff"),
        lambda record: record.replace(b"{", DEEP, 1),
        lambda record: record[:-9],
    ],
    ids=["empty", "pickle", "no fields", "other fields", "no UTF-8", "deep", "cut short"],
)
def test_a_damaged_record_is_passed_over_and_made_anew(
    weights: Path, cache: Path, readings: list[str], damage: Callable[[bytes], bytes]
) -> None:
    whole = cached_samples(weights)
    (record,) = cache.iterdir()
    damaged = damage(record.read_bytes())
    assert damaged != record.read_bytes()
    record.write_bytes(damaged)
    assert cached_samples(weights) == whole
    assert cached_samples(weights) == whole
    assert len(readings) == 2


def test_samples_that_were_taken_otherwise_are_not_used(
    weights: Path, readings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cached_samples(weights)
    monkeypatch.setattr(digest_cache, "_SAMPLING", "another way")
    cached_samples(weights)
    assert len(readings) == 2


def test_the_cache_is_this_users_alone(weights: Path, cache: Path, readings: list[str]) -> None:
    cached_samples(weights)
    (record,) = cache.iterdir()
    modes = [one.stat().st_mode & 0o777 for one in (cache.parent, cache, record)]
    assert modes == [0o700, 0o700, 0o600]


def test_a_cache_that_others_may_write_to_is_not_trusted(
    weights: Path, cache: Path, readings: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    first = cached_samples(weights)
    cache.chmod(0o777)
    assert cached_samples(weights) == first
    assert len(readings) == 2
    assert "chmod 700" in caplog.text and "each start reads them again" in caplog.text


def test_a_cache_that_cannot_be_written_costs_time_alone(
    weights: Path, cache: Path, readings: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    cache.parent.parent.touch()  # a file, where a directory should be
    with caplog.at_level(logging.WARNING):
        assert cached_samples(weights) == cached_samples(weights)
    assert len(readings) == 2
    assert "point XDG_CACHE_HOME elsewhere" in caplog.text


def test_a_record_that_cannot_be_put_in_its_place_leaves_nothing_behind(
    weights: Path, cache: Path, readings: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    cached_samples(weights)
    (record,) = cache.iterdir()
    record.unlink()
    record.mkdir()
    cached_samples(weights)
    assert [*cache.iterdir()] == [record]
    assert len(readings) == 2 and "are not kept" in caplog.text


def test_a_link_is_followed(weights: Path, readings: list[str], tmp_path: Path) -> None:
    """As in the hub's snapshots."""
    link = tmp_path / "link.safetensors"
    link.symlink_to(weights)
    assert cached_samples(link) == cached_samples(weights)
    assert len(readings) == 1
