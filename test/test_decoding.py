"""Whatever arrives, the decoders raise one error."""

import msgspec
import pytest
from support.malformed_data import JSON, MSGPACK

from sgl_pipeline.decoding import decode
from sgl_pipeline.errors import MalformedData


class Message(msgspec.Struct, tag=True):
    text: str


class Other(msgspec.Struct, tag=True):
    number: int


@pytest.mark.parametrize("kind", MSGPACK)
def test_the_decoder_of_binary_messages_raises_one_error(kind: str) -> None:
    with pytest.raises(MalformedData):
        decode(msgspec.msgpack.Decoder(Message | Other), MSGPACK[kind])


@pytest.mark.parametrize("kind", JSON)
def test_the_decoder_of_json_raises_the_same_error(kind: str) -> None:
    with pytest.raises(MalformedData):
        decode(msgspec.json.Decoder(Message | Other), JSON[kind])


def test_text_that_is_not_utf_8_is_malformed_in_a_binary_message() -> None:
    frame = msgspec.msgpack.encode(Message("naive")).replace(b"naive", b"na\xffve")
    with pytest.raises(MalformedData, match="utf-8"):
        decode(msgspec.msgpack.Decoder(Message | Other), frame)


def test_the_error_of_a_value_that_does_not_fit_names_the_field() -> None:
    with pytest.raises(MalformedData, match=r"\$\.number"):
        decode(msgspec.json.Decoder(Other), b'{"type": "Other", "number": "three"}')


def test_a_decoder_returns_what_it_accepts() -> None:
    assert decode(msgspec.json.Decoder(Message), b'{"text": "x"}') == Message("x")
