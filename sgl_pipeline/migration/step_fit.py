"""Fits the costs of a model's parts, `StepCosts`, to measured times of steps.

The times are `PartSample`s of made-up steps, each part by itself, or `StageSample`s of served
steps, where a stage's layers and ends are one time.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from sgl_pipeline.costs.stage_costs import PartSample
from sgl_pipeline.costs.step_costs import FitErrors, LayerCost, RowCost, StepCosts
from sgl_pipeline.costs.windows import windowed_work
from sgl_pipeline.migration.least_squares import (
    KNOT_TOKENS,
    relative_fit,
    rows_beyond_knots,
)
from sgl_pipeline.migration.predictor import StepPredictor
from sgl_pipeline.step_work import StepWork

# Where made-up steps, which are many and little disturbed, may bend the curve of a part. There are
# more than `KNOT_TOKENS`, and the slope may fall from one to the next: `cpu_kernels/products.cpp`
# multiplies eight rows at a time, and a ninth costs a quarter of the first.
CURVE_ROWS = (1.0, 8.0, 9.0, 16.0, 17.0, 24.0, 25.0, 32.0, 33.0, 64.0, 128.0, 256.0, 512.0, 1024.0)

# Of the least time of a layer in any served step: a layer takes no less in a step unlike these, as
# decodes are to the chunks of one long prompt, of which a fit may find that attention is all.
LEAST_BASE_SHARE = 0.01


class StageSample(NamedTuple):
    """A served step's time on a stage: the number of its layers by their window, None for those
    that see all tokens. Stages between the ends have neither embedding nor tail."""

    work: StepWork
    layers: Mapping[int | None, int]
    is_first: bool
    is_last: bool
    stage_ms: float


def fit_parts(
    samples: Sequence[PartSample],
    kinds: Sequence[int],
    curve_rows: tuple[float, ...] = CURVE_ROWS,
    windows: Sequence[int | None] = (),
) -> StepCosts:
    """The costs that come nearest to `samples`, in shares of their times.

    Args:
        kinds: of each layer of the model, the index of its kind in `PartSample.kinds_ms`.
        curve_rows: where times may bend, ascending; (1.0,) gives DynaPipe's straight lines.
        windows: of each layer, as `StepCosts.layer_windows`; layers of a kind have the same.
    """
    own_windows = _own_windows(windows)
    window_of = dict(zip(kinds, own_windows or (None,) * len(kinds), strict=True))
    # A weight of 1 means the most common kind of layer that attends to tokens: times of the others
    # say nothing about what that costs.
    attending = [kind for kind in kinds if window_of[kind] != 0]
    usual = max(set(attending), key=attending.count)
    layer_ms = np.array([sample.kinds_ms[usual] for sample in samples])
    works = [sample.work for sample in samples]
    tails = [sample for sample in samples if sample.work.samples]
    window = window_of[usual]
    seen = works if window is None else [windowed_work(work, window) for work in works]
    costs = StepCosts(
        layer=_layer_cost(seen, layer_ms, curve_rows),
        embedding=_row_cost(
            [work.tokens for work in works],
            np.array([s.embedding_ms for s in samples]),
            curve_rows,
        ),
        tail=_row_cost(
            [sample.work.samples for sample in tails],
            np.array([s.tail_ms for s in tails]),
            curve_rows,
        ),
        layer_weights=(1.0,) * len(kinds),
        layer_windows=own_windows,
    )
    measured_ms = np.array([sample.kinds_ms for sample in samples]).mean(axis=0)
    ratios = measured_ms / _kinds_ms(StepPredictor(costs), samples, kinds).mean(axis=0)
    weights = tuple(float(ratios[kind] / ratios[usual]) for kind in kinds)
    return StepCosts(costs.layer, costs.embedding, costs.tail, weights, own_windows)


def fit_stages(
    samples: Sequence[StageSample], layer_windows: Sequence[int | None], outlier_share: float
) -> StepCosts:
    """The costs of layers, equal in all but their windows, that come nearest to the times of whole
    stages.

    Args:
        layer_windows: of each layer of the model, None for one that sees all tokens.
        outlier_share: see `least_squares.relative_fit`.
    """
    features = np.array([_stage_features(sample) for sample in samples])
    measured = np.array([sample.stage_ms for sample in samples])
    found = [float(one) for one in relative_fit(features, measured, outlier_share)]
    num_curve = 1 + len(KNOT_TOKENS)
    base_ms, *slopes_ms = found[:num_curve]
    least_ms = min(sample.stage_ms / sum(sample.layers.values()) for sample in samples)
    base_ms = max(base_ms, LEAST_BASE_SHARE * least_ms)
    decode_ms, by_decode_ms, by_prefill_ms, token_ms, tail_ms, sample_ms = found[num_curve:]
    return StepCosts(
        layer=LayerCost(convex_rows(base_ms, slopes_ms), decode_ms, by_decode_ms, by_prefill_ms),
        embedding=RowCost((1.0,), (token_ms,), token_ms),
        tail=RowCost((1.0,), (tail_ms + sample_ms,), sample_ms),
        layer_weights=(1.0,) * len(layer_windows),
        layer_windows=_own_windows(layer_windows),
    )


def _own_windows(windows: Sequence[int | None]) -> tuple[int | None, ...]:
    """The same as `StepCosts.layer_windows`: empty where no layer has one."""
    return tuple(windows) if any(window is not None for window in windows) else ()


def errors_on(costs: StepCosts, samples: Sequence[PartSample], kinds: Sequence[int]) -> FitErrors:
    """Relative error of the predictions for `samples`, averaged over all kinds of layers."""
    predictor = StepPredictor(costs)
    measured_ms = np.array([sample.kinds_ms for sample in samples])
    layer_errors = np.abs(_kinds_ms(predictor, samples, kinds) / measured_ms - 1.0)
    tail_errors = [
        abs(predictor.parts_ms(sample.work).tail_ms / sample.tail_ms - 1.0)
        for sample in samples
        if sample.work.samples
    ]
    return FitErrors(float(layer_errors.mean()), float(np.mean(tail_errors)), len(samples))


def _kinds_ms(
    predictor: StepPredictor, samples: Sequence[PartSample], kinds: Sequence[int]
) -> np.ndarray:
    """Predicted times [sample, kind] of a layer of each kind."""
    ends_ms = np.array(
        [predictor.layer_ends_ms(predictor.parts_ms(sample.work)) for sample in samples]
    )
    layers_ms = np.diff(ends_ms, axis=1)
    return layers_ms[:, [kinds.index(kind) for kind in range(len(samples[0].kinds_ms))]]


def _layer_cost(
    works: Sequence[StepWork], measured: np.ndarray, curve_rows: tuple[float, ...]
) -> LayerCost:
    knots = used_knots([work.tokens for work in works], curve_rows)
    features = np.array(
        [
            [
                *curve_features(work.tokens, knots),
                work.decodes,
                work.decode_attended_tokens,
                work.prefill_attended_tokens,
            ]
            for work in works
        ]
    )
    found = relative_fit(features, measured)
    decode_ms, by_decode_ms, by_prefill_ms = (float(one) for one in found[-3:])
    return LayerCost(rising_rows(knots, found[:-3]), decode_ms, by_decode_ms, by_prefill_ms)


def _row_cost(rows: Sequence[int], measured: np.ndarray, curve_rows: tuple[float, ...]) -> RowCost:
    knots = used_knots(rows, curve_rows)
    features = np.array([curve_features(count, knots) for count in rows])
    return rising_rows(knots, relative_fit(features, measured))


def used_knots(rows: Sequence[int], curve_rows: tuple[float, ...]) -> tuple[float, ...]:
    """The knots of `curve_rows` below the most rows; beyond them the last slope continues."""
    return tuple(knot for knot in curve_rows if knot == 1.0 or knot < max(rows))


def curve_features(rows: int, knots: Sequence[float]) -> list[float]:
    """1 for the time of a single row, then the number of rows between one knot and the next, so
    that times rise with rows and their slope is free."""
    nexts = (*knots[1:], float("inf"))
    between = (
        min(max(rows - low, 0.0), high - low) for low, high in zip(knots, nexts, strict=True)
    )
    return [1.0, *between]


def rising_rows(knots: tuple[float, ...], found: np.ndarray) -> RowCost:
    base_ms, *slopes_ms = (float(one) for one in found)
    times_ms = [base_ms]
    for slope_ms, low, high in zip(slopes_ms, knots, knots[1:], strict=False):
        times_ms.append(times_ms[-1] + slope_ms * (high - low))
    return RowCost(knots, tuple(times_ms), slopes_ms[-1])


def convex_rows(base_ms: float, slopes_ms: Sequence[float]) -> RowCost:
    """The rows' costs from slopes, each of which adds to the slopes before it."""
    times_ms = [
        base_ms
        + sum(s * rows for s, rows in zip(slopes_ms, rows_beyond_knots(int(knot)), strict=True))
        for knot in KNOT_TOKENS
    ]
    return RowCost(KNOT_TOKENS, tuple(times_ms), sum(slopes_ms))


def _stage_features(sample: StageSample) -> list[float]:
    work, count = sample.work, sum(sample.layers.values())
    layer = (1.0, *rows_beyond_knots(work.tokens), work.decodes)
    by_decodes = by_prefill = 0
    for window, own_count in sample.layers.items():
        seen = work if window is None else windowed_work(work, window)
        by_decodes += own_count * seen.decode_attended_tokens
        by_prefill += own_count * seen.prefill_attended_tokens
    samples = work.samples if sample.is_last else 0
    return [
        *(count * one for one in layer),
        by_decodes,
        by_prefill,
        work.tokens if sample.is_first else 0,
        1.0 if samples else 0.0,
        samples,
    ]
