"""A whole server in virtual time, made from one seed: core, roster, workers, clients, faults.

The driver here does what `managers/pipeline_scheduler.py` does with real sockets, in the same
order: take, book, fill, pass on. After every event the scheduler's invariants must hold; in the end
every request has ended exactly once, with the tokens that it gets alone, and all pages are back.
"""

import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from random import Random
from typing import Any

from benchmark.fault_schedules.fake_front import (
    BY_CLIENT,
    MAX_NEW_TOKENS,
    Client,
    FakeFront,
    make_clients,
)
from benchmark.fault_schedules.fake_moves import FakePageLinks, LoadTempo
from benchmark.fault_schedules.fake_worker import FakeWorker, WorkerTempo
from benchmark.fault_schedules.virtual_time import DelayedPipe, EventLoop
from sgl_pipeline.args import (
    ACCOUNTINGS,
    POLICIES,
    SCHEDULE_POLICIES,
    MigrationArgs,
    PipelineArgs,
    SchedulingArgs,
    StageArgs,
    ThrottleArgs,
)
from sgl_pipeline.errors import MoveRefused, RequestError
from sgl_pipeline.layer_moves import MoveReport
from sgl_pipeline.messages import FromWorker, StageReport
from sgl_pipeline.move_record import MoveOutcome
from sgl_pipeline.pipeline.migration_control import MigrationControl
from sgl_pipeline.pipeline.open_step import OpenStep
from sgl_pipeline.pipeline.pipeline_core import PipelineCore
from sgl_pipeline.pipeline.worker_roster import WorkerRoster
from sgl_pipeline.requests import FinishReason
from sgl_pipeline.scheduling import StepScheduler
from sgl_pipeline.stage_orders import SealedOrder
from sgl_pipeline.throttle import make_policy

MAX_EVENTS = 50_000
MOST_MOVES = 12
CONTEXT_LENGTH = 1_000


@dataclass(frozen=True, slots=True)
class Outcome:
    """A run that held. `digest` is over all that happened: equal runs have equal ones."""

    seed: int
    digest: int
    num_events: int
    num_steps: int
    num_retractions: int
    num_aborts: int
    num_moves: int
    num_abandoned_moves: int


def run_seed(seed: int) -> Outcome:
    """Makes the world of `seed` and lets it run to its end.

    Raises AssertionError or ProtocolError where the pipeline did what it may not.
    """
    return World(seed).run()


def _random_args(rng: Random) -> PipelineArgs:
    max_prefill_tokens = rng.choice((4, 16, 64))
    num_stages = rng.choice((1, 2, 2, 3, 4))
    return PipelineArgs(
        stages=StageArgs(
            num_stages=num_stages,
            layer_partition=rng.choice(("auto", "even")),
            model_path="fake",
            dtype="float32",
        ),
        scheduling=SchedulingArgs(
            page_size=rng.choice((1, 2, 4)),
            schedule_policy=rng.choice(SCHEDULE_POLICIES),
            max_running_requests=rng.choice((2, 5, 64)),
            max_queued_requests=rng.choice((None, None, 3)),
            radix_cache=rng.random() < 0.8,
            accounting=rng.choice(sorted(ACCOUNTINGS)),
            duplicate_prefills=rng.random() < 0.2,
            preemption_threshold=rng.choice((None, 0, 1)),
            waiting_timeout_s=rng.choice((None, None, 2.0)),
            running_timeout_s=rng.choice((None, None, 4.0)),
            extra_steps_in_flight=rng.choice((0, 0, 1, 2)),
        ),
        throttle=ThrottleArgs(
            policy=rng.choice(POLICIES),
            prefill_spread_steps=rng.choice((1, 2, 8)),
            max_prefill_tokens=max_prefill_tokens,
            min_prefill_tokens=rng.choice((1, max_prefill_tokens)),
        ),
        migration=MigrationArgs(
            mode=rng.choice(("off", "manual")) if num_stages > 1 else "off",
            spare_layers=rng.choice((1, 2)),
            timeout_s=rng.choice((0.2, 5.0, 5.0)),
        ),
        run_directory="virtual",
    )


