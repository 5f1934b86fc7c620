"""The messages between a stage that reads pages and the stage of a peer that offers them.

The reader dials, sends a `ReadPages`, and gets a `PageFrame` for each run of layers of each page,
in the sequence of its request, with `NotYet` now and then while the offer is on its way; or a
`Refused`, which ends the request. Then it may send another. Frozen, tagged structs, in the frames
of `cluster/framed_stream.py`; never pickled.
"""

from typing import Annotated

import msgspec

from sgl_pipeline.decoding import decode
from sgl_pipeline.errors import MalformedData
from sgl_pipeline.page_hash import HASH_BYTES

Count = Annotated[int, msgspec.Meta(ge=0)]

# A page of many layers comes in frames of about this size.
FRAME_BYTES = 1 << 20


class ReadPages(msgspec.Struct, frozen=True, tag=True):
    """Send `layers`, the first one and the one after the last, of pages of an offer: the page of
    each of `hashes`, one behind the other. `digest` is as in `OfferPages`."""

    digest: str
    offer: Count
    hashes: bytes
    layers: tuple[Count, Count]

    @property
    def num_pages(self) -> int:
        return len(self.hashes) // HASH_BYTES

    def hash_of(self, index: int) -> bytes:
        """The hash of the page at `index`."""
        return self.hashes[index * HASH_BYTES : (index + 1) * HASH_BYTES]


class PageFrame(msgspec.Struct, frozen=True, tag=True):
    """Some `layers` of the page at `index` of the request.

    `content` has an object (`pool_pages.py`) of each, one behind the other; `checksum` is its
    CRC-32.
    """

    index: Count
    layers: tuple[Count, Count]
    checksum: Count
    content: memoryview


class NotYet(msgspec.Struct, frozen=True, tag=True):
    """The offer is not known, and may be on its way."""


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The rest of the request is not answered; `reason` is a clause."""

    reason: str


Answer = PageFrame | NotYet | Refused

_encode = msgspec.msgpack.Encoder().encode
_requests = msgspec.msgpack.Decoder(ReadPages)
_answers = msgspec.msgpack.Decoder(Answer)


def encode(message: ReadPages | Answer) -> bytes:
    """The payload of a frame."""
    return _encode(message)


def read_request(payload: bytes) -> ReadPages:
    """Raises MalformedData unless it is a request of some pages and layers."""
    request = decode(_requests, payload)
    num_bytes, (first, stop) = len(request.hashes), request.layers
    if not num_bytes or num_bytes % HASH_BYTES or first >= stop:
        raise MalformedData(f"{num_bytes} bytes of hashes and layers {request.layers} asked for")
    return request


def read_answer(payload: bytes) -> Answer:
    """Raises MalformedData for anything but an answer."""
    answer: Answer = decode(_answers, payload)
    return answer
