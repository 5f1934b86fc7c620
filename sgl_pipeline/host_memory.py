"""The memory of this host that is available."""

from pathlib import Path

from sgl_pipeline.errors import ConfigurationError


def available_memory_bytes() -> int:
    """Bytes that are available without swapping, according to the kernel (MemAvailable,
    proc(5))."""
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        name, _, amount = line.partition(":")
        if name == "MemAvailable":
            return int(amount.split()[0]) * 1024
    raise ConfigurationError("/proc/meminfo has no MemAvailable: Linux 3.14 or later needed")
