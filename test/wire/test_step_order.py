"""The step plan's two halves: what the encoder saw is what the mirror has, or it is an error."""

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.microbatches import microbatch_of

from sgl_pipeline.errors import ProtocolError
from sgl_pipeline.microbatch import Chunk, StateSnapshot
from sgl_pipeline.requests import GREEDY, LogprobSpec, Request, SamplingSpec, StopRules
from sgl_pipeline.wire.step_order import (
    ChunkOrder,
    MirrorSnapshot,
    RequestMirror,
    RequestOpen,
    StepOrder,
    StepOrderEncoder,
)


def make_request(
    prompt_ids: list[int], sampling: SamplingSpec = GREEDY, logprobs: LogprobSpec | None = None
) -> Request:
    return Request("r", prompt_ids, sampling, StopRules(max_new_tokens=100), logprobs=logprobs)


def chunk_of(request: Request, length: int, new_pages: list[int]) -> Chunk:
    """The next `length` tokens, with the pages that they need."""
    request.pages += new_pages
    start = request.num_scheduled
    request.num_scheduled += length
    return Chunk(request, start, length, is_decode=False, samples=start + length == 3)


class CountingConstraint:
    """Its masks are the number of questions and the draft token; that after token 9 is empty."""

    def __init__(self) -> None:
        self.num_questions = 0

    def allowed_tokens_masks(self, draft_ids: Sequence[int] = ()) -> list[bytes]:
        self.num_questions += 1
        tokens = (0, *draft_ids)
        return [b"" if token == 9 else bytes([self.num_questions, token]) for token in tokens]

    def accept(self, token_id: int) -> None: ...

    def forced_tokens(self) -> tuple[int, ...]:
        return ()

    def try_token(self, token_id: int) -> bool:
        return True

    def take_back(self) -> None: ...


def over_the_wire(plan: StepOrder) -> StepOrder:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(plan), type=StepOrder)


def contents(mirror: RequestMirror) -> list[tuple[Any, ...]]:
    return [
        (r.handle, r.sampling, r.prompt_length, list(r.tokens), list(r.pages), r.logprobs)
        for r in mirror
    ]


def test_drafts_are_in_the_chunk_and_not_in_the_mirror() -> None:
    request, encoder, mirror = make_request([5, 6, 7]), StepOrderEncoder(), RequestMirror()
    request.pages = [4, 8]
    request.output_ids = [9]
    chunk = Chunk(request, 3, 3, is_decode=True, samples=True, draft_ids=(1, 2))
    mirrored = mirror.apply(over_the_wire(encoder.encode(microbatch_of(0, (chunk,)))))
    assert [(one.start, one.length, one.num_samples) for one in mirrored] == [(3, 3, 3)]
    assert mirrored[0].draft_ids == (1, 2)
    assert list(mirrored[0].request.tokens) == [5, 6, 7, 9]
    # The first was right, and what was drawn after it.
    request.output_ids += [1, 3]
    chunk = Chunk(request, 5, 1, is_decode=True, samples=True)
    mirrored = mirror.apply(over_the_wire(encoder.encode(microbatch_of(1, (chunk,)))))
    assert list(mirrored[0].request.tokens) == [5, 6, 7, 9, 1, 3]
    assert mirrored[0].draft_ids == ()


def three_plans() -> list[StepOrder]:
    """A request in two chunks, another one that joins, the first one released."""
    encoder = StepOrderEncoder()
    first, second = make_request([1, 2, 3]), make_request([7], SamplingSpec(seed=5, top_k=3))
    plans = [encoder.encode(microbatch_of(0, (chunk_of(first, 2, [4]),)))]
    chunks = (chunk_of(first, 1, [9]), chunk_of(second, 1, [5]))
    plans.append(encoder.encode(microbatch_of(1, chunks)))
    second.output_ids.append(8)
    plans.append(encoder.encode(microbatch_of(2, (chunk_of(second, 1, [6]),), (first,))))
    return plans


