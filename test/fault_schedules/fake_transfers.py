"""What a fake worker's orders about stored and offered pages do, beside its steps."""

from array import array
from collections import Counter, deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from random import Random

from fault_schedules.fake_leases import FakeLeases
from fault_schedules.fake_model import FakeStage
from fault_schedules.fake_offers import FakeOffers, FakePeers
from fault_schedules.fake_peer_reads import FakePeerReads
from fault_schedules.fake_session import FakeSession
from fault_schedules.fake_store_session import After, FakeStoreSession
from fault_schedules.faulty_store import SLOT_BYTES, Content, FaultyStore

from sgl_pipeline.errors import BrokenObject, StoreError
from sgl_pipeline.pp_runner.page_store.transfer_jobs import (
    PageTransfer,
    TransferJobs,
    page_transfer,
)
from sgl_pipeline.stage_plan import StagePlan
from sgl_pipeline.wire.lease_orders import EndLease, LeaseOrder, LendPages, PagesLent
from sgl_pipeline.wire.store_orders import (
    UINT32,
    EndLoad,
    OfferOrder,
    OfferPages,
    PagesLoaded,
    PagesSaved,
    StoreOrder,
    StorePlace,
    StoreReport,
    UseStore,
    WithdrawPages,
)


@dataclass(slots=True)
class FakeStores:
    """The stores that there are, by their addresses. `cut_off` counts the open transfers that each
    kind of interrupt has ended."""

    rng: Random
    by_address: dict[str, FaultyStore] = field(default_factory=dict)
    cut_off: Counter[str] = field(default_factory=Counter)

    def at(self, place: StorePlace) -> FaultyStore:
        return self.by_address[place.address]


