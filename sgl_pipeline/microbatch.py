"""What one step carries: the chunks that the scheduler put together.

Made by `StepScheduler.next_microbatch`, encoded for the stages by `StepPlanEncoder`, and kept until
the step's result comes back. Frozen: the state of a step lives here and not on the request.
"""

from dataclasses import dataclass, field

import msgspec

from sgl_pipeline.pipeline_load import PipelineLoad, TokenBudget
from sgl_pipeline.requests import Request
from sgl_pipeline.step_work import StepWork, attended_tokens


class Chunk(msgspec.Struct, frozen=True):
    """`length` tokens of `request` from position `start`, computed in one step.

    `samples` is true when the chunk ends at the request's last known token, so that the last stage
    draws the next one from it. A Struct because there is one for each decode of each step: a frozen
    dataclass takes twelve times as long to make.
    """

    request: Request
    start: int
    length: int
    is_decode: bool
    samples: bool

    @property
    def end(self) -> int:
        return self.start + self.length

    @property
    def attended_tokens(self) -> int:
        """Pairs of a row and a token that it attends to: what attention costs grow with."""
        return attended_tokens(self.start, self.end)


@dataclass(frozen=True, slots=True)
class Microbatch:
    """The chunks of one step, with what they were decided from.

    `epoch` is the version of the StagePlan that the step runs under, `load` the state before it, as
    `args.accounting` counts, `budget` what the policy allowed for that. `released` are the requests
    whose pages the stages may forget.
    """

    step_id: int
    epoch: int
    load: PipelineLoad
    budget: TokenBudget
    chunks: tuple[Chunk, ...]
    released: tuple[Request, ...] = ()
    # What its time depends on; counted once, since it is asked for while the step is in flight.
    work: StepWork = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        by_decodes = self.decode_attended_tokens
        work = StepWork(
            self.num_tokens,
            self.num_decodes,
            by_decodes,
            self.attended_tokens - by_decodes,
            self.num_samples,
        )
        object.__setattr__(self, "work", work)

    @property
    def num_tokens(self) -> int:
        return sum(chunk.length for chunk in self.chunks)

    @property
    def num_decodes(self) -> int:
        return sum(chunk.is_decode for chunk in self.chunks)

    @property
    def num_prefill_tokens(self) -> int:
        return self.num_tokens - self.num_decodes

    @property
    def num_samples(self) -> int:
        return sum(chunk.samples for chunk in self.chunks)

    @property
    def num_logprob_chunks(self) -> int:
        return sum(chunk.request.logprobs is not None for chunk in self.chunks)

    @property
    def attended_tokens(self) -> int:
        # Written out: a property's call for each decode of each step costs twice the sum.
        return sum([c.length * (2 * c.start + c.length + 1) // 2 for c in self.chunks])

    @property
    def decode_attended_tokens(self) -> int:
        """Those of them that decodes attend to, which share no keys."""
        return sum([c.start + c.length for c in self.chunks if c.is_decode])
