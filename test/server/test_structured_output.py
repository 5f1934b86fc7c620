"""Grammars on a whole server: SGLang's own kits as they are, tool calls, a grammar that explodes.

The kits check the form of an answer that is expected to end by itself: the model here closes what
is open as soon as the grammar lets it (`write_closing_model`). Of the kits' tests one cannot
be had from it: `test_ebnf_generate_complex_json`, whose grammar takes any of three fields in any
number, but which wants to see each once and in order, as a model that reads the prompt would.
"""

import json
import re
import shutil
import string
import unittest
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import openai
import pytest
import requests
import torch
from sglang.test.kits.ebnf_constrained_kit import EBNFConstrainedMixin
from sglang.test.kits.json_constrained_kit import JSONConstrainedMixin
from sglang.test.kits.json_mode_kit import JSONModeMixin
from sglang.test.kits.regex_constrained_kit import RegexConstrainedMixin
from support.live_server import LiveServer, live_server, wait_until
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from sgl_pipeline.managers.command_line.model_files import DEMO_MODEL
from sgl_pipeline.managers.grammars import compiler

pytestmark = pytest.mark.multiproc

MODEL = "closing-model"
CLOSING = '"}])>,:'
VOCAB_SIZE = 320
HIDDEN_SIZE = 64
# Every property may be missing: the compile takes seconds and more memory than it may have.
EXPLODING = json.dumps(
    {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(1000)}}
)
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}


def write_closing_model(directory: Path) -> Path:
    """Writes a checkpoint that always prefers to close what is open, with the demo model's
    tokenizer and chat template.

    Every layer passes its input on, so that the logits are the same at every position: the end of
    turn first, then the closing marks, digits, a space (which closes a word), and letters.
    """
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=HIDDEN_SIZE,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = LlamaForCausalLM(config)
    preferred = [tokenizer.eos_token_id, *(tokenizer.encode(mark)[0] for mark in CLOSING)]
    scores = torch.zeros(VOCAB_SIZE)
    for score, texts in ((200.0, "0123456789"), (150.0, " "), (100.0, string.ascii_lowercase)):
        scores[tokenizer.encode(texts)] = score
    for rank, token_id in enumerate(preferred):
        scores[token_id] = 1000.0 - 50.0 * rank
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        for name, parameter in model.named_parameters():
            if "norm" in name or "embed" in name:
                parameter.fill_(1.0)
        model.lm_head.weight.copy_((scores / HIDDEN_SIZE)[:, None].expand(-1, HIDDEN_SIZE))
    model.save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO_MODEL / name, directory)
    return directory


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    path = write_closing_model(tmp_path_factory.mktemp("model"))
    with live_server(
        *("--model-path", str(path), "--served-model-name", MODEL),
        *("--pp", "2", "--dtype", "float32", "--tool-call-parser", "qwen25"),
    ) as server:
        yield server


class _Served(unittest.TestCase):
    """What upstream's mix-ins ask for."""

    model: ClassVar[str] = MODEL
    base_url: str
    client: openai.OpenAI

    @pytest.fixture(autouse=True)
    def _connect(self, server: LiveServer) -> None:
        self.base_url = server.url
        self.client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")


class TestRegex(RegexConstrainedMixin, _Served):
    pass


class TestEbnf(EBNFConstrainedMixin, _Served):
    test_ebnf_generate_complex_json = None  # see above


class TestJson(JSONConstrainedMixin, _Served):
    pass


class TestJsonMode(JSONModeMixin, _Served):
    pass


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "add"}}], ids=["any", "named"]
)
def test_a_forced_tool_choice_is_a_call_with_arguments_of_the_schema(
    server: LiveServer, choice: Any
) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    reply = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "What is 17 + 25?"}],
        tools=[TOOL],  # type: ignore[list-item]
        tool_choice=choice,
        temperature=0,
        max_tokens=100,
    )
    (call,) = reply.choices[0].message.tool_calls or ()
    assert call.type == "function"
    assert call.function.name == "add"
    arguments = json.loads(call.function.arguments)
    assert [type(arguments[name]) for name in ("a", "b")] == [int, int]


def test_a_forced_tool_call_streams(server: LiveServer) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    stream = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "What is 17 + 25?"}],
        tools=[TOOL],  # type: ignore[list-item]
        tool_choice="required",
        temperature=0,
        max_tokens=100,
        stream=True,
    )
    calls = [
        call
        for chunk in stream
        if chunk.choices
        for call in chunk.choices[0].delta.tool_calls or ()
    ]
    assert [call.function.name for call in calls if call.function and call.function.name] == ["add"]
    arguments = json.loads(
        "".join(call.function.arguments or "" for call in calls if call.function)
    )
    assert [type(arguments[name]) for name in ("a", "b")] == [int, int]


def test_the_compiler_is_a_fork_and_imports_nothing_again(server: LiveServer) -> None:
    titles = [" ".join(one.cmdline()).split()[0] for one in server.scheduler().children()]
    assert compiler.__name__ in titles


def test_a_complete_grammar_ends_with_the_token_that_ends_it(server: LiveServer) -> None:
    sampling = {"regex": "[0-9]{3}", "ignore_eos": True, "max_new_tokens": 30}
    reply = server.generate(text="Count:", sampling_params=sampling).json()
    assert re.fullmatch("[0-9]{3}", reply["text"])
    finish = reply["meta_info"]["finish_reason"]
    assert (finish["type"], type(finish["matched"])) == ("stop", int)
    assert reply["meta_info"]["completion_tokens"] == len(reply["output_ids"])


def test_a_client_that_leaves_ends_its_compile_and_others_are_served_meanwhile(
    server: LiveServer,
) -> None:
    body = {"text": "x", "sampling_params": {"json_schema": EXPLODING}}
    with pytest.raises(requests.exceptions.ReadTimeout):
        requests.post(f"{server.url}/generate", json=body, timeout=0.5)
    reply = server.generate(text="x", sampling_params={"regex": "[a-c]{4}"}).json()
    assert re.fullmatch("[a-c]{4}", reply["text"])
    wait_until(lambda: server.facts()["num_compiling_requests"] == 0)
