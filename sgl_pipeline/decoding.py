"""Decodes bytes that another process or a file supplied.

msgspec raises three unrelated exceptions on bad input: `DecodeError` for a wrong structure,
`UnicodeDecodeError` for text that is not UTF-8, `RecursionError` for input nested too deeply.
"""

from typing import Protocol, TypeVar

import msgspec

from sgl_pipeline.errors import MalformedData

T_co = TypeVar("T_co", covariant=True)

# What a msgspec decoder raises on bad input; a ValidationError is a DecodeError.
DECODING_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class _Decoder(Protocol[T_co]):
    """`msgspec.json.Decoder` or `msgspec.msgpack.Decoder`."""

    def decode(self, data: bytes | bytearray, /) -> T_co: ...


def decode(decoder: _Decoder[T_co], data: bytes | bytearray) -> T_co:
    """The value in `data`. Raises MalformedData for anything that `decoder` does not accept."""
    try:
        return decoder.decode(data)
    except DECODING_ERRORS as error:
        raise MalformedData(str(error)) from error
