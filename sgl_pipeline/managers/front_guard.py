"""What is turned away before it reaches the scheduler, through upstream's two official doors.

`launch_server.py` installs both: `GuardedTokenizerManager`, because a few requests would hold or
break upstream's own front, and with `guard_routes` what upstream's HTTP application lacks. Nothing
of upstream is patched, and nothing that works is changed.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import aclosing
from http import HTTPStatus
from typing import Any

from sglang.srt.entrypoints.http_server import validate_json_request
from sglang.srt.managers.load_snapshot import LoadSnapshot, ShmLoadSnapshotReader
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from starlette.background import BackgroundTask
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sgl_pipeline.managers import openai_fields
from sgl_pipeline.managers.entrance_checks import (
    RefusedRequestError,
    check_decodable,
    check_inputs,
    check_logprob_lists,
    check_sequences,
    max_prompt_characters,
)
from sgl_pipeline.managers.sample_seeds import spread_seeds

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 64 * 2**20
# Template, tools and field names, beside the text of a conversation.
CONVERSATION_OVERHEAD_BYTES = 64 * 2**10
# Routes that take many prompts, or ids, at once. Upstream tokenizes what the others take while
# everybody waits, so that their bodies are bound to the context.
BATCH_ROUTES = frozenset({"/generate", "/v1/completions", "/vertex_generate"})
# What Python raises where upstream takes apart a body whose form it has not checked. Such a request
# is refused, and logged, since a mistake of upstream's own would look the same.
MALFORMED = (
    *(TypeError, AttributeError, LookupError, ArithmeticError),
    *(AssertionError, RecursionError),
)
HEALTH_ROUTES = frozenset({"/health", "/health_generate"})
# Texts shorter than this are tokenized faster than a thread takes over.
LONG_TEXT_CHARACTERS = 4096

_PAUSE = "pausing generation"
_MEMORY = "releasing memory at run time"
_EXPERTS = "recording expert distributions"
_PROFILE = "profiling"
# Upstream holds back every new request until all running ones have ended, and asks only then.
_WEIGHTS = "changing weights at run time"
_EMBEDDINGS = "embeddings, classification and reranking"
_SESSIONS = "sessions"
_SPEECH = "speech recognition"
REFUSED_ROUTES = {
    "/pause_generation": _PAUSE,
    "/continue_generation": _PAUSE,
    "/release_memory_occupation": _MEMORY,
    "/resume_memory_occupation": _MEMORY,
    "/slow_down": "slowing down on purpose",
    "/start_expert_distribution_record": _EXPERTS,
    "/stop_expert_distribution_record": _EXPERTS,
    "/dump_expert_distribution_record": _EXPERTS,
    "/start_profile": _PROFILE,
    "/stop_profile": _PROFILE,
    "/update_weights_from_disk": _WEIGHTS,
    "/update_weights_from_distributed": _WEIGHTS,
    "/update_weights_from_ipc": _WEIGHTS,
    "/update_weights_from_tensor": _WEIGHTS,
    "/begin_weight_update": _WEIGHTS,
    "/end_weight_update": _WEIGHTS,
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
        is_health_check = request is not None and request.url.path in HEALTH_ROUTES
        check_inputs(obj, self.context_len, is_health_check)
        check_sequences(obj)
        check_logprob_lists(obj)
        spread_seeds(obj)
        has_replied = False
        async with aclosing(super().generate_request(obj, request)) as replies:
            try:
                async for reply in replies:
                    if (error := _refusal_in(reply)) is not None and not has_replied:
                        raise error
                    has_replied = True
                    yield reply
            except MALFORMED as error:
                if has_replied:
                    raise
                logger.exception("a request that cannot be read was refused")
                message = f"the request cannot be read: {error}"
                raise RefusedRequestError(message, HTTPStatus.BAD_REQUEST) from error

    async def _tokenize_texts(self, texts: Any, is_cross_encoder: bool = False) -> Any:
        """As upstream's, but a long text is tokenized in a thread, and the streams go on."""
        tokenize = super()._tokenize_texts(texts, is_cross_encoder)
        characters = sum(map(len, texts)) if isinstance(texts, list) else len(texts)
        if characters < LONG_TEXT_CHARACTERS:
            return await tokenize
        return await asyncio.to_thread(asyncio.run, tokenize)

    def create_abort_task(self, obj: Any) -> BackgroundTask:
        """As upstream's, which cannot tell what a request refused at the entrance is."""
        abort = super().create_abort_task(obj)

        async def abort_if_taken() -> None:
            if hasattr(obj, "is_single"):
                await abort()

        return BackgroundTask(abort_if_taken)


