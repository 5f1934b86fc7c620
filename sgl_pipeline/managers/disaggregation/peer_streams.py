"""Open streams to the schedulers of other servers, watched by the loop's poller.

Each is a session with a number that is never used again. Both ends prove the key that the servers
share (`cluster/keys.py`); messages are frames of msgpack, and nothing here waits.
"""

import select
import socket
from collections.abc import Iterator
from typing import Generic, TypeVar

import msgspec

from sgl_pipeline.cluster.framed_stream import FramedStream
from sgl_pipeline.cluster.secure_stream import SecureStream, StreamClosed
from sgl_pipeline.decoding import decode
from sgl_pipeline.errors import MalformedData

Message = TypeVar("Message")


class PeerStreams(Generic[Message]):
    """Sessions by number.

    Args:
        run_directory: where the keys are.
        decoder: of what the other ends send.
    """

    def __init__(self, run_directory: str, decoder: "msgspec.msgpack.Decoder[Message]") -> None:
        self._run_directory, self._decoder = run_directory, decoder
        self._encode = msgspec.msgpack.Encoder().encode
        self._ready = select.epoll()
        self._sessions: dict[int, tuple[SecureStream, FramedStream]] = {}
        self._numbers: dict[int, int] = {}  # by descriptor
        self._broken: dict[int, str] = {}
        self._next_session = 0

    def fileno(self) -> int:
        """A descriptor that can be read when `receive` may have something."""
        return self._ready.fileno()

    def add(self, connection: socket.socket, *, is_server: bool) -> int:
        """Takes a connection that has passed a port; returns the number of its session.

        Args:
            is_server: this end was dialed.
        """
        secure = SecureStream(connection, self._run_directory, is_server=is_server)
        session, self._next_session = self._next_session, self._next_session + 1
        self._sessions[session] = secure, FramedStream(secure)
        self._numbers[secure.fileno()] = session
        self._ready.register(secure, select.EPOLLIN)
        return session

    def send(self, session: int, message: msgspec.Struct) -> None:
        """Sends, or drops the message where the stream has ended."""
        if session not in self._sessions:
            return
        _, frames = self._sessions[session]
        try:
            frames.send(self._encode(message))
            self._watch(session)
        except StreamClosed as ending:
            self._break(session, str(ending))

    def receive(self) -> Iterator[tuple[int, Message]]:
        """Messages that have arrived, each with its session."""
        for descriptor, _ in self._ready.poll(0):
            session = self._numbers.get(descriptor)
            if session is not None:
                yield from self._read(session)

    def take_broken(self) -> dict[int, str]:
        """Sessions that have ended by themselves since the last call, and why."""
        broken, self._broken = self._broken, {}
        return broken

    def end(self, session: int) -> None:
        """Closes a session, if it is open; what has not left the host may be lost."""
        if session in self._sessions:
            secure, _ = self._sessions.pop(session)
            del self._numbers[secure.fileno()]
            self._ready.unregister(secure)
            secure.close()

    def close(self) -> None:
        """Ends all sessions."""
        for session in [*self._sessions]:
            self.end(session)
        self._ready.close()

    def _read(self, session: int) -> Iterator[tuple[int, Message]]:
        _, frames = self._sessions[session]
        try:
            frames.flush()
            # Whoever takes a message may end the session.
            while session in self._sessions and (frame := frames.receive()) is not None:
                yield session, decode(self._decoder, frame)
            if session in self._sessions:
                # The end of a handshake is noticed while reading.
                frames.flush()
                self._watch(session)
        except StreamClosed as ending:
            self._break(session, str(ending))
        except MalformedData as error:
            self._break(session, f"it sent a malformed message: {error}")

    def _watch(self, session: int) -> None:
        """Until the handshake is over, whatever waits to be sent waits for what is to be read."""
        secure, frames = self._sessions[session]
        wants_room = frames.has_backlog and secure.open()
        self._ready.modify(secure, select.EPOLLIN | (select.EPOLLOUT if wants_room else 0))

    def _break(self, session: int, reason: str) -> None:
        if session in self._sessions:
            self.end(session)
            self._broken[session] = reason
