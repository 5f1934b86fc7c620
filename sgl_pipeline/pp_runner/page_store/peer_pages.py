"""Pages of a peer, as a stage reads them: from each of the peer's stages that have its layers.

All these stages are asked at once and answer page by page, so a load takes no round trip for each
page. Whatever is wrong with an answer ends the load and the streams: what else they bring is of
this load. A peer that is silent for `SILENCE_S` is taken for lost.
"""

import contextlib
import socket
import time
import zlib
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from sgl_pipeline.cluster.doors import DialError, DoorClosed, dial
from sgl_pipeline.cluster.framed_stream import FramedStream
from sgl_pipeline.cluster.secure_stream import SecureStream, StreamClosed
from sgl_pipeline.errors import MalformedData, PeerLost, StoreError
from sgl_pipeline.pp_runner.links.tcp_link import REDIAL_S, shake_hands, split_link
from sgl_pipeline.pp_runner.page_store.page_source import LoadedLayers
from sgl_pipeline.pp_runner.page_store.pool_pages import Bytes
from sgl_pipeline.pp_runner.page_store.transfer_jobs import PageTransfer
from sgl_pipeline.wire.peer_messages import (
    NotYet,
    PageFrame,
    ReadPages,
    Refused,
    encode,
    read_answer,
)
from sgl_pipeline.wire.store_orders import PeerPlace

# A peer sends something at least this often, when it was asked: `page_server.NOT_YET_INTERVAL_S`.
SILENCE_S = 4.0
# Of one frame, however slowly it comes. It includes the wait for an offer (`OFFER_WAIT_S`).
FRAME_LIMIT_S = 30.0
DIAL_TIMEOUT_S = 3.0
# A session that ends is noticed so soon.
_INTERRUPT_S = 0.1


