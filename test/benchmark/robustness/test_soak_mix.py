"""What a soak asks, and that it would notice an answer that is not whole."""

import json
from collections import Counter
from itertools import islice

import pytest

from benchmark.robustness.soak_mix import (
    CHAT,
    COMPLETIONS,
    GENERATE,
    OPTIONAL_FEATURES,
    Answer,
    Ask,
    RequestMix,
    read_answer,
    what_is_wrong,
)


def drawn(count: int, *, seed: int = 1, share: float = 1 / 3, features=()) -> list[Ask]:
    mix = RequestMix(seed, {"What is 1 + 1?": "2"}, share, features)
    return list(islice(iter(mix.draw, None), count))


def test_a_seed_gives_the_same_requests_again() -> None:
    assert drawn(50) == drawn(50)
    assert drawn(50) != drawn(50, seed=2)


def test_the_mix_has_every_route_and_about_a_third_departs() -> None:
    asks = drawn(3000)
    assert {ask.path for ask in asks} == {GENERATE, CHAT, COMPLETIONS}
    departures = Counter(ask.departure for ask in asks if ask.expected_text is None)
    gone = 1 - departures["stays"] / departures.total()
    assert 0.3 < gone < 0.37
    assert min(departures.values()) > 20
    assert {ask.num_answers for ask in asks} == {1, 2, 3}
    assert {bool(ask.body.get("stream")) for ask in asks} == {True, False}


def test_clients_depart_only_as_they_are_told() -> None:
    mix = RequestMix(1, {}, 0.5, departures=("leaves",))
    departures = {mix.draw().departure for _ in range(200)}
    assert departures == {"stays", "leaves"}


def test_what_a_server_lacks_is_not_asked() -> None:
    def asked(features: tuple[str, ...]) -> str:
        return json.dumps([ask.body for ask in drawn(500, features=features)])

    assert "regex" not in asked(())
    assert "return_logprob" not in asked(())
    assert "regex" in asked(tuple(OPTIONAL_FEATURES))
    assert "return_logprob" in asked(tuple(OPTIONAL_FEATURES))


def test_answers_of_all_routes_are_read() -> None:
    generated = {"text": "ab", "meta_info": {"finish_reason": {"type": "stop"}}}
    assert read_answer(GENERATE, json.dumps([generated] * 2), is_stream=False) == Answer(
        "ab", ("stop", "stop")
    )
    choice = {"index": 0, "message": {"content": "ab"}, "finish_reason": "length"}
    assert read_answer(CHAT, json.dumps({"choices": [choice]}), is_stream=False) == Answer(
        "ab", ("length",)
    )
    pieces = [
        {"choices": [{"index": 0, "text": "a", "finish_reason": None}]},
        {"choices": [{"index": 1, "text": "z", "finish_reason": "stop"}]},
        {"choices": [{"index": 0, "text": "b", "finish_reason": "stop"}]},
    ]
    events = "\n\n".join(f"data: {json.dumps(piece)}" for piece in pieces)
    whole = read_answer(COMPLETIONS, events + "\n\ndata: [DONE]\n\n", is_stream=True)
    assert whole == Answer("ab", ("stop", "stop"))
    assert "without [DONE]" in read_answer(COMPLETIONS, events, is_stream=True).error


@pytest.mark.parametrize(
    ("ask", "answer", "words"),
    [
        (Ask(path=CHAT, body={}, num_answers=2), Answer("ab", ("stop",)), "2 answers"),
        (Ask(path=CHAT, body={}), Answer("ab", ("abort",)), "abort"),
        (Ask(path=CHAT, body={}), Answer(error="overloaded"), "overloaded"),
        (Ask(path=CHAT, body={}, expected_text="42"), Answer("43", ("stop",)), "'43'"),
        (Ask(path=CHAT, body={}, expected_text="42"), Answer("42", ("stop",)), ""),
        (Ask(path=CHAT, body={}, departure="aborts"), Answer("4", ("abort",)), ""),
    ],
)
def test_an_answer_that_is_not_whole_is_noticed(ask: Ask, answer: Answer, words: str) -> None:
    wrong = what_is_wrong(ask, answer)
    assert words in wrong
    assert bool(wrong) == bool(words)
