"""The stage's side of the orders in `wire/store_orders.py` and `wire/lease_orders.py`, for the
thread of the steps.

Orders come in between steps, reports go out between steps. A stage without work does not look for
them: a descriptor wakes it.
"""

import contextlib
import math
import os
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from sgl_pipeline.errors import ProtocolError
from sgl_pipeline.kv_store.page_store import ObjectStore
from sgl_pipeline.page_hash import split_hashes
from sgl_pipeline.pp_runner.attention.kv_pool import KvPool
from sgl_pipeline.pp_runner.lent_attention.stage_leases import StageLeases
from sgl_pipeline.pp_runner.page_store.open_store import StageStores
from sgl_pipeline.pp_runner.page_store.page_bytes import PageBytes
from sgl_pipeline.pp_runner.page_store.page_source import StoredPages
from sgl_pipeline.pp_runner.page_store.peer_pages import PeerPages
from sgl_pipeline.pp_runner.page_store.pool_pages import PoolPages
from sgl_pipeline.pp_runner.page_store.stage_offers import PeerSite, StageOffers
from sgl_pipeline.pp_runner.page_store.staged_pages import StagedPool
from sgl_pipeline.pp_runner.page_store.store_session import StoreSession
from sgl_pipeline.pp_runner.page_store.transfer_jobs import (
    PageTransfer,
    TransferJobs,
    named_pages,
    page_transfer,
)
from sgl_pipeline.stage_plan import StagePlan
from sgl_pipeline.wire.lease_orders import LeaseOrder, PagesLent
from sgl_pipeline.wire.store_orders import (
    EndLoad,
    OfferOrder,
    PagesLoaded,
    StoreOrder,
    StorePlace,
    StoreReport,
    UseStore,
    WithdrawPages,
)

# Of a thread that a store holds up, at the end of a stage.
JOIN_TIMEOUT_S = 2.0


