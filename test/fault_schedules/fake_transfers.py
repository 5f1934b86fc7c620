"""What a fake worker's store orders do, beside its steps: the queues and the pace of the real
stage, whose threads are events here, page by page.

What may be cut off is: a session that is over touches the pages of the stage no more, though what
it was writing to the store may still get there.
"""

from array import array
from collections import Counter, deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from random import Random

from fault_schedules.fake_model import FakeStage
from fault_schedules.faulty_store import SLOT_BYTES, Content, FaultyStore

from sgl_pipeline.errors import BrokenObject, StoreError
from sgl_pipeline.object_layers import object_parts, written_runs
from sgl_pipeline.pp_runner.page_store.transfer_jobs import (
    PageTransfer,
    TransferJobs,
    page_transfer,
)
from sgl_pipeline.stage_plan import StagePlan
from sgl_pipeline.wire.store_orders import (
    UINT32,
    LoadPages,
    PagesLoaded,
    PagesSaved,
    SavePages,
    StorePlace,
    StoreReport,
    UseStore,
)

# A save looks again for its turn a little after the moment at which it may have it.
LATER_S = 1e-6

After = Callable[[float, Callable[[], None]], None]


@dataclass(slots=True)
class FakeStores:
    """The stores that there are, by their addresses. `cut_off` counts the open transfers that each
    kind of interrupt has ended."""

    rng: Random
    by_address: dict[str, FaultyStore] = field(default_factory=dict)
    cut_off: Counter[str] = field(default_factory=Counter)

    def at(self, place: StorePlace) -> FaultyStore:
        return self.by_address[place.address]


@dataclass(slots=True, eq=False)
class _Session:
    """From a `UseStore` to the next interrupt."""

    store: FaultyStore
    layers: range
    jobs: TransferJobs
    is_loading: bool = False
    is_saving: bool = False
    is_over: bool = False

    @property
    def runs(self) -> tuple[range, ...]:
        """The layers of each object that it writes."""
        return written_runs(self.layers, is_grouped=self.store.groups_layers)


