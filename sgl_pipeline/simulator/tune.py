"""Budget search: which policy parameters carry the highest request rate within a latency target.

After Sarathi-Serve's choice of its budget by simulation (OSDI'24, section 4.3), for every policy:
one parameter after the other, from the defaults on, with the values of `PolicyEntry.searched`.
"""

import math
import operator
from collections.abc import Callable, Iterator

from sgl_pipeline.args import ThrottleArgs
from sgl_pipeline.args.flags import flags_of
from sgl_pipeline.simulator.climb import Trial, climb
from sgl_pipeline.throttle import POLICY_TABLE

# The server's flag of each parameter.
FLAGS = {field.name: flag.names[0] for field, flag in flags_of(ThrottleArgs)}

# A capacity is known to within this share.
RATE_TOLERANCE = 0.03
# Requests that arrive faster come at once, except that the first begins alone.
MOST_RATE_PER_S = 1e6

# The share of requests that meet the target, by knobs and arrivals a second.
Attainment = Callable[[ThrottleArgs, float], float]


def search(
    start: ThrottleArgs, attainment: Attainment, needed_share: float
) -> Iterator[Trial[float]]:
    """Every trial as soon as it is done, scored by the highest rate (requests a second) that it
    carries."""

    def measure(throttle: ThrottleArgs, best_per_s: float) -> float:
        return capacity(attainment, throttle, needed_share, best_per_s)

    first = Trial(start, capacity(attainment, start, needed_share))
    yield first
    yield from climb(first, POLICY_TABLE[start.policy].searched, measure, operator.gt)


def capacity(
    attainment: Attainment, throttle: ThrottleArgs, needed_share: float, guess_per_s: float = 1.0
) -> float:
    """The highest rate at which at least `needed_share` of the requests meet the target, to within
    RATE_TOLERANCE; 0 when even a hundredth of a request a second is too much, infinity when all may
    come at once, or as good as that."""

    def carries(rate_per_s: float) -> bool:
        return attainment(throttle, rate_per_s) >= needed_share

    if carries(math.inf):
        return math.inf
    low, high = 0.0, guess_per_s or 1.0
    while carries(high):
        if high > MOST_RATE_PER_S:
            return math.inf
        low, high = high, high * 2
    while not low and high > 0.01:
        if carries(high / 2):
            low = high / 2
        else:
            high /= 2
    while low and high / low > 1.0 + RATE_TOLERANCE:
        middle = (low * high) ** 0.5
        if carries(middle):
            low = middle
        else:
            high = middle
    return low


def server_flags(throttle: ThrottleArgs) -> list[str]:
    """The flags that start the server with these parameters."""
    names = ("policy", *POLICY_TABLE[throttle.policy].searched)
    values = {name: getattr(throttle, name) for name in names}
    values["max_prefill_tokens"] = throttle.prefill_limit
    return [part for name, value in values.items() for part in (FLAGS[name], str(value))]
