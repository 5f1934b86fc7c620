"""Upstream's generate request, checked and turned into a `Request`.

It checks every request that reaches the scheduler process. Whatever the HTTP layer did, every
number is bounded here, and a feature that is not built is a 400 that names it: a field is never
accepted and then ignored.
"""

import math
import secrets
from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import Any

from sgl_pipeline.errors import RequestError
from sgl_pipeline.managers.command_line.model_files import ModelLimits
from sgl_pipeline.managers.front.priority_rules import PriorityRules
from sgl_pipeline.managers.front.room_fields import NO_ROLE, RoomFields
from sgl_pipeline.managers.front.tenant_fields import TenantFields
from sgl_pipeline.managers.upstream.stop_regex import StopRegexes
from sgl_pipeline.managers.upstream.stop_text import StopTextCheck, check_stop_strings
from sgl_pipeline.managers.upstream.upstream_messages import GenerateMessage, SamplingMessage
from sgl_pipeline.page_hash import namespace_hash
from sgl_pipeline.requests import MAX_TOP_LOGPROBS, LogprobSpec, Request, SamplingSpec, StopRules

MAX_NAMESPACE_LENGTH = 4096
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGIT_BIASES = 1024
# Far beyond any logit, and sums of such numbers stay finite in fp32.
MAX_LOGIT_BIAS = 1e30
MAX_LOGPROB_TOKEN_IDS = 1024
# Of a prompt: each number costs the front some microseconds in which it serves no other request.
MAX_PROMPT_LOGPROBS = 2**20
_SEED_MASK = 2**63 - 1
_MAX_INT32 = 2**31 - 1
_ONE_TENANT = TenantFields()

# Fields of TokenizedGenerateReqInput that ask for something not built, and its name.
_UNBUILT_FIELDS = {
    "return_sampling_mask": "return_sampling_mask",
    "return_hidden_states": "return_hidden_states",
    "return_routed_experts": "return_routed_experts",
    "return_indexer_topk": "return_indexer_topk",
    "return_entropy": "return_entropy",
    "return_bytes": "image generation",
    "input_embeds": "input_embeds",
    "positional_embed_overrides": "embedding overrides",
    "mm_inputs": "image, audio and video input",
    "need_wait_for_mm_inputs": "image, audio and video input",
    "token_type_ids": "token_type_ids",
    "multi_item_delimiter_indices": "multi-item scoring",
    "token_indices_to_pool": "pooling",
    "session_id": "sessions",
    "session_params": "sessions",
    "lora_id": "LoRA adapters",
    "custom_logit_processor": "custom_logit_processor",
    "kv_hints": "kv_hints",
}

# Fields of SamplingParams, the value that asks for nothing, and the name of the feature otherwise.
_UNBUILT_SAMPLING: dict[str, tuple[object, str]] = {
    "watermark": (None, "watermarking"),
}


