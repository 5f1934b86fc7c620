"""Whatever a client sends, it gets a 4xx that names the limit, and the server goes on."""

import pytest
import requests
from support.live_server import LiveServer

pytestmark = pytest.mark.multiproc

# Body of /generate, and words that its refusal must hold.
REFUSED = {
    "a prompt beyond the context": (
        {"text": "x" * 40_000},
        ["40000 tokens", "32768"],
    ),
    "more output than the context": (
        {"text": "x", "sampling_params": {"max_new_tokens": 100_000}},
        ["100000", "32768"],
    ),
    "an empty prompt": ({"text": ""}, ["empty"]),
    "no token ids": ({"input_ids": []}, ["empty"]),
    "a token beyond the vocabulary": ({"input_ids": [1, 99_999]}, ["99999", "320"]),
    "a negative token": ({"input_ids": [1, -5]}, ["-5"]),
    "max_new_tokens of the wrong type": (
        {"text": "x", "sampling_params": {"max_new_tokens": "many"}},
        ["many"],
    ),
    "a negative temperature": (
        {"text": "x", "sampling_params": {"temperature": -1}},
        ["temperature"],
    ),
    "a share above one": ({"text": "x", "sampling_params": {"top_p": 1.5}}, ["top_p"]),
    "parameters that claim to be checked": (
        {"text": "x", "sampling_params": {"is_normalized": True, "temperature": 1e-60}},
        ["is_normalized"],
    ),
    "neither text nor ids": ({"sampling_params": {}}, ["text", "input_ids"]),
    "a wrong grammar": (
        {"text": "x", "sampling_params": {"regex": "(("}},
        ["regex", "The parenthesis is not closed"],
    ),
    "two grammars": (
        {"text": "x", "sampling_params": {"regex": "a", "json_schema": "{}"}},
        ["Only one of json_schema, regex, ebnf, or structural_tag"],
    ),
    "a schema that is no JSON": (
        {"text": "x", "sampling_params": {"json_schema": "INVALID"}},
        ["json_schema is not valid JSON"],
    ),
    "more candidates than there may be": (
        {"text": "x", "return_logprob": True, "top_logprobs_num": 400},
        ["top_logprobs", "128", "400"],
    ),
    "a log-probability of an unknown token": (
        {"text": "x", "return_logprob": True, "token_ids_logprob": [320]},
        ["token_ids_logprob", "320"],
    ),
    "log-probabilities from behind the prompt": (
        {"text": "x", "return_logprob": True, "logprob_start_len": 2},
        ["logprob_start_len", "between 0 and 1"],
    ),
    "log-probabilities from before the prompt": (
        {"text": "x", "return_logprob": True, "logprob_start_len": -2},
        ["logprob_start_len", "-2"],
    ),
    "a list of numbers of candidates for one prompt": (
        {"text": "x", "return_logprob": True, "top_logprobs_num": [2]},
        ["top_logprobs_num", "several prompts"],
    ),
    "a penalty out of range": (
        {"text": "x", "sampling_params": {"frequency_penalty": 2.5}},
        ["frequency_penalty", "2.5"],
    ),
    "a repetition penalty of zero": (
        {"text": "x", "sampling_params": {"repetition_penalty": 0}},
        ["repetition_penalty"],
    ),
    "a bias of an unknown token": (
        {"text": "x", "sampling_params": {"logit_bias": {"99999": 1.0}}},
        ["logit_bias", "99999"],
    ),
    "a bias beyond any logit": (
        {"text": "x", "sampling_params": {"logit_bias": {"5": 1e200}}},
        ["logit_bias", "1e+200"],
    ),
    "a minimum above the maximum": (
        {"text": "x", "sampling_params": {"min_new_tokens": 9, "max_new_tokens": 8}},
        ["min_new_tokens", "9"],
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_generate_refuses(demo_server: LiveServer, name):
    body, words = REFUSED[name]
    response = demo_server.generate(**body)
    assert 400 <= response.status_code < 500, response.text
    assert [word for word in words if word not in response.text] == [], response.text
    assert_still_serving(demo_server)


def test_a_refused_stream_carries_the_error(demo_server):
    response = demo_server.generate(input_ids=[1, 99_999], stream=True)
    assert "99999" in response.text
    assert_still_serving(demo_server)


def test_chat_refuses_what_is_no_conversation(demo_server):
    url = f"{demo_server.url}/v1/chat/completions"
    for body in ({"messages": "hello"}, {"messages": [{"role": "user"}]}, {"messages": []}):
        response = requests.post(url, json={"model": "m", **body}, timeout=30)
        assert 400 <= response.status_code < 500, response.text
    assert_still_serving(demo_server)


def test_embeddings_are_refused(demo_server):
    response = requests.post(
        f"{demo_server.url}/v1/embeddings", json={"model": "m", "input": "x"}, timeout=30
    )
    assert 400 <= response.status_code < 500, response.text
    assert_still_serving(demo_server)


def assert_still_serving(server: LiveServer) -> None:
    answer = server.generate(text="a", sampling_params={"max_new_tokens": 1})
    assert answer.status_code == 200, answer.text
