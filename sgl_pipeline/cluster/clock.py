"""Measures the offset between the clock of another host and ours, by pings.

Used by the head process, which sends a ping a few times a second. An answer bounds the offset by
half of the time that it was on the way (RFC 5905, section 8); of the recent ones those that were on
the way for the shortest time say most, because everything that delays a ping makes it longer. The
clocks drift apart by some millionths, which a line through these answers gives. Reads no clock.
"""

from collections import deque
from dataclasses import dataclass
from itertools import pairwise

# Pings from which an offset is taken, and the longer past from which the drift is.
WINDOW_PINGS = 64
WINDOWS = 16
# No quartz is that bad: what looks like more is noise.
MAX_DRIFT = 200e-6


@dataclass(frozen=True, slots=True)
class ClockReading:
    """A moment of the host's clock plus `offset_s` is one of ours, within `error_s`."""

    offset_s: float
    error_s: float
    drift_ppm: float = 0.0


@dataclass(frozen=True, slots=True)
class _Sample:
    """At `at_s` of our clock the offset was `offset_s`, give or take `error_s`."""

    at_s: float
    offset_s: float
    error_s: float


class HostClock:
    """The clock of one host."""

    def __init__(self) -> None:
        self._samples: deque[_Sample] = deque(maxlen=WINDOW_PINGS)
        # The best sample of each past window, for the drift.
        self._past: deque[_Sample] = deque(maxlen=WINDOWS)
        self._num_samples = 0

    def add(self, sent_s: float, received_s: float, answered_s: float, returned_s: float) -> None:
        """Books a ping: sent and returned by our clock, received and answered by the host's."""
        away_s = (returned_s - sent_s) - (answered_s - received_s)
        if away_s < 0.0:
            return  # a clock was set, or the answer is made up
        middle_s = 0.5 * (sent_s + returned_s)
        offset_s = middle_s - 0.5 * (received_s + answered_s)
        self._samples.append(_Sample(middle_s, offset_s, 0.5 * away_s))
        self._num_samples += 1
        if self._num_samples % WINDOW_PINGS == 0:
            self._past.append(min(self._samples, key=lambda one: one.error_s))

    def read(self, now_s: float) -> ClockReading | None:
        """The relation at `now_s` of our clock; None before the first ping."""
        if not self._samples:
            return None
        drift = self._drift()

        def error_s(one: _Sample) -> float:
            # What the drift may have added since, in case it is not known well.
            return one.error_s + abs(now_s - one.at_s) * max(abs(drift) * 0.5, 10e-6)

        best = min(self._samples, key=error_s)
        offset_s = best.offset_s + drift * (now_s - best.at_s)
        return ClockReading(offset_s, error_s(best), drift * 1e6)

    def _drift(self) -> float:
        """The offset's change in a second, as far as the errors of the samples show one."""
        samples = [*self._past, min(self._samples, key=lambda one: one.error_s)]
        if len(samples) < 3:
            return 0.0
        first, last = samples[0], samples[-1]
        span_s = last.at_s - first.at_s
        if span_s <= 0.0 or any(b.at_s <= a.at_s for a, b in pairwise(samples)):
            return 0.0
        mean_at = sum(one.at_s for one in samples) / len(samples)
        mean_offset = sum(one.offset_s for one in samples) / len(samples)
        numerator = sum((one.at_s - mean_at) * (one.offset_s - mean_offset) for one in samples)
        denominator = sum((one.at_s - mean_at) ** 2 for one in samples)
        slope = numerator / denominator
        noise = (first.error_s + last.error_s) / span_s
        return 0.0 if abs(slope) < noise else max(-MAX_DRIFT, min(MAX_DRIFT, slope))
