"""The memory of this host, or of the container that this process is in.

A container has the memory of its control group's limit, which /proc/meminfo does not show.
"""

from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from sgl_pipeline.errors import ConfigurationError


class _Names(NamedTuple):
    """The files of a control group's memory, and the prefix of its hierarchical statistics."""

    limit: str
    used: str
    prefix: str


# The kernel's documentation: admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst.
_V2 = _Names("memory.max", "memory.current", "")
_V1 = _Names("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")


def total_memory_bytes(root: Path = Path("/")) -> int:
    """The host's memory (MemTotal), or the lowest limit of a control group if that is less."""
    limits = (limit for limit, _ in _control_groups(root))
    return min([_host_bytes(root, "MemTotal"), *limits])


def available_memory_bytes(root: Path = Path("/")) -> int:
    """The bytes that can be allocated without swapping: of the host (MemAvailable, proc(5)), or
    what the limits of control groups leave if that is less."""
    left = (max(0, limit - used) for limit, used in _control_groups(root))
    return min([_host_bytes(root, "MemAvailable"), *left])


def _host_bytes(root: Path, wanted: str) -> int:
    for line in (root / "proc/meminfo").read_text(encoding="ascii").splitlines():
        name, _, amount = line.partition(":")
        if name == wanted:
            return int(amount.split()[0]) * 1024
    raise ConfigurationError(f"/proc/meminfo has no {wanted}: Linux 3.14 or later needed")


def _control_groups(root: Path) -> Iterator[tuple[int, int]]:
    """The limit of each control group that this process is in and has one, and the bytes used
    there. The page cache is not counted: the kernel gives it up first, as in MemAvailable."""
    for directory, names in _directories(root):
        try:
            limit = (directory / names.limit).read_text(encoding="ascii").strip()
            if limit == "max":
                continue
            used = int((directory / names.used).read_text(encoding="ascii"))
            lines = (directory / "memory.stat").read_text(encoding="ascii").splitlines()
        except OSError:
            continue  # a group has no such files where memory is not counted for it
        counts = {name: int(count) for name, count in (line.split() for line in lines)}
        cache = sum(counts[f"{names.prefix}{kind}_file"] for kind in ("active", "inactive"))
        yield int(limit), used - cache


def _directories(root: Path) -> Iterator[tuple[Path, _Names]]:
    """The possible places of this process's control groups, the outer ones included (cgroups(7)).

    A container may see its own group as the root of the file system, whatever path is listed.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top, names = root / "sys/fs/cgroup", _V2
        if controllers:
            top, names = top / "memory", _V1
        own = PurePosixPath(path)
        for group in (own, *own.parents):
            if ".." not in group.parts:
                yield top / group.relative_to("/"), names
