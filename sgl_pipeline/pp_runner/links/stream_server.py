"""The thread of a stage that serves the streams of peers, in turns.

A peer's stage dials the port of this host and comes through a door of this worker
(`cluster/doors.py`), then both speak TLS. A stream with a message that cannot be read is closed;
nothing that comes over one reaches the stage. Of a stream whose network is slow one frame waits.
"""

import logging
import os
import select
import threading
import time
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from sgl_pipeline.cluster.doors import Door
from sgl_pipeline.cluster.framed_stream import FramedStream
from sgl_pipeline.cluster.keys import tls_context
from sgl_pipeline.cluster.secure_stream import SecureStream, StreamClosed
from sgl_pipeline.errors import MalformedData
from sgl_pipeline.pp_runner.base.compute_threads import use_every_core
from sgl_pipeline.pp_runner.links.tcp_link import HANDSHAKE_TIMEOUT_S

logger = logging.getLogger(__name__)

# Visitors that do not wait for an event are looked at so often.
TIMER_INTERVAL_S = 1.0


class Visitor(Protocol):
    """A peer's stage at the other end of a stream."""

    @property
    def events(self) -> int:
        """The events of epoll in which it has to be served, when its last frame has left."""

    @property
    def has_timer(self) -> bool:
        """True if it must be served without an event, too."""

    def serve(self, now_s: float) -> None:
        """Takes what it has sent and answers, at most a frame that waits. Raises StreamClosed, and
        MalformedData for what it has sent."""


V = TypeVar("V", bound=Visitor)


class _Visit(Generic[V]):
    """A stream with its visitor."""

    def __init__(self, stream: FramedStream, sender: str, visitor: V) -> None:
        self.stream, self.sender, self.visitor = stream, sender, visitor
        self.came_s = time.monotonic()
        self.is_known = False  # its handshake is over

    @property
    def has_timer(self) -> bool:
        return not self.is_known or self.visitor.has_timer

    @property
    def events(self) -> int:
        if not self.is_known:
            return select.EPOLLIN
        return select.EPOLLOUT if self.stream.has_backlog else self.visitor.events

    def serve(self, now_s: float) -> None:
        """Goes on with it. Raises as `Visitor.serve`."""
        if self.stream.flush():
            self.is_known = True
            self.visitor.serve(now_s)
        elif not self.is_known and now_s - self.came_s > HANDSHAKE_TIMEOUT_S:
            raise StreamClosed("no handshake")


class StreamServer(Generic[V]):
    """Serves from the beginning until `close`.

    Args:
        run_directory: where the keys are, and the sockets of this host's doors.
        door: its name.
        welcome: makes the visitor of a stream.
        title: of its thread.
    """

    def __init__(
        self, run_directory: str, door: str, welcome: Callable[[FramedStream], V], title: str
    ) -> None:
        tls_context(run_directory, is_server=True)  # without keys the stage ends here, not later
        self._run_directory, self._welcome, self._title = run_directory, welcome, title
        self._door = Door(run_directory, door)
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._ready = select.epoll()
        self._ready.register(self._door, select.EPOLLIN)
        self._ready.register(self._wakeup, select.EPOLLIN)
        self._visits: dict[int, _Visit[V]] = {}  # by descriptor
        self._is_over = False
        self._thread = threading.Thread(target=self._run, name=title, daemon=True)
        self._thread.start()

    @property
    def visitors(self) -> list[V]:
        """The other ends of the open streams."""
        return [visit.visitor for visit in self._visits.values()]

    def look_again(self) -> None:
        """Serves those with a timer soon."""
        os.eventfd_write(self._wakeup, 1)

    def close(self) -> None:
        """Ends all streams. Waits for the visitor that is served."""
        self._is_over = True
        self.look_again()
        self._thread.join()
        for descriptor in [*self._visits]:
            self._drop(descriptor)
        self._door.close()
        self._ready.close()
        os.close(self._wakeup)

    def _run(self) -> None:
        use_every_core()
        while not self._is_over:
            self._serve()

    def _serve(self) -> None:
        """Waits for events, and serves the visitors that they concern."""
        due = {one for one, visit in self._visits.items() if visit.has_timer}
        for descriptor, events in self._ready.poll(TIMER_INTERVAL_S if due else None):
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
            self._attend(descriptor, self._visits[descriptor])

    def _accept(self) -> None:
        while (accepted := self._door.accept()) is not None:
            connection, sender = accepted
            try:
                secure = SecureStream(connection, self._run_directory, is_server=True)
            except OSError:  # its other end has gone
                connection.close()
                continue
            stream = FramedStream(secure)
            self._visits[stream.fileno()] = _Visit(stream, sender, self._welcome(stream))
            self._ready.register(stream, select.EPOLLIN)

    def _attend(self, descriptor: int, visit: _Visit[V]) -> None:
        try:
            visit.serve(time.monotonic())
            self._ready.modify(descriptor, visit.events)
        except StreamClosed:
            self._drop(descriptor)
        except Exception as error:
            is_theirs = isinstance(error, MalformedData)
            logger.warning(
                "%s: closed the stream of %s: %s",
                self._title,
                visit.sender,
                error,
                exc_info=not is_theirs,
            )
            self._drop(descriptor)

    def _drop(self, descriptor: int) -> None:
        self._ready.unregister(descriptor)
        self._visits.pop(descriptor).stream.close()
