"""From the loss of a worker to the first step that all stages run again: a state machine.

Inputs are the workers that end or are given up, and the messages of workers on their way to
readiness. Outputs are the messages for each worker, and in the end the order that begins a new
stream. The state machine does no I/O and reads no clock.

A stage that is left lets go of its steps and of its links, keeps its weights and pages, and opens
links to its new neighbors. The newcomers compute again by themselves as much as they can
(`scheduling/recovery_log.py`); the other requests are prefilled again, prompt and output. A token
is a function of its request, so each request goes on with the tokens that would have come.

Where no worker is available for a stage (`worker_supply.py`), the stages that are left share its
layers and serve on as fewer stages, and as more again when a worker has come; then all pages are
lost. Every stage that serves is first ordered to regroup: when all have, no message under an old
number is on its way.

A worker that was asked to leave is replaced while it serves (`stage_handovers.py`); in the end all
begin anew as after a loss, although nothing was lost.
"""

from collections import deque
from collections.abc import Iterable

from sgl_pipeline.args import RecoveryArgs
from sgl_pipeline.errors import PipelineLost, StageFailure
from sgl_pipeline.pipeline.pipeline_core import PipelineCore
from sgl_pipeline.pipeline.stage_handovers import StageHandovers
from sgl_pipeline.pipeline.worker_roster import Addressed, WorkerRoster
from sgl_pipeline.pipeline.worker_supply import WorkerSupply
from sgl_pipeline.records.recovery_record import LostWorker, RecoveryRecord
from sgl_pipeline.requests import Request
from sgl_pipeline.stage_plan import StagePlan
from sgl_pipeline.wire.stage_messages import (
    FromWorker,
    PagesCopied,
    PagesTaken,
    Shutdown,
    StageReady,
    WorkerHello,
    WorkerLeaves,
)
from sgl_pipeline.wire.stage_orders import SealedOrder

KEPT_RECORDS = 64
# The limit of workers of a stage that are given up one after the other without a step in between.
MOST_SILENT_IN_A_ROW = 3


