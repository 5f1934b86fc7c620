"""Sums a simulation up: latencies, throughput, and the idle shares of the stages.

Pure functions of a `Simulation`; units are in the names. Percentiles are those of numpy.
"""

from collections.abc import Sequence
from itertools import pairwise

import msgspec
import numpy as np

from sgl_pipeline.goodput import LatencyTarget, RequestLatency, goodput
from sgl_pipeline.simulator.simulation import ServedRequest, Simulation


class Distribution(msgspec.Struct, frozen=True):
    """The distribution of one number over the requests that have it."""

    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Distribution":
        if not values:
            return cls(*[float("nan")] * 4)
        p50, p90, p99 = np.percentile(values, (50, 90, 99))
        return cls(float(np.mean(values)), float(p50), float(p90), float(p99))


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """`itl_ms` are the pauses between any two tokens of one request. `output_tokens_per_s` and
    `total_tokens_per_s` (prompt tokens that were served from the cache included) are over the time
    from the first arrival to the last token. `bubble_share` is the part of the stages' time in
    which they waited although some stage was busy. `cache_hit_share` is the share of prompt tokens
    that were not computed, `loaded_share` that of those which a store, or a prefill server, had to
    give. `target_share` is the goodput: the share of requests that met the target, where there was
    one."""

    num_requests: int
    num_failed: int
    duration_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    requests_per_s: float
    ttft_ms: Distribution
    tpot_ms: Distribution
    itl_ms: Distribution
    e2e_ms: Distribution
    bubble_share: float
    cache_hit_share: float
    num_retractions: int
    num_steps: int
    mean_step_tokens: float
    std_step_tokens: float
    target_share: float | None = None
    loaded_share: float = 0.0


def summarize(simulation: Simulation, target: LatencyTarget | None = None) -> Summary:
    """The numbers of all requests that were served to their end."""
    latencies = [latency(served) for served in simulation.requests]
    done = [served for served in simulation.requests if served.finished_s is not None]
    ends = [served.finished_s for served in done if served.finished_s is not None]
    started_s = min((served.arrival_s for served in simulation.requests), default=0.0)
    duration_s = max(ends, default=started_s) - started_s or float("nan")
    input_tokens = sum(served.asked.input_tokens for served in done)
    output_tokens = sum(len(served.token_times_s) for served in done)
    step_tokens = [step.shape.num_tokens for step in simulation.steps]
    return Summary(
        num_requests=len(done),
        num_failed=len(simulation.requests) - len(done),
        duration_s=duration_s,
        output_tokens_per_s=output_tokens / duration_s,
        total_tokens_per_s=(input_tokens + output_tokens) / duration_s,
        requests_per_s=len(done) / duration_s,
        ttft_ms=Distribution.of([one.ttft_ms for one in latencies if one is not None]),
        tpot_ms=Distribution.of(
            [one.tpot_ms for one in latencies if one is not None and one.tpot_ms is not None]
        ),
        itl_ms=Distribution.of([gap_ms for one in done for gap_ms in token_gaps_ms(one)]),
        e2e_ms=Distribution.of(
            [(end - served.arrival_s) * 1e3 for served, end in zip(done, ends, strict=True)]
        ),
        bubble_share=bubble_share(simulation),
        cache_hit_share=sum(one.cached_tokens for one in done) / max(1, input_tokens),
        num_retractions=simulation.num_retractions,
        num_steps=len(simulation.steps),
        mean_step_tokens=float(np.mean(step_tokens)) if step_tokens else float("nan"),
        std_step_tokens=float(np.std(step_tokens)) if step_tokens else float("nan"),
        target_share=None if target is None else goodput(latencies, target),
        loaded_share=sum(one.loaded_tokens for one in done) / max(1, input_tokens),
    )


def latency(served: ServedRequest) -> RequestLatency | None:
    """The latency that goodput counts; None for a request that was not served to its end."""
    if served.finished_s is None:
        return None
    first_ms, last_ms = (
        (served.token_times_s[place] - served.arrival_s) * 1e3 for place in (0, -1)
    )
    return RequestLatency.of(first_ms, last_ms, len(served.token_times_s))


def token_gaps_ms(served: ServedRequest) -> list[float]:
    """Times between tokens that follow each other."""
    return [(after - before) * 1e3 for before, after in pairwise(served.token_times_s)]


def bubble_share(simulation: Simulation) -> float:
    """Idle time of the stages over all their time, while the pipeline has work.

    The pipeline has work from the first stage's start of a step to the last stage's end of it;
    where the steps in flight leave a gap, nothing was there to do and nothing is counted.
    """
    if not simulation.steps:
        return float("nan")
    num_stages = len(simulation.steps[0].starts_s)
    has_work_s = busy_s = 0.0
    until_s = -float("inf")
    for step in simulation.steps:
        has_work_s += max(0.0, step.ends_s[-1] - max(until_s, step.starts_s[0]))
        until_s = max(until_s, step.ends_s[-1])
        busy_s += sum(end - start for start, end in zip(step.starts_s, step.ends_s, strict=True))
    return 1.0 - busy_s / (num_stages * has_work_s)
