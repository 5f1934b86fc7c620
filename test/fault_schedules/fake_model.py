"""A model without arithmetic, in which any page, token or row out of place changes what is drawn.

Each layer turns the row of a position into a fingerprint of that row and of its own fingerprints of
all positions before, which it keeps where the KV of these tokens would be: in slots of pages. A
model with states reads those before a chunk from the request's state (`fake_states.py`). The
last layer's stage draws the next token from all of a request's fingerprints there, read back
through its pages.
What a request must yield follows from its prompt alone.
"""

from array import array
from collections.abc import Iterable, Sequence
from itertools import count
from operator import mul
from typing import Protocol

from fault_schedules.fake_states import FakeStates, check_slots, runs_of

from sgl_pipeline.pp_runner.output.drafted_rows import rows_apart
from sgl_pipeline.requests import FinishReason, LogprobRows, Request
from sgl_pipeline.wire.step_order import MirroredChunk

VOCABULARY = 5
# A `NoRepeats` is complete when its tokens add up to this.
COMPLETE_SUM = 12


class NoRepeats:
    """A `TokenConstraint`: no token twice in a row; complete when the tokens add up to 12.

    It says that tokens count up, which is right by chance, and may run into an end.
    """

    def __init__(self) -> None:
        self.accepted: list[int] = []
        self._tried: list[int] = []

    def allowed_tokens_masks(self, draft_ids: Sequence[int] = ()) -> list[bytes]:
        assert not self._tried
        newest = [*self.accepted[-1:], *draft_ids]
        forbidden = newest if self.accepted else [VOCABULARY, *newest]
        every = (1 << VOCABULARY) - 1
        return [(every & ~(1 << token)).to_bytes(4, "little") for token in forbidden]

    def accept(self, token_id: int) -> FinishReason | None:
        assert token_id in allowed_tokens(self.allowed_tokens_masks()[0])
        self.accepted.append(token_id)
        return FinishReason("stop", token_id) if sum(self.accepted) >= COMPLETE_SUM else None

    def forced_tokens(self) -> tuple[int, ...]:
        newest = [*self.accepted, *self._tried][-1:]
        return tuple(range(newest[0] + 1, VOCABULARY)) if newest else ()

    def try_token(self, token_id: int) -> bool:
        tokens = [*self.accepted, *self._tried]
        if tokens[-1:] == [token_id] or sum(tokens) + token_id >= COMPLETE_SUM:
            return False
        self._tried.append(token_id)
        return True

    def take_back(self) -> None:
        self._tried.clear()


def allowed_tokens(mask: bytes) -> list[int]:
    """The tokens of the vocabulary that `mask` allows; all of them where it is empty."""
    bits = int.from_bytes(mask, "little")
    return [token for token in range(VOCABULARY) if not mask or bits >> token & 1]


def draw(fingerprints: Sequence[int], mask: bytes = b"") -> int:
    """The next token after positions with these fingerprints."""
    allowed = allowed_tokens(mask)
    return allowed[hash(tuple(fingerprints)) % len(allowed)]


def attention(fingerprints: Iterable[int]) -> int:
    """What the positions of a request from 0 on, with these fingerprints, are to the next one."""
    return sum(map(mul, fingerprints, count(1, 2)))


def append_position(seen: int, position: int, row: int) -> tuple[int, int]:
    """The fingerprint of `position`, whose row is `row`, where `seen` is the `attention` of all
    before it; and the attention with it."""
    own = hash((seen, row))
    return own, seen + own * (2 * position + 1)


# The pages of one layer: page id -> offset -> fingerprint.
LayerPages = dict[int, dict[int, int]]


class Elsewhere(Protocol):
    """The stages of other servers, as far as they attend for this one (`fake_leases.py`)."""

    def run(self, layer: int, chunk: MirroredChunk, rows: Sequence[int]) -> list[int]:
        """What becomes of the rows of a chunk in a layer."""

    def fingerprints(self, chunk: MirroredChunk) -> list[int]:
        """Those of the request in the layer that ran last."""


