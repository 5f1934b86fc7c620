"""The thread of a stage that answers peers, which read its offered pages.

A peer's stage dials the port of this host and comes through the door of this worker
(`cluster/doors.py`), then both speak TLS. Streams are served in turns, a frame each; of a stream
whose network is slow one frame waits, and no page is held for it. A stream with a message that
cannot be read is closed; nothing that comes over one reaches the stage.
"""

import logging
import os
import select
import threading
import time

from sgl_pipeline.cluster.doors import Door
from sgl_pipeline.cluster.framed_stream import FramedStream
from sgl_pipeline.cluster.keys import tls_context
from sgl_pipeline.cluster.secure_stream import SecureStream, StreamClosed
from sgl_pipeline.errors import MalformedData
from sgl_pipeline.pp_runner.base.compute_threads import use_every_core
from sgl_pipeline.pp_runner.links.tcp_link import HANDSHAKE_TIMEOUT_S
from sgl_pipeline.pp_runner.page_store.offered_pages import OfferedPages
from sgl_pipeline.wire.peer_messages import (
    Answer,
    NotYet,
    ReadPages,
    Refused,
    encode,
    read_request,
)

logger = logging.getLogger(__name__)

# The order that makes an offer comes after the steps that the stage has got before it.
OFFER_WAIT_S = 10.0
# A reader that waits hears of this stage so often.
NOT_YET_INTERVAL_S = 1.0


class _Reader:
    """A peer's stage, and the place in what it has asked for."""

    def __init__(self, stream: FramedStream, sender: str, now_s: float) -> None:
        self.stream, self.sender = stream, sender
        self.came_s = now_s
        self.is_known = False  # its handshake is over
        self.request: ReadPages | None = None
        self.index = self.layer = 0
        self.waits_since_s: float | None = None
        self.told_s = now_s

    @property
    def events(self) -> int:
        """The events of its stream in which it has to be served."""
        if self.stream.has_backlog and self.is_known:
            return select.EPOLLOUT
        if self.request is None:
            return select.EPOLLIN
        return 0 if self.waits_since_s is not None else select.EPOLLOUT

    def ask(self, request: ReadPages) -> None:
        """Begins a request."""
        self.request = request
        self.index, self.layer = 0, request.layers[0]

    def due_answer(self, answer: Answer, now_s: float) -> Answer | None:
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

    def sent(self, answer: Answer) -> None:
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


class PageServer:
    """Answers from the beginning until `close`.

    Args:
        run_directory: where the keys are, and the sockets of this host's doors.
        door: its name.
    """

    def __init__(self, offered: OfferedPages, run_directory: str, door: str) -> None:
        tls_context(run_directory, is_server=True)  # without keys the stage ends here, not later
        self._offered, self._run_directory = offered, run_directory
        self._door = Door(run_directory, door)
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._ready = select.epoll()
        self._ready.register(self._door, select.EPOLLIN)
        self._ready.register(self._wakeup, select.EPOLLIN)
        self._readers: dict[int, _Reader] = {}  # by descriptor
        self._is_over = False
        self._thread = threading.Thread(target=self._run, name="page server", daemon=True)
        self._thread.start()

    def look_again(self) -> None:
        """An offer was made, for which readers may wait."""
        os.eventfd_write(self._wakeup, 1)

    def close(self) -> None:
        """Ends all streams. The thread waits for nothing but the copy of an object."""
        self._is_over = True
        self.look_again()
        self._thread.join()
        for descriptor in [*self._readers]:
            self._drop(descriptor)
        self._door.close()
        self._ready.close()
        os.close(self._wakeup)

    def _run(self) -> None:
        use_every_core()
        while not self._is_over:
            self._serve()

    def _serve(self) -> None:
        """Waits for events, and serves the readers that they concern."""
        timers = [one for one in self._readers.values() if _has_timer(one)]
        due = {reader.stream.fileno() for reader in timers}
        for descriptor, events in self._ready.poll(NOT_YET_INTERVAL_S if timers else None):
            if descriptor == self._door.fileno():
                self._accept()
            elif descriptor == self._wakeup:
                os.eventfd_read(self._wakeup)
            elif events & (select.EPOLLHUP | select.EPOLLERR):
                due.discard(descriptor)
                self._drop(descriptor)
            else:
                due.add(descriptor)
        for descriptor in due:
            self._attend(descriptor, self._readers[descriptor])

    def _accept(self) -> None:
        while (accepted := self._door.accept()) is not None:
            connection, sender = accepted
            try:
                secure = SecureStream(connection, self._run_directory, is_server=True)
            except OSError:  # its other end has gone
                connection.close()
                continue
            stream = FramedStream(secure)
            self._readers[stream.fileno()] = _Reader(stream, sender, time.monotonic())
            self._ready.register(stream, select.EPOLLIN)

    def _attend(self, descriptor: int, reader: _Reader) -> None:
        try:
            self._answer(reader, time.monotonic())
            self._ready.modify(descriptor, reader.events)
        except StreamClosed:
            self._drop(descriptor)
        except Exception as error:
            is_theirs = isinstance(error, MalformedData)
            logger.warning(
                "closed the stream of %s, which reads pages: %s",
                reader.sender,
                error,
                exc_info=not is_theirs,
            )
            self._drop(descriptor)

    def _answer(self, reader: _Reader, now_s: float) -> None:
        """Sends a reader one frame, if its stream takes it. Raises StreamClosed, and MalformedData
        for what it has sent."""
        stream = reader.stream
        if not stream.flush():
            if not reader.is_known and now_s - reader.came_s > HANDSHAKE_TIMEOUT_S:
                raise StreamClosed("no handshake")
            return
        reader.is_known = True
        if reader.request is None:
            frame = stream.receive()
            if frame is None:
                return
            reader.ask(read_request(frame))
        assert reader.request is not None
        answer = self._offered.read(reader.request, reader.index, reader.layer)
        due = reader.due_answer(answer, now_s)
        if due is not None:
            stream.send(encode(due))
            reader.sent(due)

    def _drop(self, descriptor: int) -> None:
        self._ready.unregister(descriptor)
        self._readers.pop(descriptor).stream.close()


def _has_timer(reader: _Reader) -> bool:
    """True if a reader must be looked at without an event."""
    return not reader.is_known or reader.waits_since_s is not None
