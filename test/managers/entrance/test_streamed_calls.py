"""Detectors of tool calls say the same of a reply however its tokens are spread over chunks."""

import json
import re
from dataclasses import dataclass
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sglang.srt.entrypoints.openai.protocol import Tool
from sglang.srt.function_call.function_call_parser import FunctionCallParser

from sgl_pipeline.managers.entrance.streamed_calls import read_calls_piece_by_piece

TEXT = "I look it up."
CALLS = [("get_weather", {"city": "Rome"}), ("get_time", {"city": "Oslo"})]
TOOLS = [
    Tool(
        type="function",
        function={"name": name, "parameters": {"properties": {"city": {"type": "string"}}}},
    )
    for name, _ in CALLS
]


def each_call(form: str, between: str, **renamed: str) -> str:
    """Both calls, each as `form` with NAME, JSON (the whole), ARGUMENTS and CITY filled in."""
    key = renamed.get("arguments", "arguments")
    return between.join(
        form.replace("NAME", name)
        .replace("JSON", json.dumps({"name": name, key: arguments}))
        .replace("ARGUMENTS", json.dumps(arguments))
        .replace("CITY", arguments["city"])
        for name, arguments in CALLS
    )


REPLIES = {
    "qwen25": TEXT + each_call("<tool_call>\nJSON\n</tool_call>", "\n"),
    "hermes": TEXT + each_call("<tool_call>\nJSON\n</tool_call>", "\n"),
    "llama3": TEXT + "<|python_tag|>" + each_call("JSON", "; ", arguments="parameters"),
    "glm45": TEXT
    + each_call(
        "<tool_call>NAME\n<arg_key>city</arg_key>\n<arg_value>CITY</arg_value>\n</tool_call>", "\n"
    ),
    "qwen3_coder": TEXT
    + each_call(
        "<tool_call>\n<function=NAME>\n<parameter=city>\nCITY\n</parameter>\n</function>\n"
        "</tool_call>",
        "\n",
    ),
    "kimi_k2": f"{TEXT}<|tool_calls_section_begin|>"
    + "".join(
        f"<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>"
        f"{json.dumps(arguments)}<|tool_call_end|>"
        for index, (name, arguments) in enumerate(CALLS)
    )
    + "<|tool_calls_section_end|>",
    "deepseekv3": f"{TEXT}<｜tool▁calls▁begin｜>"
    + each_call(
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\nARGUMENTS\n```<｜tool▁call▁end｜>",
        "\n",
    )
    + "<｜tool▁calls▁end｜>",
}


@dataclass
class Assembled:
    text: str
    calls: list[tuple[str, dict[str, str]]]
    num_items: int


@pytest.fixture(scope="module", autouse=True)
def installed() -> None:
    read_calls_piece_by_piece()


def assembled(parser: str, chunks: list[str]) -> Assembled:
    """What a client puts together, as upstream's `serving_chat.py` hands it on."""
    reader = FunctionCallParser(TOOLS, parser)
    text, items = "", []
    for chunk in chunks:
        normal, calls = reader.parse_stream_chunk(chunk)
        text, items = text + normal, items + calls
    names: dict[int, str] = {}
    arguments: dict[int, str] = {}
    for item in items:
        names.setdefault(item.tool_index, item.name or "")
        arguments[item.tool_index] = arguments.get(item.tool_index, "") + item.parameters
    calls = [(names[index], json.loads(arguments[index])) for index in sorted(names)]
    return Assembled(text.strip(), calls, len(items))


def tokens_of(reply: str) -> list[str]:
    """`reply` as a vocabulary might have it: marks are tokens, and words with a space before."""
    return re.findall(r"<[^<>\s]*>|\s?\w+|\s+|[^\w\s<]+|<", reply)


@pytest.mark.parametrize("parser", REPLIES)
def test_a_reply_in_one_chunk_loses_nothing(parser: str) -> None:
    whole = assembled(parser, [REPLIES[parser]])
    assert (whole.text, whole.calls) == (TEXT, CALLS)


@pytest.mark.parametrize("parser", REPLIES)
@given(data=st.data())
def test_it_does_not_matter_which_tokens_share_a_chunk(parser: str, data: st.DataObject) -> None:
    tokens = tokens_of(REPLIES[parser])
    assert "".join(tokens) == REPLIES[parser]
    cuts = sorted(data.draw(st.sets(st.integers(1, len(tokens) - 1))))
    chunks = ["".join(tokens[a:b]) for a, b in pairwise([0, *cuts, len(tokens)])]
    spread = assembled(parser, chunks)
    assert (spread.text, spread.calls) == (TEXT, CALLS)


def test_arguments_in_one_chunk_are_one_delta() -> None:
    arguments = {"city": "{" * 50}
    call = json.dumps({"name": "get_weather", "arguments": arguments})
    reply = assembled("qwen25", ["<tool_call>\n", call[:30], call[30:], "\n</tool_call>"])
    assert reply.calls == [("get_weather", arguments)]
    assert reply.num_items <= 3


def test_installing_twice_wraps_once() -> None:
    before = dict(FunctionCallParser.ToolCallParserEnum)
    read_calls_piece_by_piece()
    assert before == FunctionCallParser.ToolCallParserEnum
