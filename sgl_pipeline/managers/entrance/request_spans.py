"""OpenTelemetry spans of the requests that the scheduler process has ended (`--enable-trace`).

Upstream's TokenizerManager begins a trace for each request, or goes on with the one that the
client's `traceparent` names, and its span of tokenizing. Ours joins it: one span of what the model
did, with what it consists of (queue, prefill, decode) as its children, through upstream's choice of
an exporter. `front_guard.py` tells the scheduler process which span is the parent, and
`span_channel.py` brings back when the request ended. Never a prompt, an answer or an error's text.

Names are those of the GenAI semantic conventions (the span's is "text_completion {model}", because
the scheduler sees tokens, whatever the API; open-telemetry/semantic-conventions-genai), and under
`gen_ai.latency.` those that SGLang and vLLM add, in seconds.
"""

import logging
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import zmq

from sgl_pipeline.managers.channels.span_channel import (
    MAX_UNREAD_REQUESTS,
    EndedRequest,
    read_ended,
)
from sgl_pipeline.managers.upstream.upstream_arguments import SglangServerArgs

logger = logging.getLogger(__name__)

OPERATION = "text_completion"
PROVIDER = "sgl_pipeline"
# Requests gather for so long, and so many are exported at once: the interpreter is shared with the
# HTTP server's event loop, and encoding a request's spans takes it some 0.2 ms.
GATHER_S = 0.5
MAX_BATCH_REQUESTS = 32
_POLL_MS = 200
_WARN_INTERVAL_S = 60.0


class RequestSpans:
    """Receives requests that have ended, and exports their spans from a thread.

    Args:
        address: where to listen (`span_channel.span_address`).
        model: the served model's name.
        exporter: an opentelemetry SpanExporter; it may wait, then requests queue up, and are
            dropped and counted beyond `MAX_UNREAD_REQUESTS`.
        resource: the opentelemetry Resource that stands for this server.
        flush: exports upstream's spans; called last.
    """

    def __init__(
        self,
        address: str,
        model: str,
        exporter: Any,
        resource: Any,
        flush: Callable[[], object] = lambda: None,
    ) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PULL)
        self._socket.setsockopt(zmq.RCVHWM, MAX_UNREAD_REQUESTS)
        self._socket.bind(address)
        self._model = model
        self._exporter = exporter
        self._resource = resource
        self._flush = flush
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="request spans", daemon=True)
        self.num_exported = 0  # requests
        self.num_failed = 0  # requests that the collector did not take
        self.num_dropped = 0  # requests that found the queue full
        self._next_warning_s = 0.0
        self._num_warned = 0

    def start(self) -> None:
        self._thread.start()

    def close(self, timeout_s: float) -> None:
        """Exports what has come so far, as far as it can be done in time."""
        self._is_over.set()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while not self._is_over.is_set():
            if self._socket.poll(_POLL_MS):
                self._is_over.wait(GATHER_S)
                self._export_waiting()
        self._export_waiting()
        self._socket.close(linger=0)
        self._flush()

    def _export_waiting(self) -> None:
        while batch := list(self._take(MAX_BATCH_REQUESTS)):
            spans = [span for one in batch for span in spans_of(one, self._model, self._resource)]
            try:
                is_taken = self._exporter.export(spans).name == "SUCCESS"
            except Exception:
                logger.exception("the spans of %d requests could not be exported", len(batch))
                is_taken = False
            if is_taken:
                self.num_exported += len(batch)
            else:
                self.num_failed += len(batch)
            self._warn(time.monotonic())

    def _take(self, most: int) -> Iterator[EndedRequest]:
        for _ in range(most):
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                ended = read_ended(frame)
            except msgspec.DecodeError:
                logger.exception("a message of a request that has ended cannot be read")
                continue
            self.num_dropped = max(self.num_dropped, ended.num_dropped)
            yield ended

    def _warn(self, now_s: float) -> None:
        num_lost = self.num_failed + self.num_dropped
        if num_lost == self._num_warned or now_s < self._next_warning_s:
            return
        self._num_warned, self._next_warning_s = num_lost, now_s + _WARN_INTERVAL_S
        logger.warning(
            "the spans of %d requests are lost so far: the collector did not take those of %d, and "
            "%d found the queue full; see --otlp-traces-endpoint",
            num_lost,
            self.num_failed,
            self.num_dropped,
        )


