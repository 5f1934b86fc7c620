"""A pipeline that offers its pages and one that loads them, with real stages and sockets.

In place of the two schedulers' endpoints, a test says what is offered, and the loads that the
second scheduler orders from a store are made loads from the peer.
"""

from array import array
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
from support.tiered_pipeline import DIGEST, RULES, TieredPipeline

from sgl_pipeline.page_record import PageRecord
from sgl_pipeline.scheduling.page_hashing import prefix_hashes
from sgl_pipeline.wire.step_order import INT32
from sgl_pipeline.wire.store_orders import (
    LoadPages,
    OfferPages,
    PeerPlace,
    PeerStage,
    UseStore,
    WithdrawPages,
    offer_door,
)


class OfferingPipeline(TieredPipeline):
    """A prefill server, which saves pages to a folder besides.

    Args:
        address: of its host's port.
    """

    def __init__(
        self,
        model_path: Path,
        layer_counts: Sequence[int],
        store: Path,
        address: str,
        **arguments: Any,
    ) -> None:
        super().__init__(model_path, layer_counts, store, **arguments)
        self.address = address
        self.offers: dict[int, OfferPages] = {}

    @property
    def place(self) -> PeerPlace:
        plan = self.core.plan
        stages = tuple(
            PeerStage(f"{self.address}/{offer_door(stage)}", (layers.start, layers.stop))
            for stage, layers in enumerate(map(plan.layers_of, range(plan.num_stages)))
        )
        return PeerPlace(name="P", digest=DIGEST, stages=stages)

    def offer(self, number: int, tokens: list[int]) -> None:
        """Locks the whole pages of `tokens`, which are all cached, and offers them."""
        tree, storage = self.tier.loads._tree, self.tier._storage
        path = tree.walk(tree.root, tokens)[-1]
        assert path.is_cached
        storage.lock(path)
        self.offers[number] = OfferPages(
            number,
            array(INT32, storage.pages_of(path)).tobytes(),
            b"".join(prefix_hashes(path, tree.page_size)),
            DIGEST,
        )
        self.make_offer(number)

    def make_offer(self, number: int) -> None:
        for transfers in self.transfers:
            transfers.obey_offer(self.offers[number])

    def withdraw(self, number: int) -> None:
        for transfers in self.transfers:
            transfers.obey_offer(WithdrawPages(number))


class ReadingPipeline(TieredPipeline):
    """A decode server, which loads the pages that `peer` offers and saves none."""

    def __init__(
        self,
        model_path: Path,
        layer_counts: Sequence[int],
        store: Path,
        peer: OfferingPipeline,
        **arguments: Any,
    ) -> None:
        self.peer = peer
        rules = replace(RULES, save_share=0.0, load_share=1.0)
        super().__init__(model_path, layer_counts, store, rules=rules, **arguments)

    def obey(self, order: Any) -> None:
        if isinstance(order, UseStore):
            order = UseStore(None, (self.peer.place,) if order.place is not None else ())
        elif isinstance(order, LoadPages):
            number = next(
                number for number, offer in self.peer.offers.items() if order.hashes in offer.hashes
            )
            order = msgspec.structs.replace(order, checksums=b"", source="P", offer=number)
        super().obey(order)

    def serve_store(self) -> None:
        for transfers, mover in zip(self.transfers, self.movers, strict=True):
            for report, filled_pages in transfers.take_reports():
                mover.wrote(filled_pages, ())
                self.core.take_store_report(report)
        self.tier.broken.clear()
        offered = b"".join(offer.hashes for offer in self.peer.offers.values())
        for lookup in self.tier.take_lookups():
            found = []
            for page_hash in lookup.hashes:
                if page_hash not in offered:
                    break
                found.append(self._record(page_hash))
            self.tier.found(lookup.number, found)

    def _record(self, page_hash: bytes) -> PageRecord:
        """Its sizes and checksums are of no use here."""
        num_layers = self.core.plan.num_layers
        return PageRecord(page_hash, (1,) * num_layers, bytes(4 * num_layers))
