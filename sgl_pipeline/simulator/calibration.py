"""Costs fitted to the trace of a real run: `--calibrate FILE`, as `--trace-path` wrote it.

Each stage gets its own fit, so unequal splits and the head need no model of their own. A fit holds
for the machine, the model, the split and the load on the processors of the run that it came from.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.simulator.pipeline_costs import HostCosts, Link
from sgl_pipeline.simulator.step_shape import StepShape
from sgl_pipeline.trace import StepRecord, read_trace

# The rows of a step cost in pieces: reading the weights bounds few rows, computing bounds many.
KNOT_TOKENS = (1.0, 8.0, 32.0, 128.0, 512.0)
MIN_STEPS = 200


@dataclass(frozen=True, slots=True)
class StageFit:
    """Seconds of a stage: a base, a slope for the rows beyond each knot, and for what is attended
    to and sampled. None is negative."""

    base_s: float
    slopes_s: tuple[float, ...]
    attended_s: float
    sample_s: float

    def seconds(self, num_tokens: int, attended_tokens: int, num_samples: int) -> float:
        rows = _rows_beyond_knots(num_tokens)
        return (
            self.base_s
            + sum(slope * count for slope, count in zip(self.slopes_s, rows, strict=True))
            + self.attended_s * attended_tokens
            + self.sample_s * num_samples
        )


@dataclass(frozen=True, slots=True)
class FittedCosts:
    """A pipeline as it was measured; `errors[s]` is the mean error of stage `s`'s step times, as a
    share of their mean. Has what `virtual_pipeline.py` asks of its costs."""

    stages: tuple[StageFit, ...]
    link: Link
    host: HostCosts
    errors: tuple[float, ...]

    @property
    def num_stages(self) -> int:
        return len(self.stages)

    def stage_seconds(self, shape: StepShape) -> tuple[float, ...]:
        attended = sum(shape.decode_contexts) + sum(
            length * (2 * before + length + 1) // 2 for length, before in shape.prefills
        )
        return tuple(
            stage.seconds(shape.num_tokens, attended, shape.num_samples) for stage in self.stages
        )


def fit_trace(path: str | Path) -> FittedCosts:
    """The costs of the run that wrote `path`.

    Raises ConfigurationError when it is too short to tell anything.
    """
    records = list(read_trace(path))
    if len(records) < MIN_STEPS:
        raise ConfigurationError(
            f"{path} has {len(records)} steps; at least {MIN_STEPS} of different sizes are needed"
        )
    fits, errors = [], []
    for stage in range(len(records[0].stages)):
        measured_s = np.array([record.stages[stage].compute_ms for record in records]) * 1e-3
        fit = _fit_stage(records, measured_s)
        fits.append(fit)
        predicted_s = [
            fit.seconds(r.prefill_tokens + r.decodes, r.attended_tokens, r.samples) for r in records
        ]
        errors.append(float(np.abs(predicted_s - measured_s).mean() / measured_s.mean()))
    hop_s = _hop_s(records)
    return FittedCosts(tuple(fits), Link(latency_s=hop_s), _host(records, hop_s), tuple(errors))


def _rows_beyond_knots(num_tokens: int) -> list[float]:
    """The rows of a step, cut at the knots: 40 rows are 7 + 24 + 8 beyond the first."""
    edges = [*KNOT_TOKENS, float("inf")]
    return [min(max(num_tokens - low, 0.0), high - low) for low, high in pairwise(edges)]


def _fit_stage(records: Sequence[StepRecord], measured_s: np.ndarray) -> StageFit:
    features = np.array(
        [
            [1.0, *_rows_beyond_knots(r.prefill_tokens + r.decodes), r.attended_tokens, r.samples]
            for r in records
        ]
    )
    base_s, *slopes_s, attended_s, sample_s = _non_negative_fit(features, measured_s)
    return StageFit(base_s, tuple(slopes_s), attended_s, sample_s)


def _non_negative_fit(features: np.ndarray, values: np.ndarray) -> list[float]:
    """Least squares with coefficients that are not negative: the most negative one is dropped
    until none is."""
    scales = np.maximum(features.max(axis=0), 1e-12)
    used = np.ones(features.shape[1], bool)
    while True:
        solution = np.linalg.lstsq(features[:, used] / scales[used], values, rcond=None)[0]
        if solution.size == 0 or solution.min() >= 0.0:
            break
        used[np.flatnonzero(used)[solution.argmin()]] = False
    coefficients = np.zeros(features.shape[1])
    coefficients[used] = solution / scales[used]
    return [float(coefficient) for coefficient in coefficients]


def _hop_s(records: Sequence[StepRecord]) -> float:
    """What a step takes beyond its stages' time when it waits for nobody, for each hop: to the
    first stage, between two, and back."""
    outside_s = [
        record.finished_s
        - record.scheduled_s
        - sum(timing.compute_ms for timing in record.stages) * 1e-3
        for record in records
    ]
    hops = len(records[0].stages) + 1
    return max(0.0, float(np.percentile(outside_s, 5))) / hops


def _host(records: Sequence[StepRecord], hop_s: float) -> HostCosts:
    """The scheduler's own work, and the two hops between it and the stages."""
    return HostCosts(
        schedule_step_s=float(np.mean([record.schedule_ms for record in records])) * 1e-3,
        result_step_s=float(np.mean([record.result_ms for record in records])) * 1e-3,
        transit_s=2 * hop_s,
    )
