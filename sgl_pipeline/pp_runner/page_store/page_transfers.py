"""The stage's side of the orders in `wire/store_orders.py`, for the thread of the steps.

Orders come in between steps, reports go out between steps. A stage without work does not look for
them: a descriptor wakes it.
"""

import contextlib
import os
from collections import deque
from collections.abc import Callable, Sequence

from sgl_pipeline.errors import ProtocolError
from sgl_pipeline.kv_store.page_store import ObjectStore
from sgl_pipeline.pp_runner.attention.kv_pool import KvPool
from sgl_pipeline.pp_runner.page_store.open_store import StageStores
from sgl_pipeline.pp_runner.page_store.page_bytes import PageBytes
from sgl_pipeline.pp_runner.page_store.pool_pages import PoolPages
from sgl_pipeline.pp_runner.page_store.staged_pages import StagedPool
from sgl_pipeline.pp_runner.page_store.store_session import StoreSession
from sgl_pipeline.pp_runner.page_store.transfer_jobs import (
    PageTransfer,
    TransferJobs,
    page_transfer,
)
from sgl_pipeline.stage_plan import StagePlan
from sgl_pipeline.wire.store_orders import (
    PagesLoaded,
    StoreOrder,
    StorePlace,
    StoreReport,
    UseStore,
)

# Of a thread that a store holds up, at the end of a stage.
JOIN_TIMEOUT_S = 2.0


class PageTransfers:
    """The transfers of one stage; at first there is no store.

    Args:
        plan: gives that of the newest steps.
        may_start: whether pages of the plan's layers are all here; until then transfers wait.
        open_store: for tests, another way to a store than `StageStores`.
    """

    def __init__(
        self,
        stage: int,
        kv_pool: KvPool,
        plan: Callable[[], StagePlan],
        may_start: Callable[[], bool],
        open_store: Callable[[StorePlace, Sequence[int]], ObjectStore] | None = None,
    ) -> None:
        self._stage, self._kv_pool = stage, kv_pool
        self._plan, self._may_start = plan, may_start
        self._open_store = open_store or StageStores().open
        self._pages_of = _way_to_pages(kv_pool)
        self._place: StorePlace | None = None
        self._session: StoreSession | None = None
        self._unanswered: dict[int, PageTransfer] = {}
        self._held: deque[PageTransfer] = deque()
        self._done: deque[StoreReport] = deque()
        self._news = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    @property
    def is_open(self) -> bool:
        """True if a transfer was ordered whose report was not taken."""
        return bool(self._unanswered)

    @property
    def descriptor(self) -> int | None:
        """A file descriptor that can be read when `take_reports` may have something, while a
        transfer is open."""
        return self._news if self._unanswered else None

    def obey(self, order: StoreOrder) -> None:
        """Begins a transfer, or uses another store.

        Raises ProtocolError for a transfer that has no store, or is not one of this pool.
        """
        if isinstance(order, UseStore):
            self.cancel()
            self._place = order.place
            self._begin_session()
            return
        if self._session is None:
            raise ProtocolError(f"transfer {order.transfer} was ordered, and no store is in use")
        job = page_transfer(order, self._kv_pool.num_pages, self._plan().num_layers)
        self._unanswered[job.transfer] = job
        self._held.append(job)
        self._start_held()

    def take_reports(self) -> list[tuple[StoreReport, tuple[int, ...]]]:
        """The reports to send now, each with the pages that its load has filled. To be called when
        `may_start` may have changed, too."""
        self._start_held()
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._news)
        return [self._answer(self._done.popleft()) for _ in range(len(self._done))]

    def refuse_open(self, reason: str) -> list[StoreReport]:
        """Gives up what is under way, and the reports to send on it; later orders are obeyed."""
        session, jobs = self._session, [*self._unanswered.values()]
        if session is None:
            return []
        self._end_session()
        self._begin_session()
        return [session.refusal(job, reason) for job in jobs]

    def cancel(self) -> None:
        """Forgets the store and all transfers: no report comes, and no thread touches the pool from
        here on but in copies that the next steps come after."""
        self._place = None
        self._end_session()

    def close(self) -> None:
        """`cancel`, for the last time."""
        session = self._session
        self.cancel()
        if session is not None:
            session.join(JOIN_TIMEOUT_S)
        os.close(self._news)

    def _begin_session(self) -> None:
        if self._place is None:
            return
        layers, sizes = self._plan().layers_of(self._stage), self._kv_pool.page_bytes
        self._session = StoreSession(
            self._stage,
            layers,
            sizes,
            self._pages_of(layers),
            self._open_store(self._place, [sizes[layer] for layer in layers]),
            self._place.digest,
            TransferJobs(self._place.save_bytes_per_s),
            self._take_done,
        )

    def _end_session(self) -> None:
        if self._session is not None:
            self._session.end()
        self._session = None
        self._unanswered.clear()
        self._held.clear()
        self._done.clear()

    def _start_held(self) -> None:
        if self._held and self._may_start():
            assert self._session is not None
            while self._held:
                self._session.add(self._held.popleft())

    def _take_done(self, report: StoreReport) -> None:
        """Called by the threads of a session that is not over."""
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
