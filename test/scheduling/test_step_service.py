"""The service of a step, divided among tenants."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.pipelines import make_request
from support.served_steps import card_costs

from sgl_pipeline.microbatch import Chunk, work_of
from sgl_pipeline.migration.predictor import StepPredictor
from sgl_pipeline.migration.step_forecast import StepForecast
from sgl_pipeline.scheduling.step_service import prefill_service, service_of
from sgl_pipeline.stage_plan import StagePlan
from sgl_pipeline.step_work import StepTimes


def times_of(num_layers: int = 4) -> StepTimes:
    plan = StagePlan(0, (num_layers,))
    forecast = StepForecast(plan, StepPredictor(card_costs(num_layers)), learns=False)
    times = forecast.slowest(plan.layer_counts)
    assert times is not None
    return times


TIMES = times_of()


def decode(tenant: str, context: int) -> Chunk:
    request = make_request("d", [1] * (context + 1), tenant=tenant)
    return Chunk(request, context, 1, is_decode=True, samples=True)


def prefill(tenant: str, start: int, length: int) -> Chunk:
    request = make_request("p", [1] * (start + length), tenant=tenant)
    return Chunk(request, start, length, is_decode=False, samples=True)


CHUNKS = st.lists(
    st.one_of(
        st.builds(decode, st.sampled_from("abc"), st.integers(0, 3000)),
        st.builds(prefill, st.sampled_from("abc"), st.integers(0, 500), st.integers(1, 500)),
    ),
    min_size=1,
    max_size=12,
)


@given(CHUNKS)
def test_the_parts_add_up_to_the_step(chunks: list[Chunk]) -> None:
    work = work_of(chunks)
    services = service_of(chunks, work, TIMES)
    assert sum(services.values()) == pytest.approx(TIMES.step_ms(work))
    assert set(services) == {chunk.request.tenant for chunk in chunks}
    assert all(service > 0 for service in services.values())


def test_rows_share_what_a_step_costs_anyway() -> None:
    many = [decode("many", 100)] * 31
    services = service_of([*many, decode("one", 100)], work_of([*many, decode("one", 100)]), TIMES)
    assert services["many"] == pytest.approx(31 * services["one"])


def test_a_longer_context_is_more_service_and_a_cached_one_is_no_rows() -> None:
    chunks = [decode("long", 4000), decode("short", 10)]
    services = service_of(chunks, work_of(chunks), TIMES)
    assert services["long"] > services["short"]
    whole, rest = prefill("whole", 0, 400), prefill("rest", 390, 10)
    services = service_of([whole, rest], work_of([whole, rest]), TIMES)
    assert services["rest"] < services["whole"] / 20


def test_without_times_tokens_count_and_output_counts_twice() -> None:
    chunks = [decode("a", 100), prefill("a", 0, 10), prefill("b", 5, 7)]
    assert service_of(chunks, work_of(chunks), None) == {"a": 12.0, "b": 7.0}
    assert prefill_service(5, 12, None) == 7.0


def test_what_is_expected_of_a_chunk_leaves_out_what_any_step_costs() -> None:
    assert prefill_service(0, 1, TIMES) == pytest.approx(0.0, abs=1e-3)
    assert 0 < prefill_service(0, 500, TIMES) < TIMES.step_ms(work_of([prefill("a", 0, 500)]))
