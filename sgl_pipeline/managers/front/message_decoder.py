"""Reads the messages that SGLang's front may send to a scheduler, and no others.

Nothing is unpickled. Of a message that cannot be read, as much is read as its answer needs.
"""

from array import array
from typing import Any, Union

import msgspec
from sglang.srt.managers import io_struct
from sglang.srt.utils import msgpack_utils

from sgl_pipeline.decoding import DECODING_ERRORS
from sgl_pipeline.managers.front.control_requests import CONTROL_TYPES

GENERATE = io_struct.TokenizedGenerateReqInput
GENERATE_MANY = io_struct.BatchTokenizedGenerateReqInput
EMBED = io_struct.TokenizedEmbeddingReqInput
EMBED_MANY = io_struct.BatchTokenizedEmbeddingReqInput


def make_decoder() -> "msgspec.msgpack.Decoder[Any]":
    """A decoder of these messages.

    Upstream's own also accepts pickles and shared-memory handles, at any depth.
    """
    accepted = (GENERATE, GENERATE_MANY, EMBED, EMBED_MANY, io_struct.AbortReq, *CONTROL_TYPES)
    return msgspec.msgpack.Decoder(
        Union[accepted],  # noqa: UP007 - built at run time
        dec_hook=msgpack_utils.dec_hook,
        ext_hook=_arrays_only,
    )


def _arrays_only(code: int, data: memoryview) -> "array[int]":
    if code != msgpack_utils._MSGPACK_EXT_ARRAY:
        raise msgspec.DecodeError(f"extension {code} is not accepted")
    decoded: array[int] = msgpack_utils.ext_hook(code, data)
    return decoded


class _Head(msgspec.Struct, array_like=True):
    """The first fields of a message about one request."""

    tag: str
    rid: str | None = None


class _ManyHead(msgspec.Struct, array_like=True):
    """The first fields of a message about several requests."""

    tag: str
    rids: list[str] | None = None
    http_worker_ipcs: list[str | None] | None = None
    batch: list[_Head] = []


def rids_of(payload: bytes) -> list[str]:
    """The ids of the requests that an unreadable message is about, as far as they can be read."""
    try:
        head = msgspec.msgpack.decode(payload, type=_Head)
        if not head.tag.startswith("Batch"):
            return [head.rid] if head.rid else []
        several = msgspec.msgpack.decode(payload, type=_ManyHead)
    except DECODING_ERRORS:
        return []
    return [one.rid for one in several.batch if one.rid]
