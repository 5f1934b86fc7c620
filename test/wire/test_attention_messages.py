"""The messages of attention for a peer: equal on arrival, or refused."""

import msgspec
import pytest
from support.malformed_data import MSGPACK

from sgl_pipeline.errors import MalformedData
from sgl_pipeline.wire.attention_messages import (
    AttendedRows,
    AttendRows,
    LeasedChunk,
    PlanAttention,
    RefusedLease,
    attention_address,
    attention_door,
    encode,
    read_answer,
    read_question,
)
from sgl_pipeline.wire.store_orders import offer_door

PLAN = PlanAttention("ukv1-0", (LeasedChunk(7, 60, 3), LeasedChunk(2**63, 4, 1)))
ROWS = AttendRows(3, *(memoryview(part) for part in (b"query", b"keys", b"values", b"sinks")))
ANSWER = AttendedRows(3, memoryview(b"output"), 0.5, (RefusedLease(7, "it is not lent"),))


def test_messages_arrive_equal() -> None:
    assert [read_question(encode(one)) for one in (PLAN, ROWS)] == [PLAN, ROWS]
    assert read_answer(encode(ANSWER)) == ANSWER
    assert PLAN.num_rows == 4


WRONG_PLANS = {
    "no chunk": {"chunks": ()},
    "no row": {"chunks": (LeasedChunk(7, 60, 0),)},
    "a negative position": {"chunks": (LeasedChunk(7, -1, 1),)},
    "a negative lease": {"chunks": (LeasedChunk(-7, 1, 1),)},
    "a lease twice": {"chunks": (LeasedChunk(7, 60, 1), LeasedChunk(7, 61, 1))},
}


@pytest.mark.parametrize("what", WRONG_PLANS)
def test_a_plan_of_what_cannot_be_is_malformed(what: str) -> None:
    with pytest.raises(MalformedData):
        read_question(encode(msgspec.structs.replace(PLAN, **WRONG_PLANS[what])))


@pytest.mark.parametrize("payload", [b"", b"\xc1", *MSGPACK.values(), encode(ANSWER)])
def test_what_is_no_question_is_malformed(payload: bytes) -> None:
    with pytest.raises(MalformedData):
        read_question(payload)


@pytest.mark.parametrize("payload", [b"", b"\xc1", *MSGPACK.values(), encode(ROWS)])
def test_what_is_no_answer_is_malformed(payload: bytes) -> None:
    with pytest.raises(MalformedData):
        read_answer(payload)


def test_a_stage_attends_beside_the_door_of_its_offers() -> None:
    assert attention_door(offer_door(3)) == "attention-3"
    address = f"offers-host:7000/{offer_door(12)}"
    assert attention_address(address) == "offers-host:7000/attention-12"
