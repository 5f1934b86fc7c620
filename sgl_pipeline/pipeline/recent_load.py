"""The last minutes of real work: the requests that ended, and the steps with their times.

Forecasts take the lengths of answers from it, and `POST /pipeline/tune` runs the simulator on it.
Two bounded rings; an entry costs less than a microsecond, after the next steps are on their way. No
text and no token.
"""

from collections import deque
from collections.abc import Iterable

import msgspec

from sgl_pipeline.draft_runs import DraftRuns
from sgl_pipeline.records.throttle_change import Knob
from sgl_pipeline.records.trace import StepRecord
from sgl_pipeline.requests import Request

MAX_REQUESTS = 4096
MAX_STEPS = 1024
# Number of newest answers from which the lengths of the next ones are estimated.
NUM_LENGTHS = 256


class PastRequest(msgspec.Struct, frozen=True, array_like=True):
    """A request as it came and as it was served; moments in seconds of the driver's clock. If it
    has not ended, `output_tokens` counts its tokens so far and `total_ms` is None. `drafts`, if it
    had any looked up."""

    arrival_s: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    first_token_ms: float | None = None
    total_ms: float | None = None
    drafts: DraftRuns | None = None

    @classmethod
    def live(cls, request: Request) -> "PastRequest":
        """The entry of a request that waits or runs."""
        first_token_ms = None
        if request.first_token_s is not None:
            first_token_ms = (request.first_token_s - request.arrival_s) * 1e3
        return cls(
            request.arrival_s,
            len(request.prompt_ids),
            request.cached_tokens,
            len(request.output_ids),
            first_token_ms,
            drafts=request.drafts.runs,
        )

    @property
    def tpot_ms(self) -> float | None:
        """Mean time of its output tokens after the first; None before there is one."""
        if self.total_ms is None or self.first_token_ms is None or self.output_tokens < 2:
            return None
        return (self.total_ms - self.first_token_ms) / (self.output_tokens - 1)


class RecentLoad:
    """`requests` that ended by themselves, in the order of their ends, and `steps`; both the newest
    of many."""

    def __init__(self) -> None:
        self.requests: deque[PastRequest] = deque(maxlen=MAX_REQUESTS)
        self.steps: deque[StepRecord] = deque(maxlen=MAX_STEPS)

    def add(self, record: StepRecord) -> None:
        """A step has passed all stages."""
        self.steps.append(record)
        for ended in record.ended:
            self.requests.append(
                PastRequest(
                    record.finished_s - ended.total_ms * 1e-3,
                    ended.prompt_tokens,
                    ended.cached_tokens,
                    ended.output_tokens,
                    ended.first_token_ms,
                    ended.total_ms,
                    ended.drafts,
                )
            )

    def since(self, moment_s: float, live: Iterable[Request]) -> list[PastRequest]:
        """The requests that came at `moment_s` or later, `live` ones included, by arrival."""
        past = [*self.requests, *map(PastRequest.live, live)]
        return sorted(
            (one for one in past if one.arrival_s >= moment_s), key=lambda one: one.arrival_s
        )

    def output_lengths(self) -> list[int]:
        """Tokens of the newest answers."""
        return [one.output_tokens for one in list(self.requests)[-NUM_LENGTHS:]]


class RecentWork(msgspec.Struct, frozen=True, kw_only=True):
    """The simulator's input from `POST /pipeline/tune`: the load of a window and the pipeline that
    served it. `requests` are sorted by arrival and include unfinished ones; `steps` ran under the
    plan in use. `knobs` are the throttle's, `scheduling` the fields of `SchedulingArgs`."""

    requests: list[PastRequest]
    steps: list[StepRecord]
    knobs: dict[str, Knob]
    ranges: dict[str, list[Knob]]
    scheduling: dict[str, int | float | str | bool | None]
    pool_tokens: int
    now_s: float
