"""One server in virtual time: core, roster, workers, operators, and what befalls them.

The driver here does what `managers/pipeline_scheduler.py` does with real sockets, in the same
order: take, book, fill, pass on.
"""

from collections import Counter, deque
from collections.abc import Callable
from functools import partial
from random import Random

from fault_schedules.draft_rules import DraftRules, MostlyRight
from fault_schedules.fake_front import FakeFront
from fault_schedules.fake_offers import FakePeers
from fault_schedules.fake_transfers import FakeStores
from fault_schedules.fake_worker import FakeWorker
from fault_schedules.outcome import Outcome, outcome_of
from fault_schedules.outsiders import Outsiders
from fault_schedules.room_driver import RoomDriver
from fault_schedules.spoiled_reports import (
    spoiled,
    spoiled_lease_report,
    spoiled_store_report,
)
from fault_schedules.tier_driver import TierDriver
from fault_schedules.virtual_time import EventLoop
from fault_schedules.worker_pool import PoolSizes, WorkerPool
from support.pipelines import new_scheduler

from sgl_pipeline.args import PipelineArgs
from sgl_pipeline.errors import PipelineLost, ProtocolError, StageFailure
from sgl_pipeline.pipeline.migration_control import MigrationControl
from sgl_pipeline.pipeline.open_step import OpenStep
from sgl_pipeline.pipeline.pipeline_core import PipelineCore
from sgl_pipeline.pipeline.recovery import StageRecovery
from sgl_pipeline.pipeline.worker_roster import WorkerRoster
from sgl_pipeline.records.event import Event
from sgl_pipeline.records.move_record import MoveOutcome
from sgl_pipeline.records.trace import StepRecord
from sgl_pipeline.requests import FinishReason
from sgl_pipeline.scheduling import RecoveryLog
from sgl_pipeline.wire.lease_orders import PagesLent
from sgl_pipeline.wire.move_orders import MoveReport
from sgl_pipeline.wire.stage_messages import FromWorker, StageReport
from sgl_pipeline.wire.stage_orders import SealedOrder
from sgl_pipeline.wire.store_orders import StoreReport

CONTEXT_LENGTH = 1_000


