"""The load is as long as it says, exceeds the pool as told, and is the same for a seed."""

import math
from collections import Counter
from dataclasses import replace
from random import Random

import pytest

from benchmark.tiers.conversations import Conversations, random_tokens, tokens_of_text

LOAD = Conversations(sessions=24, turns=5, first_tokens=100, user_tokens=20, output_tokens=7)
SOURCE = random_tokens(259, 512)


def test_a_conversation_is_as_long_as_its_turns() -> None:
    lengths = Counter[int]()
    for one in LOAD.planned(SOURCE):
        lengths[one.session] += len(one.user_tokens)
        assert lengths[one.session] == LOAD.prompt_tokens(one.turn)
        lengths[one.session] += LOAD.output_tokens
    assert set(lengths.values()) == {LOAD.final_tokens}
    assert len(lengths) == LOAD.sessions


@pytest.mark.parametrize(("excess", "page_size"), [(4.0, 16), (4.0, 1), (2.5, 64)])
def test_the_conversations_exceed_the_pool_as_told(excess: float, page_size: int) -> None:
    pool = LOAD.pool_tokens(excess, page_size)
    whole = LOAD.sessions * LOAD.final_tokens
    assert pool % page_size == 0
    assert excess <= whole / pool < whole / (whole / excess - page_size)


def test_every_session_takes_a_turn_before_one_takes_its_next() -> None:
    planned = LOAD.planned(SOURCE)
    for turn in range(1, LOAD.turns + 1):
        of_turn = planned[(turn - 1) * LOAD.sessions : turn * LOAD.sessions]
        assert {one.turn for one in of_turn} == {turn}
        assert sorted(one.session for one in of_turn) == list(range(LOAD.sessions))
    orders = {tuple(one.session for one in planned[n : n + 24]) for n in range(0, 120, 24)}
    assert len(orders) == LOAD.turns


def test_a_seed_gives_one_load_and_another_seed_another() -> None:
    assert LOAD.planned(SOURCE) == LOAD.planned(SOURCE)
    assert LOAD.planned(SOURCE) != replace(LOAD, seed=2).planned(SOURCE)


def test_without_a_rate_all_turns_have_come_and_with_one_they_come_by_poisson() -> None:
    assert {one.at_s for one in LOAD.planned(SOURCE)} == {0.0}
    load = replace(LOAD, sessions=2000, turns=1, first_tokens=1, turns_per_s=8.0)
    moments = [one.at_s for one in load.planned(SOURCE)]
    assert moments == sorted(moments)
    # 2000 gaps with a mean of 1/8 s: the mean of so many is within 7 % in 998 of 1000 seeds.
    assert moments[-1] == pytest.approx(2000 / 8.0, rel=0.07)
    assert load.most_at_once == 2000
    assert replace(load, turns_per_s=math.inf).most_at_once == load.clients


def test_sessions_return_once_more_each() -> None:
    returns = LOAD.returns(SOURCE)
    assert sorted(one.session for one in returns) == list(range(LOAD.sessions))
    assert {(one.turn, len(one.user_tokens)) for one in returns} == {(6, LOAD.user_tokens)}
    assert returns[0].user_tokens not in [one.user_tokens for one in LOAD.planned(SOURCE)]


def test_a_load_without_reuse_is_the_same_work_of_new_tokens() -> None:
    planned, apart = LOAD.planned(SOURCE), LOAD.without_reuse(SOURCE)
    lengths = [LOAD.prompt_tokens(one.turn) for one in planned]
    assert [len(one.user_tokens) for one in apart] == lengths
    assert {one.turn for one in apart} == {1}
    assert len({one.session for one in apart}) == len(apart) == LOAD.sessions * LOAD.turns
    # Not even a page is shared.
    assert len({one.user_tokens[:16] for one in apart}) == len(apart)


def test_random_tokens_are_in_their_range() -> None:
    tokens = random_tokens(10, 13)(Random(0), 1000)
    assert set(tokens) == {10, 11, 12}


def test_a_text_is_read_from_anywhere_and_begins_anew_after_its_end() -> None:
    draw, rng = tokens_of_text(range(50)), Random(3)
    starts = set()
    for _ in range(200):
        tokens = draw(rng, 70)
        starts.add(tokens[0])
        assert tokens == tuple((tokens[0] + place) % 50 for place in range(70))
    assert len(starts) > 40