class FakeTransfers:
    """What `pp_runner/page_store/page_transfers.py` is to a stage.

    Args:
        num_pages: of the pool.
        plan: gives that of the newest steps.
        may_start: whether pages of the plan's layers are all here; until then transfers and offers
            wait.
        after: runs a call later, unless the worker has died.
        has_news: called when `take_reports` has something.
    """

    def __init__(
        self,
        stores: FakeStores,
        peers: FakePeers,
        stage: int,
        pages: FakeStage,
        num_pages: Callable[[], int],
        plan: Callable[[], StagePlan],
        may_start: Callable[[], bool],
        now_s: Callable[[], float],
        after: After,
        has_news: Callable[[], None],
    ) -> None:
        self._stores, self._peers = stores, peers
        self._stage, self._pages, self._num_pages = stage, pages, num_pages
        self._plan, self._may_start = plan, may_start
        self._now_s, self._after, self._has_news = now_s, after, has_news
        self.offers = FakeOffers(pages, self._own_layers)
        self.leases = FakeLeases(stage, pages, self._own_layers)
        self._use = UseStore(None)
        self._sessions: dict[str, FakeSession] = {}  # by source
        self._unanswered: dict[int, PageTransfer] = {}
        self._held: deque[PageTransfer] = deque()
        self._done: deque[StoreReport] = deque()

    def obey(self, order: StoreOrder | OfferOrder | LeaseOrder) -> None:
        if isinstance(order, UseStore):
            self.cancel("a store" if order.place is not None else "no store")
            self._use = order
            self._begin_sessions()
            return
        if isinstance(order, OfferPages | WithdrawPages):
            self.offers.obey(order)
            self._start_held()
            return
        if isinstance(order, LendPages | EndLease):
            self.leases.obey(order)
            self._start_held()
            return
        if isinstance(order, EndLoad):
            self._end_load(order.transfer)
            return
        job = page_transfer(order, self._num_pages(), self._plan().num_layers)
        assert job.source in self._sessions, "a transfer was ordered, and its source is not in use"
        taken = {page for one in self._unanswered.values() if one.is_load for page in one.pages}
        assert taken.isdisjoint(job.pages), "a page is in a transfer while another one fills it"
        if job.is_load:
            self.offers.check_written(job.pages)
            self.leases.check_written(job.pages)
        self._unanswered[job.transfer] = job
        self._held.append(job)
        self._start_held()

    def take_reports(self) -> list[tuple[StoreReport | PagesLent, tuple[int, ...]]]:
        """The reports to send now, each with the pages that its load has filled."""
        self._start_held()
        ended = [self._answer(self._done.popleft()) for _ in range(len(self._done))]
        return [*ended, *((begun, ()) for begun in self.leases.take_reports())]

    def refuse_open(self, reason: str) -> list[StoreReport]:
        """Gives up what is under way, and the reports to send on it, and forgets all offers; later
        orders are obeyed."""
        sessions, jobs = {**self._sessions}, [*self._unanswered.values()]
        self._end_sessions(reason)
        self._begin_sessions()
        failure = StoreError(reason)
        return [
            self._loaded(sessions[job.source], job, 0, 0.0, failure)
            if job.is_load
            else self._saved(sessions[job.source], job, array(UINT32), 0.0, failure)
            for job in jobs
        ]

    def cancel(self, reason: str) -> None:
        """Forgets the store, all peers, transfers and offers."""
        self._use = UseStore(None)
        self._end_sessions(reason)

    def check_step(self, read: Collection[int], written: Collection[int]) -> None:
        """Asserts that a step that is about to run leaves the pages of open transfers alone, and
        writes none that a peer may read."""
        for job in self._unanswered.values():
            pages = {*job.pages}
            assert not job.is_load or pages.isdisjoint(read), "a page that is loaded is read"
            assert pages.isdisjoint(written), "a page in a transfer is written by a step"
        self.offers.check_written(written)
        self.leases.check_written(written)

    def _end_load(self, transfer: int) -> None:
        """A load from a peer is wanted no more."""
        if (job := self._unanswered.get(transfer)) is None:
            return
        session = self._sessions[job.source]
        assert isinstance(session, FakePeerReads), "a load from a store is ended"
        if job in self._held:
            self._held.remove(job)
            self._load_ended(session, job, 0, 0.0, StoreError("the load was ended"))
        else:
            session.end_load(job)

    def _own_layers(self) -> range:
        layers = self._plan().layers_of(self._stage)
        return range(layers.start, layers.stop)

    def _begin_sessions(self) -> None:
        layers, plan = self._own_layers(), self._plan()
        if (place := self._use.place) is not None:
            self._sessions[""] = FakeStoreSession(
                self._stores.at(place),
                layers,
                plan.num_layers,
                TransferJobs(place.save_bytes_per_s),
                self._pages,
                self._object_bytes,
                self._stores.rng,
                self._load_ended,
                self._save_ended,
                self._now_s,
                self._after,
            )
        for peer in self._use.peers:
            self._sessions[peer.name] = FakePeerReads(
                peer,
                self._peers,
                layers,
                self._fill,
                self._load_ended,
                self._now_s,
                self._after,
            )

    def _end_sessions(self, reason: str) -> None:
        self.offers.forget()
        self.leases.forget()
        if self._sessions:
            self._stores.cut_off[reason] += len(self._unanswered)
        for session in self._sessions.values():
            session.is_over = True
        self._sessions.clear()
        self._unanswered.clear()
        self._held.clear()
        self._done.clear()

    def _start_held(self) -> None:
        if not self._may_start():
            return
        self.offers.make()
        self.leases.make()
        if not self._held:
            return
        while self._held:
            job = self._held.popleft()
            self._sessions[job.source].add(job)
        if isinstance(session := self._sessions.get(""), FakeStoreSession):
            session.start()

    def _fill(self, page: int, layer: int, content: Content) -> None:
        self._pages.pages[layer][page] = dict(enumerate(content))

    # Reports

    @property
    def _object_bytes(self) -> int:
        return SLOT_BYTES * self._pages.page_size

    def _load_ended(
        self,
        session: FakeSession,
        job: PageTransfer,
        num_pages: int,
        busy_s: float,
        failure: StoreError | None,
    ) -> None:
        self._done.append(self._loaded(session, job, num_pages, busy_s, failure))
        self._has_news()

    def _save_ended(
        self,
        session: FakeSession,
        job: PageTransfer,
        checksums: "array[int]",
        failure: StoreError | None,
    ) -> None:
        busy_s = self._stores.rng.random()
        self._done.append(self._saved(session, job, checksums, busy_s, failure))
        self._has_news()

    def _loaded(
        self,
        session: FakeSession,
        job: PageTransfer,
        num_pages: int,
        busy_s: float,
        failure: StoreError | None,
    ) -> PagesLoaded:
        return PagesLoaded(
            stage=self._stage,
            transfer=job.transfer,
            num_pages=num_pages,
            num_bytes=num_pages * len(session.layers) * self._object_bytes,
            busy_s=busy_s,
            is_broken=isinstance(failure, BrokenObject),
            message="" if failure is None else str(failure),
        )

    def _saved(
        self,
        session: FakeSession,
        job: PageTransfer,
        checksums: "array[int]",
        busy_s: float,
        failure: StoreError | None,
    ) -> PagesSaved:
        assert isinstance(session, FakeStoreSession)
        num_layers = len(session.layers)
        num_pages = len(checksums) // num_layers
        return PagesSaved(
            stage=self._stage,
            transfer=job.transfer,
            num_pages=num_pages,
            layers=(session.layers.start, session.layers.stop),
            sizes=(self._object_bytes,) * num_layers,
            checksums=checksums[: num_pages * num_layers].tobytes(),
            busy_s=busy_s,
            is_grouped=session.store.groups_layers,
            message="" if failure is None else str(failure),
        )

    def _answer(self, report: StoreReport) -> tuple[StoreReport, tuple[int, ...]]:
        job = self._unanswered.pop(report.transfer)
        is_load = isinstance(report, PagesLoaded)
        return report, tuple(job.pages[: report.num_pages]) if is_load else ()
