"""Prefill and decode apart, from names: conservation with offload, bounds, what is refused."""

from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest

from sgl_pipeline.args import SchedulingArgs, ThrottleArgs
from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.goodput import LatencyTarget
from sgl_pipeline.migration.online_fit import FIRST_FIT_STEPS
from sgl_pipeline.simulator.disaggregation import (
    Disaggregation,
    FleetRun,
    simulate_disaggregated,
    simulate_mixed,
)
from sgl_pipeline.simulator.experiment import Cluster
from sgl_pipeline.simulator.fleet_summary import FleetSummary, summarize_fleet
from sgl_pipeline.simulator.offload_setup import AttentionOffload, most_batch
from sgl_pipeline.simulator.peer_pages import PeerLink
from sgl_pipeline.simulator.step_shape import StepShape
from sgl_pipeline.simulator.workload import SimulatedRequest, TokenIds

CARD = Cluster(model="Llama-2-13B", device="a100-80g", num_stages=1, pool_tokens=8000)
NETWORK = PeerLink(latency_s=50e-6, bytes_per_s=25e9)
APART = Disaggregation(prefill=CARD, decode=CARD, link=NETWORK, prefill_policy="sarathi")
OFFLOAD = AttentionOffload(bound=0.6)


def load(num_requests: int, every_s: float = 0.05, seed: int = 0) -> list[SimulatedRequest]:
    random, ids = Random(seed), TokenIds()
    return [
        SimulatedRequest(
            arrival_s=every_s * number,
            prompt=(ids.fresh(random.randint(5, 700)),),
            output=ids.fresh(random.randint(1, 120)),
        )
        for number in range(num_requests)
    ]


def run(setup: Disaggregation, workload: Sequence[SimulatedRequest]) -> FleetRun:
    return simulate_disaggregated(
        setup, ThrottleArgs(policy="throttle"), SchedulingArgs(), workload
    )


def summary(setup: Disaggregation, workload: Sequence[SimulatedRequest]) -> FleetSummary:
    return summarize_fleet(run(setup, workload))


@pytest.mark.parametrize(
    "setup",
    [
        APART,
        replace(APART, offload=OFFLOAD),
        replace(APART, offload=replace(OFFLOAD, only_hidden=False, reading="both")),
        replace(APART, num_prefills=2, num_decodes=2, offload=OFFLOAD),
        replace(
            APART,
            prefill=replace(CARD, num_stages=2),
            decode=replace(CARD, num_stages=3, layer_counts=(10, 17, 13)),
            extra_decode_steps=3,
            offload=replace(OFFLOAD, fills_waits=True, only_hidden=False),
        ),
    ],
)
def test_all_requests_are_served_and_equal_runs_are_equal(setup: Disaggregation) -> None:
    """The simulation itself asserts that nothing stays held."""
    workload = load(60)
    first, again = run(setup, workload), run(setup, workload)
    assert len(first.requests) == 60 and not any(one.error for one in first.requests)
    for served in first.requests:
        assert len(served.token_times_s) == served.asked.output_tokens
    assert (first.num_offloaded > 0) == (setup.offload is not None)
    assert first.requests == again.requests


def test_the_time_to_the_first_token_is_prefill_and_handover() -> None:
    result = summary(APART, load(30, every_s=0.5))
    parts_ms = result.prefill_ms.mean + result.handover_ms.mean
    assert result.serving.ttft_ms.mean == pytest.approx(parts_ms)


def test_offloaded_pages_do_not_cross() -> None:
    ids = TokenIds()
    workload = [replace(one, prompt=(ids.fresh(330),)) for one in load(60)]
    plain, lending = run(APART, workload), run(replace(APART, offload=OFFLOAD), workload)
    share = 1 - lending.loaded_bytes / plain.loaded_bytes
    assert 0 < share == pytest.approx(lending.num_offloaded / 60)


def test_a_full_decode_pool_gains_by_offload_and_an_idle_one_does_not() -> None:
    lending = replace(APART, offload=OFFLOAD)
    busy, idle = load(80, every_s=0.02), load(20, every_s=3.0)
    assert summary(lending, busy).requests_running > 1.2 * summary(APART, busy).requests_running
    plain, lent = summary(APART, idle), summary(lending, idle)
    assert lent.serving.tpot_ms.mean == pytest.approx(plain.serving.tpot_ms.mean, rel=0.02)


