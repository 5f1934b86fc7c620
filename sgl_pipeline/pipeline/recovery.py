"""From the loss of a worker to the first step that all stages run again: a state machine.

Driven by `managers/stages/recovery_desk.py`, and in virtual time by `benchmark/fault_schedules`.
Workers that end or are given up come in, and all that workers say on their way to readiness; what
each must be told comes out, and in the end the order that begins a new stream. Does no I/O and
reads no clock.

A stage that is left lets go of its steps and of its links, keeps its weights, and opens links to
its new neighbors. All keys and values count as lost: requests are prefilled again, prompt and
output. Because a token is a function of its request, what they go on with is what would have come.
"""

from collections import deque
from collections.abc import Iterable

from sgl_pipeline.args import RecoveryArgs
from sgl_pipeline.errors import StageFailure
from sgl_pipeline.messages import FromWorker
from sgl_pipeline.pipeline.pipeline_core import PipelineCore
from sgl_pipeline.pipeline.worker_roster import Addressed, WorkerRoster
from sgl_pipeline.recovery_record import LostWorker, RecoveryRecord
from sgl_pipeline.stage_orders import SealedOrder

KEPT_RECORDS = 64


class StageRecovery:
    """`current` is the recovery under way, `history` the newest that are over, oldest first.

    Args:
        core: halted while a stage is missing.
        roster: of the same pipeline, whose stages are all filled.
    """

    def __init__(self, core: PipelineCore, roster: WorkerRoster, args: RecoveryArgs) -> None:
        self._core = core
        self._roster = roster
        self._args = args
        self.current: RecoveryRecord | None = None
        self.history: deque[RecoveryRecord] = deque(maxlen=KEPT_RECORDS)
        self._incarnation = 0
        self._joining_since_s = 0.0
        # Workers that were asked for and have not greeted, and since when.
        self._asked_s: dict[int, float] = {}
        self._losses_s: deque[float] = deque()

    @property
    def num_wanted_workers(self) -> int:
        """How many more workers the source should be asked for now."""
        if self._args.mode == "off":
            return 0
        needed = len(self._roster.vacant_stages) + self._args.spare_workers
        return max(0, needed - len(self._roster.spare_workers) - len(self._asked_s))

    def asked(self, worker: int, now_s: float) -> None:
        """The source was asked for a worker, who will greet with this number."""
        self._asked_s[worker] = now_s

    def lose(self, worker: int, reason: str, now_s: float) -> list[Addressed]:
        """A worker has ended, or was given up: nothing that it said will be heard any more.

        Returns what the others must be told. Raises StageFailure where the stage cannot be
        replaced: recovery is off, or too many were lost.
        """
        self._asked_s.pop(worker, None)
        stage = self._roster.lose(worker)
        self._count(worker if stage is None else stage, reason, now_s)
        lost = LostWorker(worker, stage, reason)
        if self.current is not None:
            self.current.lost += (lost,)
        elif stage is not None:
            self.current = RecoveryRecord(began_s=now_s, incarnation=0, lost=(lost,))
        if stage is None or self.current is None:
            return []
        self._halt(f"stage {stage} was lost: {reason}", now_s)
        return self._roster.fill()

    def take(self, message: FromWorker, now_s: float) -> list[Addressed]:
        """Books what a worker says that is not about a step; returns what follows from it.

        Raises ProtocolError and ConfigurationError as `WorkerRoster.take`.
        """
        answers = self._roster.take(message)
        for worker in [*self._asked_s]:
            if self._roster.has_greeted(worker):
                del self._asked_s[worker]
        if self.current is not None:
            answers += self._roster.fill()
            if self.current.survivors_s is None and self._roster.has_regrouped:
                self.current.survivors_s = now_s
        return answers

    def start_order(self, now_s: float) -> SealedOrder | None:
        """The first order of the new stream, for all stages, once each has a worker that is ready
        and linked to its neighbors; None before."""
        if self.current is None or not self._roster.is_complete:
            return None
        record, self.current = self.current, None
        record.ended_s = now_s
        self.history.append(record)
        return self._core.start_over(self._incarnation)

    def late_workers(
        self, now_s: float, step_limit_s: float | None = None
    ) -> Iterable[tuple[int, str]]:
        """Workers that have not got as far as they should have, and what is said of each.

        `step_limit_s` is the most that a stage which is left may need for the step that it is in.
        """
        for worker, asked_s in self._asked_s.items():
            if now_s - asked_s > self._args.join_limit_s:
                yield worker, f"it did not come within {self._args.join_limit_s:g} s"
        if self.current is None:
            return
        for worker in self._roster.late_workers:
            is_left = self._roster.is_ready(worker) and step_limit_s is not None
            limit_s = step_limit_s if is_left and step_limit_s else self._args.join_limit_s
            if now_s - self._joining_since_s > limit_s:
                verb = "join the others" if is_left else "get ready"
                yield worker, f"it did not {verb} within {limit_s:.1f} s"

    def _halt(self, reason: str, now_s: float) -> None:
        """Takes the pipeline apart; may happen again before it is together again."""
        record = self.current
        assert record is not None
        running = [one for one in self._core.scheduler.requests() if one.pages]
        record.num_requests += len(running)
        record.num_tokens += sum(request.num_computed for request in running)
        self._core.halt(reason, now_s)
        self._incarnation += 1
        self._joining_since_s = now_s
        record.incarnation, record.survivors_s = self._incarnation, None
        self._roster.regroup(self._core.plan, self._incarnation)

    def _count(self, stage: int, reason: str, now_s: float) -> None:
        """Raises StageFailure where this loss is one too many."""
        last_step = self._core.history.last_steps.get(stage)
        if self._args.mode == "off":
            raise StageFailure(stage, last_step, reason)
        window_s, limit = self._args.restart_window_s, self._args.max_restarts
        self._losses_s.append(now_s)
        while now_s - self._losses_s[0] > window_s:
            self._losses_s.popleft()
        if len(self._losses_s) > limit:
            raise StageFailure(
                stage,
                last_step,
                f"{reason}; {len(self._losses_s)} workers were lost within {window_s:g} s "
                f"(--stage-restart-window-s), at most {limit} are replaced (--max-stage-restarts)",
            )
