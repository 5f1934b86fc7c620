"""Servers that offer pages and stages that read them, each server with a port, in one process."""

import threading
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
from support.clusters import SECRET, host_directory, open_port
from support.page_transfers import (
    DIGEST,
    await_reports,
    filled_pool,
    page_content,
    save_order,
)

from sgl_pipeline.cluster.doors import Door, dial
from sgl_pipeline.cluster.framed_stream import FramedStream
from sgl_pipeline.cluster.secure_stream import SecureStream, StreamClosed
from sgl_pipeline.kv_store.page_store import ObjectStore
from sgl_pipeline.pp_runner.attention.attention_backend import AttentionShape
from sgl_pipeline.pp_runner.page_store.page_transfers import PageTransfers
from sgl_pipeline.pp_runner.page_store.stage_offers import PeerSite
from sgl_pipeline.stage_plan import StagePlan
from sgl_pipeline.wire.peer_messages import ReadPages
from sgl_pipeline.wire.step_order import INT32
from sgl_pipeline.wire.store_orders import (
    LoadPages,
    OfferPages,
    PagesLoaded,
    PeerPlace,
    PeerStage,
    StorePlace,
    UseStore,
    WithdrawPages,
    offer_door,
)

Shapes = Sequence[AttentionShape]
WAIT_S = 60.0


def offer_order(
    offer: int, pages: Sequence[int], numbers: Sequence[int], digest: str = DIGEST
) -> OfferPages:
    save = save_order(0, pages, numbers)
    return OfferPages(offer, save.pages, save.hashes, digest)


def load_from(
    source: str, offer: int, transfer: int, pages: Sequence[int], numbers: Sequence[int]
) -> LoadPages:
    """A load of pages that a peer has offered."""
    hashes = save_order(0, pages, numbers).hashes
    return LoadPages(transfer, array(INT32, pages).tobytes(), hashes, b"", (), source, offer)


def stage_of(plan: StagePlan, layer: int) -> int:
    return next(stage for stage in range(plan.num_stages) if layer in plan.layers_of(stage))


class Offering:
    """The stages of a server whose pools are full.

    Args:
        address: of its port.
        directory: its run directory.
    """

    def __init__(
        self, address: str, directory: str, shapes: Shapes, counts: Sequence[int], name: str = "P"
    ) -> None:
        self.address, self.name = address, name
        self.plan, self.may_start = StagePlan(0, tuple(counts)), True
        self.pools = [
            filled_pool(range(len(shapes)), shapes, seed) for seed in range(self.plan.num_stages)
        ]
        self.stages = [
            PageTransfers(
                stage,
                pool,
                lambda: self.plan,
                lambda: self.may_start,
                PeerSite(directory, offer_door(stage)),
            )
            for stage, pool in enumerate(self.pools)
        ]

    @property
    def place(self) -> PeerPlace:
        layers = map(self.plan.layers_of, range(self.plan.num_stages))
        stages = tuple(
            PeerStage(f"{self.address}/{offer_door(stage)}", (own.start, own.stop))
            for stage, own in enumerate(layers)
        )
        return PeerPlace(name=self.name, digest=DIGEST, stages=stages)

    def offer(
        self, offer: int, pages: Sequence[int], numbers: Sequence[int], digest: str = DIGEST
    ) -> None:
        for stage in self.stages:
            stage.obey_offer(offer_order(offer, pages, numbers, digest))

    def withdraw(self, offer: int) -> None:
        for stage in self.stages:
            stage.obey_offer(WithdrawPages(offer))

    def content(self, layer: int, page: int) -> bytes:
        return page_content(self.pools[stage_of(self.plan, layer)], layer, page)

    def close(self) -> None:
        for stage in self.stages:
            stage.close()


