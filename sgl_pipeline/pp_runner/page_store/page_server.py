"""The server of a stage's offered pages, a `StreamServer`.

Readers are served in turns, a frame each; no page is held for a reader whose network is slow.
"""

import select

from sgl_pipeline.cluster.framed_stream import FramedStream
from sgl_pipeline.pp_runner.links.stream_server import TIMER_INTERVAL_S, StreamServer
from sgl_pipeline.pp_runner.page_store.offered_pages import OfferedPages
from sgl_pipeline.wire.peer_messages import (
    Answer,
    NotYet,
    ReadPages,
    Refused,
    encode,
    read_request,
)

# The order that makes an offer comes after the steps that the stage has got before it.
OFFER_WAIT_S = 10.0
# A reader that waits hears of this stage so often.
NOT_YET_INTERVAL_S = TIMER_INTERVAL_S


class Reader:
    """A peer's stage, and the place in what it has asked for."""

    def __init__(self, stream: FramedStream, offered: OfferedPages) -> None:
        self.stream, self._offered = stream, offered
        self.request: ReadPages | None = None
        self.index = self.layer = 0
        self.waits_since_s: float | None = None
        self.told_s = 0.0

    @property
    def events(self) -> int:
        """See `Visitor`."""
        if self.request is None:
            return select.EPOLLIN
        return 0 if self.waits_since_s is not None else select.EPOLLOUT

    @property
    def has_timer(self) -> bool:
        """True while it waits for an offer."""
        return self.waits_since_s is not None

    def serve(self, now_s: float) -> None:
        """Sends it one frame."""
        if self.request is None:
            frame = self.stream.receive()
            if frame is None:
                return
            self._ask(read_request(frame))
        assert self.request is not None
        answer = self._offered.read(self.request, self.index, self.layer)
        due = self._due_answer(answer, now_s)
        if due is not None:
            self.stream.send(encode(due))
            self._sent(due)

    def _ask(self, request: ReadPages) -> None:
        """Begins a request."""
        self.request = request
        self.index, self.layer = 0, request.layers[0]

    def _due_answer(self, answer: Answer, now_s: float) -> Answer | None:
        """The answer to send now, if the next of its pages gives `answer`; None: it waits."""
        if not isinstance(answer, NotYet):
            self.waits_since_s = None
            return answer
        if self.waits_since_s is None:
            self.waits_since_s = self.told_s = now_s
        if now_s - self.waits_since_s >= OFFER_WAIT_S:
            self.waits_since_s = None
            assert self.request is not None
            return Refused(f"offer {self.request.offer} did not come within {OFFER_WAIT_S:g} s")
        if now_s - self.told_s < NOT_YET_INTERVAL_S:
            return None
        self.told_s = now_s
        return answer

    def _sent(self, answer: Answer) -> None:
        """Goes on behind an answer."""
        if isinstance(answer, NotYet):
            return
        request = self.request
        assert request is not None
        if isinstance(answer, Refused):
            self.request = None
            return
        self.layer = answer.layers[1]
        if self.layer == request.layers[1]:
            self.index, self.layer = self.index + 1, request.layers[0]
        if self.index == request.num_pages:
            self.request = None


def serve_pages(offered: OfferedPages, run_directory: str, door: str) -> StreamServer[Reader]:
    """Answers peers, which read offered pages, from now on."""
    return StreamServer(
        run_directory, door, lambda stream: Reader(stream, offered), title="page server"
    )
