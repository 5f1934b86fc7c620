"""A fake pipeline around a `StepScheduler`: encoder, mirrors and a model without arithmetic.

The model writes, for each token, a fingerprint of the whole prefix into the token's KV slot, and
draws the next token from everything that it reads back through the page table: any page that was
reused, poisoned or misplaced changes the tokens. It exists twice, as the earliest and the latest
moment at which a stage may run a step, and both must draw the same.
"""

from array import array
from collections import deque
from collections.abc import Sequence

from sgl_pipeline.microbatch import Microbatch
from sgl_pipeline.requests import (
    GREEDY,
    FinishReason,
    LogprobRows,
    LogprobSpec,
    Request,
    StopRules,
)
from sgl_pipeline.scheduling import StepScheduler, TokenEvent
from sgl_pipeline.step_plan import MirroredChunk, RequestMirror, StepPlanEncoder

VOCABULARY = 5


def make_request(
    request_id: str,
    prompt_ids: Sequence[int],
    max_new_tokens: int = 4,
    *,
    stop_token_ids: frozenset[int] = frozenset(),
    priority: int = 0,
    namespace: str = "",
    logprob_start: int | None = None,
    constrained: bool = False,
) -> Request:
    """`logprob_start` asks for log-probabilities from that prompt position on, `constrained` for a
    `NoRepeats`."""
    return Request(
        request_id=request_id,
        prompt_ids=list(prompt_ids),
        sampling=GREEDY,
        stops=StopRules(max_new_tokens=max_new_tokens, stop_token_ids=stop_token_ids),
        priority=priority,
        cache_namespace=namespace,
        logprobs=None if logprob_start is None else LogprobSpec(logprob_start),
        constraint=NoRepeats() if constrained else None,
    )


class NoRepeats:
    """A `TokenConstraint`: no token twice in a row; complete when the tokens add up to 12."""

    def __init__(self) -> None:
        self.accepted: list[int] = []

    def allowed_tokens_mask(self) -> bytes:
        forbidden = self.accepted[-1:]
        allowed = [token for token in range(VOCABULARY) if token not in forbidden]
        return sum(1 << token for token in allowed).to_bytes(4, "little")

    def accept(self, token_id: int) -> FinishReason | None:
        assert token_id in allowed_tokens(self.allowed_tokens_mask())
        self.accepted.append(token_id)
        return FinishReason("stop", token_id) if sum(self.accepted) >= 12 else None


def allowed_tokens(mask: bytes) -> list[int]:
    """The tokens of the vocabulary that `mask` allows; all of them where it is empty."""
    bits = int.from_bytes(mask, "little")
    return [token for token in range(VOCABULARY) if not mask or bits >> token & 1]


def fingerprint(previous: int, token: int) -> int:
    return hash((previous, token))


def draw(fingerprints: Sequence[int], mask: bytes = b"") -> int:
    allowed = allowed_tokens(mask)
    return allowed[hash(tuple(fingerprints)) % len(allowed)]


def fingerprints_of(tokens: Sequence[int]) -> list[int]:
    fingerprints: list[int] = []
    for token in tokens:
        fingerprints.append(fingerprint(fingerprints[-1] if fingerprints else 0, token))
    return fingerprints


def output_when_alone(request: Request) -> list[int]:
    """What `request` must yield, from its prompt alone."""
    fingerprints = fingerprints_of(request.prompt_ids)
    output: list[int] = []
    constraint = None if request.constraint is None else NoRepeats()
    while len(output) < request.stops.max_new_tokens:
        mask = b"" if constraint is None else constraint.allowed_tokens_mask()
        output.append(draw(fingerprints, mask))
        fingerprints.append(fingerprint(fingerprints[-1], output[-1]))
        is_complete = constraint is not None and constraint.accept(output[-1]) is not None
        if is_complete or output[-1] in request.stops.stop_token_ids:
            break
    return output


def logprobs_when_alone(request: Request) -> list[int]:
    """What must stand in the rows of `request`, which ended by itself: one of each position."""
    if request.logprobs is None:
        return []
    output = output_when_alone(request)
    fingerprints = fingerprints_of(request.prompt_ids + output[:-1])
    return fingerprints[min(request.logprobs.prompt_start, len(request.prompt_ids) - 1) :]


