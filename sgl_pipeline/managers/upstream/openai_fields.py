"""Fields of OpenAI's requests that upstream's front would accept and then ignore: refused by name,
and so are the images of Ollama's.

Bodies are checked before upstream reads them. Later checks (`sglang_requests.py`, upstream's own)
are not repeated here, and fields that the API defines as hints or labels (`user`, `service_tier`,
...) are accepted. A test walks the fields of upstream's request models and of the openai client:
each must be known here.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import msgspec

from sgl_pipeline.decoding import decode
from sgl_pipeline.errors import MalformedData


@dataclass(frozen=True, slots=True)
class ServedFeatures:
    """Features of the command line on which the effect of a field depends."""

    parses_tool_calls: bool
    has_completion_template: bool
    is_disaggregated: bool = False


# A decoded body with the fields that the rules read; absent ones are None.
Body = Any


@dataclass(frozen=True, slots=True)
class Rule:
    """Refuses `field` with `reason` when `asks`: by default, when it is neither null nor false."""

    field: str
    reason: str
    asks: Callable[[Body, ServedFeatures], bool] | None = None

    def refuses(self, body: Body, features: ServedFeatures) -> bool:
        if self.asks is not None:
            return self.asks(body, features)
        return getattr(body, self.field) not in (None, False, [], {})


def _unless(field: str, *neutral: Any) -> Callable[[Body, ServedFeatures], bool]:
    return lambda body, features: getattr(body, field) not in (None, *neutral)


def _has_no_role(field: str) -> Callable[[Body, ServedFeatures], bool]:
    return lambda body, features: (
        not features.is_disaggregated and getattr(body, field) not in (None, [])
    )


def _is_below_one(field: str) -> Callable[[Body, ServedFeatures], bool]:
    def asks(body: Body, features: ServedFeatures) -> bool:
        value = getattr(body, field)
        return isinstance(value, int | float) and value < 1

    return asks


def _names_other_than_ids(body: Body, features: ServedFeatures) -> bool:
    return isinstance(body.logit_bias, dict) and not all(map(str.isdecimal, body.logit_bias))


def _offers_tools(body: Body) -> bool:
    return bool(body.tools) and body.tool_choice != "none"


def _calls_are_lost(body: Body, features: ServedFeatures) -> bool:
    return _offers_tools(body) and not features.parses_tool_calls


def _may_call_twice(body: Body, features: ServedFeatures) -> bool:
    """Only a grammar holds a model to one call, and upstream sets none for a free choice."""
    return (
        body.parallel_tool_calls is False
        and _offers_tools(body)
        and body.tool_choice in (None, "auto")
        and not any(_is_strict(tool) for tool in _objects(body.tools))
    )


def _is_strict(tool: dict[str, Any]) -> bool:
    function = tool.get("function", tool)
    return isinstance(function, dict) and bool(function.get("strict"))


def _objects(values: Any) -> Iterable[dict[str, Any]]:
    return (one for one in values if isinstance(one, dict)) if isinstance(values, list) else ()


_CALLABLE_TOOLS = ("function", "custom")


def _has_hosted_tool(body: Body, features: ServedFeatures) -> bool:
    return any(tool.get("type") not in _CALLABLE_TOOLS for tool in _objects(body.tools))


def _chooses_hosted_tool(body: Body, features: ServedFeatures) -> bool:
    choice = body.tool_choice
    return isinstance(choice, dict) and choice.get("type") not in _CALLABLE_TOOLS


def _has_verbosity(body: Body, features: ServedFeatures) -> bool:
    return isinstance(body.text, dict) and body.text.get("verbosity") not in (None, "medium")


def _lacks_logprobs(body: Body, features: ServedFeatures) -> bool:
    return bool(body.top_logprobs) and not body.logprobs


def _lacks_logprobs_include(body: Body, features: ServedFeatures) -> bool:
    included = body.include if isinstance(body.include, list) else ()
    return bool(body.top_logprobs) and "message.output_text.logprobs" not in included


def _wants_best_of_many(body: Body, features: ServedFeatures) -> bool:
    return body.best_of is not None and body.best_of != (1 if body.n is None else body.n)


def _has_images(body: Body, features: ServedFeatures) -> bool:
    return any(message.get("images") for message in _objects(body.messages))


def _fills_in(body: Body, features: ServedFeatures) -> bool:
    return bool(body.suffix) and not features.has_completion_template


_NO_ROLE = (
    "is for a prefill and a decode server, and this one runs without --disaggregation-mode "
    "(prefill/decode disaggregation); leave it out"
)
_NO_MEDIA = "image, audio and video input is not supported by this server yet"
_PARSER = (
    "calls in the reply would not be recognized; start the server with --tool-call-parser, or send "
    "tool_choice none"
)
_TWICE = (
    "false cannot be guaranteed while the model chooses freely; use tool_choice required, a named "
    "tool, or strict tools"
)
_LOGPROBS = "has no effect without logprobs"

_ROUTING = (
    *(
        Rule(field, _NO_ROLE, _has_no_role(field))
        for field in (
            *("bootstrap_host", "bootstrap_port", "bootstrap_room"),
            "disagg_prefill_dp_rank",
        )
    ),
)
_GENERATION = (
    *_ROUTING,
    Rule("session_params", "sessions are not supported by this server yet"),
    Rule("images_config", _NO_MEDIA),
    Rule("mm_processor_kwargs", _NO_MEDIA),
    Rule(
        "logit_bias",
        "keys must be token ids, each a number in quotes; /tokenize gives those of a text",
        _names_other_than_ids,
    ),
)
_TOOLS = (
    Rule("tools", _PARSER, _calls_are_lost),
    Rule("parallel_tool_calls", _TWICE, _may_call_twice),
)
COMPLETIONS = (
    *_GENERATION,
    Rule("best_of", "choosing among samples is not supported; use n", _wants_best_of_many),
    Rule(
        "suffix",
        "needs a template that says how the model fills in; start the server with "
        "--completion-template",
        _fills_in,
    ),
    Rule("custom_labels", "labels of metrics are not supported by this server yet"),
)
CHAT = (
    *_GENERATION,
    *_TOOLS,
    Rule("max_tokens", "must be at least 1", _is_below_one("max_tokens")),
    Rule("max_completion_tokens", "must be at least 1", _is_below_one("max_completion_tokens")),
    Rule("top_logprobs", _LOGPROBS, _lacks_logprobs),
    Rule(
        "return_flat_raw_output_top_logprobs",
        _LOGPROBS,
        lambda body, features: bool(body.return_flat_raw_output_top_logprobs) and not body.logprobs,
    ),
    Rule("functions", "use tools"),
    Rule("function_call", "use tool_choice", _unless("function_call", "none")),
    Rule("audio", "audio output is not supported"),
    Rule("modalities", "only text is supported", _unless("modalities", ["text"])),
    Rule("web_search_options", "web search is not supported", _unless("web_search_options")),
    Rule("verbosity", "is not supported; say it in the prompt", _unless("verbosity", "medium")),
    Rule("task", "only DeepSeek-V4 has these tasks, and it is not supported"),
    Rule("max_dynamic_patch", _NO_MEDIA),
    Rule("min_dynamic_patch", _NO_MEDIA),
    Rule("use_audio_in_video", _NO_MEDIA),
    Rule("video_config", _NO_MEDIA),
)
RESPONSES = (
    *_ROUTING,
    Rule("tools", "only tools of type function and custom are supported", _has_hosted_tool),
    *_TOOLS,
    Rule(
        "tool_choice", "only tools of type function and custom can be forced", _chooses_hosted_tool
    ),
    Rule("truncation", "only disabled is supported", _unless("truncation", "disabled")),
    Rule("top_logprobs", "needs include message.output_text.logprobs", _lacks_logprobs_include),
    Rule("text", "verbosity is not supported; say it in the prompt", _has_verbosity),
    Rule("prompt", "stored prompts are not supported; send input and instructions"),
    Rule("conversation", "conversations are not supported; use previous_response_id"),
    # Upstream generates the whole answer, and then cannot write a reply that names no model.
    Rule(
        "model",
        "is missing; send the served name, which /v1/models lists",
        lambda body, features: body.model is None,
    ),
)
OLLAMA_CHAT = (Rule("messages", _NO_MEDIA, _has_images),)
OLLAMA_GENERATE = (Rule("images", _NO_MEDIA),)
RULES = {
    "/v1/completions": COMPLETIONS,
    "/v1/chat/completions": CHAT,
    "/invocations": CHAT,
    "/v1/responses": RESPONSES,
    "/api/chat": OLLAMA_CHAT,
    "/api/generate": OLLAMA_GENERATE,
}
# Fields that a rule looks at besides its own.
_COMPANIONS = ("n", "logprobs", "tool_choice", "tools", "include")


def _decoder(rules: tuple[Rule, ...]) -> "msgspec.json.Decoder[Any]":
    """Reads the fields that rules look at and skips over the rest, prompts above all."""
    names = dict.fromkeys([rule.field for rule in rules] + list(_COMPANIONS))
    body = msgspec.defstruct("Body", [(name, Any, None) for name in names])
    return msgspec.json.Decoder(body)


_ANY = msgspec.json.Decoder()
_JSON_NAMES = {
    list: "an array",
    str: "a string",
    bool: "a boolean",
    int: "a number",
    float: "a number",
    type(None): "null",
}
_DECODERS = {path: _decoder(rules) for path, rules in RULES.items()}


def _refusal_of_other_than_an_object(body: bytes | bytearray) -> str | None:
    try:
        found = decode(_ANY, body)
    except MalformedData:
        return None
    if isinstance(found, dict):
        return None
    return f"the body must be a JSON object, got {_JSON_NAMES[type(found)]}"


def refusal(path: str, body: bytes | bytearray, features: ServedFeatures) -> str | None:
    """The reason to refuse a request to `path`; None if there is none, or if upstream must read
    it."""
    if path not in RULES:
        return None
    try:
        fields = decode(_DECODERS[path], body)
    except MalformedData:
        return _refusal_of_other_than_an_object(body)
    for rule in RULES[path]:
        if rule.refuses(fields, features):
            return f"{rule.field}: {rule.reason}"
    return None
