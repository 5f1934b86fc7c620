"""Drafts in virtual time are right as often as they are said to be, and the scheduler's own rules
give them their rows."""

from dataclasses import dataclass

import pytest
from support.pipelines import make_request, new_scheduler

from sgl_pipeline.args import SchedulingArgs
from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.migration.predictor import StepPredictor
from sgl_pipeline.migration.step_forecast import StepForecast
from sgl_pipeline.simulator.forecasts import fitted_costs
from sgl_pipeline.simulator.pipeline_costs import PipelineCosts
from sgl_pipeline.simulator.simulation import Simulation
from sgl_pipeline.simulator.step_shape import StepShape
from sgl_pipeline.simulator.virtual_drafts import NEVER_RIGHT, DraftAcceptance, VirtualDrafts
from sgl_pipeline.simulator.virtual_pipeline import VirtualPipeline
from sgl_pipeline.simulator.workload import SimulatedRequest, TokenIds
from sgl_pipeline.stage_plan import StagePlan

ALWAYS = DraftAcceptance((1.0,))
OUTPUT_TOKENS = 400


@dataclass(frozen=True)
class RowSeconds:
    """A layer takes 10 ms, and `row_s` a row."""

    row_s: float

    def layer_s(self, shape: StepShape) -> float:
        return 0.01 + self.row_s * shape.num_tokens

    def embedding_s(self, shape: StepShape) -> float:
        return 0.0

    def tail_s(self, shape: StepShape) -> float:
        return 0.0


def served(acceptance: DraftAcceptance, draft_tokens: int = 7, row_s: float = 1e-5) -> Simulation:
    """One request, whose prompt draws a token and whose decodes draw the others."""
    scheduler = new_scheduler(
        SchedulingArgs(page_size=4, draft_tokens=draft_tokens), num_pages=1000, num_stages=1
    )
    costs = PipelineCosts(RowSeconds(row_s), layer_counts=(1,))
    plan = StagePlan(0, (1,))
    forecast = StepForecast(plan, StepPredictor(fitted_costs(costs.stage, 1)), learns=False)
    ids = TokenIds()
    prompt, output = ids.fresh(8), ids.fresh(1 + OUTPUT_TOKENS)
    request = SimulatedRequest(
        arrival_s=0.0, prompt=(prompt,), output=output, acceptance=acceptance
    )
    return VirtualPipeline(scheduler, costs, forecast).run([request])


def decodes(simulation: Simulation) -> list[tuple[int, int]]:
    """The draft tokens of each decode, and the right ones of them."""
    records = [step.record for step in simulation.steps if step.record.decodes]
    return [(record.draft_tokens, record.accepted_draft_tokens) for record in records]


def test_drafts_that_are_always_right_shorten_the_answer() -> None:
    simulation = served(ALWAYS)
    assert len(decodes(simulation)) == OUTPUT_TOKENS // 8
    assert set(decodes(simulation)[:-1]) == {(7, 7)}
    (request,) = simulation.requests
    assert len(request.token_times_s) == 1 + OUTPUT_TOKENS
    (shape,) = {step.shape for step in simulation.steps[1:2]}
    assert shape.num_tokens == shape.num_samples == 8 and shape.num_decodes == 1
    assert shape.work.decode_attended_tokens == 9
    assert shape.work.prefill_attended_tokens == sum(range(10, 17))


def test_drafts_that_are_never_right_change_no_token() -> None:
    rare = decodes(served(DraftAcceptance((0.0,))))
    assert len(rare) == OUTPUT_TOKENS and sum(right for _, right in rare) == 0
    assert sum(drafted for drafted, _ in rare) > 0
    assert {drafted for drafted, _ in decodes(served(NEVER_RIGHT))} == {0}


def test_dear_rows_have_no_drafts() -> None:
    assert {drafted for drafted, _ in decodes(served(ALWAYS, row_s=1.0))} == {0}


def test_chances_hold_by_the_run_behind_a_token() -> None:
    acceptance = DraftAcceptance((0.3, 0.9), found=0.5)
    request = make_request("r", [0], 9)
    draws = VirtualDrafts(request, 1, acceptance)
    request.output_ids = [1]
    draws.draft(20_000)
    run, seen = 0, {0: [0, 0, 0], 1: [0, 0, 0]}
    for is_right in draws._is_right:
        counts = seen[min(run, 1)]
        counts[0] += 1
        counts[1] += is_right is not None
        counts[2] += is_right is True
        run = run + 1 if is_right else 0
    lookups, found, right = seen[0]
    assert found / lookups == pytest.approx(0.5, abs=0.02)
    assert right / found == pytest.approx(0.3, abs=0.02)
    assert seen[1][2] / seen[1][0] == pytest.approx(0.9, abs=0.02)
    assert seen[1][0] == seen[1][1]


def test_equal_runs_have_equal_drafts() -> None:
    acceptance = DraftAcceptance((0.4, 0.8), found=0.9)
    assert decodes(served(acceptance)) == decodes(served(acceptance))


@pytest.mark.parametrize(("chances", "found"), [((0.5, 1.5), 1.0), ((-0.1,), 1.0), ((0.5,), 2.0)])
def test_what_is_no_chance_is_refused(chances: tuple[float, ...], found: float) -> None:
    with pytest.raises(ConfigurationError, match="between 0 and 1"):
        DraftAcceptance(chances, found)
