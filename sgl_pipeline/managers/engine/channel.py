"""The messages between a program and its engine's process, and their form on a socket pair.

A message has its length before it. Nothing is pickled: texts, numbers, lists and maps travel.
"""

from typing import Any, BinaryIO

import msgspec

LENGTH_BYTES = 8

_encoder = msgspec.msgpack.Encoder()


class StartEngine(msgspec.Struct, frozen=True, tag=True):
    """The first message to the process: the keyword arguments of `Engine`. A `Reply` says that it
    is ready."""

    call: int
    arguments: dict[str, Any]


class Generate(msgspec.Struct, frozen=True, tag=True):
    """`fields` of SGLang's GenerateReqInput, with their names and defaults."""

    call: int
    fields: dict[str, Any]


class Ask(msgspec.Struct, frozen=True, tag=True):
    """A question of `EngineDesk`, with what it is asked about."""

    call: int
    question: str
    fields: dict[str, Any]


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """The program does not wait for this call any more: its requests are aborted."""

    call: int


class EndEngine(msgspec.Struct, frozen=True, tag=True):
    """The process ends, and all others of the engine with it."""


class Reply(msgspec.Struct, frozen=True, tag=True):
    call: int
    value: Any


class Done(msgspec.Struct, frozen=True, tag=True):
    """All replies to this call have been sent."""

    call: int


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The last answer to a call: `status_code` is what a server would answer with."""

    call: int
    message: str
    status_code: int


class StartFailed(msgspec.Struct, frozen=True, tag=True):
    """The last message of a process that cannot start; `kind` is a class of `errors.py`."""

    call: int
    kind: str
    message: str


class EngineFailed(msgspec.Struct, frozen=True, tag=True):
    """The last message of a process that cannot go on."""

    reason: str


Call = StartEngine | Generate | Ask
ToEngine = Call | Cancel | EndEngine
Answer = Reply | Done | Refused | StartFailed
FromEngine = Answer | EngineFailed


def encode_frame(message: ToEngine | FromEngine) -> bytes:
    """Raises TypeError or OverflowError for a value that has no form here."""
    payload = _encoder.encode(message)
    return len(payload).to_bytes(LENGTH_BYTES, "big") + payload


def read_frame(stream: BinaryIO) -> bytes | None:
    """The payload of the next message, waited for; None when the other end is gone."""
    head = stream.read(LENGTH_BYTES)
    if len(head) < LENGTH_BYTES:
        return None
    length = int.from_bytes(head, "big")
    payload = stream.read(length)
    return payload if len(payload) == length else None