class FakeTransfers:
    """What `pp_runner/page_store/page_transfers.py` is to a stage.

    Args:
        num_pages: of the pool.
        plan: gives that of the newest steps.
        may_start: whether pages of the plan's layers are all here; until then transfers wait.
        after: runs a call later, unless the worker has died.
        has_news: called when `take_reports` has something.
    """

    def __init__(
        self,
        stores: FakeStores,
        stage: int,
        pages: FakeStage,
        num_pages: Callable[[], int],
        plan: Callable[[], StagePlan],
        may_start: Callable[[], bool],
        now_s: Callable[[], float],
        after: After,
        has_news: Callable[[], None],
    ) -> None:
        self._stores, self._rng = stores, stores.rng
        self._stage, self._pages, self._num_pages = stage, pages, num_pages
        self._plan, self._may_start = plan, may_start
        self._now_s, self._after, self._has_news = now_s, after, has_news
        self._place: StorePlace | None = None
        self._session: _Session | None = None
        self._unanswered: dict[int, PageTransfer] = {}
        self._held: deque[PageTransfer] = deque()
        self._done: deque[StoreReport] = deque()

    def obey(self, order: UseStore | SavePages | LoadPages) -> None:
        if isinstance(order, UseStore):
            self.cancel("a store" if order.place is not None else "no store")
            self._place = order.place
            self._begin_session()
            return
        assert self._session is not None, "a transfer was ordered, and no store is in use"
        job = page_transfer(order, self._num_pages(), self._plan().num_layers)
        taken = {page for one in self._unanswered.values() if one.is_load for page in one.pages}
        assert taken.isdisjoint(job.pages), "a page is in a transfer while another one fills it"
        self._unanswered[job.transfer] = job
        self._held.append(job)
        self._start_held()

    def take_reports(self) -> list[tuple[StoreReport, tuple[int, ...]]]:
        """The reports to send now, each with the pages that its load has filled."""
        self._start_held()
        return [self._answer(self._done.popleft()) for _ in range(len(self._done))]

    def refuse_open(self, reason: str) -> list[StoreReport]:
        """Gives up what is under way, and the reports to send on it; later orders are obeyed."""
        session, jobs = self._session, [*self._unanswered.values()]
        if session is None:
            return []
        self._end_session(reason)
        self._begin_session()
        failure = StoreError(reason)
        return [
            self._loaded(session, job, 0, 0.0, failure)
            if job.is_load
            else self._saved(session, job, array(UINT32), 0.0, failure)
            for job in jobs
        ]

    def cancel(self, reason: str) -> None:
        """Forgets the store and all transfers."""
        self._place = None
        self._end_session(reason)

    def check_step(self, read: Collection[int], written: Collection[int]) -> None:
        """Asserts that a step that is about to run leaves the pages of open transfers alone."""
        for job in self._unanswered.values():
            pages = {*job.pages}
            assert not job.is_load or pages.isdisjoint(read), "a page that is loaded is read"
            assert pages.isdisjoint(written), "a page in a transfer is written by a step"

    def _begin_session(self) -> None:
        if self._place is not None:
            store, layers = self._stores.at(self._place), self._plan().layers_of(self._stage)
            jobs = TransferJobs(self._place.save_bytes_per_s)
            self._session = _Session(store, layers, jobs)

    def _end_session(self, reason: str) -> None:
        if self._session is not None:
            self._stores.cut_off[reason] += len(self._unanswered)
            self._session.is_over = True
        self._session = None
        self._unanswered.clear()
        self._held.clear()
        self._done.clear()

    def _start_held(self) -> None:
        if not self._held or not self._may_start():
            return
        session = self._session
        assert session is not None
        while self._held:
            session.jobs.add(self._held.popleft())
        self._next_load(session)
        self._next_save(session)

    # The two threads of a session

    def _next_load(self, session: _Session) -> None:
        if session.is_loading or session.is_over:
            return
        job = session.jobs.next_load()
        session.is_loading = job is not None
        if job is not None:
            self._load(session, job, 0, self._now_s())

    def _load(self, session: _Session, job: PageTransfer, index: int, began_s: float) -> None:
        if index == len(job.pages):
            self._end_load(session, job, index, began_s, None)
            return
        if session.store.hangs():
            return
        read_s = self._rng.random() * session.store.tempo.read_s
        self._after(read_s, lambda: self._fill(session, job, index, began_s))

    def _fill(self, session: _Session, job: PageTransfer, index: int, began_s: float) -> None:
        """The objects of a page have been read."""
        if session.is_over:
            return
        num_layers = self._plan().num_layers
        try:
            for part in object_parts(job.cuts[index], (1,) * num_layers, session.layers):
                due = job.checksums_of(index, part.layers)
                contents = session.store.read(job.hash_of(index), part, due)
                for layer, content in zip(part.layers, contents, strict=True):
                    self._pages.pages[layer][job.pages[index]] = dict(enumerate(content))
        except StoreError as error:
            self._end_load(session, job, index, began_s, error)
        else:
            self._load(session, job, index + 1, began_s)

    def _end_load(
        self,
        session: _Session,
        job: PageTransfer,
        num_pages: int,
        began_s: float,
        failure: StoreError | None,
    ) -> None:
        session.is_loading = False
        session.jobs.load_ended()
        self._end(self._loaded(session, job, num_pages, self._now_s() - began_s, failure))
        self._next_load(session)

    def _next_save(self, session: _Session) -> None:
        if session.is_saving or session.is_over:
            return
        job = session.jobs.next_save(self._now_s())
        session.is_saving = job is not None
        if job is not None:
            self._save(session, job, array(UINT32))

    def _save(self, session: _Session, job: PageTransfer, checksums: "array[int]") -> None:
        """Copies the next page, when it may."""
        if session.is_over:
            return
        index = len(checksums) // len(session.layers)
        if index == len(job.pages):
            self._end_save(session, job, checksums, None)
            return
        wait_s = session.jobs.save_wait_s(self._now_s())
        if wait_s > 0.0:
            self._after(wait_s + LATER_S, lambda: self._save(session, job, checksums))
            return
        if session.store.hangs():
            return
        session.jobs.save_begins(self._object_bytes * len(session.layers), self._now_s())
        page = job.pages[index]
        contents = [[self._pages.content(layer, page) for layer in run] for run in session.runs]
        write_s = self._rng.random() * session.store.tempo.write_s
        self._after(write_s, lambda: self._write(session, job, checksums, contents))

    def _write(
        self,
        session: _Session,
        job: PageTransfer,
        checksums: "array[int]",
        contents: list[list[Content]],
    ) -> None:
        """The objects of a page are written."""
        index = len(checksums) // len(session.layers)
        try:
            for run, of_run in zip(session.runs, contents, strict=True):
                checksums.extend(session.store.write(job.hash_of(index), run, of_run))
        except StoreError as error:
            if not session.is_over:
                self._end_save(session, job, checksums, error)
        else:
            self._save(session, job, checksums)

    def _end_save(
        self,
        session: _Session,
        job: PageTransfer,
        checksums: "array[int]",
        failure: StoreError | None,
    ) -> None:
        session.is_saving = False
        self._end(self._saved(session, job, checksums, self._rng.random(), failure))
        self._next_save(session)

    # Reports

    @property
    def _object_bytes(self) -> int:
        return SLOT_BYTES * self._pages.page_size

    def _end(self, report: StoreReport) -> None:
        self._done.append(report)
        self._has_news()

    def _loaded(
        self,
        session: _Session,
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
        session: _Session,
        job: PageTransfer,
        checksums: "array[int]",
        busy_s: float,
        failure: StoreError | None,
    ) -> PagesSaved:
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
