"""The scheduler process's sockets to upstream's front: requests in, tokens and replies out.

With `sglang_requests.py`, `sglang_output.py` and `control_requests.py` it is the only place that
reads upstream's message fields, as typed in `upstream_messages.py`. A message that cannot be read
(`message_decoder.py`) ends one request, never the loop.
"""

import logging
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import zmq
from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX
from sglang.srt.managers import io_struct

from sgl_pipeline.errors import RequestError
from sgl_pipeline.managers.channels.span_channel import SpanSender
from sgl_pipeline.managers.command_line.model_files import ModelLimits
from sgl_pipeline.managers.front.message_decoder import (
    EMBED,
    EMBED_MANY,
    GENERATE,
    GENERATE_MANY,
    make_decoder,
    rids_of,
)
from sgl_pipeline.managers.front.priority_rules import PriorityRules
from sgl_pipeline.managers.front.reasoning_tokens import ReasoningMarks
from sgl_pipeline.managers.front.room_fields import NO_ROLE, RoomFields
from sgl_pipeline.managers.front.sglang_output import (
    OutputCursor,
    OutputRow,
    output_message,
    refusal_row,
)
from sgl_pipeline.managers.front.sglang_requests import RequestIntake
from sgl_pipeline.managers.front.tenant_fields import TenantFields
from sgl_pipeline.managers.grammars.spec import ConstrainedRequest, grammar_of
from sgl_pipeline.managers.upstream.request_checks import MAX_REQUEST_ID_LENGTH
from sgl_pipeline.managers.upstream.upstream_arguments import SglangPortArgs, SglangServerArgs
from sgl_pipeline.managers.upstream.upstream_messages import (
    AbortMessage,
    GenerateMessage,
    SglangMessage,
)
from sgl_pipeline.requests import FinishReason, Request, RequestState, Room
from sgl_pipeline.scheduling import TokenEvent

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AbortRequest:
    """The front wants these live requests ended. Call `send_finish` for each once it has ended."""

    requests: tuple[Request, ...]
    finish: FinishReason


@dataclass(frozen=True, slots=True)
class RefusedRoom:
    """A request of this room was refused and has its answer; its other server may wait for it."""

    room: Room
    text: str
    status_code: int


@dataclass(frozen=True, slots=True)
class ControlRequest:
    """A message about the server, not about a generation: for `control_requests.ControlReplies`."""

    message: SglangMessage


Received = Request | ConstrainedRequest | AbortRequest | RefusedRoom | ControlRequest


