"""What a request's grammar is, and what is refused before any compile."""

import json
from typing import Any

import pytest
from sglang.srt.managers import io_struct
from support.upstream_front import generate

from sgl_pipeline.errors import RequestError
from sgl_pipeline.managers.grammars.spec import (
    MAX_GRAMMAR_CHARACTERS,
    MAX_NESTING,
    GrammarSpec,
    grammar_of,
)


def message(sampling: Any, **fields: Any) -> io_struct.TokenizedGenerateReqInput:
    return generate("r", "x", sampling=sampling, **fields)


def refusal(sampling: Any) -> str:
    with pytest.raises(RequestError) as caught:
        grammar_of(message(sampling))
    assert caught.value.status_code == 400
    return str(caught.value)


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        ({}, None),
        ({"regex": ""}, None),
        ({"regex": "a+"}, GrammarSpec("regex", "a+")),
        ({"ebnf": 'root ::= "a"'}, GrammarSpec("ebnf", 'root ::= "a"')),
        ({"json_schema": "{}"}, GrammarSpec("json", "{}")),
        ({"json_schema": "$$ANY$$"}, GrammarSpec("any_json", "$$ANY$$")),
    ],
)
def test_each_field_is_a_kind_of_grammar(sampling: Any, expected: GrammarSpec | None) -> None:
    assert grammar_of(message(sampling)) == expected


def test_a_legacy_structural_tag_becomes_triggered_tags_with_a_schema_each() -> None:
    legacy = {
        "structures": [{"begin": "<f>", "schema": None, "end": "</f>"}],
        "triggers": ["<f"],
        "at_least_one": True,
    }
    spec = grammar_of(message({"structural_tag": json.dumps(legacy)}))
    assert spec is not None
    tag = {
        "type": "tag",
        "begin": "<f>",
        "content": {"type": "json_schema", "json_schema": {}},
        "end": "</f>",
    }
    assert json.loads(spec.text)["format"] == {
        "type": "triggered_tags",
        "triggers": ["<f"],
        "tags": [tag],
        "at_least_one": True,
    }


def test_a_missing_schema_is_filled_in_at_any_depth() -> None:
    inner = {"type": "tag", "begin": "<", "content": {"type": "json_schema"}, "end": ">"}
    outer = {"type": "sequence", "elements": [{"type": "triggered_tags", "tags": [inner]}]}
    spec = grammar_of(message({"structural_tag": json.dumps({"format": outer})}))
    assert spec is not None
    assert '"json_schema": {}' in spec.text


@pytest.mark.parametrize(
    ("sampling", "words"),
    [
        ({"regex": "a", "ebnf": 'root ::= "a"'}, ["only one", "regex", "ebnf"]),
        ({"regex": "a" * (MAX_GRAMMAR_CHARACTERS + 1)}, [str(MAX_GRAMMAR_CHARACTERS)]),
        ({"json_schema": "INVALID"}, ["json_schema is not valid JSON"]),
        ({"json_schema": "[" * 100_000}, ["json_schema is not valid JSON"]),
        (
            {"json_schema": '{"a":' * (MAX_NESTING + 1) + "1" + "}" * (MAX_NESTING + 1)},
            ["nested", str(MAX_NESTING)],
        ),
        ({"json_schema": '{"type": "number", "multipleOf": 3}'}, ["multipleOf"]),
        ({"structural_tag": "[]"}, ["JSON object"]),
        ({"structural_tag": "{}"}, ["format"]),
        ({"structural_tag": '{"structures": [1], "triggers": []}'}, ["structures"]),
    ],
)
def test_what_is_refused_before_a_compile(sampling: Any, words: list[str]) -> None:
    text = refusal(sampling)
    assert [word for word in words if word not in text] == []


def test_a_grammar_waits_for_the_end_of_thinking_unless_it_covers_that_too() -> None:
    def after_reasoning(sampling: Any, **fields: Any) -> bool:
        spec = grammar_of(message(sampling, **fields))
        assert spec is not None
        return spec.after_reasoning

    covers = {"__sglang_reasoning_in_grammar": True}
    assert after_reasoning({"regex": "a"}, require_reasoning=True)
    assert not after_reasoning({"regex": "a"})
    assert not after_reasoning({"regex": "a", "custom_params": covers}, require_reasoning=True)
    full = {"ebnf": 'root ::= "a"', "ebnf_full_assistant": True}
    assert not after_reasoning(full, require_reasoning=True)
