"""A whole server in virtual time, made from one seed: core, roster, workers, clients, faults.

The driver here does what `managers/pipeline_scheduler.py` does with real sockets, in the same
order: take, book, fill, pass on. After every event the scheduler's invariants must hold; in the end
every request has ended exactly once, with the tokens that it gets alone, and all pages are back.
"""

import zlib
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

from fault_schedules.fake_front import (
    MAX_NEW_TOKENS,
    FakeFront,
    make_clients,
    returning_clients,
)
from fault_schedules.fake_moves import FakePageLinks, LoadTempo
from fault_schedules.fake_row_links import FakeRowLinks
from fault_schedules.fake_transfers import FakeStores
from fault_schedules.fake_worker import FakeWorker, WorkerTempo
from fault_schedules.outcome import Outcome, outcome_of
from fault_schedules.outsiders import Outsiders
from fault_schedules.random_args import random_args
from fault_schedules.spoiled_reports import spoiled, spoiled_store_report
from fault_schedules.tier_driver import TierDriver, random_stores
from fault_schedules.virtual_time import DelayedPipe, EventLoop
from support.pipelines import new_scheduler

from sgl_pipeline.errors import (
    PipelineLost,
    ProtocolError,
    StageFailure,
)
from sgl_pipeline.pipeline.migration_control import MigrationControl
from sgl_pipeline.pipeline.open_step import OpenStep
from sgl_pipeline.pipeline.pipeline_core import PipelineCore
from sgl_pipeline.pipeline.recovery import StageRecovery
from sgl_pipeline.pipeline.worker_roster import Addressed, WorkerRoster
from sgl_pipeline.records.event import Event
from sgl_pipeline.records.move_record import MoveOutcome
from sgl_pipeline.records.trace import StepRecord
from sgl_pipeline.requests import FinishReason
from sgl_pipeline.scheduling import RecoveryLog
from sgl_pipeline.wire.move_orders import MoveReport
from sgl_pipeline.wire.stage_messages import FromWorker, Shutdown, StageReport
from sgl_pipeline.wire.stage_orders import SealedOrder
from sgl_pipeline.wire.store_orders import StoreReport

MAX_EVENTS = 150_000
MOST_KILLS = 6
MOST_LEAVES = 4
# Of the seeds, those with a store beyond the pool.
TIER_SHARE = 1 / 3
# A worker that was told to end is killed when it does not.
STOP_TIMEOUT_S = 2.0
CONTEXT_LENGTH = 1_000


def has_tier(seed: int) -> bool:
    """True if the world of `seed` has a store beyond the pool."""
    return Random(f"tiers {seed}").random() < TIER_SHARE


def run_seed(seed: int) -> Outcome:
    """Makes the world of `seed` and lets it run to its end.

    Raises AssertionError or ProtocolError where the pipeline did what it may not.
    """
    return World(seed).run()