def open_request_spans(address: str, server_args: SglangServerArgs) -> RequestSpans:
    """Begins to trace in this process, as upstream does, and to export what comes to `address`.

    Raises RuntimeError for an exporter that OTEL_EXPORTER_OTLP_TRACES_PROTOCOL names in vain.
    """
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from sglang.srt.observability.trace import get_otlp_span_exporter, process_tracing_init

    endpoint = server_args.otlp_traces_endpoint
    # Upstream's own call, which is still to come, finds it done.
    process_tracing_init(endpoint, server_args.otlp_service_name, server_args.trace_modules)
    provider = trace.get_tracer_provider()
    assert isinstance(provider, TracerProvider)
    model = server_args.served_model_name or server_args.model_path
    spans = RequestSpans(
        address, model, get_otlp_span_exporter(endpoint), provider.resource, provider.force_flush
    )
    spans.start()
    return spans


def spans_of(ended: EndedRequest, model: str, resource: Any) -> list[Any]:
    """The request's span, and its children in the order of time, as opentelemetry ReadableSpans."""
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope
    from opentelemetry.trace import SpanContext, Status, StatusCode, TraceFlags

    _, trace_id, parent_id, flags = ended.trace_parent.split("-")
    # The monotonic clock is the host's, and moments of this request are hardly older than it.
    offset_ns = time.time_ns() - time.monotonic_ns()
    scope = InstrumentationScope("sgl_pipeline")

    def context(span_id: int, *, is_remote: bool = False) -> Any:
        return SpanContext(int(trace_id, 16), span_id, is_remote, TraceFlags(int(flags, 16)))

    def span(name: str, parent: Any, start_s: float, end_s: float, **more: Any) -> Any:
        return ReadableSpan(
            name,
            context(random.getrandbits(64) or 1),
            parent,
            resource,
            start_time=offset_ns + round(start_s * 1e9),
            end_time=offset_ns + round(end_s * 1e9),
            instrumentation_scope=scope,
            **more,
        )

    whole = span(
        f"{OPERATION} {model}",
        context(int(parent_id, 16), is_remote=True),
        ended.arrival_s,
        ended.ended_s,
        attributes=attributes_of(ended, model),
        status=Status(StatusCode.UNSET if ended.error is None else StatusCode.ERROR),
    )
    parts = [span(name, whole.context, start_s, end_s) for name, start_s, end_s in phases_of(ended)]
    return [whole, *parts]


def phases_of(ended: EndedRequest) -> Iterator[tuple[str, float, float]]:
    """Name, beginning and end of each phase that the request has seen; the last one ends with it.
    Steps that a retraction or a lost stage made it repeat are of the phase in which that came."""
    begins = (
        ("queue", ended.arrival_s),
        ("prefill", ended.started_s),
        ("decode", ended.first_token_s),
    )
    seen = [(name, begin_s) for name, begin_s in begins if begin_s is not None]
    ends_s = [begin_s for _, begin_s in seen[1:]] + [ended.ended_s]
    for (name, begin_s), end_s in zip(seen, ends_s, strict=True):
        yield name, begin_s, end_s


def attributes_of(ended: EndedRequest, model: str) -> dict[str, Any]:
    """Of the request's span; the conventions leave out what was not asked for or is not known."""
    asked = {
        "gen_ai.request.top_k": ended.top_k,
        "gen_ai.request.frequency_penalty": ended.frequency_penalty,
        "gen_ai.request.presence_penalty": ended.presence_penalty,
    }
    took_s = {name: end_s - begin_s for name, begin_s, end_s in phases_of(ended)}
    attributes = {
        "gen_ai.operation.name": OPERATION,
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": model,
        "gen_ai.response.model": model,
        "gen_ai.response.id": ended.request_id,
        "gen_ai.response.finish_reasons": (ended.finish,),
        "gen_ai.request.max_tokens": ended.max_new_tokens,
        "gen_ai.request.temperature": ended.temperature,
        "gen_ai.request.top_p": ended.top_p,
        **{name: value for name, value in asked.items() if value},
        "gen_ai.usage.input_tokens": ended.prompt_tokens,
        "gen_ai.usage.output_tokens": ended.output_tokens,
        "gen_ai.usage.cache_read.input_tokens": ended.cached_tokens,
        "gen_ai.latency.time_in_queue": took_s["queue"],
        "gen_ai.latency.e2e": ended.ended_s - ended.arrival_s,
        "sgl_pipeline.num_retractions": ended.num_retractions,
    }
    if ended.started_s is not None:
        attributes["gen_ai.latency.time_in_model_prefill"] = took_s["prefill"]
        attributes["gen_ai.latency.time_in_model_inference"] = ended.ended_s - ended.started_s
    if ended.first_token_s is not None:
        attributes["gen_ai.latency.time_in_model_decode"] = took_s["decode"]
        attributes["gen_ai.latency.time_to_first_token"] = ended.first_token_s - ended.arrival_s
    if ended.error is not None:
        attributes["error.type"] = ended.error
    return attributes
