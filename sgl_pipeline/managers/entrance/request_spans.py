"""OpenTelemetry spans of the requests that the scheduler process has ended (`--enable-trace`).

Upstream's TokenizerManager begins a trace for each request, or goes on with the one that the
client's `traceparent` names. Ours joins it: one span of the model's work, with its phases (queue,
prefill, decode) as children. Upstream's provider batches and exports them with upstream's own.
`front_guard.py` sends the scheduler process the parent span, and `span_channel.py` brings back when
the request ended. Never a prompt, an answer or an error's text.

Names are those of the GenAI semantic conventions (the span's is "text_completion {model}", because
the scheduler sees tokens, whatever the API; open-telemetry/semantic-conventions-genai), and under
`gen_ai.latency.` those that SGLang and vLLM add, in seconds.
"""

import logging
import threading
import time
from collections.abc import Iterator
from typing import Any

import zmq

from sgl_pipeline.decoding import DECODING_ERRORS
from sgl_pipeline.managers.channels.span_channel import (
    MAX_UNREAD_REQUESTS,
    EndedRequest,
    read_ended,
)
from sgl_pipeline.managers.upstream.upstream_arguments import SglangServerArgs

logger = logging.getLogger(__name__)

OPERATION = "text_completion"
PROVIDER = "sgl_pipeline"
_POLL_MS = 200


class RequestSpans:
    """Receives requests that have ended, and makes their spans, in a thread.

    Args:
        address: where to listen (`span_channel.span_address`).
        model: the served model's name.
        provider: the opentelemetry TracerProvider that exports the spans. It never waits: while its
            collector is slow or away, its own queue drops spans.
    """

    def __init__(self, address: str, model: str, provider: Any) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PULL)
        self._socket.setsockopt(zmq.RCVHWM, MAX_UNREAD_REQUESTS)
        self._socket.bind(address)
        self._model = model
        self._provider = provider
        self._tracer = provider.get_tracer("sgl_pipeline")
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="request spans", daemon=True)
        self.num_dropped = 0  # requests that found the queue between the processes full

    def start(self) -> None:
        self._thread.start()

    def close(self, timeout_s: float) -> None:
        """Exports the spans of all requests so far, as far as it can be done in time."""
        self._is_over.set()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while not self._is_over.is_set():
            if self._socket.poll(_POLL_MS):
                self._take_waiting()
        self._take_waiting()
        self._socket.close(linger=0)
        self._provider.force_flush()

    def _take_waiting(self) -> None:
        while self._socket.poll(0):
            try:
                ended = read_ended(self._socket.recv())
            except DECODING_ERRORS:
                logger.exception("a message of a request that has ended cannot be read")
                continue
            if ended.num_dropped > self.num_dropped:
                self.num_dropped = ended.num_dropped
                logger.warning("%d requests have no spans: their queue was full", self.num_dropped)
            make_spans(ended, self._model, self._tracer)


def open_request_spans(address: str, server_args: SglangServerArgs) -> RequestSpans:
    """Begins to trace in this process, as upstream does, and to export what comes to `address`.

    Raises RuntimeError for an exporter that OTEL_EXPORTER_OTLP_TRACES_PROTOCOL names in vain.
    """
    from opentelemetry import trace
    from sglang.srt.observability.trace import process_tracing_init

    # Upstream's own call, which is still to come, finds it done.
    process_tracing_init(
        server_args.otlp_traces_endpoint, server_args.otlp_service_name, server_args.trace_modules
    )
    model = server_args.served_model_name or server_args.model_path
    spans = RequestSpans(address, model, trace.get_tracer_provider())
    spans.start()
    return spans


def make_spans(ended: EndedRequest, model: str, tracer: Any) -> None:
    """Makes the request's span and its children with an opentelemetry Tracer."""
    from opentelemetry import trace
    from opentelemetry.trace import NonRecordingSpan, SpanContext, StatusCode, TraceFlags

    _, trace_id, parent_id, flags = ended.trace_parent.split("-")
    # The monotonic clock is the host's, and moments of this request are hardly older than it.
    offset_ns = time.time_ns() - time.monotonic_ns()

    def start_span(name: str, parent: Any, start_s: float, **more: Any) -> Any:
        context = trace.set_span_in_context(parent)
        start_ns = offset_ns + round(start_s * 1e9)
        return tracer.start_span(name, context, start_time=start_ns, **more)

    parent = SpanContext(int(trace_id, 16), int(parent_id, 16), True, TraceFlags(int(flags, 16)))
    whole = start_span(
        f"{OPERATION} {model}",
        NonRecordingSpan(parent),
        ended.arrival_s,
        attributes=attributes_of(ended, model),
    )
    for name, start_s, end_s in phases_of(ended):
        start_span(name, whole, start_s).end(offset_ns + round(end_s * 1e9))
    if ended.error is not None:
        whole.set_status(StatusCode.ERROR)
    whole.end(offset_ns + round(ended.ended_s * 1e9))


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
    """The attributes of the request's span, without what was not asked for or is not known."""
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
