"""A load that was served at one rate, in several rounds: what both sides of the command give."""

from collections.abc import Callable
from dataclasses import dataclass

from sgl_pipeline.capacity.processor_use import ProcessorUse
from sgl_pipeline.goodput import LatencyTarget, RequestLatency, goodput


@dataclass(frozen=True, slots=True)
class Round:
    """One serving of the load: each request in the order in which they came, None for one that
    failed, and the tokens in and out over the time from the first arrival to the last token.
    `processors` is what a server on this host and its clients took; None of another one, and where
    the time is virtual."""

    latencies: tuple[RequestLatency | None, ...]
    total_tokens_per_s: float
    processors: ProcessorUse | None = None


@dataclass(frozen=True, slots=True)
class RateTrial:
    """All rounds at `rate_per_s`. Round `n` has the same requests at every rate and under every
    policy, and its arrivals differ by a factor alone, so rounds are compared in pairs."""

    rate_per_s: float
    rounds: tuple[Round, ...]

    @property
    def latencies(self) -> list[RequestLatency | None]:
        """The latencies of the requests of all rounds."""
        return [one for each in self.rounds for one in each.latencies]

    def goodput(self, target: LatencyTarget) -> float:
        """Over the requests of all rounds."""
        return goodput(self.latencies, target)


# Serves the load at a rate (requests a second; infinity: all at once) in the round of that number.
Serve = Callable[[float, int], Round]
# Is shown each trial as soon as it is over.
OnTrial = Callable[[RateTrial], None]
