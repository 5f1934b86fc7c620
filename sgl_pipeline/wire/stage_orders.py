"""The one stream of orders from the scheduler to the stages, both ends of it.

Anything that changes what a stage knows or holds is a `StageOrder`. `OrderStream` (scheduler
process) encodes an order once and seals it with its number and a checksum over the bytes of all
orders so far; every stage gets every order, in the same sequence, and acts on what concerns it. So
"between step 7 and step 8" is a place in the stream, and no stage waits for another one to get
there. `OrderReader` (stage process) gives the orders back. A lost, repeated or altered order,
whatever fields it has, is a `ProtocolError`.
"""

import zlib

import msgspec

from sgl_pipeline.decoding import decode
from sgl_pipeline.errors import MalformedData, ProtocolError
from sgl_pipeline.wire.lease_orders import LeaseOrder
from sgl_pipeline.wire.move_orders import AbandonMove, PrepareMove, SwitchPlan
from sgl_pipeline.wire.step_order import MirrorSnapshot, StepOrder
from sgl_pipeline.wire.store_orders import OfferOrder, StoreOrder

StageOrder = (
    StepOrder
    | MirrorSnapshot
    | PrepareMove
    | SwitchPlan
    | AbandonMove
    | StoreOrder
    | OfferOrder
    | LeaseOrder
)


class SealedOrder(msgspec.Struct, frozen=True, tag=True):
    """An order as it travels: `payload` is the encoded `StageOrder`.

    `incarnation` numbers the streams of one server: a new one begins, at `number` 0, when stages
    start over from a `MirrorSnapshot`. `checksum` is the CRC-32 of all payloads of the stream up to
    this one.
    """

    incarnation: int
    number: int
    checksum: int
    payload: bytes


class OrderStream:
    """Seals orders in the sequence in which the stages will apply them. One for all stages."""

    def __init__(self) -> None:
        self.incarnation = 0
        self._next_number = 0
        self._checksum = 0
        self._encoder = msgspec.msgpack.Encoder()

    def seal(self, order: StageOrder) -> SealedOrder:
        """The next order of the stream."""
        payload = self._encoder.encode(order)
        self._checksum = zlib.crc32(payload, self._checksum)
        sealed = SealedOrder(self.incarnation, self._next_number, self._checksum, payload)
        self._next_number += 1
        return sealed

    def start_over(self, snapshot: MirrorSnapshot, incarnation: int | None = None) -> SealedOrder:
        """Begins the next incarnation, in which every stage knows what `snapshot` holds; or a later
        one, where those between never came to be."""
        assert incarnation is None or incarnation > self.incarnation
        self.incarnation = self.incarnation + 1 if incarnation is None else incarnation
        self._next_number = self._checksum = 0
        return self.seal(snapshot)


class OrderReader:
    """A stage's end of the stream."""

    def __init__(self) -> None:
        self._incarnation = 0
        self._next_number = 0
        self._checksum = 0
        self._decoder = msgspec.msgpack.Decoder(StageOrder)

    def open(self, sealed: SealedOrder) -> StageOrder:
        """The order in `sealed`.

        Raises ProtocolError when it is not the next one of the stream, or not as it was sent.
        """
        number, checksum = self._next_number, self._checksum
        if sealed.incarnation > self._incarnation and sealed.number == 0:
            number = checksum = 0
        elif (sealed.incarnation, sealed.number) != (self._incarnation, number):
            raise ProtocolError(
                f"order {sealed.number} of stream {sealed.incarnation} arrived, this stage expects "
                f"{number} of stream {self._incarnation}: an order was lost or repeated"
            )
        checksum = zlib.crc32(sealed.payload, checksum)
        if checksum != sealed.checksum:
            raise ProtocolError(
                f"order {sealed.number} of stream {sealed.incarnation} has checksum "
                f"{sealed.checksum}, computed {checksum}: scheduler and stage no longer agree on "
                "what was sent"
            )
        try:
            order: StageOrder = decode(self._decoder, sealed.payload)
        except MalformedData as error:
            raise ProtocolError(f"order {sealed.number} cannot be read: {error}") from error
        self._incarnation = sealed.incarnation
        self._next_number, self._checksum = number + 1, checksum
        return order
