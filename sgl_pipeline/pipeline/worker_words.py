"""Checks that a message is one that its sender may send, for itself and for its stage.

To be called for every message. Contents about steps, moves, transfers and readiness are checked
where they are applied.
"""

from sgl_pipeline.errors import WorkerFault
from sgl_pipeline.pipeline.worker_roster import WorkerRoster
from sgl_pipeline.wire.move_orders import MoveReport
from sgl_pipeline.wire.stage_messages import (
    FromWorker,
    MeasuredCosts,
    ProfileReply,
    StageReport,
    StillLoading,
    WorkerFailed,
    WorkerHello,
    WorkerLeaves,
)
from sgl_pipeline.wire.store_orders import StoreReport


def check_speaker(roster: WorkerRoster, number: int, message: FromWorker) -> None:
    """Raises WorkerFault if worker `number` reports as another worker, or for a stage other than
    its own. Until a worker that has served joins the newest stream, its reports may be about the
    stage that it had before."""
    name = type(message).__name__
    if isinstance(
        message, WorkerHello | MeasuredCosts | StillLoading | WorkerLeaves | WorkerFailed
    ):
        if message.worker != number:
            raise WorkerFault(number, f"it sent a {name} of worker {message.worker}")
        return
    stage = roster.assigned_stage(number)
    if message.stage == stage:
        return
    is_late = roster.has_served(number) and number in roster.late_workers
    if not (is_late and isinstance(message, StageReport | MoveReport | StoreReport | ProfileReply)):
        fills = "no stage" if stage is None else f"stage {stage}"
        raise WorkerFault(number, f"it sent a {name} of stage {message.stage}, it fills {fills}")
