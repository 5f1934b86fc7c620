"""The leases of a fake stage, and the attention of fake stages over the pages of others.

`FakeLeases` does what `pp_runner/lent_attention/stage_leases.py` does, `FakeAttention` what
`offloaded_attention.py` does there, at the latest moment at which it could.
"""

from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fault_schedules.fake_model import FakeStage

from sgl_pipeline.wire.lease_orders import EndLease, LeaseOrder, OffloadedWork, PagesLent
from sgl_pipeline.wire.step_order import INT32, MirroredChunk
from sgl_pipeline.wire.store_orders import PeerPlace

if TYPE_CHECKING:
    from fault_schedules.fake_offers import FakePeers

# A stage of a peer that does not answer costs its leases after this time.
ANSWER_LIMIT_S = 2.0


@dataclass(slots=True, eq=False)
class _Lease:
    """Pages, of which those before `first_own` are the prompt's; the others of each layer hold the
    positions before `ends[layer]`."""

    pages: list[int]
    first_own: int
    ends: dict[int, int] = field(default_factory=dict)

    @property
    def own(self) -> list[int]:
        return self.pages[self.first_own :]


class FakeLeases:
    """Those of one stage.

    Args:
        own_layers: gives the layers that the stage has now.
    """

    def __init__(self, stage: int, pages: FakeStage, own_layers: Callable[[], range]) -> None:
        self._stage, self._pages, self._own_layers = stage, pages, own_layers
        self._layers = range(0)
        self._leases: dict[int, _Lease] = {}
        self._held_back: dict[int, _Lease] = {}
        self._begun: list[PagesLent] = []

    def obey(self, order: LeaseOrder) -> None:
        """A lease is held back until `make`."""
        if isinstance(order, EndLease):
            known = order.lease in self._leases or order.lease in self._held_back
            assert known, "a lease is ended that was not made"
            self._held_back.pop(order.lease, None)
            self._leases.pop(order.lease, None)
            return
        is_new = order.lease not in self._leases and order.lease not in self._held_back
        assert is_new, "a lease was made twice"
        lease = _Lease([*array(INT32, order.pages)], order.first_own)
        assert lease.own, "a lease has no page to write into"
        for other in self._all():
            assert {*lease.own}.isdisjoint(other.pages), "a page is lent that another lease has"
            assert {*other.own}.isdisjoint(lease.pages), "a page is lent that a peer writes"
        self._held_back[order.lease] = lease

    def make(self) -> None:
        """Begins the leases that were held back."""
        if not self._held_back:
            return
        self._layers = self._own_layers()
        self._leases |= self._held_back
        self._begun += [PagesLent(self._stage, lease) for lease in self._held_back]
        self._held_back.clear()

    def take_reports(self) -> list[PagesLent]:
        """Of the leases that have begun since the last call."""
        begun, self._begun = self._begun, []
        return begun

    def forget(self) -> None:
        """Ends all leases; no report comes."""
        self._leases.clear()
        self._held_back.clear()
        self._begun.clear()

    def check_written(self, written: Collection[int]) -> None:
        """Asserts that no peer may use any of the pages `written`."""
        for lease in self._all():
            assert {*lease.pages}.isdisjoint(written), "a page is written that is lent"

    def _all(self) -> list[_Lease]:
        return [*self._leases.values(), *self._held_back.values()]

    def attend(
        self, layer: int, lease: int, start: int, rows: Sequence[int]
    ) -> tuple[list[int], list[int]] | None:
        """Runs a layer for rows from `start` on: what becomes of them, and the fingerprints of the
        whole request. None: the lease cannot be used here."""
        found = self._leases.get(lease)
        if found is None or layer not in self._layers:
            return None
        size, end = self._pages.page_size, start + len(rows)
        own_start = found.first_own * size
        assert own_start <= start and end <= len(found.pages) * size, "rows of no page of its own"
        if start > found.ends.get(layer, own_start):
            return None  # rows before these were lost on their way
        found.ends[layer] = end
        outgoing = self._pages.extend(layer, found.pages, start, rows)
        return outgoing, self._pages.fingerprints(layer, found.pages, 0, end)


class FakeAttention:
    """The attention of one stage to rows of leases."""

    def __init__(self, peers: "FakePeers") -> None:
        self._peers = peers
        self._places: dict[str, PeerPlace] = {}
        self._lost: set[int] = set()
        self._fingerprints: dict[int, list[int]] = {}

    def use(self, places: Iterable[PeerPlace]) -> None:
        """Finds leases at these peers from now on, and at no others."""
        self._places = {place.name: place for place in places}

    def wait_s(self, chunks: Iterable[MirroredChunk], layers: Iterable[int]) -> float:
        """How long a step waits for stages that hang."""
        hangs = any(
            self._peers.hangs(address)
            for chunk in chunks
            for address in self._addresses(chunk, layers)
        )
        return ANSWER_LIMIT_S * self._peers.rng.random() if hangs else 0.0

    def begin(self) -> None:
        """A step begins."""
        self._lost.clear()
        self._fingerprints.clear()

    def run(self, layer: int, chunk: MirroredChunk, rows: Sequence[int]) -> list[int]:
        """What becomes of the rows of a chunk in a layer: zeros where its lease is lost."""
        lease = chunk.request.lease
        assert lease is not None
        found = None
        if lease.number not in self._lost:
            for address in self._addresses(chunk, (layer,)):
                found = self._peers.attend(address, layer, lease.number, chunk.start, rows)
        if found is None:
            self._lost.add(lease.number)
            found = [0] * len(rows), [0] * (chunk.start + chunk.length)
        outgoing, self._fingerprints[lease.number] = found
        return outgoing

    def fingerprints(self, chunk: MirroredChunk) -> list[int]:
        """Those of the request in the layer that ran last."""
        assert chunk.request.lease is not None
        return self._fingerprints[chunk.request.lease.number]

    def work(
        self, chunks: Sequence[MirroredChunk], num_layers: int, compute_s: float
    ) -> tuple[OffloadedWork | None, tuple[int, ...]]:
        """What the stage says of the step, and the leases that it has lost."""
        remote = [one for one in chunks if one.request.lease is not None]
        if not remote:
            return None, ()
        rng, tempo = self._peers.rng, self._peers.tempo
        local_tokens = sum(one.start for one in chunks if one.request.lease is None)
        work = OffloadedWork(
            num_layers,
            local_tokens,
            sum(one.start + 1 for one in remote),
            rng.random() * compute_s,
            rng.random() * compute_s,
            rng.random() * compute_s,
            tempo.wait_share * compute_s,
        )
        return work, tuple(sorted(self._lost))

    def _addresses(self, chunk: MirroredChunk, layers: Iterable[int]) -> Iterator[str]:
        """The stages that have `layers` of the chunk's lease."""
        lease = chunk.request.lease
        place = None if lease is None else self._places.get(lease.source)
        for stage in () if place is None else place.stages:
            if any(layer in range(*stage.layers) for layer in layers):
                yield stage.address
