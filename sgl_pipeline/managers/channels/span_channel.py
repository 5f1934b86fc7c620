"""The scheduler process's report of every request that ends, for its OpenTelemetry spans
(`--enable-trace`); both ends' messages.

`front/sglang_io.py` sends, `entrance/request_spans.py` receives in a thread of the HTTP server's
process, whose spans are the parents of ours. So nothing of OpenTelemetry runs in the scheduler
process: neither its work nor its lock on the interpreter can hold up a step. One `ipc://` socket in
the run directory with a bounded queue; what finds it full is dropped and counted. Counts and times
only: never a token or a text.
"""

import os
import re

import msgspec
import zmq

from sgl_pipeline.errors import ProtocolError
from sgl_pipeline.managers.upstream.upstream_messages import GenerateMessage
from sgl_pipeline.requests import FinishReason, Request

# Of either end: together some thousands of requests, while the collector is slow or away.
MAX_UNREAD_REQUESTS = 2048
# https://www.w3.org/TR/trace-context/#traceparent-header: version, trace id, span id, flags.
_TRACE_PARENT = re.compile(rb"00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


class EndedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request that has ended in whatever way. Moments are seconds of the host's monotonic clock,
    None for what it did not live to see.

    `trace_parent` is the span it belongs to, as a W3C traceparent. `error` is None where the
    request ended by itself, else the status code or "abort". `num_dropped` counts the requests of
    this server that could not be reported so far.
    """

    trace_parent: str
    request_id: str
    finish: str
    error: str | None
    arrival_s: float
    started_s: float | None
    first_token_s: float | None
    ended_s: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    num_retractions: int
    max_new_tokens: int
    temperature: float
    top_p: float
    top_k: int
    frequency_penalty: float
    presence_penalty: float
    num_dropped: int


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(EndedRequest)


def span_address(run_directory: str) -> str:
    """The address on which the HTTP server's process listens."""
    return "ipc://" + os.path.join(run_directory, "spans")


def read_ended(frame: bytes) -> EndedRequest:
    """Raises msgspec.DecodeError for anything else."""
    return _decoder.decode(frame)


class SpanSender:
    """The scheduler process's end. No method waits."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", address: str) -> None:
        self._socket = context.socket(zmq.PUSH)
        self._socket.setsockopt(zmq.SNDHWM, MAX_UNREAD_REQUESTS)
        self._socket.connect(address)
        self._parents: dict[str, str] = {}
        self.num_dropped = 0

    def began(self, message: GenerateMessage) -> None:
        """A request has come. It is reported only with a sampled parent (`front_guard.py`).

        Raises ProtocolError for a parent that is none.
        """
        if message.time_stats is None:
            return
        parent = message.time_stats.data
        if not _TRACE_PARENT.fullmatch(parent):
            raise ProtocolError(f"{parent[:80]!r} is not a traceparent")
        assert message.rid is not None
        self._parents[message.rid] = parent.decode()

    def ended(self, request: Request, finish: FinishReason, now_s: float) -> None:
        """It has ended; to be called once for each that began."""
        parent = self._parents.pop(request.request_id, None)
        if parent is None:
            return
        sampling = request.sampling
        ended = EndedRequest(
            trace_parent=parent,
            request_id=request.request_id,
            finish=finish.kind,
            error=str(finish.status_code or "abort") if finish.kind == "abort" else None,
            arrival_s=request.arrival_s,
            started_s=request.started_s,
            first_token_s=request.first_token_s,
            ended_s=now_s,
            prompt_tokens=len(request.prompt_ids),
            cached_tokens=request.cached_tokens,
            output_tokens=len(request.output_ids),
            num_retractions=request.num_retractions,
            max_new_tokens=request.stops.max_new_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            frequency_penalty=sampling.frequency_penalty,
            presence_penalty=sampling.presence_penalty,
            num_dropped=self.num_dropped,
        )
        try:
            self._socket.send(_encoder.encode(ended), zmq.NOBLOCK)
        except zmq.Again:
            self.num_dropped += 1

    def close(self) -> None:
        self._socket.close(linger=500)