def test_nothing_is_offloaded_over_a_link_that_nothing_hides() -> None:
    slow = replace(OFFLOAD, latency_s=0.01)
    workload = load(40)
    assert run(replace(APART, offload=slow), workload).num_offloaded == 0
    forced = summary(replace(APART, offload=replace(slow, only_hidden=False)), workload)
    assert forced.offloaded_share > 0
    assert forced.serving.tpot_ms.mean > 2 * summary(APART, workload).serving.tpot_ms.mean


def test_bounds_follow_from_cards_and_depths() -> None:
    whole = replace(CARD, pool_tokens=None)
    setup = replace(APART, prefill=whole, decode=whole, offload=AttentionOffload(mean_tokens=1000))
    # 56 requests fit; the other kernels carry 142, so 1.5 times more: bandwidth binds.
    assert whole.kv_pool_tokens() // 1000 == 56
    assert most_batch(whole.parts(), 1.5) == 142
    assert setup.bound == pytest.approx(0.6)
    assert replace(setup, num_prefills=2).bound == pytest.approx(1.2)
    two_stages = replace(whole, num_stages=2)
    # Two stages read from one executor.
    assert replace(setup, decode=two_stages).bound <= 0.3
    # Memory holds more short requests than the other kernels carry.
    short = replace(setup, offload=AttentionOffload(mean_tokens=300))
    assert short.bound == 0.0
    assert short.decode_pool_tokens == whole.kv_pool_tokens()


def test_lent_pages_widen_the_decode_pool_and_narrow_the_prefill_pool() -> None:
    setup = replace(APART, offload=replace(OFFLOAD, lent_share=0.5))
    assert setup.prefill_pool_tokens == 4000
    assert setup.decode_pool_tokens == 8000 + 4000
    scarce = replace(APART, offload=replace(OFFLOAD, lent_share=0.25))
    assert scarce.decode_pool_tokens == 8000 + 2000


def test_goodput_is_of_all_devices() -> None:
    target = LatencyTarget(ttft_ms=1e6, tpot_ms=1e6)
    workload = load(20)
    mixed = summarize_fleet(
        simulate_mixed(CARD, 2, ThrottleArgs(policy="throttle"), SchedulingArgs(), workload), target
    )
    assert mixed.num_devices == 2
    assert mixed.goodput_per_device == pytest.approx(mixed.serving.requests_per_s / 2)
    assert mixed.loaded_gb == mixed.offloaded_share == 0


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"num_prefills": 0}, "a server of each"),
        ({"decode": replace(CARD, model="Qwen2.5-14B")}, "one model"),
    ],
)
def test_what_cannot_be_apart_is_refused(change: dict[str, object], reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        replace(APART, **change)  # type: ignore[arg-type]


@pytest.mark.parametrize("offload", [None, OFFLOAD])
def test_a_policy_that_budgets_time_knows_the_steps_of_both_sides(
    offload: AttentionOffload | None,
) -> None:
    setup = replace(APART, offload=offload, prefill_policy=None)
    result = simulate_disaggregated(setup, ThrottleArgs(), SchedulingArgs(), load(40))
    assert len(result.requests) == 40 and not any(one.error for one in result.requests)
    assert (result.num_offloaded > 0) == (offload is not None)
    for pipeline in result.pipelines:
        assert all(step.record.budget_ms is not None for step in pipeline.steps)


def test_a_side_may_budget_time_alone() -> None:
    setup = replace(APART, prefill_policy="throttle-time")
    prefill, decode = run(setup, load(10)).pipelines
    assert all(step.record.budget_ms is not None for step in prefill.steps)
    assert all(step.record.budget_ms is None for step in decode.steps)


@pytest.mark.parametrize("layers", [(40,), (10, 30)])
def test_step_times_are_those_of_the_slowest_stage(layers: tuple[int, ...]) -> None:
    cluster = replace(CARD, num_stages=len(layers), layer_counts=layers)
    costs, shape = cluster.costs(), StepShape(((300, 100),), (500,) * 20, 21)
    times = cluster.step_forecast(costs).slowest(layers)
    assert times is not None
    slowest_ms = 1e3 * max(costs.stage_seconds(shape, 0))
    assert times.step_ms(shape.work) == pytest.approx(slowest_ms, rel=0.1)


def test_step_times_are_learned_where_they_are_not_known() -> None:
    learning = replace(CARD, forecast="online")
    setup = replace(APART, decode=learning, prefill_policy=None)
    result = simulate_disaggregated(setup, ThrottleArgs(), SchedulingArgs(), load(60))
    prefill, decode = (
        [step.record.budget_ms is not None for step in pipeline.steps]
        for pipeline in result.pipelines
    )
    assert all(prefill)
    assert len(decode) > FIRST_FIT_STEPS and not any(decode[:FIRST_FIT_STEPS]) and decode[-1]
