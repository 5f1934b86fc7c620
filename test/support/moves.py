"""Layer moves as drivers and reports see them."""

from support.pipelines import new_scheduler

from sgl_pipeline.args import MigrationArgs
from sgl_pipeline.migration.planner import LayerPlanner
from sgl_pipeline.pipeline.migration_control import MigrationControl
from sgl_pipeline.pipeline.pipeline_core import PipelineCore
from sgl_pipeline.records.move_record import MoveOutcome, MoveRecord
from sgl_pipeline.records.trace import StepRecord
from sgl_pipeline.scheduling import RecoveryLog
from sgl_pipeline.stage_plan import StagePlan
from sgl_pipeline.wire.move_orders import MoveDone, MoveFailed, MoveReady


def movable_core(
    *layer_counts: int,
    mode: str = "manual",
    planner: LayerPlanner | None = None,
    log: RecoveryLog | None = None,
) -> PipelineCore:
    """A core of that split whose layers may move, two more to each stage."""
    plan = StagePlan(0, layer_counts)
    steps = new_scheduler(num_pages=64, num_stages=plan.num_stages, context_length=128, log=log)
    args = MigrationArgs(mode=mode, timeout_s=5.0)
    forecast = planner.forecast if planner else None
    return PipelineCore(steps, plan, MigrationControl.of(args, plan, planner), forecast)


def note_step(core: PipelineCore, record: StepRecord) -> None:
    """As the core does with a step that has ended."""
    parts = core.step_forecast.note(record)
    if parts is not None:
        core.migration.note(parts, record.finished_s)


def stages_get_ready(core: PipelineCore, now_s: float) -> None:
    """All stages say that they are ready for the move under way."""
    record = core.migration.coordinator.current
    assert record is not None
    core.orders_before_step(now_s)
    for stage in range(core.plan.num_stages):
        core.migration.take(MoveReady(stage=stage, move=record.move, load_ms=2.0), now_s)


def stages_switch(core: PipelineCore, now_s: float) -> None:
    """The switch is sealed, and all stages say that they are done."""
    record = core.migration.coordinator.current
    assert record is not None
    core.orders_before_step(now_s)
    for stage in range(core.plan.num_stages):
        done = MoveDone(
            stage=stage,
            move=record.move,
            copied_bytes=1000,
            patched_bytes=10,
            patch_ms=1.5,
            wait_ms=0.5,
        )
        core.migration.take(done, now_s)


def stage_fails(core: PipelineCore, now_s: float) -> None:
    """The last stage cannot get ready, and the move is abandoned."""
    record = core.migration.coordinator.current
    assert record is not None
    core.orders_before_step(now_s)
    last = core.plan.num_stages - 1
    core.migration.take(MoveFailed(stage=last, move=record.move, message="no memory"), now_s)
    core.orders_before_step(now_s)


def begun_move() -> MoveRecord:
    """`done_move` as it began."""
    return MoveRecord(
        move=3, epoch=2, wanted_by="operator", before=(2, 2), after=(1, 3), began_s=10.0
    )


def done_move() -> MoveRecord:
    """A move that took half a second, half of that to get ready."""
    return MoveRecord(
        move=3,
        epoch=2,
        wanted_by="operator",
        before=(2, 2),
        after=(1, 3),
        outcome=MoveOutcome.DONE,
        began_s=10.0,
        switched_s=10.25,
        ended_s=10.5,
        copied_bytes=2**20,
        patched_bytes=2**18,
        patch_ms=1.5,
        wait_ms=0.5,
    )


def abandoned_move() -> MoveRecord:
    """A move that stage 1 was not ready for."""
    return MoveRecord(
        move=4,
        epoch=3,
        wanted_by="auto",
        before=(1, 3),
        after=(2, 2),
        outcome=MoveOutcome.ABANDONED,
        reason="stage 1: no memory",
        began_s=20.0,
        ended_s=20.5,
    )
