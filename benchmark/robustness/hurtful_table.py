# ruff: noqa: E501 - a table reads best with a request per line
"""Requests that could hurt a server or its other users, each with why and the answer it must get.

Sent by `test/server/shared/test_hurtful_requests.py`, timed by `benchmark/robustness/hurtful_requests.py`, beside
a stream that must not notice. The limits named here are those of the demo model.
"""

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import requests

VOCAB_SIZE = 320
CONTEXT_LENGTH = 32_768
TIMEOUT_S = 30.0
JSON = {"Content-Type": "application/json"}


@dataclass(frozen=True)
class HurtfulRequest:
    """One request and its expected answer.

    Args:
        reason: why it is worth a try; unique, the name of the test.
        body: JSON, or bytes that are sent as they are.
        status: of the answer.
        words: what the answer's text must hold.
    """

    reason: str
    path: str
    body: Any
    status: int = 400
    words: tuple[str, ...] = ()
    method: str = "POST"
    headers: Mapping[str, str] = field(default_factory=lambda: JSON)

    @functools.cached_property
    def payload(self) -> bytes:
        return self.body if isinstance(self.body, bytes) else json.dumps(self.body).encode()

    def send(self, url: str) -> requests.Response:
        return requests.request(
            self.method,
            url + self.path,
            data=self.payload,
            headers=dict(self.headers),
            timeout=TIMEOUT_S,
        )

    def fault_of(self, answer: requests.Response) -> str:
        """The fault of `answer`; empty when it is as it must be."""
        missing = [word for word in self.words if word not in answer.text]
        if answer.status_code == self.status and not missing:
            return ""
        return f"{answer.status_code} {answer.text[:500]!r}; expected {self.status}, {self.words}"


def _generate(reason: str, status: int, *words: str, **body: Any) -> HurtfulRequest:
    """To /generate, with a short prompt where `body` names none."""
    prompt = {} if body.keys() & {"text", "input_ids", "input_embeds"} else {"text": "ab"}
    return HurtfulRequest(reason, "/generate", prompt | body, status, words)


def _sampling(reason: str, status: int, *words: str, **sampling: Any) -> HurtfulRequest:
    """To /generate, with these sampling parameters."""
    return _generate(reason, status, *words, sampling_params={"max_new_tokens": 2} | sampling)


def _chat(reason: str, status: int, *words: str, **body: Any) -> HurtfulRequest:
    """To /v1/chat/completions, with a short conversation where `body` has none."""
    start = {"model": "m", "max_tokens": 2, "messages": [{"role": "user", "content": "ab"}]}
    return HurtfulRequest(reason, "/v1/chat/completions", start | body, status, words)


def _completion(reason: str, status: int, *words: str, **body: Any) -> HurtfulRequest:
    start = {"model": "m", "max_tokens": 2, "prompt": "ab"}
    return HurtfulRequest(reason, "/v1/completions", start | body, status, words)


def _raw(
    reason: str, path: str, body: bytes, status: int, *words: str, **more: Any
) -> HurtfulRequest:
    return HurtfulRequest(reason, path, body, status, words, **more)


def _nested(depth: int, innermost: Any = 1) -> Any:
    for _ in range(depth):
        innermost = [innermost]
    return innermost


_NAN, _INFINITY = float("nan"), float("inf")
_FLOATS = (
    *("temperature", "top_p", "min_p"),
    *("frequency_penalty", "presence_penalty", "repetition_penalty"),
)

