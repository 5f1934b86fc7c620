"""Fits find the costs that the samples came from, noise and outliers notwithstanding."""

import random

import numpy as np
import pytest
from support.served_steps import ServedSteps, card_costs, flat_costs

from sgl_pipeline.costs.stage_costs import MadeUpStep, PartSample
from sgl_pipeline.costs.step_costs import LayerCost, RowCost, StepCosts
from sgl_pipeline.migration.least_squares import non_negative_fit, relative_fit
from sgl_pipeline.migration.online_fit import FIRST_FIT_STEPS, OnlineFit
from sgl_pipeline.migration.predictor import SlowestStage, StepPredictor
from sgl_pipeline.migration.step_fit import errors_on, fit_parts
from sgl_pipeline.migration.step_forecast import StepForecast
from sgl_pipeline.stage_plan import StagePlan
from sgl_pipeline.step_work import StepWork, attended_tokens
from sgl_pipeline.throttle.draft_budget import least_chance

# The knots are of those that a fit may use.
TRUTH = StepCosts(
    layer=LayerCost(RowCost((1.0, 16.0, 128.0), (1.0, 1.2, 7.0), 0.06), 7e-3, 1.1e-4, 1.1e-5),
    embedding=RowCost((1.0,), (0.002,), 1e-4),
    tail=RowCost((1.0, 8.0), (4.0, 4.2), 0.05),
    layer_weights=(1.0, 2.5, 1.0, 2.5, 1.0),
)
KINDS = (0, 1, 0, 1, 0)


def random_steps(count: int, seed: int) -> list[MadeUpStep]:
    rng = random.Random(seed)
    return [
        MadeUpStep(
            int(2 ** rng.uniform(0, 8)),
            rng.randrange(2000),
            rng.choice([0, int(2 ** rng.uniform(0, 11))]),
            rng.choice([0, rng.randrange(2000)]),
        )
        for _ in range(count)
    ]


def samples_of(costs: StepCosts, count: int, seed: int, noise: float = 0.0) -> list[PartSample]:
    rng, predictor = random.Random(seed), StepPredictor(costs)

    def noisy(ms: float) -> float:
        return ms * (1.0 + noise * rng.uniform(-1.0, 1.0))

    samples = []
    for step in random_steps(count, seed):
        parts = predictor.parts_ms(step.work)
        kinds = (noisy(parts.layer_ms), noisy(2.5 * parts.layer_ms))
        samples.append(
            PartSample(step.work, kinds, noisy(parts.embedding_ms), noisy(parts.tail_ms))
        )
    return samples


def test_exact_times_give_the_costs_back_on_steps_never_seen() -> None:
    fitted = fit_parts(samples_of(TRUTH, 200, seed=1), KINDS)
    errors = errors_on(fitted, samples_of(TRUTH, 100, seed=2), KINDS)
    assert errors.layer < 1e-6
    assert errors.tail < 1e-6
    assert fitted.layer_weights == pytest.approx(TRUTH.layer_weights)
    assert fitted.layer.decode_ms == pytest.approx(7e-3)
    assert fitted.layer.decode_attended_ms == pytest.approx(1.1e-4)
    assert fitted.layer.prefill_attended_ms == pytest.approx(1.1e-5)


def test_a_jump_where_a_block_of_rows_is_full_is_fitted() -> None:
    """As measured: nine rows cost a quarter more than eight, and the next seven little more."""
    jumping = StepCosts(
        LayerCost(RowCost((8.0, 9.0, 16.0, 17.0), (1.0, 1.25, 1.4, 1.8), 0.06), 0.0, 1e-4, 1e-5),
        TRUTH.embedding,
        TRUTH.tail,
        TRUTH.layer_weights,
    )
    fitted = fit_parts(samples_of(jumping, 300, seed=9), KINDS)
    assert errors_on(fitted, samples_of(jumping, 100, seed=10), KINDS).layer < 1e-6
    straight = fit_parts(samples_of(jumping, 300, seed=9), KINDS, curve_rows=(1.0,))
    assert errors_on(straight, samples_of(jumping, 100, seed=10), KINDS).layer > 0.02


