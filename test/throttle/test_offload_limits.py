"""The bound from measured rates and predicted times, by hand."""

import pytest

from sgl_pipeline.step_work import StepWork
from sgl_pipeline.throttle.offload_limits import measured_bound, most_batch


class Times:
    """A step takes 10 ms and, beyond `knee` rows, 1 ms for each further one."""

    def __init__(self, knee: int) -> None:
        self.knee = knee

    def step_ms(self, work: StepWork) -> float:
        assert work.tokens == work.decodes == work.samples and not work.decode_attended_tokens
        return 10.0 + max(0, work.tokens - self.knee)


@pytest.mark.parametrize(("knee", "batch"), [(30, 35), (1, 6), (10_000, 4095)])
def test_the_largest_batch_takes_one_and_a_half_times_one_row(knee: int, batch: int) -> None:
    assert most_batch(Times(knee)) == batch


def bound(lent: tuple[int, ...] = (800,), remote: float = 300.0, **more: object) -> float:
    values: dict[str, object] = {"mean_tokens": 50.0, "pipeline_depth": 2, "times": None} | more
    return measured_bound(
        lent,
        own_tokens=1000,
        remote_rate=remote,
        local_rate=500.0,
        **values,  # type: ignore[arg-type]
    )


def test_memory_bounds_by_room_and_rate() -> None:
    assert bound() == pytest.approx(0.6)
    assert bound(remote=1000.0) == pytest.approx(0.8)
    assert bound(lent=(800, 100)) == pytest.approx(0.9)
    assert bound(lent=()) == 0.0


def test_the_batch_in_memory_leaves_the_rest_of_the_largest_one() -> None:
    # 20 requests in memory; two steps of 12 rows: 4 more.
    assert bound(times=Times(7)) == pytest.approx(0.2)
    assert bound(times=Times(100)) == pytest.approx(0.6)
    assert bound(times=Times(1)) == 0.0
    # Longer requests: five of 200 tokens.
    assert bound(times=Times(1), mean_tokens=200.0) == pytest.approx(0.6)
