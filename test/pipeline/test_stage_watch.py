"""Silence counts from when a stage has all it needs, and is measured against its own steps."""

import msgspec
import pytest
from support.pipelines import make_request, new_scheduler
from support.step_records import step_record

from sgl_pipeline.pipeline.pipeline_core import PipelineCore
from sgl_pipeline.pipeline.stage_watch import FEWEST_STEPS, FIRST_STEPS_S, PATIENCE, StageWatch
from sgl_pipeline.records.stage_timing import StageTiming
from sgl_pipeline.stage_plan import StagePlan
from sgl_pipeline.wire.stage_messages import StageReport

SILENCE_S = 5.0


def core_with_history(compute_s: float = 0.01, num_steps: int = FEWEST_STEPS) -> PipelineCore:
    """Two stages whose steps of 6 tokens have taken each stage `compute_s`; one request waits."""
    scheduler = new_scheduler(num_pages=64, num_stages=2, context_length=200)
    core = PipelineCore(scheduler, StagePlan(0, (1, 1)))
    timing = StageTiming(0.0, 0.0, 0.0, 0.0, compute_s, compute_s, compute_s)
    for step_id in range(num_steps):
        record = msgspec.structs.replace(step_record(step_id), stages=(timing, timing))
        core.history.add(record)
    scheduler.add(make_request("a", [1] * 3, 3))
    return core


def report(stage: int, step_id: int, sent_s: float) -> StageReport:
    return StageReport(
        stage=stage,
        step_id=step_id,
        epoch=0,
        timing=StageTiming(*[0.0] * 6, sent_s),
        token_ids=(7,) if stage == 1 else None,
    )


def silent(core: PipelineCore, now_s: float) -> list[tuple[int, float]]:
    watch = StageWatch(core, SILENCE_S)
    return [(one.stage, one.since_s) for one in watch.silent_stages(now_s)]


def test_only_the_stage_whose_turn_it_is_can_be_silent() -> None:
    core = core_with_history()
    assert silent(core, 1000.0) == []
    core.next_step(10.0)
    assert silent(core, 10.0 + SILENCE_S) == []
    assert silent(core, 10.1 + SILENCE_S) == [(0, 10.0)]
    # The second stage has its rows since the first one's report was sent.
    core.take_report(report(0, 0, sent_s=20.0), 20.5)
    assert silent(core, 20.0 + SILENCE_S) == []
    assert silent(core, 20.1 + SILENCE_S) == [(1, 20.0)]
    core.take_report(report(1, 0, sent_s=30.0), 30.5)
    assert silent(core, 1000.0) == []


def test_a_stage_that_was_busy_with_the_step_before_is_not_silent() -> None:
    core = core_with_history()
    core.scheduler.add(make_request("b", [2] * 3, 3))
    core.next_step(10.0)
    core.scheduler.add(make_request("c", [3] * 3, 3))
    assert core.next_step(10.0) is not None
    core.take_report(report(0, 0, sent_s=14.0), 14.0)
    assert silent(core, 14.0 + SILENCE_S) == []
    assert silent(core, 14.1 + SILENCE_S) == [(0, 14.0), (1, 14.0)]


def test_slow_steps_and_large_ones_get_more_time() -> None:
    slow = StageWatch(core_with_history(compute_s=1.0), SILENCE_S)
    assert slow.bound_s(0) == PATIENCE
    core = core_with_history(compute_s=1.0)
    core.scheduler.add(make_request("large", [5] * 60, 3))
    step = core.next_step(0.0)
    assert step is not None
    tokens, before = step.microbatch.num_tokens, 6
    attended = step_record(0).attended_tokens
    scale = max(tokens / before, step.microbatch.attended_tokens / attended)
    assert scale > 1.0
    bound_s = StageWatch(core, SILENCE_S).bound_s(0, step.microbatch)
    assert bound_s == pytest.approx(PATIENCE * scale)


def test_the_first_steps_may_take_long() -> None:
    watch = StageWatch(core_with_history(num_steps=FEWEST_STEPS - 1), SILENCE_S)
    assert watch.bound_s(0) == FIRST_STEPS_S
    assert StageWatch(core_with_history(), SILENCE_S).bound_s(0) == SILENCE_S


def test_nobody_is_silent_while_a_stage_is_replaced() -> None:
    core = core_with_history()
    core.next_step(10.0)
    core.halt([0], "killed", 11.0)
    assert silent(core, 1000.0) == []


def test_who_had_no_core_was_not_silent_meanwhile() -> None:
    core, waits_s = core_with_history(), {7: 1.0, 8: 50.0}
    watch = StageWatch(core, SILENCE_S, waits_s=lambda stage: dict(waits_s))
    core.next_step(10.0)
    assert watch.silent_stages(11.0) == []  # from here on its waits count
    waits_s |= {7: 4.0, 8: 51.0, 9: 0.5}
    assert watch.silent_stages(10.0 + SILENCE_S + 2.9) == []
    (silence,) = watch.silent_stages(10.0 + SILENCE_S + 3.1)
    assert (silence.stage, silence.waited_s) == (0, 3.0)


def test_a_first_step_may_take_what_its_rehearsal_took() -> None:
    core = core_with_history(compute_s=0.01)
    watch = StageWatch(core, SILENCE_S, rehearsal_s=lambda stage: 2.0)
    step = core.next_step(0.0)
    assert step is not None
    assert watch.bound_s(0, step.microbatch) == pytest.approx(PATIENCE * 2.01)
    core.has_run = True
    assert watch.bound_s(0, step.microbatch) == SILENCE_S
    core.history.add(msgspec.structs.replace(step_record(99), epoch=4))
    assert watch.bound_s(0, step.microbatch) == pytest.approx(PATIENCE * 2.01)