class PageTransfers:
    """The transfers of one stage, and its offers and leases to peers; at first there is no store
    and no peer.

    Args:
        plan: gives that of the newest steps.
        may_start: whether pages of the plan's layers are all here; until then transfers, offers
            and leases wait.
        site: where peers reach the stage.
        open_store: for tests, another way to a store than `StageStores`.
        leases: None: the stage lends nothing.
    """

    def __init__(
        self,
        stage: int,
        kv_pool: KvPool,
        plan: Callable[[], StagePlan],
        may_start: Callable[[], bool],
        site: PeerSite,
        open_store: Callable[[StorePlace, Sequence[int]], ObjectStore] | None = None,
        leases: StageLeases | None = None,
    ) -> None:
        self._stage, self._kv_pool = stage, kv_pool
        self._plan, self._may_start = plan, may_start
        self._open_store = open_store or StageStores().open
        self._pages_of = _way_to_pages(kv_pool)
        self._run_directory = site.run_directory
        self._offers = StageOffers(site, kv_pool.page_bytes, self._own_pages)
        self._leases = leases
        # Of the newest `UseStore`.
        self._use = UseStore(None)
        self._sessions: dict[str, StoreSession] = {}  # by source
        self._unanswered: dict[int, PageTransfer] = {}
        self._held: deque[PageTransfer] = deque()
        self._done: deque[StoreReport] = deque()
        self._news = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    @property
    def is_open(self) -> bool:
        """True if a transfer or a lease was ordered whose report was not taken, or an offer is held
        back."""
        is_lending = self._leases is not None and self._leases.is_open
        return bool(self._unanswered) or self._offers.has_held_back or is_lending

    @property
    def descriptor(self) -> int | None:
        """A file descriptor that can be read when `take_reports` may have something, while a
        transfer is open."""
        return self._news if self._unanswered else None

    def obey_offer(self, order: OfferOrder) -> None:
        """Lets peers read pages, or not any more.

        Raises ProtocolError for an offer that is made twice, or of pages that the pool lacks.
        """
        if isinstance(order, WithdrawPages):
            self._offers.withdraw(order.offer)
            return
        title = f"offer {order.offer}"
        pages = named_pages(title, order.pages, order.hashes, self._kv_pool.num_pages)
        hashes = split_hashes(order.hashes)
        self._offers.hold_back(order.offer, order.digest, dict(zip(hashes, pages, strict=True)))
        self._start_held()

    def obey_lease(self, order: LeaseOrder) -> None:
        """Lets peers attend over pages, or not any more. Raises as `StageLeases.obey`, and
        ProtocolError on a stage that lends nothing."""
        if self._leases is None:
            raise ProtocolError("pages are to be lent on a stage that lends none")
        self._leases.obey(order)
        self._start_held()

    def obey(self, order: StoreOrder) -> None:
        """Begins a transfer or ends one, or uses another store and other peers.

        Raises ProtocolError for a transfer that has no source, or is not one of this pool, and for
        peers that their names do not tell apart.
        """
        if isinstance(order, UseStore):
            if len({"", *(peer.name for peer in order.peers)}) <= len(order.peers):
                raise ProtocolError("peers without names of their own are to be used")
            self.cancel()
            self._use = order
            self._begin_sessions()
            return
        if isinstance(order, EndLoad):
            self._end_load(order.transfer)
            return
        job = page_transfer(order, self._kv_pool.num_pages, self._plan().num_layers)
        if job.source not in self._sessions:
            missing = f"no peer {job.source}" if job.source else "no store"
            raise ProtocolError(f"transfer {job.transfer} was ordered, and {missing} is in use")
        self._unanswered[job.transfer] = job
        self._held.append(job)
        self._start_held()

    def take_reports(self) -> list[tuple[StoreReport | PagesLent, tuple[int, ...]]]:
        """The reports to send now, each with the pages that its load has filled. To be called when
        `may_start` may have changed, too."""
        self._start_held()
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._news)
        reports: list[tuple[StoreReport | PagesLent, tuple[int, ...]]] = []
        if self._leases is not None:
            reports += [(begun, ()) for begun in self._leases.take_reports()]
        return reports + [self._answer(self._done.popleft()) for _ in range(len(self._done))]

    def refuse_open(self, reason: str) -> list[StoreReport]:
        """Gives up what is under way, and the reports to send on it, and forgets all offers and
        leases; later orders are obeyed."""
        sessions, jobs = {**self._sessions}, [*self._unanswered.values()]
        self._end_sessions()
        self._begin_sessions()
        return [sessions[job.source].refusal(job, reason) for job in jobs]

    def cancel(self) -> None:
        """Forgets the store, all peers, transfers, offers and leases: no report comes, and no
        thread touches the pool from here on but in copies that the next steps come after."""
        self._use = UseStore(None)
        self._end_sessions()

    def close(self) -> None:
        """`cancel`, for the last time."""
        sessions = [*self._sessions.values()]
        self.cancel()
        self._offers.close()
        if self._leases is not None:
            self._leases.close()
        for session in sessions:
            session.join(JOIN_TIMEOUT_S)
        os.close(self._news)

    def _end_load(self, transfer: int) -> None:
        job = self._unanswered.get(transfer)
        if job is None:
            return  # its report has gone out
        session, reason = self._sessions[job.source], "the load was ended"
        if job in self._held:
            self._held.remove(job)
            self._take_done(session.refusal(job, reason))
        else:
            session.end_load(job, reason)

    def _own_pages(self) -> tuple[range, PoolPages]:
        """The layers of the stage, and their pages."""
        layers = self._plan().layers_of(self._stage)
        return layers, self._pages_of(layers)

    def _begin_sessions(self) -> None:
        if self._use.place is None and not self._use.peers:
            return
        layers, sizes = self._plan().layers_of(self._stage), self._kv_pool.page_bytes
        begin = partial(
            StoreSession, self._stage, layers, sizes, self._pages_of(layers), done=self._take_done
        )
        if (place := self._use.place) is not None:
            store = self._open_store(place, [sizes[layer] for layer in layers])
            self._sessions[""] = begin(
                source=StoredPages(store, place.digest, layers, sizes),
                store=store,
                digest=place.digest,
                jobs=TransferJobs(place.save_bytes_per_s),
            )
        for peer in self._use.peers:
            self._sessions[peer.name] = begin(
                source=PeerPages(peer, layers, sizes, self._run_directory),
                store=None,
                digest=peer.digest,
                jobs=TransferJobs(math.inf),
            )

    def _end_sessions(self) -> None:
        self._offers.forget()
        if self._leases is not None:
            self._leases.forget()
        for session in self._sessions.values():
            session.end()
        self._sessions.clear()
        self._unanswered.clear()
        self._held.clear()
        self._done.clear()

    def _start_held(self) -> None:
        if not self.is_open or not self._may_start():
            return
        while self._held:
            job = self._held.popleft()
            self._sessions[job.source].add(job)
        if self._offers.has_held_back:
            self._offers.make()
        if self._leases is not None:
            self._leases.begin()

    def _take_done(self, report: StoreReport) -> None:
        """Called by any thread, of a session that is not over."""
        self._done.append(report)
        os.eventfd_write(self._news, 1)

    def _answer(self, report: StoreReport) -> tuple[StoreReport, tuple[int, ...]]:
        job = self._unanswered.pop(report.transfer)
        is_load = isinstance(report, PagesLoaded)
        return report, tuple(job.pages[: report.num_pages]) if is_load else ()


def _way_to_pages(kv_pool: KvPool) -> Callable[[range], PoolPages]:
    """The way to the pages of layers, for the device of the pool."""
    if kv_pool.device.type == "cuda":
        return StagedPool(kv_pool).pages_of
    return lambda layers: PageBytes(kv_pool, layers)