class World:
    """One seed's server and its clients."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._rng = rng = Random(seed)
        self._loop = EventLoop()
        # Its own, so that seeds without tiers are what they would be without this part.
        self._tier_rng = tier_rng = Random(f"worlds with tiers {seed}")
        self._args = random_args(rng)
        if has_tier(seed) and tier_rng.random() < 0.9:
            scheduling = replace(self._args.scheduling, radix_cache=True)
            self._args = replace(self._args, scheduling=scheduling)
        self._num_stages = self._args.stages.num_stages
        self._num_layers = self._num_stages + rng.choice((0, 1, 2, 4))
        max_tokens = rng.choice((4, 12, 30))
        clients = make_clients(rng, rng.randint(1, 40), rng.choice((0.0, 1.0, 5.0)), max_tokens)
        self._stores = FakeStores(tier_rng)
        # How often a worker is hurt soon after pages have come or gone.
        self._hurt_chance = tier_rng.choice((0.0, 0.0, 0.05, 0.2))
        self._tier: TierDriver | None = None
        if has_tier(seed):
            clients += returning_clients(tier_rng, clients, self._num_layers, 2 * max_tokens)
            page_size = self._args.scheduling.page_size
            self._stores = random_stores(tier_rng, clients, self._num_layers, page_size)
        self._front = FakeFront(clients, self._num_layers)
        # Room for the largest request and little more, or for all of them.
        most = 2 * max_tokens + MAX_NEW_TOKENS
        self._num_pages = -(-most // self._args.scheduling.page_size) * rng.choice((1, 1, 2, 16))
        self._num_pages += rng.randint(0, 3)
        if has_tier(seed):
            self._num_pages *= tier_rng.choice((1, 1, 2, 3))
        self._is_room_short = rng.random() < 0.5
        # Of how many pages each stage keeps the rows that it sends; None: of none.
        self._log_pages = rng.choice(
            (None, self._num_pages, self._num_pages, self._num_pages // 2, 4, 0)
        )
        if has_tier(seed) and tier_rng.random() < 0.4:
            # Owed pages leave the log while others come from the store behind them.
            self._log_pages = max(1, self._num_pages // tier_rng.choice((2, 3, 4)))
        self._roster = WorkerRoster(self._args, self._num_layers)
        self._core: PipelineCore | None = None
        self._recovery: StageRecovery | None = None
        self._gave_up: StageFailure | PipelineLost | None = None
        # When the source of workers has none, in virtual seconds since the start of serving.
        self._droughts_s: list[tuple[float, float]] = []
        self._row_links = FakeRowLinks(partial(self._pipe, mean_s=0.01))
        self._page_links = FakePageLinks(partial(self._pipe, mean_s=0.01))
        self._workers: list[FakeWorker] = []
        self._to_worker: dict[int, DelayedPipe] = {}
        self._lost: set[int] = set()
        self._dismissed: set[int] = set()
        self._num_leaves = 0
        # How often a report is not what its stage has said, and whose it was.
        self._spoil_chance = rng.choice((0.0, 0.0, 0.0, 0.002))
        self._to_blame: set[int] = set()
        # A worker for each stage and perhaps a spare.
        for _ in range(self._num_stages + (rng.random() < 0.2)):
            self._make_worker()
        self._inbox: deque[tuple[int, FromWorker]] = deque()
        self._digest = 0
        self._num_refusals = self._num_unfit = 0
        self._ended: list[Event] = []  # moves and recoveries

    def run(self) -> Outcome:
        """Lets everything happen, and judges it."""
        for worker in self._workers:
            worker.start()
        self._loop.run(MAX_EVENTS, self._check)
        assert self._core is not None and self._recovery is not None
        if self._gave_up is not None:
            return self._outcome()
        scheduler = self._core.scheduler
        assert self._recovery.unsettled is None, "a recovery never ended"
        assert not self._recovery.leavers, "a worker never left"
        assert scheduler.is_idle, "requests are left, but nothing happens any more"
        if self._tier is not None:
            self._tier.check_end()
        load = scheduler.load()
        assert (load.free_pages, load.waiting_tokens) == (load.total_pages, 0)
        assert len(self._roster.spare_workers) >= self._args.recovery.spare_workers
        assert self._core.plan.num_stages == self._num_stages, "a stage never came back"
        for stage, number in enumerate(self._roster.workers_of_stages):
            assert self._workers[number].held_layers == [*self._core.plan.layers_of(stage)]
        moves = [one.outcome for one in self._core.migration.history]
        assert set(moves) <= {MoveOutcome.DONE, MoveOutcome.ABANDONED}, "a move never ended"
        self._check_events([*self._core.migration.history, *self._recovery.history])
        return self._outcome()

    def _outcome(self) -> Outcome:
        assert self._core is not None and self._recovery is not None
        self._front.check()
        if not self._lost:
            self._check_leaves(self._recovery)
        self._note([client.ends for client in self._front.clients])
        return outcome_of(
            self._core,
            self._recovery.history,
            seed=self._seed,
            digest=self._digest,
            num_events=self._loop.num_events,
            num_aborts=sum(client.ends[0].kind == "abort" for client in self._front.clients),
            num_lost_workers=len(self._lost),
            num_leaves=self._num_leaves,
            num_refusals=self._num_refusals,
            num_unfit=self._num_unfit,
            has_given_up=self._gave_up is not None,
            has_tier=self._tier is not None,
            num_moves_in_transfers=self._stores.cut_off["a move"],
            num_lost_transfers=self._stores.cut_off["Regroup"],
            num_evicted_reads=sum(
                store.num_evicted_reads for store in self._stores.by_address.values()
            ),
            num_cut_due_nodes=0 if self._tier is None else self._tier.num_cut_due_nodes,
        )

    def _check_events(self, records: list[Event]) -> None:
        """The core has reported each end of a move or recovery once; `records` are the newest."""
        ended = Counter(map(id, self._ended))
        assert set(ended.values()) <= {1}, "the end of a move or a recovery was reported twice"
        assert {id(one) for one in records} <= set(ended), "an end was not reported"

    def _check_leaves(self, recovery: StageRecovery) -> None:
        """Where no worker was lost, those that were asked to leave cost no request anything."""
        assert self._gave_up is None and self._num_unfit == 0
        for record in recovery.history:
            assert record.is_planned and not record.has_other_stages
            assert record.num_tokens == record.num_replay_tokens == 0, "tokens computed again"

    def _pipe(self, deliver: Callable[[Any], None], mean_s: float) -> DelayedPipe:
        return DelayedPipe(self._loop, self._rng, self._rng.choice((0.0, mean_s)), deliver)

    def _make_worker(self) -> FakeWorker:
        """The next one. It is not started yet."""
        rng, number = self._rng, len(self._workers)
        tempo = WorkerTempo(
            start_s=rng.choice((0.0, 1.0)),
            step_s=rng.choice((0.001, 0.05)),
            stall_chance=rng.choice((0.0, 0.0, 0.1)),
            stall_s=1.0,
            load=LoadTempo(rng.choice((0.0, 0.1, 1.0)), rng.choice((0.0, 0.0, 0.0, 0.2))),
        )
        worker = FakeWorker(
            number,
            self._loop,
            rng,
            tempo,
            self._pipe(partial(self._take, number), 0.01),
            page_size=self._args.scheduling.page_size,
            room_of=self._room_of,
            log_pages=self._log_pages,
            row_links=self._row_links,
            page_links=self._page_links,
            stores=self._stores,
        )
        self._workers.append(worker)
        self._to_worker[number] = self._pipe(worker.take, 0.01)
        return worker

    def _room_of(self, num_stages: int) -> int:
        """Fewer stages have room for fewer pages, where the seed is of such a model."""
        if not self._is_room_short:
            return self._num_pages
        return max(1, self._num_pages * num_stages // self._num_stages)

    def _check(self) -> None:
        if self._core is not None and self._gave_up is None:
            self._core.scheduler.check_invariants()
            if self._tier is not None:
                self._tier.check()

    def _note(self, *facts: object) -> None:
        text = f"{self._loop.now_s!r} {facts!r}".encode()
        self._digest = zlib.crc32(text, self._digest)

    # What the scheduler process does

    def _take(self, number: int, message: FromWorker) -> None:
        """A worker's message has arrived. The scheduler looks at once, or a while later at all."""
        self._inbox.append((number, message))
        if self._rng.random() < 0.7:
            self._turn()
        else:
            self._loop.after(self._rng.random() * 0.02, self._turn)

    def _turn(self) -> None:
        booked: list[OpenStep] = []
        while self._inbox and self._gave_up is None:
            number, message = self._inbox.popleft()
            if number in self._lost | self._dismissed | self._to_blame:
                continue
            if self._core is None or self._recovery is None:
                self._bring_up(message)
            elif isinstance(message, StageReport):
                booked += self._take_report(self._core, number, message)
            elif isinstance(message, StoreReport):
                self._take_store_report(self._core, number, message)
            elif isinstance(message, MoveReport):
                self._core.migration.take(message, self._loop.now_s)
            else:
                self._tell(self._recovery.take(message, self._loop.now_s, number))
        if self._core is not None and self._gave_up is None:
            self._go_on(self._core, booked)

    def _take_report(self, core: PipelineCore, number: int, report: StageReport) -> list[OpenStep]:
        """Books a report, which may have been spoiled or come twice: then it costs its worker."""
        booked: list[OpenStep] = []
        for one in spoiled(report, self._rng, self._spoil_chance):
            is_due = any(step.microbatch.step_id == report.step_id for step in core.open_steps)
            try:
                step = core.take_report(one, self._loop.now_s)
                assert one is report or not is_due, "a spoiled report was booked"
            except ProtocolError as error:
                if one is report:
                    raise
                self._blame(number, error)
                break
            booked += [] if step is None else [step]
        return booked

    def _take_store_report(self, core: PipelineCore, number: int, report: StoreReport) -> None:
        """As `_take_report`."""
        if self._tier_rng.random() < self._hurt_chance:
            self._loop.after(self._tier_rng.random() * 0.3, self._hurt_workers)
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

    def _blame(self, number: int, error: ProtocolError) -> None:
        """A report of the worker was refused: it is given up a little later."""
        self._to_blame.add(number)
        lose = partial(self._lose, self._workers[number], str(error))
        self._loop.after(self._rng.random() * 0.1, lose)

    def _go_on(self, core: PipelineCore, booked: list[OpenStep]) -> None:
        self._go_on_recovering()
        if self._gave_up is not None:
            return
        if self._tier is not None:
            self._tier.go_on()
        self._send_orders(core)
        while (step := core.next_step(self._loop.now_s)) is not None:
            self._broadcast(step.order)
        assert self._recovery is not None
        if self._recovery.settle(self._loop.now_s) is not None:
            self._loop.after(0.0, self._turn)  # for workers that wait to leave
        for step in booked:
            self._note(step.microbatch.step_id, [event.token_ids for event in step.events])
            self._front.send_events(step.events)
        unfit = core.take_unfit()
        self._num_unfit += len(unfit)
        for request in [*unfit, *core.scheduler.end_overdue(self._loop.now_s)]:
            assert request.finish is not None
            self._front.end(request, request.finish)
        for event in core.take_events():
            if isinstance(event, StepRecord):
                assert 1 <= len(event.stages) <= self._num_stages
            elif event.is_over:
                self._ended.append(event)

    def _send_orders(self, core: PipelineCore) -> None:
        loads, saves = core.scheduler.tier.loads, core.scheduler.tier.saves
        num_pages = loads.loading_pages + saves.saving_pages
        for order in core.orders_before_step(self._loop.now_s):
            self._broadcast(order)
        if num_pages and core.migration.is_moving and not loads.loading_pages + saves.saving_pages:
            self._stores.cut_off["a move"] += 1

    def _go_on_recovering(self) -> None:
        recovery = self._recovery
        assert recovery is not None
        for _ in range(recovery.num_wanted_workers(self._loop.now_s)):
            self._ask_for_worker(recovery)
        try:
            self._tell(recovery.reform(self._loop.now_s))
        except PipelineLost as failure:
            self._give_up(failure)
            return
        order = recovery.start_order(self._loop.now_s)
        if order is not None:
            self._broadcast(order)
            if self._rng.random() < 0.4:  # while what was lost is computed again
                self._loop.after(self._rng.random() * 0.2, self._hurt_workers)

    def _look_again_later(self) -> None:
        """Where no worker is available now, the driver asks again, less and less often."""
        for rests in (1, 2, 4, 8, 16):
            self._loop.after(self._args.recovery.retry_s * rests * 1.01, self._turn)

    def _ask_for_worker(self, recovery: StageRecovery) -> None:
        """In a drought the source says at once that it has none, or the worker never comes."""
        rng, now_s = self._rng, self._loop.now_s
        worker = self._make_worker()
        recovery.asked(worker.number, now_s)
        if not any(start <= now_s < end for start, end in self._droughts_s):
            self._loop.after(rng.random(), worker.start)
            return
        self._num_refusals += 1
        if rng.random() < 0.5:
            self._look_again_later()
            self._lost.add(worker.number)
            worker.die()
            recovery.refused(worker.number, "there is none", now_s)
        else:
            self._loop.after(rng.random(), partial(self._lose, worker, "it ended at its start"))

    def _tell(self, messages: list[Addressed]) -> None:
        for worker, message in messages:
            self._to_worker[worker].send(message)
            if isinstance(message, Shutdown):
                self._dismissed.add(worker)
                self._loop.after(STOP_TIMEOUT_S, self._workers[worker].die)

    def _lose(self, worker: FakeWorker, reason: str) -> None:
        """The scheduler has noticed that a worker has died, or gives up one that hangs."""
        if self._recovery is None or self._gave_up is not None:
            return
        if worker.number in self._lost | self._dismissed:
            return
        worker.die()
        self._lost.add(worker.number)
        self._look_again_later()
        self._note("lost", worker.number, reason)
        try:
            self._tell(self._recovery.lose(worker.number, reason, self._loop.now_s))
        except StageFailure as failure:
            self._give_up(failure)
        else:
            self._turn()

    def _give_up(self, failure: StageFailure | PipelineLost) -> None:
        """The server ends: every live request gets an error."""
        self._gave_up = failure
        for worker in self._workers:
            worker.die()
        status = 503 if isinstance(failure, PipelineLost) else 500
        finish = FinishReason("abort", message=str(failure), status_code=status)
        for client in self._front.clients:
            if not self._front.has_ended(client):
                self._front.end(client.request, finish)

    def _broadcast(self, order: SealedOrder) -> None:
        for worker in self._roster.workers_of_stages:
            self._to_worker[worker].send(order)

    def _bring_up(self, message: FromWorker) -> None:
        rng = self._rng
        self._tell(self._roster.take(message))
        capacity = self._roster.capacity()
        if capacity is None:
            return
        assert capacity.num_pages == self._num_pages
        log = None
        if self._log_pages is not None:
            page_size = self._args.scheduling.page_size
            log = RecoveryLog(self._num_stages, page_size, capacity.log_pages)
        scheduler = new_scheduler(
            self._args.scheduling,
            self._args.throttle,
            num_pages=capacity.num_pages,
            num_stages=self._num_stages,
            context_length=CONTEXT_LENGTH,
            log=log,
        )
        migration = MigrationControl.of(self._args.migration, capacity.plan)
        self._core = PipelineCore(scheduler, capacity.plan, migration)
        self._recovery = StageRecovery(self._core, self._roster, self._args.recovery)
        Outsiders(
            self._core,
            self._front,
            self._loop,
            rng,
            self._args,
            num_layers=self._num_layers,
            turn=self._turn,
            note=self._note,
        ).begin()
        if self._stores.by_address:
            self._tier = TierDriver(
                self._core,
                self._stores,
                self._loop,
                self._tier_rng,
                turn=self._turn,
                note=self._note,
            )
            self._tier.begin()
        if rng.random() < 0.4:
            for _ in range(rng.randint(1, MOST_LEAVES)):
                self._loop.after(rng.random() * rng.choice((1.0, 6.0)), self._ask_to_leave)
        if rng.random() < 0.5:
            for _ in range(rng.randint(1, MOST_KILLS)):
                self._loop.after(rng.random() * rng.choice((1.0, 6.0)), self._hurt_workers)
            if rng.random() < 0.6:
                start_s, length_s = rng.random() * 4.0, rng.choice((0.5, 3.0, 20.0))
                begun_s = self._loop.now_s + rng.choice((0.0, start_s))
                self._droughts_s.append((begun_s, begun_s + length_s))

    def _ask_to_leave(self) -> None:
        """SIGTERM to one worker, or two at once, of a stage or not; now and then SIGKILL follows
        before it has gone."""
        rng = self._rng
        living = [worker for worker in self._workers if not worker.is_dead]
        for worker in rng.sample(living, min(len(living), rng.choice((1, 1, 1, 2)))):
            self._note("leaves", worker.number)
            self._num_leaves += 1
            worker.leave()
            if not worker.is_dead and rng.random() < 0.2:
                self._loop.after(rng.random() * rng.choice((0.1, 3.0)), partial(self._kill, worker))
            elif worker.is_dead:
                self._notice_later(worker)

    # What goes wrong

    def _kill(self, worker: FakeWorker) -> None:
        if not worker.is_dead:
            worker.die()
            self._notice_later(worker)

    def _notice_later(self, worker: FakeWorker) -> None:
        """The scheduler will notice that a worker does nothing any more."""
        noticed_s = self._rng.random() * self._rng.choice((0.0, 0.01, 1.0))
        self._loop.after(noticed_s, partial(self._lose, worker, "hurt"))

    def _hurt_workers(self) -> None:
        """One worker, or two at once, of a stage or not, ready or not: dies or hangs."""
        rng = self._rng
        living = [worker for worker in self._workers if not worker.is_dead]
        if self._recovery is not None and self._recovery.current is not None and rng.random() < 0.5:
            living = living[-1:]  # the newest: a replacement, if it has come
        for worker in rng.sample(living, min(len(living), rng.choice((1, 1, 1, 2)))):
            self._note("hurt", worker.number)
            if rng.random() < 0.3:
                worker.stop()
                if rng.random() < 0.3:
                    self._loop.after(rng.random(), worker.go_on)
                    continue
            else:
                worker.die()
            self._notice_later(worker)
