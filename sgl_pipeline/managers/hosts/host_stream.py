"""Messages over TLS in an event loop: between the head and the agents, and between doctors.

Both ends prove the cluster's secret by certificate (`keys.tls_context`) before any message is read.
Each message is a frame of `framed_stream.py`, decoded by msgspec.
"""

import asyncio
import math
import socket
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import msgspec

from sgl_pipeline.cluster.doors import DialError, dial
from sgl_pipeline.cluster.framed_stream import LENGTH, MAX_FRAME_BYTES, too_long
from sgl_pipeline.cluster.keys import tls_context
from sgl_pipeline.cluster.secure_stream import StreamClosed, reason_of
from sgl_pipeline.decoding import decode
from sgl_pipeline.errors import MalformedData

HANDSHAKE_TIMEOUT_S = 5.0
# How long a closed stream may take to deliver what was sent before.
CLOSE_TIMEOUT_S = 2.0
_LOOK_S = 0.25

Message = TypeVar("Message")
Result = TypeVar("Result")

_encode = msgspec.msgpack.Encoder().encode


class HostStream(Generic[Message]):
    """One end of an open stream. `heard_s` is when the last message came (`time.monotonic`)."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        decoder: "msgspec.msgpack.Decoder[Message]",
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._decoder = decoder
        self.heard_s = time.monotonic()

    def send(self, message: msgspec.Struct) -> None:
        """Sends without waiting; drops the message when the stream has ended."""
        if not self._writer.is_closing():
            payload = _encode(message)
            self._writer.write(LENGTH.pack(len(payload)) + payload)

    async def receive(self) -> Message:
        """The next message. Raises StreamClosed, or MalformedData for what is not a message."""
        try:
            (length,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
            if length > MAX_FRAME_BYTES:
                raise too_long(length)
            frame = await self._reader.readexactly(length)
        except asyncio.IncompleteReadError as error:
            raise StreamClosed("the other end has closed the connection") from error
        except OSError as error:
            raise StreamClosed(reason_of(error)) from error
        self.heard_s = time.monotonic()
        return decode(self._decoder, frame)

    async def converse(
        self,
        take: Callable[[Message], None],
        ended: "asyncio.Future[Result]",
        silence_s: Callable[[], float],
    ) -> Result:
        """Hands each message to `take` until `ended` has a result, which is returned; then closes.

        Raises StreamClosed when the other end is gone, is silent for longer than `silence_s()`, or
        sends what is not a message.
        """
        reading = asyncio.get_running_loop().create_task(self._read(take))
        either: list[asyncio.Future[Any]] = [reading, ended]
        try:
            while not ended.done():
                await asyncio.wait(either, timeout=_LOOK_S, return_when=asyncio.FIRST_COMPLETED)
                if reading.done() and not ended.done():
                    reading.result()
                silent_s = time.monotonic() - self.heard_s
                if not ended.done() and silent_s > silence_s():
                    raise StreamClosed(f"it has been silent for {silent_s:.1f} s")
            return ended.result()
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            self.close()

    def close(self) -> None:
        """Ends the stream when what was sent has left, or after `CLOSE_TIMEOUT_S`."""
        self._writer.close()

    def abort(self) -> None:
        """Ends the stream at once; what was sent may be lost."""
        self._writer.transport.abort()

    async def _read(self, take: Callable[[Message], None]) -> None:
        while True:
            try:
                message = await self.receive()
            except MalformedData as error:
                raise StreamClosed(f"it sent a malformed message: {error}") from error
            take(message)


async def accept_stream(
    connection: socket.socket, run_directory: str, decoder: "msgspec.msgpack.Decoder[Message]"
) -> HostStream[Message]:
    """The stream to a process that has dialed. Raises StreamClosed for one without the secret."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(reader)
    try:
        transport, _ = await loop.connect_accepted_socket(
            lambda: protocol,
            connection,
            ssl=tls_context(run_directory, is_server=True),
            ssl_handshake_timeout=HANDSHAKE_TIMEOUT_S,
            ssl_shutdown_timeout=CLOSE_TIMEOUT_S,
        )
    except OSError as error:
        raise StreamClosed(f"TLS handshake: {reason_of(error)}") from error
    return HostStream(reader, asyncio.StreamWriter(transport, protocol, reader, loop), decoder)


async def dial_stream(
    address: str,
    door: str,
    run_directory: str,
    decoder: "msgspec.msgpack.Decoder[Message]",
    *,
    redial_s: float,
    until_s: float = math.inf,
    on_failure: Callable[[DialError], None] = lambda error: None,
) -> HostStream[Message]:
    """The stream to the process behind `door` of the host at `address`, dialed every `redial_s`
    until `until_s` of the monotonic clock; `on_failure` is called before each further attempt.

    Raises DialError when the time is over, and at once where later attempts must fail too.
    """
    while True:
        try:
            connection = await asyncio.to_thread(dial, address, door, run_directory)
            reader, writer = await asyncio.open_connection(
                sock=connection,
                ssl=tls_context(run_directory, is_server=False),
                server_hostname="",
                ssl_handshake_timeout=HANDSHAKE_TIMEOUT_S,
                ssl_shutdown_timeout=CLOSE_TIMEOUT_S,
            )
            return HostStream(reader, writer, decoder)
        except DialError as error:
            failure = error
        except OSError as error:
            failure = DialError(f"{address} ends the TLS handshake: {reason_of(error)}")
        if failure.is_final or time.monotonic() > until_s:
            raise failure
        on_failure(failure)
        await asyncio.sleep(redial_s)
