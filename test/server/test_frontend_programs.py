"""SGLang's own test programs for its frontend language, run as they are through RuntimeEndpoint.

`PROGRAMS` and `NOT_APPLICABLE` name every program of `sglang/test/test_programs.py`. None may be
given its answer by training the demo model on it.
"""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import sglang as sgl
from sglang.lang.global_config import global_config
from sglang.test import test_programs
from support.live_server import LiveServer

pytestmark = pytest.mark.multiproc

# What the server has of what some programs need. Add "log-probabilities" here when they are served,
# and the programs that need them are run.
SERVED_FEATURES: frozenset[str] = frozenset({"grammars"})


class Program(NamedTuple):
    """How a program is called, and the feature that it needs, if any."""

    arguments: Mapping[str, Any] = MappingProxyType({})
    needs: str | None = None


_UNCHECKED = {"check_answer": False}
PROGRAMS: dict[str, Program] = {
    "test_mt_bench": Program(),
    "test_expert_answer": Program(_UNCHECKED),
    "test_parallel_decoding": Program(),
    "test_parallel_encoding": Program(_UNCHECKED),
    "test_stream": Program(),
    "test_gen_min_new_tokens": Program(),
    "test_select": Program(_UNCHECKED, needs="log-probabilities"),
    "test_stream_logprobs": Program(needs="log-probabilities"),
    "test_regex": Program(needs="grammars"),
    "test_dtype_gen": Program(needs="grammars"),
}
_KNOWLEDGE = "asserts what the demo model was never taught"
_LINE_BREAKS = "its regex for strings allows line breaks, JSON does not; a small model writes some"
_REMOTE = "speculates for chat APIs that are paid by the token; RuntimeEndpoint does not count them"
NOT_APPLICABLE: dict[str, str] = {
    "test_few_shot_qa": _KNOWLEDGE,
    "test_decode_int": _KNOWLEDGE,
    "test_tool_use": _KNOWLEDGE,
    "test_react": _KNOWLEDGE,
    "test_decode_json_regex": _LINE_BREAKS,
    "test_decode_json": _LINE_BREAKS,
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


@pytest.mark.parametrize(
    "name",
    [name for name, program in PROGRAMS.items() if program.needs in (None, *SERVED_FEATURES)],
)
@pytest.mark.usefixtures("endpoint")
def test_program(name: str) -> None:
    getattr(test_programs, name)(**PROGRAMS[name].arguments)


def test_every_program_is_run_or_has_a_reason_not_to_be() -> None:
    defined = {name for name in vars(test_programs) if name.startswith("test_")}
    assert defined == set(PROGRAMS) | set(NOT_APPLICABLE)
    assert not set(PROGRAMS) & set(NOT_APPLICABLE)