def test_a_request_is_described_once_and_afterwards_only_deltas_travel() -> None:
    plans = three_plans()
    assert [len(plan.opens) for plan in plans] == [1, 1, 0]
    assert [plan.closes for plan in plans] == [(), (), (0,)]
    # int32 tokens and pages: the whole prompt goes with the first chunk, pages as they come.
    sizes = [[(len(c.new_tokens), len(c.new_pages)) for c in plan.chunks] for plan in plans]
    assert sizes == [[(12, 4)], [(0, 4), (4, 4)], [(4, 4)]]


def test_the_mirror_gives_back_chunks_with_all_that_came_before() -> None:
    mirror = RequestMirror()
    seen = []
    for plan in three_plans():
        for chunk in mirror.apply(over_the_wire(plan)):
            tokens, pages = list(chunk.request.tokens), list(chunk.request.pages)
            seen.append((chunk.start, chunk.length, chunk.samples, tokens, pages))
    assert seen == [
        (0, 2, False, [1, 2, 3], [4]),
        (2, 1, True, [1, 2, 3], [4, 9]),
        (0, 1, False, [7], [5]),
        (1, 1, False, [7, 8], [5, 6]),
    ]
    assert contents(mirror) == [(1, SamplingSpec(seed=5, top_k=3), 1, [7, 8], [5, 6], None)]


def test_a_retracted_request_is_closed_and_opened_anew_in_one_plan() -> None:
    encoder, mirror = StepOrderEncoder(), RequestMirror()
    request = make_request([1, 2, 3])
    mirror.apply(encoder.encode(microbatch_of(0, (chunk_of(request, 3, [4]),))))
    request.output_ids.append(9)
    request.pages, request.num_scheduled = [], 0
    plan = encoder.encode(microbatch_of(1, (chunk_of(request, 4, [6, 7]),), (request,)))
    assert (plan.closes, plan.opens) == ((0,), (RequestOpen(1, GREEDY, 3),))
    mirror.apply(plan)
    assert contents(mirror) == [(1, GREEDY, 3, [1, 2, 3, 9], [6, 7], None)]


def test_a_request_opened_anew_wants_only_the_log_probabilities_that_are_missing() -> None:
    encoder, mirror = StepOrderEncoder(), RequestMirror()
    request = make_request([1, 2, 3, 4], logprobs=LogprobSpec(1, 5, (7,)))
    mirror.apply(encoder.encode(microbatch_of(0, (chunk_of(request, 3, [4]),))))
    assert next(iter(mirror)).logprobs == request.logprobs
    request.num_logprob_rows = 2
    request.pages, request.num_scheduled = [], 0
    plan = encoder.encode(microbatch_of(1, (chunk_of(request, 4, [6]),), (request,)))
    mirror.apply(over_the_wire(plan))
    assert next(iter(mirror)).logprobs == LogprobSpec(3, 5, (7,))
    joined = RequestMirror()
    joined.restore(encoder.snapshot())
    assert contents(joined) == contents(mirror)


def test_the_row_of_the_first_output_token_is_wanted_wherever_the_prompts_rows_begin() -> None:
    request = make_request([1, 2, 3], logprobs=LogprobSpec(3))
    plan = StepOrderEncoder().encode(microbatch_of(0, (chunk_of(request, 3, [4]),)))
    assert plan.opens[0].logprobs == LogprobSpec(2)


def test_a_request_released_before_it_was_ever_sent_is_not_closed() -> None:
    plan = StepOrderEncoder().encode(microbatch_of(0, (), (make_request([1]),)))
    assert plan.closes == ()


def test_whole_numbers_may_stand_for_floats_in_a_sampling_spec() -> None:
    encoder, mirror = StepOrderEncoder(), RequestMirror()
    request = make_request([1], SamplingSpec(temperature=1, top_p=1))
    mirror.apply(over_the_wire(encoder.encode(microbatch_of(0, (chunk_of(request, 1, [0]),)))))
    assert next(iter(mirror)).sampling == SamplingSpec()


def test_every_field_of_a_sampling_spec_travels() -> None:
    spec = SamplingSpec(0.5, 3, 0.9, 0.1, 7, 0.25, -0.5, 1.5, ((4, -100.0), (9, 2)), 6, (2, 8))
    plan = StepOrderEncoder().encode(microbatch_of(0, (chunk_of(make_request([1], spec), 1, [0]),)))
    mirror = RequestMirror()
    mirror.apply(over_the_wire(plan))
    assert next(iter(mirror)).sampling == spec