def _refusal_in(reply: Any) -> RefusedRequestError | None:
    """The error that a reply of our scheduler reports, with the status that upstream looks for:
    its stream handlers expect an HTTPStatus, which the wire format turns into an integer."""
    meta = reply.get("meta_info") if isinstance(reply, dict) else None
    finish = meta.get("finish_reason") if isinstance(meta, dict) else None
    if not isinstance(finish, dict) or finish.get("status_code") is None:
        return None
    finish["status_code"] = HTTPStatus(finish["status_code"])
    return RefusedRequestError(str(finish.get("message")), finish["status_code"])


def guard_routes(app: Any, context_length: int, features: openai_fields.ServedFeatures) -> None:
    """Adds to upstream's FastAPI application, before it is started, all that follows in this file.

    Args:
        context_length: of the model, in tokens.
    """
    app.add_middleware(RouteGuard, context_length=context_length, features=features)
    app.add_exception_handler(ValueError, answer_value_error)
    for kind in MALFORMED:
        app.add_exception_handler(kind, answer_malformed)
    app.add_exception_handler(Exception, answer_crash)
    app.dependency_overrides[validate_json_request] = check_json_request


async def check_json_request(raw_request: Request) -> None:
    """In the place of upstream's `validate_json_request`, a dependency of most routes: that, and
    the one body that its route answers with a 500. Raises RefusedRequestError."""
    await validate_json_request(raw_request)
    if raw_request.url.path.endswith("/detokenize"):
        body = await raw_request.json()
        check_decodable(body.get("tokens") if isinstance(body, dict) else None)


async def answer_value_error(request: Request, error: Exception) -> JSONResponse:
    """For upstream's routes that let a ValueError about their input escape."""
    return JSONResponse({"error": {"message": str(error)}}, HTTPStatus.BAD_REQUEST)


async def answer_malformed(request: Request, error: Exception) -> JSONResponse:
    """For upstream's routes that trip over a body of an unexpected form."""
    logger.error("a body that cannot be read was refused", exc_info=error)
    message = f"the request cannot be read: {error}"
    return JSONResponse({"error": {"message": message}}, HTTPStatus.BAD_REQUEST)


async def answer_crash(request: Request, error: Exception) -> JSONResponse:
    """For what nobody expected; and for a key that upstream's comparison trips over."""
    if "non-ASCII" in str(error):
        return JSONResponse({"error": "Unauthorized"}, HTTPStatus.UNAUTHORIZED)
    message = "internal error; see the server's log"
    return JSONResponse({"error": {"message": message}}, HTTPStatus.INTERNAL_SERVER_ERROR)


class RouteGuard:
    """ASGI middleware: refuses routes that are not built, bodies that are too large, and fields
    that would be ignored (`openai_fields.py`).

    Args:
        context_length: of the model, in tokens: bounds the body of a conversation.
        features: what this server has been started with.
    """

    def __init__(
        self, app: ASGIApp, context_length: int, features: openai_fields.ServedFeatures
    ) -> None:
        self._app = app
        self._features = features
        self._max_conversation_bytes = (
            max_prompt_characters(context_length) + CONVERSATION_OVERHEAD_BYTES
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            # For speech, which is not built. Upstream asks no API key of it.
            await send({"type": "websocket.close", "code": 1008, "reason": "not supported"})
            return
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
        max_bytes = MAX_BODY_BYTES if path in BATCH_ROUTES else self._max_conversation_bytes

        async def guarded_receive() -> Message:
            """Raises what upstream's handlers turn into an error reply of the route's own form."""
            message = await receive()
            body.extend(message.get("body", b""))
            if len(body) > max_bytes:
                raise HTTPException(
                    HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                    f"the request is larger than {max_bytes} bytes",
                )
            if message["type"] == "http.request" and not message.get("more_body", False):
                if (reason := openai_fields.refusal(path, body, self._features)) is not None:
                    raise HTTPException(HTTPStatus.BAD_REQUEST, reason)
                body.clear()
            return message

        await self._app(scope, guarded_receive, send)
