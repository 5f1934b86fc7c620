"""Errors as the openai client's own types, and clients that go away."""

import threading

import openai
import pytest
import requests
from support.live_server import PATIENCE_S, wait_until

pytestmark = pytest.mark.multiproc
MODEL = "sgl-pipeline-demo"
ENDLESS = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Hello"}],
    "max_tokens": 20_000,
    "extra_body": {"ignore_eos": True},
}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_tokens": 100_000}, "100000"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"n": 1000}, "n must be"),
        ({"stop": ["x"] * 40}, "stop"),
        ({"logit_bias": {"9999": 1}}, "9999"),
        ({"messages": []}, "empty"),
        ({"messages": [{"role": "king", "content": "x"}]}, "role"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_bad_request_is_the_clients_error_with_a_message(client, options, words, stream):
    asked = {"model": MODEL, "messages": [{"role": "user", "content": "x"}]} | options
    with pytest.raises(openai.BadRequestError) as caught:
        list(client.chat.completions.create(**asked, stream=stream))
    assert words in caught.value.message
    assert caught.value.status_code == 400


def test_an_unknown_route_is_not_found(client):
    with pytest.raises(openai.NotFoundError):
        client.files.list()


def test_a_field_of_the_client_that_would_be_ignored_is_refused(client):
    with pytest.raises(openai.BadRequestError, match="best_of: "):
        client.completions.create(model=MODEL, prompt="x", best_of=3)
    with pytest.raises(openai.BadRequestError, match=r"suffix: .*--completion-template"):
        client.completions.create(model=MODEL, prompt="x", suffix="y")
    tool = {"type": "function", "function": {"name": "f"}}
    with pytest.raises(openai.BadRequestError, match=r"tools: .*--tool-call-parser"):
        client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "x"}], tools=[tool]
        )
    with pytest.raises(openai.BadRequestError, match="truncation: "):
        client.responses.create(model=MODEL, input="x", truncation="auto")


def test_a_stream_that_is_closed_ends_the_request(client, demo_server):
    with client.chat.completions.create(**ENDLESS, stream=True) as stream:
        for _, _chunk in zip(range(4), stream, strict=False):
            pass
        assert demo_server.facts()["num_running_requests"] == 1
    wait_until(lambda: demo_server.facts()["num_running_requests"] == 0)


def test_a_client_that_gives_up_waiting_ends_the_request(client, demo_server):
    with pytest.raises(openai.APITimeoutError):
        client.chat.completions.create(**ENDLESS, timeout=1.0)
    wait_until(lambda: demo_server.facts()["num_running_requests"] == 0)


def test_a_request_can_be_aborted_by_its_id(client, demo_server):
    replies = []

    def ask():
        body = ENDLESS["extra_body"] | {"rid": "to-be-ended"}
        replies.append(client.chat.completions.create(**(ENDLESS | {"extra_body": body})))

    thread = threading.Thread(target=ask)
    thread.start()
    wait_until(lambda: demo_server.facts()["num_running_requests"] == 1)
    abort = {"rid": "to-be-ended"}
    requests.post(f"{demo_server.url}/abort_request", json=abort, timeout=30).raise_for_status()
    thread.join(PATIENCE_S)
    assert replies[0].choices[0].finish_reason == "abort"
