"""Grammars for the byte vocabulary of `front_model`, each with a judge that knows no xgrammar."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import xgrammar
from support.front_model import END_OF_TEXT, TURN_END, VOCAB_SIZE, byte_tokenizer

from sgl_pipeline.managers.command_line.model_files import ModelLimits
from sgl_pipeline.managers.grammars.channel import CompiledJob, CompileJob, CompilerSetup
from sgl_pipeline.managers.grammars.compilation import Compilation
from sgl_pipeline.managers.grammars.spec import GrammarSpec, grammar_of
from sgl_pipeline.managers.grammars.vocabulary import GrammarVocabulary, read_vocabulary

LIMITS = ModelLimits(256, VOCAB_SIZE, frozenset({TURN_END, END_OF_TEXT}))

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z]{1,6}$"},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["red", "blue"]}, "maxItems": 2},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
_PHONE = r"\(\d{3}\) \d{3}-\d{4}"
_SUM = 'root ::= term ("+" term){1,3}\nterm ::= [0-9]{1,2} | "(" term ")"'
_TAG = {
    "format": {
        "type": "tag",
        "begin": "<f>",
        "content": {"type": "json_schema", "json_schema": {"type": "boolean"}},
        "end": "</f>",
    }
}
# Ambiguous: the ways to read a text grow with its length, and so does the time for a token.
AMBIGUOUS = 'root ::= s\ns ::= s s s | s s | [a-z] | ""'


def _is_person(text: str) -> bool:
    person = json.loads(text)
    is_named = re.fullmatch("[a-z]{1,6}", person["name"])
    has_age = type(person["age"]) is int and 0 <= person["age"] <= 99
    has_tags = set(person.get("tags", [])) <= {"red", "blue"} and len(person.get("tags", [])) <= 2
    return bool(is_named) and has_age and has_tags and set(person) <= {"name", "age", "tags"}


def _is_sum(text: str) -> bool:
    return 2 <= len(text.split("+")) <= 4 and all(
        re.fullmatch(r"(\()*\d{1,2}(\))*", term) and term.count("(") == term.count(")")
        for term in text.split("+")
    )


@dataclass(frozen=True)
class Example:
    """`field` of SamplingParams, its `text`, and who says whether an output is right."""

    field: str
    text: str
    is_match: Callable[[str], bool]

    @property
    def spec(self) -> GrammarSpec:
        from support.upstream_front import generate

        spec = grammar_of(generate("r", "x", sampling={self.field: self.text}))
        assert spec is not None
        return spec


EXAMPLES = {
    "json": Example("json_schema", json.dumps(SCHEMA), _is_person),
    "any_json": Example("json_schema", "$$ANY$$", lambda text: json.loads(text) is not ...),
    "regex": Example("regex", _PHONE, lambda text: re.fullmatch(_PHONE, text) is not None),
    "ebnf": Example("ebnf", _SUM, _is_sum),
    "structural_tag": Example(
        "structural_tag",
        json.dumps(_TAG),
        lambda text: re.fullmatch(r"<f>\s*(true|false)\s*</f>", text) is not None,
    ),
}


def vocabulary(reasoning_parser: str | None = None) -> GrammarVocabulary:
    return read_vocabulary(byte_tokenizer(), LIMITS, reasoning_parser)


def setup(**changes: Any) -> CompilerSetup:
    values = {
        "vocabulary": vocabulary().tokenizer_info.serialize_json(),
        "any_whitespace": True,
        "max_whitespace_count": 1,
        "max_seconds": 60.0,
        "max_memory_mib": 1024,
    }
    return CompilerSetup(**(values | changes))


def compiled(spec: GrammarSpec) -> xgrammar.CompiledGrammar:
    """Compiled as the compiler's child does it, and read as the scheduler process does."""
    answer = Compilation(setup()).run(CompileJob(1, spec.kind, spec.text))
    assert isinstance(answer, CompiledJob), answer
    return xgrammar.CompiledGrammar.deserialize_json(answer.grammar, vocabulary().tokenizer_info)
