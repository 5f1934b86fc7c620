"""Requests that nobody would think of: no 5xx, no lost page, and the server goes on.

The examples are the same in each run. `SGL_PIPELINE_FUZZ_EXAMPLES=3000` in the environment asks for
more of them (`make fuzz`).
"""

import dataclasses
import json
import os
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest, CompletionRequest
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.sampling.sampling_params import SamplingParams
from support.live_server import LiveServer, wait_until, wait_until_pages_are_back

pytestmark = pytest.mark.multiproc

EXAMPLES = int(os.environ.get("SGL_PIPELINE_FUZZ_EXAMPLES", "80"))
EXAMPLES_PER_OPERATION = max(2, EXAMPLES // 40)
TIMEOUT_S = 90

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 400),
    st.integers(-(2**80), 2**80),
    st.floats(),
    st.text(max_size=6),
    st.sampled_from(["\ud800", "\x00", "(", "(a+)+$", "{", "../..", "a" * 3000]),
)
WILD = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=8,
)


# Such as pass for a value of some field, so that what lies behind the first check is reached.
TAME = st.sampled_from(
    [None, True, False, 0, 1, 2, 0.5, "", "a", [], {}, [1], ["a"], [{}], {"a": 1}, {"type": "text"}]
)


def often(tame: Any, wild: Any) -> st.SearchStrategy[Any]:
    """Tame in three cases of four."""
    return st.one_of(tame, tame, tame, wild)


def wild_fields(names: Any) -> st.SearchStrategy[dict[str, Any]]:
    """Up to three fields of these names with values of any kind."""
    return st.dictionaries(st.sampled_from(sorted(names)), often(TAME, WILD), max_size=3)


GENERATE_NAMES = {field.name for field in dataclasses.fields(GenerateReqInput)} - {"background"}
SAMPLING_NAMES = set(SamplingParams.__struct_fields__) - {"max_new_tokens"}
TEXTS = st.text(st.characters(codec="utf-8"), max_size=20)
PROMPTS = st.one_of(
    st.fixed_dictionaries({"text": TEXTS}),
    st.fixed_dictionaries({"text": st.lists(TEXTS, max_size=3)}),
    st.fixed_dictionaries({"input_ids": st.lists(st.integers(0, 319), max_size=20)}),
    wild_fields(["text", "input_ids", "input_embeds"]),
)
# Few tokens where anything is answered at all: what is generated is not the point.
FEW_TOKENS = often(st.integers(1, 3), st.sampled_from([0, -1, 2**40, "a", 1.5]))
SAMPLING = st.builds(
    lambda few, wild: {"max_new_tokens": few} | wild, FEW_TOKENS, wild_fields(SAMPLING_NAMES)
)
ROLES = often(st.just("user"), st.sampled_from(["system", "assistant", "tool", "developer", "x"]))
PARTS = st.lists(
    st.fixed_dictionaries(
        {"type": st.sampled_from(["text", "image_url", "x"])},
        optional={"text": often(TEXTS, WILD), "image_url": WILD},
    ),
    max_size=2,
)
MESSAGES = often(
    st.lists(
        st.fixed_dictionaries(
            {"role": ROLES, "content": often(TEXTS, st.one_of(PARTS, WILD))},
            optional={"tool_calls": often(st.none(), WILD), "name": often(TEXTS, WILD)},
        ),
        min_size=1,
        max_size=3,
    ),
    WILD,
)


def openai_bodies(names: Any, prompt: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.builds(
        lambda start, few, wild: {"model": "m", "max_tokens": few} | start | wild,
        st.fixed_dictionaries(prompt),
        FEW_TOKENS,
        wild_fields(set(names) - {"max_tokens", "max_completion_tokens"}),
    )


BODIES = {
    "/generate": st.builds(
        lambda prompt, wild, sampling: prompt | wild | {"sampling_params": sampling},
        PROMPTS,
        wild_fields(GENERATE_NAMES),
        SAMPLING,
    ),
    "/v1/completions": openai_bodies(
        CompletionRequest.model_fields, {"prompt": often(TEXTS, WILD)}
    ),
    "/v1/chat/completions": openai_bodies(
        ChatCompletionRequest.model_fields, {"messages": MESSAGES}
    ),
}


def fuzz_settings(examples: int) -> settings:
    return settings(
        max_examples=examples,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


@pytest.mark.parametrize("path", BODIES)
def test_no_body_is_a_server_error_or_keeps_a_page(demo_server: LiveServer, path: str) -> None:
    @given(body=BODIES[path])
    @fuzz_settings(EXAMPLES)
    def send(body: dict[str, Any]) -> None:
        answer = requests.post(
            demo_server.url + path,
            data=json.dumps(body),
            headers={"Content-Type": "application/json"},
            timeout=TIMEOUT_S,
        )
        assert answer.status_code < 500, (answer.text, body)
        assert "internal error" not in answer.text.lower(), (answer.text, body)

    send()
    assert_as_before(demo_server)


# What a request of the specification may not do to a server that others share, or takes a second.
LEFT_OUT = {
    *("/freeze_gc", "/configure_logging", "/set_trace_level", "/health", "/health_generate"),
    *("/update_weight_version", "/abort_request"),
}


def test_no_request_of_the_openapi_specification_is_a_server_error(demo_server: LiveServer) -> None:
    specification = schemathesis.openapi.from_url(f"{demo_server.url}/openapi.json")
    operations = [result.ok() for result in specification.get_all_operations()]
    tried = [one for one in operations if one.path not in LEFT_OUT]
    assert len(tried) > 50

    for operation in tried:

        @given(case=operation.as_strategy())
        @fuzz_settings(EXAMPLES_PER_OPERATION)
        def send(case: schemathesis.Case) -> None:
            if isinstance(case.body, dict):
                case.body |= few_tokens(case.path)
            answer = case.call(timeout=TIMEOUT_S)
            assert answer.status_code < 500, (answer.text, case.path, case.body)

        send()
    assert_as_before(demo_server)


def few_tokens(path: str) -> dict[str, Any]:
    """What keeps the answer to a body of this route short."""
    if path == "/generate":
        return {"sampling_params": {"max_new_tokens": 1}}
    if path.startswith("/api/"):
        return {"options": {"num_predict": 1}}
    return {"max_tokens": 1, "max_completion_tokens": 1, "max_output_tokens": 1}


def assert_as_before(server: LiveServer) -> None:
    wait_until(lambda: server.facts()["num_running_requests"] == 0)
    wait_until_pages_are_back(server)
    answer = server.generate(text="ab", sampling_params={"max_new_tokens": 1})
    assert answer.status_code == 200, answer.text
