"""Answers operators' questions about the running pipeline, in the scheduler process.

The HTTP routes are `entrance/pipeline_routes.py`, the messages `channels/operator_channel.py`. This
file decides nothing: `PipelineCore.migration` knows which layers may move. A question that fails
gets an error as its answer, and never ends the loop.
"""

import logging
from typing import Any

import msgspec
import zmq

from sgl_pipeline.decoding import DECODING_ERRORS
from sgl_pipeline.errors import RequestError
from sgl_pipeline.managers.channels.operator_channel import (
    ChangeThrottle,
    ExplainRequest,
    MoveLayers,
    OperatorAnswer,
    OperatorSocket,
    Question,
    ShowPlan,
    ShowRecentWork,
    ShowThrottle,
    UndoThrottle,
)
from sgl_pipeline.managers.grammars.queue import GrammarQueue, NoGrammars
from sgl_pipeline.managers.reports.explain_report import describe_compile, describe_wait
from sgl_pipeline.managers.reports.plan_report import (
    describe_move,
    describe_plan,
    describe_prediction,
)
from sgl_pipeline.managers.reports.throttle_report import describe_change, describe_throttle
from sgl_pipeline.pipeline.draft_state import draft_reason
from sgl_pipeline.pipeline.pipeline_core import PipelineCore
from sgl_pipeline.records.event import Event
from sgl_pipeline.records.move_record import MoveOutcome, MoveRecord
from sgl_pipeline.records.throttle_change import ThrottleChange

logger = logging.getLogger(__name__)

# Each costs up to a few milliseconds, in which no step is decided.
MAX_QUESTIONS_PER_TURN = 4
# Fewer steps cannot be fitted (`simulator/calibration.py`); fewer requests are not a load.
MIN_TUNED_STEPS = 200
MIN_TUNED_REQUESTS = 20


