"""Reasoning, separated and counted: SGLang's own kits, and what they do not look at."""

import unittest
from typing import ClassVar

import pytest
import requests
from sglang.test.kits.reasoning_kit import ReasoningTokenUsageMixin, SeparateReasoningMixin
from support.live_server import LiveServer
from support.parrot_model import ANSWERS, THOUGHTS, parrot_model

pytestmark = pytest.mark.multiproc


class _Served(unittest.TestCase):
    """What upstream's mix-ins ask for. They look up the tokenizer by the model's name."""

    model: ClassVar[str] = str(parrot_model())
    api_key = "none"
    base_url: ClassVar[str]

    @pytest.fixture(autouse=True, scope="class")
    def _serve(self, request: pytest.FixtureRequest, parrot_server: LiveServer) -> None:
        request.cls.base_url = parrot_server.url


class TestReasoningTokenUsage(ReasoningTokenUsageMixin, _Served):
    reasoning_parser_name = "qwen3"

    @classmethod
    def setUpClass(cls) -> None:
        cls.init_reasoning_token_verifier()


class TestSeparateReasoning(SeparateReasoningMixin, _Served):
    pass


def ask(parrot, script="", **options):
    messages = [{"role": "user", "content": f"{script} What is 1+3?"}]
    return parrot.chat.completions.create(
        model="parrot", messages=messages, temperature=0, **options
    )


def test_thoughts_and_answer_are_told_apart(parrot):
    reply = ask(parrot)
    message = reply.choices[0].message
    assert (message.reasoning_content, message.content) == (THOUGHTS[""], ANSWERS[""])
    # Thoughts and both marks; the answer and the end of the turn come on top.
    assert reply.usage.completion_tokens_details.reasoning_tokens == reply.usage.reasoning_tokens
    assert 2 < reply.usage.reasoning_tokens < reply.usage.completion_tokens - 1


def test_a_thought_that_is_cut_off_is_all_reasoning(parrot):
    reply = ask(parrot, "[endless]", max_tokens=10)
    assert reply.usage.reasoning_tokens == reply.usage.completion_tokens == 10
    message = reply.choices[0].message
    assert message.content == "" and THOUGHTS["[endless]"].startswith(message.reasoning_content)


def test_unseparated_thoughts_stay_in_the_text_and_are_counted_all_the_same(parrot):
    reply = ask(parrot, extra_body={"separate_reasoning": False})
    assert reply.choices[0].message.content == f"<think>{THOUGHTS['']}</think>{ANSWERS['']}"
    assert reply.usage.reasoning_tokens == ask(parrot).usage.reasoning_tokens


@pytest.mark.parametrize(
    "options",
    [
        {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}},
        {"extra_body": {"reasoning_effort": "none"}},
    ],
)
def test_thinking_can_be_switched_off(parrot, options):
    reply = ask(parrot, **options)
    message = reply.choices[0].message
    assert (message.reasoning_content, message.content) == (None, ANSWERS[""])
    assert reply.usage.reasoning_tokens == 0


def test_samples_are_counted_together(parrot):
    assert ask(parrot, n=3).usage.reasoning_tokens == 3 * ask(parrot).usage.reasoning_tokens


@pytest.mark.parametrize("parser", ["qwen3", "deepseek-r1", "glm45"])
def test_the_parsers_of_the_supported_families_are_there(parrot_server, parser):
    body = {"text": "<think>hm</think>42", "reasoning_parser": parser}
    response = requests.post(f"{parrot_server.url}/separate_reasoning", json=body, timeout=30)
    assert response.json() == {"reasoning_text": "hm", "text": "42"}
