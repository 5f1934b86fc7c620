"""Questions about the running pipeline, from the HTTP server's process to the scheduler process,
and their answers; both ends and all messages.

`entrance/pipeline_routes.py` asks, `front/operator_replies.py` answers. Upstream's own sockets stay
upstream's. One `ipc://` socket in the run directory, msgpack on it; each question has a socket of
its own, so an answer finds its way without a number, and one that comes too late is dropped.
"""

import os

import msgspec
import zmq
import zmq.asyncio

from sgl_pipeline.errors import RequestError
from sgl_pipeline.records.throttle_change import Author, Cause, Knob

# A question holds a socket and a task of the HTTP server.
MAX_OPEN_QUESTIONS = 64


class ShowPlan(msgspec.Struct, frozen=True, tag=True):
    """Asks for the plan and its state."""


class MoveLayers(msgspec.Struct, frozen=True, tag=True):
    """Change to a plan of these layer counts; with `preview`, predict what that would bring."""

    layer_counts: tuple[int, ...]
    preview: bool


class UndoMove(msgspec.Struct, frozen=True, tag=True):
    """Go back to the plan before the newest move; with `preview`, predict what that would bring."""

    preview: bool


class ExplainRequest(msgspec.Struct, frozen=True, tag=True):
    """Asks why a request is where it is, and when it gets on."""

    request_id: str


class ShowThrottle(msgspec.Struct, frozen=True, tag=True):
    """Asks for the knobs in force and their changes."""


class ChangeThrottle(msgspec.Struct, frozen=True, tag=True):
    """Set these knobs, and take that back after some time."""

    knobs: dict[str, Knob]
    author: Author
    revert_after_s: float | None = None
    cause: Cause = "operator"


class UndoThrottle(msgspec.Struct, frozen=True, tag=True):
    """Go back to the knobs before the newest change."""

    author: Author


class ShowRecentWork(msgspec.Struct, frozen=True, tag=True):
    """Asks for the requests that have come in the last seconds, and how they were served. The
    answer is msgpack, a `pipeline.recent_load.RecentWork`."""

    window_s: float


Question = (
    ShowPlan
    | MoveLayers
    | UndoMove
    | ExplainRequest
    | ShowThrottle
    | ChangeThrottle
    | UndoThrottle
    | ShowRecentWork
)


class OperatorAnswer(msgspec.Struct, frozen=True):
    """An HTTP status, and the JSON that goes with it."""

    status: int
    body: bytes


_encoder = msgspec.msgpack.Encoder()
_question_decoder = msgspec.msgpack.Decoder(Question)
_answer_decoder = msgspec.msgpack.Decoder(OperatorAnswer)


def operator_address(run_directory: str) -> str:
    """The path on which the scheduler process listens."""
    return "ipc://" + os.path.join(run_directory, "operators")


class OperatorSocket:
    """The scheduler process's end; `socket` is readable when a question has come."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", address: str) -> None:
        self.socket = context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.SNDHWM, 0)
        self.socket.bind(address)

    def receive(self) -> tuple[bytes, Question] | None:
        """The next question that has come and who asks, or None.

        Raises msgspec.DecodeError for anything else.
        """
        try:
            asker, *frames = self.socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None
        return asker, _question_decoder.decode(b"".join(frames))

    def answer(self, asker: bytes, answer: OperatorAnswer) -> None:
        """Sends an answer, if its asker still waits."""
        self.socket.send_multipart([asker, _encoder.encode(answer)], zmq.NOBLOCK)

    def close(self) -> None:
        self.socket.close(linger=500)


class OperatorClient:
    """The HTTP server's end, for any number of tasks of one event loop."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._num_open = 0

    async def ask(self, question: Question, timeout_s: float) -> OperatorAnswer | None:
        """The answer; None when none came in time.

        Raises RequestError, with status 503, while too many questions are open.
        """
        if self._num_open >= MAX_OPEN_QUESTIONS:
            raise RequestError(
                f"{MAX_OPEN_QUESTIONS} questions about the pipeline are being answered; ask again "
                "later",
                status_code=503,
            )
        self._num_open += 1
        # Made here and not earlier: the scheduler process may be a fork of this one.
        socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        try:
            socket.connect(self._address)
            await socket.send(_encoder.encode(question))
            if not await socket.poll(round(timeout_s * 1e3)):
                return None
            return _answer_decoder.decode(await socket.recv())
        finally:
            socket.close(linger=0)
            self._num_open -= 1
