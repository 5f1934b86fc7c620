"""Offset and drift of another host's clock, from pings over a network whose delays vary."""

import random

import pytest

from sgl_pipeline.cluster.clock import MAX_DRIFT, HostClock


def ping(
    clock: HostClock,
    at_s: float,
    *,
    offset_s: float,
    there_s: float,
    back_s: float,
    busy_s: float = 0.0,
) -> None:
    """A ping sent at `at_s` of our clock; the host's clock plus `offset_s` is ours."""
    arrived_s = at_s + there_s
    answered_s = arrived_s + busy_s
    clock.add(at_s, arrived_s - offset_s, answered_s - offset_s, answered_s + back_s)


def test_nothing_is_known_before_the_first_ping() -> None:
    assert HostClock().read(1.0) is None


def test_equal_ways_give_the_offset_and_half_of_the_way_is_the_bound() -> None:
    clock = HostClock()
    ping(clock, 10.0, offset_s=-900.0, there_s=0.01, back_s=0.01, busy_s=3.0)
    reading = clock.read(11.5)
    assert reading is not None
    assert reading.offset_s == pytest.approx(-900.0, abs=1e-9)
    assert reading.error_s == pytest.approx(0.01, rel=0.01)


def test_the_least_delayed_ping_counts_and_the_bound_holds() -> None:
    dice = random.Random(3)
    clock, offset_s = HostClock(), 12.5
    for number in range(300):
        delays = [0.001 + dice.expovariate(200.0) for _ in range(2)]
        at_s = number * 0.25
        ping(clock, at_s, offset_s=offset_s, there_s=delays[0], back_s=delays[1])
        reading = clock.read(at_s)
        assert reading is not None
        assert abs(reading.offset_s - offset_s) <= reading.error_s
    assert reading.error_s < 0.004 and abs(reading.offset_s - offset_s) < 0.002


def test_a_drift_is_found_and_followed_between_pings() -> None:
    dice = random.Random(4)
    clock, drift = HostClock(), 50e-6
    for number in range(1000):
        at_s = number * 0.25
        delays = [0.0002 + dice.expovariate(5000.0) for _ in range(2)]
        ping(clock, at_s, offset_s=7.0 + drift * at_s, there_s=delays[0], back_s=delays[1])
    reading = clock.read(260.0)
    assert reading is not None
    assert reading.drift_ppm == pytest.approx(50.0, abs=5.0)
    assert abs(reading.offset_s - (7.0 + drift * 260.0)) <= reading.error_s < 0.001


def test_noise_is_no_drift() -> None:
    dice = random.Random(5)
    clock = HostClock()
    for number in range(1000):
        delays = [0.001 + dice.expovariate(200.0) for _ in range(2)]
        ping(clock, number * 0.25, offset_s=1.0, there_s=delays[0], back_s=delays[1])
    reading = clock.read(250.0)
    assert reading is not None
    assert abs(reading.drift_ppm) < 20.0 and abs(reading.drift_ppm) <= MAX_DRIFT * 1e6
    assert abs(reading.offset_s - 1.0) <= reading.error_s


def test_an_answer_from_before_the_question_is_not_believed() -> None:
    clock = HostClock()
    clock.add(10.0, 5.0, 7.0, 11.0)  # two seconds away, of one that passed
    assert clock.read(12.0) is None
