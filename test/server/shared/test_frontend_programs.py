"""SGLang's own test programs for its frontend language, run as they are through RuntimeEndpoint.

`PROGRAMS` and `NOT_APPLICABLE` name every program of `sglang/test/test_programs.py`. None may be
given its answer by training the demo model on it.
"""

from collections.abc import Iterator
from functools import partialmethod
from typing import Any

import pytest
import sglang as sgl
from sglang.lang.global_config import global_config
from sglang.lang.ir import SglFunction
from sglang.test import test_programs
from support.live_server import LiveServer

pytestmark = pytest.mark.multiproc

_UNCHECKED = {"check_answer": False}
# How each program is called.
PROGRAMS: dict[str, dict[str, Any]] = {
    "test_mt_bench": {},
    "test_expert_answer": _UNCHECKED,
    "test_parallel_decoding": {},
    "test_parallel_encoding": _UNCHECKED,
    "test_stream": {},
    "test_gen_min_new_tokens": {},
    "test_select": _UNCHECKED,
    "test_regex": {},
    "test_dtype_gen": {},
}
# A byte that is drawn and is no text by itself would be missing in what this one counts.
_COUNTS_TOKENS_OF_TEXT = ("test_gen_min_new_tokens",)
_KNOWLEDGE = "asserts what the demo model was never taught"
_LINE_BREAKS = "its regex for strings allows line breaks, JSON does not; a small model writes some"
_INCREMENTS = "expects --incremental-streaming-output, without which chunks are cumulative"
_REMOTE = "speculates for chat APIs that are paid by the token; RuntimeEndpoint does not count them"
NOT_APPLICABLE: dict[str, str] = {
    "test_few_shot_qa": _KNOWLEDGE,
    "test_decode_int": _KNOWLEDGE,
    "test_tool_use": _KNOWLEDGE,
    "test_react": _KNOWLEDGE,
    "test_decode_json_regex": _LINE_BREAKS,
    "test_decode_json": _LINE_BREAKS,
    "test_stream_logprobs": _INCREMENTS,
    "test_image_qa": "images are refused",
    "test_completion_speculative": _REMOTE,
    "test_chat_completion_speculative": _REMOTE,
}


@pytest.fixture(scope="module")
def endpoint(demo_server: LiveServer) -> Iterator[None]:
    """The demo server as the language's default backend, set up as upstream's own tests do."""
    before = global_config.default_backend, global_config.enable_parallel_encoding
    backend = sgl.RuntimeEndpoint(demo_server.url)
    backend.endpoint = backend  # where upstream's `sgl.Runtime`, which starts a server, has it
    sgl.set_default_backend(backend)
    # Its route for joining caches is in no server of SGLang's; the texts are joined instead.
    global_config.enable_parallel_encoding = False
    yield
    global_config.default_backend, global_config.enable_parallel_encoding = before


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.usefixtures("endpoint")
def test_program(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name in _COUNTS_TOKENS_OF_TEXT:
        greedy = partialmethod(SglFunction.run, temperature=0.0)
        monkeypatch.setattr(SglFunction, "run", greedy)
    getattr(test_programs, name)(**PROGRAMS[name])


def test_every_program_is_run_or_has_a_reason_not_to_be() -> None:
    defined = {name for name in vars(test_programs) if name.startswith("test_")}
    assert defined == set(PROGRAMS) | set(NOT_APPLICABLE)
    assert not set(PROGRAMS) & set(NOT_APPLICABLE)
