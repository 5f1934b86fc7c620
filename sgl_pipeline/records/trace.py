"""One record per step, the same from the runtime and from the simulator.

Written as JSON lines by `managers/` (`--trace-path`) and `simulator/`; every plot and benchmark
reads these and does not know which produced them. A layer move and a change of the throttle are
lines among them.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import IO, Protocol

import msgspec

from sgl_pipeline.records.move_record import MoveRecord
from sgl_pipeline.records.recovery_record import RecoveryRecord
from sgl_pipeline.records.stage_timing import StageTiming
from sgl_pipeline.records.throttle_change import ThrottleChange
from sgl_pipeline.requests import Request
from sgl_pipeline.step_work import StepWork


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A request that ended by itself: what it was, and how long it took since it arrived."""

    request_id: str
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    num_retractions: int
    queue_ms: float  # until its first chunk was scheduled
    first_token_ms: float  # until its first token was known
    total_ms: float

    @classmethod
    def of(cls, request: Request, now_s: float) -> "RequestRecord":
        """Of a request that had its last token at `now_s`."""
        assert request.started_s is not None and request.first_token_s is not None
        return cls(
            request_id=request.request_id,
            prompt_tokens=len(request.prompt_ids),
            cached_tokens=request.cached_tokens,
            output_tokens=len(request.output_ids),
            num_retractions=request.num_retractions,
            queue_ms=(request.started_s - request.arrival_s) * 1e3,
            first_token_ms=(request.first_token_s - request.arrival_s) * 1e3,
            total_ms=(now_s - request.arrival_s) * 1e3,
        )


class StepRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What one step carried and what it cost. Times are seconds of the producer's clock, the same
    for scheduler and stages.

    `samples` are the rows that went through the head, `attended_tokens` the pairs of a row and a
    token that it attends to, `decode_attended_tokens` those of decodes, each of which costs several
    of a prompt's (0 in traces written before there was the field); `ended` are the requests that
    had their last token in this step. `prefill_budget` and `decode_budget` are what the policy
    allowed, `bound_by` what bound the prefill (`throttle.load.TokenBudget`).
    """

    step_id: int
    epoch: int
    prefill_tokens: int
    decodes: int
    samples: int
    attended_tokens: int
    waiting_tokens: int
    running_decodes: int
    free_page_share: float
    prefill_budget: int
    decode_budget: int
    bound_by: str
    scheduled_s: float
    finished_s: float
    schedule_ms: float
    result_ms: float
    stages: tuple[StageTiming, ...]
    ended: tuple[RequestRecord, ...] = ()
    decode_attended_tokens: int = 0
    # Where the policy limits time: what it allowed, and the target that it could not meet.
    budget_ms: float | None = None
    missed_target: str | None = None

    @property
    def work(self) -> StepWork:
        """What its time depends on."""
        return StepWork(
            self.prefill_tokens + self.decodes,
            self.decodes,
            self.decode_attended_tokens,
            self.attended_tokens - self.decode_attended_tokens,
            self.samples,
        )


class StepWriter(Protocol):
    """Where steps go, in order: a `TraceWriter` or a `chrome_trace.ChromeTraceWriter`. Each method
    may raise OSError."""

    def write(self, record: StepRecord) -> None: ...
    def write_move(self, record: MoveRecord) -> None:
        """A layer move is over."""

    def write_change(self, record: ThrottleChange) -> None:
        """A knob of the throttle has changed."""

    def write_recovery(self, record: RecoveryRecord) -> None:
        """Lost stages have been replaced."""

    def flush(self) -> None:
        """What was written is in the file from now on."""

    def close(self) -> None: ...


class _MoveLine(msgspec.Struct, frozen=True):
    """How a layer move stands in a trace file."""

    layer_move: MoveRecord


class _ChangeLine(msgspec.Struct, frozen=True):
    """How a change of the throttle stands in a trace file."""

    throttle_change: ThrottleChange


class _RecoveryLine(msgspec.Struct, frozen=True):
    """How a recovery stands there."""

    recovery: RecoveryRecord


_MOVE_LINE_START = b'{"layer_move":'
_CHANGE_LINE_START = b'{"throttle_change":'
_RECOVERY_LINE_START = b'{"recovery":'
_EVENT_LINE_STARTS = (_MOVE_LINE_START, _CHANGE_LINE_START, _RECOVERY_LINE_START)


class TraceWriter:
    """Writes a new file of records, a line each, flushed when closed or asked."""

    def __init__(self, path: str | Path) -> None:
        self._file: IO[bytes] = Path(path).open("wb")  # noqa: SIM115 - closed by `close`
        self._encoder = msgspec.json.Encoder()

    def write(self, record: StepRecord) -> None:
        self._file.write(self._encoder.encode(record) + b"\n")

    def write_move(self, record: MoveRecord) -> None:
        self._file.write(self._encoder.encode(_MoveLine(record)) + b"\n")

    def write_change(self, record: ThrottleChange) -> None:
        self._file.write(self._encoder.encode(_ChangeLine(record)) + b"\n")

    def write_recovery(self, record: RecoveryRecord) -> None:
        self._file.write(self._encoder.encode(_RecoveryLine(record)) + b"\n")

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_trace(path: str | Path) -> Iterator[StepRecord]:
    """The steps of a trace file, in order. Raises msgspec.ValidationError on a foreign line."""
    decoder = msgspec.json.Decoder(StepRecord)
    with open(path, "rb") as lines:
        for line in lines:
            if not line.startswith(_EVENT_LINE_STARTS):
                yield decoder.decode(line)


def read_moves(path: str | Path) -> Iterator[MoveRecord]:
    """The layer moves of a trace file, in the order in which they ended."""
    decoder = msgspec.json.Decoder(_MoveLine)
    with open(path, "rb") as lines:
        for line in lines:
            if line.startswith(_MOVE_LINE_START):
                yield decoder.decode(line).layer_move


def read_changes(path: str | Path) -> Iterator[ThrottleChange]:
    """The changes of the throttle in a trace file, in their order."""
    decoder = msgspec.json.Decoder(_ChangeLine)
    with open(path, "rb") as lines:
        for line in lines:
            if line.startswith(_CHANGE_LINE_START):
                yield decoder.decode(line).throttle_change


def read_recoveries(path: str | Path) -> Iterator[RecoveryRecord]:
    """The recoveries of a trace file, in the order in which they ended."""
    decoder = msgspec.json.Decoder(_RecoveryLine)
    with open(path, "rb") as lines:
        for line in lines:
            if line.startswith(_RECOVERY_LINE_START):
                yield decoder.decode(line).recovery