def test_noise_of_ten_percent_leaves_the_fit_within_two() -> None:
    fitted = fit_parts(samples_of(TRUTH, 300, seed=3, noise=0.1), KINDS)
    errors = errors_on(fitted, samples_of(TRUTH, 100, seed=4), KINDS)
    assert errors.layer < 0.02
    assert errors.tail < 0.02


def test_errors_are_those_of_the_predictions() -> None:
    doubled = StepCosts(
        LayerCost(RowCost((1.0, 16.0, 128.0), (2.0, 2.4, 14.0), 0.12), 14e-3, 2.2e-4, 2.2e-5),
        TRUTH.embedding,
        RowCost((1.0, 8.0), (6.0, 6.3), 0.075),
        TRUTH.layer_weights,
    )
    errors = errors_on(doubled, samples_of(TRUTH, 50, seed=5), KINDS)
    assert errors.layer == pytest.approx(1.0)
    assert errors.tail == pytest.approx(0.5)


def test_no_coefficient_is_negative_and_the_rest_fits_without_it() -> None:
    rows = np.array([[1.0, n, n % 3] for n in range(1, 30)])
    values = 2.0 + 0.5 * rows[:, 1] - 0.2 * rows[:, 2]
    found = non_negative_fit(rows, values)
    assert found.min() >= 0.0
    assert found[2] == 0.0
    oracle = np.linalg.lstsq(rows[:, :2], values, rcond=None)[0]
    assert found[:2] == pytest.approx(oracle)


def test_shares_of_a_time_are_fitted_and_not_seconds() -> None:
    # Two groups that no single factor fits: the one that halves both misses, in shares.
    features, values = np.array([[1.0], [100.0]]), np.array([1.0, 200.0])
    (found,) = relative_fit(features, values)
    assert found == pytest.approx(1.5, abs=0.2)  # 2.0 were it seconds


def test_an_outlier_pulls_no_harder_than_its_bound() -> None:
    features, values = np.ones((100, 1)), np.ones(100)
    values[7] = 1000.0
    assert relative_fit(features, values, outlier_share=0.5)[0] < 1.05
    assert relative_fit(features, values)[0] > 5.0


def online_costs(
    costs: StepCosts,
    layer_counts: tuple[int, ...],
    noise: float,
    outliers: bool = False,
    windows: tuple[int | None, ...] = (),
) -> tuple[StepCosts, ServedSteps]:
    rng = random.Random(6)
    served = ServedSteps(
        costs, StagePlan(0, layer_counts), (), lambda: 1.0 + noise * rng.uniform(-1, 1)
    )
    fit = OnlineFit(windows or costs.layer_windows or (None,) * sum(layer_counts))
    for number, step in enumerate(random_steps(FIRST_FIT_STEPS, seed=7), 1):
        record = served.run(step.work)
        times = [stage.compute_ms for stage in record.stages]
        if outliers and number % 40 == 0:
            times[number % len(times)] *= 30.0
        found = fit.note(step.work, layer_counts, times)
        assert (found is not None) == (number == FIRST_FIT_STEPS)
    assert found is not None
    return found, served


@pytest.mark.parametrize("layer_counts", [(9, 7), (5, 5, 6), (3, 4, 4, 3, 2)])
@pytest.mark.parametrize("outliers", [False, True])
def test_whole_stages_tell_layers_and_tail_apart(
    layer_counts: tuple[int, ...], outliers: bool
) -> None:
    truth = card_costs(16)
    found, served = online_costs(truth, layer_counts, noise=0.05, outliers=outliers)
    predictor = StepPredictor(found)
    layer_errors, tail_errors = [], []
    for step in random_steps(200, seed=8):
        expected = served.truth.parts_ms(step.work)
        parts = predictor.parts_ms(step.work)
        layer_errors.append(abs(parts.layer_ms / expected.layer_ms - 1.0))
        tail_errors.append(abs(parts.tail_ms / expected.tail_ms - 1.0))
    assert np.mean(layer_errors) < 0.05
    assert np.mean(tail_errors) < 0.10


