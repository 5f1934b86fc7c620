"""The pages that fake stages offer to those of other servers, and the way to them.

`FakeOffers` does what `pp_runner/page_store/offered_pages.py` and `stage_offers.py` do. Whoever
reads, reads what is there at that moment; what a page must hold follows from its hash.
"""

from array import array
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Protocol

from fault_schedules.fake_leases import FakeLeases
from fault_schedules.fake_model import FakeStage
from fault_schedules.faulty_store import Content, RightPages

from sgl_pipeline.errors import PeerLost, StoreError
from sgl_pipeline.page_hash import split_hashes
from sgl_pipeline.wire.step_order import INT32
from sgl_pipeline.wire.store_orders import OfferOrder, WithdrawPages, offer_door


class FakeOffers:
    """Those of one stage.

    Args:
        own_layers: gives the layers that the stage has now.
    """

    def __init__(self, pages: FakeStage, own_layers: Callable[[], range]) -> None:
        self._pages, self._own_layers = pages, own_layers
        self._layers = range(0)
        self._offers: dict[int, dict[bytes, int]] = {}
        self._held_back: dict[int, dict[bytes, int]] = {}
        self._withdrawn: set[int] = set()

    def obey(self, order: OfferOrder) -> None:
        """An offer is held back until `make`."""
        if isinstance(order, WithdrawPages):
            known = order.offer in self._offers or order.offer in self._held_back
            assert known, "an offer is withdrawn that was not made"
            self._held_back.pop(order.offer, None)
            self._offers.pop(order.offer, None)
            self._withdrawn.add(order.offer)
            return
        is_new = order.offer not in self._offers and order.offer not in self._held_back
        assert is_new, "an offer was made twice"
        hashes = split_hashes(order.hashes)
        self._held_back[order.offer] = dict(zip(hashes, array(INT32, order.pages), strict=True))

    def make(self) -> None:
        """Makes the offers that were held back, if there are any."""
        if not self._held_back:
            return
        self._layers = self._own_layers()
        self._offers |= self._held_back
        self._held_back.clear()

    def forget(self) -> None:
        """Ends all offers; they may be made again."""
        self._offers.clear()
        self._held_back.clear()

    def check_written(self, written: Collection[int]) -> None:
        """Asserts that none of the pages `written` is on offer."""
        for pages in (*self._offers.values(), *self._held_back.values()):
            assert {*pages.values()}.isdisjoint(written), "a page is written that a peer may read"

    def read(self, offer: int, page_hash: bytes, layer: int) -> Content | None:
        """What a page holds; None while the offer is not known. Raises StoreError where it cannot
        be read from here."""
        if (pages := self._offers.get(offer)) is None:
            if offer in self._withdrawn:
                raise StoreError(f"offer {offer} was withdrawn")
            return None
        if layer not in self._layers:
            raise StoreError(f"layer {layer} is not here")
        if page_hash not in pages:
            raise StoreError(f"a page is not part of offer {offer}")
        return self._pages.content(layer, pages[page_hash])


class OfferSite(Protocol):
    """A worker that may offer pages."""

    @property
    def is_dead(self) -> bool:
        """True if nobody answers."""

    @property
    def offers(self) -> FakeOffers | None:
        """Those of its stage; None while it has none, or hangs."""

    @property
    def leases(self) -> FakeLeases | None:
        """As `offers`."""


@dataclass(frozen=True, slots=True)
class PeerTempo:
    """Most seconds of the read of a page; how often a stream breaks, and a read never ends; how
    often the attention to a lease fails, and what share of their steps stages wait for it."""

    read_s: float
    failure_chance: float
    hang_chance: float
    lost_lease_chance: float = 0.0
    wait_share: float = 0.0


@dataclass(slots=True)
class FakePeers:
    """The workers of all servers, by the addresses at which they offer pages; those of a server
    that died are replaced by another one's. `num_read` and `num_failed` count pages and loads."""

    rng: Random
    tempo: PeerTempo = PeerTempo(0.0, 0.0, 0.0)
    right: RightPages | None = None
    sites: dict[str, OfferSite] = field(default_factory=dict)
    num_read: int = 0
    num_failed: int = 0
    num_attended: int = 0  # layers of chunks of leases

    def open(self, server: str, worker: int, site: OfferSite) -> None:
        """`site` is a worker of a server from now on."""
        self.sites[f"{server}/{offer_door(worker)}"] = site

    def read(self, address: str, offer: int, page_hash: bytes, layer: int) -> Content | None:
        """As `FakeOffers.read`; None also while the worker there does not answer."""
        site = self.sites[address]
        if site.is_dead:
            raise PeerLost(f"{address} is gone")
        if self.rng.random() < self.tempo.failure_chance:
            raise PeerLost(f"the stream to {address} broke")
        return None if site.offers is None else site.offers.read(offer, page_hash, layer)

    def hangs(self, address: str) -> bool:
        """True if a worker takes what is sent to it, and does not answer."""
        site = self.sites[address]
        return not site.is_dead and site.leases is None

    def attend(
        self, address: str, layer: int, lease: int, start: int, rows: Sequence[int]
    ) -> tuple[list[int], list[int]] | None:
        """As `FakeLeases.attend`; None also where the worker there does not answer."""
        site = self.sites[address]
        is_lost = self.rng.random() < self.tempo.lost_lease_chance
        if is_lost or site.is_dead or site.leases is None:
            return None
        self.num_attended += 1
        return site.leases.attend(layer, lease, start, rows)

    def check(self, page_hash: bytes, layer: int, content: Content) -> None:
        """Asserts that a page that has come is the one that was asked for."""
        assert self.right is not None and content == self.right.of(page_hash, layer), (
            "a page has come with the content of another one"
        )
