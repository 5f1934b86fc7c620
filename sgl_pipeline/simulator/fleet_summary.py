"""Sums up a run of several pipelines: what `summary.py` says of one, per device, and the handover
from prefill to decode."""

import msgspec
import numpy as np

from sgl_pipeline.goodput import LatencyTarget
from sgl_pipeline.simulator.disaggregation import FleetRun
from sgl_pipeline.simulator.simulation import Simulation
from sgl_pipeline.simulator.summary import Distribution, Summary, summarize


class FleetSummary(msgspec.Struct, frozen=True, kw_only=True):
    """`serving` is of all requests; bubbles and steps are in `decode_batch`, the mean number of
    decodes of a step that has any, alone. `goodput_per_device` are requests a second that met the
    target. `prefill_ms` and `handover_ms` add up to the time to the first token.

    `requests_running` is the mean number of requests that have their first token and not the last,
    over the run.
    """

    serving: Summary
    num_devices: int
    output_tokens_per_s_per_device: float
    goodput_per_device: float | None
    prefill_ms: Distribution
    handover_ms: Distribution
    decode_batch: float
    requests_running: float
    loaded_gb: float
    offloaded_share: float
    most_held_share: float


def summarize_fleet(run: FleetRun, target: LatencyTarget | None = None) -> FleetSummary:
    """The numbers of a run."""
    serving = summarize(Simulation(run.requests, (), run.num_retractions), target)
    met = serving.target_share
    goodput = None if met is None else met * len(run.requests) / serving.duration_s
    steps = [one for pipeline in run.pipelines for one in pipeline.steps]
    batches = [one.shape.num_decodes for one in steps if one.shape.num_decodes]
    decoding_s = sum(
        served.token_times_s[-1] - served.token_times_s[0]
        for served in run.requests
        if served.token_times_s
    )
    return FleetSummary(
        serving=serving,
        num_devices=run.num_devices,
        output_tokens_per_s_per_device=serving.output_tokens_per_s / run.num_devices,
        goodput_per_device=None if goodput is None else goodput / run.num_devices,
        prefill_ms=Distribution.of([one * 1e3 for one in run.prefill_s]),
        handover_ms=Distribution.of([one * 1e3 for one in run.handover_s]),
        decode_batch=float(np.mean(batches)) if batches else float("nan"),
        requests_running=decoding_s / serving.duration_s,
        loaded_gb=run.loaded_bytes / 1e9,
        offloaded_share=run.num_offloaded / max(1, len(run.requests)),
        most_held_share=run.most_held_share,
    )
