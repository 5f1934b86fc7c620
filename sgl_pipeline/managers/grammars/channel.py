"""The messages between the scheduler process and its grammar compiler, and how they travel.

Both ends are here: the messages, and a stream of them over a socket pair. Sends never wait; what
the socket does not take at once is kept. Nothing is pickled.
"""

import socket
from typing import Any

import msgspec

_LENGTH_BYTES = 4
_READ_BYTES = 2**18

_encoder = msgspec.msgpack.Encoder()


class CompilerSetup(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The first message to the compiler. `vocabulary` is a TokenizerInfo of xgrammar, serialized;
    a compile may take `max_seconds` and `max_memory_mib` beyond what the process has."""

    vocabulary: str
    any_whitespace: bool
    max_whitespace_count: int | None
    max_seconds: float
    max_memory_mib: int


class CompileJob(msgspec.Struct, frozen=True, tag=True):
    """A grammar to compile; answered once, unless it is cancelled."""

    job_id: int
    kind: str
    text: str


class CancelJob(msgspec.Struct, frozen=True, tag=True):
    """Nobody waits for this job any more."""

    job_id: int


class CompiledJob(msgspec.Struct, frozen=True, tag=True):
    """`grammar` is a CompiledGrammar of xgrammar, serialized."""

    job_id: int
    grammar: str


class FailedJob(msgspec.Struct, frozen=True, tag=True):
    """`is_final` when another try would fail too: the grammar is wrong, not only costly."""

    job_id: int
    message: str
    is_final: bool


ToCompiler = CompilerSetup | CompileJob | CancelJob
FromCompiler = CompiledJob | FailedJob


class MessageStream:
    """Messages of type `accepted`, each with its length before it, over a connected socket."""

    def __init__(self, connection: socket.socket, accepted: Any) -> None:
        connection.setblocking(False)
        self._connection = connection
        self._decoder = msgspec.msgpack.Decoder(accepted)
        self._incoming = bytearray()
        self._outgoing = bytearray()

    def fileno(self) -> int:
        return self._connection.fileno()

    @property
    def has_unsent(self) -> bool:
        return bool(self._outgoing)

    def send(self, message: ToCompiler | FromCompiler) -> None:
        self.send_encoded(encode(message))

    def send_encoded(self, payload: bytes) -> None:
        """Queues a message that `encode` has made."""
        self._outgoing += len(payload).to_bytes(_LENGTH_BYTES, "big") + payload
        self.flush()

    def flush(self) -> None:
        """Sends as much as the socket takes. Raises OSError when the other end is gone."""
        while self._outgoing:
            try:
                sent = self._connection.send(self._outgoing)
            except BlockingIOError:
                return
            del self._outgoing[:sent]

    def receive(self) -> list[Any]:
        """All messages that have arrived. Raises EOFError or OSError when the other end is gone."""
        while True:
            try:
                piece = self._connection.recv(_READ_BYTES)
            except BlockingIOError:
                break
            if not piece:
                raise EOFError("the other end has closed the stream")
            self._incoming += piece
        messages = []
        start = 0
        while (body := start + _LENGTH_BYTES) <= len(self._incoming):
            end = body + int.from_bytes(self._incoming[start:body], "big")
            if end > len(self._incoming):
                break
            messages.append(self._decoder.decode(bytes(self._incoming[body:end])))
            start = end
        del self._incoming[:start]
        return messages

    def close(self) -> None:
        self._connection.close()


def encode(message: ToCompiler | FromCompiler) -> bytes:
    return _encoder.encode(message)
