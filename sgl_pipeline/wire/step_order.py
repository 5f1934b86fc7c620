"""The per-step message from the scheduler to every stage, both halves of it.

`StepOrderEncoder` (scheduler process) turns a `Microbatch` into a `StepOrder`: a request is
described once, afterwards only its new tokens and pages travel. `RequestMirror` (stage process)
applies them in order and gives back each chunk with all that its request has accumulated. They
travel in the stream of `stage_orders.py`, which makes sure that none is lost, repeated or altered.
"""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise

import msgspec

from sgl_pipeline.errors import ProtocolError
from sgl_pipeline.microbatch import REPLAY_TOKENS, Chunk, Microbatch, StateSnapshot
from sgl_pipeline.requests import Lease, LogprobSpec, Request, SamplingSpec
from sgl_pipeline.wire.logged_pages import LogContents

INT32 = "i"  # array typecode of token and page ids on the wire


class RequestOpen(msgspec.Struct, frozen=True, array_like=True):
    """A request that the stages have not seen, or see anew after a retraction.

    `handle` is unique for the life of the server. `prompt_length` splits the tokens so far into
    prompt and output. `logprobs.prompt_start` is the first position whose row is still wanted.
    With a `lease` its keys and values are on another server, and its only page here takes those of
    its rows of a step, at their places in a page; its chunks come last in a step. `state_slot` is
    where it keeps its states, given if and only if the model has layers with a state.
    """

    handle: int
    sampling: SamplingSpec
    prompt_length: int
    logprobs: LogprobSpec | None = None
    lease: Lease | None = None
    state_slot: int | None = None


class ChunkOrder(msgspec.Struct, frozen=True, array_like=True):
    """One chunk: `length` tokens from position `start` of the request `handle`.

    `new_tokens` and `new_pages` are int32 arrays to append to what the stage already holds.
    `token_mask` selects the tokens that may be drawn (`requests.TokenConstraint`), if the chunk
    samples.

    `draft_tokens`, an int32 array, are the last of the `length` tokens, and guesses: a token is
    drawn after each of them, as after the one before, and the stage keeps none. `token_mask` then
    has a mask for each drawn token, one behind the other, or is empty.

    `state_source` and `snapshots` are those of `microbatch.Chunk`. With a `state_slot` the request
    keeps its state there from this chunk on, which begins with the state in `state_source`.
    """

    handle: int
    start: int
    length: int
    samples: bool
    new_tokens: bytes = b""
    new_pages: bytes = b""
    token_mask: bytes = b""
    draft_tokens: bytes = b""
    state_source: int | None = None
    snapshots: tuple[StateSnapshot, ...] = ()
    state_slot: int | None = None


class ReplayPlan(msgspec.Struct, frozen=True, array_like=True):
    """`length` tokens from position `start` of the request `handle`, which `stages` compute again:
    the other stages have not lost their keys and values."""

    handle: int
    start: int
    length: int
    stages: tuple[int, ...]


class StepOrder(msgspec.Struct, frozen=True, tag=True):
    """The data that every stage needs for one step. Applied as: closes, opens, chunks; run as:
    replays, chunks."""

    step_id: int
    epoch: int
    closes: tuple[int, ...]
    opens: tuple[RequestOpen, ...]
    chunks: tuple[ChunkOrder, ...]
    replays: tuple[ReplayPlan, ...] = ()


class MirrorSnapshot(msgspec.Struct, frozen=True, tag=True):
    """The whole state of a mirror, for a stage that joins or restarts.

    Each chunk has length 0 and carries all tokens and pages of its request. `log` is the contents
    of the boundary logs; None where there are no logs.
    """

    opens: tuple[RequestOpen, ...]
    contents: tuple[ChunkOrder, ...]
    log: LogContents | None = None


@dataclass(slots=True)
class _SentState:
    """The part of a request that the stages know."""

    handle: int
    state_slot: int | None
    num_tokens: int = 0
    num_pages: int = 0


