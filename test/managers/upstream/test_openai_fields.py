"""No field of OpenAI's requests is accepted and ignored: each is in one of the tables below."""

import asyncio
import json
from typing import Any, get_type_hints

import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params
from pydantic import BaseModel
from sglang.srt.entrypoints.openai.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    ResponsesRequest,
)
from starlette.exceptions import HTTPException
from starlette.types import Message, Receive, Scope, Send
from support.malformed_data import JSON

from sgl_pipeline.managers.entrance.route_guard import RouteGuard
from sgl_pipeline.managers.upstream.openai_fields import RULES, ServedFeatures, refusal

ALL_BUILT = ServedFeatures(parses_tool_calls=True, has_completion_template=True)
NONE_BUILT = ServedFeatures(parses_tool_calls=False, has_completion_template=False)
COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"

# What reaches our scheduler, or shapes the prompt or the reply in upstream's front. Where it is
# not built yet, `sglang_requests.py` or upstream refuses it
# (test/server/shared/test_openai_refusals.py).
_SAMPLING = {
    *("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty"),
    *("repetition_penalty", "stop", "stream"),
}
_OF_BOTH = {
    *("n", "seed", "logit_bias", "stop_token_ids", "stop_regex", "min_tokens", "ignore_eos"),
    *("skip_special_tokens", "no_stop_trim", "max_tokens", "stream_options", "regex", "ebnf"),
    *("response_format", "logprobs", "lora_path", "watermark", "custom_logit_processor", "rid"),
    *("return_hidden_states", "return_routed_experts", "return_cached_tokens_details"),
    *("return_token_ids", "return_spec_tokens_details"),
}
_ROUTING = {"session_id", "extra_key", "cache_salt", "priority", "routed_dp_rank"}
HONORED = {
    COMPLETIONS: _SAMPLING | _OF_BOTH | _ROUTING | {"prompt", "echo", "json_schema"},
    CHAT: _SAMPLING
    | _OF_BOTH
    | _ROUTING
    | {
        *("messages", "max_completion_tokens", "tool_choice", "input_ids", "reasoning_effort"),
        *("continue_final_message", "separate_reasoning", "stream_reasoning"),
        *("chat_template_kwargs", "return_prompt_token_ids", "return_meta_info"),
        *("return_input_ids_in_sglext", "return_output_ids_in_sglext", "return_sampling_mask"),
    },
    RESPONSES: _SAMPLING
    | _ROUTING
    | {
        *("background", "input", "instructions", "max_output_tokens", "previous_response_id"),
        *("reasoning", "chat_template_kwargs", "request_id", "include"),
    },
}
WITHOUT_EFFECT = {
    "model": "a label; upstream's Responses route alone compares it with the served name",
    "user": "a label of the end user",
    "metadata": "labels, given back where the API says so",
    "safety_identifier": "a label of the end user",
    "service_tier": "a wish; there is one tier",
    "store": "a wish; without --enable-response-store a retrieval says that there is no store",
    "prediction": "a hint that can only save time",
    "prompt_cache_key": "a hint that can only save time",
    "prompt_cache_retention": "a hint that can only save time",
    "stream_options": "for /v1/responses: padding against eavesdroppers of the stream's timing",
    "max_tool_calls": "bounds calls of hosted tools, of which there are none",
    "thinking": "documented as ignored by models whose template has no such mode",
    "data_parallel_rank": "the old name of routed_dp_rank",
    "custom_params": "only with custom_logit_processor",
    "routed_experts_start_len": "only with return_routed_experts",
    "sampling_logprobs_mode": "upstream refuses it without return_sampling_mask",
    "return_flat_raw_top_logprobs_b64": "only with return_flat_raw_output_top_logprobs",
}
MODELS: dict[str, type[BaseModel]] = {
    COMPLETIONS: CompletionRequest,
    CHAT: ChatCompletionRequest,
    RESPONSES: ResponsesRequest,
}
CLIENT_PARAMETERS: dict[str, Any] = {
    COMPLETIONS: completion_create_params.CompletionCreateParamsNonStreaming,
    CHAT: chat_create_params.CompletionCreateParamsNonStreaming,
    RESPONSES: response_create_params.ResponseCreateParamsNonStreaming,
}


def refused_fields(path: str) -> set[str]:
    return {rule.field for rule in RULES[path]}