class RequestIntake:
    """Builds requests for one model.

    Args:
        limits: of the model.
        pool_tokens: tokens that the KV pool holds; bounds a request that names no maximum.
            `StepScheduler.add` checks whether a request can be served at all.
        tokenizer: decodes text for stop strings and expressions.
        random_seed: `--random-seed`: makes the seeds of requests without one reproducible.
        priorities: the meaning of their `priority`.
        rooms: the role of this server. A prefill server computes one token of each request.
        tenants: says whose requests they are.
    """

    def __init__(
        self,
        limits: ModelLimits,
        pool_tokens: int,
        tokenizer: Any,
        random_seed: int | None,
        priorities: PriorityRules,
        rooms: RoomFields = NO_ROLE,
        tenants: TenantFields = _ONE_TENANT,
    ) -> None:
        self._limits = limits
        self.pool_tokens = pool_tokens
        self._tokenizer = tokenizer
        self._priorities = priorities
        self._rooms = rooms
        self._tenants = tenants
        seeds: Random = secrets.SystemRandom() if random_seed is None else Random(random_seed)
        self._draw_seed: Callable[[], int] = lambda: seeds.getrandbits(63)

    def build(self, message: GenerateMessage, now_s: float) -> Request:
        """The request that `message`, a TokenizedGenerateReqInput, asks for, except its grammar
        (`grammars/spec.py`).

        Raises RequestError (400, or 503 for a priority) when it is malformed or asks for a feature
        that is not built.
        """
        for name in unbuilt_features(message):
            raise RequestError(f"{name}: not supported by this server yet")
        room = self._rooms.room(message)
        assert message.rid is not None, "a message without an id cannot be answered"
        prompt_ids = self._prompt_ids(message.input_ids)
        sampling = message.sampling_params
        return Request(
            request_id=message.rid,
            prompt_ids=prompt_ids,
            sampling=self._sampling(sampling),
            stops=StopRules(
                max_new_tokens=self._max_new_tokens(sampling.max_new_tokens, len(prompt_ids)),
                stop_token_ids=self._stop_token_ids(sampling),
                check_text=self._check_text(sampling),
            ),
            arrival_s=now_s,
            priority=self._priorities.priority(message.priority),
            logprobs=self._logprobs(message, len(prompt_ids)) if message.return_logprob else None,
            cache_namespace=_namespace(message.extra_key, message.cache_salt),
            tenant=self._tenants.tenant(message),
            room=room,
        )

    def _prompt_ids(self, ids: Sequence[int] | None) -> list[int]:
        if not ids:
            raise RequestError("the prompt is empty; send at least one token")
        vocab_size = self._limits.vocab_size
        if min(ids) < 0 or max(ids) >= vocab_size:
            bad = next(token for token in ids if not 0 <= token < vocab_size)
            raise RequestError(f"token id {bad} is outside the vocabulary [0, {vocab_size})")
        return list(ids)

    def _max_new_tokens(self, asked: int | None, prompt_length: int) -> int:
        if asked is not None:
            _check_range("max_new_tokens", asked, 0, _MAX_INT32)
        if self._rooms.mode == "prefill":
            return 1
        if asked is None:
            # As many as there is room for; none at all is for `StepScheduler.add` to refuse.
            return max(1, min(self._limits.context_length, self.pool_tokens) - prompt_length)
        # The front refuses lengths beyond the context, and fills in 128 if none is asked for; near
        # the context's end that default is cut to the remaining length.
        left = self._limits.context_length - prompt_length
        return min(asked, left) if left > 0 else asked

    def _sampling(self, sampling: SamplingMessage) -> SamplingSpec:
        _check_sampling(sampling)
        seed = sampling.sampling_seed
        return SamplingSpec(
            temperature=float(sampling.temperature),
            # Upstream spells "all of the vocabulary" as 2**30.
            top_k=0 if sampling.top_k >= self._limits.vocab_size else sampling.top_k,
            top_p=float(sampling.top_p),
            min_p=float(sampling.min_p),
            seed=self._draw_seed() if seed is None else seed & _SEED_MASK,
            frequency_penalty=float(sampling.frequency_penalty),
            presence_penalty=float(sampling.presence_penalty),
            repetition_penalty=float(sampling.repetition_penalty),
            logit_bias=self._logit_bias(sampling.logit_bias or {}),
            min_new_tokens=sampling.min_new_tokens,
            masked_token_ids=self._masked_token_ids(sampling),
        )

    def _logprobs(self, message: GenerateMessage, prompt_length: int) -> LogprobSpec:
        vocab_size, num_top = self._limits.vocab_size, message.top_logprobs_num
        _check_range(
            "top_logprobs_num (top_logprobs)", num_top, 0, min(MAX_TOP_LOGPROBS, vocab_size)
        )
        token_ids = tuple(message.token_ids_logprob or ())
        if len(token_ids) > MAX_LOGPROB_TOKEN_IDS:
            raise RequestError(
                f"token_ids_logprob may have {MAX_LOGPROB_TOKEN_IDS} ids, got {len(token_ids)}"
            )
        for token_id in token_ids:
            if not 0 <= token_id < vocab_size:
                raise RequestError(
                    f"token_ids_logprob: {token_id} is outside the vocabulary [0, {vocab_size})"
                )
        start = message.logprob_start_len
        if start == -1:  # upstream's default: of the output only
            start = prompt_length
        _check_range("logprob_start_len", start, 0, prompt_length)
        num_numbers = (prompt_length - start) * (1 + num_top + len(token_ids))
        if num_numbers > MAX_PROMPT_LOGPROBS:
            raise RequestError(
                f"{num_numbers} log-probabilities of the prompt are asked for, the "
                f"limit is {MAX_PROMPT_LOGPROBS}; raise logprob_start_len or lower "
                "top_logprobs_num"
            )
        return LogprobSpec(start, num_top, token_ids)

    def _logit_bias(self, asked: dict[str, float]) -> tuple[tuple[int, float], ...]:
        if len(asked) > MAX_LOGIT_BIASES:
            raise RequestError(f"logit_bias may have {MAX_LOGIT_BIASES} entries, got {len(asked)}")
        vocab_size = self._limits.vocab_size
        # Keys are texts: "1" and "01" are the same token, and as upstream has it the last one wins.
        biases: dict[int, float] = {}
        for key, bias in asked.items():
            try:
                token_id = int(key)
            except (TypeError, ValueError):
                raise RequestError(f"logit_bias: {key!r:.40} is not a valid token id") from None
            if not 0 <= token_id < vocab_size:
                raise RequestError(
                    f"logit_bias: token id {key!s:.40} is outside the vocabulary [0, {vocab_size})"
                )
            _check_range(f"logit_bias of token {token_id}", bias, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)
            biases[token_id] = float(bias)
        return tuple((token_id, bias) for token_id, bias in biases.items() if bias)

    def _masked_token_ids(self, sampling: SamplingMessage) -> tuple[int, ...]:
        """Tokens that may not be drawn before `min_new_tokens`: the EOS ids even where they are
        ignored, as upstream has it (`penaltylib/min_new_tokens.py`)."""
        if not sampling.min_new_tokens:
            return ()
        stops = self._stop_token_ids(sampling) | self._limits.eos_token_ids
        return tuple(sorted(token for token in stops if 0 <= token < self._limits.vocab_size))

    def _stop_token_ids(self, sampling: SamplingMessage) -> frozenset[int]:
        # An id outside the vocabulary is legal: it never matches.
        asked = frozenset(sampling.stop_token_ids or ())
        if len(asked) > MAX_STOP_TOKEN_IDS:
            raise RequestError(f"at most {MAX_STOP_TOKEN_IDS} stop_token_ids, got {len(asked)}")
        return asked if sampling.ignore_eos else asked | self._limits.eos_token_ids

    def _check_text(self, sampling: SamplingMessage) -> StopTextCheck | None:
        strings = check_stop_strings(sampling.stop_strs or [])
        regexes = StopRegexes(sampling.stop_regex_strs or [])
        if not strings and not regexes:
            return None
        return StopTextCheck(self._tokenizer, strings, regexes)


