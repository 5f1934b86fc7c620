"""A host that launches kernels on a device that runs them in order, in simulated time.

Used to test what is timed on a GPU, and when, without one.
"""

from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True)
class SimulatedMoment:
    """`at_ms` is when the device comes to it."""

    device: "SimulatedDevice"
    at_ms: float

    def has_passed(self) -> bool:
        return self.at_ms <= self.device.host_ms

    def ms_until(self, later: Self) -> float:
        assert self.has_passed() and later.has_passed(), "the device has not come so far"
        return later.at_ms - self.at_ms


class SimulatedDevice:
    """A `Timeline`. Launching anything takes the host `launch_ms`."""

    def __init__(self, launch_ms: float, occupation_ms: float = 2.0) -> None:
        self.host_ms = 0.0
        self.num_launches = 0
        self._device_ms = 0.0
        self._launch_ms = launch_ms
        self._occupation_ms = occupation_ms

    def launch(self, kernel_ms: float) -> None:
        self.num_launches += 1
        self.host_ms += self._launch_ms
        self._device_ms = max(self._device_ms, self.host_ms) + kernel_ms

    def occupy(self, times: int) -> None:
        for _ in range(times):
            self.launch(self._occupation_ms)

    def empty_caches(self) -> None:
        self.launch(0.06)

    def mark(self) -> SimulatedMoment:
        self.host_ms += self._launch_ms
        return SimulatedMoment(self, max(self._device_ms, self.host_ms))

    def wait(self) -> None:
        self.host_ms = max(self.host_ms, self._device_ms)
