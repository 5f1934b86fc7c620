"""The stream of orders: what a stage opens is what was sealed, in sequence, or it is an error."""

import os
import subprocess
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.malformed_data import MSGPACK

from sgl_pipeline.errors import ProtocolError
from sgl_pipeline.microbatch import StateSnapshot
from sgl_pipeline.requests import Lease, LogprobSpec, SamplingSpec
from sgl_pipeline.stage_plan import StagePlan
from sgl_pipeline.wire.lease_orders import EndLease, LendPages
from sgl_pipeline.wire.logged_pages import LogContents
from sgl_pipeline.wire.move_orders import AbandonMove, PrepareMove, SwitchPlan
from sgl_pipeline.wire.stage_orders import OrderReader, OrderStream, SealedOrder, StageOrder
from sgl_pipeline.wire.step_order import (
    ChunkOrder,
    MirrorSnapshot,
    ReplayPlan,
    RequestOpen,
    StepOrder,
)
from sgl_pipeline.wire.store_orders import (
    EndLoad,
    LoadPages,
    OfferPages,
    PeerPlace,
    PeerStage,
    SavePages,
    StorePlace,
    UseStore,
    WithdrawPages,
)

SAMPLING = SamplingSpec(0.5, 3, 0.9, 0.1, 7, 0.25, -0.5, 1.5, ((4, -100.0), (9, 2)), 6, (2, 8))
OPEN = RequestOpen(3, SAMPLING, 5, LogprobSpec(1, 4, (5, 6)), Lease("P", 8), 7)
CHUNK = ChunkOrder(
    3, 9, 2, True, b"tokens__", b"page", b"mask", b"draft___", 1, (StateSnapshot(11, 2),), 4
)
# One of each kind, no field at its default. `test_every_kind_of_order_has_an_example` holds it.
EXAMPLES: tuple[StageOrder, ...] = (
    StepOrder(8, 1, (2,), (OPEN,), (CHUNK,), (ReplayPlan(3, 4, 5, (0, 1)),)),
    MirrorSnapshot((OPEN,), (CHUNK,), LogContents(b"pages", b"slots")),
    PrepareMove(2, StagePlan(3, (4, 5)), b"pages___", b"slot"),
    SwitchPlan(2, StagePlan(3, (4, 5))),
    AbandonMove(2),
    UseStore(
        StorePlace(backend="file", address="/store", digest="ukv1-0", save_bytes_per_s=9),
        (PeerPlace(name="P", digest="ukv1-0", stages=(PeerStage("host:1/door", (0, 3)),)),),
    ),
    SavePages(3, b"pages___", b"hashes__"),
    EndLoad(4),
    LoadPages(4, b"pages___", b"hashes__", b"sums____", ((0, 2), (0,)), "P", 7),
    OfferPages(7, b"pages___", b"hashes__", "ukv1-0"),
    WithdrawPages(7),
    LendPages(8, b"pages___", 1, "ukv1-0"),
    EndLease(8),
)


def over_the_wire(sealed: SealedOrder) -> SealedOrder:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(sealed), type=SealedOrder)


def plan(step_id: int) -> StepOrder:
    return StepOrder(step_id, 0, (), (), ())


def altered(value: Any) -> Iterator[Any]:
    """`value` with one thing changed in it, for every thing in it."""
    if isinstance(value, msgspec.Struct):
        for field in msgspec.structs.fields(value):
            for other in altered(getattr(value, field.name)):
                yield msgspec.structs.replace(value, **{field.name: other})
    elif isinstance(value, tuple):
        yield value[:-1]
        for place, item in enumerate(value):
            for other in altered(item):
                yield (*value[:place], other, *value[place + 1 :])
    elif isinstance(value, bool):
        yield not value
    elif isinstance(value, (int, float)):
        yield value + 1
    elif isinstance(value, bytes):
        yield value + b"!"
    elif isinstance(value, str):
        yield value + "!"
    else:
        raise AssertionError(f"what is a {type(value).__name__} altered?")


def test_orders_come_out_as_they_went_in() -> None:
    stream, reader = OrderStream(), OrderReader()
    for order in EXAMPLES:
        assert reader.open(over_the_wire(stream.seal(order))) == order


def test_every_kind_of_order_has_an_example() -> None:
    assert {type(order) for order in EXAMPLES} == set(StageOrder.__args__)