PROMPTS = (
    _generate("a negative token id", 400, "-5", input_ids=[1, -5]),
    _generate("a token id just outside the vocabulary", 400, "320", input_ids=[VOCAB_SIZE]),
    _generate("a token id of 31 bits", 400, "vocabulary", input_ids=[2**31 - 1]),
    _generate("a token id beyond 64 bits", 400, "input_ids", input_ids=[2**70]),
    _generate("token ids that are floats", 400, "input_ids", input_ids=[1.5, 2.0]),
    _generate("token ids that are booleans", 400, "boolean", input_ids=[True, False]),
    _generate("token ids nested too deep", 400, "input_ids", input_ids=[[[1]]]),
    _generate("token ids and lists mixed", 400, "input_ids", input_ids=[1, [2]]),
    _generate("token ids that are text", 400, "input_ids", input_ids="1,2"),
    _generate("a bad token id in a batch", 400, "999", input_ids=[[1, 2], [3, 999]]),
    _generate("an empty text", 400, "empty", text=""),
    _generate("no token ids", 400, "empty", input_ids=[]),
    _generate("a batch with an empty prompt", 400, "empty", text=["ab", ""]),
    _generate("an empty batch", 200, text=[]),
    _generate("text and ids at once", 400, text="ab", input_ids=[1], input_embeds=[[0.5]]),
    _generate("a prompt longer than the context", 400, "32768", text="x" * 40_000),
    _generate("a prompt of ten megabytes", 400, "characters", text="x" * 10_000_000),
    _generate("a prompt as long as the context", 400, "32768", input_ids=[5] * CONTEXT_LENGTH),
    _generate("a prompt that is a number", 400, "text", text=7),
    _generate("a prompt that is an object", 400, "text", text={"a": 1}),
    _generate("no prompt at all", 400, "input_ids", text=None),
    _generate("NULs and controls as prompt", 200, text="\x00\x01\x7f", sampling_params={"max_new_tokens": 1}),
    _raw("half a surrogate pair as prompt", "/generate", b'{"text": "\\ud800"}', 400),
    _raw("half a surrogate pair in a chat", "/v1/chat/completions",
         b'{"model": "m", "messages": [{"role": "user", "content": "a\\udfff"}]}', 400),
    _completion("an empty prompt of a completion", 400, prompt=""),
    _completion("a completion of ids outside the vocabulary", 400, "99999", prompt=[99_999]),
    _completion("a completion of no prompts", 400, prompt=[]),
    _completion("a completion of mixed prompts", 400, prompt=["a", 1]),
    _completion("a completion of nested prompts", 400, prompt=_nested(5)),
    _chat("no messages", 400, messages=[]),
    _chat("messages that are text", 400, messages="hello"),
    _chat("a message without content", 400, messages=[{"role": "user"}]),
    _chat("a role that is an object", 400, messages=[{"role": {}, "content": "a"}]),
    _chat("content nested in content", 400, messages=[{"role": "user", "content": _nested(50)}]),
    _chat("a chat longer than the context", 400, "32768", messages=[{"role": "user", "content": "x" * 40_000}]),
)  # fmt: skip

