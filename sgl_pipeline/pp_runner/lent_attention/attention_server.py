"""The server of attention over a stage's leases, a `StreamServer`."""

import select

from sgl_pipeline.cluster.framed_stream import FramedStream
from sgl_pipeline.errors import MalformedData
from sgl_pipeline.pp_runner.lent_attention.leases import Leases, Planned
from sgl_pipeline.pp_runner.links.stream_server import StreamServer
from sgl_pipeline.wire.attention_messages import PlanAttention, encode, read_question


class Borrower:
    """A peer's stage, and the step that it runs."""

    has_timer = False

    def __init__(self, stream: FramedStream, leases: Leases) -> None:
        self._stream, self._leases = stream, leases
        self._planned: Planned | None = None
        self._may_have_sent_more = False

    @property
    def events(self) -> int:
        """See `Visitor`."""
        return select.EPOLLOUT if self._may_have_sent_more else select.EPOLLIN

    def serve(self, now_s: float) -> None:
        """Takes a plan, or answers the rows of a layer."""
        frame = self._stream.receive()
        self._may_have_sent_more = frame is not None
        if frame is None:
            return
        question = read_question(frame)
        if isinstance(question, PlanAttention):
            self._planned = Planned(question)
        elif self._planned is None:
            raise MalformedData("rows came before their plan")
        else:
            self._stream.send(encode(self._leases.attend(self._planned, question)))


def serve_attention(leases: Leases, run_directory: str, door: str) -> StreamServer[Borrower]:
    """Attends for peers from now on."""
    return StreamServer(
        run_directory, door, lambda stream: Borrower(stream, leases), title="lent attention"
    )
