"""A pipeline in virtual time: the server's own `PipelineCore` over stages that only take time.

As in `managers/pipeline_scheduler.py`, what has arrived is taken, what has finished booked, then
steps are sent while there is work and room. A step passes the stages in order and first in first
out, so its times follow from the stages' last ones without a calendar of events: the only events
are arrivals and results, and what is said of layers that move (`virtual_moves.py`) and of pages in
a store (`virtual_store.py`). Equal inputs give equal steps and equal times.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import msgspec

from sgl_pipeline.migration.step_forecast import StepForecast
from sgl_pipeline.pipeline.migration_control import MigrationControl
from sgl_pipeline.pipeline.open_step import OpenStep
from sgl_pipeline.pipeline.pipeline_core import PipelineCore
from sgl_pipeline.records.stage_timing import StageTiming
from sgl_pipeline.records.trace import StepRecord
from sgl_pipeline.scheduling import StepScheduler
from sgl_pipeline.simulator.page_copies import MoveCosts
from sgl_pipeline.simulator.page_transfers import PageOrder, PagePlace
from sgl_pipeline.simulator.pipeline_costs import PipelineTiming
from sgl_pipeline.simulator.remote_attention import RemoteAttention
from sgl_pipeline.simulator.simulation import SimulatedStep, Simulation
from sgl_pipeline.simulator.stage_clock import SharedStageClock, Slowdown, StageClock
from sgl_pipeline.simulator.step_shape import StepShape
from sgl_pipeline.simulator.virtual_clients import VirtualClients
from sgl_pipeline.simulator.virtual_move import WrittenPlaces
from sgl_pipeline.simulator.virtual_moves import VirtualMoves
from sgl_pipeline.simulator.workload import SimulatedRequest
from sgl_pipeline.stage_plan import StagePlan
from sgl_pipeline.wire.move_orders import MoveOrder
from sgl_pipeline.wire.stage_messages import StageReport

# More than any wait of the scheduler's while nothing is on its way (`kv_tier.REST_S`).
STUCK_S = 60.0


@dataclass(frozen=True, slots=True)
class _Trip:
    """A step on its way, whose times are known when it leaves: its tokens are back at `back_s`."""

    step: OpenStep
    shape: StepShape
    timings: tuple[StageTiming, ...]
    back_s: float


class VirtualPipeline:
    """Runs one workload to its end.

    Args:
        scheduler: a new one; the caller chose its policy, pages and stages.
        costs: how long everything takes; has as many stages as the scheduler plans for.
        forecast: learns what steps take; None: nothing does.
        migration: may move layers; None: never.
        move_costs: how long that takes.
        slowdowns: of stages, for some time.
        wishes: an operator's plans, each with its moment.
        store: the one that the scheduler's tier uses; None: it uses none.
        remote: computes attention of some requests elsewhere; None: of none.
    """

    def __init__(
        self,
        scheduler: StepScheduler,
        costs: PipelineTiming,
        forecast: StepForecast | None = None,
        migration: MigrationControl | None = None,
        move_costs: MoveCosts | None = None,
        slowdowns: Sequence[Slowdown] = (),
        wishes: Sequence[tuple[float, tuple[int, ...]]] = (),
        store: PagePlace | None = None,
        remote: RemoteAttention | None = None,
    ) -> None:
        plan = StagePlan(0, costs.layer_counts)
        forecast = forecast or StepForecast(plan, learns=False)
        self.clients = VirtualClients()
        scheduler.drafts.source_of = self.clients.drafts_of
        self._core = PipelineCore(scheduler, plan, migration, forecast)
        self._costs = costs
        self._remote = remote
        fills_waits = remote is not None and remote.fills_waits
        clock = SharedStageClock if fills_waits else StageClock
        self._clocks = [clock() for _ in range(costs.num_stages)]
        self._moves = VirtualMoves(
            move_costs or MoveCosts(), plan, self._clocks, costs.host.transit_s
        )
        self._store = store
        self._orders = msgspec.msgpack.Decoder(MoveOrder | PageOrder)
        self._slowdowns = tuple(slowdowns)
        self._wishes = deque(sorted(wishes))
        self._in_flight: deque[_Trip] = deque()
        self._steps: list[SimulatedStep] = []
        # The scheduler process is busy until then: whatever happens before, it sees at that time.
        self._scheduler_free_s = 0.0
        self._moved_s = 0.0  # the last moment at which anything was on its way

    def run(
        self,
        workload: Iterable[SimulatedRequest],
        on_progress: Callable[[int, float], None] = lambda finished, now_s: None,
        most_steps: int | None = None,
    ) -> Simulation:
        """Serves all requests; `on_progress` gets the number that have ended and the time.

        With `most_steps` it breaks off once that many steps have come back: requests are left.
        """
        for asked in workload:
            self.clients.expect(asked, asked.arrival_s)
        while (now_s := self.next_turn_s) < float("inf"):
            if most_steps is not None and len(self._steps) >= most_steps:
                break
            now_s = self.turn(now_s)
            on_progress(self.clients.num_ended, now_s)
        else:
            assert self.is_idle, "requests are left, but nothing can run"
        return self.result()

    @property
    def scheduler(self) -> StepScheduler:
        return self._core.scheduler

    @property
    def next_turn_s(self) -> float:
        """The moment of the next `turn`, if no request comes before; infinity if nothing will
        happen that requests, or a layer move, wait for."""
        if not self._is_under_way:
            return float("inf")
        return max(self._next_event_s(), self._scheduler_free_s)

    def turn(self, now_s: float) -> float:
        """Takes what has happened by `now_s` and sends what can be sent, once the scheduler process
        is free; returns the moment at which it has booked the results."""
        now_s = max(now_s, self._scheduler_free_s)
        self.clients.arrive(self.scheduler, now_s)
        now_s = self._take_results(now_s)
        self._take_moves(now_s)
        self._fill(now_s)
        self._check_progress(now_s)
        return now_s

    def result(self) -> Simulation:
        """All that has happened."""
        scheduler = self.scheduler
        return Simulation(
            tuple(self.clients.served),
            tuple(self._steps),
            scheduler.num_retractions,
            self._core.migration.history,
            None if self._store is None else scheduler.tier.counts,
        )

    @property
    def _is_under_way(self) -> bool:
        """True if something will happen that requests, or a layer move, wait for. For a store,
        requests wait a bounded time."""
        if self._in_flight or self._moves.is_open or self.clients.next_arrival_s < float("inf"):
            return True
        return self._store is not None and (not self.is_idle or self._store.is_awaited)

    def _check_progress(self, now_s: float) -> None:
        """Asserts that requests do not wait for ever while nothing is on its way."""
        if self._store is None:
            return
        if self.is_idle or self._in_flight or self._store.is_open:
            self._moved_s = now_s
        assert now_s - self._moved_s < STUCK_S, "requests are left, but nothing can run"

    @property
    def is_idle(self) -> bool:
        """True if no request waits or runs."""
        return self.scheduler.is_idle

    def _next_event_s(self) -> float:
        arrival_s = self.clients.next_arrival_s
        result_s = self._in_flight[0].back_s if self._in_flight else float("inf")
        if not self._moves.is_open and not self._wishes and self._store is None:
            return min(arrival_s, result_s)
        wish_s = self._wishes[0][0] if self._wishes else float("inf")
        moved_s = self._moves.next_report_s()
        return min(arrival_s, result_s, wish_s, moved_s, self._next_transfer_s())

    def _next_transfer_s(self) -> float:
        store = self._store
        if store is None:
            return float("inf")
        waits = store.is_awaited or not (self._in_flight or self.is_idle)
        look_s = self._scheduler_free_s + store.look_s if waits else float("inf")
        return min(store.next_event_s(), look_s)

    def _take_results(self, now_s: float) -> float:
        """Books what has come back by `now_s`; returns when the scheduler is done with that."""
        while self._in_flight and self._in_flight[0].back_s <= now_s:
            trip = self._in_flight.popleft()
            step = trip.step
            for report in self._reports(trip):
                self._core.take_report(report, now_s)
            result_s = self._costs.host.result_s(trip.shape.num_samples)
            step.result_ms = result_s * 1e3
            (record,) = (one for one in self._core.take_events() if isinstance(one, StepRecord))
            self._steps.append(
                SimulatedStep(
                    trip.shape,
                    record,
                    tuple(timing.activations_s for timing in trip.timings),
                    tuple(timing.done_s for timing in trip.timings),
                )
            )
            now_s += result_s
            for event in step.events:
                self.clients.note_tokens(event.request, len(event.token_ids), now_s)
        self._scheduler_free_s = now_s
        return now_s

    def _reports(self, trip: _Trip) -> list[StageReport]:
        """The stages' report of a step that has passed them all."""
        microbatch = trip.step.microbatch
        tokens = tuple(
            token
            for chunk in microbatch.chunks
            for token in self.clients.next_tokens(chunk.request, chunk.num_samples)
        )
        last = len(trip.timings) - 1
        return [
            StageReport(
                stage=stage,
                step_id=microbatch.step_id,
                epoch=microbatch.epoch,
                timing=timing,
                token_ids=tokens if stage == last else None,
            )
            for stage, timing in enumerate(trip.timings)
        ]

    def _take_moves(self, now_s: float) -> None:
        """Books what stages say of a move, and begins what an operator wants."""
        migration = self._core.migration
        for report in self._moves.take_reports(now_s):
            migration.take(report, now_s)
        while self._wishes and self._wishes[0][0] <= now_s:
            migration.move_to(self._wishes.popleft()[1], now_s)

    def _fill(self, now_s: float) -> None:
        if self._store is not None:
            self._store.exchange(self._core, now_s)
        for sealed in self._core.orders_before_step(now_s):
            self._obey(self._orders.decode(sealed.payload), now_s)
        while (step := self._core.next_step(now_s)) is not None:
            schedule_s = self._costs.host.schedule_s(len(step.microbatch.chunks))
            step.schedule_ms = schedule_s * 1e3
            now_s += schedule_s
            self._in_flight.append(self._send(step, now_s))
        self._scheduler_free_s = now_s

    def _obey(self, order: MoveOrder | PageOrder, sent_s: float) -> None:
        """All stages take `order` after the steps before it."""
        if isinstance(order, PageOrder):
            assert self._store is not None, "the tier uses a store that the pipeline does not have"
            taken_s = [max(clock.free_s, sent_s) for clock in self._clocks]
            self._store.take(order, self._core.plan, taken_s)
            return
        self._moves.take(order, sent_s)
        if self._core.plan.layer_counts != self._costs.layer_counts:
            # Times of steps that were sent are known already.
            self._costs = self._costs.under(self._core.plan.layer_counts)

    def _send(self, step: OpenStep, sent_s: float) -> _Trip:
        """Runs a step that leaves the scheduler at `sent_s` through all stages."""
        microbatch = step.microbatch
        costs = self._costs
        shape = StepShape.of(microbatch) if self._remote is None else self._remote.shape(microbatch)
        prepare_s = costs.host.prepare_s(len(microbatch.chunks))
        compute_s = costs.stage_seconds(shape, microbatch.step_id)
        written = None
        if self._moves.is_copying:
            written = WrittenPlaces.of(microbatch, self._moves.page_size)
        timings = []
        input_s = sent_s
        for stage, clock in enumerate(self._clocks):
            start_s = costs.host.start_s(clock.free_s, sent_s, input_s, prepare_s)
            busy_s = self._slowed(stage, start_s, compute_s[stage])
            if self._moves.is_open:
                self._moves.idle(stage, start_s)
                busy_s += self._wait_s(stage, start_s, shape)
            remote_s = 0.0 if self._remote is None else self._remote.wait_s(stage, shape)
            free_s = clock.free_s
            start_s, end_s = clock.run(start_s, busy_s, remote_s)
            timing = self._timing(free_s, sent_s, prepare_s, start_s, end_s)
            timings.append(timing)
            if written is not None:
                clock.free_s = self._moves.ran(stage, end_s - start_s, end_s, written)
            if self._store is not None:
                self._store.ran(stage, start_s, end_s)
            if stage + 1 < costs.num_stages:
                link = costs.link_after(stage)
                transfer_s = link.transfer_s(shape.num_tokens)
                if self._moves.is_open:
                    transfer_s += self._moves.delay_transfer(stage, transfer_s)
                clock.link_free_s = max(timing.done_s, clock.link_free_s) + transfer_s
                input_s = clock.link_free_s + link.latency_s
        back_s = costs.link_after(costs.num_stages - 1).latency_s + costs.host.transit_s
        return _Trip(step, shape, tuple(timings), timings[-1].done_s + back_s)

    def _slowed(self, stage: int, start_s: float, seconds: float) -> float:
        for slowdown in self._slowdowns:
            seconds *= slowdown.factor_at(stage, start_s)
        return seconds

    def _wait_s(self, stage: int, start_s: float, shape: StepShape) -> float:
        """Seconds for which a step waits on a stage for pages of layers that moved there."""
        layer = self._moves.first_new_layer(stage)
        if layer is None:
            return 0.0
        before_s = self._costs.seconds_before(shape, stage, layer)
        reached_s = start_s + self._slowed(stage, start_s, before_s)
        return self._moves.wait(stage, reached_s) - reached_s

    def _timing(
        self, free_s: float, sent_s: float, prepare_s: float, start_s: float, end_s: float
    ) -> StageTiming:
        """One stage's moments."""
        return StageTiming(
            free_s=free_s,
            plan_s=max(free_s, sent_s),
            inputs_s=self._costs.host.inputs_s(free_s, sent_s, prepare_s),
            activations_s=start_s,
            layers_s=end_s,
            done_s=end_s,
            sent_s=end_s,
        )