@pytest.mark.parametrize("path", MODELS)
def test_every_field_of_upstreams_models_and_of_the_openai_client_is_known(path: str) -> None:
    fields = set(MODELS[path].model_fields) | set(get_type_hints(CLIENT_PARAMETERS[path]))
    known = HONORED[path] | set(WITHOUT_EFFECT) | refused_fields(path)
    assert fields - known == set(), "decide what becomes of these"
    assert (HONORED[path] | refused_fields(path)) - fields == set(), "there are no such fields"


def test_no_table_names_what_no_model_has() -> None:
    fields = {
        name
        for path in MODELS
        for name in [*MODELS[path].model_fields, *get_type_hints(CLIENT_PARAMETERS[path])]
    }
    assert set(WITHOUT_EFFECT) <= fields


def why(path: str, features: ServedFeatures = ALL_BUILT, **fields: Any) -> str | None:
    return refusal(path, json.dumps({"model": "m"} | fields).encode(), features)


_TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
_STRICT = {"type": "function", "function": {"name": "f", "parameters": {}, "strict": True}}
REFUSED: list[tuple[str, dict[str, Any]]] = [
    *((path, {"bootstrap_host": "h"}) for path in MODELS),
    *((path, {"bootstrap_port": 1}) for path in MODELS),
    *((path, {"bootstrap_room": 0}) for path in MODELS),
    *((path, {"disagg_prefill_dp_rank": 0}) for path in MODELS),
    *((path, {"session_params": {"id": "s"}}) for path in (COMPLETIONS, CHAT)),
    *((path, {"images_config": {"a": 1}}) for path in (COMPLETIONS, CHAT)),
    *((path, {"mm_processor_kwargs": {"a": 1}}) for path in (COMPLETIONS, CHAT)),
    (COMPLETIONS, {"best_of": 3}),
    (COMPLETIONS, {"best_of": 3, "n": 2}),
    (COMPLETIONS, {"custom_labels": {"a": "b"}}),
    (CHAT, {"max_tokens": 0}),
    (CHAT, {"max_tokens": -5}),
    (CHAT, {"logit_bias": {"a": 1}}),
    (COMPLETIONS, {"logit_bias": {"5": 1, "-1": 1}}),
    (CHAT, {"max_completion_tokens": 0, "max_tokens": 5}),
    (CHAT, {"top_logprobs": 2}),
    (CHAT, {"return_flat_raw_output_top_logprobs": True}),
    (CHAT, {"functions": [{"name": "f"}]}),
    (CHAT, {"function_call": "auto"}),
    (CHAT, {"audio": {"voice": "a"}}),
    (CHAT, {"modalities": ["text", "audio"]}),
    (CHAT, {"web_search_options": {}}),
    (CHAT, {"verbosity": "low"}),
    (CHAT, {"task": "domain"}),
    (CHAT, {"max_dynamic_patch": 1}),
    (CHAT, {"min_dynamic_patch": 1}),
    (CHAT, {"use_audio_in_video": True}),
    (CHAT, {"video_config": {"fps": 1}}),
    (CHAT, {"parallel_tool_calls": False, "tools": [_TOOL]}),
    (RESPONSES, {"parallel_tool_calls": False, "tools": [{"type": "function", "name": "f"}]}),
    (RESPONSES, {"tools": [{"type": "web_search"}]}),
    (RESPONSES, {"tool_choice": {"type": "file_search"}}),
    (RESPONSES, {"truncation": "auto"}),
    (RESPONSES, {"top_logprobs": 2}),
    (RESPONSES, {"top_logprobs": 2, "include": 5}),
    (RESPONSES, {"text": {"verbosity": "high"}}),
    (RESPONSES, {"prompt": {"id": "p"}}),
    (RESPONSES, {"conversation": "c"}),
    (RESPONSES, {"model": None}),
]


@pytest.mark.parametrize(("path", "fields"), REFUSED)
def test_what_would_be_ignored_is_refused_by_name(path: str, fields: dict[str, Any]) -> None:
    reason = why(path, **fields)
    assert reason is not None and reason.startswith(f"{next(iter(fields))}: ")


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"tools": [_TOOL]}),
        (RESPONSES, {"tools": [{"type": "function", "name": "f"}]}),
        (COMPLETIONS, {"suffix": "end"}),
    ],
)
def test_what_needs_a_flag_is_refused_without_it(path: str, fields: dict[str, Any]) -> None:
    reason = why(path, NONE_BUILT, **fields)
    assert reason is not None and "start the server with --" in reason
    assert why(path, ALL_BUILT, **fields) is None