class SglangFront:
    """Both directions of the seam.

    Args:
        server_args: upstream's, resolved and published in this process.
        port_args: upstream's; the front binds all three sockets.
        limits: of the model.
        pool_tokens: tokens that the KV pool holds.
        tokenizer: see `model_files.load_tokenizer`.
        reasoning: the marks of reasoning tokens.
        spans: gets every request that ends; None without `--enable-trace`.
        rooms: the role of this server.
        fair_shares_by: the flag of that name.
    """

    def __init__(
        self,
        server_args: SglangServerArgs,
        port_args: SglangPortArgs,
        limits: ModelLimits,
        pool_tokens: int,
        tokenizer: Any,
        reasoning: ReasoningMarks,
        context: "zmq.Context[zmq.Socket[bytes]]",
        spans: SpanSender | None = None,
        rooms: RoomFields = NO_ROLE,
        fair_shares_by: str | None = None,
    ) -> None:
        self.socket = _connect(context, zmq.PULL, port_args.scheduler_input_ipc_name)
        self._to_detokenizer = _connect(context, zmq.PUSH, port_args.detokenizer_ipc_name)
        self._to_tokenizer = _connect(context, zmq.PUSH, port_args.tokenizer_ipc_name)
        priorities = PriorityRules(
            server_args.enable_priority_scheduling,
            server_args.schedule_low_priority_values_first,
            server_args.abort_on_priority_when_disabled,
        )
        tenants, seed = TenantFields(fair_shares_by), server_args.random_seed
        self._intake = RequestIntake(
            limits, pool_tokens, tokenizer, seed, priorities, rooms, tenants
        )
        self._rooms = rooms
        self._stream_interval = server_args.stream_interval
        self._reasoning = reasoning
        self._spans = spans
        self._cursors: dict[str, OutputCursor] = {}
        # Health checks that the next completed step answers: proof that the stages are alive.
        self._waiting_health_checks: list[GenerateMessage] = []
        # Set by the scheduler's loop; the second is the store that is attached, if any.
        self.is_recovering = False
        self.storage_backend: str | None = None
        self._decoder = make_decoder()

    def set_pool_tokens(self, pool_tokens: int) -> None:
        """The KV pool holds `pool_tokens` tokens from now on."""
        self._intake.pool_tokens = pool_tokens

    @property
    def live_requests(self) -> list[Request]:
        """Requests that have been handed out by `receive` and not been finished."""
        return [cursor.request for cursor in self._cursors.values()]

    def receive(self) -> list[Received]:
        """All messages that have arrived. Requests that cannot be served have been answered
        already."""
        received: list[Received] = []
        refused: list[OutputRow] = []
        while True:
            try:
                payload = self.socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                break
            try:
                message = self._decoder.decode(payload)
            except Exception as error:
                refused += self._refuse_unreadable(payload, error)
                continue
            self._sort(message, received, refused)
        self._send_rows(list({row.request_id: row for row in refused}.values()))
        return received

    def send_events(self, events: Iterable[TokenEvent]) -> None:
        """Sends the new tokens and endings of one completed step."""
        rows = []
        for event in events:
            cursor = self._cursors.get(event.request.request_id)
            if cursor is None or cursor.request is not event.request:
                continue
            if (row := cursor.next_row(event.finish)) is not None:
                rows.append(row)
            if event.finish is not None:
                del self._cursors[event.request.request_id]
                self._tell_of_end(event.request, event.finish)
        self._send_rows(rows)
        self._answer_health_checks()

    def answer_health_checks(self) -> None:
        """While a stage is replaced, no step answers them, and the server is healthy."""
        if self.is_recovering:
            self._answer_health_checks()

    def _answer_health_checks(self) -> None:
        for health_check in self._waiting_health_checks:
            self.reply(io_struct.HealthCheckOutput(), health_check)
        self._waiting_health_checks.clear()

    def send_finish(self, request: Request, finish: FinishReason) -> None:
        """Ends a live request outside a step: refused by the scheduler, aborted, stage lost."""
        cursor = self._cursors.pop(request.request_id, None)
        if cursor is None:
            return
        if (row := cursor.next_row(finish)) is not None:
            self._send_rows([row])
        self._tell_of_end(request, finish)

    def end(self, request: Request) -> None:
        """Ends a live request that the scheduler has finished outside a step."""
        assert request.finish is not None
        self.send_finish(request, request.finish)

    def refuse(self, request: Request, error: RequestError) -> None:
        """Ends a request that the scheduler did not take, with the error's HTTP status."""
        self.send_finish(
            request, FinishReason("abort", message=str(error), status_code=error.status_code)
        )

    def reply(self, message: SglangMessage, to: SglangMessage) -> None:
        """Sends `message` to the TokenizerManager, as the answer to the control request `to`."""
        message.http_worker_ipc = to.http_worker_ipc
        self._to_tokenizer.send(io_struct.msgpack_encode(message))

    def forward_to_detokenizer(self, message: SglangMessage) -> None:
        """Passes on what concerns every process (logging, garbage collection)."""
        self._to_detokenizer.send(io_struct.msgpack_encode(message))

    def close(self) -> None:
        for socket in (self.socket, self._to_detokenizer, self._to_tokenizer):
            socket.close(linger=500)
        if self._spans is not None:
            self._spans.close()

    def _sort(
        self,
        message: SglangMessage,
        received: list[Received],
        refused: list[OutputRow],
    ) -> None:
        if isinstance(message, GENERATE):
            self._take_generate(message, received, refused)
        elif isinstance(message, GENERATE_MANY):
            for one in message.batch:
                self._take_generate(one, received, refused)
        elif isinstance(message, io_struct.AbortReq):
            self._take_abort(message, received)
        elif isinstance(message, EMBED | EMBED_MANY):
            several = message.batch if isinstance(message, EMBED_MANY) else [message]
            refused += [
                refusal_row(one.rid, "embeddings: not supported by this server", 400)
                for one in several
            ]
        else:
            received.append(ControlRequest(message))

    def _take_generate(
        self,
        message: GenerateMessage,
        received: list[Received],
        refused: list[OutputRow],
    ) -> None:
        request_id = message.rid
        if not isinstance(request_id, str) or not 1 <= len(request_id) <= MAX_REQUEST_ID_LENGTH:
            # Without a usable id no answer is possible, except for an id that is too long.
            logger.error("a request with an unusable rid (%.40r) was dropped", request_id)
            if isinstance(request_id, str) and request_id:
                text = f"rid: at most {MAX_REQUEST_ID_LENGTH} characters"
                refused.append(refusal_row(request_id, text, 400))
            return
        if request_id in self._cursors:
            # The front refuses duplicates itself; an answer would end the request that runs.
            logger.error("request %s is already being served; its double was dropped", request_id)
            return
        is_busy = self.is_recovering or self._is_running
        if request_id.startswith(HEALTH_CHECK_RID_PREFIX) and is_busy:
            self._waiting_health_checks.append(message)
            return
        try:
            request = self._intake.build(message, time.monotonic())
            grammar = grammar_of(message)
            if self._spans is not None:
                self._spans.began(message)
        except RequestError as error:
            refused.append(refusal_row(request_id, str(error), error.status_code))
            received += self._refused_room(message, str(error), error.status_code)
            return
        except Exception:
            logger.exception("request %s could not be read", request_id)
            text = "internal error while the request was read; see the server's log"
            refused.append(refusal_row(request_id, text, 500))
            received += self._refused_room(message, text, 500)
            return
        self._cursors[request_id] = OutputCursor(
            request, message, self._stream_interval, self._reasoning.counter(message)
        )
        received.append(request if grammar is None else ConstrainedRequest(request, grammar))

    def _refused_room(
        self, message: GenerateMessage, text: str, status_code: int
    ) -> list[RefusedRoom]:
        room = self._rooms.room_of_refused(message)
        return [] if room is None else [RefusedRoom(room, text, status_code)]

    def _take_abort(self, message: AbortMessage, received: list[Received]) -> None:
        if ended := self._matching(message):
            received.append(AbortRequest(ended, _abort_finish(message.finished_reason or {})))

    @property
    def _is_running(self) -> bool:
        """True if a step must complete soon; a step that waits may wait for its grammar."""
        return any(one.state is RequestState.RUNNING for one in self.live_requests)

    def _matching(self, message: AbortMessage) -> tuple[Request, ...]:
        """The live requests that an AbortReq names. Upstream matches prefixes; the front names only
        requests that it knows, so that an exact match is enough and cannot hit another request."""
        if message.abort_all:
            return tuple(self.live_requests)
        cursor = self._cursors.get(message.rid or "")
        return () if cursor is None else (cursor.request,)

    def _refuse_unreadable(self, payload: bytes, error: Exception) -> list[OutputRow]:
        rids = rids_of(payload)
        logger.error("a message that cannot be read was refused (%s): %s", rids, error)
        text = f"the request cannot be read: {error}"
        return [refusal_row(rid, text, 400) for rid in rids if rid not in self._cursors]

    def _tell_of_end(self, request: Request, finish: FinishReason) -> None:
        if self._spans is not None:
            self._spans.ended(request, finish, time.monotonic())

    def _send_rows(self, rows: list[OutputRow]) -> None:
        if rows:
            message = output_message(rows, self.storage_backend)
            self._to_detokenizer.send(io_struct.msgpack_encode(message))


def _abort_finish(reason: Mapping[str, Any]) -> FinishReason:
    """The reason for which an AbortReq ends requests: its own, or that the client went away."""
    message = reason.get("message") or "aborted by the client"
    return FinishReason("abort", message=message, status_code=reason.get("status_code"))


def _connect(
    context: "zmq.Context[zmq.Socket[bytes]]", kind: int, address: str
) -> "zmq.Socket[bytes]":
    socket = context.socket(kind)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.connect(address)
    return socket
