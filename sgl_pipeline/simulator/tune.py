"""Budget search: which policy parameters carry the highest request rate within a latency target.

After Sarathi-Serve's choice of its budget by simulation (OSDI'24, section 4.3), for every policy.
One parameter is varied at a time, in the order of `SEARCH_SPACE`, from the defaults on; capacity is
not convex in them, so the result is the best of what was tried and says so.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from sgl_pipeline.args import ThrottleArgs

# Parameters by policy, in the order in which they are searched, and the values tried: all that the
# policy reads, except `min_prefill_tokens`.
_SPREADS = (1, 2, 4, 8, 16)
_LIMITS = (512, 1024, 2048, 4096)
_ADAPTIVE_LIMITS = (2048, 4096, 8192, 16384)
_PAUSES = (0.0, 0.05, 0.1)
_BUDGETS = (256, 512, 1024, 2048, 4096)
SEARCH_SPACE: Mapping[str, Mapping[str, tuple[Any, ...]]] = {
    "throttle": {
        "prefill_spread_steps": _SPREADS,
        "max_prefill_tokens": _LIMITS,
        "pause_free_share": _PAUSES,
    },
    "throttle-time": {
        "prefill_spread_steps": _SPREADS,
        "max_prefill_tokens": _LIMITS,
        "pause_free_share": _PAUSES,
    },
    "throttle-adaptive": {
        "prefill_spread_steps": _SPREADS,
        "max_prefill_tokens": _ADAPTIVE_LIMITS,
    },
    "no-wt": {"max_prefill_tokens": _LIMITS, "pause_free_share": _PAUSES},
    "no-ut": {
        "prefill_spread_steps": _SPREADS,
        "max_prefill_tokens": _LIMITS,
        "pause_free_share": _PAUSES,
    },
    "no-threshold": {"prefill_spread_steps": _SPREADS, "max_prefill_tokens": _LIMITS},
    "sarathi": {"max_prefill_tokens": _BUDGETS},
    "greedy-queue": {"max_prefill_tokens": _BUDGETS},
}

# The server's flag of each parameter, held to its parser by
# test/managers/command_line/test_server_args.py.
FLAGS = {
    "policy": "--policy",
    "prefill_spread_steps": "--prefill-spread-steps",
    "max_prefill_tokens": "--chunked-prefill-size",
    "pause_free_share": "--pause-free-share",
}

# A capacity is known to within this share.
RATE_TOLERANCE = 0.03

# The share of requests that meet the target when so many arrive in a second.
Attainment = Callable[[ThrottleArgs, float], float]


@dataclass(frozen=True, slots=True)
class Trial:
    """Parameters that were tried, and the highest rate (requests a second) that they carry."""

    throttle: ThrottleArgs
    rate_per_s: float


def search(start: ThrottleArgs, attainment: Attainment, needed_share: float) -> Iterator[Trial]:
    """Every trial as soon as it is done; the best is the one of the highest rate."""
    best = Trial(start, capacity(attainment, start, needed_share))
    yield best
    for name, values in SEARCH_SPACE[start.policy].items():
        for value in values:
            throttle = replace(best.throttle, **{name: value})
            if throttle == best.throttle:
                continue
            trial = Trial(throttle, capacity(attainment, throttle, needed_share, best.rate_per_s))
            yield trial
            if trial.rate_per_s > best.rate_per_s:
                best = trial


def capacity(
    attainment: Attainment, throttle: ThrottleArgs, needed_share: float, guess_per_s: float = 1.0
) -> float:
    """The highest rate at which at least `needed_share` of the requests meet the target, to within
    RATE_TOLERANCE; 0 when even a hundredth of a request a second is too much, infinity when all may
    come at once."""

    def carries(rate_per_s: float) -> bool:
        return attainment(throttle, rate_per_s) >= needed_share

    if carries(math.inf):
        return math.inf
    low, high = 0.0, guess_per_s or 1.0
    while carries(high):
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
    names = ("policy", *SEARCH_SPACE[throttle.policy])
    values = {name: getattr(throttle, name) for name in names}
    values["max_prefill_tokens"] = throttle.prefill_limit
    return [part for name, value in values.items() for part in (FLAGS[name], str(value))]
