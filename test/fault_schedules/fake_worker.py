"""A stage worker without arithmetic: real orders, a real mirror and mover, fake layers, virtual
time."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random

from fault_schedules.fake_leases import FakeAttention, FakeLeases
from fault_schedules.fake_log import FakeLog
from fault_schedules.fake_model import FakeStage
from fault_schedules.fake_moves import FakePageLinks, FakeRows, FakeSite, LoadTempo
from fault_schedules.fake_offers import FakeOffers, FakePeers
from fault_schedules.fake_row_links import FakeRowLinks, Rows
from fault_schedules.fake_transfers import FakeStores, FakeTransfers
from fault_schedules.virtual_time import DelayedPipe, EventLoop

from sgl_pipeline import __version__
from sgl_pipeline.costs.stage_costs import PartCosts, PartSample, PartSizes
from sgl_pipeline.pp_runner.base.step_inputs import written_pages, written_slots
from sgl_pipeline.pp_runner.layer_moves.layer_mover import LayerMover
from sgl_pipeline.records.stage_timing import StageTiming
from sgl_pipeline.requests import LogprobRows
from sgl_pipeline.wire.lease_orders import LeaseOrder
from sgl_pipeline.wire.move_orders import AbandonMove, PrepareMove, SwitchPlan
from sgl_pipeline.wire.stage_messages import (
    FinishHandover,
    FromWorker,
    HandPagesOver,
    MeasureCosts,
    MeasuredCosts,
    PoolSize,
    Regroup,
    Regrouped,
    Shutdown,
    StageAssignment,
    StageLoaded,
    StageReady,
    StageReport,
    TakePagesOver,
    ToWorker,
    WorkerHello,
    WorkerLeaves,
)
from sgl_pipeline.wire.stage_orders import OrderReader, SealedOrder, StageOrder
from sgl_pipeline.wire.step_order import MirroredChunk, MirrorSnapshot, RequestMirror, StepOrder
from sgl_pipeline.wire.store_orders import OfferOrder, StoreOrder, UseStore

# How often a worker that has nothing else to do looks after a move.
MOVE_POLL_S = 0.02

# What is no order of the stream, and obeyed between two of its steps.
OwnOrder = HandPagesOver | TakePagesOver | FinishHandover | Regroup

# What a step begins with: the stages that compute, and what. Its own chunks come last, without.
StepPart = tuple[tuple[int, ...] | None, list[MirroredChunk]]


@dataclass(frozen=True, slots=True)
class WorkerTempo:
    """How long things take a worker, in virtual seconds; now and then a step takes much longer."""

    start_s: float
    step_s: float
    stall_chance: float
    stall_s: float
    load: LoadTempo


class FakeWorker:
    """One worker's life, from its hello on.

    Args:
        report: what it says to the scheduler goes here.
        room_of: how many pages it has room for, by the number of stages.
        log_pages: of how many pages it can keep the rows that it sends; None: of none.
    """

    def __init__(
        self,
        number: int,
        loop: EventLoop,
        rng: Random,
        tempo: WorkerTempo,
        report: DelayedPipe,
        *,
        page_size: int,
        room_of: Callable[[int], int],
        log_pages: int | None,
        row_links: FakeRowLinks,
        page_links: FakePageLinks,
        stores: FakeStores,
        peers: FakePeers,
    ) -> None:
        self.number = number
        self.is_dead = False
        self._loop, self._rng, self._tempo = loop, rng, tempo
        self._to_scheduler = report
        self._row_links = row_links
        self._downstream: DelayedPipe | None = None
        self._listens_at: str | None = None
        # While it hangs: what it will do when it goes on.
        self._stopped: list[Callable[[], None]] | None = None
        self._room_of = room_of
        self._num_pages = 0
        self._log_pages = log_pages
        self._log: FakeLog | None = None
        # Of the step under way, those that have not begun.
        self._parts: deque[StepPart] = deque()
        self._assignment: StageAssignment | None = None
        self._orders = OrderReader()
        self._mirror = RequestMirror()
        self._page_size = page_size
        self._page_links = page_links
        self._layers = FakeStage(page_size, ())
        self._site: FakeSite | None = None
        self._mover: LayerMover[FakeRows] | None = None
        self._stores, self._peers = stores, peers
        self._transfers: FakeTransfers | None = None
        self._attention = FakeAttention(peers)
        # Orders; the first was opened, if it could not be obeyed at once.
        self._due: deque[SealedOrder | StageOrder | OwnOrder] = deque()
        self._rows: deque[Rows] = deque()
        self._is_busy = False
        self._polls_move = False
        self._has_served = self._is_leaving = False

    @property
    def held_layers(self) -> list[int]:
        """The layers that have pages here."""
        return sorted(self._layers.pages)

    @property
    def leases(self) -> FakeLeases | None:
        """The pages that peers attend over; None while nobody answers them."""
        if self._stopped is not None or self._transfers is None:
            return None
        return self._transfers.leases

    @property
    def offers(self) -> FakeOffers | None:
        """The pages that peers may read; None while nobody answers them."""
        if self._stopped is not None or self._transfers is None:
            return None
        return self._transfers.offers

    def start(self) -> None:
        hello = WorkerHello(
            worker=self.number,
            host="virtual",
            cores=(0,),
            num_gpus=0,
            memory_bytes=0,
            version=__version__,
        )
        self._later(hello)

    def die(self) -> None:
        """It does nothing any more; what it has said may be lost in part."""
        self.is_dead = True
        for pipe in (self._to_scheduler, self._downstream):
            if pipe is not None:
                pipe.cut()
        if self._mover is not None:
            self._mover.close()  # its sockets are closed for it

    def leave(self) -> None:
        """It is asked to go: before its first stage is ready it ends, else it says so, once."""
        if not self._has_served:
            self.die()
        elif not self._is_leaving:
            self._is_leaving = True
            self._do(lambda: self._report(WorkerLeaves(self.number)))

    def stop(self) -> None:
        """It hangs: from now on it does nothing, until it goes on."""
        self._stopped = self._stopped or []

    def go_on(self) -> None:
        """It does all that it has not done since it hangs."""
        calls, self._stopped = self._stopped or [], None
        for call in calls:
            self._do(call)

    def _do(self, call: Callable[[], None]) -> None:
        """Whatever a worker does goes through here."""
        if self._stopped is not None:
            self._stopped.append(call)
        elif not self.is_dead:
            call()

    def _after(self, delay_s: float, call: Callable[[], None]) -> None:
        self._loop.after(delay_s, lambda: self._do(call))

    def _report(self, message: FromWorker) -> None:
        if not self.is_dead:
            self._to_scheduler.send(message)

    def take(self, message: ToWorker) -> None:
        """A message of the scheduler has arrived."""
        self._do(lambda: self._take(message))

    def _take(self, message: ToWorker) -> None:
        if isinstance(message, SealedOrder | OwnOrder):
            if isinstance(message, Regroup):
                if self._mover is not None and self._mover.has_rest:
                    self._due.popleft()  # the order that waits is dropped
                self._due = deque(one for one in self._due if isinstance(one, OwnOrder))
                self._parts.clear()
            self._due.append(message)
            self._work()
        elif isinstance(message, Shutdown):
            self.die()
        elif isinstance(message, MeasureCosts):
            sizes = PartSizes((1,) * message.assignment.plan.num_layers, 1, 1, 1, 1)
            samples = [
                PartSample(step.work, (1.0,), 0.0, self._rng.random()) for step in message.steps
            ]
            kinds = (0,) * len(sizes.layers_bytes)
            self._later(MeasuredCosts(self.number, PartCosts(kinds, tuple(samples), sizes, 10**9)))
        elif isinstance(message, StageAssignment):
            self._load(message)
        elif isinstance(message, PoolSize):
            assignment, self._num_pages = self._own_assignment, message.num_pages
            self._layers.states.num_slots = message.num_state_slots
            self._has_served = True
            self._open_links(assignment.links)
            log_pages = min(self._log_pages or 0, message.num_pages)
            self._log = None
            if self._log_pages is not None and self._downstream is not None:
                self._log = FakeLog(log_pages, self._page_size)
            self._later(StageReady(assignment.stage, "fake", "fake", log_pages=log_pages))
        else:
            raise AssertionError(f"what is a worker to do with {type(message).__name__}?")

    def _load(self, assignment: StageAssignment) -> None:
        """Loads its stage, or another one. Fewer stages are more layers, and less room for pages;
        now and then not even for those."""
        if self._assignment is not None:
            self._open_links(())
        self._mirror = RequestMirror()
        self._be_assigned(assignment)
        self._later(
            StageLoaded(
                stage=assignment.stage,
                num_pages=self._room_of(assignment.plan.num_stages),
                weight_bytes=0,
                page_bytes=0,
                load_seconds=0.0,
                num_state_slots=_slots_of(assignment),
            )
        )

    def _take_rows(self, address: str, rows: Rows) -> None:
        """Activations of the stage before have arrived; none of a link that was closed since, as
        they may have while the worker hung."""
        if address == self._listens_at:
            self._rows.append(rows)
            self._work()

    def _open_links(self, links: Sequence[str]) -> None:
        """Listens upstream, and sends downstream; at no other address any more. Without links it is
        alone, or on its way to another stage."""
        stage = self._own_assignment.stage if links else 0
        if self._listens_at is not None:
            self._row_links.close(self._listens_at)
        self._rows.clear()
        self._listens_at = links[stage - 1] if stage > 0 else None
        if self._listens_at is not None:
            take = partial(self._take_rows, self._listens_at)
            self._row_links.open(self._listens_at, lambda rows: self._do(lambda: take(rows)))
        self._downstream = self._row_links.to(links[stage]) if stage < len(links) else None

    def _regroup(self, order: Regroup) -> None:
        assert self._mover is not None and self._transfers is not None
        self._transfers.cancel("Regroup")
        self._mover.regroup(order.plan)
        self._mirror = RequestMirror()
        self._open_links(order.links)
        self._report(Regrouped(self._own_assignment.stage, order.incarnation))

    def _be_assigned(self, assignment: StageAssignment) -> None:
        if self._transfers is not None:
            self._transfers.cancel("StageAssignment")
        self._assignment = assignment
        stage, plan = assignment.stage, assignment.plan
        slots = assignment.args.num_state_slots
        self._layers = FakeStage(self._page_size, plan.layers_of(stage), slots, plan.num_layers - 1)
        self._layers.elsewhere = self._attention
        loop, load = self._loop, self._tempo.load
        self._site = FakeSite(self._layers, stage, plan, loop, self._rng, load)
        links = self._page_links.of_stage(stage, lambda: self._do(self._work))
        self._mover = mover = LayerMover(
            stage, plan, self._site, links, self._report, clock=lambda: loop.now_s
        )
        self._transfers = FakeTransfers(
            self._stores,
            self._peers,
            stage,
            self._layers,
            num_pages=lambda: self._num_pages,
            plan=lambda: mover.plan,
            may_start=lambda: not mover.awaits_pages,
            now_s=lambda: loop.now_s,
            after=self._after,
            has_news=self._report_transfers,
        )

    @property
    def _own_assignment(self) -> StageAssignment:
        assert self._assignment is not None
        return self._assignment

    def _later(self, message: FromWorker) -> None:
        self._after(self._rng.random() * self._tempo.start_s, lambda: self._report(message))

    def _work(self) -> None:
        """Takes up the next order, if it can: a step needs its rows and the pages of its layers,
        and only one runs at once. While it cannot, it works at the move under way."""
        assert self._site is not None and self._mover is not None and self._transfers is not None
        while self._due and not self._is_busy:
            self._report_transfers()
            if isinstance(self._due[0], SealedOrder):
                self._due[0] = self._orders.open(self._due[0])
            order = self._due[0]
            if isinstance(order, StepOrder):
                if not self._parts:
                    self._take_up(order)
                if self._needs_rows() or not self._site.can_run(order.epoch):
                    break
                self._run(order)
                if self._parts:
                    break
            elif isinstance(order, PrepareMove):
                self._mover.prepare(order)
            elif isinstance(order, SwitchPlan | FinishHandover):
                if not self._mover.has_rest:
                    self._begin_rest(order)
                if not self._mover.send_rest():
                    break
            elif isinstance(order, AbandonMove):
                self._mover.abandon(order)
            elif isinstance(order, Regroup):
                self._regroup(order)
            elif isinstance(order, OwnOrder):
                self._mover.obey(order)
            elif isinstance(order, StoreOrder | OfferOrder | LeaseOrder):
                self._transfers.obey(order)
                if isinstance(order, UseStore) and order.peers:
                    self._attention.use(order.peers)
            else:
                assert isinstance(order, MirrorSnapshot)
                self._mirror.restore(order)
                if self._log is not None and order.log is not None:
                    self._log.restore(order.log)
            self._due.popleft()
        self._report_transfers()
        if not self._is_busy and self._mover.is_open:
            self._work_at_move()
            if not self._polls_move:
                self._polls_move = True
                self._after(self._rng.random() * MOVE_POLL_S, self._poll_move)

    def _begin_rest(self, order: SwitchPlan | FinishHandover) -> None:
        """Nothing else is obeyed until all is sent, but a `Regroup`."""
        assert self._mover is not None and self._transfers is not None
        if isinstance(order, SwitchPlan):
            self._transfers.cancel("SwitchPlan")
            self._mover.switch(order)
            return
        self._report_transfers()
        for report in self._transfers.refuse_open("FinishHandover"):
            self._report(report)
        self._mover.obey(order)

    def _work_at_move(self) -> None:
        """As a stage does that waits for messages, or for the rows of a step. One that sends a rest
        waits for its target alone."""
        assert self._mover is not None
        if not self._mover.has_rest:
            self._mover.work()

    def _report_transfers(self) -> None:
        """Sends the reports of transfers that have ended, between two steps."""
        assert self._mover is not None and self._transfers is not None
        if not self._is_busy:
            for report, filled_pages in self._transfers.take_reports():
                self._mover.wrote(filled_pages, ())
                self._report(report)

    def _poll_move(self) -> None:
        self._polls_move = False
        self._work()

    def _take_up(self, plan: StepOrder) -> None:
        """Applies `plan`, and notes the parts of the step in which this stage has one."""
        stage = self._own_assignment.stage
        chunks = self._mirror.apply(plan)
        for stages, replayed in self._mirror.replays(plan):
            if stage in stages or stage + 1 in stages:
                self._parts.append((stages, replayed))
        self._parts.append((None, chunks))

    def _needs_rows(self) -> bool:
        """Whether the next part waits for rows."""
        stages, _ = self._parts[0]
        stage = self._own_assignment.stage
        computes = stages is None or stage in stages
        return computes and stage > 0 and not self._rows

    def _run(self, plan: StepOrder) -> None:
        """Runs the next part of the step. Reads and writes its pages when that ends: the latest
        moment at which it could."""
        assert self._transfers is not None
        self._is_busy = True
        stages, chunks = self._parts.popleft()
        pages = {page for chunk in chunks for page in chunk.request.pages}
        assert max(pages) < self._num_pages, "a page that the stage does not have"
        scratch = [one.request.pages[0] for one in chunks if one.request.lease is not None]
        written = written_pages(chunks, self._page_size)
        self._transfers.check_step(pages, [*written, *scratch])
        rows = None
        stage = self._own_assignment.stage
        if stage > 0 and (stages is None or stage in stages):
            step_id, rows = self._rows.popleft()
            assert step_id == plan.step_id, "activations of another step"
        step_s = self._rng.random() * self._tempo.step_s
        if self._rng.random() < self._tempo.stall_chance:
            step_s += self._tempo.stall_s
        started_s = self._loop.now_s
        if stages is None:
            self._after(step_s, lambda: self._attend(plan, chunks, rows, started_s))
        else:
            self._after(step_s, lambda: self._finish_replay(plan, stages, chunks, rows))

    def _attend(
        self,
        plan: StepOrder,
        chunks: list[MirroredChunk],
        rows: Sequence[int] | None,
        started_s: float,
    ) -> None:
        """Waits for stages of peers that do not answer, before the end of the step."""
        assert self._site is not None
        wait_s = self._attention.wait_s(chunks, self._site.layers_of(plan.epoch))
        if wait_s:
            self._after(wait_s, lambda: self._finish(plan, chunks, rows, started_s))
        else:
            self._finish(plan, chunks, rows, started_s)

    def _finish_replay(
        self,
        plan: StepOrder,
        stages: tuple[int, ...],
        chunks: list[MirroredChunk],
        rows: Sequence[int] | None,
    ) -> None:
        self._is_busy = False
        stage = self._own_assignment.stage
        if stage in stages:
            assert self._site is not None
            outgoing = self._layers.run(chunks, rows, self._site.layers_of(plan.epoch))
            assert self._mover is not None
            self._mover.wrote(written_pages(chunks, self._page_size), written_slots(chunks))
            if self._log is not None:
                self._log.write(chunks, outgoing)
        else:
            assert self._log is not None, "rows are wanted that no log keeps"
            outgoing = self._log.read(chunks)
        if stage + 1 in stages and self._downstream is not None:
            self._downstream.send((plan.step_id, outgoing))
        self._work()

    def _finish(
        self,
        plan: StepOrder,
        chunks: list[MirroredChunk],
        rows: Sequence[int] | None,
        started_s: float,
    ) -> None:
        self._is_busy = False
        assert self._site is not None and self._mover is not None
        layers = self._site.layers_of(plan.epoch)
        self._attention.begin()
        outgoing = self._layers.run(chunks, rows, layers)
        self._mover.wrote(written_pages(chunks, self._page_size), written_slots(chunks))
        tokens: tuple[int, ...] | None = None
        logprobs: tuple[LogprobRows, ...] = ()
        if self._downstream is not None:
            self._downstream.send((plan.step_id, outgoing))
            if self._log is not None:
                self._log.begin(chunks)
                self._log.write(chunks, outgoing)
        else:
            tokens = tuple(self._layers.draw(chunks))
            logprobs = tuple(self._layers.logprobs(chunks))
        now_s = self._loop.now_s
        offloaded, lost = self._attention.work(chunks, len(layers), now_s - started_s)
        self._report(
            StageReport(
                stage=self._own_assignment.stage,
                step_id=plan.step_id,
                epoch=plan.epoch,
                timing=StageTiming(*[started_s] * 4, *[now_s] * 3),
                token_ids=tokens,
                logprobs=logprobs,
                lost_leases=lost,
                offloaded=offloaded,
            )
        )
        self._work()


def _slots_of(assignment: StageAssignment) -> int:
    """State slots that a stage has room for: fewer where fewer stages hold the layers."""
    args = assignment.args
    if not args.num_state_slots:
        return 0
    return max(1, args.num_state_slots * assignment.plan.num_stages // args.num_stages)
