"""The stopwatch of a GPU on a simulated one: it tells what kernels take, not their launching."""

from collections.abc import Callable

import pytest
import torch
from support.simulated_device import SimulatedDevice

from sgl_pipeline.pp_runner.cuda.kernel_stopwatch import CudaTimeline, KernelStopwatch

LAYER, HEAD = [0.007] * 15, [0.3] + [0.01] * 6


def kernels(device: SimulatedDevice, times_ms: list[float]) -> Callable[[], None]:
    def call() -> None:
        for kernel_ms in times_ms:
            device.launch(kernel_ms)

    return call


@pytest.mark.parametrize("launch_ms", [0.001, 0.02, 0.3])
def test_a_call_takes_what_its_kernels_take_however_slow_launching_is(launch_ms: float) -> None:
    device = SimulatedDevice(launch_ms)
    calls = {"layer": kernels(device, LAYER), "head": kernels(device, HEAD)}
    found = KernelStopwatch(device).least_ms(calls)
    assert found == {"layer": pytest.approx(0.105), "head": pytest.approx(0.36)}


def test_the_first_call_and_moments_in_which_others_have_the_device_do_not_count() -> None:
    device, durations_ms = SimulatedDevice(0.001), [900.0, 0.1, 50.0, 0.2, 50.0, 0.2, 50.0, 0.1]
    found = KernelStopwatch(device).least_ms({"layer": lambda: device.launch(durations_ms.pop(0))})
    assert found == {"layer": pytest.approx(0.1)}
    assert durations_ms == []


def test_a_call_that_waits_for_the_device_is_timed_with_its_launching(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As that of experts whose groups come back to the host: serving waits there, too."""
    caplog.set_level("INFO")
    device = SimulatedDevice(0.02)

    def waiting() -> None:
        device.wait()
        kernels(device, LAYER)()

    found = KernelStopwatch(device).least_ms({"layer": waiting})
    assert found["layer"] > 15 * 0.02
    assert "have the launching of kernels in them" in caplog.text


def test_few_enough_kernels_are_queued_at_once_that_the_driver_takes_them() -> None:
    """CUDA's queue holds about a thousand launches; a host that has to wait is not ahead."""
    device = SimulatedDevice(0.02)
    most, last = 0, 0
    wait = device.wait

    def watched_wait() -> None:
        nonlocal most, last
        most, last = max(most, device.num_launches - last), device.num_launches
        wait()

    device.wait = watched_wait  # type: ignore[method-assign]
    calls = {name: kernels(device, [0.01] * 60) for name in ("sparse", "dense", "head")}
    KernelStopwatch(device).least_ms(calls)
    assert most < 500


@pytest.mark.gpu
def test_a_product_takes_a_gpu_no_less_than_its_bytes_need() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no NVIDIA GPU")
    device = torch.device("cuda", 0)
    rows = torch.ones(8, 8192, dtype=torch.bfloat16, device=device)
    weight = torch.ones(8192, 8192, dtype=torch.bfloat16, device=device)
    calls = {count: lambda count=count: [rows @ weight for _ in range(count)] for count in (1, 4)}
    found = KernelStopwatch(CudaTimeline(device)).least_ms(calls)
    # 128 MiB at 10 TB/s, which no GPU has.
    assert found[1] > 0.0134
    assert 2 < found[4] / found[1] < 8