@pytest.mark.parametrize("layer_counts", [(5, 5, 6), (3, 4, 4, 3, 2)])
def test_the_embedding_is_the_first_stages_alone(layer_counts: tuple[int, ...]) -> None:
    plain = card_costs(16)
    by_token = RowCost((1.0,), (4e-3,), 4e-3)  # of many tokens as long as several layers
    truth = StepCosts(plain.layer, by_token, plain.tail, plain.layer_weights)
    found, _ = online_costs(truth, layer_counts, noise=0.05)
    assert found.embedding.row_ms == pytest.approx(4e-3, rel=0.05)


@pytest.mark.parametrize("seed", range(4))
def test_a_decode_takes_time_though_only_chunks_of_a_long_prompt_were_seen(seed: int) -> None:
    """Their attention explains all of their times; drafts are weighed by shares of a decode's."""
    rng, fit = random.Random(seed), OnlineFit((None,) * 8)
    costs: StepCosts | None = None
    for number in range(FIRST_FIT_STEPS):
        attended = attended_tokens(512 * number, 512 * (number + 1))
        work = StepWork(512, 0, 0, attended, 0)
        times = [4e-4 * attended * (1.0 + 0.1 * rng.uniform(-1.0, 1.0)) for _ in range(2)]
        costs = fit.note(work, (4, 4), times)
    assert costs is not None
    times_of = SlowestStage(StepPredictor(costs), (4, 4), (1.0, 1.0))
    decode = StepWork(1, 1, 33_000, 0, 1)
    assert times_of.step_ms(decode) > 0.0
    least_chance(times_of, decode, is_alone=True)


def test_a_server_fits_ever_more_rarely() -> None:
    fit, record = OnlineFit((None,) * 4), ServedSteps(flat_costs(4, 2.0), StagePlan(0, (2, 2)))
    times = [
        number
        for number in range(1, 5000)
        if fit.note(
            StepWork(1 + number % 40, 0, 0, 0, 1),
            (2, 2),
            [s.compute_ms for s in record.run(StepWork(1, 0, 0, 0, 1)).stages],
        )
        is not None
    ]
    assert times == [64, 128, 256, 512, 1024, 2048, 4096]


def test_a_first_fit_to_steps_that_were_all_alike_is_put_right() -> None:
    """It takes rows for free, so that of chunks the stage with the head looks too fast."""
    served = ServedSteps(card_costs(16), StagePlan(0, (8, 8)))
    forecast = StepForecast(served.plan)
    decode, chunk = StepWork(1, 1, 100, 0, 1), StepWork(512, 0, 0, attended_tokens(0, 512), 0)
    for _ in range(FIRST_FIT_STEPS):
        forecast.note(served.run(decode))
    for _ in range(20):
        forecast.note(served.run(chunk))
    assert len(set(forecast.speeds)) > 1
    for _ in range(FIRST_FIT_STEPS):
        forecast.note(served.run(chunk))
    known, truth = (
        SlowestStage(predictor, served.plan.layer_counts, (1.0, 1.0))
        for predictor in (forecast.predictor, served.truth)
        if predictor is not None
    )
    assert known.step_ms(chunk) == pytest.approx(truth.step_ms(chunk), rel=0.05)


WINDOWED = StepCosts(
    TRUTH.layer, TRUTH.embedding, TRUTH.tail, (1.0, 2.5, 1.0, 1.0, 1.0), (128, None, 128, 32, 128)
)
WINDOWED_KINDS = (0, 1, 0, 2, 0)


def windowed_samples(
    count: int, seed: int, noise: float, windows: tuple[int | None, ...]
) -> list[PartSample]:
    """Made-up steps, timed row by row: rows of a prompt cross the window, and costs know only the
    sum of what all see."""
    rng, predictor = random.Random(seed), StepPredictor(TRUTH)
    samples = []
    for _ in range(count):
        contexts = [rng.randrange(1, 4000)] * 32
        start, length = rng.choice([0, rng.randrange(2000)]), rng.choice([0, rng.randrange(1, 512)])
        rows = [*range(start + 1, start + length + 1)]

        def work(window: float, contexts: list[int] = contexts, rows: list[int] = rows) -> StepWork:
            seen = [int(sum(min(n, window) for n in one)) for one in (contexts, rows)]
            return StepWork(32 + len(rows), 32, *seen, 32)

        whole = predictor.parts_ms(work(float("inf")))
        kinds = tuple(
            weight
            * predictor.parts_ms(work(window or float("inf"))).layer_ms
            * (1.0 + noise * rng.uniform(-1.0, 1.0))
            for window, weight in zip(windows, (1.0, 2.5, 1.0), strict=True)
        )
        samples.append(PartSample(work(float("inf")), kinds, whole.embedding_ms, whole.tail_ms))
    return samples


