"""One worker, as the roster knows it: its number, its stage, its progress."""

from dataclasses import dataclass
from enum import IntEnum, auto

from sgl_pipeline.costs.stage_costs import PartCosts
from sgl_pipeline.errors import ProtocolError
from sgl_pipeline.wire.stage_messages import (
    FromWorker,
    MeasuredCosts,
    Regrouped,
    StageAssignment,
    StageLoaded,
    StageReady,
    WorkerHello,
)


class WorkerPhase(IntEnum):
    """A worker's progress. MEASURING leads back to GREETED; LOST may come at any time and is
    final."""

    GREETED = auto()
    MEASURING = auto()
    ASSIGNED = auto()
    LOADED = auto()
    SIZED = auto()
    READY = auto()
    LOST = auto()


# In which phase a worker owes each message.
PHASE_OF_MESSAGE: dict[type, WorkerPhase] = {
    MeasuredCosts: WorkerPhase.MEASURING,
    StageLoaded: WorkerPhase.ASSIGNED,
    StageReady: WorkerPhase.SIZED,
    Regrouped: WorkerPhase.READY,
}


@dataclass(slots=True, eq=False)
class Worker:
    """One worker. `stage` is None until it is assigned; with `is_successor` another worker still
    fills it. `incarnation` is the stream of orders that its links are for, `asked_incarnation` the
    stream for which it was ordered to open links."""

    hello: WorkerHello
    phase: WorkerPhase = WorkerPhase.GREETED
    stage: int | None = None
    costs: PartCosts | None = None
    loaded: StageLoaded | None = None
    ready: StageReady | None = None
    incarnation: int = -1
    asked_incarnation: int = -1
    gpu: int | None = None  # the place of its weights, once it has any
    has_served: bool = False  # it was ready once, for any stage
    is_successor: bool = False

    @property
    def filled_stage(self) -> int | None:
        """The stage that it fills for steps."""
        return None if self.is_successor else self.stage

    @property
    def is_settled(self) -> bool:
        """It owes no answer, so it can be given another stage."""
        if self.phase is WorkerPhase.READY:
            return not self.is_joining
        return self.phase is WorkerPhase.LOADED

    @property
    def is_joining(self) -> bool:
        """It fills a stage, and has yet to get ready or to regroup."""
        return self.filled_stage is not None and self.incarnation < self.asked_incarnation

    # What it has done, each in the phase of PHASE_OF_MESSAGE

    def take_costs(self, message: MeasuredCosts) -> None:
        self.costs, self.phase = message.costs, WorkerPhase.GREETED

    def take_loaded(self, message: StageLoaded) -> None:
        self.loaded, self.phase = message, WorkerPhase.LOADED

    def take_ready(self, message: StageReady) -> None:
        self.ready, self.phase, self.has_served = message, WorkerPhase.READY, not self.is_successor
        self.incarnation = self.asked_incarnation

    def take_regrouped(self, message: Regrouped) -> None:
        """Raises ProtocolError if it has joined a stream that it was not asked to join."""
        if not self.incarnation < message.incarnation <= self.asked_incarnation:
            raise ProtocolError(
                f"stage {message.stage} has joined stream {message.incarnation}, it was asked "
                f"for {self.asked_incarnation}"
            )
        self.incarnation = message.incarnation

    # What becomes of it

    def give_stage(self, assignment: StageAssignment, incarnation: int) -> None:
        """It will load the stage of `assignment`, with links of the stream `incarnation`."""
        self.stage, self.phase = assignment.stage, WorkerPhase.ASSIGNED
        self.gpu = assignment.gpu
        self.loaded = self.ready = None
        self.asked_incarnation = incarnation

    def succeed(self) -> None:
        """The stage that it succeeds to is its own from now on."""
        self.is_successor = False
        self.has_served = self.phase is WorkerPhase.READY

    def lose(self) -> int | None:
        """It has ended. Returns the stage that it filled, if any."""
        self.phase, stage = WorkerPhase.LOST, self.filled_stage
        self.stage, self.is_successor = None, False
        return stage


def expect(worker: Worker | None, message: FromWorker) -> Worker:
    """Returns `worker` if `message` may be its next message. Raises ProtocolError otherwise."""
    due = PHASE_OF_MESSAGE[type(message)]
    if worker is None or worker.phase is not due:
        found = "unknown" if worker is None else worker.phase.name.lower()
        raise ProtocolError(
            f"{type(message).__name__} arrived from a worker that is {found}; "
            f"{due.name.lower()} was due"
        )
    return worker
