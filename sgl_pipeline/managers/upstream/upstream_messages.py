"""The fields of upstream's messages that our processes read: a protocol for each message.

Upstream's classes are untyped for mypy, which sees a misspelt field of these. A field read for the
first time is added here, and test/managers/upstream/test_upstream_messages.py compares all of them
with upstream's classes. Fields have upstream's meaning; their values are checked where they are
read.
"""

from collections.abc import Sequence
from typing import Any, Literal, Protocol


class SglangMessage(Protocol):
    """Anything about one request or one route (upstream: `BaseReq`). The reply to it goes where
    `http_worker_ipc` says."""

    http_worker_ipc: str | None


class SamplingMessage(Protocol):
    """A request's parameters of sampling and output (upstream: `SamplingParams`)."""

    max_new_tokens: int | None
    min_new_tokens: int
    stop_token_ids: set[int] | None
    stop_strs: str | list[str] | None
    stop_regex_strs: str | list[str] | None
    ignore_eos: bool
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    frequency_penalty: float
    presence_penalty: float
    repetition_penalty: float
    logit_bias: dict[str, float] | None
    sampling_seed: int | None
    beam_width: int | None
    stream_interval: int | None
    skip_special_tokens: bool
    spaces_between_special_tokens: bool
    no_stop_trim: bool
    json_schema: str | None
    regex: str | None
    ebnf: str | None
    ebnf_full_assistant: bool
    structural_tag: str | None
    custom_params: object


class PackedMessage(Protocol):
    """Bytes that upstream means to be a pickle, and that we never unpickle (upstream:
    `PickleWrapper`)."""

    data: bytes


class GenerateMessage(SglangMessage, Protocol):
    """One prompt (upstream: `TokenizedGenerateReqInput`)."""

    rid: str | None
    input_ids: Sequence[int] | None
    sampling_params: SamplingMessage
    stream: bool
    priority: int | None
    extra_key: str | None
    cache_salt: str | None
    # With --fair-shares-by the tenant's name, by our own TokenizerManager (front_guard.py).
    routing_key: str | None
    require_reasoning: bool
    return_logprob: bool
    logprob_start_len: int
    top_logprobs_num: int
    token_ids_logprob: list[int] | None
    bootstrap_host: str | None
    bootstrap_port: int | None
    bootstrap_room: int | None
    disagg_prefill_dp_rank: int | None
    # With --enable-trace the request's traceparent, by our own TokenizerManager (front_guard.py).
    time_stats: PackedMessage | None


class AbortMessage(Protocol):
    """The client of `rid`, or of all requests, wants no more (upstream: `AbortReq`)."""

    rid: str | None
    abort_all: bool
    finished_reason: dict[str, Any] | None


class FlushMessage(SglangMessage, Protocol):
    """Empty the prefix cache, within `timeout_s` seconds (upstream: `FlushCacheReqInput`)."""

    timeout_s: float | None


class AttachMessage(SglangMessage, Protocol):
    """Use a store of pages (upstream: `AttachHiCacheStorageReqInput`)."""

    hicache_storage_backend: str
    hicache_storage_backend_extra_config_json: str | None
    hicache_storage_prefetch_policy: str | None
    hicache_write_policy: str | None


class PauseMessage(SglangMessage, Protocol):
    """Start no step for now (upstream: `PauseGenerationReqInput`)."""

    mode: Literal["abort", "retract", "in_place"]


class SessionMessage(SglangMessage, Protocol):
    """Open a session (upstream: `OpenSessionReqInput`)."""

    session_id: str | None


class LoggingMessage(SglangMessage, Protocol):
    """Change what is logged (upstream: `ConfigureLoggingReq`)."""

    log_level: str | None


class ProfileMessage(SglangMessage, Protocol):
    """Start or stop a profile; `req_type` says which (upstream: `ProfileReq`)."""

    req_type: object
    output_dir: str | None
    profile_prefix: str | None
    profile_id: str | None
    activities: list[str] | None
    num_steps: int | None
    with_stack: bool | None
    record_shapes: bool | None
