"""Capacities and ratios read from trials whose truth is known."""

import math
from itertools import product
from random import Random

import numpy as np
import pytest

from sgl_pipeline.capacity.curve import (
    capacity,
    capacity_ratio,
    crossing,
    falling_fit,
    trial_ratios,
)
from sgl_pipeline.capacity.rate_trial import RateTrial, Round
from sgl_pipeline.goodput import LatencyTarget, RequestLatency

TARGET = LatencyTarget(ttft_ms=100.0)
RATES = [1.0, 2.0, 4.0, 8.0]


def trial(rate_per_s: float, *rounds: list[float]) -> RateTrial:
    """Of requests with these TTFTs in ms, nan for one that failed; TPOT is a tenth."""
    return RateTrial(
        rate_per_s,
        tuple(
            Round(
                tuple(None if math.isnan(ms) else RequestLatency(ms, ms / 10) for ms in ttfts_ms),
                total_tokens_per_s=10.0 * rate_per_s,
            )
            for ttfts_ms in rounds
        ),
    )


def shares(values: list[float], count: int = 40) -> list[RateTrial]:
    """Trials at RATES with these goodputs in each of two rounds."""
    return [
        trial(rate, *[[50.0 if n < share * count else 200.0 for n in range(count)]] * 2)
        for rate, share in zip(RATES, values, strict=True)
    ]


def test_the_fit_is_the_nearest_of_all_falling_curves() -> None:
    random = Random(3)
    levels = [level / 10 for level in range(11)]
    falling = [one for one in product(levels, repeat=4) if list(one) == sorted(one, reverse=True)]
    for _ in range(30):
        values = [random.choice(levels) for _ in range(4)]
        fitted = falling_fit(values)
        assert fitted == sorted(fitted, reverse=True)

        def distance(curve: list[float] | tuple[float, ...], values: list[float] = values) -> float:
            return sum((a - b) ** 2 for a, b in zip(curve, values, strict=True))

        assert distance(fitted) <= min(map(distance, falling)) + 1e-12


def test_the_crossing_lies_between_two_rates_on_a_line_over_their_logarithm() -> None:
    assert crossing(RATES, [1.0, 1.0, 0.8, 0.2], 0.9) == pytest.approx(2.0 * 2**0.5)
    assert crossing(RATES, [1.0, 0.9, 0.8, 0.2], 0.9) == 2.0


def test_a_curve_that_does_not_cross_ends_at_the_last_rate_that_was_tried() -> None:
    assert crossing(RATES, [1.0, 1.0, 1.0, 0.95], 0.9) == 8.0
    assert crossing(RATES, [0.5, 0.4, 0.4, 0.3], 0.9) == 1.0


def test_a_dip_of_one_trial_is_pooled_with_its_neighbor() -> None:
    lucky = crossing(RATES, [1.0, 0.88, 0.94, 0.2], 0.9)
    assert crossing(RATES, [1.0, 0.91, 0.91, 0.2], 0.9) == lucky
    assert 4.0 < lucky < 4.1


def test_a_certain_capacity_has_an_interval_around_it() -> None:
    found = capacity(shares([1.0, 0.95, 0.6, 0.1]), TARGET, 0.9)
    assert 2.0 < found.value < 4.0
    assert found.low < found.value < found.high
    certain = capacity(shares([1.0, 1.0, 0.0, 0.0]), TARGET, 0.9)
    assert certain.low == certain.value == certain.high


def test_intervals_hold_the_truth_about_as_often_as_they_say() -> None:
    """Requests are within the target by chance, 90 % of them at 4 a second."""
    truth, held, count = 4.0, 0, 60
    rates = [2.0, 3.0, 4.0, 5.0, 7.0]
    for seed in range(count):
        random = np.random.default_rng(seed)
        luck = random.random((3, 80))  # the same rounds at all rates
        trials = [
            trial(rate, *np.where(luck < 1.0 - 0.1 * (rate / truth) ** 2, 50.0, 200.0).tolist())
            for rate in rates
        ]
        found = capacity(trials, TARGET, 0.9)
        held += found.low <= truth <= found.high
    assert 0.8 <= held / count <= 1.0


def test_what_both_policies_share_cancels_out_of_a_ratio() -> None:
    random = Random(5)
    ttfts_ms = [[random.lognormvariate(4.0, 1.0) for _ in range(50)] for _ in range(3)]
    base = trial(2.0, *ttfts_ms)
    other = trial(2.0, *[[1.2 * ms for ms in each] for each in ttfts_ms])
    found = trial_ratios(other, base, TARGET)
    for name in ("TTFT", "TPOT"):
        assert found[name].low == pytest.approx(1.2) == found[name].high
    assert found["tokens/s"].low == found["tokens/s"].high == 1.0
    assert found["goodput"].value < 1.0


def test_requests_that_failed_count_against_goodput_and_not_for_latency() -> None:
    base = trial(2.0, [50.0, 50.0, 50.0, 50.0])
    found = trial_ratios(trial(2.0, [50.0, math.nan, 50.0, math.nan]), base, TARGET)
    assert found["goodput"].value == 0.5
    assert found["TTFT"].value == 1.0


def test_a_ratio_to_nothing_is_infinite() -> None:
    found = trial_ratios(trial(2.0, [50.0] * 4), trial(2.0, [200.0] * 4), TARGET)
    assert found["goodput"].value == math.inf


def test_the_ratio_of_two_capacities() -> None:
    slow = shares([1.0, 1.0, 0.5, 0.0])
    fast = [RateTrial(3 * one.rate_per_s, one.rounds) for one in slow]
    found = capacity_ratio(fast, slow, TARGET, 0.9)
    assert found.low == pytest.approx(3.0) == found.high
