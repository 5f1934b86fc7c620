"""The loop of the pipeline without its I/O: take, book, fill, encode.

Driven by the server (`managers/pipeline_scheduler.py`), the simulator and the tests alike. Reports
of stages go in, each with the moment of the driver's clock; steps come out, each with the sealed
order that every stage must get, and later its token events. Reads no clock, sends nothing.
"""

from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import asdict, replace

from sgl_pipeline.args import ACCOUNTINGS
from sgl_pipeline.errors import ProtocolError
from sgl_pipeline.layer_moves import SwitchPlan
from sgl_pipeline.messages import StageReport
from sgl_pipeline.migration.step_forecast import StepForecast
from sgl_pipeline.pipeline.forecast import Forecast, Forecaster
from sgl_pipeline.pipeline.migration_control import MigrationControl
from sgl_pipeline.pipeline.open_step import OpenStep
from sgl_pipeline.pipeline.output_lengths import OutputLengths
from sgl_pipeline.pipeline.pipeline_state import PipelineState, StageState
from sgl_pipeline.pipeline.recent_load import RecentLoad, RecentWork
from sgl_pipeline.pipeline.step_history import StepHistory
from sgl_pipeline.pipeline.step_pace import StepPace
from sgl_pipeline.pipeline.throttle_control import ThrottleControl
from sgl_pipeline.recovery_record import RecoveryRecord
from sgl_pipeline.scheduling import Explanation, Outlook, StepScheduler
from sgl_pipeline.stage_orders import OrderStream, SealedOrder
from sgl_pipeline.stage_plan import StagePlan
from sgl_pipeline.step_plan import StepPlanEncoder
from sgl_pipeline.trace import StepRecord


