"""The pages of prefill servers as the stages of decode servers read them, in virtual time.

A load brings pages of one room over the link, which occupies both of its ends. What it reads is
readable once the prefill server's stages have obeyed the offer, each between two of its steps.
Loads run beside the steps of the stages and take nothing from them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from sgl_pipeline.page_hash import split_hashes
from sgl_pipeline.simulator.page_transfers import TransferQueue, reports_of
from sgl_pipeline.stage_plan import StagePlan
from sgl_pipeline.wire.store_orders import (
    LoadPages,
    OfferOrder,
    OfferPages,
    PagesLoaded,
    StoreReport,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerLink:
    """The network between two servers: `latency_s` each way, `bytes_per_s` at each end."""

    latency_s: float
    bytes_per_s: float


@dataclass(slots=True)
class VirtualOffers:
    """The pages that a prefill server's stages let others read. Its end of the link, which carries
    one transfer at a time, is free at `free_s`."""

    free_s: float = 0.0
    # By the number of the offer: when each stage begins to offer the pages of its layers.
    _offers: dict[int, list[tuple[range, float]]] = field(default_factory=dict)

    def take(self, order: OfferOrder, plan: StagePlan, taken_s: Sequence[float]) -> None:
        """An order to all stages, which stage `s` takes at `taken_s[s]`."""
        if isinstance(order, OfferPages):
            layers = map(plan.layers_of, range(plan.num_stages))
            self._offers[order.offer] = list(zip(layers, taken_s, strict=True))
        else:
            del self._offers[order.offer]

    def readable_s(self, offer: int, layers: range) -> float:
        """The moment from which all `layers` of an offer's pages can be read."""
        return max(
            moment_s
            for own, moment_s in self._offers[offer]
            if own.start < layers.stop and layers.start < own.stop
        )


@dataclass(slots=True)
class PeerReads:
    """The loads of a decode server's stages from `sources`, by their names; `free_s` as there."""

    link: PeerLink
    layer_page_bytes: int
    sources: Mapping[str, VirtualOffers]
    free_s: float = 0.0
    loaded_bytes: int = 0
    _loads: dict[int, TransferQueue] = field(default_factory=dict)

    @property
    def is_under_way(self) -> bool:
        """True if a load is."""
        return any(queue.transfers for queue in self._loads.values())

    def next_report_s(self) -> float:
        """The moment of the next report, if no step is sent until then; infinity if there is
        none."""
        done_s = (queue.transfers[0].done_s for queue in self._loads.values() if queue.transfers)
        return min(done_s, default=float("inf"))

    def take_reports(self, now_s: float) -> list[StoreReport]:
        """The reports of stages by `now_s`, in the sequence of their moments."""
        queues = self._loads.values()
        return reports_of([one for queue in queues for one in queue.take_due(now_s)])

    def load(
        self, order: LoadPages, plan: StagePlan, taken_s: Sequence[float], *, crosses: bool
    ) -> None:
        """An order to all stages, which stage `s` takes at `taken_s[s]`. Unless the pages cross,
        they stay where they are, and are there at once."""
        num_pages = len(split_hashes(order.hashes))
        for stage, moment_s in enumerate(taken_s):
            layers, num_bytes, done_s = plan.layers_of(stage), 0, moment_s
            if crosses:
                num_bytes = num_pages * len(layers) * self.layer_page_bytes
                done_s = self._read(order, layers, num_bytes, moment_s)
            report = PagesLoaded(
                stage=stage,
                transfer=order.transfer,
                num_pages=num_pages,
                num_bytes=num_bytes,
                busy_s=done_s - moment_s,
            )
            queue = self._loads.setdefault(stage, TransferQueue())
            queue.add_until(report, max(done_s, queue.free_s))

    def forget(self) -> None:
        """All loads are cancelled."""
        self._loads.clear()

    def ran(self, stage: int, start_s: float, end_s: float) -> None:
        """As `PagePlace.ran`."""
        if stage in self._loads:
            self._loads[stage].put_off(start_s, end_s)

    def _read(self, order: LoadPages, layers: range, num_bytes: int, asked_s: float) -> float:
        """The moment at which a stage has what it asks for at `asked_s`. A load that waits for an
        offer does not keep others from the link."""
        source, link = self.sources[order.source], self.link
        begun_s = max(asked_s + link.latency_s, source.free_s, self.free_s)
        seconds = num_bytes / link.bytes_per_s
        source.free_s = self.free_s = begun_s + seconds
        self.loaded_bytes += num_bytes
        begun_s = max(begun_s, source.readable_s(order.offer, layers))
        return begun_s + seconds + link.latency_s
