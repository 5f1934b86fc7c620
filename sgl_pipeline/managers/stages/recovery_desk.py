"""The scheduler's hands in a recovery: who is asked for workers, who is given up, what is logged.

Called by `pipeline_scheduler.py` in each turn of its loop. What follows from a loss is decided by
`pipeline/recovery.py`; this file carries it between that and the `StageLauncher`.
"""

import logging
from collections.abc import Callable

from sgl_pipeline.managers.stages.stage_launcher import StageLauncher
from sgl_pipeline.messages import FromWorker
from sgl_pipeline.pipeline.recovery import StageRecovery
from sgl_pipeline.pipeline.worker_roster import Addressed
from sgl_pipeline.recovery_record import RecoveryRecord

logger = logging.getLogger(__name__)


class RecoveryDesk:
    """Stages of one server that are replaced when they are lost.

    Args:
        on_lost: called with a stage that was lost, for who waits for its word.
    """

    def __init__(
        self,
        recovery: StageRecovery,
        launcher: StageLauncher,
        on_lost: Callable[[int], None] = lambda stage: None,
    ) -> None:
        self._recovery = recovery
        self._launcher = launcher
        self.on_lost = on_lost
        self._ended: list[RecoveryRecord] = []

    @property
    def current(self) -> RecoveryRecord | None:
        """The recovery under way."""
        return self._recovery.current

    @property
    def records(self) -> tuple[RecoveryRecord, ...]:
        """The newest recoveries, oldest first, the one under way among them."""
        current = self._recovery.current
        return (*self._recovery.history, *([] if current is None else [current]))

    def take(self, message: FromWorker, now_s: float) -> None:
        """Books what a worker says that is not about a step, and sends what follows from it."""
        self._send(self._recovery.take(message, now_s))

    def check(self, now_s: float) -> None:
        """Looks for workers that have ended or take too long; to be called now and then, and when
        `StageLauncher.ends_descriptor` can be read.

        Raises StageFailure where a stage cannot be replaced, and ConfigurationError as
        `StageLauncher.take_lost`.
        """
        for worker, reason in self._launcher.take_lost():
            self._lose(worker, reason, now_s)
        for worker, reason in [*self._recovery.late_workers(now_s)]:
            self.give_up(worker, reason, now_s)

    def give_up(self, worker: int, reason: str, now_s: float) -> None:
        """Replaces a worker that may still run. Raises StageFailure as `check`."""
        self._launcher.give_up(worker)
        self._lose(worker, reason, now_s)

    def serve(self, now_s: float) -> None:
        """Asks for workers, and has all stages begin anew when they are there."""
        for _ in range(self._recovery.num_wanted_workers):
            self._recovery.asked(self._launcher.ask_for_worker(), now_s)
        record = self._recovery.current
        order = self._recovery.start_order(now_s)
        if order is None:
            return
        self._launcher.broadcast(order)
        assert record is not None and record.ended_s is not None
        self._ended.append(record)
        workers = self._launcher.roster.workers_of_stages
        logger.info(
            "recovered in %.2f s: stage %s runs again (worker %s)",
            record.ended_s - record.began_s,
            ", ".join(map(str, record.stages)),
            ", ".join(str(workers[stage]) for stage in record.stages),
        )

    def take_ended(self) -> list[RecoveryRecord]:
        """The recoveries that have ended since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def _lose(self, worker: int, reason: str, now_s: float) -> None:
        stage = self._launcher.roster.worker_stage(worker)
        answers = self._recovery.lose(worker, reason, now_s)
        if stage is None:
            logger.warning("worker %d, which fills no stage, is lost: %s", worker, reason)
        else:
            record = self._recovery.current
            assert record is not None
            logger.warning(
                "stage %d (worker %d) is lost: %s; it is replaced, and %d running requests (%d "
                "tokens) are computed again",
                stage,
                worker,
                reason,
                record.num_requests,
                record.num_tokens,
            )
            self.on_lost(stage)
        self._send(answers)

    def _send(self, messages: list[Addressed]) -> None:
        for worker, message in messages:
            self._launcher.channel.send(worker, message)
