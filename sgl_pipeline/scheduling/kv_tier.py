"""Pages that outlive the pool, or cross to another server's: what is saved to a store, what comes
back before it is needed, and the prompts that one server computes for another.

The face of `page_wishes.py`, `page_loads.py`, `page_saves.py`, `held_pages.py`, `lent_pages.py` and
`arrivals_from_peers.py` to `PipelineCore`. Off until `use`, `compute_for_peers` or `read_peers`:
then it costs nothing. Transfers are ordered in the stream of orders, and only while no layer
moves and no stage is taken over: whatever interrupts them cancels them all here at once, and
`UseStore`, the next order, in the stages. So a page that is taken back is never given out before
the order that ends its transfer. Pure.
"""

from collections.abc import Iterator, Sequence

from sgl_pipeline.args import ACCOUNTINGS
from sgl_pipeline.errors import ProtocolError
from sgl_pipeline.page_record import PageRecord
from sgl_pipeline.requests import Request
from sgl_pipeline.scheduling.arrivals_from_peers import ArrivalsFromPeers
from sgl_pipeline.scheduling.held_pages import HeldPages
from sgl_pipeline.scheduling.lent_pages import LentPages
from sgl_pipeline.scheduling.page_loads import PageLoad, PageLoads
from sgl_pipeline.scheduling.page_run import PageRun
from sgl_pipeline.scheduling.page_saves import PageSaves
from sgl_pipeline.scheduling.page_wishes import Lookup, PageWishes
from sgl_pipeline.scheduling.radix_demand import RadixDemand
from sgl_pipeline.scheduling.radix_storage import RadixStorage
from sgl_pipeline.scheduling.radix_tree import RadixNode, RadixTree
from sgl_pipeline.scheduling.recovery_log import RecoveryLog
from sgl_pipeline.scheduling.request_pages import RequestPages
from sgl_pipeline.scheduling.running_requests import RunningRequests
from sgl_pipeline.scheduling.tier_counts import TierCounts
from sgl_pipeline.scheduling.tier_rules import TierRules
from sgl_pipeline.scheduling.waiting_queue import WaitingQueue
from sgl_pipeline.stage_plan import StagePlan
from sgl_pipeline.step_work import StepTimes
from sgl_pipeline.wire.lease_orders import LeaseOrder
from sgl_pipeline.wire.store_orders import (
    OfferOrder,
    PagesLoaded,
    PeerPlace,
    SavePages,
    StoreOrder,
    StorePlace,
    StoreReport,
    UseStore,
)

# Transfers stop for a while when no step has run for so long, and a request lacks only pages: a
# store that hangs must not keep any.
STARVED_S = 1.0
REST_S = 10.0
_NOTHING = UseStore(None)


