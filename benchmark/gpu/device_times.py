"""Times a device: calls in a row by the host's clock, kernels one by one by the profiler.

Used by all parts of the GPU benchmark.
"""

import gc
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel or copy by name: how often one call launched it, and its milliseconds in all."""

    name: str
    count: float
    ms: float


def repeat_ms(
    call: Callable[[], object], device: torch.device, *, warmups: int = 3, repeats: int = 10
) -> float:
    """Milliseconds of one call when `repeats` follow each other without a pause; the device is
    waited for at the end. The `warmups` before them do not count."""
    for _ in range(warmups):
        call()
    synchronize(device)
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    synchronize(device)
    return (time.perf_counter() - start) * 1e3 / repeats


def profile_kernels(
    call: Callable[[], object], device: torch.device, *, repeats: int = 3
) -> list[Kernel]:
    """The kernels and copies of one call, longest first: the mean of `repeats` calls, after one
    that does not count. Empty on a CPU, and where torch's profiler sees no kernels."""
    if device.type != "cuda":
        return []
    call()
    synchronize(device)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(repeats):
            call()
        synchronize(device)
    return kernels_of(profile.events(), repeats)


def kernels_of(events: Iterable[Any], repeats: int) -> list[Kernel]:
    """The kernels of `repeats` calls that torch's profiler saw on a GPU, by name, longest first.
    Spans that hold other events do not count."""
    durations_us: dict[str, list[float]] = defaultdict(list)
    for event in events:
        is_span = getattr(event, "is_user_annotation", False)
        if event.device_type == torch.autograd.DeviceType.CUDA and not is_span:
            durations_us[event.name].append(event.time_range.elapsed_us())
    kernels = [
        Kernel(name, len(each) / repeats, sum(each) / 1e3 / repeats)
        for name, each in durations_us.items()
    ]
    return sorted(kernels, key=lambda kernel: -kernel.ms)


def device_ms(call: Callable[[], object], device: torch.device) -> float | None:
    """Milliseconds of all kernels of one call added up, without the gaps between them; the time of
    the whole call on a CPU. None where the profiler sees no kernels."""
    if device.type != "cuda":
        return repeat_ms(call, device, warmups=1, repeats=3)
    return total_ms(profile_kernels(call, device))


def total_ms(kernels: list[Kernel]) -> float | None:
    """Milliseconds of all `kernels`; None where there are none."""
    return sum(kernel.ms for kernel in kernels) if kernels else None


def synchronize(device: torch.device) -> None:
    """Waits for all kernels of `device`."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def release_memory() -> None:
    """Gives back what is no longer in use: the next stage, or another process, needs it."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
