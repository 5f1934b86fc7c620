"""Requests between the front and the queue: they come, wait for their grammar, are queued or
refused, and end early.

Each end of a request that another server has the other half of is reported to its room.
"""

import logging
from collections.abc import Callable
from typing import Any

from sgl_pipeline.errors import RequestError
from sgl_pipeline.managers.disaggregation.room_ends import DecodeEnd, PrefillEnd
from sgl_pipeline.managers.front.sglang_io import (
    AbortRequest,
    ControlRequest,
    Received,
    RefusedRoom,
    SglangFront,
)
from sgl_pipeline.managers.grammars.queue import GrammarQueue, NoGrammars
from sgl_pipeline.managers.grammars.spec import ConstrainedRequest
from sgl_pipeline.managers.reports.reports import Reports
from sgl_pipeline.requests import FinishReason, Request, Room
from sgl_pipeline.scheduling import WAITED_TOO_LONG, StepScheduler

logger = logging.getLogger(__name__)


class Arrivals:
    """Takes what the front has received.

    `now_s` is the moment of the loop's present turn, which the loop sets.

    Args:
        answer: takes control messages.
        rooms: None where requests are not shared with other servers.
    """

    def __init__(
        self,
        front: SglangFront,
        requests: StepScheduler,
        grammars: GrammarQueue | NoGrammars,
        rooms: PrefillEnd | DecodeEnd | None,
        reports: Reports,
        answer: Callable[[ControlRequest], None],
    ) -> None:
        self._front = front
        self._requests = requests
        self._grammars = grammars
        self._rooms = rooms
        self._reports = reports
        self.now_s = 0.0
        self._handlers: dict[type, Callable[[Any], None]] = {
            Request: self._add,
            ConstrainedRequest: self._hold,
            AbortRequest: self._abort_all,
            RefusedRoom: self._end_refused,
            ControlRequest: answer,
        }

    def receive(self) -> None:
        """Takes all that has come, and the requests whose grammars are there now."""
        for message in self._front.receive():
            self._take(message)
        for request, error in self._grammars.poll():
            if error is None:
                self._take(request)
            else:
                self._refuse(request, error)

    def serve_rooms(self) -> None:
        """Hears the other servers, and ends the requests whose rooms have failed."""
        if self._rooms is not None:
            for request in self._rooms.serve(self.now_s):
                self._front.end(request)

    def end_overdue(self) -> None:
        """Ends the requests that have waited too long."""
        for request in self._requests.end_overdue(self.now_s):
            self._front.end(request)
        for request in self._grammars.take_overdue(self.now_s):
            self._end_unqueued(request, WAITED_TOO_LONG)
            self._front.send_finish(request, WAITED_TOO_LONG)

    def _take(self, message: Received) -> None:
        """Handles a message of the front. A failure here ends that request, never the loop."""
        try:
            self._handlers[type(message)](message)
        except Exception:
            logger.exception("a message of the front could not be handled: %r", message)
            if isinstance(message, ConstrainedRequest):
                message = message.request
            if isinstance(message, Request):
                self._refuse(message, RequestError("internal error; see the log", 500))

    def _add(self, request: Request) -> None:
        try:
            if self._rooms is not None:
                self._rooms.check(request)
            displaced = self._requests.add(request)
        except RequestError as error:
            self._refuse(request, error)
        else:
            if self._rooms is not None:
                self._rooms.opened(request, self.now_s)
            if displaced is not None:
                self._front.end(displaced)
            self._reports.arrived(request)

    def _hold(self, constrained: ConstrainedRequest) -> None:
        """Adds a request once its grammar is there."""
        request = constrained.request
        try:
            if not self._grammars.is_known(constrained.grammar):
                self._requests.check_arrival(request, len(self._grammars))
            is_ready = self._grammars.add(constrained)
        except RequestError as error:
            self._refuse(request, error)
        else:
            if is_ready:
                self._add(request)

    def _abort_all(self, message: AbortRequest) -> None:
        for request in message.requests:
            self._abort(request, message.finish)

    def _abort(self, request: Request, finish: FinishReason) -> None:
        self._grammars.discard(request)
        if self._requests.abort(request.request_id, finish) is None:
            self._end_unqueued(request, finish)
        self._front.send_finish(request, finish)

    def _refuse(self, request: Request, error: RequestError) -> None:
        self._end_room(request.room, str(error), error.status_code)
        self._front.refuse(request, error)

    def _end_refused(self, message: RefusedRoom) -> None:
        self._end_room(message.room, message.text, message.status_code)

    def _end_unqueued(self, request: Request, finish: FinishReason) -> None:
        """A request has ended while it waited for its grammar."""
        self._end_room(request.room, finish.message, finish.status_code or 500)

    def _end_room(self, room: Room | None, reason: str, status: int) -> None:
        """A request has ended that was never queued: its other half, if it has one, ends too."""
        if self._rooms is not None:
            self._rooms.refused(room, reason, status, self.now_s)