class World:
    """One seed's server and its clients."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._rng = rng = Random(seed)
        self._loop = EventLoop()
        self._args = _random_args(rng)
        self._num_stages = self._args.stages.num_stages
        self._num_layers = self._num_stages + rng.choice((0, 1, 2, 4))
        max_tokens = rng.choice((4, 12, 30))
        clients = make_clients(rng, rng.randint(1, 40), rng.choice((0.0, 1.0, 5.0)), max_tokens)
        self._front = FakeFront(clients, self._num_layers)
        # Room for the largest request and little more, or for all of them.
        most = 2 * max_tokens + MAX_NEW_TOKENS
        self._num_pages = -(-most // self._args.scheduling.page_size) * rng.choice((1, 1, 2, 16))
        self._roster = WorkerRoster(self._args, self._num_layers)
        self._core: PipelineCore | None = None
        self._page_links = FakePageLinks(partial(self._pipe, mean_s=0.01))
        self._workers = self._make_workers()
        self._to_worker = {worker.number: self._pipe(worker.take, 0.01) for worker in self._workers}
        self._inbox: deque[FromWorker] = deque()
        self._digest = 0

    def run(self) -> Outcome:
        """Lets everything happen, and judges it."""
        for worker in self._workers:
            worker.start()
        self._loop.run(MAX_EVENTS, self._check)
        assert self._core is not None
        scheduler = self._core.scheduler
        assert scheduler.is_idle, "requests are left, but nothing happens any more"
        load = scheduler.load()
        assert (load.free_pages, load.waiting_tokens) == (load.total_pages, 0)
        self._front.check()
        for stage, number in enumerate(self._roster.workers_of_stages):
            assert self._workers[number].held_layers == [*self._core.plan.layers_of(stage)]
        self._note([client.ends for client in self._front.clients])
        moves = [one.outcome for one in self._core.migration.history]
        assert set(moves) <= {MoveOutcome.DONE, MoveOutcome.ABANDONED}, "a move never ended"
        return Outcome(
            seed=self._seed,
            digest=self._digest,
            num_events=self._loop.num_events,
            num_steps=load.step_id,
            num_retractions=scheduler.num_retractions,
            num_aborts=sum(client.ends[0].kind == "abort" for client in self._front.clients),
            num_moves=moves.count(MoveOutcome.DONE),
            num_abandoned_moves=moves.count(MoveOutcome.ABANDONED),
        )

    def _pipe(self, deliver: Callable[[Any], None], mean_s: float) -> DelayedPipe:
        return DelayedPipe(self._loop, self._rng, self._rng.choice((0.0, mean_s)), deliver)

    def _make_workers(self) -> list[FakeWorker]:
        """A worker for each stage and perhaps a spare; rows go from one to the next."""
        rng = self._rng
        workers = []
        for number in range(self._num_stages + (rng.random() < 0.2)):
            tempo = WorkerTempo(
                start_s=rng.choice((0.0, 1.0)),
                step_s=rng.choice((0.001, 0.05)),
                stall_chance=rng.choice((0.0, 0.0, 0.1)),
                stall_s=1.0,
                load=LoadTempo(rng.choice((0.0, 0.1, 1.0)), rng.choice((0.0, 0.0, 0.0, 0.2))),
            )
            to_scheduler = self._pipe(self._take, 0.01)
            workers.append(
                FakeWorker(
                    number,
                    self._loop,
                    rng,
                    tempo,
                    to_scheduler.send,
                    page_size=self._args.scheduling.page_size,
                    room_pages=self._num_pages + rng.randint(0, 3),
                    page_links=self._page_links,
                )
            )
        return workers

    def _check(self) -> None:
        if self._core is not None:
            self._core.scheduler.check_invariants()

    def _note(self, *facts: object) -> None:
        text = f"{self._loop.now_s!r} {facts!r}".encode()
        self._digest = zlib.crc32(text, self._digest)

    # What the scheduler process does

    def _take(self, message: FromWorker) -> None:
        """A worker's message has arrived. The scheduler looks at once, or a while later at all."""
        self._inbox.append(message)
        if self._rng.random() < 0.7:
            self._turn()
        else:
            self._loop.after(self._rng.random() * 0.02, self._turn)

    def _turn(self) -> None:
        booked: list[OpenStep] = []
        while self._inbox:
            message = self._inbox.popleft()
            if self._core is None:
                self._bring_up(message)
            elif isinstance(message, StageReport):
                step = self._core.take_report(message, self._loop.now_s)
                booked += [] if step is None else [step]
            elif isinstance(message, MoveReport):
                self._core.migration.take(message, self._loop.now_s)
            else:
                assert self._roster.take(message) == [], "a spare was given work"
        if self._core is not None:
            self._go_on(self._core, booked)

    def _go_on(self, core: PipelineCore, booked: list[OpenStep]) -> None:
        for order in core.move_orders(self._loop.now_s):
            self._broadcast(order)
        while (step := core.next_step(self._loop.now_s)) is not None:
            self._broadcast(step.order)
        for step in booked:
            self._note(step.microbatch.step_id, [event.token_ids for event in step.events])
            self._front.send_events(step.events)
        for request in core.scheduler.end_overdue(self._loop.now_s):
            assert request.finish is not None
            self._front.end(request, request.finish)
        for record in core.take_records():
            assert len(record.stages) == self._num_stages

    def _broadcast(self, order: SealedOrder) -> None:
        for worker in self._roster.workers_of_stages:
            self._to_worker[worker].send(order)

    def _bring_up(self, message: FromWorker) -> None:
        rng = self._rng
        for worker, answer in self._roster.take(message):
            self._to_worker[worker].send(answer)
        capacity = self._roster.capacity()
        if capacity is None:
            return
        assert capacity.num_pages >= self._num_pages
        ranks = self._roster.workers_of_stages  # by stage
        for sender, receiver in pairwise(ranks):
            self._workers[sender].downstream = self._pipe(self._workers[receiver].take_rows, 0.01)
        scheduler = StepScheduler(
            self._args.scheduling,
            make_policy(self._args.throttle),
            num_pages=capacity.num_pages,
            num_stages=self._num_stages,
            context_length=CONTEXT_LENGTH,
        )
        migration = MigrationControl.of(self._args.migration, capacity.plan)
        self._core = PipelineCore(scheduler, capacity.plan, migration)
        self._open_doors(scheduler)
        if self._args.migration.mode != "off":
            for _ in range(rng.randint(1, MOST_MOVES)):
                self._loop.after(rng.random() * 6.0, partial(self._move_layers, self._core))

    # What comes from outside

    def _open_doors(self, scheduler: StepScheduler) -> None:
        for client in self._front.clients:
            client.request.arrival_s = self._loop.now_s + client.arrives_s
            self._loop.after(client.arrives_s + client.compile_s, partial(self._arrive, client))
            if client.leaves_after_s is not None:
                leaves_s = client.arrives_s + client.leaves_after_s
                self._loop.after(leaves_s, partial(self._leave, client))
        for _ in range(self._rng.choice((0, 0, 1, 3))):
            pause_s, length_s = self._rng.random() * 5.0, self._rng.random() * 2.0
            retract = self._rng.random() < 0.5
            self._loop.after(pause_s, partial(scheduler.pause, retract=retract))
            self._loop.after(pause_s + length_s, lambda: self._outside(scheduler.resume))
            flush_s = pause_s + self._rng.random() * 2.0 * length_s
            self._loop.after(flush_s, lambda: self._note("flush", scheduler.flush_cache()))
        if self._args.scheduling.waiting_timeout_s or self._args.scheduling.running_timeout_s:
            for second in range(1, 60):
                self._loop.after(float(second), self._turn)

    def _move_layers(self, core: PipelineCore) -> None:
        """An operator wants another plan, which may be refused: for want of room, say."""
        rng = self._rng
        if rng.random() < 0.3:
            cuts = sorted(rng.sample(range(1, self._num_layers), self._num_stages - 1))
            counts = [end - start for start, end in pairwise((0, *cuts, self._num_layers))]
        else:
            counts = list(core.plan.layer_counts)
            source, target = rng.sample(range(self._num_stages), 2)
            counts[source] -= 1
            counts[target] += 1
        try:
            record = core.migration.move_to(counts, self._loop.now_s)
        except MoveRefused:
            return
        self._note(record.before, record.after)
        self._turn()
        self._loop.after(self._args.migration.timeout_s * 1.01, self._turn)

    def _arrive(self, client: Client) -> None:
        if self._front.has_ended(client):
            return  # it has left while its grammar was compiled
        self._outside(partial(self._add, client))

    def _add(self, client: Client) -> None:
        assert self._core is not None
        try:
            displaced = self._core.scheduler.add(client.request)
        except RequestError as error:
            finish = FinishReason("abort", message=str(error), status_code=error.status_code)
            self._front.end(client.request, finish)
        else:
            if displaced is not None:
                assert displaced.finish is not None
                self._front.end(displaced, displaced.finish)

    def _leave(self, client: Client) -> None:
        if not self._front.has_ended(client):
            assert self._core is not None
            self._core.scheduler.abort(client.request.request_id, BY_CLIENT)
            self._front.end(client.request, BY_CLIENT)
            self._outside(lambda: None)

    def _outside(self, call: Callable[[], None]) -> None:
        """Something came from outside: the scheduler takes it, and goes on."""
        call()
        self._turn()
