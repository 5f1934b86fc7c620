"""Costs fitted to the trace of a real run: `--calibrate FILE`, as `--trace-path` wrote it.

Each stage gets its own fit, so unequal splits and the head need no model of their own. A fit holds
for the machine, the model, the split and the load on the processors of the run that it came from.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import msgspec
import numpy as np

from sgl_pipeline.costs.step_costs import LayerCost, RowCost, StepCosts
from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.migration.least_squares import KNOT_TOKENS, relative_fit, rows_beyond_knots
from sgl_pipeline.migration.predictor import StepPredictor
from sgl_pipeline.migration.step_fit import (
    convex_rows,
    curve_features,
    rising_rows,
    used_knots,
)
from sgl_pipeline.records.trace import StepRecord, read_trace
from sgl_pipeline.simulator.host_fit import fit_host
from sgl_pipeline.simulator.pipeline_costs import HostCosts, SimulatedLink
from sgl_pipeline.simulator.step_shape import StepShape
from sgl_pipeline.step_work import StepWork

MIN_STEPS = 200
OUTLIER_SHARE = 0.3
# A bend in the slope counts where this share of the steps is this many times as large.
SHARE_BEYOND_KNOT = 0.05
BEYOND_KNOT = 1.5
# Where times by rows may bend, in a run with drafts.
DRAFT_KNOTS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 128.0, 512.0)
GOLDEN_SECTION = (5**0.5 - 1) / 2


@dataclass(frozen=True, slots=True)
class FittedCosts:
    """A pipeline as it was measured; has what `virtual_pipeline.py` asks of its costs.

    Each stage is a single layer and a tail: a trace does not tell a stage's layers apart.
    Equal steps take unequal times where processors are shared with the front and the scheduler, and
    stages wait for each other's slow ones. So the noise is replayed: `noise[k][s]` is what recorded
    step `k` took on stage `s` over its fit. Simulated steps take these by turns over and over, in
    strides through the whole record: a recorded load that was slow would else be the pace of each
    run as short as it.
    `errors[s]` is the mean error of stage `s`'s step times, as a share of their mean.
    """

    stages: tuple[StepPredictor, ...]
    noise: tuple[tuple[float, ...], ...]
    link: SimulatedLink
    host: HostCosts
    errors: tuple[float, ...]

    @property
    def num_stages(self) -> int:
        return len(self.stages)

    @property
    def layer_counts(self) -> tuple[int, ...]:
        """One layer for each stage."""
        return (1,) * len(self.stages)

    def stage_seconds(self, shape: StepShape, step_id: int) -> tuple[float, ...]:
        """The fit for steps of this shape, times the noise whose turn it is."""
        noise = self.noise[step_id * _stride(len(self.noise)) % len(self.noise)]
        return tuple(
            one_s * factor
            for one_s, factor in zip(fitted_s(self.stages, shape.work), noise, strict=True)
        )

    def link_after(self, stage: int) -> SimulatedLink:
        """The same between all stages; what results take is in `host`."""
        return self.link if stage + 1 < self.num_stages else SimulatedLink()

    def under(self, layer_counts: tuple[int, ...]) -> "FittedCosts":
        """Raises ConfigurationError: a recorded pipeline has one split."""
        raise ConfigurationError(
            "layers cannot move in a recorded pipeline: its trace has no times of single layers; "
            "name --model, --device and --link in place of --calibrate"
        )

    def seconds_before(self, shape: StepShape, stage: int, layer: int) -> float:
        """As `under`."""
        raise AssertionError("no layer has moved to a recorded stage")

    def known(self, works: Iterable[StepWork]) -> StepPredictor:
        """The knowledge of a server that has run for a while: step times of the stage that is the
        slowest over `works`. A recorded stage is a layer, so that all stages are taken as alike; a
        forecast that learns finds their speeds."""
        seen = list(works)

        def total_ms(stage: StepPredictor) -> float:
            parts = map(stage.parts_ms, seen)
            return sum(one.layer_ms + one.tail_ms for one in parts)

        slowest = max(self.stages, key=total_ms).costs
        weights = (1.0,) * self.num_stages
        return StepPredictor(msgspec.structs.replace(slowest, layer_weights=weights))

    def slowed_by(self, factor: float) -> "FittedCosts":
        """The same pipeline on a machine whose stages take `factor` times as long."""
        noise = tuple(tuple(factor * one for one in step) for step in self.noise)
        return replace(self, noise=noise)


@lru_cache(maxsize=64)
def _stride(count: int) -> int:
    """The step with which a walk around `count` places visits each of them once, and any few in a
    row are spread over all: next to the golden section."""
    stride = max(1, round(count * GOLDEN_SECTION))
    while math.gcd(stride, count) > 1:
        stride += 1
    return stride


def fit_trace(path: str | Path) -> FittedCosts:
    """The costs of the run that wrote `path`; a file that has not changed is fitted once. Raises
    ConfigurationError as `fit_records`."""
    return _fit_file(str(path), Path(path).stat().st_mtime_ns)


def known_of_trace(path: str | Path) -> StepPredictor:
    """`FittedCosts.known` over the steps of `path`. Raises ConfigurationError as `fit_records`."""
    return _known_file(str(path), Path(path).stat().st_mtime_ns)


@lru_cache(maxsize=8)
def _known_file(path: str, changed_ns: int) -> StepPredictor:
    return _fit_file(path, changed_ns).known(record.work for record in read_trace(path))


@lru_cache(maxsize=8)
def _fit_file(path: str, _changed_ns: int) -> FittedCosts:
    return fit_records(list(read_trace(path)), path)


def fit_records(
    records: Sequence[StepRecord], source: str, *, is_robust: bool = False
) -> FittedCosts:
    """The costs of the run that `records` of `source` are of.

    Args:
        is_robust: for a machine with other work, and for steps of other sizes than were measured:
            what held a step up pulls no harder than OUTLIER_SHARE, and the slope bends only where
            enough steps lie beyond.

    Raises ConfigurationError when it is too short to tell anything.
    """
    if len(records) < MIN_STEPS:
        raise ConfigurationError(
            f"{source} has {len(records)} steps; at least {MIN_STEPS} of different sizes are needed"
        )
    measured_s = np.array([[stage.compute_ms for stage in r.stages] for r in records]) * 1e-3
    fits = [_fit_stage(records, of_stage, is_robust) for of_stage in measured_s.T]
    predicted_s = np.array([fitted_s(fits, record.work) for record in records])
    errors = np.abs(predicted_s - measured_s).mean(axis=0) / measured_s.mean(axis=0)
    host, link = fit_host(records)
    return FittedCosts(
        stages=tuple(fits),
        noise=tuple(map(tuple, (measured_s / predicted_s).tolist())),
        link=link,
        host=host,
        errors=tuple(errors.tolist()),
    )


def fitted_s(stages: Sequence[StepPredictor], work: StepWork) -> list[float]:
    """Seconds of each stage in a step, without noise."""
    parts = [stage.parts_ms(work) for stage in stages]
    return [(one.layer_ms + one.tail_ms) * 1e-3 for one in parts]


def lone_layer(layer: LayerCost, tail_ms: float, sample_ms: float) -> StepPredictor:
    """The times of a stage: those of its layers taken as one, `tail_ms` where a step has any
    sample, and `sample_ms` for each."""
    embedding = RowCost((1.0,), (0.0,), 0.0)
    tail = RowCost((1.0,), (tail_ms + sample_ms,), sample_ms)
    return StepPredictor(StepCosts(layer, embedding, tail, layer_weights=(1.0,)))


def _fit_stage(
    records: Sequence[StepRecord], measured_s: np.ndarray, is_robust: bool
) -> StepPredictor:
    outlier_share = OUTLIER_SHARE if is_robust else np.inf
    if any(record.draft_tokens for record in records):
        return _fit_with_drafts([one.work for one in records], measured_s * 1e3, outlier_share)
    # A token that a decode attends to costs many of a prompt's, whose rows share what they read;
    # and the head's weights are read only where something is sampled.
    features = np.array(
        [
            [
                1.0,
                *rows_beyond_knots(work.tokens),
                work.decode_attended_tokens,
                work.prefill_attended_tokens,
                1.0 if work.samples else 0.0,
                work.samples,
            ]
            for work in (record.work for record in records)
        ]
    )
    if is_robust:
        tokens = features[:, 1] + KNOT_TOKENS[0]
        for column, knot in enumerate(KNOT_TOKENS[1:], 2):
            if (tokens > BEYOND_KNOT * knot).mean() < SHARE_BEYOND_KNOT:
                features[:, column] = 0.0
    found = relative_fit(features, measured_s * 1e3, outlier_share)
    base_ms, *slopes_ms = (float(one) for one in found[:-4])
    by_decodes_ms, by_prefill_ms, tail_ms, sample_ms = (float(one) for one in found[-4:])
    rows = convex_rows(base_ms, slopes_ms)
    return lone_layer(LayerCost(rows, 0.0, by_decodes_ms, by_prefill_ms), tail_ms, sample_ms)


def _fit_with_drafts(
    works: Sequence[StepWork], measured_ms: np.ndarray, outlier_share: float
) -> StepPredictor:
    """Few rows in each size: what one row more takes is what a draft costs, and that is not even
    among the first. Drafts also tell a decode's own cost from a row's and a sample's."""
    knots = used_knots([work.tokens for work in works], DRAFT_KNOTS)
    features = np.array(
        [
            [
                *curve_features(work.tokens, knots),
                work.decodes,
                work.decode_attended_tokens,
                work.prefill_attended_tokens,
                work.samples,
            ]
            for work in works
        ]
    )
    found = relative_fit(features, measured_ms, outlier_share)
    decode_ms, by_decodes_ms, attended_ms, sample_ms = (float(one) for one in found[-4:])
    layer = LayerCost(rising_rows(knots, found[:-4]), decode_ms, by_decodes_ms, attended_ms)
    return lone_layer(layer, 0.0, sample_ms)
