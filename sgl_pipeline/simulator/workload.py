"""The requests of a simulation: how long, when, and which prefixes they share.

Loaded from traces or drawn from distributions by `traces.py`. Token ids are made up: a `Segment` is
a run of consecutive ids, and equal ids at equal places are an equal prefix to the radix cache.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from random import Random

from sgl_pipeline.simulator.virtual_drafts import NEVER_RIGHT, DraftAcceptance


@dataclass(frozen=True, slots=True)
class Segment:
    """`length` token ids from `first` on."""

    first: int
    length: int

    @property
    def token_ids(self) -> range:
        return range(self.first, self.first + self.length)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedRequest:
    """A request of `tenant` that will arrive. `follow_up` arrives `think_s` after this one has
    ended, whatever its own `arrival_s` says. `acceptance`: of drafts, where the scheduler gives
    any."""

    arrival_s: float
    prompt: tuple[Segment, ...]
    output: Segment
    follow_up: "SimulatedRequest | None" = None
    think_s: float = 0.0
    tenant: str = ""
    acceptance: DraftAcceptance = NEVER_RIGHT

    @property
    def input_tokens(self) -> int:
        return sum(segment.length for segment in self.prompt)

    @property
    def output_tokens(self) -> int:
        return self.output.length

    def prompt_ids(self) -> list[int]:
        return list(chain.from_iterable(segment.token_ids for segment in self.prompt))

    @classmethod
    def chain(cls, requests: Sequence["SimulatedRequest"]) -> "SimulatedRequest":
        """The first of `requests`, each the follow-up of the one before it."""
        following: SimulatedRequest | None = None
        for request in reversed(requests):
            following = replace(request, follow_up=following)
        assert following is not None, "a chain has at least one request"
        return following

    def with_acceptance(self, acceptance: DraftAcceptance) -> "SimulatedRequest":
        """The same conversation, whose drafts are right so often."""
        return self.chain([replace(turn, acceptance=acceptance) for turn in self.with_follow_ups()])

    def with_follow_ups(self) -> Iterator["SimulatedRequest"]:
        """This request and all that come after it."""
        request: SimulatedRequest | None = self
        while request is not None:
            yield request
            request = request.follow_up


class TokenIds:
    """Hands out runs of ids that nothing else has."""

    def __init__(self) -> None:
        self._next = 0

    def fresh(self, length: int) -> Segment:
        segment = Segment(self._next, length)
        self._next += length
        return segment


def poisson_arrivals(
    requests: Iterable[SimulatedRequest], rate_per_s: float, random: Random
) -> list[SimulatedRequest]:
    """The same requests in the same order, arriving as a Poisson process of `rate_per_s`.

    A rate of infinity lets all arrive at once.
    """
    now_s = 0.0
    arriving = []
    for request in requests:
        arriving.append(replace(request, arrival_s=now_s))
        now_s += random.expovariate(rate_per_s) if rate_per_s != float("inf") else 0.0
    return arriving


def scaled_arrivals(
    requests: Iterable[SimulatedRequest], rate_per_s: float
) -> list[SimulatedRequest]:
    """The recorded arrivals, sped up or slowed down to `rate_per_s` on average."""
    requests = list(requests)
    duration_s = requests[-1].arrival_s - requests[0].arrival_s
    factor = (len(requests) - 1) / duration_s / rate_per_s if duration_s else 0.0
    return [replace(one, arrival_s=one.arrival_s * factor) for one in requests]
