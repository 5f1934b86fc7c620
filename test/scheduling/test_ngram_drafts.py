"""Drafts are what a search through the whole request finds, however its tokens arrive."""

from hypothesis import given
from hypothesis import strategies as st

from sgl_pipeline.requests import GREEDY, Request, StopRules
from sgl_pipeline.scheduling.ngram_drafts import NgramIndex, NgramRange

LENGTHS = st.integers(1, 4).flatmap(
    lambda shortest: st.integers(shortest, 6).map(lambda longest: NgramRange(shortest, longest))
)
TOKENS = st.lists(st.integers(0, 3), max_size=60)


def new_request(prompt_ids: list[int]) -> Request:
    return Request("test", list(prompt_ids), GREEDY, StopRules(max_new_tokens=1_000))


def new_index(prompt_ids: list[int], shortest: int = 1, longest: int = 3) -> NgramIndex:
    return NgramIndex(new_request(prompt_ids), NgramRange(shortest, longest), 1_000)


def searched_draft(
    tokens: list[int], lengths: NgramRange, capacity: int, num_tokens: int
) -> tuple[int, ...]:
    """The draft by a search from the end, among the n-grams that an index of that capacity knows:
    those that end in the generation of the last token but one, or in the one before."""
    end = len(tokens)
    oldest = ((end - 2) // capacity - 1) * capacity
    for length in range(lengths.longest, lengths.shortest - 1, -1):
        for follower in range(end - 1, max(length, oldest + 1) - 1, -1):
            if tokens[follower - length : follower] == tokens[end - length :]:
                drafted = list(tokens)
                for _ in range(num_tokens):
                    drafted.append(drafted[follower + len(drafted) - end])
                return tuple(drafted[end:])
    return ()


@given(TOKENS, TOKENS, LENGTHS, st.integers(1, 20), st.integers(0, 9), st.data())
def test_draft_is_that_of_a_search(
    prompt_ids: list[int],
    output_ids: list[int],
    lengths: NgramRange,
    capacity: int,
    num_tokens: int,
    data: st.DataObject,
) -> None:
    request = new_request(prompt_ids)
    index = NgramIndex(request, lengths, capacity)
    for token_id in output_ids:
        request.output_ids.append(token_id)
        if data.draw(st.booleans()):
            known = request.tokens(0, request.num_tokens)
            assert index.draft(num_tokens) == searched_draft(known, lengths, capacity, num_tokens)


def test_longest_ngram_counts_before_the_latest() -> None:
    index = new_index([1, 2, 3, 7, 9, 3, 8, 1, 2, 3])
    assert index.draft(2) == (7, 9)


def test_of_equal_ngrams_the_latest_counts() -> None:
    index = new_index([1, 2, 7, 1, 2, 8, 1, 2])
    assert index.draft(1) == (8,)


def test_loop_goes_on_as_a_loop() -> None:
    assert new_index([5, 1, 2, 1, 2]).draft(5) == (1, 2, 1, 2, 1)


def test_shorter_ngrams_than_the_shortest_give_no_draft() -> None:
    assert new_index([1, 2, 5, 3, 2], shortest=2).draft(4) == ()
    assert new_index([1, 2, 5, 3, 2], shortest=1).draft(2) == (5, 3)


def test_memory_is_bounded() -> None:
    request = new_request(list(range(10_000)))
    index = NgramIndex(request, NgramRange(1, 3), 100)
    index.catch_up()
    known = [*index._young.values(), *index._old.values()]
    assert sum(map(len, known)) <= 2 * 3 * 100
