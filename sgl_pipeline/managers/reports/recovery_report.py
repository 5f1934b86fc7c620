"""The lines that the log gets of recoveries."""

import logging
from collections.abc import Sequence

from sgl_pipeline.records.recovery_record import RecoveryRecord

logger = logging.getLogger(__name__)


def log_leaver(stage: int | None, worker: int) -> None:
    """A worker was asked to leave; without a stage it is ended."""
    if stage is not None:
        logger.info(
            "stage %d (worker %d) was asked to leave: it serves on until another worker has its "
            "layers",
            stage,
            worker,
        )


def log_successor(stage: int, worker: int, leaver: int | None) -> None:
    """A worker was found for the stage of a leaver."""
    logger.info(
        "worker %d loads the layers of stage %d, worker %s serves on", worker, stage, leaver
    )


def log_reformed(record: RecoveryRecord, before: int, after: int) -> None:
    """The layers are shared out to more or fewer stages."""
    if after < before:
        logger.warning(
            "no worker is available for stage %s: the layers go to the %d of %d stages that are "
            "left",
            ", ".join(map(str, record.stages)),
            after,
            before,
        )
    else:
        logger.info("a worker has come: the layers go to %d stages, %d had them", after, before)


def log_ended(record: RecoveryRecord, workers: Sequence[int]) -> None:
    """A recovery is over; `workers` are those of the stages that serve now."""
    assert record.ended_s is not None
    if record.is_planned and not record.has_other_stages:
        (left,) = record.lost
        assert left.stage is not None
        logger.info(
            "stage %d: worker %d took over from worker %d with a pause of %.2f s (%d tokens "
            "computed again)",
            left.stage,
            workers[left.stage],
            left.worker,
            record.ended_s - record.began_s,
            record.num_tokens + record.num_replay_tokens,
        )
        return
    seconds = record.ended_s - record.began_s
    if record.has_other_stages:
        logger.info(
            "recovered in %.2f s: %d stages serve, %d did before (%d running requests and %d "
            "tokens are computed again)",
            seconds,
            record.num_stages,
            record.stages_before,
            record.num_requests,
            record.num_tokens,
        )
        return
    # Of a stage that came and was lost again, no worker is left.
    stages = [stage for stage in record.stages if stage < len(workers)]
    if not stages:
        logger.info("recovered in %.2f s: the worker that came is lost again", seconds)
        return
    logger.info(
        "recovered in %.2f s: stage %s runs again (worker %s)",
        seconds,
        ", ".join(map(str, stages)),
        ", ".join(str(workers[stage]) for stage in stages),
    )