class KvTier:
    """The store of one `StepScheduler`, whose parts these are.

    A driver takes `commits`, `broken` (hashes of pages whose records are worthless) and
    `ended_rooms` (requests with a room that have ended) and empties them.
    """

    def __init__(
        self,
        tree: RadixTree,
        demand: RadixDemand,
        storage: RadixStorage,
        pages: RequestPages,
        waiting: WaitingQueue,
        running: RunningRequests,
        log: RecoveryLog | None,
    ) -> None:
        self.counts = TierCounts()
        self.commits: list[PageRecord] = []
        self.broken: list[bytes] = []
        self.ended_rooms: list[Request] = []
        self.rules = TierRules()
        self._storage, self._pages, self._waiting = storage, pages, waiting
        self._running, self._log = running, log
        self.wishes = PageWishes(storage, waiting, self.counts)
        self.held = HeldPages(storage, pages)
        self.lent = LentPages(self.held, pages, running)
        self.arrivals = ArrivalsFromPeers(storage, waiting, running, self.wishes)
        self.loads = PageLoads(
            tree,
            demand,
            storage,
            pages,
            waiting,
            self.counts,
            self._on_loaded,
            self.broken,
            self.wishes,
            self.arrivals,
        )
        self.saves = PageSaves(storage, tree.page_size, self.counts, self.commits)
        self._place: StorePlace | None = None
        self._peers: tuple[PeerPlace, ...] = ()
        # What the stages use after the orders so far, and whether they must hear of it anew.
        self._stages_use = _NOTHING
        self._is_stale = False
        self._next_transfer = 0
        self._first_transfer = 0  # reports of earlier ones are late
        self._now_s = 0.0
        self._starves_since_s: float | None = None
        self._rests_until_s = float("-inf")

    @property
    def is_on(self) -> bool:
        """True if there is a store."""
        return self._place is not None

    def use(self, place: StorePlace | None, rules: TierRules) -> None:
        """Uses the store at `place` from the next order on, by `rules`; None: none. It may be the
        one that is in use, after it was cleared. What a driver has not taken is of the store
        before."""
        self._place = None
        self.interrupt()
        self.commits.clear()
        self.broken.clear()
        self._rests_until_s = float("-inf")
        self._place, self.rules = place, rules
        self.saves.begin(rules.write_policy)
        self._storage.watch = self if place is not None else None
        self._listen()

    def compute_for_peers(self, digest: str, most_share: float) -> None:
        """Holds the prompts of requests with a room for other servers, as `HeldPages.begin`."""
        self.held.begin(digest, most_share)

    def read_peers(self, reserved_tokens: int) -> None:
        """Holds requests with a room until their prompts are here, as `ArrivalsFromPeers.begin`."""
        self.arrivals.begin(reserved_tokens)
        self._listen()

    def use_peers(self, peers: tuple[PeerPlace, ...]) -> None:
        """Loads from `peers` from the next order on, and from no others."""
        if peers != self._peers:
            self._peers = peers
            self.interrupt()

    def _listen(self) -> None:
        is_on = self.is_on or self.arrivals.is_on
        self._storage.spares_wanted = is_on
        self._waiting.on_add = self._on_queued if is_on else None

    def interrupt(self) -> None:
        """Cancels all transfers and offers. Requests that wait for a load are looked up again, and
        what is still held is offered again."""
        requests = self.wishes.cancel() + self.loads.cancel()
        self.saves.cancel()
        self.held.forget_offers()
        self.lent.forget()
        self._first_transfer = self._next_transfer
        self._is_stale = True
        self._starves_since_s = None
        for request in requests:
            self._on_queued(request)

    def lose_stages(self) -> None:
        """As `interrupt`; what is held is lost with a stage."""
        self.held.lose_all()
        self.interrupt()

    def stages_begin_anew(self) -> None:
        """The stages use no store and have no offers: a new stream of orders begins."""
        self._stages_use, self._is_stale = _NOTHING, False
        self.held.has_offers = self.lent.has_leases = False

    @property
    def _gives_any(self) -> bool:
        """True if the stages know of an offer or a lease."""
        return self.held.has_offers or self.lent.has_leases

    @property
    def only_saves(self) -> bool:
        """True if saves hold pages, and something that could be loaded is not."""
        return bool(
            self.wishes.has_found and not self.loads.num_under_way and self.saves.saving_pages
        )

    # Orders, reports

    def next_orders(
        self,
        now_s: float,
        times: StepTimes | None,
        *,
        may_transfer: bool,
    ) -> Iterator[StoreOrder | OfferOrder | LeaseOrder]:
        """Orders that precede the next step.

        Args:
            times: by present knowledge; None: nothing is known.
            may_transfer: no layer moves, and no stage is taken over.
        """
        self._now_s = now_s
        self._rest_if_starved(now_s)
        wanted = _NOTHING
        if may_transfer and now_s >= self._rests_until_s:
            wanted = UseStore(self._place, self._peers)
        if self._note_wanted(wanted, may_transfer=may_transfer):
            self._stages_use = wanted
            self.held.has_offers = self.lent.has_leases = False
            yield wanted
        self._is_stale = False
        if may_transfer:
            yield from self.held.next_orders()
            yield from self.lent.next_orders()
        if self.is_on:
            self.wishes.give_up_late(now_s, self.rules)
            self.loads.give_up_late(now_s, self.rules)
        if wanted == _NOTHING:
            return
        yield from self.loads.end_orphans()
        owed = self._owed()
        yield from self.loads.next_orders(
            now_s, self.rules, times, len(self._running), owed, self._transfer
        )
        if self.is_on:
            yield from self._save_orders(owed)

    def _note_wanted(self, wanted: UseStore, *, may_transfer: bool) -> bool:
        """Cancels what runs by other orders. True if the stages are to be told what is `wanted`."""
        if wanted != self._stages_use or (self._gives_any and not may_transfer):
            # Where the stages use none and offer nothing, nothing is lost, and lookups go on.
            has_any = self._stages_use != _NOTHING or self._gives_any
            if has_any and not self._is_stale:
                self.interrupt()
            self._is_stale = True
        knows_any = wanted != _NOTHING or self._stages_use != _NOTHING or self._gives_any
        return self._is_stale and knows_any

    def take(self, report: StoreReport, plan: StagePlan) -> None:
        """Applies a stage's report; that of a cancelled transfer has no effect. Raises
        ProtocolError, without any other effect, for one that no stage of `plan` could send now."""
        if report.transfer < self._first_transfer:
            return  # perhaps of another plan
        if report.stage >= plan.num_stages:
            raise ProtocolError(f"stage {report.stage} of {plan.num_stages} reported pages")
        if isinstance(report, PagesLoaded):
            self.loads.take(report, plan.num_stages)
            return
        own = plan.layers_of(report.stage)
        if report.layers != (own.start, own.stop):
            raise ProtocolError(
                f"stage {report.stage} saved layers {report.layers}, it has {own.start} to "
                f"{own.stop - 1}"
            )
        self.saves.take(report, plan.num_stages)

    def note_starved(self, now_s: float) -> None:
        """Notes that no step runs, and that a request which could lacks pages."""
        if self._starves_since_s is None:
            self._starves_since_s = now_s

    @property
    def is_starved(self) -> bool:
        """True if this was so when a step was last looked for."""
        return self._starves_since_s is not None

    def note_step(self) -> None:
        """Notes that a step begins."""
        self._starves_since_s = None

    # Lookups

    def take_lookups(self) -> list[Lookup]:
        """The next questions for the store; the answers go to `found`."""
        return self.wishes.take_lookups(self.rules.look_ahead - self.loads.num_under_way)

    def found(self, number: int, records: Sequence[PageRecord]) -> None:
        """The store's answer to a lookup: the records of its first pages."""
        self.wishes.answered(number, records)

    # What the scheduler's parts report

    def on_cached(self, node: RadixNode) -> None:
        """`node` has just been cached."""
        self.saves.cached(node, self.rules.write_policy)

    def on_evicted(self, node: RadixNode, run: PageRun) -> None:
        """`node` is about to lose `run`."""
        self.saves.evicted(node, run)

    def on_hit(self, request: Request) -> None:
        """A request has been admitted, and uses what is cached of its prefix."""
        self.arrivals.left(request)
        if self.is_on and request.lease is None:
            self.saves.hit(self._pages.hit_of(request), self.rules.write_policy)

    def on_room_ended(self, request: Request, end: RadixNode | None) -> None:
        """A request with a room has ended; `end` is the end of what is cached of it, where it ran.
        A prompt that was computed is held from now on, before its pages could be evicted."""
        assert request.room is not None and request.finish is not None
        self.arrivals.left(request)
        if self.held.is_on and end is not None and request.finish.kind != "abort":
            self.held.hold(request.room.number, end, self._owed())
        self.ended_rooms.append(request)

    def waiting_tokens(self) -> tuple[int, int, int]:
        """Prompt tokens of waiting requests: cached or computed for another request, to load, to
        compute."""
        loading = self.loads.loading_tokens
        to_compute = self._waiting.tokens_to_compute(ACCOUNTINGS["radix"])
        return max(0, self._waiting.num_tokens - loading - to_compute), loading, to_compute

    def load_of(self, request: Request) -> PageLoad | None:
        """The load that the waiting `request` waits for."""
        node = self._waiting.awaited_node(request)
        return None if node is None else self.loads.load_of(node)

    # Inside

    def _rest_if_starved(self, now_s: float) -> None:
        since_s = self._starves_since_s
        if since_s is None or now_s - since_s < STARVED_S:
            return
        self._starves_since_s = None
        if self.loads.loading_pages or self.saves.saving_pages:
            self._rests_until_s = now_s + REST_S

    def _on_queued(self, request: Request) -> None:
        if self.arrivals.queued(request) or not self.is_on:
            return
        self.wishes.queued(request, self.rules, max(self._now_s, request.arrival_s))

    def _on_loaded(self, load: PageLoad, end: RadixNode, pages: list[int]) -> None:
        if not load.source:
            self.saves.loaded(end, len(pages))
        if self._log is not None:
            self._log.fill(pages)

    def _owed(self) -> set[int]:
        """Pages that some stage must compute again before anything reads them."""
        return set() if self._log is None or not self._log.owes else self._log.all_owed()

    def _transfer(self) -> int:
        self._next_transfer += 1
        return self._next_transfer - 1

    def _save_orders(self, owed: set[int]) -> Iterator[SavePages]:
        most = int(self.rules.save_share * self._pages.num_pages)
        if self.rules.write_policy == "write_back" and self._pages.num_free < most:
            self.saves.save_before_eviction()
        yield from self.saves.next_orders(owed, most - self.saves.saving_pages, self._transfer)
