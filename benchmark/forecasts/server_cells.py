"""Cells of `policy_grid.py` that are a server's: the loads of `benchmark.serving.policies`.

Their stages are as fast as those that it measured. Its result has no trace, but sums of
each run: steps, rows and the time of each stage. All policies do the same work in different numbers
of steps, so that a step's fixed cost can be told from that of its rows.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from random import Random
from typing import Any

import numpy as np

from benchmark.forecasts.grid_cells import (
    CPU_HOST,
    CPU_POOL_TOKENS,
    KNOWN_CASES,
    latency_target,
    serve,
)
from benchmark.serving.against_peers import USUAL_LOADS
from benchmark.support.dated_result import read_record
from benchmark.support.loads import Load, MixedLoad
from benchmark.support.paths import RESULTS
from sgl_pipeline.costs.step_costs import LayerCost, RowCost
from sgl_pipeline.migration.least_squares import relative_fit
from sgl_pipeline.migration.predictor import StepPredictor
from sgl_pipeline.migration.step_forecast import StepForecast
from sgl_pipeline.simulator.calibration import FittedCosts, lone_layer
from sgl_pipeline.simulator.pipeline_costs import SimulatedLink
from sgl_pipeline.simulator.simulation import Simulation
from sgl_pipeline.simulator.summary import LatencyTarget
from sgl_pipeline.simulator.workload import SimulatedRequest, poisson_arrivals
from sgl_pipeline.stage_plan import StagePlan
from sgl_pipeline.step_work import StepWork, attended_tokens
from sgl_pipeline.throttle import POLICY_TABLE

MEASURED = RESULTS / "2026-11-27_0913_policies.json"


@dataclass(frozen=True, slots=True)
class ServerCell:
    """A load of the server, by its name in `USUAL_LOADS`; `seed` draws lengths, order, arrivals."""

    load: str
    seed: int = 0

    @property
    def name(self) -> str:
        return f"server, PP 2, {self.load}"

    def workload(self) -> list[SimulatedRequest]:
        load, random = USUAL_LOADS[self.load], Random(self.seed)
        requests = _requests(load, self.seed)
        random.shuffle(requests)
        return poisson_arrivals(requests, load.requests_per_s, random)

    def target(self) -> LatencyTarget:
        """From the times of a request of middle length, alone."""
        requests = sorted(self.workload(), key=lambda one: one.input_tokens)
        return latency_target(self.served("throttle", "exact", [requests[len(requests) // 2]]))

    def served(self, policy: str, case: str, workload: Sequence[SimulatedRequest]) -> Simulation:
        """As `Cell.served`."""
        costs, forecast = measured_costs(), None
        if POLICY_TABLE[policy].budgets_time:
            wrong = KNOWN_CASES[case]
            known = StepPredictor(wrong.biased(costs.known([_middle_work()]).costs))
            forecast = StepForecast(StagePlan(0, costs.layer_counts), known, wrong.learns)
        return serve(policy, costs, forecast, CPU_POOL_TOKENS, workload)


def server_cells() -> Iterator[ServerCell]:
    """One for each load of the server."""
    return map(ServerCell, USUAL_LOADS)


@cache
def measured_costs() -> FittedCosts:
    """The stages of the server that `MEASURED` is of, without noise.

    A stage's time in a run is the sum of its steps', each of which has a fixed cost and one for
    each row and for each attended token.
    """
    runs = read_record(MEASURED)["runs"]
    sums = [(_sums(load, run), run) for load, of_load in runs.items() for run in of_load]
    features = np.array([one for one, _ in sums])
    busy_ms = np.array(
        [
            [1e3 * run["duration_s"] * (1 - idle) for idle in run["cost"]["stage_idle_shares"]]
            for _, run in sums
        ]
    )
    fits = [relative_fit(features, of_stage) for of_stage in busy_ms.T]
    errors = [
        float(np.abs(features @ fit / of_stage - 1.0).mean())
        for fit, of_stage in zip(fits, busy_ms.T, strict=True)
    ]
    return FittedCosts(
        stages=tuple(map(_stage, fits)),
        noise=((1.0,) * len(fits),),
        link=SimulatedLink(),
        host=CPU_HOST,
        errors=tuple(errors),
    )


def _sums(load: str, run: dict[str, Any]) -> tuple[float, ...]:
    """Steps and rows of a run, and the tokens that prompts, and that decodes, attend to."""
    cost = run["cost"]
    requests = _requests(USUAL_LOADS[load], None)
    by_prompts = sum(attended_tokens(0, one.input_tokens) for one in requests)
    by_decodes = sum(
        attended_tokens(one.input_tokens, one.input_tokens + one.output_tokens - 1)
        for one in requests
    )
    rows = cost["num_steps"] * (cost["mean_prefill_tokens"] + cost["mean_decodes"])
    return cost["num_steps"], rows, by_prompts, by_decodes


def _stage(fit: np.ndarray) -> StepPredictor:
    step_ms, row_ms, by_prompts_ms, by_decodes_ms = map(float, fit)
    rows = RowCost((1.0,), (step_ms + row_ms,), row_ms)
    return lone_layer(LayerCost(rows, 0.0, by_decodes_ms, by_prompts_ms), 0.0, 0.0)


def _middle_work() -> StepWork:
    """A step that has some of everything."""
    return StepWork(128, 16, 16 * 256, attended_tokens(0, 112), 17)


def _requests(load: Load | MixedLoad, seed: int | None) -> list[SimulatedRequest]:
    """The requests of a load; those that the server got, with `seed` None."""
    if isinstance(load, MixedLoad) or seed is None:
        return load.requests()
    return replace(load, seed=seed).requests()
