"""Checks of a generate request before upstream's front reads it.

Only values that would block the front, break it, or be lost on the way are checked here; upstream
and `sglang_requests.py` check the rest.
"""

import functools
from http import HTTPStatus
from typing import Annotated, Any, get_type_hints

import msgspec
from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.sampling.sampling_params import SamplingParams

from sgl_pipeline.errors import RequestError
from sgl_pipeline.managers.upstream.stop_regex import StopRegexes
from sgl_pipeline.managers.upstream.stop_text import check_stop_strings

# What Python raises where upstream takes apart a body whose form it has not checked. Such a request
# is refused, and logged, since a mistake of upstream's own would look the same.
MALFORMED = (
    *(TypeError, AttributeError, LookupError, ArithmeticError),
    *(AssertionError, RecursionError),
)
# Upstream copies a request per sample before it looks at it: 100,000 of them hold it for seconds.
MAX_SAMPLES_PER_PROMPT = 128
MAX_SEQUENCES_PER_REQUEST = 16384
MAX_REQUEST_ID_LENGTH = 512
# A prompt is tokenized whole before its length is known. Text has far fewer for each token, even
# with every character escaped in JSON.
MAX_CHARACTERS_PER_CONTEXT_TOKEN = 16

# Fields that upstream drops or fails on if a model does not use them.
_UNBUILT_INPUTS = {
    "image_data": "image, audio and video input",
    "video_data": "image, audio and video input",
    "audio_data": "image, audio and video input",
    "input_embeds": "input_embeds",
    "session_params": "sessions",
}


# Upstream never answers an empty id.
_Id = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_REQUEST_ID_LENGTH)]
_Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
_ROOM_TYPES: dict[str, Any] = {
    "bootstrap_host": str | list[str | None],
    "bootstrap_port": int | list[int | None],
    "bootstrap_room": _Int64 | list[_Int64 | None],
}


class RefusedRequestError(ValueError):
    """Upstream's handlers turn it into an error reply of this status."""

    def __init__(self, message: str, status_code: HTTPStatus) -> None:
        super().__init__(message)
        self.status_code = status_code


def check_inputs(obj: Any, context_length: int, is_health_check: bool) -> None:
    """Raises RefusedRequestError (400) for ids, prompts and inputs that upstream cannot handle.

    Args:
        obj: a GenerateReqInput before upstream has touched it, or another request.
        context_length: of the model, in tokens.
        is_health_check: whether upstream made `obj` itself, for its health routes.
    """
    if not isinstance(obj, GenerateReqInput):
        return
    for field, name in _UNBUILT_INPUTS.items():
        if getattr(obj, field) is not None:
            raise _refused(f"{name}: not supported by this server yet")
    if obj.http_worker_ipc is not None:
        raise _refused("http_worker_ipc is not for clients to set")
    _check_type("rid", obj.rid, _Id | list[_Id])
    # The scheduler answers a health check when it has time, and not to a client.
    rids = obj.rid if isinstance(obj.rid, list) else [obj.rid or ""]
    if not is_health_check and any(rid.startswith(HEALTH_CHECK_RID_PREFIX) for rid in rids):
        raise _refused(f"rid must not begin with {HEALTH_CHECK_RID_PREFIX}")
    _check_type("text", obj.text, str | list[str])
    _check_type(
        "input_ids",
        obj.input_ids,
        list[list[_Int64]] if _is_several(obj.input_ids) else list[_Int64],
    )
    longest = max_prompt_characters(context_length)
    texts = obj.text if isinstance(obj.text, list) else [obj.text or ""]
    if any(len(text) > longest for text in texts):
        raise _refused(
            f"the prompt has more than {longest} characters, far more than the context of "
            f"{context_length} tokens can hold"
        )


def check_decodable(tokens: Any) -> None:
    """Raises RefusedRequestError for token ids that no tokenizer can decode."""
    for part in tokens if isinstance(tokens, list) else ():
        for token in part if isinstance(part, list) else [part]:
            if isinstance(token, int) and not 0 <= token < 2**32:
                raise _refused(f"tokens: {token} is not a token id")


def max_prompt_characters(context_length: int) -> int:
    """The length from which a text is not even tokenized."""
    return MAX_CHARACTERS_PER_CONTEXT_TOKEN * context_length