class StageRecovery:
    """`current` is the recovery under way until the stages begin anew, `history` the newest ones
    before it, oldest first; the last of them is over when a step has come back from all stages.

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
        self._joining_since_s = 0.0
        self._losses_s: deque[float] = deque()
        self._supply = WorkerSupply(args)
        self._handovers = StageHandovers(core, roster, args)
        self._first_plan = core.plan
        self._last_loss: tuple[str, float] | None = None
        # For each stage whose worker was given up as silent: its last step then, and the number of
        # such workers.
        self._silent_in_a_row: dict[int, tuple[int | None, int]] = {}

    @property
    def bound_s(self) -> float:
        """Longest time in seconds that a recovery should take."""
        return self._args.join_limit_s

    @property
    def leavers(self) -> tuple[int, ...]:
        """The workers that were asked to leave and still serve, in order of these requests."""
        return self._handovers.leavers

    def num_wanted_workers(self, now_s: float) -> int:
        """Number of workers that the source should be asked for now."""
        if self._args.mode == "off" or self._supply.rests(now_s):
            return 0
        missing = self._first_plan.num_stages - len(self._roster.workers_of_stages)
        missing += self._handovers.num_wanted_workers
        spare = len(self._roster.spare_workers) + self._supply.num_on_their_way
        return max(0, missing + self._args.spare_workers - spare)

    def asked(self, worker: int, now_s: float) -> None:
        """The source was asked for a worker, which will greet with this number."""
        self._supply.asked(worker, now_s)

    def refused(self, worker: int, reason: str, now_s: float) -> None:
        """The source cannot give the worker that it was asked for."""
        self._supply.failed(worker, reason, now_s, is_refusal=True)

    def lose(
        self, worker: int, reason: str, now_s: float, *, was_silent: bool = False
    ) -> list[Addressed]:
        """A worker has ended, or was given up: its messages are dropped from now on.

        Args:
            was_silent: it was given up because a step took too long.

        Returns the messages for the other workers. Raises StageFailure where the stage is not
        replaced: recovery is off, too many workers that had served were lost, or one after the
        other was silent.
        """
        stage = self._roster.lose(worker)
        self._handovers.forget(worker)
        if was_silent and stage is not None:
            self._count_silent(stage, reason)
        if self._roster.has_served(worker) or self._args.mode == "off":
            self._count(worker if stage is None else stage, reason, now_s)
            self._supply.try_again()
        else:
            self._supply.failed(worker, reason, now_s)
        lost = LostWorker(worker, stage, reason)
        if self.current is not None:
            self.current.lost += (lost,)
        elif stage is not None:
            self.current = self._begin_record(now_s)
            self.current.lost += (lost,)
        if stage is None or self.current is None:
            return []
        self._halt(f"stage {stage} was lost: {reason}", now_s, lost_stage=stage)
        return self._roster.fill()

    def take(
        self, message: FromWorker, now_s: float, speaker: int | None = None
    ) -> list[Addressed]:
        """Applies a worker's message that is not about a step; returns the messages that follow.

        Args:
            speaker: as in `WorkerRoster.take`.

        Raises ProtocolError and ConfigurationError as `WorkerRoster.take`.
        """
        if isinstance(message, WorkerLeaves):
            return self._leave(message.worker, now_s)
        if isinstance(message, PagesCopied | PagesTaken):
            self._handovers.take(message)
            return []
        is_newcomer = False
        if isinstance(message, StageReady):
            worker = self._roster.worker_of(message.stage) if speaker is None else speaker
            is_newcomer = worker is not None and not self._roster.has_served(worker)
        answers = self._roster.take(message, speaker)
        if isinstance(message, WorkerHello):
            self._supply.greeted(message.worker)
        elif is_newcomer:
            self._supply.got_ready()
        if self.current is not None:
            answers += self._roster.fill()
            if self.current.survivors_s is None and self._roster.has_regrouped:
                self.current.survivors_s = now_s
        return answers

    def _leave(self, worker: int, now_s: float) -> list[Addressed]:
        """A worker that fills no stage can go at once."""
        if self._roster.worker_stage(worker) is not None:
            self._handovers.leave(worker, now_s)
            return []
        self._roster.lose(worker)
        self._handovers.forget(worker)
        self._supply.forget(worker)
        return [(worker, Shutdown())]

    def reform(self, now_s: float) -> list[Addressed]:
        """Makes fewer stages serve where no worker is available for one, and more where one has
        come, and moves stages from leaving workers to others; to be called now and then. Returns
        the messages to each worker.

        Raises PipelineLost if too few stages remain.
        """
        if self.current is None:
            messages = [] if self.unsettled is not None else [*self._handovers.go_on(now_s)]
            if messages or self._handovers.is_under_way:
                return messages + self._hand_over(now_s)
            if self._num_stages_now(now_s) == self._roster.num_stages:
                return []
            self.current = self._begin_record(now_s)
            self._halt("a worker has come for a missing stage", now_s)
            return self._roster.fill()
        if not (self._roster.is_settled and self._roster.has_regrouped):
            return []
        num_stages = self._num_stages_now(now_s)
        if num_stages == self._roster.num_stages:
            return []
        return self._reassign(num_stages, now_s)

    def _hand_over(self, now_s: float) -> list[Addressed]:
        """Replaces a leaver, which ends, by its successor, which has all pages."""
        handover = self._handovers.take_done()
        if handover is None:
            return []
        stage, leaver = handover.stage, handover.leaver
        left = LostWorker(leaver, stage, "it was asked to leave", has_left=True)
        assert handover.held_s is not None
        self.current = record = self._begin_record(handover.held_s)
        record.lost += (left,)
        computed = self._computed_tokens()
        self._core.hand_over(stage, f"worker {leaver} leaves stage {stage}", now_s)
        self._roster.hand_over(stage)
        self._begin_anew(computed, now_s)
        record.num_replay_tokens = 0
        return [(leaver, Shutdown()), *self._roster.fill()]

    def _num_stages_now(self, now_s: float) -> int:
        """Number of stages that can serve with the present workers."""
        roster, supply = self._roster, self._supply
        num_filled = len(roster.workers_of_stages)
        if not roster.vacant_stages:
            if supply.num_on_their_way:
                return roster.num_stages  # one pause for all that come
            num_workers = num_filled + len(roster.spare_workers)
            return min(self._first_plan.num_stages, num_workers)
        if supply.num_on_their_way or not supply.rests(now_s):
            return roster.num_stages
        if num_filled < self._args.min_stages:
            raise PipelineLost(
                f"{num_filled} of {self._first_plan.num_stages} stages are left, no worker is "
                f"available for the others ({supply.last_reason}), and --min-stages is "
                f"{self._args.min_stages}"
            )
        return num_filled

    def _reassign(self, num_stages: int, now_s: float) -> list[Addressed]:
        """Gives all layers to `num_stages` stages. Each starts over and keeps only its weights."""
        assert self.current is not None
        old, first = self._core.plan, self._first_plan
        is_whole = num_stages == first.num_stages
        counts = first.layer_counts if is_whole else self._roster.layer_counts(num_stages)
        plan = StagePlan(old.epoch + 1, counts)
        incarnation = self._roster.next_incarnation()
        self._joining_since_s = now_s
        self.current.incarnation, self.current.num_stages = incarnation, num_stages
        # No stage keeps any of them.
        self.current.num_tokens += sum(self._computed_tokens().values())
        self.current.num_replay_tokens = 0
        self._silent_in_a_row.clear()  # stages are numbered anew
        messages = self._roster.reassign(plan, incarnation)
        self._core.use_stages(plan, self._roster.max_layers, now_s)
        return messages

    def _computed_tokens(self) -> dict[Request, int]:
        """Number of computed tokens of each running request."""
        requests = self._core.scheduler.requests()
        return {request: request.num_computed for request in requests if request.pages}

    def start_order(self, now_s: float) -> SealedOrder | None:
        """The first order of the new stream, for all stages, once each has a worker that is ready
        and linked to its neighbors; None before."""
        if self.current is None or not self._roster.is_complete:
            return None
        record, self.current = self.current, None
        record.stream_s = now_s
        self.history.append(record)
        roster, record.incarnation = self._roster, self._roster.incarnation
        return self._core.start_over(
            record.incarnation, roster.num_pages, roster.log_pages or 0, roster.num_state_slots
        )

    @property
    def unsettled(self) -> RecoveryRecord | None:
        """The recovery under way until a step has come back from all stages."""
        if self.current is None and self.history and not self.history[-1].is_over:
            return self.history[-1]
        return self.current

    def settle(self, now_s: float) -> RecoveryRecord | None:
        """The recovery that is over now, if there is one: a step of the new stream has come back
        from all stages, or none is on its way. It is among the core's events as well. To be called
        after steps were decided."""
        record = self.unsettled
        if record is None or record is self.current:
            return None
        if not self._core.has_run and self._core.open_steps:
            return None
        record.ended_s = now_s
        self._core.events.append(record)
        return record

    def late_workers(
        self, now_s: float, step_limit_s: float | None = None
    ) -> Iterable[tuple[int, str]]:
        """Workers that are late, and the reason to report for each. A remaining stage may need up
        to `step_limit_s` for its present step.
        """
        yield from self._supply.late(now_s)
        yield from self._roster.unfit_workers
        yield from self._handovers.late_workers(now_s, self._supply.last_reason)
        if self.current is None:
            return
        for worker in self._roster.late_workers:
            is_left = self._roster.is_ready(worker) and step_limit_s is not None
            limit_s = step_limit_s if is_left and step_limit_s else self._args.join_limit_s
            if now_s - self._joining_since_s > limit_s:
                verb = "join the others" if is_left else "get ready"
                yield worker, f"it did not {verb} within {limit_s:.1f} s"

    def _begin_record(self, now_s: float) -> RecoveryRecord:
        """A new record, or that of the recovery under way."""
        if self.unsettled is not None:
            record = self.history.pop()
            record.stream_s = None
            return record
        num_stages = self._roster.num_stages
        return RecoveryRecord(
            began_s=now_s, incarnation=0, num_stages=num_stages, stages_before=num_stages
        )

    def _halt(self, reason: str, now_s: float, lost_stage: int | None = None) -> None:
        """Halts the pipeline; may be called again before it has recovered."""
        assert self.current is not None
        computed, lost = self._computed_tokens(), {*self._roster.vacant_stages}
        if lost_stage is not None:  # its successor may fill it
            lost.add(lost_stage)
        self._handovers.interrupt()
        self._core.halt(lost, reason, now_s)
        kept = self._begin_anew(computed, now_s)
        self.current.num_replay_tokens = kept if lost else 0

    def _begin_anew(self, computed: dict[Request, int], now_s: float) -> int:
        """Makes all remaining workers join another stream. Returns the number of `computed` tokens
        that are kept."""
        record = self.current
        assert record is not None
        # Halted before: the remaining ones have been counted.
        record.num_requests = max(record.num_requests, len(computed))
        kept = sum(tokens for request, tokens in computed.items() if request.pages)
        record.num_tokens += sum(computed.values()) - kept
        self._joining_since_s = now_s
        record.incarnation, record.survivors_s = self._roster.next_incarnation(), None
        self._roster.regroup(self._core.plan, record.incarnation)
        return kept

    def _count_silent(self, stage: int, reason: str) -> None:
        """Raises StageFailure if workers of the stage, one after the other, run no step."""
        last_step = self._core.history.last_steps.get(stage)
        step_before, count = self._silent_in_a_row.get(stage, (last_step, 0))
        count = count + 1 if step_before == last_step else 1
        self._silent_in_a_row[stage] = last_step, count
        if count >= MOST_SILENT_IN_A_ROW:
            raise StageFailure(
                stage,
                last_step,
                f"{count} workers in a row ran no step: {reason}; another one would do no better "
                "(the log has their stacks; --stage-silence-s gives a step more time)",
            )

    def _count(self, stage: int, reason: str, now_s: float) -> None:
        """Raises StageFailure if this loss is one too many."""
        last_step = self._core.history.last_steps.get(stage)
        if self._args.mode == "off":
            raise StageFailure(stage, last_step, reason)
        window_s, limit = self._args.restart_window_s, self._args.max_restarts
        # A host takes all its workers with it: one reason at one moment is one loss.
        if self._last_loss != (reason, now_s):
            self._losses_s.append(now_s)
        self._last_loss = reason, now_s
        while now_s - self._losses_s[0] > window_s:
            self._losses_s.popleft()
        if len(self._losses_s) > limit:
            raise StageFailure(
                stage,
                last_step,
                f"{reason}; {len(self._losses_s)} workers were lost within {window_s:g} s "
                f"(--stage-restart-window-s), at most {limit} are replaced (--max-stage-restarts)",
            )
