"""Stop strings, expressions and ids through every door, and SGLang's own kit for them."""

import unittest
from typing import Any

import pytest
import requests
from sglang.test.kits.matched_stop_kit import MatchedStopMixin
from support.live_server import LiveServer

pytestmark = pytest.mark.multiproc

SPELL = "<|user|>Spell the word cat.<|end|><|assistant|>"
TURN_END = 2


class TestMatchedStop(MatchedStopMixin, unittest.TestCase):
    """The kit, as far as the demo model can: it answers any prompt in a few characters, and the
    rest of the kit waits for a story with sentences and line breaks."""

    model = "sgl-pipeline-demo"
    test_finish_stop_str = test_finish_stop_regex_str = test_finish_length = None

    @pytest.fixture(autouse=True)
    def _server(self, demo_server: LiveServer) -> None:
        self.base_url = demo_server.url


def answer(server: LiveServer, **sampling: Any) -> tuple[str, Any]:
    """What /generate says to `SPELL`, and what stopped it."""
    sampling = {"temperature": 0, "max_new_tokens": 16} | sampling
    reply = server.generate(text=SPELL, sampling_params=sampling).json()
    return reply["text"], reply["meta_info"]["finish_reason"].get("matched")


def test_the_first_named_string_wins_then_expressions_then_ids(demo_server: LiveServer) -> None:
    whole, matched = answer(demo_server)
    assert (whole, matched) == ("c-a-t", TURN_END)
    assert answer(demo_server, stop=["t", "a"]) == ("c-", "a")
    # What an expression matched stays, as with SGLang: only the expression's own text is cut.
    assert answer(demo_server, stop_regex="[at]") == ("c-a", "[at]")
    assert answer(demo_server, stop=["a"], stop_regex=["a", "c"]) == ("", "c")
    assert answer(demo_server, stop=["t"], stop_regex=[r"a\W*t", "t$"]) == ("c-a-", "t")
    assert answer(demo_server, stop_regex=[r"c.*t", "t$"]) == ("c-a-t", "c.*t")
    assert answer(demo_server, stop_regex="^a|a-t$") == ("c-a-t", "^a|a-t$")


def test_no_stop_trim_keeps_the_string(demo_server: LiveServer) -> None:
    assert answer(demo_server, stop="a", no_stop_trim=True) == ("c-a", "a")


def test_a_special_token_is_text_to_a_stop_expression_even_where_it_is_hidden(
    demo_server: LiveServer,
) -> None:
    asked = {"stop_regex": r"<\|e.d\|>", "ignore_eos": True}
    assert answer(demo_server, **asked) == ("c-a-t", r"<\|e.d\|>")
    shown = answer(demo_server, skip_special_tokens=False, **asked)
    assert shown == ("c-a-t<|end|>", r"<\|e.d\|>")


@pytest.mark.parametrize("route", ["completions", "chat/completions"])
def test_the_openai_routes_report_the_matched_expression(
    demo_server: LiveServer, route: str
) -> None:
    prompt: dict[str, Any] = (
        {"prompt": SPELL}
        if route == "completions"
        else {"messages": [{"role": "user", "content": "Spell the word cat."}]}
    )
    body = {"model": "m", "temperature": 0, "stop_regex": ["x", r"a\b"], **prompt}
    reply = requests.post(f"{demo_server.url}/v1/{route}", json=body, timeout=30).json()
    choice = reply["choices"][0]
    assert (choice["finish_reason"], choice["matched_stop"]) == ("stop", r"a\b")
