"""A run read back from its trace, against the simulation that wrote it."""

from random import Random

import pytest

from benchmark.support.recorded_run import recorded_requests, run_figures
from sgl_pipeline.args import SchedulingArgs, ThrottleArgs
from sgl_pipeline.simulator.experiment import Cluster, simulate
from sgl_pipeline.simulator.simulation import Simulation
from sgl_pipeline.simulator.summary import summarize
from sgl_pipeline.simulator.traces import load_trace
from sgl_pipeline.simulator.workload import SimulatedRequest, poisson_arrivals


def run(workload: list[SimulatedRequest]) -> Simulation:
    cluster = Cluster(model="Qwen2.5-14B", device="a100-40g-pcie")
    return simulate(
        cluster, ThrottleArgs(policy="throttle"), SchedulingArgs(radix_cache=False), workload
    )


@pytest.fixture(scope="module")
def workload() -> list[SimulatedRequest]:
    return poisson_arrivals(load_trace("sharegpt", 60), 8.0, Random(0))


def test_a_trace_gives_back_arrivals_and_lengths(workload: list[SimulatedRequest]) -> None:
    found = recorded_requests([step.record for step in run(workload).steps])
    for one, asked in zip(found, workload, strict=True):
        assert one.arrival_s == pytest.approx(asked.arrival_s, abs=1e-6)
        assert (one.input_tokens, one.output_tokens) == (asked.input_tokens, asked.output_tokens)


def test_the_figures_of_a_trace_are_those_of_its_simulation(
    workload: list[SimulatedRequest],
) -> None:
    simulation = run(workload)
    figures, summary = (
        run_figures([step.record for step in simulation.steps]),
        summarize(simulation),
    )
    # A trace knows when a result came, not when the scheduler had booked it: some 0.1 ms.
    assert figures.total_tokens_per_s == pytest.approx(summary.total_tokens_per_s, rel=1e-3)
    assert figures.mean_ttft_ms == pytest.approx(summary.ttft_ms.mean, abs=1.0)
    assert figures.mean_tpot_ms == pytest.approx(summary.tpot_ms.mean, rel=0.01)


def test_idle_shares_are_of_the_whole_run(workload: list[SimulatedRequest]) -> None:
    simulation = run(workload)
    figures = run_figures([step.record for step in simulation.steps])
    end_s = max(one.finished_s or 0.0 for one in simulation.requests)
    for stage, idle_share in enumerate(figures.idle_shares):
        busy_s = sum(step.ends_s[stage] - step.starts_s[stage] for step in simulation.steps)
        assert idle_share == pytest.approx(1.0 - busy_s / end_s, rel=1e-3)
