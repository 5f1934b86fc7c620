"""Measures how the window of `POST /pipeline/tune` was served, to judge its predictions."""

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from sgl_pipeline.goodput import LatencyTarget, RequestLatency, goodput
from sgl_pipeline.pipeline.recent_load import RecentWork


def describe_window(work: RecentWork, ttft_ms: float, tpot_ms: float) -> dict[str, Any]:
    """The measured latencies of the requests that have ended, as the scheduler saw them, and the
    share of these that met both targets. `window_s` is the time since the oldest one came."""
    ended = [one for one in work.requests if one.total_ms is not None]
    ttfts = [one.first_token_ms for one in ended if one.first_token_ms is not None]
    tpots = [one.tpot_ms for one in ended if one.tpot_ms is not None]
    latencies = [RequestLatency(one.first_token_ms or 0.0, one.tpot_ms) for one in ended]
    return {
        "knobs_in_force": work.knobs,
        "measured": {
            "window_s": round(work.now_s - work.requests[0].arrival_s, 3),
            "requests_ended": len(ended),
            "requests_live": len(work.requests) - len(ended),
            "target_share": goodput(latencies, LatencyTarget(ttft_ms=ttft_ms, tpot_ms=tpot_ms)),
            "ttft_ms": _distribution(ttfts),
            "tpot_ms": _distribution(tpots),
        },
    }


def _distribution(values: Sequence[float]) -> dict[str, float | None]:
    """As the simulator's `Distribution`, of nearest ranks."""
    if not values:
        return dict.fromkeys(("mean", "p50", "p90", "p99"))
    ordered = sorted(values)
    shares = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
    ranks = {name: ordered[round(share * (len(ordered) - 1))] for name, share in shares.items()}
    return {name: round(value, 3) for name, value in ({"mean": fmean(values)} | ranks).items()}