class StepOrderEncoder:
    """Turns microbatches into deltas. Lives beside the `StepScheduler`, one for all stages."""

    def __init__(self) -> None:
        self._sent: dict[Request, _SentState] = {}
        self._next_handle = 0

    def encode(self, microbatch: Microbatch) -> StepOrder:
        """The plan of `microbatch`. To be called once for each, in the order of their step ids."""
        closes = tuple(
            self._sent.pop(request).handle
            for request in microbatch.released
            if request in self._sent
        )
        opens = tuple(
            self._open(chunk.request)
            for chunk in microbatch.chunks
            if chunk.request not in self._sent
        )
        chunks = tuple(self._chunk(chunk) for chunk in microbatch.chunks)
        replays = tuple(
            ReplayPlan(self._sent[one.request].handle, one.start, one.length, one.stages)
            for one in microbatch.replays
        )
        return StepOrder(microbatch.step_id, microbatch.epoch, closes, opens, chunks, replays)

    def snapshot(self, log: LogContents | None = None) -> MirrorSnapshot:
        """All that a stage must know to continue with the next plan."""
        opens, contents = [], []
        for request, sent in self._sent.items():
            opens.append(_open_of(request, sent.handle))
            tokens = array(INT32, request.tokens(0, sent.num_tokens)).tobytes()
            pages = array(INT32, request.pages[: sent.num_pages]).tobytes()
            contents.append(ChunkOrder(sent.handle, sent.num_tokens, 0, False, tokens, pages))
        return MirrorSnapshot(tuple(opens), tuple(contents), log)

    def forget(self) -> None:
        """The stages have forgotten all requests; requests that go on are described anew."""
        self._sent.clear()

    def _open(self, request: Request) -> RequestOpen:
        handle = self._next_handle
        self._next_handle += 1
        self._sent[request] = _SentState(handle, request.state_slot)
        return _open_of(request, handle)

    def _chunk(self, chunk: Chunk) -> ChunkOrder:
        request, sent = chunk.request, self._sent[chunk.request]
        tokens = array(INT32, request.tokens(sent.num_tokens, request.num_tokens)).tobytes()
        pages = array(INT32, request.pages[sent.num_pages :]).tobytes()
        sent.num_tokens, sent.num_pages = request.num_tokens, len(request.pages)
        mask = b""
        if chunk.samples and request.constraint is not None:
            mask = _joined(request.constraint.allowed_tokens_masks(chunk.draft_ids))
        drafts = array(INT32, chunk.draft_ids).tobytes() if chunk.draft_ids else b""
        new_slot = None
        if request.state_slot != sent.state_slot:
            new_slot = sent.state_slot = request.state_slot
        return ChunkOrder(
            sent.handle,
            chunk.start,
            chunk.length,
            chunk.samples,
            tokens,
            pages,
            mask,
            drafts,
            chunk.state_source,
            chunk.snapshots,
            new_slot,
        )


def _joined(masks: Sequence[bytes]) -> bytes:
    """The masks of rows one behind the other; empty if no row is restricted."""
    length = max(map(len, masks))
    return b"".join(mask or b"\xff" * length for mask in masks)


def _open_of(request: Request, handle: int) -> RequestOpen:
    logprobs = request.logprobs
    if logprobs is not None:
        logprobs = msgspec.structs.replace(logprobs, prompt_start=request.first_logits_position)
    prompt_length = len(request.prompt_ids)
    return RequestOpen(
        handle, request.sampling, prompt_length, logprobs, request.lease, request.state_slot
    )


@dataclass(slots=True, eq=False)
class MirroredRequest:
    """A stage's copy of a request: int32 token ids (prompt and output) and page ids so far.

    `changes_logits` is that of `sampling`, which each step asks of each request.
    """

    handle: int
    sampling: SamplingSpec
    prompt_length: int
    tokens: "array[int]"
    pages: "array[int]"
    logprobs: LogprobSpec | None = None
    lease: Lease | None = None
    state_slot: int | None = None
    changes_logits: bool = field(init=False)

    def __post_init__(self) -> None:
        self.changes_logits = self.sampling.changes_logits


class MirroredChunk(msgspec.Struct, frozen=True, gc=False):
    """A chunk as a stage sees it, with fields as in `ChunkOrder`. A Struct for the speed of it; no
    cycle leads through it."""

    request: MirroredRequest
    start: int
    length: int
    samples: bool
    token_mask: bytes = b""
    draft_ids: tuple[int, ...] = ()
    state_source: int | None = None
    snapshots: tuple[StateSnapshot, ...] = ()

    @property
    def num_samples(self) -> int:
        """Number of tokens that are drawn from it."""
        return self.samples + len(self.draft_ids)