NUMBERS = (
    *(_sampling(f"{name} is not a number", 400, "JSON", **{name: _NAN}) for name in _FLOATS),
    *(_sampling(f"{name} is infinite", 400, "JSON", **{name: _INFINITY}) for name in _FLOATS),
    *(_sampling(f"{name} is minus infinity", 400, "JSON", **{name: -_INFINITY}) for name in _FLOATS),
    *(_sampling(f"{name} is text", 400, "f64", **{name: "much"}) for name in _FLOATS),
    *(_sampling(f"{name} is a list", 400, "f64", **{name: [1]}) for name in _FLOATS),
    _sampling("a temperature beyond any float", 400, "infinity", temperature=10**400),
    _sampling("top_k of zero", 400, "top_k", top_k=0),
    _sampling("top_k far below zero", 400, "top_k", top_k=-(2**40)),
    _sampling("top_k above the vocabulary", 200, top_k=10**6),
    _sampling("top_k beyond 64 bits", 400, "i64", top_k=2**70),
    _sampling("top_k is a fraction", 400, "i64", top_k=1.5),
    _sampling("top_k is true", 400, "i64", top_k=True),
    _sampling("max_new_tokens is negative", 400, "max_new_tokens", max_new_tokens=-1),
    _sampling("max_new_tokens beyond the context", 400, "32768", max_new_tokens=100_000),
    _sampling("max_new_tokens beyond 64 bits", 400, "i64", max_new_tokens=2**70),
    _sampling("max_new_tokens is text", 400, "i64", max_new_tokens="many"),
    _sampling("max_new_tokens is a fraction", 400, "i64", max_new_tokens=1.5),
    _sampling("max_new_tokens is infinite", 400, "JSON", max_new_tokens=_INFINITY),
    _sampling("max_new_tokens is a list", 400, "i64", max_new_tokens=[1]),
    _sampling("min_new_tokens above the maximum", 400, "min_new_tokens", min_new_tokens=9),
    _sampling("min_new_tokens is negative", 400, "min_new_tokens", min_new_tokens=-9),
    _sampling("a seed beyond 64 bits", 400, "i64", sampling_seed=2**64),
    _sampling("a seed that is a fraction", 400, "i64", sampling_seed=0.5),
    _sampling("n of a billion", 400, "n must be", n=10**9),
    _sampling("n of zero", 400, "n must be", n=0),
    _sampling("n is text", 400, "i64", n="2"),
    _sampling("a stream interval of zero", 200, stream_interval=0),
    _sampling("a stream interval that is text", 400, "i64", stream_interval="often"),
    _sampling("a negative stream interval", 200, stream_interval=-3),
    _sampling("a bias outside the vocabulary", 400, "logit_bias", logit_bias={"99999": 1}),
    _sampling("a bias of a negative token", 400, "logit_bias", logit_bias={"-1": 1}),
    _sampling("a bias of no token", 400, "invalid literal", logit_bias={"a": 1}),
    _sampling("a bias that is no number", 400, "JSON", logit_bias={"5": _NAN}),
    _sampling("an infinite bias", 400, "JSON", logit_bias={"5": _INFINITY}),
    _sampling("a bias of 5,000 digits", 400, "4300 digits", logit_bias={"9" * 5000: 1}),
    _sampling("1,500 biases", 400, "logit_bias", logit_bias={"0" * n + "1": 1 for n in range(1500)}),
    _sampling("a bias that is a list", 400, "a map", logit_bias=[1, 2]),
    _sampling("a beam", 400, "beam", beam_width=4),
    _sampling("a beam that is text", 400, "i64", beam_width="wide"),
    _chat("max_tokens is negative", 400, max_tokens=-1),
    _chat("max_tokens beyond the context", 400, "32768", max_tokens=10**9),
    _chat("a temperature that is no number", 400, "JSON", temperature=_NAN),
    _chat("n of a billion in a chat", 400, n=10**9),
    _chat("a bias outside the vocabulary in a chat", 400, "logit_bias", logit_bias={"99999": 1}),
    _completion("best_of a billion", 400, best_of=10**9, n=10**9),
    _completion("max_tokens of a completion is text", 400, "max_tokens", max_tokens="many"),
    _chat("a priority beyond 64 bits", 400, priority=2**70),
    _generate("a priority beyond 64 bits in /generate", 400, priority=2**70),
    _generate("a priority that is text", 400, "priority", priority="first"),
)  # fmt: skip

STOPS = (
    _sampling("a stop id outside the vocabulary never matches", 200, stop_token_ids=[10**6, -7]),
    _sampling("a stop id beyond 64 bits", 400, "i64", stop_token_ids=[2**70]),
    _sampling("a stop id that is text", 400, "i64", stop_token_ids=["a"]),
    _sampling("a stop id that is a list", 400, "i64", stop_token_ids=[[1]]),
    _sampling("stop ids that are a number", 400, "sequence", stop_token_ids=5),
    _sampling("100,000 stop ids", 400, "stop_token_ids", stop_token_ids=list(range(100_000))),
    _sampling("100,000 stop strings", 400, "stop strings", stop=["x"] * 100_000),
    _sampling("a stop string of a megabyte", 400, "stop strings", stop="x" * 1_000_000),
    _sampling("an empty stop string", 400, "stop string", stop=""),
    _sampling("a stop string that is a number", 400, "StringOrList", stop=7),
    _sampling("stop strings that are numbers", 400, "a string", stop=[7]),
    _sampling("a stop string with half a surrogate pair", 400, "surrogate", stop="\ud800"),
    _sampling("a stop expression that backtracks for ever", 200, stop_regex="(a+)+$"),
    _sampling("a stop expression that is not closed", 400, "missing )", stop_regex="("),
    _sampling("a stop expression that explodes", 400, "repetition", stop_regex="(a{1000}){1000}"),
    _sampling("a stop expression that looks behind", 400, "look-around", stop_regex="(?<=a)b"),
    _sampling("a stop expression 100,000 deep", 400, "256 bytes", stop_regex="(" * 100_000),
    _sampling("10,000 stop expressions", 400, "at most 32", stop_regex=["a"] * 10_000),
    _sampling("a stop expression that is an object", 400, "StringOrList", stop_regex={"a": 1}),
    _sampling("a stop expression with half a surrogate pair", 400, "surrogate", stop_regex="\udc00"),
    _completion("an open stop expression of a completion", 400, "missing )", stop_regex="("),
    _chat("an open stop expression of a chat", 400, "missing )", stop_regex=["a", "("]),
    _chat("1,000 stop strings of a chat", 400, stop=["x"] * 1000),
)  # fmt: skip

