"""The memory of a host and of containers, read from made-up control groups."""

from pathlib import Path

import pytest

from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.host_memory import available_memory_bytes, total_memory_bytes

GIB = 2**30
UNLIMITED_V1 = 0x7FFFFFFFFFFFF000


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def host(tmp_path: Path) -> Path:
    """The root of a host of 64 GiB, of which 32 are available."""
    meminfo = f"MemTotal: {64 * 2**20} kB\nMemFree: 7 kB\nMemAvailable: {32 * 2**20} kB\n"
    write(tmp_path / "proc/meminfo", meminfo)
    return tmp_path


def join_v2(host: Path, path: str) -> None:
    write(host / "proc/self/cgroup", f"0::{path}\n")


def group_v2(host: Path, path: str, limit: int | str, used: int = 0, cache: int = 0) -> None:
    directory = host / "sys/fs/cgroup" / path
    write(directory / "memory.max", f"{limit}\n")
    write(directory / "memory.current", f"{used}\n")
    write(directory / "memory.stat", f"anon 9\nactive_file {cache}\ninactive_file {cache}\n")


def group_v1(host: Path, path: str, limit: int, used: int = 0, cache: int = 0) -> None:
    directory = host / "sys/fs/cgroup/memory" / path
    write(directory / "memory.limit_in_bytes", f"{limit}\n")
    write(directory / "memory.usage_in_bytes", f"{used}\n")
    counts = f"active_file 1\ntotal_active_file {cache}\ntotal_inactive_file {cache}\n"
    write(directory / "memory.stat", counts)


def test_a_host_without_control_groups_has_what_the_kernel_says(host: Path) -> None:
    assert total_memory_bytes(host) == 64 * GIB
    assert available_memory_bytes(host) == 32 * GIB


def test_a_group_without_a_limit_changes_nothing(host: Path) -> None:
    join_v2(host, "/user.slice/one.scope")
    group_v2(host, "user.slice/one.scope", "max", used=40 * GIB)
    assert total_memory_bytes(host) == 64 * GIB
    assert available_memory_bytes(host) == 32 * GIB


def test_the_limit_of_a_container_counts_and_its_page_cache_does_not(host: Path) -> None:
    join_v2(host, "/")
    group_v2(host, "", 8 * GIB, used=5 * GIB, cache=GIB)
    assert total_memory_bytes(host) == 8 * GIB
    assert available_memory_bytes(host) == 5 * GIB


def test_the_tightest_of_nested_groups_counts(host: Path) -> None:
    join_v2(host, "/outer/inner")
    group_v2(host, "outer", 10 * GIB, used=9 * GIB)
    group_v2(host, "outer/inner", 6 * GIB, used=2 * GIB)
    assert total_memory_bytes(host) == 6 * GIB
    assert available_memory_bytes(host) == GIB


def test_a_group_beyond_its_limit_has_nothing_left(host: Path) -> None:
    join_v2(host, "/")
    group_v2(host, "", GIB, used=2 * GIB)
    assert available_memory_bytes(host) == 0


def test_groups_of_the_first_version_count_too(host: Path) -> None:
    write(host / "proc/self/cgroup", "9:cpu,cpuacct:/x\n4:memory:/docker/abc\n0::/docker/abc\n")
    group_v1(host, "", UNLIMITED_V1)
    group_v1(host, "docker/abc", 4 * GIB, used=3 * GIB, cache=GIB // 2)
    assert total_memory_bytes(host) == 4 * GIB
    assert available_memory_bytes(host) == 2 * GIB


def test_a_container_that_sees_its_group_as_the_root_finds_its_limit(host: Path) -> None:
    write(host / "proc/self/cgroup", "4:memory:/docker/abc\n")
    group_v1(host, "", 4 * GIB, used=GIB)
    assert available_memory_bytes(host) == 3 * GIB


def test_a_group_outside_the_namespace_is_not_looked_for(host: Path) -> None:
    join_v2(host, "/../other")
    group_v2(host, "", 8 * GIB, used=GIB)
    write(host / "sys/fs/other/memory.max", "1\n")
    assert total_memory_bytes(host) == 8 * GIB


def test_a_kernel_that_does_not_say_is_named(host: Path) -> None:
    write(host / "proc/meminfo", "MemTotal: 5 kB\n")
    with pytest.raises(ConfigurationError, match="MemAvailable"):
        available_memory_bytes(host)


def test_this_machine_has_memory() -> None:
    assert 0 < available_memory_bytes() <= total_memory_bytes()
