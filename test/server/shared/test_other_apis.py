"""Anthropic's messages and Ollama's routes, and upstream's kits of its own API."""

import json
import unittest
from typing import Any, ClassVar

import anthropic
import pytest
import requests
from sglang.test.kits.anthropic_messages_kit import AnthropicMessagesMixin
from sglang.test.kits.basic_api_contract_kit import BasicAPIContractMixin
from support.live_server import LiveServer
from support.parrot_model import ANSWERS, THOUGHTS

pytestmark = pytest.mark.multiproc
MODEL = "sgl-pipeline-demo"
SUM = [{"role": "user", "content": "What is 17 + 25?"}]
TOOL = {"name": "get_weather", "input_schema": {"type": "object", "properties": {}}}
WEATHER = [{"role": "user", "content": "[weather] Please."}]


class _Served(unittest.TestCase):
    """What upstream's mix-ins ask for."""

    model = served_model_name = MODEL
    api_key = "none"
    base_url: ClassVar[str]
    process: ClassVar[Any]

    @pytest.fixture(autouse=True, scope="class")
    def _serve(self, request: pytest.FixtureRequest, demo_server: LiveServer) -> None:
        request.cls.base_url, request.cls.process = demo_server.url, demo_server.process


class TestAnthropicMessages(AnthropicMessagesMixin, _Served):
    pass


class TestBasicContract(BasicAPIContractMixin, _Served):
    pass


@pytest.fixture
def claude(parrot_server):
    return anthropic.Anthropic(base_url=parrot_server.url, auth_token="none", max_retries=0)


def test_an_anthropic_client_gets_thoughts_text_and_tool_use(claude):
    message = claude.messages.create(model="parrot", max_tokens=200, messages=WEATHER, tools=[TOOL])
    thinking, text, call = message.content
    assert thinking.thinking == THOUGHTS["[weather]"]
    assert text.text == "I look it up."
    assert (call.name, call.input) == ("get_weather", {"city": "Paris", "days": 3})
    assert message.stop_reason == "tool_use"


def test_an_anthropic_stream_adds_up(claude):
    with claude.messages.stream(
        model="parrot", max_tokens=200, messages=WEATHER, tools=[TOOL]
    ) as stream:
        deltas = [event for event in stream if event.type == "input_json"]
        message = stream.get_final_message()
    assert message.content[-1].input == {"city": "Paris", "days": 3}
    # How many there are depends on how many tokens came at once.
    assert deltas and message.stop_reason == "tool_use"


def test_anthropic_errors_have_its_types(claude):
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        claude.messages.create(model="parrot", max_tokens=-1, messages=WEATHER)
    image = {"type": "base64", "media_type": "image/png", "data": "aaaa"}
    message = {"role": "user", "content": [{"type": "image", "source": image}]}
    with pytest.raises(anthropic.BadRequestError, match="text input"):
        claude.messages.create(model="parrot", max_tokens=4, messages=[message])


def ollama(server, route, **body):
    return requests.post(f"{server.url}/api/{route}", json={"model": MODEL} | body, timeout=30)


def test_ollama_chats_and_generates(demo_server):
    options = {"temperature": 0, "num_predict": 16}
    chat = ollama(demo_server, "chat", messages=SUM, stream=False, options=options).json()
    assert (chat["message"]["content"], chat["done"]) == ("42", True)
    prompt = "<|user|>What is 17 + 25?<|end|><|assistant|>"
    whole = ollama(demo_server, "generate", prompt=prompt, stream=False, options=options).json()
    assert (whole["response"], whole["eval_count"]) == ("42", 3)


def streamed(server, route, **body):
    """The text of a stream of Ollama's, which ends with `done` and nothing beside it."""
    lines = ollama(server, route, stream=True, **body).text.splitlines()
    events = [json.loads(line) for line in lines if line]
    assert [event["done"] for event in events] == [False] * (len(events) - 1) + [True]
    texts = [
        event["message"]["content"] if route == "chat" else event["response"] for event in events
    ]
    assert texts[-1] == ""
    return "".join(texts)


@pytest.mark.parametrize("num_predict", [1, 2, 16])
def test_ollama_streams_every_token(demo_server, num_predict):
    # Upstream's handlers would drop the text that comes together with the end.
    options = {"temperature": 0, "num_predict": num_predict}
    for route, body in (
        ("chat", {"messages": SUM}),
        ("generate", {"prompt": "<|user|>What is 17 + 25?<|end|><|assistant|>"}),
    ):
        assert streamed(demo_server, route, options=options, **body) == "42"[:num_predict]


def test_ollama_names_its_models(demo_server):
    tags = requests.get(f"{demo_server.url}/api/tags", timeout=30).json()
    assert [model["name"] for model in tags["models"]] == [MODEL]
    assert "completion" in ollama(demo_server, "show").json()["capabilities"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("asked", [("chat", {"messages": SUM}), ("generate", {"prompt": "x"})])
def test_ollama_refuses_what_is_out_of_range(demo_server, asked, stream):
    route, body = asked
    response = ollama(demo_server, route, **body, stream=stream, options={"temperature": -1})
    assert response.status_code == 400, response.text
    assert "temperature" in response.json()["error"]


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("chat", {"messages": [{"role": "user", "content": "x", "images": ["aW1n"]}]}),
        ("generate", {"prompt": "x", "images": ["aW1n"]}),
    ],
)
def test_ollamas_images_are_refused(demo_server, route, body):
    # Upstream's handlers would answer without looking at them.
    response = ollama(demo_server, route, **body, options={"num_predict": 2})
    assert response.status_code == 400, response.text
    assert "image, audio and video input is not supported" in response.text


def test_the_answers_of_sagemaker_and_vertex_routes(parrot_server):
    """Other names of the same handlers."""
    asked = {"messages": [{"role": "user", "content": "x"}], "temperature": 0}
    reply = requests.post(f"{parrot_server.url}/invocations", json=asked, timeout=30).json()
    assert reply["choices"][0]["message"]["content"] == ANSWERS[""]
    refused = requests.post(
        f"{parrot_server.url}/invocations", json=asked | {"functions": [{}]}, timeout=30
    )
    assert refused.status_code == 400 and "functions: " in refused.text
    body = {
        "instances": [{"text": "<|assistant|>"}],
        "parameters": {"sampling_params": {"max_new_tokens": 20, "temperature": 0}},
    }
    (answer,) = requests.post(f"{parrot_server.url}/vertex_generate", json=body, timeout=30).json()[
        "predictions"
    ]
    assert answer["text"].endswith(ANSWERS[""])
