"""Tool calls through upstream's parsers, as the openai client sees them (`parrot_model.py`)."""

import json

import openai
import pytest
import requests
from support.parrot_model import ANSWERS, THOUGHTS

pytestmark = pytest.mark.multiproc


def tool(name, **more):
    return {"type": "function", "function": {"name": name, "parameters": {}} | more}


TOOLS = [tool("get_time"), tool("get_weather")]
PARIS = {"city": "Paris", "days": 3}
TWO_CALLS = [
    ("get_weather", {"city": "Oslo"}),
    ("get_time", {"zone": "Europe/Rome", "short": True}),
]


def ask(parrot, script, **options):
    options = {"tools": TOOLS, "temperature": 0} | options
    messages = [{"role": "user", "content": f"{script} Please."}]
    return parrot.chat.completions.create(model="parrot", messages=messages, **options)


def calls_of(message):
    return [
        (call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls
    ]


def assembled(stream):
    """What a client puts together from the deltas: text, reasoning, calls, why it ended."""
    content = reasoning = ""
    calls, finish = [], None
    for chunk in stream:
        (choice,) = chunk.choices
        content += choice.delta.content or ""
        reasoning += getattr(choice.delta, "reasoning_content", None) or ""
        for call in choice.delta.tool_calls or []:
            if call.index == len(calls):
                calls.append({"id": call.id, "name": call.function.name, "arguments": ""})
            calls[call.index]["arguments"] += call.function.arguments or ""
        finish = choice.finish_reason or finish
    return content, reasoning, calls, finish


def test_a_call_is_taken_out_of_the_text(parrot):
    choice = ask(parrot, "[weather]").choices[0]
    assert choice.message.content == "I look it up."
    assert choice.message.reasoning_content == THOUGHTS["[weather]"]
    assert calls_of(choice.message) == [("get_weather", PARIS)]
    assert choice.message.tool_calls[0].id.startswith("call_")
    assert choice.finish_reason == "tool_calls"


def test_parallel_calls_have_ids_of_their_own(parrot):
    choice = ask(parrot, "[two calls]").choices[0]
    assert calls_of(choice.message) == TWO_CALLS
    assert len({call.id for call in choice.message.tool_calls}) == 2
    assert choice.finish_reason == "tool_calls"


def test_a_streamed_call_comes_in_pieces_that_add_up(parrot):
    stream = list(ask(parrot, "[weather]", stream=True))
    content, reasoning, (call,), finish = assembled(stream)
    assert (content, reasoning) == ("I look it up.", THOUGHTS["[weather]"])
    assert call["name"] == "get_weather" and call["id"].startswith("call_")
    assert json.loads(call["arguments"]) == PARIS
    assert finish == "tool_calls"
    deltas = [chunk for chunk in stream if chunk.choices[0].delta.tool_calls]
    assert len(deltas) > 1, "the name came with the arguments"


def test_streamed_parallel_calls_are_told_apart(parrot):
    content, _, calls, finish = assembled(ask(parrot, "[two calls]", stream=True))
    assert [(call["name"], json.loads(call["arguments"])) for call in calls] == TWO_CALLS
    assert content.strip() == "" and finish == "tool_calls"


@pytest.mark.parametrize("stream", [False, True])
def test_tool_choice_none_leaves_the_text_alone(parrot, stream):
    reply = ask(parrot, "[weather]", tool_choice="none", stream=stream)
    if stream:
        content, _, calls, finish = assembled(reply)
    else:
        (choice,) = reply.choices
        content, calls, finish = choice.message.content, [], choice.finish_reason
        assert choice.message.tool_calls is None
    assert (content, calls, finish) == (ANSWERS["[weather]"], [], "stop")


def test_an_answer_without_a_call_is_an_answer(parrot):
    choice = ask(parrot, "").choices[0]
    assert (choice.message.content, choice.message.tool_calls) == (ANSWERS[""], None)
    assert choice.finish_reason == "stop"


def test_a_call_of_a_tool_that_was_not_offered_is_dropped(parrot):
    """As upstream has it; the client is never handed a name that it does not know."""
    choice = ask(parrot, "[no such tool]").choices[0]
    assert choice.message.tool_calls is None and choice.finish_reason == "stop"


def test_the_result_of_a_call_is_part_of_the_conversation(parrot):
    first = ask(parrot, "[weather]").choices[0].message
    messages = [
        {"role": "user", "content": "How is it in Paris?"},
        first.to_dict(),
        {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "12 degrees"},
    ]
    reply = parrot.chat.completions.create(
        model="parrot", messages=messages, tools=TOOLS, extra_body={"return_prompt_token_ids": True}
    )
    assert reply.choices[0].message.content == ANSWERS[""]
    assert reply.usage.prompt_tokens == len(reply.choices[0].prompt_token_ids)


def test_what_cannot_be_held_to_one_call_is_refused(parrot):
    with pytest.raises(openai.BadRequestError, match="parallel_tool_calls: "):
        ask(parrot, "[two calls]", parallel_tool_calls=False)


TEXTS = {
    "qwen25": '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>',
    "llama3": '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Rome"}}',
    "glm45": "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n"
    "</tool_call>",
    "mistral": '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Rome"}}]',
}


@pytest.mark.parametrize("parser", TEXTS)
def test_the_parsers_of_the_supported_families_are_there(parrot_server, parser):
    typed = tool("get_weather", parameters={"properties": {"city": {"type": "string"}}})
    body = {"text": TEXTS[parser], "tools": [typed], "tool_call_parser": parser}
    response = requests.post(f"{parrot_server.url}/parse_function_call", json=body, timeout=30)
    (call,) = response.json()["calls"]
    assert (call["name"], json.loads(call["parameters"])) == ("get_weather", {"city": "Rome"})
