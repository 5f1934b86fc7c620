"""What memory this host has to give. Read by stage workers and by the doctor."""

from pathlib import Path

from sgl_pipeline.errors import ConfigurationError


def available_memory_bytes() -> int:
    """What the kernel says is available without swapping (MemAvailable, proc(5))."""
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        name, _, amount = line.partition(":")
        if name == "MemAvailable":
            return int(amount.split()[0]) * 1024
    raise ConfigurationError("/proc/meminfo has no MemAvailable: Linux 3.14 or later needed")
