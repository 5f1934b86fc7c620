"""The doctor's forecast beside a server: steps that it ran, and its model's costs."""

import pytest
from support.served_steps import flat_costs
from support.step_records import step_record

from benchmark.hosts.doctor_forecast import LOAD, Compared, Forecast, slowness, table
from benchmark.moves.move_gains import ClosedLoop
from sgl_pipeline.costs.stage_costs import TYPICAL_STEP
from sgl_pipeline.migration.predictor import StepPredictor


def test_slowness_is_what_the_stages_took_over_what_the_costs_say() -> None:
    """Both stages computed for two milliseconds, twice."""
    predictor = StepPredictor(flat_costs(4, tail_ms=1.0, layer_ms=0.25))
    records = [step_record(0), step_record(1)]
    assert slowness(records, predictor, (3, 1)) == pytest.approx(2 * 4.0 / (2 * (1.0 + 1.0)))


def test_the_load_keeps_steps_at_those_of_the_forecast() -> None:
    assert LOAD.clients == 2 * TYPICAL_STEP.decodes
    drawn_for_each = TYPICAL_STEP.prompt_tokens / TYPICAL_STEP.decodes
    assert LOAD.input_tokens / LOAD.output_tokens == pytest.approx(drawn_for_each, rel=0.02)
    context = LOAD.input_tokens + LOAD.output_tokens / 2
    assert context == pytest.approx(TYPICAL_STEP.context_tokens, rel=0.02)


def test_a_row_has_the_forecast_the_measured_rate_and_how_far_they_are_apart() -> None:
    forecast = Forecast(
        gbit_per_s=0.1,
        delay_ms=10.0,
        found_gbit_per_s=0.09,
        found_round_trip_ms=20.5,
        layer_counts=(9, 7),
        bound_by="the round",
        output_tokens_per_s=120.0,
    )
    compared = Compared(
        forecast=forecast,
        output_tokens_per_s=100.0,
        decodes=31.0,
        prompt_tokens=150.4,
        slowness=1.1,
    )
    row = table([compared]).splitlines()[-1]
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    name = "0.1 Gbit/s, 10 ms"
    assert cells == [name, "9,7", "the round", "120", "100", "+20.0%", "1.10", "31 + 150"]


def test_clients_begin_at_every_phase_of_their_answers() -> None:
    """Else the prompts of all of them come at once, every so often."""
    load = ClosedLoop(clients=4, input_tokens=10, output_tokens=6)
    assert [load.first_output_tokens(client) for client in range(4)] == [2, 3, 5, 6]
    lengths = [LOAD.first_output_tokens(client) for client in range(LOAD.clients)]
    assert len({*lengths}) == LOAD.clients
    assert (lengths[0], lengths[-1]) == (2, LOAD.output_tokens)
