"""The transfers between a `UseStore` and the next interrupt: threads beside the steps.

One loads from the store and one saves, and one loads from each peer, an object at a time, through
buffers of its own. So a copy to or from the pool begins under a lock, and never while a store or a
peer is waited for: ending a session waits for the copy of one layer of a page at most.
"""

import contextlib
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Sequence

from sgl_pipeline.errors import BrokenObject, PeerLost, StoreError
from sgl_pipeline.kv_store.object_names import object_name
from sgl_pipeline.kv_store.page_store import ObjectStore
from sgl_pipeline.object_layers import written_runs
from sgl_pipeline.pp_runner.base.compute_threads import use_every_core
from sgl_pipeline.pp_runner.page_store.page_source import PageSource, layer_places
from sgl_pipeline.pp_runner.page_store.pool_pages import Bytes, PageCopies, PoolPages
from sgl_pipeline.pp_runner.page_store.transfer_jobs import PageTransfer, TransferJobs
from sgl_pipeline.wire.store_orders import UINT32, PagesLoaded, PagesSaved, StoreReport


class _SessionOver(Exception):
    """The session has ended: its threads do too."""


class StoreSession:
    """Transfers of `layers` of `stage` with the store, or from one peer.

    Args:
        sizes: bytes of a page of each layer of the model.
        pages: those of `layers`.
        source: of the loads; the session closes it.
        store: for saves, into objects of `digest` (`StorePlace`); None: a peer takes none.
        done: takes each report, mostly in the thread of its transfer; never after `end`.
    """

    def __init__(
        self,
        stage: int,
        layers: range,
        sizes: Sequence[int],
        pages: PoolPages,
        source: PageSource,
        store: ObjectStore | None,
        digest: str,
        jobs: TransferJobs,
        done: Callable[[StoreReport], None],
    ) -> None:
        self._stage, self._layers, self._sizes = stage, layers, sizes
        self._pages, self._source = pages, source
        self._store, self._digest = store, digest
        self._is_grouped = store is None or store.groups_layers
        # The layers of each object that it writes; no more come at once from its source.
        self._written_runs = written_runs(layers, is_grouped=self._is_grouped)
        self._jobs, self._done = jobs, done
        self._is_over = False
        # The steps that the copies of a transfer come after.
        self._steps: dict[int, object] = {}
        # Guards the pool, the jobs and the end of the session.
        self._news = threading.Condition()
        buffer_bytes = max(map(self._num_bytes, self._written_runs))
        works = [("page loads", self._run_loads, pages.copies_in(buffer_bytes))]
        if store is not None:
            works.append(("page saves", self._run_saves, pages.copies_out(buffer_bytes)))
        self._threads = [
            threading.Thread(target=work, args=(copies,), name=name, daemon=True)
            for name, work, copies in works
        ]
        for thread in self._threads:
            thread.start()

    def add(self, job: PageTransfer) -> None:
        """Begins a transfer, after all steps that were launched."""
        steps = self._pages.steps_so_far()
        with self._news:
            self._steps[job.transfer] = steps
            self._jobs.add(job)
            self._news.notify_all()

    def end(self) -> None:
        """Forgets all transfers. No copy begins from here on, and the next steps come after those
        that have begun."""
        with self._news:
            self._is_over = True
            self._pages.let_steps_follow()
            self._news.notify_all()
        self._source.interrupt()

    def end_load(self, job: PageTransfer, reason: str) -> None:
        """Reads no more of a load; its report follows, unless it is over already."""
        with self._news:
            if self._jobs.drop_load(job):
                del self._steps[job.transfer]
                self._done(self.refusal(job, reason))
                return
        self._source.end_read(job.transfer)

    def join(self, timeout_s: float) -> None:
        """Returns when the threads of a session that has ended are gone, or after twice
        `timeout_s`: the store may be slow."""
        for thread in self._threads:
            thread.join(timeout_s)

    def refusal(self, job: PageTransfer, message: str) -> StoreReport:
        """The report of a transfer of which nothing was done."""
        if job.is_load:
            return self._loaded(job, 0, 0.0, StoreError(message))
        return self._saved(job, array(UINT32), 0.0, StoreError(message))

    def _run(self, work: Callable[[PageCopies], None], copies: PageCopies) -> None:
        use_every_core()
        with contextlib.suppress(_SessionOver):
            while True:
                work(copies)

    def _run_loads(self, copies: PageCopies) -> None:
        with contextlib.closing(self._source):
            self._run(self._load_next, copies)

    def _run_saves(self, copies: PageCopies) -> None:
        self._run(self._save_next, copies)

    def _load_next(self, copies: PageCopies) -> None:
        job = self._await_job(self._jobs.next_load)
        report, failure = self._load(job, copies)
        with self._unless_over():
            self._jobs.load_ended()
            self._done(report)
            if isinstance(failure, PeerLost):
                self._give_up_loads(failure)
            self._news.notify_all()

    def _give_up_loads(self, failure: PeerLost) -> None:
        """Reports that the loads behind one fail with it: each would wait as long."""
        for job in self._jobs.take_loads():
            del self._steps[job.transfer]
            self._done(self.refusal(job, str(failure)))

    def _save_next(self, copies: PageCopies) -> None:
        job = self._await_job(lambda: self._jobs.next_save(time.monotonic()))
        report = self._save(job, copies)
        with self._unless_over():
            self._done(report)

    def _load(self, job: PageTransfer, copies: PageCopies) -> tuple[PagesLoaded, Exception | None]:
        num_pages, failure = 0, None
        started_s = time.monotonic()
        try:
            for num_begun in self._begin_load(job, copies):
                num_pages = num_begun
        except _SessionOver:
            raise
        except Exception as error:
            failure = error
        copies.wait()  # an error of the device here is also the next step's
        return self._loaded(job, num_pages, time.monotonic() - started_s, failure), failure

    def _begin_load(self, job: PageTransfer, copies: PageCopies) -> Iterator[int]:
        """Begins the copies of a load, page by page; gives how many pages have all theirs."""
        copies.begin(self._steps.pop(job.transfer))
        for index, layers, content in self._source.read(job, copies.buffer):
            self._copy(layers, job.pages[index], copies, content)
            if layers.stop == self._layers.stop:
                yield index + 1

    def _save(self, job: PageTransfer, copies: PageCopies) -> PagesSaved:
        checksums, busy_s, failure = array(UINT32), 0.0, None
        assert self._store is not None
        try:
            copies.begin(self._steps.pop(job.transfer))
            for index, page in enumerate(job.pages):
                for run in self._written_runs:
                    self._await_save_turn(self._num_bytes(run))
                    started_s = time.monotonic()
                    content = copies.buffer()
                    self._copy(run, page, copies, content)
                    copies.wait()
                    name = object_name(job.hash_of(index), self._digest, run)
                    parts = [content[place].data for place in layer_places(run, self._sizes)]
                    checksums.extend(self._store.write(name, parts))
                    busy_s += time.monotonic() - started_s
        except _SessionOver:
            raise
        except Exception as error:
            failure = error
        return self._saved(job, checksums, busy_s, failure)

    def _copy(self, layers: range, page: int, copies: PageCopies, content: Bytes) -> None:
        """Begins the copies between a page of `layers` and a buffer, one by one: the thread of the
        steps waits for the lock at times."""
        for layer, place in zip(layers, layer_places(layers, self._sizes), strict=True):
            with self._unless_over():
                copies.copy(layer, page, content, place.start)

    def _num_bytes(self, layers: range) -> int:
        """Bytes of a page of `layers`."""
        return sum(self._sizes[layers.start : layers.stop])

    def _loaded(
        self, job: PageTransfer, num_pages: int, busy_s: float, failure: Exception | None
    ) -> PagesLoaded:
        return PagesLoaded(
            stage=self._stage,
            transfer=job.transfer,
            num_pages=num_pages,
            num_bytes=num_pages * self._num_bytes(self._layers),
            busy_s=busy_s,
            is_broken=isinstance(failure, BrokenObject),
            message=_text(failure),
        )

    def _saved(
        self, job: PageTransfer, checksums: "array[int]", busy_s: float, failure: Exception | None
    ) -> PagesSaved:
        num_layers = len(self._layers)
        num_pages = len(checksums) // num_layers
        return PagesSaved(
            stage=self._stage,
            transfer=job.transfer,
            num_pages=num_pages,
            layers=(self._layers.start, self._layers.stop),
            sizes=tuple(self._sizes[self._layers.start : self._layers.stop]),
            checksums=checksums[: num_pages * num_layers].tobytes(),
            busy_s=busy_s,
            is_grouped=self._is_grouped,
            message=_text(failure),
        )

    def _await_job(self, take: Callable[[], PageTransfer | None]) -> PageTransfer:
        """Waits for the next job of a thread."""
        with self._unless_over():
            while (job := take()) is None:
                self._wait(None)
            return job

    def _await_save_turn(self, num_bytes: int) -> None:
        """Waits until the save under way may write an object of this size."""
        with self._unless_over():
            while wait_s := self._jobs.save_wait_s(time.monotonic()):
                self._wait(wait_s)
            self._jobs.save_begins(num_bytes, time.monotonic())

    def _wait(self, timeout_s: float | None) -> None:
        self._news.wait(timeout_s)
        if self._is_over:
            raise _SessionOver

    @contextlib.contextmanager
    def _unless_over(self) -> Iterator[None]:
        """Holds the lock of a session that has not ended. Raises _SessionOver otherwise."""
        with self._news:
            if self._is_over:
                raise _SessionOver
            yield


def _text(failure: Exception | None) -> str:
    """The reason for which pages are missing from a report."""
    if failure is None:
        return ""
    is_ours = isinstance(failure, StoreError)
    return str(failure) if is_ours else f"{type(failure).__name__}: {failure}"
