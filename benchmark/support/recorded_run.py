"""A recorded run: its trace, the requests that came, and how they were served.

Works on the step records of the server and of a simulation alike, which is how
`benchmark/forecasts/calibrate.py` holds one against the other.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
import numpy as np

from sgl_pipeline.records.trace import StepRecord, TraceWriter
from sgl_pipeline.simulator.calibration import FittedCosts, fitted_s
from sgl_pipeline.simulator.workload import SimulatedRequest, TokenIds


class RunFigures(msgspec.Struct, frozen=True):
    """Figures of a run as the scheduler saw it: times count from a request's arrival there to the
    step that brought its token. Throughput counts prompt and output tokens from the first arrival
    to the last token; `idle_shares[s]` is the part of that time in which stage `s` did not
    compute."""

    total_tokens_per_s: float
    mean_ttft_ms: float
    mean_tpot_ms: float
    idle_shares: tuple[float, ...]


def write_steps(path: Path, steps: Iterable[StepRecord]) -> None:
    """A trace file of these steps, as `--trace-path` would have written it."""
    writer = TraceWriter(path)
    for step in steps:
        writer.write(step)
    writer.close()


def recorded_requests(records: Sequence[StepRecord]) -> list[SimulatedRequest]:
    """The requests that ended in a run, by arrival, the first at 0 s.

    A trace knows lengths, not tokens: nothing is shared, so the run should have been one without
    prefix cache.
    """
    arrivals = sorted(
        (record.finished_s - ended.total_ms * 1e-3, ended.prompt_tokens, ended.output_tokens)
        for record in records
        for ended in record.ended
    )
    ids = TokenIds()
    return [
        SimulatedRequest(
            arrival_s=arrival_s - arrivals[0][0],
            prompt=(ids.fresh(prompt_tokens),),
            output=ids.fresh(output_tokens),
        )
        for arrival_s, prompt_tokens, output_tokens in arrivals
    ]


def run_figures(records: Sequence[StepRecord]) -> RunFigures:
    """The figures of a run that ended at least one request of two tokens or more."""
    ended = [(record.finished_s, request) for record in records for request in record.ended]
    started_s = min(finished_s - request.total_ms * 1e-3 for finished_s, request in ended)
    duration_s = max(finished_s for finished_s, _ in ended) - started_s
    num_tokens = sum(request.prompt_tokens + request.output_tokens for _, request in ended)
    tpots_ms = [
        (request.total_ms - request.first_token_ms) / (request.output_tokens - 1)
        for _, request in ended
        if request.output_tokens > 1
    ]
    compute_ms = np.array([[timing.compute_ms for timing in record.stages] for record in records])
    return RunFigures(
        total_tokens_per_s=num_tokens / duration_s,
        mean_ttft_ms=float(np.mean([request.first_token_ms for _, request in ended])),
        mean_tpot_ms=float(np.mean(tpots_ms)),
        idle_shares=tuple(float(1.0 - s / (duration_s * 1e3)) for s in compute_ms.sum(axis=0)),
    )


def slowness_of(records: Sequence[StepRecord], costs: FittedCosts) -> float:
    """The time that the stages took in a run, divided by the time that the fit of another run gives
    for its steps."""
    measured_s = sum(stage.compute_ms for record in records for stage in record.stages) * 1e-3
    return measured_s / sum(sum(fitted_s(costs.stages, record.work)) for record in records)
