"""The length of chunks against looking at every length."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.pipelines import make_request

from sgl_pipeline.microbatch import Chunk
from sgl_pipeline.scheduling.prefill_room import MAX_TAIL_TOKENS, PrefillRoom
from sgl_pipeline.step_work import StepWork, attended_tokens
from sgl_pipeline.throttle import TimeLimit, TokenBudget


class Times:
    """Rows beyond 16 cost, and what is attended to."""

    def step_ms(self, work: StepWork) -> float:
        attended = work.decode_attended_tokens + work.prefill_attended_tokens
        return 5.0 + 0.1 * max(0, work.tokens - 16) + 0.001 * attended + 0.3 * work.samples


def decodes(*contexts: int) -> list[Chunk]:
    request = make_request("d", [1])
    return [Chunk(request, context - 1, 1, is_decode=True, samples=True) for context in contexts]


def room_of(step_ms: float, least: int = 0, tokens: int = 500, rows: int = 0) -> PrefillRoom:
    limit = TimeLimit(step_ms, least, Times())
    return PrefillRoom(TokenBudget(tokens, rows, "WT", limit), decodes(*[100] * rows))


@given(
    step_ms=st.floats(4.0, 40.0),
    start=st.integers(0, 2000),
    remaining=st.integers(1, 600),
    rows=st.integers(0, 30),
    least=st.sampled_from([0, 1, 32]),
)
def test_a_chunk_is_the_longest_that_fits(
    step_ms: float, start: int, remaining: int, rows: int, least: int
) -> None:
    def time_ms(length: int) -> float:
        attended = attended_tokens(start, start + length)
        return Times().step_ms(StepWork(rows + length, rows, 100 * rows, attended, rows))

    longest = max([n for n in range(1, 501) if time_ms(n) <= step_ms], default=0)
    expected = min(max(longest, least), remaining, 500)
    rest = remaining - expected
    if rest <= min(MAX_TAIL_TOKENS, expected // 8):
        expected = remaining
    assert room_of(step_ms, least, rows=rows).chunk_length(start, remaining) == expected


def test_what_was_taken_leaves_less_room() -> None:
    room = room_of(15.0)
    first = room.chunk_length(0, 60)
    assert first == 60
    room.take(0, 60, samples=True)
    assert room.is_open
    # 5 + 4.4 + 0.3 + 1.83 ms are taken.
    second = room.chunk_length(0, 400)
    assert 0 < second < 40
    room.take(0, second, samples=False)
    assert not room.is_open


class CountedTimes(Times):
    def __init__(self) -> None:
        self.num_asked = 0

    def step_ms(self, work: StepWork) -> float:
        self.num_asked += 1
        return super().step_ms(work)


def test_where_time_has_cut_a_prompt_the_step_is_full() -> None:
    """What a token late in a long prompt leaves would hold a few of others, and each of their tiny
    chunks would cost a search."""
    times = CountedTimes()
    room = PrefillRoom(TokenBudget(500, 0, "WT", TimeLimit(20.0, 0, times)), [])
    late = room.chunk_length(3000, 400)
    assert 0 < late < 400
    room.take(3000, late, samples=False)
    assert times.step_ms(StepWork(late + 1, 0, 0, attended_tokens(3000, 3000 + late), 0)) < 20.0
    asked = times.num_asked
    assert not room.is_open
    assert [room.chunk_length(0, 100) for _ in range(50)] == [0] * 50
    assert times.num_asked == asked


def test_the_least_is_for_one_prompt_of_a_step() -> None:
    room = room_of(1.0, least=32)
    assert room.is_open and room.chunk_length(0, 100) == 32
    room.take(0, 32, samples=False)
    assert not room.is_open and room.chunk_length(0, 100) == 0


def test_beside_other_prompts_a_cut_one_has_at_least_a_quarter_of_the_least_or_nothing() -> None:
    for taken, expected in ((40, 51), (70, 16), (76, 0)):
        room = room_of(15.0, least=32)
        room.take(0, taken, samples=True)
        assert (room.chunk_length(0, 400), room.is_open) == (expected, False)
        # A whole prompt is none of that.
        room = room_of(15.0, least=32)
        room.take(0, taken, samples=True)
        assert room.chunk_length(0, 5) == 5 and room.is_open


@pytest.mark.parametrize("tokens", [0, 100])
def test_without_a_limit_of_time_tokens_count(tokens: int) -> None:
    room = PrefillRoom(TokenBudget(tokens, 0, "WT"), [])
    assert room.is_open == (tokens > 0)
    assert room.chunk_length(5000, 300) == tokens


@pytest.mark.parametrize(("newcomer_ms", "fits"), [(17.0, True), (16.0, False)])
def test_a_newcomer_stretches_the_step_if_its_prompt_then_ends(
    newcomer_ms: float, fits: bool
) -> None:
    budget = TokenBudget(500, 0, "WT", TimeLimit(10.0, 0, Times(), newcomer_ms=newcomer_ms))
    room, usual = PrefillRoom(budget, []), PrefillRoom(budget, []).chunk_length(0, 90)
    assert usual < 90
    room.stretch(0, 90)  # to 5 + 7.4 + 4.1 ms
    assert room.chunk_length(0, 90) == (90 if fits else usual)