class FakeStage:
    """One stage's KV: the pages of each layer that it holds, its states, and what it computes on
    them. In a model with states all layers have some, except `paged_layer`: tokens are drawn from
    the pages of the last one."""

    def __init__(
        self,
        page_size: int,
        layers: Iterable[int] = (0,),
        num_state_slots: int = 0,
        paged_layer: int | None = None,
    ) -> None:
        self.page_size = page_size
        self._paged_layer = paged_layer
        self.states = FakeStates(num_state_slots)
        self.pages: dict[int, LayerPages] = {layer: {} for layer in layers}
        self._last = 0  # the last layer that ran
        # Runs the rows of leases, whose pages are elsewhere; None: there are none.
        self.elsewhere: Elsewhere | None = None

    def has_states(self, layer: int) -> bool:
        """True if requests have states in `layer`, which others than its own pages take."""
        return self.states.num_slots > 0 and layer != self._paged_layer

    def run(
        self,
        chunks: Sequence[MirroredChunk],
        rows: Sequence[int] | None = None,
        layers: Iterable[int] = (0,),
    ) -> list[int]:
        """The rows that leave the stage, of all chunks' tokens in order.

        Args:
            rows: those of the stage before; None on the first, whose rows are the tokens.
            layers: to be run, all of them held.
        """
        stream = _token_rows(chunks) if rows is None else list(rows)
        for layer in layers:
            stream = self._run_layer(layer, chunks, stream)
            self._last = layer
        return stream

    def _run_layer(
        self, layer: int, chunks: Sequence[MirroredChunk], rows: Sequence[int]
    ) -> list[int]:
        outgoing: list[int] = []
        check_slots(chunks)
        for chunk in chunks:
            incoming = rows[len(outgoing) : len(outgoing) + chunk.length]
            if chunk.request.lease is None:
                outgoing += self._run_chunk(layer, chunk, incoming)
            else:
                self._fill_scratch_page(layer, chunk)
                assert self.elsewhere is not None
                outgoing += self.elsewhere.run(layer, chunk, incoming)
        return outgoing

    def _run_chunk(self, layer: int, chunk: MirroredChunk, rows: Sequence[int]) -> list[int]:
        has_states = self.has_states(layer)
        seen = self.states.before(layer, chunk) if has_states else None
        outgoing: list[int] = []
        for end, slot in runs_of(chunk):
            start = chunk.start + len(outgoing)
            run = rows[len(outgoing) : end - chunk.start]
            outcome, seen = self._extend(layer, chunk.request.pages, start, run, seen)
            if has_states:
                self.states.keep(layer, slot, seen)
            outgoing += outcome
        return outgoing

    def extend(self, layer: int, own: Sequence[int], start: int, rows: Sequence[int]) -> list[int]:
        """Runs a layer for `rows` from position `start` on of the request whose pages are `own`;
        returns what becomes of them."""
        return self._extend(layer, own, start, rows, None)[0]

    def _extend(
        self, layer: int, own: Sequence[int], start: int, rows: Sequence[int], seen: int | None
    ) -> tuple[list[int], int]:
        """As `extend`, where the positions before `start` are `seen`, or what the pages have; and
        what they are with the rows."""
        pages, size = self.pages[layer], self.page_size
        if seen is None:
            seen = attention(self.fingerprints(layer, own, 0, start))
        outgoing = []
        for position, row in enumerate(rows, start):
            one, seen = append_position(seen, position, row)
            pages.setdefault(own[position // size], {})[position % size] = one
            outgoing.append(one)
        return outgoing, seen

    def _fill_scratch_page(self, layer: int, chunk: MirroredChunk) -> None:
        """The keys and values of a chunk of a lease are put into its only page here."""
        (page,) = chunk.request.pages
        size, end = self.page_size, chunk.start + chunk.length
        assert chunk.start // size == (end - 1) // size, "the rows of a lease need two pages"
        places = range(chunk.start % size, chunk.start % size + chunk.length)
        self.pages[layer].setdefault(page, {}).update(dict.fromkeys(places, -1))

    def content(self, layer: int, page: int) -> tuple[int, ...]:
        """The fingerprints of a full page. Raises KeyError where one is missing."""
        held = self.pages[layer][page]
        return tuple(held[offset] for offset in range(self.page_size))

    def draw(self, chunks: Sequence[MirroredChunk]) -> list[int]:
        """The tokens of the sampled rows; for the last stage, after `run`."""
        return [
            draw(self._last_fingerprints(chunk, 0), chunk.token_mask)
            for chunk in rows_apart(chunks)
            if chunk.samples
        ]

    def logprobs(self, chunks: Sequence[MirroredChunk]) -> list[LogprobRows]:
        """The rows of the chunks that want log-probabilities: that of a position is a half of
        its fingerprint."""
        found = []
        for chunk in rows_apart(chunks):
            if (spec := chunk.request.logprobs) is not None:
                wanted = self._last_fingerprints(chunk, max(chunk.start, spec.prompt_start))
                found.append(LogprobRows(len(wanted), array("i", _short(wanted)).tobytes()))
        return found

    def _last_fingerprints(self, chunk: MirroredChunk, start: int) -> list[int]:
        """Those of the last layer, of the request from `start` to the end of `chunk`."""
        end = chunk.start + chunk.length
        if chunk.request.lease is not None:
            assert self.elsewhere is not None
            return self.elsewhere.fingerprints(chunk)[start:end]
        return self.fingerprints(self._last, chunk.request.pages, start, end)

    def fingerprints(self, layer: int, own: Sequence[int], start: int, end: int) -> list[int]:
        """Those from position `start` to `end` of the request whose pages are `own`."""
        pages, size = self.pages[layer], self.page_size
        return [pages[own[position // size]][position % size] for position in range(start, end)]


def _token_rows(chunks: Sequence[MirroredChunk]) -> list[int]:
    return [
        token
        for part in rows_apart(chunks)
        for token in part.request.tokens[part.start : part.start + part.length]
    ]


class Oracle:
    """What `request` must yield from `num_layers` layers when it is not ended early: `output`,
    `rows`, what its log-probabilities must be, and the `fingerprints` of each layer."""

    def __init__(self, request: Request, num_layers: int = 1) -> None:
        self._seen = [0] * num_layers
        self.fingerprints: list[list[int]] = [[] for _ in range(num_layers)]
        self.output: list[int] = []
        for token in request.prompt_ids:
            self._append(token)
        constraint = None if request.constraint is None else NoRepeats()
        while len(self.output) < request.stops.max_new_tokens:
            mask = b"" if constraint is None else constraint.allowed_tokens_masks()[0]
            token = draw(self.fingerprints[-1], mask)
            self.output.append(token)
            self._append(token)
            is_complete = constraint is not None and constraint.accept(token) is not None
            if is_complete or token in request.stops.stop_token_ids:
                break
        self.rows: list[int] = []
        if request.logprobs is not None:
            start = min(request.logprobs.prompt_start, len(request.prompt_ids) - 1)
            # The row of the last output token would be of a token that was never drawn.
            end = len(request.prompt_ids) + max(0, len(self.output) - 1)
            self.rows = _short(self.fingerprints[-1][start:end])

    def _append(self, row: int) -> None:
        for layer, fingerprints in enumerate(self.fingerprints):
            row, self._seen[layer] = append_position(self._seen[layer], len(fingerprints), row)
            fingerprints.append(row)


def _short(fingerprints: Iterable[int]) -> list[int]:
    """31 bits of each, which are as long as a log-probability."""
    return [one & 0x7FFFFFFF for one in fingerprints]


def logprobs_of(request: Request) -> list[int]:
    """The rows that have come back to `request`."""
    found = array("i", b"".join(run.chosen for run in request.logprob_runs)).tolist()
    assert len(found) == request.num_logprob_rows
    return found
