"""The planner fed with steps of `served_steps.py`."""

import random
from collections.abc import Callable, Iterable

from support.served_steps import ServedSteps, mixed_step

from sgl_pipeline.costs.step_costs import StepCosts
from sgl_pipeline.migration.planner import LayerPlanner
from sgl_pipeline.migration.planner_args import MoveProposal, PlannerArgs
from sgl_pipeline.migration.step_forecast import StepForecast
from sgl_pipeline.records.trace import StepRecord
from sgl_pipeline.stage_plan import StagePlan
from sgl_pipeline.step_work import StepWork

EAGER = PlannerArgs(min_gain_share=0.0, layer_price_s=0.0)


def planner_of(
    served: ServedSteps,
    args: PlannerArgs = EAGER,
    max_layers: tuple[int, ...] | None = None,
    learns: bool = True,
    knows_costs: bool = True,
) -> LayerPlanner:
    forecast = StepForecast(served.plan, served.truth if knows_costs else None, learns)
    return LayerPlanner(args, served.plan, forecast, max_layers)


def note(planner: LayerPlanner, record: StepRecord) -> None:
    """As `PipelineCore` does with a step that has ended."""
    parts = planner.forecast.note(record)
    if parts is not None:
        planner.note(parts)


def proposals(
    planner: LayerPlanner, served: ServedSteps, works: Iterable[StepWork]
) -> list[tuple[int, MoveProposal]]:
    """What is proposed after which step, were no proposal followed."""
    found = []
    for number, work in enumerate(works, 1):
        note(planner, served.run(work))
        proposal = planner.proposal(served.plan.layer_counts)
        if proposal is not None:
            found.append((number, proposal))
    return found


def first_split(
    costs: StepCosts, layer_counts: tuple[int, ...], work: StepWork, args: PlannerArgs = EAGER
) -> tuple[int, ...]:
    """The split that steps of that work lead to from `layer_counts`, which stays if none does."""
    served = ServedSteps(costs, StagePlan(0, layer_counts))
    found = proposals(planner_of(served, args), served, [work] * 60)
    return found[0][1].layer_counts if found else layer_counts


def random_works(seed: int, count: int) -> list[StepWork]:
    rng = random.Random(seed)
    return [mixed_step(rng.randint(20, 60), rng.choice([0, 0, 64, 256])) for _ in range(count)]


def noise_of(seed: int, share: float) -> Callable[[], float]:
    rng = random.Random(seed)
    return lambda: 1.0 + share * rng.uniform(-1.0, 1.0)