@pytest.mark.parametrize("path", MODELS)
def test_a_server_with_a_role_takes_what_a_router_adds(path: str) -> None:
    fields = {"bootstrap_host": "h", "bootstrap_port": None, "bootstrap_room": [0, 1]}
    role = ServedFeatures(
        parses_tool_calls=True, has_completion_template=True, is_disaggregated=True
    )
    assert why(path, role, **fields, disagg_prefill_dp_rank=0) is None
    assert "without --disaggregation-mode" in str(why(path, **fields))


def test_every_rule_is_tried() -> None:
    tried = {(path, next(iter(fields))) for path, fields in REFUSED}
    tried |= {(CHAT, "tools"), (COMPLETIONS, "suffix")}
    assert tried == {(path, field) for path in MODELS for field in refused_fields(path)}


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        *((path, dict.fromkeys(refused_fields(path) - {"model"})) for path in MODELS),
        (COMPLETIONS, {"best_of": 1, "suffix": "", "return_spec_tokens_details": True}),
        (COMPLETIONS, {"logit_bias": {"5": 1}}),
        (COMPLETIONS, {"best_of": 2, "n": 2}),
        (CHAT, {"modalities": ["text"], "verbosity": "medium", "function_call": "none"}),
        (CHAT, {"top_logprobs": 2, "logprobs": True, "max_tokens": 1}),
        (CHAT, {"tools": [], "parallel_tool_calls": False}),
        (CHAT, {"tools": [_TOOL], "tool_choice": "none", "parallel_tool_calls": False}),
        (CHAT, {"tools": [_TOOL], "tool_choice": "required", "parallel_tool_calls": False}),
        (CHAT, {"tools": [_STRICT], "parallel_tool_calls": False}),
        (RESPONSES, {"truncation": "disabled", "text": {"format": {"type": "text"}}}),
        (RESPONSES, {"top_logprobs": 1, "include": ["message.output_text.logprobs"]}),
        (RESPONSES, {"tool_choice": {"type": "function", "name": "f"}}),
        ("/generate", {"best_of": 9}),
    ],
)
def test_what_asks_for_nothing_passes(path: str, fields: dict[str, Any]) -> None:
    assert why(path, **fields) is None


@pytest.mark.parametrize("body", [b"", b"{", *JSON.values()])
def test_what_is_no_json_object_is_left_to_upstream(body: bytes) -> None:
    assert refusal(COMPLETIONS, body, ALL_BUILT) is None


def passed_on(*pieces: bytes) -> tuple[str, int | None]:
    """What an app behind the guard reads of a body that arrives in `pieces`, and how it ends."""
    messages = [
        {"type": "http.request", "body": piece, "more_body": number < len(pieces)}
        for number, piece in enumerate(pieces, 1)
    ]
    read: list[bytes] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        while (message := await receive())["more_body"]:
            read.append(message["body"])
        read.append(message["body"])

    async def receive() -> Message:
        return messages.pop(0)

    async def send(message: Message) -> None:
        raise AssertionError("the guard itself answers nothing here")

    guarded = RouteGuard(app, 1000, ALL_BUILT, is_stopping=lambda: False)
    try:
        asyncio.run(guarded({"type": "http", "method": "POST", "path": COMPLETIONS}, receive, send))
    except HTTPException as error:
        return error.detail, error.status_code
    return b"".join(read).decode(), None


def test_the_guard_reads_a_body_that_arrives_in_pieces() -> None:
    assert passed_on(b'{"prompt": "x", ', b'"n": 1}') == ('{"prompt": "x", "n": 1}', None)
    reason, status = passed_on(b'{"prompt": "x", "best', b'_of": ', b"2}")
    assert reason.startswith("best_of: ") and status == 400


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, RESPONSES])
@pytest.mark.parametrize(
    ("body", "kind"),
    [("[]", "an array"), ("null", "null"), ('"x"', "a string"), ("1.5", "a number")],
)
def test_a_body_is_an_object(path: str, body: str, kind: str) -> None:
    reason = f"the body must be a JSON object, got {kind}"
    assert refusal(path, body.encode(), NONE_BUILT) == reason


def test_upstream_reads_what_is_not_json() -> None:
    assert refusal(CHAT, b'{"messages": [', NONE_BUILT) is None
