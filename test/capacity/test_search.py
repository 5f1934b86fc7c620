"""The search of rates against goodputs that are made up, with the luck of rounds."""

import math

import numpy as np
import pytest

from sgl_pipeline.capacity import curve as curves
from sgl_pipeline.capacity.curve import capacity
from sgl_pipeline.capacity.rate_trial import Round
from sgl_pipeline.capacity.search import search_rates
from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.goodput import LatencyTarget, RequestLatency

TARGET = LatencyTarget(ttft_ms=100.0)
NUM_REQUESTS = 200


class Curve:
    """A server whose requests are within the target by chance: 90 % of them at `capacity_per_s`.

    Args:
        noise: of the share, anew at each rate and round, which makes it fall only roughly.
    """

    def __init__(self, capacity_per_s: float, noise: float, seed: int) -> None:
        self._capacity_per_s = capacity_per_s
        self._noise = noise
        self._random = np.random.default_rng(seed)
        self._luck = self._random.random((8, NUM_REQUESTS))
        self.rates: list[float] = []

    def serve(self, rate_per_s: float, number: int) -> Round:
        self.rates.append(rate_per_s)
        share = 1.0 / (1.0 + (rate_per_s / self._capacity_per_s) ** 6 / 9.0)
        share += self._noise * self._random.standard_normal()
        is_met = self._luck[number] < share
        return Round(tuple(RequestLatency(50.0 if met else 200.0, None) for met in is_met), 1.0)


def search(curve: Curve, guess_per_s: float, rounds: int = 4, factor: float = 2.0):
    return search_rates(
        curve.serve,
        TARGET,
        0.9,
        num_rounds=rounds,
        guess_per_s=guess_per_s,
        factor=factor,
        tolerance=0.05,
    )


@pytest.mark.parametrize("guess_per_s", [0.3, 3.1, 50.0])
@pytest.mark.parametrize("noise", [0.0, 0.02, 0.04])
def test_a_capacity_is_found_from_any_guess_and_in_spite_of_noise(
    guess_per_s: float, noise: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the value alone, of which the interval's samples are no part."""
    monkeypatch.setattr(curves, "NUM_SAMPLES", 1)
    errors = []
    for seed in range(20):
        trials = search(Curve(3.0, noise, seed), guess_per_s)
        errors.append(abs(capacity(trials, TARGET, 0.9).value / 3.0 - 1.0))
    assert np.median(errors) < 0.05
    assert max(errors) < 0.15


def test_trials_are_by_rate_and_of_the_same_rounds_and_not_many() -> None:
    curve = Curve(3.0, 0.0, 1)
    trials = search(curve, 2.0)
    rates = [trial.rate_per_s for trial in trials]
    assert rates == sorted(set(rates))
    assert {len(trial.rounds) for trial in trials} == {4}
    assert len(curve.rates) == 4 * len(trials) <= 4 * 9
    assert trials[0].goodput(TARGET) >= 0.9 > trials[-1].goodput(TARGET)


def test_a_good_guess_takes_few_trials() -> None:
    assert len(search(Curve(3.0, 0.0, 1), 2.9, factor=1.25)) <= 6


def test_a_rate_without_an_end_is_said() -> None:
    with pytest.raises(ConfigurationError, match="use more --requests"):
        search(Curve(math.inf, 0.0, 1), 1.0)


def test_targets_that_no_rate_holds_are_said() -> None:
    with pytest.raises(ConfigurationError, match="even at"):
        search(Curve(1e-9, 0.0, 1), 1.0)
