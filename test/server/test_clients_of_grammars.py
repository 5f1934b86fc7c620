"""What clients ask of structured output."""

import json

import pytest
import sglang as sgl

pytestmark = pytest.mark.multiproc
SUM = "<|user|>What is 17 + 25?<|end|><|assistant|>"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {"day": {"enum": ["today", "tomorrow"]}},
                "required": ["day"],
                "additionalProperties": False,
            },
        },
    }
    for name in ("get_time", "get_weather")
]
NO_THINKING = {"chat_template_kwargs": {"enable_thinking": False}}


@pytest.fixture(autouse=True)
def backend(demo_server):
    sgl.set_default_backend(sgl.RuntimeEndpoint(demo_server.url))
    yield
    sgl.set_default_backend(None)


def generated(expression):
    @sgl.function
    def program(s):
        s += SUM + expression

    return program.run(temperature=0)["answer"]


def test_a_regex_holds_the_model():
    answer = generated(sgl.gen("answer", max_tokens=8, regex=r"[a-c]{3}"))
    assert len(answer) == 3 and set(answer) <= set("abc")
    assert generated(sgl.gen("answer", max_tokens=8, regex=r"4\d")) == "42"


def test_typed_gens_give_what_they_name():
    assert int(generated(sgl.gen_int("answer", max_tokens=4))) >= 0
    assert generated(sgl.gen_string("answer", max_tokens=16)).startswith('"')
    assert float(generated(sgl.gen("answer", max_tokens=8, dtype=float))) is not None
    assert generated(sgl.gen("answer", max_tokens=8, dtype=bool)) in ("True", "False")


def test_a_json_schema_holds_a_gen():
    schema = json.dumps({"type": "object", "properties": {"a": {"enum": [1, 2]}}})
    answer = generated(sgl.gen("answer", max_tokens=32, json_schema=schema))
    assert json.loads(answer).get("a") in (None, 1, 2)


def forced(parrot, **options):
    messages = [{"role": "user", "content": "Please."}]
    return parrot.chat.completions.create(
        model="parrot",
        messages=messages,
        tools=TOOLS,
        temperature=0,
        max_tokens=200,
        extra_body=NO_THINKING,
        **options,
    )


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", {"get_time", "get_weather"}),
        ({"type": "function", "function": {"name": "get_time"}}, {"get_time"}),
    ],
)
def test_a_forced_call_is_made(parrot, choice, names):
    (reply,) = forced(parrot, tool_choice=choice, parallel_tool_calls=False).choices
    (call,) = reply.message.tool_calls
    assert call.function.name in names
    assert json.loads(call.function.arguments)["day"] in ("today", "tomorrow")


def test_a_forced_call_streams(parrot):
    stream = forced(parrot, tool_choice="required", parallel_tool_calls=False, stream=True)
    deltas = [
        call
        for chunk in stream
        if chunk.choices
        for call in chunk.choices[0].delta.tool_calls or []
    ]
    arguments = "".join(call.function.arguments or "" for call in deltas)
    assert json.loads(arguments)["day"] in ("today", "tomorrow")
