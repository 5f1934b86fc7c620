"""The messages between a stage that leaves attention to a peer and the peer's stage that has the
pages (`lease_orders.py`).

A stage of the decode server dials, sends a `PlanAttention` once a step, and then for each layer of
the step `AttendRows`, which `AttendedRows` answers before the next. A plan that no rows follow is
replaced by the next one. Frozen, tagged structs, in the frames of `cluster/framed_stream.py`; never
pickled.

R rows of all chunks of a plan, in its sequence; Hq query heads, Hkv key/value heads, D head dim of
queries and keys, Dv that of values, W elements of a row in a page of keys, Wv of values
(`kv_format.py`).
"""

from typing import Annotated

import msgspec

from sgl_pipeline.decoding import decode
from sgl_pipeline.errors import MalformedData

Count = Annotated[int, msgspec.Meta(ge=0)]


class LeasedChunk(msgspec.Struct, frozen=True, array_like=True):
    """`length` rows of a step, from position `start` of the request that has the lease."""

    lease: Count
    start: Count
    length: Annotated[int, msgspec.Meta(ge=1)]


class PlanAttention(msgspec.Struct, frozen=True, tag=True):
    """The rows of the next step. `digest` is as in `LendPages`."""

    digest: str
    chunks: Annotated[tuple[LeasedChunk, ...], msgspec.Meta(min_length=1)]

    @property
    def num_rows(self) -> int:
        return sum(chunk.length for chunk in self.chunks)


class AttendRows(msgspec.Struct, frozen=True, tag=True):
    """Write the keys and values of a layer's rows into the leases' pages, and attend.

    `query` is [R, Hq, D] in the model's dtype, `keys` [R, Hkv, W] and `values` [R, Hkv, Wv] are as
    in pages, and `sinks` is [Hq] in fp32, empty where the layer has none.
    """

    layer: Count
    query: memoryview
    keys: memoryview
    values: memoryview
    sinks: memoryview


class RefusedLease(msgspec.Struct, frozen=True, array_like=True):
    """The reason, a clause, for which the rows of a lease were left out."""

    lease: Count
    reason: str


class AttendedRows(msgspec.Struct, frozen=True, tag=True):
    """The results [R, Hq, Dv] of a layer in the model's dtype, zeros for the rows of `refused`
    leases. To write and attend took `busy_s`."""

    layer: Count
    output: memoryview
    busy_s: float
    refused: tuple[RefusedLease, ...] = ()


_encode = msgspec.msgpack.Encoder().encode
_questions = msgspec.msgpack.Decoder(PlanAttention | AttendRows)
_answers = msgspec.msgpack.Decoder(AttendedRows)


def encode(message: PlanAttention | AttendRows | AttendedRows) -> bytes:
    """The payload of a frame."""
    return _encode(message)


def read_question(payload: bytes) -> PlanAttention | AttendRows:
    """Raises MalformedData for what is neither, and for a lease that has two chunks."""
    question: PlanAttention | AttendRows = decode(_questions, payload)
    if isinstance(question, PlanAttention):
        leases = [chunk.lease for chunk in question.chunks]
        if len({*leases}) < len(leases):
            raise MalformedData("two chunks of one lease in a step")
    return question


def read_answer(payload: bytes) -> AttendedRows:
    """Raises MalformedData for anything but an answer."""
    answer: AttendedRows = decode(_answers, payload)
    return answer


def attention_door(offer_door: str) -> str:
    """The door behind which the stage that offers pages behind another one attends for peers."""
    return offer_door.replace("offers-", "attention-", 1)


def attention_address(address: str) -> str:
    """The same for an address with a door (`PeerStage.address`)."""
    host, slash, door = address.partition("/")
    return host + slash + attention_door(door)