@pytest.mark.parametrize("order", EXAMPLES, ids=lambda order: type(order).__name__)
def test_whatever_is_altered_in_an_order_is_noticed(order: StageOrder) -> None:
    sealed = OrderStream().seal(order)
    num_altered = 0
    for other in altered(order):
        assert other != order
        payload = msgspec.msgpack.encode(other)
        with pytest.raises(ProtocolError, match="checksum"):
            OrderReader().open(msgspec.structs.replace(sealed, payload=payload))
        num_altered += 1
    assert num_altered >= 1


def test_a_lost_order_is_named() -> None:
    stream, reader = OrderStream(), OrderReader()
    sealed = [stream.seal(plan(step_id)) for step_id in range(3)]
    reader.open(sealed[0])
    with pytest.raises(ProtocolError, match=r"order 2 of stream 0 .* 1"):
        reader.open(sealed[2])
    assert reader.open(sealed[1]) == plan(1)


def test_a_repeated_order_is_named() -> None:
    stream, reader = OrderStream(), OrderReader()
    sealed = stream.seal(plan(0))
    reader.open(sealed)
    with pytest.raises(ProtocolError, match=r"order 0 of stream 0 .* 1"):
        reader.open(sealed)


def test_orders_of_another_history_are_noticed() -> None:
    one, other, reader = OrderStream(), OrderStream(), OrderReader()
    reader.open(one.seal(plan(0)))
    other.seal(plan(5))
    with pytest.raises(ProtocolError, match="no longer agree"):
        reader.open(other.seal(plan(1)))


def test_a_payload_that_is_no_order_is_a_protocol_error() -> None:
    stream = OrderStream()
    sealed = stream.seal(SAMPLING)  # type: ignore[arg-type]
    with pytest.raises(ProtocolError, match="order 0 cannot be read"):
        OrderReader().open(sealed)


@pytest.mark.parametrize("kind", MSGPACK)
def test_a_payload_that_cannot_be_decoded_is_a_protocol_error(kind: str) -> None:
    sealed = SealedOrder(0, 0, zlib.crc32(MSGPACK[kind]), MSGPACK[kind])
    with pytest.raises(ProtocolError, match="order 0 cannot be read"):
        OrderReader().open(sealed)


def test_a_stage_that_joins_and_one_that_was_there_read_the_same_new_stream() -> None:
    stream, survivor, joiner = OrderStream(), OrderReader(), OrderReader()
    for step_id in range(3):
        survivor.open(stream.seal(plan(step_id)))
    lost = stream.seal(plan(3))
    first = stream.start_over(EXAMPLES[1])
    then = stream.seal(plan(3))
    for reader in (survivor, joiner):
        assert reader.open(first) == EXAMPLES[1]
        assert reader.open(then) == plan(3)
        with pytest.raises(ProtocolError, match=r"stream 0 .* 2 of "):
            reader.open(lost)


def test_a_new_stream_must_be_read_from_its_beginning() -> None:
    stream, reader = OrderStream(), OrderReader()
    stream.start_over(MirrorSnapshot((), ()))
    with pytest.raises(ProtocolError, match="order 1 of stream 1"):
        reader.open(stream.seal(plan(0)))


SEAL_A_TEXT = """
import sys
import msgspec
from sgl_pipeline.requests import SamplingSpec
from sgl_pipeline.wire.stage_orders import OrderStream
from sgl_pipeline.wire.step_order import RequestOpen, StepOrder

Texted = msgspec.defstruct(
    "Texted", [("text", str)], bases=(SamplingSpec,), frozen=True, array_like=True, kw_only=True
)
spec = msgspec.convert([*msgspec.to_builtins(SamplingSpec()), "a text"], Texted)
sealed = OrderStream().seal(StepOrder(0, 0, (), (RequestOpen(0, spec, 1, None),), ()))
sys.stdout.buffer.write(msgspec.msgpack.encode(sealed))
"""


@pytest.mark.multiproc
def test_a_text_in_a_sampling_spec_has_one_checksum_in_all_processes() -> None:
    """`hash` of a text differs from process to process, and so did a checksum made of it."""
    sealed = set()
    for seed in ("1", "2"):
        environment = os.environ | {"PYTHONHASHSEED": seed}
        root = Path(__file__).parents[2]
        run = subprocess.run(
            [sys.executable, "-c", SEAL_A_TEXT],
            env=environment,
            cwd=root,
            capture_output=True,
            check=True,
        )
        sealed.add(run.stdout)
    (encoded,) = sealed
    order = OrderReader().open(msgspec.msgpack.decode(encoded, type=SealedOrder))
    assert isinstance(order, StepOrder)
    assert order.opens[0].sampling == SamplingSpec()