class OperatorReplies:
    """One question at a time. An operator who wants layers to move is answered when that is over.

    Args:
        grammars: knows the requests that are not in the queue yet.
        compile_seconds: the most that the compile of a grammar may take.
    """

    def __init__(
        self,
        socket: OperatorSocket,
        core: PipelineCore,
        grammars: GrammarQueue | NoGrammars,
        compile_seconds: float,
    ) -> None:
        self._socket = socket
        self._core = core
        self._grammars = grammars
        self._compile_seconds = compile_seconds
        # The operators who wait for the end of a move, by its number.
        self._askers: dict[int, bytes] = {}

    @property
    def socket(self) -> "zmq.Socket[bytes]":
        """Readable when a question has come."""
        return self._socket.socket

    def serve(self, now_s: float) -> None:
        """Takes the questions that have come. A move that one begins has its first order in
        `PipelineCore.move_orders`."""
        for _ in range(MAX_QUESTIONS_PER_TURN):
            try:
                received = self._socket.receive()
            except DECODING_ERRORS:
                logger.exception("a question about the pipeline cannot be read")
                continue
            if received is None:
                return
            asker, question = received
            try:
                answer = self._answer(asker, question, now_s)
            except RequestError as error:
                answer = refusal(str(error), error.status_code)
            except Exception:
                logger.exception("a question about the pipeline failed: %r", question)
                answer = refusal("internal error; see the server's log", 500)
            if answer is not None:
                self._socket.answer(asker, answer)

    def on(self, event: Event) -> None:
        """Answers the operator who wanted a move that is over."""
        if isinstance(event, MoveRecord) and event.ended_s is not None:
            asker = self._askers.pop(event.move, None)
            if asker is not None:
                self._report_move(asker, event, event.ended_s)

    def _report_move(self, asker: bytes, record: MoveRecord, ended_s: float) -> None:
        move = describe_move(record, ended_s)
        if record.outcome is MoveOutcome.DONE:
            self._socket.answer(asker, answer_with({"move": move}))
        else:
            message = f"the move was abandoned, the old plan stands: {record.reason}"
            self._socket.answer(asker, refusal(message, 503, move=move))

    def close(self) -> None:
        """Answers the open questions, and takes no more."""
        for asker in self._askers.values():
            self._socket.answer(asker, refusal("the server is shutting down", 503))
        self._askers.clear()
        self._socket.close()

    def _answer(self, asker: bytes, question: Question, now_s: float) -> OperatorAnswer | None:
        """The answer, if there is one now. Raises RequestError for a refusal."""
        migration = self._core.migration
        if isinstance(question, ShowPlan):
            return answer_with(describe_plan(self._core.state(now_s), migration))
        if isinstance(question, ExplainRequest):
            return self._explain(question.request_id, now_s)
        if isinstance(question, ShowThrottle | ChangeThrottle | UndoThrottle):
            return self._steer(question, now_s)
        if isinstance(question, ShowRecentWork):
            return self._recent_work(question.window_s, now_s)
        if isinstance(question, MoveLayers):
            if question.preview:
                return self._preview(question.layer_counts)
            record = migration.move_to(question.layer_counts, now_s)
        else:
            if question.preview:
                return self._preview(migration.plan_before())
            record = migration.undo(now_s)
        self._askers[record.move] = asker
        return None

    def _explain(self, request_id: str, now_s: float) -> OperatorAnswer:
        held = self._grammars.held(request_id)
        if held is not None:
            num_compiling = len(self._grammars)
            return answer_with(describe_compile(held, num_compiling, self._compile_seconds, now_s))
        explanation = self._core.explain(request_id)
        outlook = self._core.scheduler.outlook(request_id)
        if explanation is None or outlook is None:
            raise RequestError(
                f"no request {request_id!r} waits or runs: it has ended, or never came",
                status_code=404,
            )
        forecast = self._core.forecast(outlook, now_s)
        drafts = draft_reason(self._core.scheduler, self._core.open_steps, outlook)
        return answer_with(describe_wait(explanation, outlook, forecast, drafts, now_s))

    def _steer(
        self, question: ShowThrottle | ChangeThrottle | UndoThrottle, now_s: float
    ) -> OperatorAnswer:
        throttle = self._core.throttle
        assert throttle is not None, "a server's knobs can be changed"
        if isinstance(question, ShowThrottle):
            return answer_with(describe_throttle(throttle, now_s))
        if isinstance(question, UndoThrottle):
            change: ThrottleChange | None = throttle.undo(question.author, now_s)
        else:
            change = throttle.change(
                question.knobs,
                question.author,
                now_s,
                question.revert_after_s,
                question.cause,
            )
        reply = {"change": None if change is None else describe_change(change)}
        return answer_with(reply | describe_throttle(throttle, now_s))

    def _recent_work(self, window_s: float, now_s: float) -> OperatorAnswer:
        work = self._core.recent_work(window_s, now_s)
        num_ended = sum(one.total_ms is not None for one in work.requests)
        if len(work.steps) < MIN_TUNED_STEPS or num_ended < MIN_TUNED_REQUESTS:
            raise RequestError(
                f"{len(work.steps)} steps of this plan were measured and {num_ended} requests of "
                f"the last {window_s:g} s have ended; tuning needs {MIN_TUNED_STEPS} and "
                f"{MIN_TUNED_REQUESTS}: ask again under load, or for a longer window_s",
                status_code=503,
            )
        return OperatorAnswer(200, msgspec.msgpack.encode(work))

    def _preview(self, layer_counts: tuple[int, ...]) -> OperatorAnswer:
        prediction = self._core.migration.preview(layer_counts)
        if prediction is None:
            raise RequestError(
                "nothing can be predicted yet: too few steps were measured; ask again under load",
                status_code=503,
            )
        return answer_with({"preview": describe_prediction(prediction)})


def answer_with(body: dict[str, Any]) -> OperatorAnswer:
    """A 200 with `body`."""
    return OperatorAnswer(200, msgspec.json.encode(body))


def refusal(message: str, status: int, **more: Any) -> OperatorAnswer:
    """An error reply in the form of our other routes."""
    return OperatorAnswer(status, msgspec.json.encode({"error": {"message": message}} | more))