class VirtualServer:
    """A server that is about to start, of `args`, for the clients of `front`.

    Args:
        name: its address, where there are several.
        stores: those that it can use; without any it has none.
        peers: where all servers' stages offer pages.
        hurt_chance: how often a worker is hurt soon after pages have come or gone.
        has_faults: workers may be lost and leave, and say what is not so.
        open_rooms: gives its end of the streams to other servers; None: it has no role.
        on_up: called when it begins to serve.
        on_end: called when it has ended.
    """

    def __init__(
        self,
        name: str,
        loop: EventLoop,
        rng: Random,
        tier_rng: Random,
        args: PipelineArgs,
        sizes: PoolSizes,
        front: FakeFront,
        *,
        num_layers: int,
        stores: FakeStores,
        peers: FakePeers,
        hurt_chance: float,
        note: Callable[..., None],
        has_faults: bool = True,
        open_rooms: Callable[["VirtualServer"], RoomDriver] | None = None,
        on_up: Callable[[], None] = lambda: None,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        self.name, self.loop, self._rng, self._tier_rng = name, loop, rng, tier_rng
        self.args, self._sizes, self.front = args, sizes, front
        self.num_layers, self._stores, self._hurt_chance = num_layers, stores, hurt_chance
        self._note, self._has_faults, self._open_rooms = note, has_faults, open_rooms
        self._on_up, self._on_end = on_up, on_end
        self.roster = WorkerRoster(args, num_layers)
        self.core: PipelineCore | None = None
        self.recovery: StageRecovery | None = None
        self.tier: TierDriver | None = None
        self.rooms: RoomDriver | None = None
        self.outsiders: Outsiders | None = None
        self.has_ended = False
        self.pool = WorkerPool(
            name,
            loop,
            rng,
            args,
            sizes,
            stores,
            peers,
            take=self._take,
            lose=self._lose,
            turn=self.turn,
            note=note,
        )
        # How often a report is not what its stage has said, and whose it was.
        self._spoil_chance = rng.choice((0.0, 0.0, 0.0, 0.002)) if has_faults else 0.0
        self._to_blame: set[int] = set()
        # A worker for each stage and perhaps a spare.
        for _ in range(args.stages.num_stages + (rng.random() < 0.2)):
            self.pool.make()
        self._inbox: deque[tuple[int, FromWorker]] = deque()
        self._num_unfit = 0
        self._is_unchecked = False
        self._ended: list[Event] = []  # moves and recoveries

    def start(self) -> None:
        """Its workers begin to start."""
        for worker in self.pool.workers:
            worker.start()

    def check(self) -> None:
        """Asserts what must hold after every turn."""
        if self._is_unchecked and self.core is not None and not self.has_ended:
            self._is_unchecked = False
            self.core.scheduler.check_invariants()
            if self.tier is not None:
                self.tier.check()
            if self.rooms is not None:
                self.rooms.check_now()

    def check_end(self) -> None:
        """Asserts what must hold when nothing happens any more."""
        assert self.core is not None and self.recovery is not None
        if self.has_ended:
            return
        scheduler = self.core.scheduler
        assert self.recovery.unsettled is None, "a recovery never ended"
        assert not self.recovery.leavers, "a worker never left"
        assert scheduler.is_idle, "requests are left, but nothing happens any more"
        if self.rooms is not None:
            self.rooms.check_end()
        if self.tier is not None:
            self.tier.check_end()
        load = scheduler.load()
        assert (load.free_pages, load.waiting_tokens) == (load.total_pages, 0)
        slots = scheduler.state_slots
        assert slots.num_free + slots.num_evictable == slots.num_slots
        assert len(self.roster.spare_workers) >= self.args.recovery.spare_workers
        num_stages = self.args.stages.num_stages
        assert self.core.plan.num_stages == num_stages, "a stage never came back"
        for stage, number in enumerate(self.roster.workers_of_stages):
            assert self.pool.workers[number].held_layers == [*self.core.plan.layers_of(stage)]
        moves = [one.outcome for one in self.core.migration.history]
        assert set(moves) <= {MoveOutcome.DONE, MoveOutcome.ABANDONED}, "a move never ended"
        self._check_events([*self.core.migration.history, *self.recovery.history])

    def outcome(self, seed: int, digest: int) -> Outcome:
        """What happened, after `check_end`."""
        assert self.core is not None and self.recovery is not None
        if not self.pool.lost:
            self._check_leaves(self.recovery)
        return outcome_of(
            self.core,
            self.recovery.history,
            seed=seed,
            digest=digest,
            num_events=self.loop.num_events,
            num_aborts=sum(client.ends[0].kind == "abort" for client in self.front.clients),
            num_lost_workers=len(self.pool.lost),
            num_leaves=self.pool.num_leaves,
            num_refusals=self.pool.num_refusals,
            num_full_links=self.pool.num_full_links,
            num_unfit=self._num_unfit,
            has_given_up=self.has_ended,
            has_tier=self.tier is not None,
            num_moves_in_transfers=self._stores.cut_off["a move"],
            num_lost_transfers=self._stores.cut_off["Regroup"],
            num_evicted_reads=sum(
                store.num_evicted_reads for store in self._stores.by_address.values()
            ),
            num_cut_due_nodes=0 if self.tier is None else self.tier.num_cut_due_nodes,
        )

    def _check_events(self, records: list[Event]) -> None:
        """The core has reported each end of a move or recovery once; `records` are the newest."""
        ended = Counter(map(id, self._ended))
        assert set(ended.values()) <= {1}, "the end of a move or a recovery was reported twice"
        assert {id(one) for one in records} <= set(ended), "an end was not reported"

    def _check_leaves(self, recovery: StageRecovery) -> None:
        """Where no worker was lost, those that were asked to leave cost no request anything."""
        assert not self.has_ended and self._num_unfit == 0
        for record in recovery.history:
            assert record.is_planned and not record.has_other_stages
            assert record.num_replay_tokens == 0, "tokens computed again"
            # States do not go to another worker.
            assert record.num_tokens == 0 or self.args.scheduling.num_state_slots

    # What the scheduler process does

    def _take(self, number: int, message: FromWorker) -> None:
        """A worker's message has arrived. The scheduler looks at once, or a while later at all."""
        self._inbox.append((number, message))
        self.turn_soon()

    def turn_soon(self) -> None:
        """A turn at once, or a while later."""
        if self._rng.random() < 0.7:
            self.turn()
        else:
            self.loop.after(self._rng.random() * 0.02, self.turn)

    def turn(self) -> None:
        """A turn of the loop."""
        self._is_unchecked = True
        booked: list[OpenStep] = []
        while self._inbox and not self.has_ended:
            number, message = self._inbox.popleft()
            if self.pool.is_gone(number) or number in self._to_blame:
                continue
            if self.core is None or self.recovery is None:
                self._bring_up(message)
            elif isinstance(message, StageReport):
                booked += self._take_report(self.core, number, message)
            elif isinstance(message, StoreReport):
                self._take_store_report(self.core, number, message)
            elif isinstance(message, PagesLent):
                self._take_lease_report(self.core, number, message)
            elif isinstance(message, MoveReport):
                self.core.migration.take(message, self.loop.now_s)
            else:
                self.pool.tell(self.recovery.take(message, self.loop.now_s, number))
        if self.core is not None and not self.has_ended:
            self._go_on(self.core, booked)

    def _take_report(self, core: PipelineCore, number: int, report: StageReport) -> list[OpenStep]:
        """Books a report, which may have been spoiled or come twice: then it costs its worker."""
        booked: list[OpenStep] = []
        for one in spoiled(report, self._rng, self._spoil_chance):
            is_due = any(step.microbatch.step_id == report.step_id for step in core.open_steps)
            try:
                steps = core.take_report(one, self.loop.now_s)
                assert one is report or not is_due, "a spoiled report was booked"
            except ProtocolError as error:
                if one is report:
                    raise
                self._blame(number, error)
                break
            booked += steps
        return booked

    def _take_store_report(self, core: PipelineCore, number: int, report: StoreReport) -> None:
        """As `_take_report`."""
        self._hurt_soon()
        first_transfer = core.scheduler.tier._first_transfer
        for one in spoiled_store_report(report, self._rng, self._spoil_chance):
            try:
                core.take_store_report(one)
                assert one is report or one.transfer < first_transfer, "a spoiled report was taken"
            except ProtocolError as error:
                if one is report:
                    raise
                self._blame(number, error)
                break

    def _take_lease_report(self, core: PipelineCore, number: int, report: PagesLent) -> None:
        """As `_take_report`. One about a lease that is over means nothing, whatever it says."""
        self._hurt_soon()
        for one in spoiled_lease_report(report, self._tier_rng, self._spoil_chance):
            is_lent = one.lease in core.scheduler.tier.lent._leases
            try:
                core.take_lease_report(one)
                assert one is report or not is_lent, "a spoiled report was taken"
            except ProtocolError as error:
                if one is report:
                    raise
                self._blame(number, error)
                break

    def _hurt_soon(self) -> None:
        """Now and then a worker is hurt behind what has just come."""
        assert self.recovery is not None
        if self._tier_rng.random() < self._hurt_chance:
            hurt = partial(self.pool.hurt, self.recovery)
            self.loop.after(self._tier_rng.random() * 0.3, hurt)

    def _blame(self, number: int, error: ProtocolError) -> None:
        """A report of the worker was refused: it is given up a little later."""
        self._to_blame.add(number)
        lose = partial(self._lose, self.pool.workers[number], str(error))
        self.loop.after(self._rng.random() * 0.1, lose)

    def _go_on(self, core: PipelineCore, booked: list[OpenStep]) -> None:
        assert self.recovery is not None
        self._go_on_recovering(self.recovery)
        if self.has_ended:
            return
        if self.tier is not None:
            self.tier.go_on()
        if self.rooms is not None:
            self.rooms.serve()
        self._fill(core)
        if self.rooms is not None and self.rooms.has_news:
            self.rooms.serve()
            self._fill(core)
        if self.recovery.settle(self.loop.now_s) is not None:
            self.loop.after(0.0, self.turn)  # for workers that wait to leave
        for step in booked:
            self._note(step.microbatch.step_id, [event.token_ids for event in step.events])
            self.front.send_events(step.events)
        unfit = core.take_unfit()
        self._num_unfit += len(unfit)
        for request in [*unfit, *core.scheduler.end_overdue(self.loop.now_s)]:
            assert request.finish is not None
            self.front.end(request, request.finish)
        for event in core.take_events():
            if isinstance(event, StepRecord):
                assert 1 <= len(event.stages) <= self.args.stages.num_stages
            elif event.is_over:
                self._ended.append(event)

    def _fill(self, core: PipelineCore) -> None:
        """Sends what precedes steps, and steps while there are any."""
        loads, saves = core.scheduler.tier.loads, core.scheduler.tier.saves
        num_pages = loads.loading_pages + saves.saving_pages
        was_moving = core.migration.is_moving
        for order in core.orders_before_step(self.loop.now_s):
            self._broadcast(order)
        if num_pages and core.migration.is_moving and not loads.loading_pages + saves.saving_pages:
            self._stores.cut_off["a move"] += 1
        if was_moving and not core.migration.is_moving:
            # For transfers, which may go on now. The loop of a server never rests.
            self.loop.after(0.0, self.turn)
        while (step := core.next_step(self.loop.now_s)) is not None:
            self._broadcast(step.order)

    def _go_on_recovering(self, recovery: StageRecovery) -> None:
        for _ in range(recovery.num_wanted_workers(self.loop.now_s)):
            self.pool.ask_for_worker(recovery)
        try:
            self.pool.tell(recovery.reform(self.loop.now_s))
        except PipelineLost as failure:
            self._give_up(failure)
            return
        order = recovery.start_order(self.loop.now_s)
        if order is not None:
            self._broadcast(order)
            if self._rng.random() < 0.4:  # while what was lost is computed again
                self.loop.after(self._rng.random() * 0.2, partial(self.pool.hurt, recovery))

    def _lose(self, worker: FakeWorker, reason: str) -> None:
        """The scheduler has noticed that a worker has died, or gives up one that hangs."""
        if self.recovery is None or self.has_ended or self.pool.is_gone(worker.number):
            return
        worker.die()
        self.pool.lost.add(worker.number)
        self.pool.look_again_later()
        self._note("lost", worker.number, reason)
        try:
            self.pool.tell(self.recovery.lose(worker.number, reason, self.loop.now_s))
        except StageFailure as failure:
            self._give_up(failure)
        else:
            self.turn()

    def _give_up(self, failure: StageFailure | PipelineLost) -> None:
        """The server ends: every live request gets an error."""
        status = 503 if isinstance(failure, PipelineLost) else 500
        self.end(FinishReason("abort", message=str(failure), status_code=status))

    def end(self, finish: FinishReason) -> None:
        """The process ends, and every live request with it, by `finish`."""
        self.has_ended = True
        self.pool.end()
        for client in self.front.clients:
            if not self.front.has_ended(client):
                self.front.end(client.request, finish)
        self._on_end()

    def _broadcast(self, order: SealedOrder) -> None:
        for worker in self.roster.workers_of_stages:
            self.pool.send(worker, order)

    def _bring_up(self, message: FromWorker) -> None:
        self.pool.tell(self.roster.take(message))
        capacity = self.roster.capacity()
        if capacity is None:
            return
        assert capacity.num_pages == self._sizes.num_pages
        num_stages, log = self.args.stages.num_stages, None
        if self._sizes.log_pages is not None:
            page_size = self.args.scheduling.page_size
            log = RecoveryLog(num_stages, page_size, capacity.log_pages)
        scheduler = new_scheduler(
            self.args.scheduling,
            self.args.throttle,
            num_pages=capacity.num_pages,
            num_stages=num_stages,
            context_length=CONTEXT_LENGTH,
            log=log,
        )
        DraftRules(scheduler)
        if self.args.scheduling.draft_tokens > 1:  # else they are looked up
            scheduler.drafts.source_of = partial(MostlyRight, num_layers=self.num_layers)
        migration = MigrationControl.of(self.args.migration, capacity.plan)
        self.core = PipelineCore(scheduler, capacity.plan, migration)
        self.recovery = StageRecovery(self.core, self.roster, self.args.recovery)
        if self._open_rooms is not None:
            self.rooms = self._open_rooms(self)
        self.outsiders = Outsiders(
            self.core,
            self.front,
            self.loop,
            self._rng,
            self.args,
            num_layers=self.num_layers,
            turn=self.turn,
            note=self._note,
            rooms=self.rooms,
        )
        self.outsiders.begin()
        if self._stores.by_address:
            self.tier = TierDriver(
                self.core,
                self._stores,
                self.loop,
                self._tier_rng,
                turn=self.turn,
                note=self._note,
            )
            self.tier.begin()
        if self._has_faults:
            self.pool.begin_faults(self.recovery)
        self._on_up()
