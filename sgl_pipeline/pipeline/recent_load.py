"""The last minutes of real work: the requests that ended, and the steps with their times.

Kept by `PipelineCore` for what asks about the past: forecasts take the lengths of answers from it,
`POST /pipeline/tune` runs the simulator on it. Two bounded rings; an entry costs less than a
microsecond, after the next steps are on their way. No text and no token.
"""

from collections import deque

import msgspec

from sgl_pipeline.trace import StepRecord

MAX_REQUESTS = 4096
MAX_STEPS = 2048
# Of the newest answers, how many say how long the next ones will be.
NUM_LENGTHS = 256


class PastRequest(msgspec.Struct, frozen=True, array_like=True):
    """A request as it came and as it was served; moments in seconds of the driver's clock. Of one
    that has not ended, `output_tokens` is what it has drawn and `total_ms` None."""

    arrival_s: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    first_token_ms: float | None = None
    total_ms: float | None = None

    @property
    def tpot_ms(self) -> float | None:
        """Mean time of its output tokens after the first; None where there is none yet."""
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
                )
            )

    def output_lengths(self) -> list[int]:
        """Tokens of the newest answers."""
        return [one.output_tokens for one in list(self.requests)[-NUM_LENGTHS:]]