FEATURES = (
    _sampling("parameters that claim to be checked", 400, "is_normalized", is_normalized=True),
    _sampling("stop strings by their inner name", 400, "stop_strs", stop_strs=["a"]),
    _sampling("an unknown sampling parameter", 400, "wibble", wibble=1),
    _sampling("custom parameters nested 800 deep", 400, "array", custom_params={"a": _nested(800)}),
    _sampling("custom parameters of reasoning ids", 400, "reasoning",
              custom_params={"__sglang_reasoning_end_token_ids": [-1]}),
    _sampling("a watermark", 400, "unknown field", watermark={"a": 1}),
    _sampling("flags that are text", 400, "boolean", ignore_eos="no"),
    _generate("sampling parameters that are a list of text", 400, "sampling_params", sampling_params=["n"]),
    _generate("more sampling parameters than prompts", 400, "sampling_params", text=["a", "b"], sampling_params=[{}]),
    _generate("no sampling parameters for a batch", 400, "sampling_params", text=["a", "b"], sampling_params=[]),
    _generate("a pickled logit processor", 400, "logit processor", custom_logit_processor="gASV"),
    _generate("a logit processor that is an object", 400, "custom_logit_processor", custom_logit_processor={"a": 1}),
    _generate("a session", 400, "sessions", session_params={"id": "a"}),
    _generate("a session of a strange form", 400, "session", session_params={"id": {"a": 1}, "wibble": 2}),
    _generate("a session id", 400, "sessions", session_id="a"),
    _generate("an adapter", 400, "LoRA", lora_path="/etc/passwd"),
    _generate("an adapter by its inner name", 400, "LoRA", lora_id="a"),
    _generate("an image from a file", 400, "image", image_data="file:///etc/passwd"),
    _generate("an image from a network", 400, "image", image_data=["http://127.0.0.1:1/a.png"]),
    _generate("a video", 400, "video", video_data="a"),
    _generate("audio", 400, "audio", audio_data="a"),
    _generate("a bootstrap host", 400, "disaggregation", bootstrap_host="127.0.0.1", bootstrap_port=1, bootstrap_room=1),
    _generate("a bootstrap room beyond 64 bits", 400, bootstrap_room=2**70),
    _generate("embeddings as prompt", 400, "embeds", input_embeds=[[0.5, 0.5]]),
    _generate("empty embeddings as prompt", 400, "input_embeds", input_embeds=[]),
    _generate("embeddings of nothing as prompt", 400, "input_embeds", input_embeds=[[]]),
    _generate("embeddings that are not numbers", 400, "input_embeds", input_embeds=[["a"]]),
    _generate("embedding overrides", 400, positional_embed_overrides={"a": 1}),
    _generate("a data-parallel rank", 400, "rank", routed_dp_rank=5),
    _generate("thinking tokens", 400, "max_thinking_tokens", max_thinking_tokens=5),
    _generate("hidden states", 400, "hidden states", return_hidden_states=True),
    _generate("routed experts", 400, "return_routed_experts", return_routed_experts=True),
    _generate("an address inside the server", 400, "http_worker_ipc", http_worker_ipc="ipc:///tmp/x"),
    _generate("an id of 10,000 characters", 400, "rid", rid="x" * 10_000),
    _generate("an id that is a number", 400, "rid", rid=7),
    _generate("the same id twice in a batch", 400, "uplicate", text=["a", "b"], rid=["x", "x"]),
    _generate("more ids than prompts", 400, "rid", text=["a", "b"], rid=["x", "y", "z"]),
    _generate("an empty id", 400, "rid", rid=""),
    _generate("an id with half a surrogate pair", 400, rid="\ud800"),
    _generate("an id that is a health check's", 400, "HEALTH_CHECK", rid="HEALTH_CHECK_x"),
    _generate("an id that is a health check's in a batch", 400, "HEALTH_CHECK", text=["a", "b"], rid="HEALTH_CHECK"),
    _generate("a cache key of a megabyte", 400, "extra_key", extra_key="x" * 1_000_000),
    _generate("a cache key that is a list", 400, "extra_key", extra_key=["a"]),
    _generate("a stream of a bad token id", 200, "99999", "error", input_ids=[99_999], stream=True),
    _generate("a stream with a bad expression", 200, "missing )", "error", stream=True, sampling_params={"stop_regex": "("}),
    _generate("a stream that is text", 400, "stream", stream="perhaps"),
    _chat("a chat stream of too many tokens", 400, "32768", stream=True, max_tokens=10**9),
    _chat("an image in a chat", 400, messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]}]),
    _chat("a tool without a name", 400, tools=[{"type": "function", "function": {}}]),
    _chat("tools that are text", 400, "tools", tools="all"),
    _chat("an adapter in a chat", 400, "LoRA", lora_path="a"),
    _chat("template arguments that are text", 400, "chat_template_kwargs", chat_template_kwargs="a"),
    _chat("an unknown reasoning effort", 400, "reasoning_effort", reasoning_effort="endless"),
)  # fmt: skip

