"""The loop of the pipeline without its I/O: take, book, fill, encode.

Server, simulator and tests drive the same core. Reports of stages go in, each with the moment of
the driver's clock; steps come out, each with the sealed order that every stage must get, and later
its token events. All that happens besides is in one list of `records.event.Event`s, which the
driver drains once a turn. The core reads no clock and sends nothing.
"""

from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import asdict, replace

from sgl_pipeline.args import ACCOUNTINGS
from sgl_pipeline.migration.step_forecast import StepForecast
from sgl_pipeline.pipeline.draft_state import draft_state
from sgl_pipeline.pipeline.migration_control import MigrationControl
from sgl_pipeline.pipeline.offload_rule import OffloadRule
from sgl_pipeline.pipeline.open_step import OpenStep
from sgl_pipeline.pipeline.open_steps import OpenSteps
from sgl_pipeline.pipeline.output_lengths import OutputLengths
from sgl_pipeline.pipeline.pipeline_state import PipelineState, RoomsState, StageState, TierState
from sgl_pipeline.pipeline.recent_load import RecentLoad, RecentWork
from sgl_pipeline.pipeline.request_forecast import Forecaster, RequestForecast
from sgl_pipeline.pipeline.slow_stages import SlowStages
from sgl_pipeline.pipeline.step_history import StepHistory
from sgl_pipeline.pipeline.step_pace import StepPace
from sgl_pipeline.pipeline.throttle_control import ThrottleControl
from sgl_pipeline.records.event import Event
from sgl_pipeline.records.recovery_record import RecoveryRecord
from sgl_pipeline.records.trace import StepRecord
from sgl_pipeline.requests import Request
from sgl_pipeline.scheduling import Explanation, Outlook, StepScheduler
from sgl_pipeline.stage_plan import StagePlan
from sgl_pipeline.wire.lease_orders import PagesLent
from sgl_pipeline.wire.move_orders import SwitchPlan
from sgl_pipeline.wire.stage_messages import StageReport
from sgl_pipeline.wire.stage_orders import OrderStream, SealedOrder
from sgl_pipeline.wire.step_order import StepOrderEncoder
from sgl_pipeline.wire.store_orders import StoreReport