events = st.lists(
    st.tuples(st.sampled_from(["open", "chunk", "token", "release"]), st.integers(0, 9)),
    max_size=40,
)


@given(events=events, joins_after=st.integers(0, 40))
def test_any_history_round_trips_and_a_late_joiner_has_the_same(
    events: list[tuple[str, int]], joins_after: int
) -> None:
    encoder, live, joined = StepOrderEncoder(), RequestMirror(), RequestMirror()
    requests: list[Request] = []
    released: list[Request] = []
    step_id, next_page, has_joined = 0, 0, False
    for number, (kind, value) in enumerate(events):
        if kind == "open":
            requests.append(make_request([value] * (value + 1)))
            continue
        if not requests:
            continue
        request = requests[value % len(requests)]
        if kind == "token":
            request.output_ids.append(value)
        elif kind == "release":
            requests.remove(request)
            released.append(request)
        elif length := min(1 + value // 2, request.num_tokens - request.num_scheduled):
            chunk = chunk_of(request, length, [next_page])
            next_page += 1
            plan = encoder.encode(microbatch_of(step_id, (chunk,), tuple(released)))
            step_id += 1
            released = []
            (mirrored,) = live.apply(over_the_wire(plan))
            assert list(mirrored.request.tokens) == request.prompt_ids + request.output_ids
            assert list(mirrored.request.pages) == request.pages
            if has_joined:
                joined.apply(plan)
                assert contents(joined) == contents(live)
        if number >= joins_after and not has_joined:
            snapshot = msgspec.msgpack.encode(encoder.snapshot())
            joined.restore(msgspec.msgpack.decode(snapshot, type=MirrorSnapshot))
            has_joined = True
            assert contents(joined) == contents(live)


def test_restoring_replaces_what_was_there() -> None:
    mirror = RequestMirror()
    mirror.apply(three_plans()[0])
    mirror.restore(MirrorSnapshot((RequestOpen(3, GREEDY, 1),), (ChunkOrder(3, 0, 0, False),)))
    assert contents(mirror) == [(3, GREEDY, 1, [], [], None)]


def test_a_mask_is_asked_for_once_for_each_chunk_that_samples_and_reaches_the_stage() -> None:
    encoder, mirror = StepOrderEncoder(), RequestMirror()
    request, plain = make_request([1, 2, 3]), make_request([4, 5, 6])
    request.constraint = CountingConstraint()
    masks = []
    for step, length in enumerate((2, 1)):
        chunks = (chunk_of(request, length, [step]), chunk_of(plain, length, [5 + step]))
        plan = over_the_wire(encoder.encode(microbatch_of(step, chunks)))
        masks.append([chunk.token_mask for chunk in mirror.apply(plan)])
    assert masks == [[b"", b""], [b"\x01\x00", b""]]


def drafted_order(draft_ids: tuple[int, ...]) -> ChunkOrder:
    """That of a decode of a request with a grammar."""
    request = make_request([1, 2])
    request.pages, request.output_ids = [4], [3]
    request.constraint = CountingConstraint()
    chunk = Chunk(request, 2, 1 + len(draft_ids), True, True, draft_ids)
    return over_the_wire(StepOrderEncoder().encode(microbatch_of(0, (chunk,)))).chunks[0]


def test_a_chunk_with_drafts_has_a_mask_for_each_drawn_token() -> None:
    assert drafted_order((5, 6)).token_mask == b"\1\0\1\5\1\6"
    # One that restricts nothing is written out beside others.
    assert drafted_order((5, 9)).token_mask == b"\1\0\1\5\xff\xff"


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"token_mask": b"12345"}, "draws 3 tokens, its masks have 5 bytes"),
        ({"samples": False}, "a chunk of 3 tokens has 2 draft tokens"),
        ({"length": 2}, "a chunk of 2 tokens has 2 draft tokens"),
        ({"samples": False, "draft_tokens": b""}, "draws 0 tokens, its masks have 6 bytes"),
    ],
)
def test_drafts_and_masks_that_do_not_fit_their_chunk_are_an_error(
    changes: dict[str, Any], what: str
) -> None:
    mirror, chunk = RequestMirror(), msgspec.structs.replace(drafted_order((5, 6)), **changes)
    opened = RequestOpen(chunk.handle, GREEDY, 2)
    with pytest.raises(ProtocolError, match=what):
        mirror.apply(StepOrder(0, 0, (), (opened,), (chunk,)))


