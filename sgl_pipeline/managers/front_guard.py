"""What is turned away before it reaches the scheduler, through upstream's two official doors.

`launch_server.py` installs both: `GuardedTokenizerManager`, because a few requests would hold or
break upstream's own front, and `RouteGuard`, for routes whose replies have no room for a refusal.
Nothing of upstream is patched, and nothing that works is changed.
"""

from collections.abc import AsyncIterator
from contextlib import aclosing
from http import HTTPStatus
from typing import Any

from sglang.srt.managers.load_snapshot import LoadSnapshot, ShmLoadSnapshotReader
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sgl_pipeline.managers import openai_fields
from sgl_pipeline.managers.sample_seeds import spread_seeds

MAX_BODY_BYTES = 64 * 2**20
# Upstream copies a request per sample before it looks at it: 100,000 of them hold it for seconds.
MAX_SAMPLES_PER_PROMPT = 128
MAX_SEQUENCES_PER_REQUEST = 16384

_MEMORY = "releasing memory at run time"
_EXPERTS = "recording expert distributions"
_PROFILE = "profiling"
_EMBEDDINGS = "embeddings, classification and reranking"
_SESSIONS = "sessions"
_SPEECH = "speech recognition"
REFUSED_ROUTES = {
    "/release_memory_occupation": _MEMORY,
    "/resume_memory_occupation": _MEMORY,
    "/slow_down": "slowing down on purpose",
    "/start_expert_distribution_record": _EXPERTS,
    "/stop_expert_distribution_record": _EXPERTS,
    "/dump_expert_distribution_record": _EXPERTS,
    "/start_profile": _PROFILE,
    "/stop_profile": _PROFILE,
    "/open_session": _SESSIONS,
    "/close_session": _SESSIONS,
    "/encode": _EMBEDDINGS,
    "/classify": _EMBEDDINGS,
    "/v1/embeddings": _EMBEDDINGS,
    "/v1/classify": _EMBEDDINGS,
    "/v1/rerank": _EMBEDDINGS,
    "/v1/audio/transcriptions": _SPEECH,
    "/set_internal_state": "changing scheduler settings at run time",
}


class RefusedRequestError(ValueError):
    """What upstream's handlers turn into an error reply of this status."""

    def __init__(self, message: str, status_code: HTTPStatus) -> None:
        super().__init__(message)
        self.status_code = status_code


class GuardedTokenizerManager(TokenizerManager):
    """Upstream's, with a check in front of it and refusals that also reach streams.

    Args:
        loads_path: the file of `load_report.py`; the rest is upstream's.
    """

    def __init__(self, server_args: Any, port_args: Any, *, loads_path: str) -> None:
        super().__init__(server_args, port_args)
        self.load_snapshot_reader = ShmLoadSnapshotReader(loads_path, dp_size=1)

    async def get_loads(
        self, include: list[str] | None = None, dp_rank: int | None = None
    ) -> list[LoadSnapshot]:
        """As upstream's, which notices an unknown section too late for a 400: a ValueError."""
        if unknown := set(include or ()) - LoadSnapshot.VALID_SECTIONS:
            valid = ", ".join(sorted(LoadSnapshot.VALID_SECTIONS))
            raise ValueError(f"include: {', '.join(sorted(unknown))}; choose from {valid}")
        loads: list[LoadSnapshot] = await super().get_loads(include, dp_rank)
        return loads

    async def generate_request(self, obj: Any, request: Any = None) -> AsyncIterator[Any]:
        """As upstream's. Raises RefusedRequestError, a ValueError, for what is turned away."""
        check_sequences(obj)
        spread_seeds(obj)
        has_replied = False
        async with aclosing(super().generate_request(obj, request)) as replies:
            async for reply in replies:
                if (error := _refusal_in(reply)) is not None and not has_replied:
                    raise error
                has_replied = True
                yield reply


def check_sequences(obj: Any) -> None:
    """Raises RefusedRequestError when `obj` fans out into too many requests or cannot be read.

    Args:
        obj: a GenerateReqInput before upstream has touched it, or another request (not checked).
    """
    options = getattr(obj, "sampling_params", None) or {}
    prompts = getattr(obj, "text", None) or getattr(obj, "input_ids", None)
    num_prompts = len(prompts) if isinstance(prompts, list) and _is_several(prompts) else 1
    num_sequences = 0
    for one in options if isinstance(options, list) else [options] * num_prompts:
        if not isinstance(one, dict):
            raise _refused("sampling_params must be an object or a list of objects")
        samples = 1 if one.get("n") is None else one["n"]
        if not isinstance(samples, int) or not 1 <= samples <= MAX_SAMPLES_PER_PROMPT:
            raise _refused(f"n must be between 1 and {MAX_SAMPLES_PER_PROMPT}, got {samples!r}")
        # Upstream parses the expression itself, and answers a bad one with a 500.
        if one.get("stop_regex"):
            raise _refused("stop_regex: not supported by this server yet")
        # Upstream's own mark that it has checked the rest.
        if one.get("is_normalized"):
            raise _refused("is_normalized is not for clients to set")
        num_sequences += samples
    if num_sequences > MAX_SEQUENCES_PER_REQUEST:
        raise _refused(
            f"{num_sequences} sequences in one request; at most {MAX_SEQUENCES_PER_REQUEST}"
        )


def _is_several(prompts: list[Any]) -> bool:
    """Whether a list is one of prompts, and not the token ids of a single one."""
    return not prompts or not isinstance(prompts[0], int)


def _refused(message: str) -> RefusedRequestError:
    return RefusedRequestError(message, HTTPStatus.BAD_REQUEST)


def _refusal_in(reply: Any) -> RefusedRequestError | None:
    """The error that a reply of our scheduler reports, with the status that upstream looks for:
    its stream handlers expect an HTTPStatus, which the wire format turns into an integer."""
    meta = reply.get("meta_info") if isinstance(reply, dict) else None
    finish = meta.get("finish_reason") if isinstance(meta, dict) else None
    if not isinstance(finish, dict) or finish.get("status_code") is None:
        return None
    finish["status_code"] = HTTPStatus(finish["status_code"])
    return RefusedRequestError(str(finish.get("message")), finish["status_code"])


class RouteGuard:
    """ASGI middleware: refuses routes that are not built, bodies that are too large, and fields
    that would be ignored (`openai_fields.py`)."""

    def __init__(self, app: ASGIApp, features: openai_fields.ServedFeatures) -> None:
        self._app = app
        self._features = features

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if (feature := REFUSED_ROUTES.get(path)) is not None:
            message = f"{feature}: not supported by this server yet"
            refusal = JSONResponse({"error": {"message": message}}, HTTPStatus.BAD_REQUEST)
            await refusal(scope, receive, send)
            return
        body = bytearray()

        async def guarded_receive() -> Message:
            """Raises what upstream's handlers turn into an error reply of the route's own form."""
            message = await receive()
            body.extend(message.get("body", b""))
            if len(body) > MAX_BODY_BYTES:
                raise HTTPException(
                    HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                    f"the request is larger than {MAX_BODY_BYTES} bytes",
                )
            if message["type"] == "http.request" and not message.get("more_body", False):
                if (reason := openai_fields.refusal(path, body, self._features)) is not None:
                    raise HTTPException(HTTPStatus.BAD_REQUEST, reason)
                body.clear()
            return message

        await self._app(scope, guarded_receive, send)