class RequestMirror:
    """A stage's view of all open requests, kept current by applying every plan in order."""

    def __init__(self) -> None:
        self._requests: dict[int, MirroredRequest] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[MirroredRequest]:
        return iter(self._requests.values())

    def apply(self, plan: StepOrder) -> list[MirroredChunk]:
        """Applies one plan and returns its chunks in order.

        Raises ProtocolError when drafts, masks or snapshots do not fit their chunk.
        """
        for handle in plan.closes:
            del self._requests[handle]
        for opened in plan.opens:
            self._open(opened)
        return [self._extend(chunk) for chunk in plan.chunks]

    def replays(self, plan: StepOrder) -> Iterator[tuple[tuple[int, ...], list[MirroredChunk]]]:
        """The recomputations before the chunks of `plan`, which was applied: stages, and chunks for
        one run of their layers; no chunk samples."""
        for stages, replays in groupby(plan.replays, lambda replay: replay.stages):
            batch: list[MirroredChunk] = []
            num_tokens = 0
            for replay in replays:
                if batch and num_tokens + replay.length > REPLAY_TOKENS:
                    yield stages, batch
                    batch, num_tokens = [], 0
                request = self._requests[replay.handle]
                batch.append(MirroredChunk(request, replay.start, replay.length, False))
                num_tokens += replay.length
            yield stages, batch

    def restore(self, snapshot: MirrorSnapshot) -> None:
        """Replaces everything by `snapshot`."""
        self._requests.clear()
        for opened in snapshot.opens:
            self._open(opened)
        for content in snapshot.contents:
            self._extend(content)

    def _open(self, opened: RequestOpen) -> None:
        self._requests[opened.handle] = MirroredRequest(
            opened.handle,
            opened.sampling,
            opened.prompt_length,
            array(INT32),
            array(INT32),
            opened.logprobs,
            opened.lease,
            opened.state_slot,
        )

    def _extend(self, chunk: ChunkOrder) -> MirroredChunk:
        request = self._requests[chunk.handle]
        if chunk.new_tokens:
            request.tokens.frombytes(chunk.new_tokens)
        if chunk.new_pages:
            request.pages.frombytes(chunk.new_pages)
        drafts = tuple(array(INT32, chunk.draft_tokens)) if chunk.draft_tokens else ()
        mirrored = MirroredChunk(
            request,
            chunk.start,
            chunk.length,
            chunk.samples,
            chunk.token_mask,
            drafts,
            chunk.state_source,
            chunk.snapshots,
        )
        if drafts or chunk.token_mask:
            _check_samples(mirrored)
        if chunk.snapshots or chunk.state_source is not None or chunk.state_slot is not None:
            _check_states(mirrored, chunk.state_slot)
        if chunk.state_slot is not None:
            request.state_slot = chunk.state_slot
        return mirrored


def _check_samples(chunk: MirroredChunk) -> None:
    """Raises ProtocolError unless there is a row for each draft token and a mask for each drawn
    one."""
    num_drafts, num_samples = len(chunk.draft_ids), chunk.num_samples
    if num_drafts and (not chunk.samples or num_drafts >= chunk.length):
        raise ProtocolError(f"a chunk of {chunk.length} tokens has {num_drafts} draft tokens")
    if chunk.token_mask and (not num_samples or len(chunk.token_mask) % num_samples):
        raise ProtocolError(
            f"a chunk draws {num_samples} tokens, its masks have {len(chunk.token_mask)} bytes"
        )


def _check_states(chunk: MirroredChunk, new_slot: int | None) -> None:
    """Raises ProtocolError unless the request has a state, the chunk begins behind the tokens of
    its snapshot, those that it takes are on its way, ascending, and a request that goes on in
    another slot begins with a state."""
    start, end = chunk.start, chunk.start + chunk.length
    if chunk.request.state_slot is None:
        raise ProtocolError("a chunk of a request without a state slot has snapshots")
    if new_slot is not None and chunk.state_source is None:
        raise ProtocolError(f"a request goes on in the state slot {new_slot} without a state")
    if chunk.state_source is not None and start == 0:
        raise ProtocolError(f"a chunk begins with the snapshot {chunk.state_source}, at position 0")
    places = [start, *(snapshot.num_tokens for snapshot in chunk.snapshots)]
    if any(place >= later for place, later in pairwise(places)) or places[-1] > end:
        raise ProtocolError(
            f"a chunk of positions {start} to {end} takes snapshots after {places[1:]} tokens"
        )
