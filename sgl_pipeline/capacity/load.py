"""The load whose capacity is asked: the same requests for the simulator and for a server."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

from sgl_pipeline.args import require
from sgl_pipeline.simulator.traces import load_trace, shared_prefixes
from sgl_pipeline.simulator.workload import (
    SimulatedRequest,
    TokenIds,
    poisson_arrivals,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthRange:
    """Lengths drawn evenly from [ratio * most, most], in tokens."""

    input_tokens: int
    output_tokens: int
    ratio: float

    def draw(self, count: int, random: Random) -> list[SimulatedRequest]:
        """Requests that share nothing."""
        ids = TokenIds()

        def length(most: int) -> int:
            return random.randint(max(1, int(most * self.ratio)), most)

        return [
            SimulatedRequest(
                arrival_s=0.0,
                prompt=(ids.fresh(length(self.input_tokens)),),
                output=ids.fresh(length(self.output_tokens)),
            )
            for _ in range(count)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityLoad:
    """`num_requests` of a trace, in an order of each round's own, or of `lengths` drawn anew in
    each round; Poisson arrivals. Of each prompt `hit_rate` is shared with some others."""

    source: str | LengthRange
    num_requests: int
    seed: int = 0
    hit_rate: float = 0.0
    sharing_requests: int = 16

    def requests(self, rate_per_s: float, round_number: int) -> list[SimulatedRequest]:
        """The requests of a round, by arrival; at another rate they are the same, and arrive at the
        same moments up to a factor. Infinity: all at once.

        Raises ConfigurationError for a trace that cannot be read or has conversations.
        """
        random = Random(f"{self.seed}, round {round_number}")
        requests = self._drawn(random)
        if self.hit_rate:
            requests = shared_prefixes(requests, self.hit_rate, self.sharing_requests)
        return poisson_arrivals(requests, rate_per_s, random)

    def apart(self, count: int, gap_s: float) -> list[SimulatedRequest]:
        """The first `count` requests of round 0, so far apart that each is served alone."""
        few = self.requests(1.0, 0)[:count]
        return [replace(one, arrival_s=n * gap_s) for n, one in enumerate(few)]

    def _drawn(self, random: Random) -> list[SimulatedRequest]:
        if isinstance(self.source, LengthRange):
            return self.source.draw(self.num_requests, random)
        requests = load_trace(self.source, self.num_requests)
        require(
            all(one.follow_up is None for one in requests),
            f"--trace {self.source} holds conversations, whose turns wait for each other: their "
            "rate is not one that can be set; use a trace of single requests",
        )
        random.shuffle(requests)
        return requests

    def describe(self) -> str:
        """Describes the load in a line."""
        source = self.source
        if isinstance(source, LengthRange):
            what = (
                f"up to {source.input_tokens} tokens in and {source.output_tokens} out, at least "
                f"{source.ratio:.0%} of them"
            )
        else:
            what = f"of {source}"
        shared = f", {self.hit_rate:.0%} of each prompt shared" if self.hit_rate else ""
        return f"{self.num_requests} requests a round, {what}{shared}, Poisson arrivals"


def tokens_per_s(
    requests: Sequence[SimulatedRequest], is_served: Sequence[bool], duration_s: float
) -> float:
    """Tokens in and out of the requests that were served, over `duration_s`."""
    tokens = sum(
        one.input_tokens + one.output_tokens
        for one, served in zip(requests, is_served, strict=True)
        if served
    )
    return tokens / duration_s if duration_s > 0 else 0.0