def test_snapshots_of_a_chunk_reach_the_stage() -> None:
    request, encoder, mirror = make_request([1] * 9), StepOrderEncoder(), RequestMirror()
    request.state_slot = 3
    taken = (StateSnapshot(4, 6), StateSnapshot(8, 7))
    chunk = Chunk(request, 2, 6, False, False, state_source=5, snapshots=taken)
    (mirrored,) = mirror.apply(over_the_wire(encoder.encode(microbatch_of(0, (chunk,)))))
    assert (mirrored.request.state_slot, mirrored.state_source) == (3, 5)
    assert mirrored.snapshots == taken


def test_a_request_that_goes_on_in_another_slot_is_told_once() -> None:
    request, encoder, mirror = make_request([1] * 4), StepOrderEncoder(), RequestMirror()
    request.state_slot = 3
    told = []
    for start, source in ((0, None), (4, 3), (5, None)):
        if source is not None:
            request.state_slot = 6
        length = 1 if start else 4
        chunk = Chunk(request, start, length, start > 0, True, state_source=source)
        order = over_the_wire(encoder.encode(microbatch_of(start, (chunk,))))
        (mirrored,) = mirror.apply(order)
        told.append(order.chunks[0].state_slot)
        assert mirrored.state_source == source
        assert mirrored.request.state_slot == request.state_slot
        request.output_ids.append(1)
    assert told == [None, 6, None]
    # Whoever joins is told where it is now.
    assert encoder.snapshot().opens[0].state_slot == 6


def test_a_request_that_goes_on_in_another_slot_begins_with_a_state() -> None:
    opened, chunk = RequestOpen(0, GREEDY, 9, state_slot=0), ChunkOrder(0, 4, 1, True, state_slot=2)
    with pytest.raises(ProtocolError, match="goes on in the state slot 2 without a state"):
        RequestMirror().apply(StepOrder(0, 0, (), (opened,), (chunk,)))


@pytest.mark.parametrize(
    ("start", "source", "places", "what"),
    [
        (0, 1, (), "begins with the snapshot 1, at position 0"),
        (2, None, (2,), r"positions 2 to 6 takes snapshots after \[2\] tokens"),
        (2, 1, (7,), r"positions 2 to 6 takes snapshots after \[7\] tokens"),
        (2, None, (4, 4), r"takes snapshots after \[4, 4\] tokens"),
        (2, None, (5, 3), r"takes snapshots after \[5, 3\] tokens"),
    ],
)
def test_snapshots_that_are_not_on_the_way_of_their_chunk_are_an_error(
    start: int, source: int | None, places: tuple[int, ...], what: str
) -> None:
    taken = tuple(StateSnapshot(place, 5 + number) for number, place in enumerate(places))
    chunk = ChunkOrder(0, start, 4, False, state_source=source, snapshots=taken)
    with pytest.raises(ProtocolError, match=what):
        RequestMirror().apply(
            StepOrder(0, 0, (), (RequestOpen(0, GREEDY, 9, state_slot=0),), (chunk,))
        )


@pytest.mark.parametrize(
    "given",
    [{"state_source": 1}, {"snapshots": (StateSnapshot(3, 1),)}, {"state_slot": 1}],
    ids=["source", "taken", "slot"],
)
def test_snapshots_of_a_request_without_a_state_are_an_error(given: dict[str, Any]) -> None:
    opened, chunk = RequestOpen(0, GREEDY, 9), ChunkOrder(0, 2, 4, False, **given)
    with pytest.raises(ProtocolError, match="without a state slot has snapshots"):
        RequestMirror().apply(StepOrder(0, 0, (), (opened,), (chunk,)))
