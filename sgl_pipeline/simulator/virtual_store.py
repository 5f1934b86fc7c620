"""A store of pages in virtual time: what it has, and when its answers and transfers end.

It stands for the store (`kv_store/`) and for the threads of the stages that use it
(`pp_runner/page_store/`). Each stage has a queue for loads and one for saves. They run beside its
steps and take nothing from them: orders are taken and reports sent between two steps only.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from sgl_pipeline.page_hash import split_hashes
from sgl_pipeline.page_record import PageRecord
from sgl_pipeline.pipeline.pipeline_core import PipelineCore
from sgl_pipeline.scheduling.page_wishes import Lookup
from sgl_pipeline.simulator.page_transfers import PageOrder, TransferQueue, reports_of
from sgl_pipeline.stage_plan import StagePlan
from sgl_pipeline.wire.store_orders import (
    LoadPages,
    PagesLoaded,
    PagesSaved,
    SavePages,
    StorePlace,
    StoreReport,
    UseStore,
)

Eviction = Literal["lru", "fifo"]

# For `KvTier.use`; the virtual stages go by `StoreCosts` alone.
SIMULATED_PLACE = StorePlace(backend="simulated", address="", digest="", save_bytes_per_s=1)

_CHECKSUM_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreCosts:
    """The time that a store takes, and its room.

    Each stage reads `read_bytes_per_s` and writes `write_bytes_per_s`, both at a time; it saves no
    more than `save_bytes_per_s`, as the server's rule. `latency_s` passes before an answer and
    before the first byte of a transfer. `capacity_bytes` is for pages that are committed; with
    `eviction` "lru" those make room that were found or committed least recently, with "fifo" those
    that were committed first.
    """

    capacity_bytes: float
    read_bytes_per_s: float
    write_bytes_per_s: float
    save_bytes_per_s: float
    latency_s: float = 0.0
    eviction: Eviction = "lru"


class VirtualStore:
    """A store that is empty at first, and its use by one pipeline at a time.

    Args:
        layer_page_bytes: of one layer of one page.
        num_layers: of the model.
        transit_s: what an order and its report are on their way, together.
    """

    look_s = 0.1  # as the server, for requests that have waited too long

    def __init__(
        self,
        costs: StoreCosts,
        layer_page_bytes: int,
        num_layers: int,
        transit_s: float = 0.0,
    ) -> None:
        self._costs, self._transit_s = costs, transit_s
        self._layer_page_bytes = layer_page_bytes
        self._sizes = (layer_page_bytes,) * num_layers
        self._checksums = bytes(_CHECKSUM_BYTES * num_layers)
        # The pages that are committed, the next to be evicted first.
        self._pages: OrderedDict[bytes, None] = OrderedDict()
        self.num_evicted = 0
        self._questions: deque[tuple[float, Lookup]] = deque()
        self._loads: dict[int, TransferQueue] = {}
        self._saves: dict[int, TransferQueue] = {}

    @property
    def held_bytes(self) -> int:
        """Bytes of the pages that are committed."""
        return len(self._pages) * self._layer_page_bytes * len(self._sizes)

    @property
    def is_awaited(self) -> bool:
        """True if a lookup or a load is on its way: a request may be waiting for it."""
        return bool(self._questions) or any(queue.transfers for queue in self._loads.values())

    @property
    def is_open(self) -> bool:
        """True if anything is on its way."""
        return self.is_awaited or any(queue.transfers for queue in self._saves.values())

    def next_event_s(self) -> float:
        """The moment of the next answer or report, if no step is sent until then."""
        answer_s = self._questions[0][0] if self._questions else float("inf")
        done_s = (queue.transfers[0].done_s for queue in self._queues() if queue.transfers)
        return min(answer_s, min(done_s, default=float("inf")) + self._transit_s)

    def exchange(self, core: PipelineCore, now_s: float) -> None:
        """Gives `core` what has come by now, and does what it asks for."""
        tier = core.scheduler.tier
        for report in self._take_reports(now_s):
            core.take_store_report(report)
        self._commit(tier.commits)
        tier.commits.clear()
        for page_hash in tier.broken:
            self._pages.pop(page_hash, None)
        tier.broken.clear()
        while self._questions and self._questions[0][0] <= now_s:
            lookup = self._questions.popleft()[1]
            tier.found(lookup.number, self._look_up(lookup.hashes))
        for lookup in tier.take_lookups():
            self._questions.append((now_s + self._costs.latency_s, lookup))

    def take(self, order: PageOrder, plan: StagePlan, taken_s: Sequence[float]) -> None:
        """An order to all stages, which stage `s` takes at `taken_s[s]`."""
        if isinstance(order, UseStore):
            self._loads.clear()
            self._saves.clear()
            return
        assert isinstance(order, LoadPages | SavePages), "no other server reads from this one"
        hashes = split_hashes(order.hashes)
        # A page that is evicted while it is read is read to its end.
        num_readable = self._num_readable(hashes) if isinstance(order, LoadPages) else 0
        for stage, moment_s in enumerate(taken_s):
            layers = plan.layers_of(stage)
            if isinstance(order, LoadPages):
                self._load(order, stage, len(layers), num_readable, len(hashes), moment_s)
            else:
                self._save(order, stage, layers, len(hashes), moment_s)

    def ran(self, stage: int, start_s: float, end_s: float) -> None:
        """A step has run on a stage, which sends no report meanwhile."""
        for queues in (self._loads, self._saves):
            if stage in queues:
                queues[stage].put_off(start_s, end_s)

    def _load(
        self,
        order: LoadPages,
        stage: int,
        num_layers: int,
        num_readable: int,
        num_pages: int,
        taken_s: float,
    ) -> None:
        num_bytes = num_readable * num_layers * self._layer_page_bytes
        busy_s = self._costs.latency_s + num_bytes / self._costs.read_bytes_per_s
        report = PagesLoaded(
            stage=stage,
            transfer=order.transfer,
            num_pages=num_readable,
            num_bytes=num_bytes,
            busy_s=busy_s,
            is_broken=num_readable < num_pages,
            message="" if num_readable == num_pages else "evicted",
        )
        self._loads.setdefault(stage, TransferQueue()).add(report, taken_s, busy_s)

    def _save(
        self, order: SavePages, stage: int, layers: range, num_pages: int, taken_s: float
    ) -> None:
        costs, num_bytes = self._costs, num_pages * len(layers) * self._layer_page_bytes
        report = PagesSaved(
            stage=stage,
            transfer=order.transfer,
            num_pages=num_pages,
            layers=(layers.start, layers.stop),
            sizes=self._sizes[layers.start : layers.stop],
            checksums=bytes(_CHECKSUM_BYTES * num_pages * len(layers)),
            busy_s=costs.latency_s + num_bytes / costs.write_bytes_per_s,
        )
        rate = min(costs.write_bytes_per_s, costs.save_bytes_per_s)
        seconds = costs.latency_s + num_bytes / rate
        self._saves.setdefault(stage, TransferQueue()).add(report, taken_s, seconds)

    def _take_reports(self, now_s: float) -> list[StoreReport]:
        """The reports that have arrived by `now_s`, in the sequence of their ends."""
        queues = self._queues()
        return reports_of([one for each in queues for one in each.take_due(now_s, self._transit_s)])

    def _queues(self) -> Iterator[TransferQueue]:
        yield from self._loads.values()
        yield from self._saves.values()

    def _look_up(self, hashes: Sequence[bytes]) -> list[PageRecord]:
        """The records of the pages up to the first that is missing; this is a use of them."""
        found = hashes[: self._num_readable(hashes)]
        if self._costs.eviction == "lru":
            # The end of a prefix is worth nothing without its beginning: it goes first.
            for page_hash in reversed(found):
                self._pages.move_to_end(page_hash)
        return [PageRecord(page_hash, self._sizes, self._checksums) for page_hash in found]

    def _num_readable(self, hashes: Sequence[bytes]) -> int:
        """Number of pages up to the first that the store does not have."""
        missing = (place for place, one in enumerate(hashes) if one not in self._pages)
        return next(missing, len(hashes))

    def _commit(self, records: Iterable[PageRecord]) -> None:
        for record in records:
            self._pages[record.page_hash] = None
        while self.held_bytes > self._costs.capacity_bytes:
            self._pages.popitem(last=False)
            self.num_evicted += 1
