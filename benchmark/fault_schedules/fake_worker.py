"""A stage worker without arithmetic: real orders, a real mirror and mover, fake layers, virtual
time."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from benchmark.fault_schedules.fake_model import FakeStage
from benchmark.fault_schedules.fake_moves import FakePageLinks, FakeRows, FakeSite, LoadTempo
from benchmark.fault_schedules.virtual_time import DelayedPipe, EventLoop
from sgl_pipeline import __version__
from sgl_pipeline.layer_moves import AbandonMove, PrepareMove, SwitchPlan
from sgl_pipeline.messages import (
    FromWorker,
    MeasureCosts,
    MeasuredCosts,
    PoolSize,
    StageAssignment,
    StageLoaded,
    StageReady,
    StageReport,
    ToWorker,
    WorkerHello,
)
from sgl_pipeline.pp_runner.layer_moves.layer_mover import LayerMover
from sgl_pipeline.pp_runner.step_inputs import written_pages
from sgl_pipeline.requests import LogprobRows
from sgl_pipeline.stage_costs import PartCosts, PartSample, PartSizes
from sgl_pipeline.stage_orders import OrderReader, SealedOrder, StageOrder
from sgl_pipeline.stage_timing import StageTiming
from sgl_pipeline.step_plan import MirroredChunk, MirrorSnapshot, RequestMirror, StepPlan

# How often a worker that has nothing else to do looks after a move.
MOVE_POLL_S = 0.02

# The rows that leave a stage, with the id of their step.
Rows = tuple[int, Sequence[int]]


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
        pages_of_stage: how many pages it has room for, whatever its stage.
    """

    def __init__(
        self,
        number: int,
        loop: EventLoop,
        rng: Random,
        tempo: WorkerTempo,
        report: Callable[[FromWorker], None],
        *,
        page_size: int,
        room_pages: int,
        page_links: FakePageLinks,
    ) -> None:
        self.number = number
        self.downstream: DelayedPipe | None = None
        self._loop, self._rng, self._tempo, self._report = loop, rng, tempo, report
        self._room_pages = room_pages
        self._assignment: StageAssignment | None = None
        self._orders = OrderReader()
        self._mirror = RequestMirror()
        self._page_size = page_size
        self._page_links = page_links
        self._layers = FakeStage(page_size, ())
        self._site: FakeSite | None = None
        self._mover: LayerMover[FakeRows] | None = None
        self._due: deque[StageOrder] = deque()
        self._rows: deque[Rows] = deque()
        self._is_busy = False
        self._polls_move = False

    @property
    def held_layers(self) -> list[int]:
        """The layers that have pages here."""
        return sorted(self._layers.pages)

    def start(self) -> None:
        hello = WorkerHello(
            worker=self.number,
            host="virtual",
            cores=(0,),
            num_gpus=0,
            memory_bytes=0,
            version=__version__,
        )
        self._loop.after(self._rng.random() * self._tempo.start_s, lambda: self._report(hello))

    def take(self, message: ToWorker) -> None:
        """A message of the scheduler has arrived."""
        if isinstance(message, SealedOrder):
            self._due.append(self._orders.open(message))
            self._work()
        elif isinstance(message, MeasureCosts):
            sizes = PartSizes((1,) * message.assignment.plan.num_layers, 1, 1, 1, 1)
            samples = [
                PartSample(step.work, (1.0,), 0.0, self._rng.random()) for step in message.steps
            ]
            kinds = (0,) * len(sizes.layers_bytes)
            self._later(MeasuredCosts(self.number, PartCosts(kinds, tuple(samples), sizes, 10**9)))
        elif isinstance(message, StageAssignment):
            self._be_assigned(message)
            self._later(
                StageLoaded(
                    stage=message.stage,
                    num_pages=self._room_pages,
                    weight_bytes=0,
                    page_bytes=0,
                    load_seconds=0.0,
                )
            )
        elif isinstance(message, PoolSize):
            self._later(StageReady(self._own_assignment.stage, "fake", "fake"))
        else:
            raise AssertionError(f"what is a worker to do with {type(message).__name__}?")

    def take_rows(self, rows: Rows) -> None:
        """Activations of the stage before have arrived."""
        self._rows.append(rows)
        self._work()

    def _be_assigned(self, assignment: StageAssignment) -> None:
        self._assignment = assignment
        stage, plan = assignment.stage, assignment.plan
        self._layers = FakeStage(self._page_size, plan.layers_of(stage))
        loop, load = self._loop, self._tempo.load
        self._site = FakeSite(self._layers, stage, plan, loop, self._rng, load)
        links = self._page_links.of_stage(stage, self._work)
        self._mover = LayerMover(
            stage, plan, self._site, links, self._report, clock=lambda: loop.now_s
        )

    @property
    def _own_assignment(self) -> StageAssignment:
        assert self._assignment is not None
        return self._assignment

    def _later(self, message: FromWorker) -> None:
        delay_s = self._rng.random() * self._tempo.start_s
        self._loop.after(delay_s, lambda: self._report(message))

    def _work(self) -> None:
        """Takes up the next order, if it can: a step needs its rows and the pages of its layers,
        and only one runs at once. While it cannot, it works at the move under way."""
        assert self._site is not None and self._mover is not None
        while self._due and not self._is_busy:
            order = self._due[0]
            if isinstance(order, StepPlan):
                is_waiting = self._own_assignment.stage > 0 and not self._rows
                if is_waiting or not self._site.can_run(order.epoch):
                    break
                self._run(order)
            elif isinstance(order, PrepareMove):
                self._mover.prepare(order)
            elif isinstance(order, SwitchPlan):
                self._mover.switch(order)
            elif isinstance(order, AbandonMove):
                self._mover.abandon(order)
            else:
                assert isinstance(order, MirrorSnapshot)
                self._mirror.restore(order)
            self._due.popleft()
        if not self._is_busy and self._mover.is_open:
            self._mover.work()
            if not self._polls_move:
                self._polls_move = True
                self._loop.after(self._rng.random() * MOVE_POLL_S, self._poll_move)

    def _poll_move(self) -> None:
        self._polls_move = False
        self._work()

    def _run(self, plan: StepPlan) -> None:
        """Reads and writes its pages when the step ends: the latest moment at which it could."""
        self._is_busy = True
        chunks = self._mirror.apply(plan)
        rows = None
        if self._own_assignment.stage > 0:
            step_id, rows = self._rows.popleft()
            assert step_id == plan.step_id, "activations of another step"
        step_s = self._rng.random() * self._tempo.step_s
        if self._rng.random() < self._tempo.stall_chance:
            step_s += self._tempo.stall_s
        started_s = self._loop.now_s
        self._loop.after(step_s, lambda: self._finish(plan, chunks, rows, started_s))

    def _finish(
        self,
        plan: StepPlan,
        chunks: list[MirroredChunk],
        rows: Sequence[int] | None,
        started_s: float,
    ) -> None:
        self._is_busy = False
        assert self._site is not None and self._mover is not None
        outgoing = self._layers.run(chunks, rows, self._site.layers_of(plan.epoch))
        self._mover.wrote(written_pages(chunks, self._page_size))
        tokens: tuple[int, ...] | None = None
        logprobs: tuple[LogprobRows, ...] = ()
        if self.downstream is not None:
            self.downstream.send((plan.step_id, outgoing))
        else:
            tokens = tuple(self._layers.draw(chunks))
            logprobs = tuple(self._layers.logprobs(chunks))
        now_s = self._loop.now_s
        self._report(
            StageReport(
                stage=self._own_assignment.stage,
                step_id=plan.step_id,
                epoch=plan.epoch,
                timing=StageTiming(*[started_s] * 4, *[now_s] * 3),
                token_ids=tokens,
                logprobs=logprobs,
            )
        )
        self._work()
