"""A stream of frames in an event loop: what the head process and the agents are built of."""

import asyncio
from collections.abc import Callable

from sgl_pipeline.cluster.framed_stream import FramedStream
from sgl_pipeline.cluster.secure_stream import StreamClosed


class FramePump:
    """Hands each frame to `on_frame`. When the stream ends, `on_closed` is called, once, with what
    was noticed; not after `close`."""

    def __init__(
        self,
        stream: FramedStream,
        on_frame: Callable[[bytes], None],
        on_closed: Callable[[str], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._stream = stream
        self._on_frame = on_frame
        self._on_closed = on_closed
        self._descriptor = stream.fileno()
        self._is_open = True
        self._has_writer = False
        self._loop.add_reader(self._descriptor, self._work)
        self._loop.call_soon(self._work)

    def send(self, payload: bytes) -> None:
        """Sends without waiting; nothing, when the stream has ended."""
        if not self._is_open:
            return
        try:
            self._stream.send(payload)
        except StreamClosed as ending:
            self._end(str(ending))
            return
        self._watch_backlog()

    def close(self) -> None:
        """Ends the stream."""
        if not self._is_open:
            return
        self._is_open = False
        self._loop.remove_reader(self._descriptor)
        if self._has_writer:
            self._loop.remove_writer(self._descriptor)
        self._stream.close()

    def _work(self) -> None:
        try:
            while self._is_open and (frame := self._stream.receive()) is not None:
                self._on_frame(frame)
            if self._is_open:
                self._stream.flush()
        except StreamClosed as ending:
            self._end(str(ending))
            return
        if self._is_open:
            self._watch_backlog()

    def _watch_backlog(self) -> None:
        if self._stream.has_backlog != self._has_writer:
            self._has_writer = self._stream.has_backlog
            if self._has_writer:
                self._loop.add_writer(self._descriptor, self._work)
            else:
                self._loop.remove_writer(self._descriptor)

    def _end(self, reason: str) -> None:
        if self._is_open:
            self.close()
            self._on_closed(reason)
