"""One worker, as the roster knows it: who it is, which stage it fills, how far it has got there.

Kept by `worker_roster.py`.
"""

from dataclasses import dataclass
from enum import IntEnum, auto

from sgl_pipeline.errors import ProtocolError
from sgl_pipeline.messages import FromWorker, StageLoaded, StageReady, WorkerHello
from sgl_pipeline.stage_costs import PartCosts


class WorkerPhase(IntEnum):
    """How far a worker has got. MEASURING leads back to GREETED; LOST may come at any time and is
    the end."""

    GREETED = auto()
    MEASURING = auto()
    ASSIGNED = auto()
    LOADED = auto()
    SIZED = auto()
    READY = auto()
    LOST = auto()


@dataclass(slots=True, eq=False)
class Worker:
    """One worker. `stage` is None until it is assigned. `incarnation` is the stream of orders that
    its links are for, `asked_incarnation` that for which it was told to open some."""

    hello: WorkerHello
    phase: WorkerPhase = WorkerPhase.GREETED
    stage: int | None = None
    costs: PartCosts | None = None
    loaded: StageLoaded | None = None
    ready: StageReady | None = None
    incarnation: int = -1
    asked_incarnation: int = -1
    gpu: int | None = None  # where its weights are, once it has any
    has_served: bool = False  # it was ready once, for whatever stage

    @property
    def is_settled(self) -> bool:
        """It owes no answer, and so can be given another stage."""
        if self.phase is WorkerPhase.READY:
            return not self.is_joining
        return self.phase is WorkerPhase.LOADED

    @property
    def is_joining(self) -> bool:
        """It fills a stage, and has yet to get ready or to regroup."""
        return self.stage is not None and self.incarnation < self.asked_incarnation


def expect(worker: Worker | None, phase: WorkerPhase, message: FromWorker) -> Worker:
    """`worker`, which must be in `phase` to send `message`. Raises ProtocolError otherwise."""
    if worker is None or worker.phase is not phase:
        found = "unknown" if worker is None else worker.phase.name.lower()
        raise ProtocolError(
            f"{type(message).__name__} arrived from a worker that is {found}; "
            f"{phase.name.lower()} was due"
        )
    return worker
