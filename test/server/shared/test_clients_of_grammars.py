"""What the frontend language asks of structured output (forced calls: test_structured_output)."""

import json

import pytest
import sglang as sgl

pytestmark = pytest.mark.multiproc
SUM = "<|user|>What is 17 + 25?<|end|><|assistant|>"


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
    """The demo model may fill all its tokens with spaces, which JSON allows."""
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    answer = generated(sgl.gen("answer", max_tokens=64, json_schema=json.dumps(schema)))
    without_spaces = "".join(answer.split())
    assert without_spaces.startswith('{"a":') or '{"a":'.startswith(without_spaces)
    assert answer.startswith("{")