class PeerPages:
    """The `PageSource` of a peer.

    Args:
        layers: of the stage that reads.
        sizes: bytes of a page of each layer of the model.
    """

    def __init__(
        self,
        place: PeerPlace,
        layers: range,
        sizes: Sequence[int],
        run_directory: str,
    ) -> None:
        self._place, self._layers = place, layers
        self._sizes, self._run_directory = sizes, run_directory
        self._streams: dict[str, FramedStream] = {}  # by address
        self._is_interrupted = False
        self._transfer: int | None = None  # that is read now
        self._ended_transfer: int | None = None

    def read(self, job: PageTransfer, buffer: Callable[[], Bytes]) -> Iterator[LoadedLayers]:
        """See `PageSource`."""
        with contextlib.ExitStack() as on_error:
            on_error.callback(self.close)
            self._transfer = job.transfer
            runs = self._runs()
            for address, layers in runs:
                self._ask(address, job, layers)
            for index in range(len(job.pages)):
                for address, layers in runs:
                    for some, content in self._frames(address, index, layers):
                        room = buffer()
                        room[: len(content)] = np.frombuffer(content, dtype=np.uint8)
                        yield LoadedLayers(index, some, room)
            on_error.pop_all()

    def interrupt(self) -> None:
        """See `PageSource`."""
        self._is_interrupted = True

    def end_read(self, transfer: int) -> None:
        """See `PageSource`."""
        self._ended_transfer = transfer

    def close(self) -> None:
        """Ends the streams; the next load dials again."""
        for stream in self._streams.values():
            stream.close()
        self._streams.clear()

    def _runs(self) -> Sequence[tuple[str, range]]:
        """The stage's layers in sequence, by the peer's stages that have them, each with its
        address. Raises StoreError where none has a layer."""
        runs, first = [], self._layers.start
        for stage in sorted(self._place.stages, key=lambda one: one.layers):
            start, stop = stage.layers
            if start <= first < min(stop, self._layers.stop):
                runs.append((stage.address, range(first, min(stop, self._layers.stop))))
                first = runs[-1][1].stop
        if first < self._layers.stop:
            raise StoreError(f"peer {self._place.name} has no stage with layer {first}")
        return runs

    def _ask(self, address: str, job: PageTransfer, layers: range) -> None:
        """Asks a stage of the peer for the pages of a load."""
        request = ReadPages(self._place.digest, job.offer, job.hashes, (layers.start, layers.stop))
        with self._lost_if_closed(address):
            stream = self._streams.get(address)
            if stream is None or not stream.is_idle():
                stream = self._streams[address] = self._dial(address)
            stream.send(encode(request))

    def _dial(self, address: str) -> FramedStream:
        """Raises PeerLost and StreamClosed."""
        if (old := self._streams.pop(address, None)) is not None:
            old.close()
        connection = self._connect(address, time.monotonic() + SILENCE_S)
        stream = SecureStream(connection, self._run_directory, is_server=False)
        try:
            if shake_hands(stream, SILENCE_S):
                return FramedStream(stream)
            raise self._lost(address, f"it does not answer: no handshake within {SILENCE_S:g} s")
        except BaseException:
            stream.close()
            raise

    def _connect(self, address: str, limit_s: float) -> socket.socket:
        """A connection to a stage whose door may open with its first offer, until `limit_s`. Raises
        PeerLost."""
        host, door = split_link(address)
        while True:
            try:
                return dial(host, door, self._run_directory, DIAL_TIMEOUT_S)
            except DoorClosed as error:
                if time.monotonic() > limit_s:
                    raise self._lost(address, str(error)) from error
                self._check_wanted(address)
            except DialError as error:
                raise self._lost(address, str(error)) from error
            time.sleep(REDIAL_S)

    def _frames(
        self, address: str, index: int, layers: range
    ) -> Iterator[tuple[range, memoryview]]:
        """Runs of `layers` of the page at `index`, as they come. Raises StoreError."""
        first = layers.start
        while first < layers.stop:
            frame = self._next_frame(address)
            content, end = frame.content, frame.layers[1]
            if (frame.index, frame.layers[0]) != (index, first) or not first < end <= layers.stop:
                raise self._wrong(
                    address,
                    f"it sent layers {frame.layers} of page {frame.index}, when those from {first} "
                    f"on of page {index} were due",
                )
            num_bytes = sum(self._sizes[first:end])
            if len(content) != num_bytes:
                raise self._wrong(
                    address,
                    f"it sent {len(content)} bytes for layers {first} to {end - 1} of a page, "
                    f"which have {num_bytes} here",
                )
            if zlib.crc32(content) != frame.checksum:
                raise self._wrong(address, "a page was altered on its way: its checksum is another")
            yield range(first, end), content
            first = end

    def _next_frame(self, address: str) -> PageFrame:
        """Raises StoreError where another message comes, and PeerLost where none does."""
        limit_s = time.monotonic() + FRAME_LIMIT_S
        while True:
            self._check_wanted(address)
            with self._lost_if_closed(address):
                payload = self._receive(address, limit_s)
            try:
                answer = read_answer(payload)
            except MalformedData as error:
                raise self._wrong(address, f"it sent a malformed message: {error}") from error
            if isinstance(answer, Refused):
                raise self._wrong(address, answer.reason)
            if not isinstance(answer, NotYet):
                return answer

    def _receive(self, address: str, limit_s: float) -> bytes:
        """The next message. Raises StreamClosed, and PeerLost where it takes too long."""
        stream = self._streams[address]
        heard_s = time.monotonic()
        while (payload := stream.receive()) is None:
            stream.flush()
            if stream.wait(_INTERRUPT_S):
                heard_s = time.monotonic()
            self._check_wanted(address)
            now_s = time.monotonic()
            if now_s - heard_s > SILENCE_S:
                raise self._lost(address, f"it does not answer: nothing came for {SILENCE_S:g} s")
            if now_s > limit_s:
                raise self._lost(address, f"no page came within {FRAME_LIMIT_S:g} s")
        return payload

    def _check_wanted(self, address: str) -> None:
        """Raises PeerLost where the session is over, StoreError where only this load is."""
        if self._is_interrupted:
            raise self._lost(address, "the session has ended")
        if self._ended_transfer == self._transfer:
            raise self._wrong(address, "the load was ended")

    @contextlib.contextmanager
    def _lost_if_closed(self, address: str) -> Iterator[None]:
        try:
            yield
        except StreamClosed as ending:
            raise self._lost(address, f"the connection ended: {ending}") from ending

    def _lost(self, address: str, reason: str) -> PeerLost:
        return PeerLost(self._text(address, reason))

    def _wrong(self, address: str, reason: str) -> StoreError:
        return StoreError(self._text(address, reason))

    def _text(self, address: str, reason: str) -> str:
        return f"peer {self._place.name} at {address}: {reason}"
