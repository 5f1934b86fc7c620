"""The grammar that a request asks for, checked as far as that is cheap.

Errors that only a compile can find are left to the compiler process (`compiler.py`); nothing here
takes more than a walk over the text.
"""

import json
from dataclasses import dataclass
from typing import Any

from sglang.srt.constrained.json_schema_validation import (
    UnsupportedJSONSchemaFeature,
    validate_xgrammar_json_schema,
)
from sglang.srt.sampling.sampling_params import get_request_reasoning_in_grammar

from sgl_pipeline.errors import RequestError
from sgl_pipeline.managers.upstream.upstream_messages import GenerateMessage
from sgl_pipeline.requests import Request

MAX_GRAMMAR_CHARACTERS = 2**18
MAX_NESTING = 64
# Upstream's value in place of a schema, for any JSON value.
_ANY_JSON = "$$ANY$$"

# Field of upstream's SamplingParams -> kind of grammar.
KIND_OF_FIELD = {
    "json_schema": "json",
    "regex": "regex",
    "ebnf": "ebnf",
    "structural_tag": "structural_tag",
}


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """`kind` is a kind that `compilation.py` knows; equal kinds and texts are one grammar. With
    `after_reasoning` the model thinks first, and the grammar holds from the end of that."""

    kind: str
    text: str
    after_reasoning: bool = False

    @property
    def key(self) -> tuple[str, str]:
        return self.kind, self.text


@dataclass(frozen=True, slots=True)
class ConstrainedRequest:
    """A request that cannot run before its grammar is compiled and its `constraint` set."""

    request: Request
    grammar: GrammarSpec


def grammar_of(message: GenerateMessage) -> GrammarSpec | None:
    """The grammar that `message`, a TokenizedGenerateReqInput, asks for; None if it does not.

    Raises RequestError (400) for two grammars, one that is too large, or one that is not JSON where
    it must be. Normalizes as upstream does (`xgrammar_backend.py`, dispatch_*).
    """
    sampling = message.sampling_params
    asked = {field: getattr(sampling, field) for field in KIND_OF_FIELD if getattr(sampling, field)}
    if not asked:
        return None
    if len(asked) > 1:
        raise RequestError(f"only one of {', '.join(asked)} can be set")
    ((field, text),) = asked.items()
    if not isinstance(text, str):
        raise RequestError(f"{field} must be a string, got {type(text).__name__}")
    if len(text) > MAX_GRAMMAR_CHARACTERS:
        raise RequestError(
            f"{field} has {len(text)} characters, the limit is {MAX_GRAMMAR_CHARACTERS}"
        )
    kind = KIND_OF_FIELD[field]
    if field == "json_schema" and text == _ANY_JSON:
        kind = "any_json"
    elif field == "json_schema":
        _check_schema(_parsed(field, text))
    elif field == "structural_tag":
        text = _normalized_tag(_parsed(field, text))
    covers_reasoning = (
        field == "ebnf" and sampling.ebnf_full_assistant
    ) or get_request_reasoning_in_grammar(sampling.custom_params)
    return GrammarSpec(kind, text, bool(message.require_reasoning) and not covers_reasoning)


def _parsed(field: str, text: str) -> Any:
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{field} is not valid JSON: {error}") from None
    level, depth = [parsed], 0
    while level:
        depth += 1
        if depth > MAX_NESTING:
            raise RequestError(f"{field} is nested more than {MAX_NESTING} levels deep")
        nested = [one for one in level if isinstance(one, dict | list)]
        level = [
            child for one in nested for child in (one.values() if isinstance(one, dict) else one)
        ]
    return parsed


def _check_schema(schema: Any) -> None:
    try:
        validate_xgrammar_json_schema(schema)
    except UnsupportedJSONSchemaFeature as error:
        raise RequestError(str(error)) from None


def _normalized_tag(tag: Any) -> str:
    """A structural tag in xgrammar's present form, each missing schema replaced by an empty one."""
    if not isinstance(tag, dict):
        raise RequestError("structural_tag must be a JSON object")
    if tag.get("structures") is not None:
        tag = _from_legacy(tag)
    elif tag.get("format") is None:
        raise RequestError("structural_tag must have a format, or structures and triggers")
    _fill_in_schemas(tag["format"])
    return json.dumps(tag)


def _from_legacy(tag: dict[str, Any]) -> dict[str, Any]:
    """OpenAI-style `structures` and `triggers` as a `triggered_tags` format."""
    try:
        tags = [
            {
                "type": "tag",
                "begin": structure["begin"],
                "content": {"type": "json_schema", "json_schema": structure.get("schema") or {}},
                "end": structure["end"],
            }
            for structure in tag["structures"]
        ]
        triggers = tag["triggers"]
    except (KeyError, TypeError, AttributeError) as error:
        raise RequestError(f"structural_tag: malformed structures or triggers: {error!r}") from None
    return {
        "type": "structural_tag",
        "format": {
            "type": "triggered_tags",
            "triggers": triggers,
            "tags": tags,
            "at_least_one": tag.get("at_least_one", False),
        },
    }


def _fill_in_schemas(node: Any) -> None:
    if not isinstance(node, dict):
        return
    kind = node.get("type")
    if kind in ("json_schema", "qwen_xml_parameter") and node.get("json_schema") is None:
        node["json_schema"] = {}
    children = node.get("elements" if kind in ("sequence", "or") else "tags") or ()
    for child in (node.get("content"), *(children if isinstance(children, list) else ())):
        _fill_in_schemas(child)