def unbuilt_features(message: GenerateMessage) -> Iterator[str]:
    """The names of features that `message` asks for and that are not built yet."""
    for field, name in _UNBUILT_FIELDS.items():
        value = getattr(message, field)
        if value is not None and value is not False:
            yield name
    sampling = message.sampling_params
    for field, (nothing, name) in _UNBUILT_SAMPLING.items():
        value = getattr(sampling, field)
        if value and value != nothing:
            yield name
    if sampling.beam_width is not None and sampling.beam_width > 1:
        yield "beam search (beam_width)"


def _check_sampling(sampling: SamplingMessage) -> None:
    """Holds every number to the range that upstream names (`SamplingParams.verify`)."""
    _check_range("temperature", sampling.temperature, 0.0, 1e6)
    _check_range("top_p", sampling.top_p, 0.0, 1.0)
    if sampling.top_p == 0.0:
        raise RequestError("top_p must be above 0 and at most 1")
    _check_range("min_p", sampling.min_p, 0.0, 1.0)
    _check_range("top_k", sampling.top_k, 1, _MAX_INT32)
    if sampling.sampling_seed is not None:
        _check_range("sampling_seed", sampling.sampling_seed, -(2**63), 2**63 - 1)
    _check_range("frequency_penalty", sampling.frequency_penalty, -2.0, 2.0)
    _check_range("presence_penalty", sampling.presence_penalty, -2.0, 2.0)
    _check_range("repetition_penalty", sampling.repetition_penalty, 0.0, 2.0)
    if sampling.repetition_penalty == 0.0:
        raise RequestError("repetition_penalty must be above 0 and at most 2")
    fewest, most = sampling.min_new_tokens, sampling.max_new_tokens
    _check_range("min_new_tokens", fewest, 0, _MAX_INT32)
    # For n > 1 the front first sends the prompt with 0 tokens and all else as it is.
    if most and fewest > most:
        raise RequestError(f"min_new_tokens {fewest} is above max_new_tokens {most}")


def _check_range(name: str, value: object, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise RequestError(f"{name} must be a finite number, got {value!r}")
    if not low <= value <= high:
        raise RequestError(f"{name} must be between {low} and {high}, got {value}")


def _namespace(extra_key: str | None, cache_salt: str | None) -> str:
    """The hash before the first page of the pair, in hex: upstream's, so that stores agree."""
    if len(extra_key or "") + len(cache_salt or "") > MAX_NAMESPACE_LENGTH:
        raise RequestError(
            f"extra_key and cache_salt may have {MAX_NAMESPACE_LENGTH} characters together"
        )
    return namespace_hash((extra_key, cache_salt)).hex()
