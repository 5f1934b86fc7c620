"""Carries out a recovery: requests workers, gives workers up, logs.

`pipeline/recovery.py` decides what follows from a loss; this file carries messages between it and
the `StageLauncher`.
"""

import logging
from collections.abc import Callable

from sgl_pipeline.managers.reports.recovery_report import (
    log_ended,
    log_leaver,
    log_reformed,
    log_successor,
)
from sgl_pipeline.managers.stages.stage_launcher import StageLauncher
from sgl_pipeline.pipeline.recovery import StageRecovery
from sgl_pipeline.pipeline.stage_watch import Silence, StageWatch
from sgl_pipeline.records.recovery_record import RecoveryRecord
from sgl_pipeline.wire.stage_messages import FromWorker, StageAssignment, WorkerLeaves

logger = logging.getLogger(__name__)

# The time that a stage which hangs has to write its stacks.
DUMP_GRACE_S = 1.0


class RecoveryActions:
    """Stages of one server that are replaced when they are lost.

    Args:
        watch: finds the stages that hang; None: hangs go unnoticed.
        on_lost: called with a stage that was lost, because no request has to wait for its messages.
    """

    def __init__(
        self,
        recovery: StageRecovery,
        launcher: StageLauncher,
        watch: StageWatch | None = None,
        on_lost: Callable[[int], None] = lambda stage: None,
    ) -> None:
        self._recovery = recovery
        self._launcher = launcher
        self._watch = watch
        # Workers that were asked for their stacks, and the step that they are silent in.
        self._dumps: dict[int, tuple[int, float]] = {}
        self.on_lost = on_lost

    @property
    def current(self) -> RecoveryRecord | None:
        """The recovery under way."""
        return self._recovery.current

    def is_within_bound(self, now_s: float) -> bool:
        """True if a recovery is under way that has not taken longer than it may."""
        record = self._recovery.unsettled
        return record is not None and now_s - record.began_s <= self._recovery.bound_s

    @property
    def records(self) -> tuple[RecoveryRecord, ...]:
        """The newest recoveries, oldest first, the one under way among them."""
        current = self._recovery.current
        return (*self._recovery.history, *([] if current is None else [current]))

    def take(self, message: FromWorker, now_s: float, worker: int | None = None) -> None:
        """Applies a worker's message that is not about a step, and sends what follows from it."""
        self._launcher.tell(self._recovery.take(message, now_s, worker))
        if isinstance(message, WorkerLeaves):
            log_leaver(self._launcher.roster.worker_stage(message.worker), message.worker)

    def check(self, now_s: float) -> None:
        """Finds workers that have ended or take too long. To be called now and then, and when
        `StageLauncher.ends_descriptor` can be read.

        Raises StageFailure if a stage cannot be replaced, and PipelineLost as
        `StageLauncher.take_lost`.
        """
        for worker, reason in self._launcher.take_lost():
            self._lose(worker, reason, now_s)
        for worker in self._launcher.take_leavers():
            self.take(WorkerLeaves(worker), now_s)
        for refused in self._launcher.take_refused():
            logger.warning("worker %d is not available: %s", refused.worker, refused.reason)
            self._recovery.refused(refused.worker, refused.reason, now_s)
        for worker, reason in self._launcher.silent_newcomers(now_s):
            self.give_up(worker, reason, now_s)
        for worker, reason in [*self._recovery.late_workers(now_s, self._step_limit_s)]:
            self.give_up(worker, reason, now_s)
        for silence in self._watch.silent_stages(now_s) if self._watch is not None else ():
            self._look_into(silence, now_s)

    def _look_into(self, silence: Silence, now_s: float) -> None:
        """Asks a silent stage for its stacks, and replaces it when it stays silent for a while."""
        worker = self._launcher.roster.worker_of(silence.stage)
        if worker is None:
            return
        step_id = silence.microbatch.step_id
        asked_step_id, asked_s = self._dumps.get(worker, (None, 0.0))
        what = (
            f"it has been silent for {now_s - silence.since_s:.1f} s in step {step_id} "
            f"({silence.microbatch.num_prefill_tokens} prefill tokens, "
            f"{silence.microbatch.num_decodes} decodes), which may take {silence.bound_s:.1f} s "
            f"besides the {silence.waited_s:.1f} s that it had no core"
        )
        if asked_step_id != step_id:
            self._dumps[worker] = step_id, now_s
            state = self._launcher.ask_for_dump(worker)
            logger.warning(
                "stage %d (worker %d) hangs: %s; its process is %s, and was asked for its stacks",
                silence.stage,
                worker,
                what,
                state,
            )
        elif now_s - asked_s > DUMP_GRACE_S:
            del self._dumps[worker]
            self.give_up(worker, what, now_s, was_silent=True)

    def give_up(self, worker: int, reason: str, now_s: float, *, was_silent: bool = False) -> None:
        """Replaces a worker that may still run. Raises StageFailure as `check`."""
        self._launcher.give_up(worker)
        self._lose(worker, reason, now_s, was_silent=was_silent)

    def serve(self, now_s: float) -> None:
        """Requests workers. When they are there, all stages begin anew; where none comes, the
        stages that are left do.

        Raises PipelineLost if too few are left.
        """
        for _ in range(self._recovery.num_wanted_workers(now_s)):
            self._recovery.asked(self._launcher.ask_for_worker(), now_s)
        self._reform(now_s)
        if (order := self._recovery.start_order(now_s)) is not None:
            self._launcher.broadcast(order)

    def settle(self, now_s: float) -> None:
        """Ends a recovery that is over; to be called after steps were decided."""
        if (record := self._recovery.settle(now_s)) is not None:
            log_ended(record, self._launcher.roster.workers_of_stages)

    def _reform(self, now_s: float) -> None:
        """Tells the stages when there will be more or fewer of them, or when one goes to another
        worker."""
        before, record = self._launcher.stages, self._recovery.current
        messages = self._recovery.reform(now_s)
        roster = self._launcher.roster
        for worker, message in messages:
            if isinstance(message, StageAssignment) and roster.worker_stage(worker) is None:
                log_successor(message.stage, worker, roster.worker_of(message.stage))
        self._launcher.tell(messages)
        if record is None and (record := self._recovery.current) is not None:
            for stage in record.stages:  # messages of its leaver no longer count
                self.on_lost(stage)
        if self._launcher.stages != before:
            record = self._recovery.current
            assert record is not None
            log_reformed(record, len(before), len(self._launcher.stages))
            for stage in before:
                self.on_lost(stage)

    @property
    def _step_limit_s(self) -> float | None:
        """Seconds that a stage may take to finish its present step."""
        if self._watch is None or self._recovery.current is None:
            return None
        return max(self._watch.bound_s(stage) for stage in self._launcher.stages)

    def _lose(self, worker: int, reason: str, now_s: float, *, was_silent: bool = False) -> None:
        stage = self._launcher.roster.worker_stage(worker)
        answers = self._recovery.lose(worker, reason, now_s, was_silent=was_silent)
        if stage is None:
            logger.warning("worker %d, which fills no stage, is lost: %s", worker, reason)
        else:
            record = self._recovery.current
            assert record is not None
            logger.warning(
                "stage %d (worker %d) is lost: %s; it is replaced, and %d running requests go on: "
                "%d tokens are prefilled again, %d are computed again by it alone",
                stage,
                worker,
                reason,
                record.num_requests,
                record.num_tokens,
                record.num_replay_tokens,
            )
            self.on_lost(stage)
        self._launcher.tell(answers)