def test_windows_are_fitted_though_a_step_knows_only_sums() -> None:
    windows = (128, None, 32)
    samples = windowed_samples(300, 1, 0.02, windows)
    held_out = windowed_samples(100, 2, 0.02, windows)
    fitted = fit_parts(samples, WINDOWED_KINDS, windows=WINDOWED.layer_windows)
    assert fitted.layer_windows == WINDOWED.layer_windows
    assert fitted.layer_weights == pytest.approx(WINDOWED.layer_weights, rel=0.1)
    assert errors_on(fitted, held_out, WINDOWED_KINDS).layer < 0.05
    blind = fit_parts(samples, WINDOWED_KINDS)
    assert errors_on(blind, held_out, WINDOWED_KINDS).layer > 0.08


def test_layers_with_states_do_not_hide_what_attention_costs() -> None:
    truth = StepCosts(
        TRUTH.layer, TRUTH.embedding, TRUTH.tail, (0.5, 0.5, 0.5, 1.0), (0, 0, 0, None)
    )
    predictor, samples = StepPredictor(truth), []
    for step in random_steps(200, seed=11):
        parts = predictor.parts_ms(step.work)
        kinds_ms = (0.5 * parts.windows_ms[0], parts.layer_ms)
        samples.append(PartSample(step.work, kinds_ms, parts.embedding_ms, parts.tail_ms))
    kinds = (0, 0, 0, 1)
    fitted = fit_parts(samples, kinds, windows=truth.layer_windows)
    assert fitted.layer_windows == truth.layer_windows
    assert fitted.layer_weights == pytest.approx(truth.layer_weights)
    assert fitted.layer.decode_attended_ms == pytest.approx(truth.layer.decode_attended_ms)
    assert fitted.layer.prefill_attended_ms == pytest.approx(truth.layer.prefill_attended_ms)
    assert errors_on(fitted, samples, kinds).layer < 1e-6


@pytest.mark.parametrize("layer_counts", [(9, 7), (3, 4, 4, 3, 2)])
@pytest.mark.parametrize(
    "windows",
    [(None, 64, 64, 64, None, 512, 64, 64) + (64,) * 8, (0, 0, 0, None) * 4],
    ids=["windows", "states"],
)
def test_a_server_learns_what_layers_with_a_window_see(
    layer_counts: tuple[int, ...], windows: tuple[int | None, ...]
) -> None:
    plain = card_costs(16)
    attending = LayerCost(plain.layer.rows, 0.0, 5e-6, 1e-6)
    truth = StepCosts(attending, plain.embedding, plain.tail, plain.layer_weights, windows)
    found, served = online_costs(truth, layer_counts, noise=0.05)
    blind, _ = online_costs(truth, layer_counts, noise=0.05, windows=(None,) * 16)
    assert found.layer_windows == windows and blind.layer_windows == ()
    assert found.layer.decode_attended_ms == pytest.approx(5e-6, rel=0.1)

    def error(costs: StepCosts) -> float:
        """The mean of the errors of a stage's time in every step, for another split."""
        shares = []
        for step in random_steps(200, seed=8):
            expected, told = (
                predictor.stage_times_ms(predictor.parts_ms(step.work), (2, 14))
                for predictor in (served.truth, StepPredictor(costs))
            )
            shares += [abs(one / other - 1.0) for one, other in zip(told, expected, strict=True)]
        return float(np.mean(shares))

    assert error(found) < 0.05
    assert error(blind) > 2 * error(found)


def test_a_forecast_fits_the_windows_that_it_is_told_of() -> None:
    plan, windows = StagePlan(0, (2, 2)), (64, None, 64, 64)
    forecast = StepForecast(plan, layer_windows=windows)
    served = ServedSteps(card_costs(4), plan)
    for step in random_steps(FIRST_FIT_STEPS, seed=7):
        forecast.note(served.run(step.work))
    assert forecast.predictor is not None
    assert forecast.predictor.costs.layer_windows == windows
