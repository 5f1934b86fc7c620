"""The result of a simulation: every request, every step, every move, and counts of a store."""

from dataclasses import dataclass, field

from sgl_pipeline.records.move_record import MoveRecord
from sgl_pipeline.records.trace import StepRecord
from sgl_pipeline.scheduling.tier_counts import TierCounts
from sgl_pipeline.simulator.step_shape import StepShape
from sgl_pipeline.simulator.workload import SimulatedRequest


@dataclass(slots=True)
class ServedRequest:
    """A request as its client saw it. Times are virtual seconds; `finished_s` is None until the
    last token, `error` says why there is none. Of its `cached_tokens`, `loaded_tokens` came from a
    store for it."""

    asked: SimulatedRequest
    arrival_s: float
    token_times_s: list[float] = field(default_factory=list)
    finished_s: float | None = None
    cached_tokens: int = 0
    loaded_tokens: int = 0
    num_retractions: int = 0
    error: str = ""


@dataclass(frozen=True, slots=True)
class SimulatedStep:
    """A step as it was decided and as it ran: `starts_s[s]` and `ends_s[s]` on stage `s`."""

    shape: StepShape
    record: StepRecord
    starts_s: tuple[float, ...]
    ends_s: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Simulation:
    """All that happened; `tier` is None where no store was used."""

    requests: tuple[ServedRequest, ...]
    steps: tuple[SimulatedStep, ...]
    num_retractions: int
    moves: tuple[MoveRecord, ...] = ()
    tier: TierCounts | None = None
