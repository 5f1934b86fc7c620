"""Reads capacities and ratios from trials, with bootstrap intervals. Pure.

A sample of the bootstrap draws rounds, and in each of them runs of consecutive requests, because
neighbors wait in the same queue and are late together. It draws the same ones at all rates and
under all policies, so what all of them share (the lengths, the bursts) cancels out of a comparison.
With a single round an interval says how the requests differ, not how rounds would.
"""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache

import msgspec
import numpy as np

from sgl_pipeline.capacity.rate_trial import RateTrial
from sgl_pipeline.goodput import LatencyTarget

NUM_SAMPLES = 1000
_INTERVAL = (2.5, 97.5)  # percentiles
_SEED = 36


class Estimate(msgspec.Struct, frozen=True):
    """A number, and the bounds of its 95 % interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3g} ({self.low:.3g} to {self.high:.3g})"


class _Sample:
    """The requests that one sample draws, as indices of arrays of rounds by requests."""

    def __init__(self, num_rounds: int, num_requests: int, random: np.random.Generator) -> None:
        length = math.ceil(num_requests**0.5)
        starts = random.integers(num_requests, size=(num_rounds, -(-num_requests // length)))
        places = (starts[:, :, None] + np.arange(length)).reshape(num_rounds, -1)
        self.rounds = random.integers(num_rounds, size=num_rounds)
        self.requests = places[:, :num_requests] % num_requests

    def of(self, values: np.ndarray) -> np.ndarray:
        """The drawn values of [..., rounds, requests]."""
        return values[..., self.rounds[:, None], self.requests]


@lru_cache(maxsize=1)  # a study's rates and policies have rounds of one size
def _samples(count: int, num_rounds: int, num_requests: int) -> tuple[_Sample, ...]:
    random = np.random.default_rng(_SEED)
    return tuple(_Sample(num_rounds, num_requests, random) for _ in range(count))


def capacity(trials: Sequence[RateTrial], target: LatencyTarget, needed_share: float) -> Estimate:
    """The highest rate, in requests a second, with the needed goodput. `trials` are by rising rate
    and of equal rounds; an end beyond them is not seen: the interval stops there."""
    rates, met = [trial.rate_per_s for trial in trials], _met(trials, target)

    def crossing_of(values: np.ndarray) -> float:
        return crossing(rates, values.mean(axis=(-2, -1)).tolist(), needed_share)

    drawn = [crossing_of(sample.of(met)) for sample in _samples(NUM_SAMPLES, *met.shape[1:])]
    return _estimate(crossing_of(met), drawn)


def capacity_ratio(
    one: Sequence[RateTrial],
    other: Sequence[RateTrial],
    target: LatencyTarget,
    needed_share: float,
) -> Estimate:
    """The capacity of `one` as a multiple of that of `other`, by the same rounds of both."""
    sides = [([trial.rate_per_s for trial in each], _met(each, target)) for each in (one, other)]

    def ratio(take: Callable[[np.ndarray], np.ndarray]) -> float:
        above, below = (
            crossing(rates, take(met).mean(axis=(-2, -1)).tolist(), needed_share)
            for rates, met in sides
        )
        return above / below

    drawn = [ratio(sample.of) for sample in _samples(NUM_SAMPLES, *sides[0][1].shape[1:])]
    return _estimate(ratio(lambda met: met), drawn)


def trial_ratios(one: RateTrial, other: RateTrial, target: LatencyTarget) -> dict[str, Estimate]:
    """The measures of `one` as multiples of those of `other`, served at the same rate in the same
    rounds: goodput, mean TTFT and TPOT of the requests that were served, and tokens/s. Where
    `other` has no goodput in a sample, that ratio is infinite."""
    pairs = {
        "goodput": [_met([trial], target)[0] for trial in (one, other)],
        "TTFT": [_values(trial, 0) for trial in (one, other)],
        "TPOT": [_values(trial, 1) for trial in (one, other)],
    }
    samples = _samples(NUM_SAMPLES, *pairs["goodput"][0].shape)
    found = {}
    for name, (above, below) in pairs.items():
        drawn = [_ratio(sample.of(above), sample.of(below)) for sample in samples]
        found[name] = _estimate(_ratio(above, below), drawn)
    above, below = (
        np.array([each.total_tokens_per_s for each in trial.rounds]) for trial in (one, other)
    )
    drawn = [_ratio(above[sample.rounds], below[sample.rounds]) for sample in samples]
    found["tokens/s"] = _estimate(_ratio(above, below), drawn)
    return found


def crossing(rates: Sequence[float], goodputs: Sequence[float], needed_share: float) -> float:
    """The rate at which the falling curve nearest to `goodputs` passes `needed_share`; between two
    rates on a straight line over the rate's logarithm. The first or last rate, where it does not
    pass in between."""
    fitted = falling_fit(goodputs)
    above = sum(value >= needed_share for value in fitted)
    if above in (0, len(rates)):
        return rates[min(above, len(rates) - 1)]
    before, after = fitted[above - 1], fitted[above]
    share = (before - needed_share) / (before - after)
    return float(rates[above - 1] * (rates[above] / rates[above - 1]) ** share)


def falling_fit(values: Sequence[float]) -> list[float]:
    """The nowhere rising values nearest to `values` by least squares: neighbors that rise are
    pooled."""
    pools: list[tuple[float, int]] = []  # (mean, number of values)
    for value in values:
        mean, number = float(value), 1
        while pools and pools[-1][0] < mean:
            before, more = pools.pop()
            mean = (mean * number + before * more) / (number + more)
            number += more
        pools.append((mean, number))
    return [mean for mean, number in pools for _ in range(number)]


def _met(trials: Sequence[RateTrial], target: LatencyTarget) -> np.ndarray:
    """[trials, rounds, requests]: 1 where a request met its target."""
    return np.array(
        [
            [[target.is_met(one) for one in each.latencies] for each in trial.rounds]
            for trial in trials
        ],
        dtype=float,
    )


def _values(trial: RateTrial, field: int) -> np.ndarray:
    """[rounds, requests]: a field of `RequestLatency`; nan where there is none."""
    return np.array(
        [
            [np.nan if one is None or one[field] is None else one[field] for one in each.latencies]
            for each in trial.rounds
        ],
        dtype=float,
    )


def _ratio(above: np.ndarray, below: np.ndarray) -> float:
    if np.isnan(above).all() or np.isnan(below).all():
        return math.nan
    numerator, denominator = float(np.nanmean(above)), float(np.nanmean(below))
    if denominator == 0.0:
        return 1.0 if numerator == 0.0 else math.inf
    return numerator / denominator


def _estimate(value: float, drawn: Sequence[float]) -> Estimate:
    # The nearest of the drawn ones: between a number and infinity there is no mean.
    low, high = np.percentile(drawn, _INTERVAL, method="nearest").tolist()
    return Estimate(value, low, high)
