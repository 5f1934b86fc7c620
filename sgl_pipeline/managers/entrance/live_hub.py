"""Distributes the scheduler process's live messages to all viewers, event by event.

It runs in the HTTP server's event loop. For any number of viewers the scheduler process is
subscribed to once, and each message is encoded once; without viewers, not at all. A viewer who
reads slowly loses events and learns how many; nothing waits for it.
"""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import suppress

import zmq
import zmq.asyncio

from sgl_pipeline.decoding import DECODING_ERRORS
from sgl_pipeline.errors import RequestError
from sgl_pipeline.managers.channels.live_channel import (
    MAX_UNREAD_TICKS,
    LiveHello,
    LiveTick,
    read_message,
)
from sgl_pipeline.managers.entrance.graceful_stop import SHUTTING_DOWN
from sgl_pipeline.managers.reports.live_events import describe_tick, server_sent_event

logger = logging.getLogger(__name__)

MAX_VIEWERS = 8
# At most a minute of ticks under load.
MAX_RING_EVENTS = 300
MAX_RING_BYTES = 4 * 2**20
# Events that wait for a viewer; beyond, the oldest are dropped.
MAX_BACKLOG_EVENTS = 32


class Viewer:
    """The events that one page has not received yet."""

    def __init__(self) -> None:
        self._replayed: list[bytes] = []
        self._backlog: deque[bytes] = deque()
        self._has_news = asyncio.Event()
        self._num_dropped = 0
        self._is_over = False

    def replay(self, events: list[bytes]) -> None:
        """Events that it needs first; they do not count as backlog."""
        self._replayed += events
        self._has_news.set()

    def add(self, event: bytes) -> None:
        """Never waits: if too many are unread, the oldest is dropped."""
        if len(self._backlog) >= MAX_BACKLOG_EVENTS:
            self._backlog.popleft()
            self._num_dropped += 1
        self._backlog.append(event)
        self._has_news.set()

    def end(self) -> None:
        """The viewer gets the waiting events, and no more."""
        self._is_over = True
        self._has_news.set()

    async def events(self) -> AsyncIterator[bytes]:
        """All events as they come, several at once where several wait, until `end`."""
        while not self._is_over:
            await self._has_news.wait()
            self._has_news.clear()
            parts = self._replayed
            self._replayed = []
            if self._num_dropped:
                parts.append(server_sent_event("dropped", {"events": self._num_dropped}))
                self._num_dropped = 0
            parts += self._backlog
            self._backlog.clear()
            if parts:
                yield b"".join(parts)


class LiveHub:
    """All viewers of one server.

    Args:
        address: of the scheduler process's socket (`live_channel.live_address`).
        list_routes: gives the paths of this server that the page may use.
    """

    def __init__(self, address: str, list_routes: Callable[[], list[str]]) -> None:
        self._address = address
        self._list_routes = list_routes
        self._viewers: set[Viewer] = set()
        self._is_closed = False
        self._hello: bytes | None = None
        self._ring: deque[bytes] = deque(maxlen=MAX_RING_EVENTS)
        self._ring_bytes = 0
        self._following: asyncio.Task[None] | None = None

    @property
    def num_viewers(self) -> int:
        return len(self._viewers)

    def join(self) -> Viewer:
        """A new viewer, which gets the events that the others have received so far; `leave` must
        follow.

        Raises RequestError, with status 503, at the limit of viewers, or after `close`.
        """
        if self._is_closed:
            raise RequestError(SHUTTING_DOWN, status_code=503)
        if len(self._viewers) >= MAX_VIEWERS:
            raise RequestError(
                f"{MAX_VIEWERS} pages watch this server, which is the limit; close one of them",
                status_code=503,
            )
        viewer = Viewer()
        if self._hello is not None:
            viewer.replay([self._hello, *self._ring])
        self._viewers.add(viewer)
        if self._following is None:
            self._following = asyncio.create_task(self._follow())
        return viewer

    def leave(self, viewer: Viewer) -> None:
        """With the last viewer the subscription ends."""
        self._viewers.discard(viewer)
        if not self._viewers and self._following is not None:
            self._following.cancel()
            self._following = None
            self._forget()

    def close(self) -> None:
        """Ends the streams of all viewers: the server, which is about to end, waits for them."""
        self._is_closed = True
        for viewer in self._viewers:
            viewer.end()

    async def _follow(self) -> None:
        """Passes on the scheduler process's messages, until cancelled."""
        socket = zmq.asyncio.Context.instance().socket(zmq.SUB)
        try:
            socket.setsockopt(zmq.RCVHWM, MAX_UNREAD_TICKS)
            socket.setsockopt(zmq.SUBSCRIBE, b"")
            socket.connect(self._address)
            while True:
                frame = await socket.recv()
                try:
                    self._take(read_message(frame))
                except DECODING_ERRORS:
                    logger.exception("a message for the live page cannot be read")
        finally:
            with suppress(zmq.ZMQError):
                socket.close(linger=0)

    def _take(self, message: LiveHello | LiveTick) -> None:
        if isinstance(message, LiveHello):
            self._forget()
            event = self._hello = server_sent_event(
                "hello", message.facts | {"routes": self._list_routes()}
            )
        else:
            event = server_sent_event("tick", describe_tick(message, len(self._viewers)))
            self._keep(event)
        for viewer in self._viewers:
            viewer.add(event)

    def _keep(self, event: bytes) -> None:
        if len(self._ring) == MAX_RING_EVENTS:
            self._ring_bytes -= len(self._ring.popleft())
        self._ring.append(event)
        self._ring_bytes += len(event)
        while self._ring_bytes > MAX_RING_BYTES:
            self._ring_bytes -= len(self._ring.popleft())

    def _forget(self) -> None:
        self._hello = None
        self._ring.clear()
        self._ring_bytes = 0
