"""Messages that a storage process and its clients send to each other: msgpack over Unix SEQPACKET.

The process runs a storage backend of SGLang for all processes of a host. Objects are handed over in
shared memory: each connection has some chunks of it, of a fixed size, and the objects of a request
are in its first ones. A connection has one request at a time.
"""

import array
import socket
from typing import Annotated

import msgspec

from sgl_pipeline.decoding import decode

Count = Annotated[int, msgspec.Meta(ge=0)]

MAX_MESSAGE_BYTES = 1 << 17
# Names of a request that hands over no objects; they fit in a message.
MAX_NAMES = 512


class Staging(msgspec.Struct, frozen=True, tag=True):
    """The first message of the process, which comes with a descriptor of the shared memory."""

    chunk_bytes: Annotated[int, msgspec.Meta(gt=0)]
    num_chunks: Annotated[int, msgspec.Meta(gt=0)]
    offset_bytes: Count


class SetObjects(msgspec.Struct, frozen=True, tag=True):
    """Store the chunks under these names. A backend may keep what it has of a name."""

    names: tuple[str, ...]


class GetObjects(msgspec.Struct, frozen=True, tag=True):
    """Fill the chunks with what is stored under these names."""

    names: tuple[str, ...]


class CountObjects(msgspec.Struct, frozen=True, tag=True):
    """The number of these names that are there, up to the first that is not."""

    names: tuple[str, ...]


class ClearAll(msgspec.Struct, frozen=True, tag=True):
    """Have the backend forget all that it has."""


class Done(msgspec.Struct, frozen=True, tag=True):
    """True for each name of the request that could be stored or read."""

    successes: tuple[bool, ...] = ()


class Counted(msgspec.Struct, frozen=True, tag=True):
    number: Count


class Failed(msgspec.Struct, frozen=True, tag=True):
    message: str


Request = SetObjects | GetObjects | CountObjects | ClearAll
Reply = Staging | Done | Counted | Failed

_encoder = msgspec.msgpack.Encoder()
_request_decoder: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_reply_decoder: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


def send_message(connection: socket.socket, message: Request | Reply) -> None:
    """Raises OSError."""
    connection.send(_encoder.encode(message))


def send_staging(connection: socket.socket, staging: Staging, memory: int) -> None:
    """Sends the first message with the descriptor `memory`. Raises OSError."""
    socket.send_fds(connection, [_encoder.encode(staging)], [memory])


def receive_request(connection: socket.socket) -> Request | None:
    """The next request; None where the client has gone. Raises MalformedData."""
    try:
        data = connection.recv(MAX_MESSAGE_BYTES)
    except ConnectionResetError:
        return None
    return decode(_request_decoder, data) if data else None


def receive_reply(connection: socket.socket) -> tuple[Reply | None, list[int]]:
    """A reply and the descriptors that came with it; None where the process has ended.
    Raises OSError, MalformedData."""
    size = array.array("i").itemsize
    data, descriptors, _, _ = socket.recv_fds(connection, MAX_MESSAGE_BYTES, size)
    return (decode(_reply_decoder, data) if data else None), descriptors