class Reading:
    """The stages of a server that reads, with pools of other content."""

    def __init__(
        self,
        directory: str,
        shapes: Shapes,
        counts: Sequence[int],
        *peers: PeerPlace,
        place: StorePlace | None = None,
        open_store: Callable[[StorePlace, Sequence[int]], ObjectStore] | None = None,
    ) -> None:
        self.plan = StagePlan(3, tuple(counts))
        self.pools = [
            filled_pool(self.plan.layers_of(stage), shapes, 90 + stage)
            for stage in range(self.plan.num_stages)
        ]
        self.stages = [
            PageTransfers(
                stage, pool, lambda: self.plan, lambda: True, PeerSite(directory, ""), open_store
            )
            for stage, pool in enumerate(self.pools)
        ]
        self._transfers = 0
        self.use(*peers, place=place)

    def use(self, *peers: PeerPlace, place: StorePlace | None = None) -> None:
        for stage in self.stages:
            stage.obey(UseStore(place, peers))

    def begin(
        self, offer: int, pages: Sequence[int], numbers: Sequence[int], source: str = "P"
    ) -> None:
        """Orders a load."""
        self._transfers += 1
        for stage in self.stages:
            stage.obey(load_from(source, offer, self._transfers, pages, numbers))

    def reports(self, count: int = 1) -> list[PagesLoaded]:
        """The next reports, `count` of each stage, stage by stage."""
        found = [one for stage in self.stages for one in await_reports(stage, count)]
        assert all(isinstance(one, PagesLoaded) for one in found)
        return found  # type: ignore[return-value]

    def load(
        self, offer: int, pages: Sequence[int], numbers: Sequence[int], source: str = "P"
    ) -> list[PagesLoaded]:
        """Orders a load and gives the reports of all stages."""
        self.begin(offer, pages, numbers, source)
        return self.reports()

    def content(self, layer: int, page: int) -> bytes:
        return page_content(self.pools[stage_of(self.plan, layer)], layer, page)

    def close(self) -> None:
        for stage in self.stages:
            stage.close()


class Hosts:
    """Two hosts with the same key, the first of which has a port."""

    def __init__(self, address: str, directory: str, other: str) -> None:
        self.address, self.directory, self.other = address, directory, other


@contextmanager
def two_hosts(path: Path, other_secret: bytes = SECRET) -> Iterator[Hosts]:
    path.mkdir(exist_ok=True)
    directory, other = host_directory(path / "one"), host_directory(path / "other", other_secret)
    with open_port(directory) as (address, _):
        yield Hosts(address, directory, other)


class FakePeerStage:
    """The stage of a peer behind the door `fake`: a thread gives each stream that comes to
    `_serve`, one after the other, which ends with the stream or when the test is over."""

    def __init__(self, hosts: Hosts) -> None:
        self._directory = hosts.directory
        self._door = Door(hosts.directory, "fake")
        self.streams: list[FramedStream] = []
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._is_over.set()
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()
        for stream in self.streams:
            stream.close()
        self._door.close()

    def _run(self) -> None:
        while not self._is_over.wait(0.002):
            if (accepted := self._door.accept()) is None:
                continue
            secure = SecureStream(accepted[0], self._directory, is_server=True)
            self.streams.append(FramedStream(secure))
            with suppress(StreamClosed):
                self._serve(self.streams[-1])

    def _serve(self, stream: FramedStream) -> None:
        raise NotImplementedError


class FakePeer(FakePeerStage):
    """Has all layers, and does as `behave` says with each stream and the first request that it
    brings."""

    def __init__(
        self, hosts: Hosts, num_layers: int, behave: Callable[[FramedStream, ReadPages], None]
    ) -> None:
        self._behave = behave
        self.place = PeerPlace(
            name="P",
            digest=DIGEST,
            stages=(PeerStage(f"{hosts.address}/fake", (0, num_layers)),),
        )
        super().__init__(hosts)

    def _serve(self, stream: FramedStream) -> None:
        request = next_frame(stream, self._is_over)
        self._behave(stream, msgspec.msgpack.decode(request, type=ReadPages))


def next_frame(stream: FramedStream, is_over: threading.Event | None = None) -> bytes:
    """Waits for a frame, at most `WAIT_S`. Raises StreamClosed."""
    is_over, end_s = is_over or threading.Event(), time.monotonic() + WAIT_S
    while (frame := stream.receive()) is None:
        assert time.monotonic() < end_s, "no frame came"
        stream.wait(0.02)
        if is_over.is_set():
            raise StreamClosed("the test is over")
    return frame


def dial_door(hosts: Hosts, door: str) -> FramedStream:
    """A stream to a door, whose handshake is over."""
    stream = SecureStream(dial(hosts.address, door, hosts.other), hosts.other, is_server=False)
    frames, end_s = FramedStream(stream), time.monotonic() + WAIT_S
    while not stream.open():
        assert time.monotonic() < end_s, "nothing behind the door shakes hands"
        frames.wait(0.02)
    return frames
