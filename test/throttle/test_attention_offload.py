"""Adrenaline's bounds and rule against worked examples."""

import pytest

from sgl_pipeline.throttle.attention_offload import (
    AttentionMemory,
    AttentionWork,
    Reading,
    compute_bound,
    is_hidden,
    memory_bound,
    offload_bound,
    should_offload,
)

DECODE = AttentionMemory(num_bytes=46e9, bytes_per_s=2.0e12)
LOCAL = AttentionWork(requests=10, tokens=10_000)


def test_memory_is_bound_by_the_scarcer_of_room_and_rate() -> None:
    """An executor with 60 % of the bandwidth and 80 % of the room of a decode instance."""
    executor = AttentionMemory(num_bytes=0.8 * 46e9, bytes_per_s=1.2e12)
    assert memory_bound([executor], DECODE) == pytest.approx(0.6)
    # Two of them: room for 1.6, bandwidth for 1.2.
    assert memory_bound([executor, executor], DECODE) == pytest.approx(1.2)
    small = AttentionMemory(num_bytes=4.6e9, bytes_per_s=1.2e12)
    assert memory_bound([executor, small], DECODE) == pytest.approx(0.9)
    assert memory_bound([], DECODE) == 0.0


def test_compute_is_bound_by_the_batch_that_other_kernels_carry() -> None:
    assert compute_bound(batch_in_memory=80, most_batch=136) == pytest.approx(0.7)
    assert compute_bound(batch_in_memory=80, most_batch=80) == 0.0
    # Memory holds more than the kernels carry: nothing to gain.
    assert compute_bound(batch_in_memory=200, most_batch=136) == 0.0


def test_the_bound_is_the_smaller_one() -> None:
    assert offload_bound(0.6, 0.7) == 0.6
    assert offload_bound(0.6, 0.1) == 0.1


def test_a_trip_is_hidden_if_it_takes_no_longer_than_the_local_attention() -> None:
    assert is_hidden(local_s=0.5e-3, remote_s=0.4e-3, exchange_s=0.1e-3)
    assert not is_hidden(local_s=0.5e-3, remote_s=0.4e-3, exchange_s=0.11e-3)


@pytest.mark.parametrize(
    ("offloaded", "most_tokens", "covers_longest", "is_within"),
    [
        # 0.7 of 10,000 local tokens and of 10 requests may be elsewhere.
        (AttentionWork(6, 5000), 2000, True, True),
        (AttentionWork(6, 5000), 2001, False, True),
        (AttentionWork(8, 5000), 2000, True, False),
        (AttentionWork(6, 7001), 1, False, False),
        (AttentionWork(7, 7000), 1, False, True),
        (AttentionWork(), 7000, True, True),
    ],
)
def test_both_readings_of_the_rule(
    offloaded: AttentionWork, most_tokens: int, covers_longest: bool, is_within: bool
) -> None:
    def answer(reading: Reading) -> bool:
        return should_offload(offloaded, LOCAL, most_tokens, 0.7, reading)

    assert answer("either") == (covers_longest or is_within)
    assert answer("both") == (covers_longest and is_within)


@pytest.mark.parametrize("reading", ["either", "both"])
def test_nothing_is_offloaded_that_nothing_covers(reading: Reading) -> None:
    assert not should_offload(AttentionWork(), AttentionWork(), 100, 0.7, reading)
    assert not should_offload(AttentionWork(), LOCAL, 100, 0.0, reading)


@pytest.mark.parametrize("reading", ["either", "both"])
def test_a_larger_bound_or_more_local_work_never_declines_more(reading: Reading) -> None:
    for tokens in range(0, 8000, 500):
        for requests in range(1, 10, 2):
            offloaded = AttentionWork(requests, tokens)
            answers = [
                should_offload(offloaded, LOCAL, 1000, bound, reading)
                for bound in (0.1, 0.3, 0.5, 0.7, 0.9, 1.5)
            ]
            assert answers == sorted(answers)
            more = [
                should_offload(offloaded, AttentionWork(10 * n, 10_000 * n), 1000, 0.3, reading)
                for n in (1, 2, 3)
            ]
            assert more == sorted(more)