_RESPONSES, _MESSAGES = "/v1/responses", "/v1/messages"
ROUTES = (
    HurtfulRequest("a response without input", _RESPONSES, {}),
    HurtfulRequest("a response of an unknown input", _RESPONSES, {"input": [{"type": "wibble"}]}),
    HurtfulRequest("a response of numbers", _RESPONSES, {"input": 7}),
    HurtfulRequest("a response beyond the context", _RESPONSES, {"input": "x" * 40_000}),
    HurtfulRequest("a response after an unknown one", _RESPONSES, {"input": "a", "previous_response_id": "resp_x"}),
    HurtfulRequest("a response after an odd one", _RESPONSES, {"input": "a", "previous_response_id": "../../x"}),
    HurtfulRequest("messages without a limit", _MESSAGES, {"model": "m", "messages": [{"role": "user", "content": "a"}]}),
    HurtfulRequest("messages of a negative limit", _MESSAGES, {"model": "m", "max_tokens": -1, "messages": [{"role": "user", "content": "a"}]}),
    HurtfulRequest("messages of a strange role", _MESSAGES, {"model": "m", "max_tokens": 2, "messages": [{"role": "x", "content": "a"}]}),
    HurtfulRequest("messages of nobody", _MESSAGES, {"model": "m", "max_tokens": 2, "messages": []}),
    HurtfulRequest("messages beyond the context", _MESSAGES, {"model": "m", "max_tokens": 2, "messages": [{"role": "user", "content": "x" * 40_000}]}),
    HurtfulRequest("a message with an image", _MESSAGES, {"model": "m", "max_tokens": 2, "messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "file:///etc/passwd"}}]}]}),
    HurtfulRequest("embeddings", "/v1/embeddings", {"model": "m", "input": "a"}),
    HurtfulRequest("embeddings of ids outside the vocabulary", "/v1/embeddings", {"model": "m", "input": [99_999]}),
    HurtfulRequest("an encoding", "/encode", {"text": "a"}),
    HurtfulRequest("a classification", "/classify", {"text": "a"}),
    HurtfulRequest("a score", "/v1/score", {"model": "m", "query": "a", "items": ["b"], "label_token_ids": [99_999]}),
    HurtfulRequest("a reranking", "/v1/rerank", {"model": "m", "query": "a", "documents": ["b"]}),
    HurtfulRequest("tokens of a number", "/v1/tokenize", {"model": "m", "prompt": 7}),
    HurtfulRequest("text of negative ids", "/v1/detokenize", {"model": "m", "tokens": [[99_999, -3]]}),
    HurtfulRequest("text of ids beyond 64 bits", "/v1/detokenize", {"model": "m", "tokens": [2**70]}),
    HurtfulRequest("an abort of a number", "/abort_request", {"rid": 7}),
    HurtfulRequest("Ollama without messages", "/api/chat", {"model": "m"}),
    HurtfulRequest("Ollama with odd options", "/api/generate", {"model": "m", "prompt": "a", "stream": False, "options": {"temperature": "hot"}}),
    HurtfulRequest("a SageMaker request of nothing", "/invocations", {}),
    HurtfulRequest("a Vertex request of numbers", "/vertex_generate", {"instances": [{"text": 7}], "parameters": {}}),
    HurtfulRequest("Vertex parameters of strange types", "/vertex_generate", {"instances": [{"text": "a"}], "parameters": {"sampling_params": {"temperature": "hot"}}}),
    HurtfulRequest("Vertex parameters that are unknown", "/vertex_generate", {"instances": [{"text": "a"}], "parameters": {"wibble": 1}}),
    HurtfulRequest("a function call to parse that is a number", "/parse_function_call", {"text": 7, "tools": [], "tool_call_parser": "x"}),
    HurtfulRequest("an unknown tool-call parser", "/parse_function_call", {"text": "a", "tools": [], "tool_call_parser": "x"}),
    HurtfulRequest("a chat of ten megabytes", "/v1/chat/completions", {"model": "m", "messages": [{"role": "user", "content": "x" * 10_000_000}]}, 413, ("larger",)),
    HurtfulRequest("an unknown reasoning parser", "/separate_reasoning", {"text": "a", "reasoning_parser": "x"}),
    HurtfulRequest("weights from a path", "/update_weights_from_disk", {"model_path": "/etc"}),
    HurtfulRequest("weights from tensors", "/update_weights_from_tensor", {"serialized_named_tensors": ["gASV"]}),
    HurtfulRequest("an adapter from a path", "/load_lora_adapter", {"lora_name": "a", "lora_path": "/etc"}),
    HurtfulRequest("a session to open", "/open_session", {"capacity_of_str_len": 2**70}),
    HurtfulRequest("logging into a directory", "/configure_logging", {"dump_requests_folder": "/proc/x", "log_requests_level": "x"}),
    HurtfulRequest("an unknown route", "/v1/wibble", {}, 404),
    HurtfulRequest("a delete of completions", "/v1/completions", {}, 405, method="DELETE"),
    HurtfulRequest("a get of a chat", "/v1/chat/completions", {}, 405, method="GET"),
)  # fmt: skip

BODIES = (
    _raw("an empty body", "/generate", b"", 400),
    _raw("truncated JSON", "/generate", b'{"text": "a', 400),
    _raw("truncated JSON of a chat", "/v1/chat/completions", b'{"messages": [', 400),
    _raw("a body that is null", "/generate", b"null", 400),
    _raw("a body that is a list", "/v1/completions", b"[]", 400),
    _raw("a body that is a number", "/v1/responses", b"7", 400),
    _raw("invalid UTF-8", "/generate", b'{"text": "\xff\xfe"}', 400),
    _raw("invalid UTF-8 in a chat", "/v1/chat/completions", b'{"messages": "\xc3("}', 400),
    _raw("100,000 brackets", "/generate", b"[" * 100_000, 400),
    _raw("a list 100,000 deep", "/generate", b'{"text": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", 400),
    _raw("a list 900 deep as messages", "/v1/chat/completions",
         b'{"messages": ' + b"[" * 900 + b"]" * 900 + b"}", 400),
    _raw("an object 40,000 deep in messages", "/v1/messages",
         b'{"messages": ' + b'{"a":' * 40_000 + b"1" + b"}" * 40_001, 400),
    _raw("an object 900 deep as sampling parameters", "/generate",
         b'{"text": "a", "sampling_params": ' + b'{"n":' * 900 + b"1" + b"}" * 901, 400),
    _raw("a tool schema 900 deep", "/v1/chat/completions",
         b'{"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": "a"}], "tools": [{"type":'
         b' "function", "function": {"name": "f", "parameters": ' + b'{"a":' * 900 + b"1" + b"}" * 903 + b"]}", 400),
    _raw("a number of 100,000 digits", "/generate", b'{"text": "a", "priority": ' + b"9" * 100_000 + b"}", 400),
    _raw("a key twice", "/generate", b'{"text": "a", "text": 7}', 400),
    _raw("a body of 65 megabytes", "/generate", b" " * (64 * 2**20 + 1), 413, "larger"),
    _raw("100,000 keys", "/generate", json.dumps({f"k{n}": n for n in range(100_000)}).encode(), 400),
    _raw("a form", "/v1/completions", b"prompt=a", 400, headers={"Content-Type": "application/x-www-form-urlencoded"}),
    _raw("text as content type", "/v1/chat/completions", b"{}", 400, headers={"Content-Type": "text/plain"}),
    _raw("no content type", "/generate", b"a", 400, headers={}),
    _raw("a false gzip", "/generate", b"{}", 400, headers=JSON | {"Content-Encoding": "gzip"}),
)  # fmt: skip

LOGPROBS = (
    _generate("more top log-probabilities than the vocabulary", 400, "top_logprobs_num", return_logprob=True, top_logprobs_num=VOCAB_SIZE + 1),
    _generate("a billion top log-probabilities", 400, "top_logprobs_num", return_logprob=True, top_logprobs_num=10**9),
    _generate("a negative number of log-probabilities", 400, "top_logprobs_num", return_logprob=True, top_logprobs_num=-1),
    _generate("log-probabilities from beyond the prompt", 400, "logprob_start_len", return_logprob=True, logprob_start_len=10**6),
    _generate("log-probabilities from far below zero", 400, "logprob_start_len", return_logprob=True, logprob_start_len=-(10**6)),
    _generate("the log-probability of a token outside the vocabulary", 400, "token_ids_logprob", return_logprob=True, token_ids_logprob=[99_999]),
    _generate("the log-probability of a negative token", 400, "token_ids_logprob", return_logprob=True, token_ids_logprob=[-1]),
    _generate("100,000 log-probabilities by id", 400, "token_ids_logprob", return_logprob=True, token_ids_logprob=[5] * 100_000),
    _chat("1,000 top log-probabilities in a chat", 400, logprobs=True, top_logprobs=1000),
    _completion("1,000 log-probabilities of a completion", 400, logprobs=1000),
)  # fmt: skip

GRAMMARS = (
    _sampling("two grammars at once", 400, "Only one of", regex="a", ebnf='root ::= "a"'),
    _sampling("a grammar that is not closed", 400, "regex", regex="("),
    _sampling("a grammar that backtracks for ever", 200, regex="(a+)+b?"),
    _sampling("a grammar that would explode elsewhere", 200, regex="((a{1,1000}){1,1000}){1,1000}"),
    _sampling("a grammar of a megabyte", 400, "regex", regex="a" * 1_000_000),
    _sampling("a grammar 10,000 deep", 400, "regex", regex="(" * 10_000 + "a" + ")" * 10_000),
    _sampling("rules without a root", 400, "ebnf", ebnf='a ::= "b"'),
    _sampling("rules that never end", 400, "allows no token", ebnf="root ::= root"),
    _sampling("rules that are no rules", 400, "ebnf", ebnf="\x00"),
    _sampling("a schema that is no JSON", 400, "json_schema", json_schema="{"),
    _sampling("a schema of an unknown type", 400, "wibble", json_schema='{"type": "wibble"}'),
    _sampling("a schema that refers to nothing", 400, "$defs", json_schema='{"$ref": "#/$defs/a"}'),
    _sampling("a schema 2,000 deep", 400, "json_schema", json_schema='{"items": ' * 2000 + "{}" + "}" * 2000),
    _sampling("a schema of a million strings", 200, json_schema='{"type": "array", "minItems": 1000000, "items": {"type": "string"}}'),
    _sampling("a structural tag that is no tag", 400, "structural_tag", structural_tag="[]"),
)  # fmt: skip

HURTFUL_REQUESTS = (
    *(*PROMPTS, *NUMBERS, *STOPS, *LOGPROBS, *GRAMMARS),
    *(*FEATURES, *ROUTES, *BODIES),
)
