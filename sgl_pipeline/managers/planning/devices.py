"""What `--devices` says of the stages: where each runs, its memory and its speed."""

import re
from dataclasses import dataclass

from sgl_pipeline.errors import ConfigurationError

_UNITS = {"GiB": 2**30, "MiB": 2**20, "GB": 10**9, "MB": 10**6}
_SIZE = re.compile(r"(?P<number>\d+(?:\.\d+)?)(?P<unit>GiB|MiB|GB|MB)")


@dataclass(frozen=True, slots=True)
class StageDevice:
    """`memory_bytes` for weights and pages; the times are those measured, divided by `speed`."""

    name: str
    memory_bytes: int
    speed: float


def parse_devices(
    text: str | None, num_stages: int, host_bytes: int, memory_fraction: float
) -> tuple[StageDevice, ...]:
    """The device of each stage, from a list such as `cpu,cpu:0.5` or `80GiB,24GiB:0.4`.

    Args:
        text: None: the CPU of this machine for all of them.
        host_bytes: of this machine's memory, of which all stages on its CPU have equal shares.
        memory_fraction: of a size that was named, for weights and pages.

    Raises ConfigurationError that names what it cannot read.
    """
    entries = text.split(",") if text is not None else ["cpu"] * num_stages
    if len(entries) != num_stages:
        raise ConfigurationError(
            f"--devices {text} names {len(entries)} devices, --pp asks for {num_stages} stages"
        )
    num_on_host = sum(entry.partition(":")[0] == "cpu" for entry in entries)
    devices = []
    for entry in entries:
        name, colon, speed_text = entry.partition(":")
        if name == "cpu":
            memory_bytes = host_bytes // num_on_host
        elif size := _SIZE.fullmatch(name):
            named_bytes = float(size["number"]) * _UNITS[size["unit"]]
            memory_bytes = int(named_bytes * memory_fraction)
        else:
            raise _unreadable(entry)
        try:
            speed = float(speed_text) if colon else 1.0
        except ValueError:
            raise _unreadable(entry) from None
        if not 0.0 < speed < float("inf"):
            raise _unreadable(entry)
        devices.append(StageDevice(name, memory_bytes, speed))
    return tuple(devices)


def _unreadable(entry: str) -> ConfigurationError:
    return ConfigurationError(
        f"--devices: {entry!r} is not a device; write cpu or a memory size such as 80GiB, and "
        "after a colon its speed beside the device that was measured, such as 24GiB:0.5"
    )
