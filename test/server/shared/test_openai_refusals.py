"""What the OpenAI routes let through to a later station is refused there, by name.

The other refusals are `upstream/openai_fields.py`'s, whose test walks all fields.
"""

import pytest
import requests

pytestmark = pytest.mark.multiproc
_BOTH = {
    "a wrong stop_regex": ({"stop_regex": "("}, "stop_regex"),
    "a wrong regex": ({"regex": "(("}, "The parenthesis is not closed"),
    "a wrong ebnf": ({"ebnf": "root ::= 'a'"}, "Failed to compile ebnf grammar"),
    "lora_path": ({"lora_path": "a"}, "LoRA"),
    "an adapter in the model's name": ({"model": "base:adapter"}, "LoRA"),
    "watermark": ({"watermark": {"key": "k"}}, "watermark"),
    "custom_logit_processor": ({"custom_logit_processor": "x"}, "custom logit processor"),
    "return_hidden_states": ({"return_hidden_states": True}, "hidden states"),
    "return_routed_experts": ({"return_routed_experts": True}, "return_routed_experts"),
    "session_id": ({"session_id": "s"}, "sessions"),
    "routed_dp_rank": ({"routed_dp_rank": 1}, "routed_dp_rank"),
    "data_parallel_rank": ({"data_parallel_rank": 1}, "routed_dp_rank"),
}
_COMPLETIONS = _BOTH | {
    "a wrong json_schema": ({"json_schema": "{"}, "json_schema is not valid JSON"),
}
_CHAT = _BOTH | {
    "return_sampling_mask": (
        {"return_sampling_mask": True, "return_meta_info": True},
        "return_sampling_mask",
    ),
    "sampling_logprobs_mode": ({"sampling_logprobs_mode": "support"}, "return_sampling_mask"),
    "an image": (
        {
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "image_url", "image_url": {"url": "data:,x"}}],
                }
            ]
        },
        "image_url",
    ),
}
_RESPONSES = {
    "session_id": ({"session_id": "s"}, "sessions"),
    "another model": ({"model": "other"}, "does not exist"),
    "no model": ({"model": None}, "/v1/models"),
    "a store that is off": ({"previous_response_id": "resp_1"}, "--enable-response-store"),
    "the background": ({"background": True}, "--enable-response-store"),
}
_ASKED = {
    "/v1/completions": ({"model": "m", "prompt": "x", "max_tokens": 2}, _COMPLETIONS),
    "/v1/chat/completions": (
        {"model": "m", "messages": [{"role": "user", "content": "x"}], "max_tokens": 2},
        _CHAT,
    ),
    "/v1/responses": ({"model": "sgl-pipeline-demo", "input": "x"}, _RESPONSES),
}


@pytest.mark.parametrize(
    ("path", "name"), [(path, name) for path, (_, cases) in _ASKED.items() for name in cases]
)
def test_what_is_not_built_is_a_4xx_that_names_it(demo_server, path, name):
    body, cases = _ASKED[path]
    fields, words = cases[name]
    response = requests.post(f"{demo_server.url}{path}", json=body | fields, timeout=30)
    assert 400 <= response.status_code < 500, response.text
    assert words in response.text


@pytest.mark.parametrize("path", _ASKED)
def test_the_same_requests_without_those_fields_are_served(demo_server, path):
    response = requests.post(f"{demo_server.url}{path}", json=_ASKED[path][0], timeout=30)
    assert response.status_code == 200, response.text


ROUTES = {
    "/v1/embeddings": ({"model": "m", "input": "x"}, "embeddings"),
    "/v1/classify": ({"model": "m", "input": "x"}, "embeddings"),
    "/v1/rerank": ({"query": "a", "documents": ["b"]}, "embeddings"),
    "/classify": ({"text": "x"}, "embeddings"),
    "/encode": ({"text": "x"}, "embeddings"),
    "/v1/audio/transcriptions": ({}, "speech"),
    "/open_session": ({"capacity_of_str_len": 10}, "sessions"),
}


@pytest.mark.parametrize("path", ROUTES)
def test_a_route_that_has_no_model_here_is_a_400_that_says_so(demo_server, path):
    body, words = ROUTES[path]
    response = requests.post(f"{demo_server.url}{path}", json=body, timeout=30)
    assert response.status_code == 400, response.text
    assert words in response.text
