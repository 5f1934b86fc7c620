"""Virtual time against hand-made schedules, and against a pipeline written as an event calendar."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

import pytest
from support.pipelines import new_scheduler

from sgl_pipeline.args import SchedulingArgs, ThrottleArgs
from sgl_pipeline.scheduling import StepScheduler
from sgl_pipeline.simulator.pipeline_costs import HostCosts, PipelineCosts, SimulatedLink
from sgl_pipeline.simulator.simulation import Simulation
from sgl_pipeline.simulator.step_shape import StepShape
from sgl_pipeline.simulator.summary import bubble_share, summarize
from sgl_pipeline.simulator.virtual_pipeline import VirtualPipeline
from sgl_pipeline.simulator.workload import Segment, SimulatedRequest, TokenIds


@dataclass(frozen=True)
class TokenSeconds:
    """A layer takes a second a token; the ends take what they are told."""

    embedding: float = 0.0
    tail: float = 0.0

    def layer_s(self, shape: StepShape) -> float:
        return float(shape.num_tokens)

    def embedding_s(self, shape: StepShape) -> float:
        return self.embedding

    def tail_s(self, shape: StepShape) -> float:
        return self.tail * shape.num_samples


def scheduler(num_stages: int, **scheduling: int) -> StepScheduler:
    return new_scheduler(
        SchedulingArgs(page_size=4, **scheduling),
        ThrottleArgs(policy="sarathi", max_prefill_tokens=64),
        num_pages=1000,
        num_stages=num_stages,
    )


def run(costs: PipelineCosts, workload: Sequence[SimulatedRequest]) -> Simulation:
    return VirtualPipeline(scheduler(costs.num_stages), costs).run(workload)


def requests(*lengths: tuple[float, int, int]) -> list[SimulatedRequest]:
    ids = TokenIds()
    return [
        SimulatedRequest(arrival_s=arrival, prompt=(ids.fresh(inputs),), output=ids.fresh(outputs))
        for arrival, inputs, outputs in lengths
    ]


def test_one_request_alone_takes_the_sum_of_its_steps() -> None:
    costs = PipelineCosts(TokenSeconds(tail=0.5), layer_counts=(2, 1))
    simulation = run(costs, requests((10.0, 8, 3)))
    # Prefill: 8 tokens over 3 layers and a sample; then two decodes of one token.
    assert simulation.requests[0].token_times_s == [10 + 24.5, 10 + 24.5 + 3.5, 10 + 24.5 + 7.0]
    assert simulation.requests[0].finished_s == 41.5


def test_links_overheads_and_slow_stages_add_up() -> None:
    costs = PipelineCosts(
        TokenSeconds(embedding=1.0),
        layer_counts=(1, 1),
        link=SimulatedLink(latency_s=0.25, bytes_per_s=2.0, bytes_per_token=1),
        host=HostCosts(schedule_step_s=0.125, prepare_step_s=0.5, result_token_s=0.0625),
        stage_slowness=(1.0, 2.0),
    )
    (served,) = run(costs, requests((0.0, 4, 1))).requests
    sent = 0.125
    first = sent + 0.5 + 4 + 1
    second = first + 4 / 2 + 0.25 + 2 * 4
    assert served.finished_s == second + 0.0625


@pytest.mark.parametrize(("kind", "start"), [("hidden", 7.0), ("early", 7.0), ("coupled", 9.0)])
def test_preparation_is_on_the_path_only_where_it_is_coupled(kind: str, start: float) -> None:
    host = HostCosts(preparation=kind)  # type: ignore[arg-type]
    assert host.start_s(free_s=5.0, plan_s=1.0, input_s=7.0, prepare_s=2.0) == start
    # Where the stage itself is late, an early preparation is late as well.
    late = host.start_s(free_s=7.0, plan_s=1.0, input_s=5.0, prepare_s=2.0)
    assert late == (7.0 if kind == "hidden" else 9.0)


def test_equal_steps_leave_no_bubble_but_filling_and_draining() -> None:
    costs = PipelineCosts(TokenSeconds(), layer_counts=(1, 1))
    # Two requests of one token a step, in different steps because they arrive apart, keep two
    # stages busy for all but the first and last second.
    simulation = run(costs, requests((0.0, 1, 40), (0.5, 1, 40)))
    assert bubble_share(simulation) == pytest.approx(1 / 81)


def test_decodes_that_joined_one_step_leave_half_of_two_stages_idle() -> None:
    costs = PipelineCosts(TokenSeconds(), layer_counts=(1, 1))
    assert bubble_share(run(costs, requests(*[(0.0, 1, 40)] * 2))) == pytest.approx(0.5)


def test_a_follow_up_arrives_after_the_answer_and_a_pause_and_hits_the_cache() -> None:
    (first,) = requests((0.0, 8, 4))
    second = SimulatedRequest(
        arrival_s=0.0, prompt=(*first.prompt, first.output, Segment(900, 4)), output=Segment(950, 1)
    )
    costs = PipelineCosts(TokenSeconds(), layer_counts=(1,))
    chained = replace(first, follow_up=second, think_s=3.0)
    before, after = run(costs, [chained]).requests
    assert before.finished_s is not None
    assert after.arrival_s == before.finished_s + 3.0
    # All whole pages but of the last output token, which was never computed.
    assert after.cached_tokens == 8


def test_a_request_that_can_never_be_served_fails_alone() -> None:
    costs = PipelineCosts(TokenSeconds(), layer_counts=(1,))
    simulation = run(costs, requests((0.0, 2000, 1), (0.0, 4, 1)))
    assert "context" in simulation.requests[0].error
    summary = summarize(simulation)
    assert (summary.num_requests, summary.num_failed) == (1, 1)


def calendar_times(
    shapes: Sequence[StepShape], sent_s: Sequence[float], costs: PipelineCosts
) -> list[float]:
    """When each step leaves the last stage, by moving one step at a time, whichever can start
    first: the slow and obvious way."""
    num_stages = costs.num_stages
    place = [0] * len(shapes)
    ready = list(sent_s)
    free = [0.0] * num_stages
    left = [0.0] * len(shapes)
    for _ in range(len(shapes) * num_stages):
        candidates = []
        for number, stage in enumerate(place):
            passed = [place[other] > stage for other in range(number)]
            if stage < num_stages and all(passed):
                candidates.append((max(ready[number], free[stage]), number))
        start, number = min(candidates)
        stage = place[number]
        free[stage] = left[number] = start + costs.stage_seconds(shapes[number], number)[stage]
        ready[number] = free[stage] + costs.link.transfer_s(shapes[number].num_tokens)
        place[number] += 1
    return left


def test_times_equal_those_of_an_event_calendar() -> None:
    random = Random(3)
    costs = PipelineCosts(
        TokenSeconds(embedding=0.3, tail=0.2),
        layer_counts=(1, 3, 2),
        link=SimulatedLink(bytes_per_s=10.0, bytes_per_token=1),
    )
    load = requests(
        *[(random.uniform(0, 300), random.randint(1, 40), random.randint(1, 9)) for _ in range(12)]
    )
    steps = run(costs, load).steps
    sent = [step.record.scheduled_s for step in steps]
    expected = calendar_times([step.shape for step in steps], sent, costs)
    assert [step.ends_s[-1] for step in steps] == pytest.approx(expected)


def test_equal_runs_are_equal() -> None:
    costs = PipelineCosts(TokenSeconds(tail=0.1), layer_counts=(2, 2))
    load = requests(*[(float(i % 5), 5 + i, 3) for i in range(20)])
    assert run(costs, load).steps == run(costs, load).steps