def check_sequences(obj: Any) -> None:
    """Raises RefusedRequestError when `obj` fans out into too many requests or cannot be read.

    Args:
        obj: a GenerateReqInput before upstream has touched it, or another request (not checked).
    """
    options = getattr(obj, "sampling_params", None)
    prompts: Any = getattr(obj, "text", None) or getattr(obj, "input_ids", None)
    is_batch = _is_several(prompts)
    num_prompts = len(prompts) if is_batch else 1
    if isinstance(options, list) and len(options) != num_prompts:
        raise _refused(f"sampling_params: {len(options)} objects for {num_prompts} prompts")
    if isinstance(options, list) and not is_batch:
        raise _refused("sampling_params: a list is for a list of prompts")
    num_sequences = 0
    for one in options if isinstance(options, list) else [options or {}] * num_prompts:
        if not isinstance(one, dict):
            raise _refused("sampling_params must be an object or a list of objects")
        num_sequences += _checked_samples(one)
    if num_sequences > MAX_SEQUENCES_PER_REQUEST:
        raise _refused(
            f"{num_sequences} sequences in one request; at most {MAX_SEQUENCES_PER_REQUEST}"
        )


def check_logprob_lists(obj: Any) -> None:
    """Raises RefusedRequestError when a field of log-probabilities is a list that does not have an
    entry per prompt: upstream lets it pass, and its front breaks when the answer comes.

    Args:
        obj: as for `check_sequences`.
    """
    prompts: Any = getattr(obj, "text", None) or getattr(obj, "input_ids", None)
    num_prompts = len(prompts) if _is_several(prompts) else None
    for name in ("return_logprob", "logprob_start_len", "top_logprobs_num", "token_ids_logprob"):
        values = getattr(obj, name, None)
        # Flat, it holds the ids that are the same for all prompts.
        if name == "token_ids_logprob" and not (values and isinstance(values[0], list)):
            continue
        if isinstance(values, list) and len(values) != num_prompts:
            raise _refused(f"{name}: give one value, or one for each of several prompts")


def check_rooms(obj: Any) -> None:
    """Raises RefusedRequestError when the fields of a router are of another type, or lists that
    have neither an entry for each prompt nor one for each sample. Upstream looks at neither.

    Args:
        obj: as for `check_sequences`, which it has passed.
    """
    prompts: Any = getattr(obj, "text", None) or getattr(obj, "input_ids", None)
    num_prompts = len(prompts) if _is_several(prompts) else 1
    options = getattr(obj, "sampling_params", None) or {}
    several = options if isinstance(options, list) else [options] * num_prompts
    num_samples = sum(one.get("n") or 1 for one in several)
    for name, kind in _ROOM_TYPES.items():
        value = getattr(obj, name, None)
        _check_type(name, value, kind)
        if isinstance(value, list) and len(value) not in (num_prompts, num_samples):
            raise _refused(
                f"{name}: {len(value)} entries for {num_prompts} prompts; give one value, or one "
                "for each prompt or sample"
            )


def _is_several(prompts: Any) -> bool:
    """True if these are several prompts, and not the text or the token ids of a single one."""
    return isinstance(prompts, list) and not (prompts and isinstance(prompts[0], int))


def _checked_samples(one: dict[str, Any]) -> int:
    """Number of samples that these sampling parameters ask for. Raises when they cannot be read."""
    samples = 1 if one.get("n") is None else one["n"]
    if not isinstance(samples, int) or not 1 <= samples <= MAX_SAMPLES_PER_PROMPT:
        raise _refused(f"n must be between 1 and {MAX_SAMPLES_PER_PROMPT}, got {samples!r}")
    # Upstream's own mark that it has checked the rest.
    if one.get("is_normalized"):
        raise _refused("is_normalized is not for clients to set")
    # Upstream tokenizes the one and parses the other before anything bounds them.
    try:
        check_stop_strings(one.get("stop") or [])
        StopRegexes(one.get("stop_regex") or [])
    except RequestError as error:
        raise _refused(str(error)) from None
    # Only one of upstream's routes checks types; unknown names it refuses itself.
    types = _sampling_types()
    for name in one.keys() & types.keys():
        _check_type(name, one[name], types[name])
    return samples


@functools.cache
def _sampling_types() -> dict[str, Any]:
    """The types of upstream's sampling parameters; nulls among stop ids are legal."""
    return get_type_hints(SamplingParams) | {"stop_token_ids": list[int | None]}


def _check_type(name: str, value: Any, expected: Any) -> None:
    """Raises unless `value`, from JSON, is None or of the type `expected`."""
    if value is None:
        return
    try:
        msgspec.convert(value, expected)
    except msgspec.ValidationError as error:
        raise _refused(f"{name}: {error}") from None


def _refused(message: str) -> RefusedRequestError:
    return RefusedRequestError(message, HTTPStatus.BAD_REQUEST)
