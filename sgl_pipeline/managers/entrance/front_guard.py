"""Upstream's TokenizerManager with checks before it.

Upstream's launcher takes it as an argument. It exists because a few requests would block or break
upstream's own front; `route_guard.py` guards the routes, and `http_front.py` adds what only an
HTTP server needs. Nothing of upstream is patched, and nothing that works is changed.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import aclosing
from http import HTTPStatus
from typing import Any

from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.managers.io_struct import (
    BatchTokenizedGenerateReqInput,
    PickleWrapper,
    TokenizedGenerateReqInput,
)
from sglang.srt.managers.tokenizer_manager import TokenizerManager

from sgl_pipeline.managers.entrance.ollama_routes import OLLAMA_ROUTES, ends_apart
from sgl_pipeline.managers.entrance.prompt_logprobs import leave_to_prefill
from sgl_pipeline.managers.entrance.request_tenant import RequestTenants
from sgl_pipeline.managers.entrance.sample_seeds import spread_samples
from sgl_pipeline.managers.upstream.request_checks import (
    MALFORMED,
    RefusedRequestError,
    check_inputs,
    check_logprob_lists,
    check_rooms,
    check_sequences,
)

logger = logging.getLogger(__name__)

HEALTH_ROUTES = frozenset({"/health", "/health_generate"})
# Texts shorter than this are tokenized faster than a thread takes over.
LONG_TEXT_CHARACTERS = 4096
_GENERATE_MANY = BatchTokenizedGenerateReqInput
_SAMPLED = 1  # of a traceparent's flags


class GuardedTokenizerManager(TokenizerManager):
    """Upstream's, with a check in front of it, and refusals that also reach streams."""

    # Names the tenants; None: all requests are of one.
    tenants: RequestTenants | None = None

    def __init__(self, server_args: Any, port_args: Any) -> None:
        # A prefill server's bootstrap port is a process of its own (`hosts/bootstrap_process.py`).
        super().__init__(server_args, port_args, start_pd_bootstrap_service=False)

    async def generate_request(self, obj: Any, request: Any = None) -> AsyncIterator[Any]:
        """As upstream's. Raises RefusedRequestError, a ValueError, for a refused request."""
        is_health_check = request is not None and request.url.path in HEALTH_ROUTES
        check_inputs(obj, self.context_len, is_health_check)
        check_sequences(obj)
        check_logprob_lists(obj)
        check_rooms(obj)
        spread_samples(obj)
        if request is not None and self.disaggregation_mode is DisaggregationMode.DECODE:
            leave_to_prefill(obj, request.url.path)
        if self.tenants is not None:
            await self.tenants.begin(request)
        has_replied = False
        all_replies = super().generate_request(obj, request)
        if request is not None and request.url.path in OLLAMA_ROUTES and obj.stream:
            all_replies = ends_apart(all_replies)
        async with aclosing(all_replies) as replies:
            try:
                async for reply in replies:
                    if (error := refusal_in(reply)) is not None and not has_replied:
                        raise error
                    has_replied = True
                    yield reply
            except MALFORMED as error:
                if has_replied:
                    raise
                logger.exception("a request that cannot be read was refused")
                message = f"the request cannot be read: {error}"
                raise RefusedRequestError(message, HTTPStatus.BAD_REQUEST) from error

    def _wait_one_response(self, obj: Any, request: Any = None) -> AsyncIterator[Any]:
        """As upstream's, which sets a timer for each token (and with Python 3.11 makes a task), to
        ask now and then whether the client is still there. Of a stream that has begun, Starlette's
        response notices it: it listens as long as uvicorn's ASGI version is below 2.4."""
        logs_headers = self.request_logger.log_requests
        if request is None or logs_headers or not getattr(obj, "stream", False):
            return super()._wait_one_response(obj, request)
        return self._stream_replies(obj, self.rid_to_state[obj.rid], request)

    async def _stream_replies(self, obj: Any, state: Any, request: Any) -> AsyncIterator[Any]:
        """The replies to a stream's request; the client is asked for until the first one."""
        async with aclosing(super()._stream_one_response(obj, state, request)) as begun:
            yield await anext(begun)
        # Upstream gives no reply without taking all there are: a last one is either out or there.
        if state.finished and not state.out_list:
            return
        async with aclosing(super()._stream_one_response(obj, state)) as rest:
            async for reply in rest:
                yield reply

    def _dispatch_to_scheduler(self, obj: Any) -> None:
        """As upstream's; each request carries the name of its tenant, where they are told apart,
        and with `--enable-trace` that of its span."""
        for message in obj.batch if isinstance(obj, _GENERATE_MANY) else (obj,):
            if not isinstance(message, TokenizedGenerateReqInput):
                continue
            if self.tenants is not None:
                self.tenants.mark(message)
            if self.enable_trace:
                parent = _trace_parent(self.rid_to_state.get(message.rid))
                # In the place of a pickle, which is never opened.
                message.time_stats = None if parent is None else PickleWrapper(data=parent)
        super()._dispatch_to_scheduler(obj)

    def _calculate_spec_decoding_metrics(
        self, meta_info: dict[str, Any], recv_obj: Any, i: int
    ) -> None:
        """As upstream's, which takes every draft for as long as a draft may be, and every step for
        one with a draft: ours are as long as they pay, and where they pay."""
        super()._calculate_spec_decoding_metrics(meta_info, recv_obj, i)
        steps, right = recv_obj.spec_verify_ct[i], recv_obj.spec_num_correct_drafts[i]
        if steps:
            drafted = recv_obj.spec_num_cap_tokens[i] - steps
            meta_info["spec_num_proposed_drafts"] = drafted
            meta_info["spec_accept_rate"] = right / drafted
            meta_info["spec_accept_length"] = 1.0 + right / steps

    async def _tokenize_texts(self, texts: Any, is_cross_encoder: bool = False) -> Any:
        """As upstream's, but a long text is tokenized in a thread, and the streams go on."""
        tokenize = super()._tokenize_texts(texts, is_cross_encoder)
        characters = sum(map(len, texts)) if isinstance(texts, list) else len(texts)
        if characters < LONG_TEXT_CHARACTERS:
            return await tokenize
        return await asyncio.to_thread(asyncio.run, tokenize)


def _trace_parent(state: Any) -> bytes | None:
    """The W3C traceparent of a request's span; None if it has no span or is not sampled."""
    if state is None or not state.time_stats.trace_ctx.tracing_enable:
        return None
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier, state.time_stats.trace_ctx.root_span_context)
    parent = carrier.get("traceparent", "00")
    return parent.encode() if int(parent[-2:], 16) & _SAMPLED else None


def refusal_in(reply: Any) -> RefusedRequestError | None:
    """The error that a reply of our scheduler reports, with the status that upstream looks for:
    its stream handlers expect an HTTPStatus, which the wire format turns into an integer."""
    meta = reply.get("meta_info") if isinstance(reply, dict) else None
    finish = meta.get("finish_reason") if isinstance(meta, dict) else None
    if not isinstance(finish, dict) or finish.get("status_code") is None:
        return None
    finish["status_code"] = HTTPStatus(finish["status_code"])
    return RefusedRequestError(str(finish.get("message")), finish["status_code"])