class PipelineCore:
    """One pipeline: its scheduler, its plan, its stream of orders, its steps on the way.

    Requests come and go through `scheduler` (add, abort, pause, resume); steps through this class.

    Args:
        scheduler: decides; shared with no other core.
        plan: which stage owns which layers, of the first epoch. It changes with the moves of
            `migration`, and is that of the next step to be decided.
        migration: may move layers; None: never.
        step_forecast: learns what steps take; None: a new one.
        throttle: changes the knobs of `scheduler`; None: they stay.
    """

    def __init__(
        self,
        scheduler: StepScheduler,
        plan: StagePlan,
        migration: MigrationControl | None = None,
        step_forecast: StepForecast | None = None,
        throttle: ThrottleControl | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.plan = plan
        self.migration = migration or MigrationControl.off(plan)
        self.step_forecast = step_forecast or StepForecast(plan)
        self.throttle = throttle
        self.history = StepHistory(plan.num_stages)
        self.recent_load = RecentLoad()
        self._encoder = StepPlanEncoder()
        self._orders = OrderStream()
        self._open: dict[int, OpenStep] = {}
        self._first_step_id = 0  # of this incarnation
        self._is_halted = False
        self._reported: list[OpenStep] = []
        self._refresh_times()

    def halt(self, reason: str, now_s: float) -> int:
        """A stage is lost: takes back all steps in flight, and decides none until `start_over`.

        Requests return to the queue with the tokens that they have. A layer move that is not past
        its switch is abandoned. May be called again before `start_over`. Returns how many requests
        were running.
        """
        num_running = self.scheduler.num_running
        self.scheduler.forget_in_flight()
        self.scheduler.forget_pages(now_s)
        self.migration.interrupt(reason, now_s)
        self._open.clear()
        self._first_step_id = self.scheduler.next_step_id
        self._is_halted = True
        return num_running

    def start_over(self, incarnation: int) -> SealedOrder:
        """Every stage is there again: the first order of the new stream, for all of them.

        The stages that were lost may still be heard: what they say of steps before this is late.
        """
        self._encoder.forget()
        self._is_halted = False
        return self._orders.start_over(self._encoder.snapshot(), incarnation)

    @property
    def open_steps(self) -> Iterable[OpenStep]:
        """The steps that some stage has not reported, oldest first."""
        return self._open.values()

    def move_orders(self, now_s: float) -> list[SealedOrder]:
        """What the stages must know of layer moves before the next step. The driver must send each
        to every stage before it asks for that."""
        sealed: list[SealedOrder] = []
        if self._is_halted:
            return sealed
        pages_in_use = self.scheduler.pages_in_use
        while (order := self.migration.next_order(now_s, pages_in_use)) is not None:
            if isinstance(order, SwitchPlan):
                self.plan = order.plan
                self.scheduler.epoch = order.plan.epoch
                self.step_forecast.know_plan(order.plan)
                self._refresh_times()
            sealed.append(self._orders.seal(order))
        return sealed

    def next_step(self, now_s: float) -> OpenStep | None:
        """Decides and encodes the next step; None when the pipeline is full or nothing can run.

        The driver must send its order to every stage before it asks for another one.
        """
        if self.throttle is not None:
            self.throttle.revert_if_due(now_s)
        microbatch = None if self._is_halted else self.scheduler.next_microbatch(now_s)
        if microbatch is None:
            return None
        step = OpenStep(microbatch, self._orders.seal(self._encoder.encode(microbatch)), now_s)
        self._open[microbatch.step_id] = step
        self.history.scheduled(microbatch)
        return step

    def take_report(self, report: StageReport, now_s: float) -> OpenStep | None:
        """Books a stage's report. The last stage's brings the tokens: then the step, with `events`.

        A report of a step that was taken back is late, and means nothing any more. Raises
        ProtocolError for a report that no stage could give now.
        """
        if report.step_id < self._first_step_id:
            return None
        step = self._open.get(report.step_id)
        if step is None or report.stage in step.timings:
            raise ProtocolError(
                f"stage {report.stage} reported step {report.step_id}, which it has reported "
                "before or was never sent"
            )
        is_last = report.stage == self.plan.num_stages - 1
        if is_last != (report.token_ids is not None):
            raise ProtocolError(
                f"stage {report.stage} of {self.plan.num_stages} reported step {report.step_id} "
                f"{'without' if is_last else 'with'} tokens"
            )
        if report.token_ids is not None:
            events = self.scheduler.on_result(
                report.step_id, report.token_ids, now_s, report.logprobs
            )
            step.finish(events, now_s)
        step.timings[report.stage] = report.timing
        self.history.last_steps[report.stage] = report.step_id
        self.history.heard_s[report.stage] = now_s
        if len(step.timings) == self.plan.num_stages:
            self._reported.append(self._open.pop(report.step_id))
        return step if is_last else None

    def take_records(self) -> list[StepRecord]:
        """The steps that all stages have reported since the last call, and that the driver is done
        with: `result_ms` is on them."""
        records = [step.record() for step in self._reported]
        self._reported.clear()
        for record in records:
            self.history.add(record)
            self.recent_load.add(record)
            parts = self.step_forecast.note(record)
            if parts is not None:
                self.migration.note(parts, record.finished_s)
        if records:
            self._refresh_times()
        return records

    def _refresh_times(self) -> None:
        """Policies budget by what is known now, of the plan that is in use now."""
        self.scheduler.step_times = self.step_forecast.slowest(self.plan.layer_counts)

    def explain(self, request_id: str) -> Explanation | None:
        """Why a request waits: which rule, which numbers, behind whom; None for an unknown one."""
        return self.scheduler.explain(request_id)

    def forecast(self, outlook: Outlook, now_s: float) -> Forecast:
        """When the request of `outlook` will run, by the pace of the recent steps of this plan."""
        if self.scheduler.is_paused and not outlook.request.steps_in_flight:
            return Forecast(reason="the scheduler is paused, until somebody continues it")
        recent = [record for record in self.history.recent if record.epoch == self.plan.epoch]
        pace = StepPace.of(recent)
        if pace is None:
            return Forecast(
                reason=f"{len(recent)} steps of this plan have been measured, too few to tell"
            )
        in_flight = [
            (step.microbatch, step.scheduled_s)
            for step in self._open.values()
            if not step.finished_s
        ]
        running = [len(one.output_ids) for one in self.scheduler.requests()]
        lengths = OutputLengths(self.recent_load.output_lengths(), running)
        last_end_s = recent[-1].finished_s
        return Forecaster(outlook, pace, lengths, in_flight, last_end_s, now_s).run()

    def recent_work(self, window_s: float, now_s: float) -> RecentWork:
        """The load of the last `window_s` seconds, as the simulator runs it again."""
        scheduler, throttle = self.scheduler, self.throttle
        assert throttle is not None, "only knobs that can be changed are tuned"
        return RecentWork(
            requests=self.recent_load.since(now_s - window_s, scheduler.requests()),
            steps=[one for one in self.recent_load.steps if one.epoch == self.plan.epoch],
            knobs=throttle.knobs,
            ranges=throttle.ranges,
            scheduling=asdict(scheduler.args),
            pool_tokens=scheduler.limits.pool_tokens,
            now_s=now_s,
        )

    def state(
        self,
        now_s: float,
        compiling_requests: int = 0,
        recoveries: Sequence[RecoveryRecord] = (),
    ) -> PipelineState:
        """How things stand; `compiling_requests` are those that the driver holds back for now,
        `recoveries` those of its `StageRecovery`."""
        scheduler, history = self.scheduler, self.history
        return PipelineState(
            now_s=now_s,
            plan=self.plan,
            is_paused=scheduler.is_paused,
            # Numbers alone: a state is sent to other processes.
            load=replace(scheduler.load(), step_times=None),
            naive_load=replace(scheduler.load(ACCOUNTINGS["naive"]), step_times=None),
            unused_pages=scheduler.num_free_pages,
            waiting_requests=scheduler.num_waiting,
            compiling_requests=compiling_requests,
            running_requests=scheduler.num_running,
            queued_tokens=scheduler.queued_tokens,
            decoding_tokens=scheduler.num_decoding_tokens,
            prefill_tokens=history.prefill_tokens,
            decodes=history.decodes,
            cached_tokens=scheduler.num_cached_tokens,
            prompt_tokens=scheduler.num_prompt_tokens,
            num_retractions=scheduler.num_retractions,
            recent_steps=tuple(history.recent),
            stages=tuple(
                StageState(input_wait_ms=wait_ms, compute_ms=compute_ms, last_step=last_step)
                for wait_ms, compute_ms, last_step in history.stage_totals()
            ),
            # Copies: the record of what is under way still changes.
            moves=tuple(map(copy, self.migration.history)),
            throttle=None if self.throttle is None else self.throttle.state(),
            recoveries=tuple(map(copy, recoveries)),
        )
