"""Where a stage's time went: by hand, and against a count of instants."""

from dataclasses import asdict, dataclass

import pytest
from support.pipelines import new_scheduler

from sgl_pipeline.args import ThrottleArgs
from sgl_pipeline.records.stage_timing import StageTiming, bubble_shares
from sgl_pipeline.simulator.pipeline_costs import HostCosts, PipelineCosts, SimulatedLink
from sgl_pipeline.simulator.simulation import SimulatedStep
from sgl_pipeline.simulator.step_shape import StepShape
from sgl_pipeline.simulator.virtual_pipeline import VirtualPipeline
from sgl_pipeline.simulator.workload import SimulatedRequest, TokenIds


@dataclass
class Step:
    scheduled_s: float
    finished_s: float
    stages: tuple[StageTiming, ...]
    result_ms: float = 500.0


def test_each_wait_has_its_cause() -> None:
    first = Step(1, 9, (StageTiming(0, 1, 1, 1, 3, 3, 3), StageTiming(0, 1, 2, 4, 8, 9, 9)))
    # Decided when the first was booked, at 9.5, and half a second later; before that, idle.
    second = Step(
        10, 20, (StageTiming(3, 11, 12, 12, 14, 14, 15), StageTiming(9, 11, 12, 16, 18, 19, 19))
    )
    upstream, downstream = bubble_shares([first, second])
    # Stage 0: busy 2 + 2; slot from 3 to 9.5 and 1 for the send; metadata from 10 to 12.
    assert asdict(upstream) == pytest.approx(
        {"busy": 4 / 13.5, "activations": 0, "metadata": 2 / 13.5, "slot": 7.5 / 13.5}
    )
    # Stage 1: busy 5 + 3; activations 2 + 4; metadata 1 + 2; slot from 9 to 9.5.
    assert asdict(downstream) == pytest.approx(
        {"busy": 8 / 17.5, "activations": 6 / 17.5, "metadata": 3 / 17.5, "slot": 0.5 / 17.5}
    )


def test_nothing_to_do_is_no_bubble() -> None:
    first = Step(1, 2, (StageTiming(0, 1, 1, 1, 2, 2, 2),), result_ms=0)
    late = Step(900, 901, (StageTiming(2, 900, 900, 900, 901, 901, 901),), result_ms=0)
    (shares,) = bubble_shares([first, late])
    assert shares.busy == 1.0
    assert bubble_shares([]) == ()


@dataclass(frozen=True)
class TokenSeconds:
    def layer_s(self, shape: StepShape) -> float:
        return shape.num_tokens / 4

    def embedding_s(self, shape: StepShape) -> float:
        return 0.0

    def tail_s(self, shape: StepShape) -> float:
        return shape.num_samples / 2


HOST = HostCosts(schedule_step_s=0.25, prepare_step_s=0.5, result_step_s=0.25, transit_s=0.25)
GRID_S = 1 / 16


def cause_at(now_s: float, stage: int, steps: tuple[SimulatedStep, ...]) -> str | None:
    """What `stage` does at one instant, from when things happened to all steps."""
    number = next(n for n, step in enumerate(steps) if step.ends_s[stage] > now_s)
    step = steps[number]
    sent_s = step.record.scheduled_s + HOST.schedule_step_s
    if step.starts_s[stage] <= now_s:
        return "busy"
    if now_s >= sent_s + HOST.prepare_step_s:
        return "activations"
    if now_s >= step.record.scheduled_s:
        return "metadata"
    booked = [earlier.record.finished_s + HOST.result_step_s for earlier in steps[:number]]
    return "slot" if any(now_s < booked_s for booked_s in booked) else None


def test_shares_equal_a_count_of_instants_in_a_simulated_run() -> None:
    costs = PipelineCosts(
        TokenSeconds(),
        (2, 1, 1),
        SimulatedLink(latency_s=0.25, bytes_per_s=16, bytes_per_token=1),
        HOST,
    )
    scheduler = new_scheduler(
        throttle=ThrottleArgs(policy="sarathi", max_prefill_tokens=16, min_prefill_tokens=1),
        num_pages=1000,
        num_stages=3,
    )
    ids = TokenIds()
    workload = [
        SimulatedRequest(arrival_s=arrival, prompt=(ids.fresh(inputs),), output=ids.fresh(outputs))
        for arrival, inputs, outputs in ((0, 30, 6), (1, 9, 9), (2, 5, 3), (400, 20, 5))
    ]
    steps = VirtualPipeline(scheduler, costs).run(workload).steps
    shares = bubble_shares([step.record for step in steps])
    for stage in range(3):
        start, end = steps[0].record.scheduled_s, steps[-1].ends_s[stage]
        instants = range(int((end - start) / GRID_S))
        causes = [cause_at(start + (n + 0.5) * GRID_S, stage, steps) for n in instants]
        counted = {cause: causes.count(cause) for cause in asdict(shares[stage])}
        whole = sum(counted.values())
        assert all(counted[cause] for cause in ("busy", "metadata", "slot"))
        assert asdict(shares[stage]) == pytest.approx({c: n / whole for c, n in counted.items()})