def logprobs_of(request: Request) -> list[int]:
    """What has come back to `request`."""
    found = array("q", b"".join(run.chosen for run in request.logprob_runs)).tolist()
    assert len(found) == request.num_logprob_rows
    return found


class FakeStage:
    """Runs chunks against a KV dict keyed by (page, offset)."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._kv: dict[tuple[int, int], int] = {}

    def run(self, chunks: Sequence[MirroredChunk]) -> list[int]:
        for chunk in chunks:
            for position in range(chunk.start, chunk.start + chunk.length):
                previous = self._kv[self._slot(chunk, position - 1)] if position else 0
                token = chunk.request.tokens[position]
                self._kv[self._slot(chunk, position)] = fingerprint(previous, token)
        return [
            draw(
                [self._kv[self._slot(chunk, p)] for p in range(chunk.start + chunk.length)],
                chunk.token_mask,
            )
            for chunk in chunks
            if chunk.samples
        ]

    def logprobs(self, chunks: Sequence[MirroredChunk]) -> list[LogprobRows]:
        """A row of a position is its fingerprint."""
        found = []
        for chunk in chunks:
            if (spec := chunk.request.logprobs) is not None:
                wanted = range(max(chunk.start, spec.prompt_start), chunk.start + chunk.length)
                row = array("q", [self._kv[self._slot(chunk, position)] for position in wanted])
                found.append(LogprobRows(len(wanted), row.tobytes()))
        return found

    def _slot(self, chunk: MirroredChunk, position: int) -> tuple[int, int]:
        page, offset = divmod(position, self._page_size)
        return chunk.request.pages[page], offset


class FakePipeline:
    """Sends a scheduler's steps through the wire format to the fake stages, first in first out."""

    def __init__(self, scheduler: StepScheduler, page_size: int) -> None:
        self.scheduler = scheduler
        self.now_s = 0.0
        self.microbatches: list[Microbatch] = []
        self._encoder = StepPlanEncoder()
        self._mirror = RequestMirror()
        self._early, self._late = FakeStage(page_size), FakeStage(page_size)
        self._in_flight: deque[tuple[int, list[MirroredChunk], list[int]]] = deque()

    @property
    def steps_in_flight(self) -> int:
        return len(self._in_flight)

    def schedule(self) -> Microbatch | None:
        """Starts one step, if the scheduler has one."""
        microbatch = self.scheduler.next_microbatch(self.now_s)
        if microbatch is None:
            return None
        chunks = self._mirror.apply(self._encoder.encode(microbatch))
        for chunk, mirrored in zip(microbatch.chunks, chunks, strict=True):
            request = chunk.request
            assert list(mirrored.request.tokens) == request.prompt_ids + request.output_ids
            assert list(mirrored.request.pages) == request.pages
            assert (mirrored.start, mirrored.length) == (chunk.start, chunk.length)
        self._in_flight.append((microbatch.step_id, chunks, self._early.run(chunks)))
        self.microbatches.append(microbatch)
        return microbatch

    def complete(self) -> list[TokenEvent]:
        """Finishes the oldest step in flight."""
        step_id, chunks, early_tokens = self._in_flight.popleft()
        late_tokens = self._late.run(chunks)
        assert late_tokens == early_tokens
        logprobs = self._late.logprobs(chunks)
        return self.scheduler.on_result(step_id, late_tokens, self.now_s, logprobs)

    def fill(self) -> None:
        """Starts steps until the pipeline is full or there is nothing to do."""
        while self.schedule() is not None:
            pass

    def drain(self, max_steps: int = 10_000) -> list[TokenEvent]:
        """Runs until nothing is left; fails when that takes more than `max_steps` steps."""
        events: list[TokenEvent] = []
        for _ in range(max_steps):
            self.fill()
            if not self._in_flight:
                assert self.scheduler.is_idle, "requests are left, but nothing can run"
                return events
            events += self.complete()
            self.scheduler.check_invariants()
        raise AssertionError(f"not done after {max_steps} steps")
