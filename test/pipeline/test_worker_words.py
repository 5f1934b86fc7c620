"""A worker speaks for itself and for its stage."""

from typing import Any

import pytest
from support.worker_messages import hello, loaded, ready

from sgl_pipeline.args import PipelineArgs, StageArgs
from sgl_pipeline.errors import ProtocolError, WorkerFault
from sgl_pipeline.pipeline.worker_roster import WorkerRoster
from sgl_pipeline.pipeline.worker_words import check_speaker
from sgl_pipeline.records.stage_timing import StageTiming
from sgl_pipeline.stage_plan import StagePlan
from sgl_pipeline.wire.move_orders import MoveReady
from sgl_pipeline.wire.stage_messages import (
    FromWorker,
    ProfileReply,
    Regrouped,
    StageReport,
    StillLoading,
    WorkerFailed,
)
from sgl_pipeline.wire.store_orders import PagesLoaded


@pytest.fixture
def roster() -> WorkerRoster:
    """Workers 4 and 5 fill stages 0 and 1; 6 is a spare."""
    stages = StageArgs(num_stages=2, model_path="", dtype="float32", layer_partition="even")
    roster = WorkerRoster(PipelineArgs(stages=stages, run_directory="run"), 4)
    for worker in (4, 5, 6):
        roster.take(hello(worker))
    for message in (loaded(0), loaded(1), ready(0), ready(1)):
        roster.take(message)
    assert roster.workers_of_stages == [4, 5]
    return roster


def of_stage(stage: int) -> list[FromWorker]:
    return [
        StageReport(stage=stage, step_id=0, epoch=0, timing=StageTiming(*[0.0] * 7)),
        MoveReady(stage=stage, move=0, load_ms=1.0),
        PagesLoaded(stage=stage, transfer=0, num_pages=0, num_bytes=0, busy_s=0.0),
        ProfileReply(stage=stage, is_recording=True),
        loaded(stage),
        ready(stage),
        Regrouped(stage, 1),
    ]


def of_worker(worker: int) -> list[FromWorker]:
    return [hello(worker), StillLoading(worker), WorkerFailed(worker, "why", False)]


def fails(roster: WorkerRoster, number: int, message: Any) -> bool:
    try:
        check_speaker(roster, number, message)
    except WorkerFault as fault:
        assert fault.worker == number
        return True
    return False


def test_nobody_speaks_for_another(roster: WorkerRoster) -> None:
    for message in (*of_stage(1), *of_worker(5)):
        assert [fails(roster, number, message) for number in (4, 5, 6, 9)] == [
            True,
            False,
            True,
            True,
        ]


def test_what_was_said_before_a_stage_has_regrouped_is_only_late(roster: WorkerRoster) -> None:
    roster.regroup(roster.plan, 1)  # type: ignore[arg-type]
    roster.fill()
    late = [fails(roster, 4, message) for message in of_stage(1)]
    assert late == [False] * 4 + [True] * 3
    roster.take(Regrouped(0, 1))
    assert all(fails(roster, 4, message) for message in of_stage(1))


def test_what_was_said_under_an_old_number_is_only_late(roster: WorkerRoster) -> None:
    """A recording is ended while workers get other stages: the answer crosses the assignment."""
    roster.lose(4)
    roster.reassign(StagePlan(1, (4,)), 1)
    assert roster.workers_of_stages == [5]
    late = [fails(roster, 5, message) for message in of_stage(1)]
    assert late == [False] * 4 + [True] * 3
    assert not any(fails(roster, 5, message) for message in of_stage(0))
    for message in (loaded(0), ready(0)):
        roster.take(message)
    assert all(fails(roster, 5, message) for message in of_stage(1))


@pytest.mark.parametrize("incarnation", [-1, 0, 2, 10**9])
def test_a_stage_joins_the_stream_that_it_was_asked_for(
    roster: WorkerRoster, incarnation: int
) -> None:
    roster.regroup(roster.plan, 1)  # type: ignore[arg-type]
    roster.fill()
    with pytest.raises(ProtocolError, match="asked for 1"):
        roster.take(Regrouped(0, incarnation))
    assert roster.late_workers == [4, 5]
