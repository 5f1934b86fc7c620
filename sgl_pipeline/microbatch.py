"""The contents of one step: the chunks that the scheduler put together.

A Microbatch is kept until the step's result comes back. Frozen: the state of a step lives here and
not on the request.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from sgl_pipeline.pipeline_load import PipelineLoad, TokenBudget
from sgl_pipeline.requests import Request
from sgl_pipeline.step_work import StepWork, attended_tokens

# The most of a run of a lost stage's layers: between two of them it listens to the scheduler.
REPLAY_TOKENS = 512


class StateSnapshot(msgspec.Struct, frozen=True, array_like=True):
    """The state after the first `num_tokens` tokens of a request goes to the state slot `slot` too,
    where later requests with these tokens find it. Travels to the stages, so it is a Struct."""

    num_tokens: int
    slot: int


class Chunk(msgspec.Struct, frozen=True):
    """`length` tokens of `request` from position `start`, computed in one step.

    `samples` is true when the chunk ends at the request's last known token, so that the last stage
    draws the next one from it. `draft_ids`, which only decodes have, are guesses at the tokens
    after that one, and the last of the `length` tokens: the last stage draws a token after each of
    them too.

    In models with states it begins with the state in the slot `state_source`, a snapshot after
    `start` tokens, in place of the request's own, if that is given: as the first chunk after a hit
    of the prefix cache does, and a decode whose request leaves its state behind as a snapshot and
    goes on in another slot. `snapshots` are taken on its way, ascending, where pages end.

    A Struct because there is one for each decode of each step: a frozen dataclass takes twelve
    times as long to make.
    """

    request: Request
    start: int
    length: int
    is_decode: bool
    samples: bool
    draft_ids: tuple[int, ...] = ()
    state_source: int | None = None
    snapshots: tuple[StateSnapshot, ...] = ()

    @property
    def end(self) -> int:
        return self.start + self.length

    @property
    def num_samples(self) -> int:
        """Number of tokens that are drawn from it."""
        return self.samples + len(self.draft_ids)

    def apart(self) -> tuple["Chunk", ...]:
        """The same rows as chunks without drafts, each with one sampled row at most."""
        if not self.draft_ids:
            return (self,)
        known_end = self.end - len(self.draft_ids)
        starts = [self.start, *range(known_end, self.end)]
        ends = [known_end, *range(known_end + 1, self.end + 1)]
        return tuple(
            Chunk(self.request, start, end - start, self.is_decode, self.samples)
            for start, end in zip(starts, ends, strict=True)
        )

    @property
    def attended_tokens(self) -> int:
        """Pairs of a row and a token that it attends to: what attention costs grow with."""
        return attended_tokens(self.start, self.end)


class Replay(msgspec.Struct, frozen=True):
    """Positions of `request` from `start`, in whole `pages` except the last, whose keys and values
    `stages`, which were lost, must compute again before the step that has this."""

    request: Request
    start: int
    length: int
    stages: tuple[int, ...]
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Microbatch:
    """The chunks of one step, with what they were decided from.

    `epoch` is the version of the StagePlan that the step runs under, `load` the state before it, as
    `args.accounting` counts, `budget` what the policy allowed for that. `released` are the requests
    whose pages the stages may forget. `replays` come before the chunks, on the stages that they
    name.
    """

    step_id: int
    epoch: int
    load: PipelineLoad
    budget: TokenBudget
    chunks: tuple[Chunk, ...]
    released: tuple[Request, ...] = ()
    replays: tuple[Replay, ...] = ()
    # What its time depends on; counted once, since it is asked for while the step is in flight.
    work: StepWork = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "work", work_of(self.chunks))

    @property
    def num_tokens(self) -> int:
        return self.work.tokens

    @property
    def num_decodes(self) -> int:
        return self.work.decodes

    @property
    def num_prefill_tokens(self) -> int:
        beside_decodes = self.num_tokens - self.num_decodes
        return beside_decodes - self.num_draft_tokens if beside_decodes else 0

    @property
    def num_draft_tokens(self) -> int:
        return sum(len(chunk.draft_ids) for chunk in self.chunks)

    @property
    def num_replay_tokens(self) -> int:
        """Number of tokens that some stage computes again."""
        return sum(replay.length for replay in self.replays)

    @property
    def num_samples(self) -> int:
        return self.work.samples

    @property
    def num_logprob_runs(self) -> int:
        """Number of `LogprobRows` that the last stage gives."""
        return sum(
            1 + len(chunk.draft_ids) for chunk in self.chunks if chunk.request.logprobs is not None
        )

    @property
    def attended_tokens(self) -> int:
        return self.work.decode_attended_tokens + self.work.prefill_attended_tokens


def work_of(chunks: Sequence[Chunk]) -> StepWork:
    """The work of a step with `chunks`."""
    # One pass, written out: five sums with a call for each decode take three times as long.
    tokens = decodes = by_decodes = by_prefill = samples = 0
    for chunk in chunks:
        length = chunk.length
        tokens += length
        samples += chunk.samples
        if chunk.request.lease is not None:  # its attention is computed elsewhere
            decodes += chunk.is_decode
        elif chunk.is_decode:
            decodes += 1
            by_decodes += chunk.start + 1
            # Drafts read the same keys as the row before them.
            if length > 1:
                samples += length - 1
                by_prefill += attended_tokens(chunk.start + 1, chunk.end)
        else:
            by_prefill += length * (2 * chunk.start + length + 1) // 2
    return StepWork(tokens, decodes, by_decodes, by_prefill, samples)
