"""The workers of one virtual server, and what befalls them: they start late or never, die, hang, or
are asked to leave."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any

from fault_schedules.fake_moves import FakePageLinks, LoadTempo
from fault_schedules.fake_offers import FakePeers
from fault_schedules.fake_row_links import FakeRowLinks
from fault_schedules.fake_transfers import FakeStores
from fault_schedules.fake_worker import FakeWorker, WorkerTempo
from fault_schedules.virtual_time import DelayedPipe, EventLoop

from sgl_pipeline.args import PipelineArgs
from sgl_pipeline.pipeline.recovery import StageRecovery
from sgl_pipeline.pipeline.worker_roster import Addressed
from sgl_pipeline.wire.stage_messages import FromWorker, Shutdown
from sgl_pipeline.wire.stage_orders import SealedOrder

MOST_KILLS = 6
MOST_LEAVES = 4
# A worker that was told to end is killed when it does not.
STOP_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class PoolSizes:
    """Pages of each stage of all the stages; `log_pages`: of how many of them each stage keeps the
    rows that it sends, None: of none. Fewer stages have room for fewer pages if `is_room_short`."""

    num_pages: int
    is_room_short: bool
    log_pages: int | None


class WorkerPool:
    """All workers that there have been, by their numbers.

    Args:
        take: gets each message of a worker, with its number.
        lose: tells the scheduler that a worker has died, or is given up, and why.
        turn: lets the scheduler go on.
        note: takes what happened into the run's digest.
    """

    def __init__(
        self,
        name: str,
        loop: EventLoop,
        rng: Random,
        args: PipelineArgs,
        sizes: PoolSizes,
        stores: FakeStores,
        peers: FakePeers,
        *,
        take: Callable[[int, FromWorker], None],
        lose: Callable[[FakeWorker, str], None],
        turn: Callable[[], None],
        note: Callable[..., None],
    ) -> None:
        self._name, self._loop, self._rng, self._args = name, loop, rng, args
        self._sizes, self._stores, self._peers = sizes, stores, peers
        self._take, self._lose, self._turn, self._note = take, lose, turn, note
        # When the source of workers has none.
        self._droughts_s: list[tuple[float, float]] = []
        self._row_links = FakeRowLinks(partial(self._pipe, mean_s=0.01))
        self._page_links = FakePageLinks(partial(self._pipe, mean_s=0.01))
        self.workers: list[FakeWorker] = []
        self._to_worker: dict[int, DelayedPipe] = {}
        self.lost: set[int] = set()
        self.dismissed: set[int] = set()
        self.num_leaves = self.num_refusals = 0

    def make(self) -> FakeWorker:
        """The next one. It is not started yet."""
        rng, number = self._rng, len(self.workers)
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
            log_pages=self._sizes.log_pages,
            row_links=self._row_links,
            page_links=self._page_links,
            stores=self._stores,
            peers=self._peers,
        )
        self.workers.append(worker)
        self._to_worker[number] = self._pipe(worker.take, 0.01)
        self._peers.open(self._name, number, worker)
        return worker

    def _pipe(self, deliver: Callable[[Any], None], mean_s: float) -> DelayedPipe:
        return DelayedPipe(self._loop, self._rng, self._rng.choice((0.0, mean_s)), deliver)

    def _room_of(self, num_stages: int) -> int:
        num_pages = self._sizes.num_pages
        if not self._sizes.is_room_short:
            return num_pages
        return max(1, num_pages * num_stages // self._args.stages.num_stages)

    @property
    def num_full_links(self) -> int:
        """How often states had to wait for their target."""
        return self._page_links.num_full

    def is_gone(self, number: int) -> bool:
        """True if nothing that the worker says counts any more."""
        return number in self.lost or number in self.dismissed

    def send(self, number: int, order: SealedOrder) -> None:
        """Sends an order to a worker."""
        self._to_worker[number].send(order)

    def tell(self, messages: list[Addressed]) -> None:
        """Sends messages to workers, each to its own."""
        for worker, message in messages:
            self._to_worker[worker].send(message)
            if isinstance(message, Shutdown):
                self.dismissed.add(worker)
                self._loop.after(STOP_TIMEOUT_S, self.workers[worker].die)

    def ask_for_worker(self, recovery: StageRecovery) -> None:
        """Makes another one. In a drought the source says at once that it has none, or the worker
        never comes."""
        rng, now_s = self._rng, self._loop.now_s
        worker = self.make()
        recovery.asked(worker.number, now_s)
        if not any(start <= now_s < end for start, end in self._droughts_s):
            self._loop.after(rng.random(), worker.start)
            return
        self.num_refusals += 1
        if rng.random() < 0.5:
            self.look_again_later()
            self.lost.add(worker.number)
            worker.die()
            recovery.refused(worker.number, "there is none", now_s)
        else:
            self._loop.after(rng.random(), partial(self._lose, worker, "it ended at its start"))

    def look_again_later(self) -> None:
        """Where no worker is available now, the driver asks again, less and less often."""
        for rests in (1, 2, 4, 8, 16):
            self._loop.after(self._args.recovery.retry_s * rests * 1.01, self._turn)

    def end(self) -> None:
        """All of them die."""
        for worker in self.workers:
            worker.die()

    # What goes wrong

    def begin_faults(self, recovery: StageRecovery) -> None:
        """Decides who leaves, dies and hangs, and when none is to be had: `recovery` serves now."""
        rng = self._rng
        if rng.random() < 0.4:
            for _ in range(rng.randint(1, MOST_LEAVES)):
                self._loop.after(rng.random() * rng.choice((1.0, 6.0)), self._ask_to_leave)
        if rng.random() < 0.5:
            hurt = partial(self.hurt, recovery)
            for _ in range(rng.randint(1, MOST_KILLS)):
                self._loop.after(rng.random() * rng.choice((1.0, 6.0)), hurt)
            if rng.random() < 0.6:
                start_s, length_s = rng.random() * 4.0, rng.choice((0.5, 3.0, 20.0))
                begun_s = self._loop.now_s + rng.choice((0.0, start_s))
                self._droughts_s.append((begun_s, begun_s + length_s))

    def _ask_to_leave(self) -> None:
        """SIGTERM to one worker, or two at once, of a stage or not; now and then SIGKILL follows
        before it has gone."""
        rng = self._rng
        living = [worker for worker in self.workers if not worker.is_dead]
        for worker in rng.sample(living, min(len(living), rng.choice((1, 1, 1, 2)))):
            self._note("leaves", worker.number)
            self.num_leaves += 1
            worker.leave()
            if not worker.is_dead and rng.random() < 0.2:
                self._loop.after(rng.random() * rng.choice((0.1, 3.0)), partial(self._kill, worker))
            elif worker.is_dead:
                self._notice_later(worker)

    def _kill(self, worker: FakeWorker) -> None:
        if not worker.is_dead:
            worker.die()
            self._notice_later(worker)

    def _notice_later(self, worker: FakeWorker) -> None:
        """The scheduler will notice that a worker does nothing any more."""
        noticed_s = self._rng.random() * self._rng.choice((0.0, 0.01, 1.0))
        self._loop.after(noticed_s, partial(self._lose, worker, "hurt"))

    def hurt(self, recovery: StageRecovery) -> None:
        """One worker, or two at once, of a stage or not, ready or not: dies or hangs."""
        rng = self._rng
        living = [worker for worker in self.workers if not worker.is_dead]
        if recovery.current is not None and rng.random() < 0.5:
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