class PipelineCore:
    """One pipeline: its scheduler, its plan, its stream of orders, its steps on the way.

    Requests come and go through `scheduler` (add, abort, pause, resume); steps through this class.
    `events` is what has happened since the last `take_events`; the controls of moves, throttle and
    recovery append to it as well.

    Args:
        scheduler: decides; shared with no other core.
        plan: the first epoch's. It changes with the moves of `migration`, and is always that of the
            next step.
        migration: may move layers; None: never.
        step_forecast: learns step times; None: a new one.
        throttle: changes the knobs of `scheduler`; None: they stay.
        vocab_size: token ids must be below it; None: any are accepted.
    """

    def __init__(
        self,
        scheduler: StepScheduler,
        plan: StagePlan,
        migration: MigrationControl | None = None,
        step_forecast: StepForecast | None = None,
        throttle: ThrottleControl | None = None,
        vocab_size: int | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.plan = plan
        self.migration = migration or MigrationControl.off(plan)
        self.step_forecast = step_forecast or StepForecast(plan)
        self.throttle = throttle
        self.events: list[Event] = []
        self.migration.events = self.events
        if throttle is not None:
            throttle.events = self.events
        self.history = StepHistory(plan.num_stages)
        self.slow_stages = SlowStages(plan.num_stages)
        self.recent_load = RecentLoad()
        # For stages on other hosts: seconds to add to their moments, which gives the driver's
        # clock.
        self.clock_offsets_s: Mapping[int, float] = {}
        self._encoder = StepOrderEncoder()
        self._orders = OrderStream()
        self.open_steps = OpenSteps(scheduler, vocab_size)
        self.has_run = False  # a step of this incarnation has come back from all stages
        self._is_halted = False
        self.is_held = False  # no step is decided, those in flight go on
        self._unfit: list[Request] = []
        self._configured_stages = plan.num_stages
        # Learns from steps with rows that attend elsewhere; None: there are none.
        self.offload: OffloadRule | None = None
        self._refresh_times()

    def halt(self, stages: Iterable[int], reason: str, now_s: float) -> None:
        """`stages` are lost: takes back all steps in flight, and decides none until `start_over`.

        Requests whose keys and values the lost stages cannot compute again by themselves return to
        the queue with the tokens that they have. A layer move that is not past its switch is
        abandoned; one that is has left no stage with all its pages. May be called again before
        `start_over`.
        """
        self.scheduler.tier.lose_stages()
        self.scheduler.forget_in_flight()
        if self.migration.is_switching:
            self.scheduler.lost_pages.lose_all(now_s)
        else:
            self.scheduler.lost_pages.lose_stages(stages, now_s)
        self._stop(reason, now_s)

    def hand_over(self, stage: int, reason: str, now_s: float) -> None:
        """Another worker has the pages of `stage`, and fills it from `start_over` on; as `halt`,
        but only the rows that the stage has kept are lost. No step is in flight, and no layer
        moves."""
        assert not self.open_steps and not self.migration.is_moving
        self.scheduler.tier.interrupt()
        self.scheduler.lost_pages.hand_over(stage, now_s)
        self._stop(reason, now_s)

    def _stop(self, reason: str, now_s: float) -> None:
        self.migration.interrupt(reason, now_s)
        self.open_steps.take_back()
        self.slow_stages.interrupt()
        self.has_run = False
        self._is_halted = True

    def use_stages(self, plan: StagePlan, max_layers: tuple[int, ...], now_s: float) -> None:
        """The stages of `plan` will run the steps to come, more or fewer than before; after `halt`.
        All keys and values are lost, and all rows that were kept.

        Args:
            max_layers: the most layers that each of them may hold at once.
        """
        assert self._is_halted, "steps may be on their way"
        self.scheduler.tier.lose_stages()  # after a handover it still holds pages
        self.plan = plan
        self.scheduler.epoch = plan.epoch
        self.scheduler.use_stages(plan.num_stages, now_s)
        self.migration.start_over(plan, max_layers, now_s)
        self.step_forecast.start_over(plan)
        self.history.start_over(plan.num_stages)
        self.slow_stages = SlowStages(plan.num_stages)
        self._refresh_times()

    def take_unfit(self) -> list[Request]:
        """The requests that were ended since the last call because the pages that are left would
        not hold them even alone."""
        unfit, self._unfit = self._unfit, []
        return unfit

    def start_over(
        self,
        incarnation: int,
        num_pages: int | None = None,
        log_pages: int = 0,
        num_state_slots: int = 0,
    ) -> SealedOrder:
        """Begins the new stream when all stages are back: returns its first order, for all of them.

        Messages of lost stages may still arrive: reports of earlier steps are late.

        Args:
            num_pages: the stages' number of pages now; None: as before, also in the logs.
            log_pages: number of pages that each log has room for.
            num_state_slots: the stages' number of state slots now, with `num_pages`.
        """
        if num_pages is not None:
            self._unfit += self.scheduler.use_pages(num_pages, log_pages, num_state_slots)
        self._encoder.forget()
        self.scheduler.tier.stages_begin_anew()
        self._is_halted = False
        log = self.scheduler.lost_pages.log
        snapshot = self._encoder.snapshot(None if log is None else log.contents())
        return self._orders.start_over(snapshot, incarnation)

    def orders_before_step(self, now_s: float) -> list[SealedOrder]:
        """Orders about stored pages and layer moves that precede the next step. The driver must
        send each to every stage before it asks for that step."""
        if self._is_halted:
            return []
        # First: what a move copies must not change by a load.
        return [*self._store_orders(now_s), *self._move_orders(now_s)]

    def _store_orders(self, now_s: float) -> list[SealedOrder]:
        scheduler = self.scheduler
        may_transfer = not (self.migration.is_moving or self.migration.is_held or self.is_held)
        orders = scheduler.tier.next_orders(now_s, scheduler.step_times, may_transfer=may_transfer)
        return [self._orders.seal(order) for order in orders]

    def _move_orders(self, now_s: float) -> list[SealedOrder]:
        sealed: list[SealedOrder] = []
        if self.migration.is_moving:
            # A stage cannot hand over pages that it still owes.
            self.scheduler.lost_pages.forget_owed(now_s)
        pages_in_use = self.scheduler.pages_in_use
        slots_in_use = self.scheduler.state_slots.in_use
        while (order := self.migration.next_order(now_s, pages_in_use, slots_in_use)) is not None:
            if isinstance(order, SwitchPlan):
                if (log := self.scheduler.lost_pages.log) is not None:
                    log.move(self.plan, order.plan, pages_in_use())
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
        stands = self._is_halted or self.is_held
        microbatch = None if stands else self.scheduler.next_microbatch(now_s)
        if microbatch is None:
            return None
        step = OpenStep(microbatch, self._orders.seal(self._encoder.encode(microbatch)), now_s)
        self.open_steps.add(step)
        self.history.scheduled(microbatch)
        return step

    def take_report(self, report: StageReport, now_s: float) -> list[OpenStep]:
        """Applies a stage's report. The last stage's brings the tokens: returns the steps that are
        booked by it, with `events`, oldest first. Several where a step with leases, which waits for
        the reports of all stages, has kept others waiting (`open_steps.py`).

        A report of a step that was taken back is late, and has no effect. Raises ProtocolError,
        without any other effect, for a report that no stage could send now.
        """
        if self.open_steps.is_late(report):
            return []
        offset_s = self.clock_offsets_s.get(report.stage, 0.0)
        booked = self.open_steps.take(report, self.plan.num_stages, offset_s, now_s)
        self.history.last_steps[report.stage] = report.step_id
        self.history.heard_s[report.stage] = now_s
        self.has_run = self.has_run or bool(self.open_steps.reported)
        if report.offloaded is not None and self.offload is not None:
            self.offload.rates.note(report.offloaded, report.timing.compute_ms * 1e-3, now_s)
        return booked

    def take_lease_report(self, report: PagesLent) -> None:
        """Applies a stage's report on pages that it lends; raises as `LentPages.take`."""
        self.scheduler.tier.lent.take(report, self.plan.num_stages)

    def take_store_report(self, report: StoreReport) -> None:
        """Applies a stage's report on pages that it saved or loaded; raises as `KvTier.take`."""
        self.scheduler.tier.take(report, self.plan)

    def take_events(self) -> list[Event]:
        """All that has happened since the last call, in order.

        Steps come last: those that all stages have reported, and that the driver is done with, so
        that they have their `result_ms`. A move that one of them makes the planner begin follows
        that step.
        """
        if reported := self.open_steps.reported:
            for step in reported:
                self._note(step.record())
            reported.clear()
            self._refresh_times()
        events = self.events[:]
        self.events.clear()
        return events

    def _note(self, record: StepRecord) -> None:
        """Learns from a step that is over."""
        self.events.append(record)
        self.history.add(record)
        self.recent_load.add(record)
        parts = self.step_forecast.note(record)
        self.slow_stages.note(self.step_forecast.speeds, record.finished_s)
        if parts is not None:
            self.migration.note(parts, record.finished_s)

    def _refresh_times(self) -> None:
        """Policies budget by the present knowledge of the plan in use."""
        self.scheduler.step_times = self.step_forecast.slowest(self.plan.layer_counts)

    def explain(self, request_id: str) -> Explanation | None:
        """Explains why a request waits: the rule, its numbers, the request before it; None if it is
        unknown."""
        return self.scheduler.explain(request_id)

    def forecast(self, outlook: Outlook, now_s: float) -> RequestForecast:
        """Predicts when the request of `outlook` will run, by the pace of this plan's recent
        steps."""
        if self.scheduler.pausing.is_paused and not outlook.request.steps_in_flight:
            return RequestForecast(reason="the scheduler is paused until an operator continues it")
        recent = [record for record in self.history.recent if record.epoch == self.plan.epoch]
        pace = StepPace.of(recent)
        if pace is None:
            return RequestForecast(
                reason=f"{len(recent)} steps of this plan have been measured, too few to tell"
            )
        in_flight = [
            (step.microbatch, step.scheduled_s) for step in self.open_steps if not step.finished_s
        ]
        running = [len(one.output_ids) for one in self.scheduler.requests()]
        lengths = OutputLengths(self.recent_load.output_lengths(), running)
        last_end_s = recent[-1].finished_s
        expected_tokens = self.scheduler.drafts.expected_tokens
        return Forecaster(
            outlook, pace, lengths, in_flight, expected_tokens, last_end_s, now_s
        ).run()

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
        tier: TierState | None = None,
        rooms: RoomsState | None = None,
    ) -> PipelineState:
        """A snapshot; `compiling_requests` counts the requests that the driver holds back for now,
        `recoveries` come from its `StageRecovery`, `tier` from its store, `rooms` of its peers."""
        scheduler, history = self.scheduler, self.history
        log = scheduler.lost_pages.log
        slowdowns = dict(enumerate(self.slow_stages.slowdowns))
        return PipelineState(
            now_s=now_s,
            plan=self.plan,
            configured_stages=self._configured_stages,
            is_paused=scheduler.pausing.is_paused,
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
            drafts=draft_state(scheduler, history),
            replayed_tokens=() if log is None else tuple(log.replayed_tokens),
            log_pages=0 if log is None else log.capacity,
            recent_steps=tuple(history.recent),
            stages=tuple(
                StageState(
                    input_wait_ms=wait_ms,
                    compute_ms=compute_ms,
                    last_step=last_step,
                    slowdown=slowdowns.get(stage, 1.0),
                    slow_since_s=self.slow_stages.since_s.get(stage),
                )
                for stage, (wait_ms, compute_ms, last_step) in enumerate(history.stage_totals())
            ),
            # Copies: records of open moves and recoveries still change.
            moves=tuple(map(copy, self.migration.history)),
            throttle=None if self.throttle is None else self.throttle.state(),
            recoveries=tuple(map(copy, recoveries)),
            tier=tier,
            rooms=rooms,
            tenants=() if scheduler.shares is None else scheduler.shares.states(),
            state_slots=scheduler.state_slots.num_slots,
            free_state_slots=scheduler.state_slots.num_free,
            evictable_state_slots=scheduler.state_slots.num_evictable,
        )
