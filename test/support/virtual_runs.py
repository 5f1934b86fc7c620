"""Small pipelines in virtual time, whose steps and moves can be followed by hand."""

from collections.abc import Sequence
from dataclasses import dataclass

from support.pipelines import new_scheduler

from sgl_pipeline.args import MigrationArgs, SchedulingArgs, ThrottleArgs
from sgl_pipeline.migration.predictor import StepPredictor
from sgl_pipeline.migration.step_forecast import StepForecast
from sgl_pipeline.pipeline.migration_control import MigrationControl
from sgl_pipeline.scheduling import StepScheduler
from sgl_pipeline.simulator.forecasts import fitted_costs
from sgl_pipeline.simulator.migration_setup import Migration
from sgl_pipeline.simulator.page_copies import MoveCosts
from sgl_pipeline.simulator.pipeline_costs import PipelineCosts
from sgl_pipeline.simulator.simulation import Simulation
from sgl_pipeline.simulator.stage_clock import Slowdown
from sgl_pipeline.simulator.step_shape import StepShape
from sgl_pipeline.simulator.virtual_pipeline import VirtualPipeline
from sgl_pipeline.simulator.workload import SimulatedRequest, TokenIds
from sgl_pipeline.stage_plan import StagePlan

MANUAL = MigrationArgs(mode="manual", spare_layers=8, timeout_s=1e6)
AUTO = MigrationArgs(mode="auto", spare_layers=8)
Wishes = Sequence[tuple[float, tuple[int, ...]]]


@dataclass(frozen=True)
class TokenSeconds:
    """A layer takes `token` a token, or `step` whatever it carries; the tail takes `tail`."""

    tail: float = 0.0
    step: float = 0.0
    token: float = 1.0

    def layer_s(self, shape: StepShape) -> float:
        return self.step or self.token * shape.num_tokens

    def embedding_s(self, shape: StepShape) -> float:
        return 0.0

    def tail_s(self, shape: StepShape) -> float:
        return self.tail if shape.num_samples else 0.0


def scheduler(num_stages: int, num_state_slots: int = 0) -> StepScheduler:
    return new_scheduler(
        SchedulingArgs(page_size=4, radix_cache=False, num_state_slots=num_state_slots),
        ThrottleArgs(policy="throttle", max_prefill_tokens=64),
        num_pages=1000,
        num_stages=num_stages,
    )


def requests(*lengths: tuple[float, int, int]) -> list[SimulatedRequest]:
    ids = TokenIds()
    return [
        SimulatedRequest(arrival_s=arrival, prompt=(ids.fresh(inputs),), output=ids.fresh(outputs))
        for arrival, inputs, outputs in lengths
    ]


def run_by_hand(
    costs: PipelineCosts,
    workload: Sequence[SimulatedRequest],
    moves: MoveCosts,
    wishes: Wishes,
    slowdowns: Sequence[Slowdown] = (),
    num_state_slots: int = 0,
) -> Simulation:
    control = MigrationControl.of(MANUAL, StagePlan(0, costs.layer_counts))
    steps = scheduler(costs.num_stages, num_state_slots)
    pipeline = VirtualPipeline(steps, costs, None, control, moves, slowdowns, wishes)
    return pipeline.run(workload)


def run_planned(
    costs: PipelineCosts,
    workload: Sequence[SimulatedRequest],
    migration: Migration,
    slowdowns: Sequence[Slowdown] = (),
    *,
    knows_costs: bool = True,
) -> Simulation:
    plan = StagePlan(0, costs.layer_counts)
    fitted = fitted_costs(costs.stage, plan.num_layers, costs.layer_weights)
    forecast = StepForecast(plan, StepPredictor(fitted) if knows_costs else None)
    steps = scheduler(costs.num_stages)
    control = migration.control(plan, forecast, steps)
    return VirtualPipeline(steps, costs, forecast, control, MoveCosts(page_size=4), slowdowns).run(
        workload
    )
