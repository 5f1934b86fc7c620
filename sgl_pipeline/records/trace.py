"""Steps and trace files, the same from the runtime and from the simulator.

A trace file has a JSON line for each event (`--trace-path`). A step's line is its record, the line
of any other event an object with one key, the kind's `trace_key`. Plots and benchmarks read these
files and cannot tell who wrote them.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Protocol

import msgspec

from sgl_pipeline.draft_runs import DraftRuns
from sgl_pipeline.records.event import Event
from sgl_pipeline.records.stage_timing import StageTiming
from sgl_pipeline.requests import Request
from sgl_pipeline.step_work import StepWork


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A request that ended by itself: its size, and how long it took since it arrived; of its
    drafts, if it had any looked up, how often they were right."""

    request_id: str
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    num_retractions: int
    queue_ms: float  # until its first chunk was scheduled
    first_token_ms: float  # until its first token was known
    total_ms: float
    drafts: DraftRuns | None = None

    @classmethod
    def of(cls, request: Request, now_s: float) -> "RequestRecord":
        """The record of a request that had its last token at `now_s`."""
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
            drafts=request.drafts.runs,
        )


class StepRecord(msgspec.Struct, Event, frozen=True, kw_only=True):
    """The load of one step and its times. Times are seconds of the producer's clock, the same for
    scheduler and stages.

    `samples` are the rows that went through the head, `attended_tokens` the pairs of a row and a
    token that it attends to, `decode_attended_tokens` those of decodes, each of which costs several
    of a prompt's (0 in traces written before there was the field); `ended` are the requests that
    had their last token in this step. `prefill_budget` and `decode_budget` are what the policy
    allowed, `bound_by` what bound the prefill (`throttle.load.TokenBudget`). Decodes have
    `draft_tokens` besides, of which `accepted_draft_tokens` were right; traces written before there
    were the fields count them as prefill.
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
    # Rows whose attention another server computed; they count in no attended tokens.
    leased_rows: int = 0
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0

    @property
    def label(self) -> str:
        return f"step {self.step_id}"

    @property
    def num_tokens(self) -> int:
        """Rows of the step."""
        return self.prefill_tokens + self.decodes + self.draft_tokens

    @property
    def work(self) -> StepWork:
        """The work on which the step's time depends."""
        return StepWork(
            self.num_tokens,
            self.decodes,
            self.decode_attended_tokens,
            self.attended_tokens - self.decode_attended_tokens,
            self.samples,
        )


class EventWriter(Protocol):
    """A file that events go to, in order: a `TraceWriter` or a `chrome_trace.ChromeTraceWriter`.
    Each method may raise OSError."""

    def write(self, event: Event) -> None:
        """Adds an event that is over."""

    def flush(self) -> None:
        """Everything written so far is in the file from now on."""

    def close(self) -> None: ...


class TraceWriter:
    """Writes a new trace file, flushed when closed or asked."""

    def __init__(self, path: str | Path) -> None:
        self._file: IO[bytes] = Path(path).open("wb")  # noqa: SIM115 - closed by `close`
        self._encoder = msgspec.json.Encoder()

    def write(self, event: Event) -> None:
        line = {event.trace_key: event} if event.trace_key else event
        self._file.write(self._encoder.encode(line) + b"\n")

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()


# The beginning of a line of any event but a step, whose line begins with a number.
_KEYED_LINE = re.compile(rb'\{"\w+":\{')


def read_trace(path: str | Path) -> Iterator[StepRecord]:
    """The steps of a trace file, in order. Raises msgspec.ValidationError for a line that is not an
    event."""
    decoder = msgspec.json.Decoder(StepRecord)
    with open(path, "rb") as lines:
        for line in lines:
            if not _KEYED_LINE.match(line):
                yield decoder.decode(line)
