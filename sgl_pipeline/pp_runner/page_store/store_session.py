"""The transfers between a `UseStore` and the next interrupt: threads beside the steps.

One loads from the store and one saves, and one loads from each peer, an object at a time, through
buffers of its own. So a copy to or from the pool begins under a lock, and never while a store or a
peer is waited for: ending a session waits for the copy of one object at most.
"""

import contextlib
import threading
import time
from array import array
from collections.abc import Callable, Iterator

from sgl_pipeline.errors import BrokenObject, PeerLost, StoreError
from sgl_pipeline.kv_store.object_names import object_name
from sgl_pipeline.kv_store.page_store import ObjectStore
from sgl_pipeline.pp_runner.base.compute_threads import use_every_core
from sgl_pipeline.pp_runner.page_store.page_source import PageSource
from sgl_pipeline.pp_runner.page_store.pool_pages import PageCopies, PoolPages
from sgl_pipeline.pp_runner.page_store.transfer_jobs import PageTransfer, TransferJobs
from sgl_pipeline.wire.store_orders import UINT32, PagesLoaded, PagesSaved, StoreReport


class _SessionOver(Exception):
    """The session has ended: its threads do too."""


class StoreSession:
    """Transfers of `layers` of `stage` with the store, or from one peer.

    Args:
        pages: those of `layers`.
        source: of the loads; the session closes it.
        store: for saves, into objects of `digest` (`StorePlace`); None: a peer takes none.
        done: takes each report, in the thread of its transfer; never after `end`.
    """

    def __init__(
        self,
        stage: int,
        layers: range,
        pages: PoolPages,
        source: PageSource,
        store: ObjectStore | None,
        digest: str,
        jobs: TransferJobs,
        done: Callable[[StoreReport], None],
    ) -> None:
        self._stage, self._layers = stage, layers
        self._pages, self._source = pages, source
        self._store, self._digest = store, digest
        self._jobs, self._done = jobs, done
        self._is_over = False
        # The steps that the copies of a transfer come after.
        self._steps: dict[int, object] = {}
        # Guards the pool, the jobs and the end of the session.
        self._news = threading.Condition()
        works = [("page loads", self._run_loads, pages.copies_in())]
        if store is not None:
            works.append(("page saves", self._run_saves, pages.copies_out()))
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
        num_objects, failure = 0, None
        started_s = time.monotonic()
        try:
            for num_begun in self._begin_load(job, copies):
                num_objects = num_begun
        except _SessionOver:
            raise
        except Exception as error:
            failure = error
        copies.wait()  # an error of the device here is also the next step's
        return self._loaded(job, num_objects, time.monotonic() - started_s, failure), failure

    def _begin_load(self, job: PageTransfer, copies: PageCopies) -> Iterator[int]:
        """Begins the copies of a load, one by one; gives how many have begun."""
        copies.begin(self._steps.pop(job.transfer))
        for num_before, loaded in enumerate(self._source.read(job, copies.buffer)):
            with self._unless_over():
                copies.copy(loaded.layer, loaded.page, loaded.content)
            yield num_before + 1

    def _save(self, job: PageTransfer, copies: PageCopies) -> PagesSaved:
        checksums, busy_s, failure = array(UINT32), 0.0, None
        assert self._store is not None
        try:
            copies.begin(self._steps.pop(job.transfer))
            for index, page in enumerate(job.pages):
                for layer in self._layers:
                    num_bytes = self._pages.object_bytes(layer)
                    content = copies.buffer()
                    with self._save_turn(num_bytes):
                        started_s = time.monotonic()
                        copies.copy(layer, page, content)
                    copies.wait()
                    name = object_name(job.hash_of(index), self._digest, layer)
                    _, checksum = self._store.write(name, [content.data[:num_bytes]])
                    checksums.append(checksum)
                    busy_s += time.monotonic() - started_s
        except _SessionOver:
            raise
        except Exception as error:
            failure = error
        return self._saved(job, checksums, busy_s, failure)

    def _loaded(
        self, job: PageTransfer, num_objects: int, busy_s: float, failure: Exception | None
    ) -> PagesLoaded:
        num_pages = num_objects // len(self._layers)
        return PagesLoaded(
            stage=self._stage,
            transfer=job.transfer,
            num_pages=num_pages,
            num_bytes=num_pages * sum(map(self._pages.object_bytes, self._layers)),
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
            sizes=tuple(map(self._pages.object_bytes, self._layers)),
            checksums=checksums[: num_pages * num_layers].tobytes(),
            busy_s=busy_s,
            message=_text(failure),
        )

    def _await_job(self, take: Callable[[], PageTransfer | None]) -> PageTransfer:
        """Waits for the next job of a thread."""
        with self._unless_over():
            while (job := take()) is None:
                self._wait(None)
            return job

    @contextlib.contextmanager
    def _save_turn(self, num_bytes: int) -> Iterator[None]:
        """Waits until the save under way may write an object of this size; then as
        `_unless_over`."""
        with self._unless_over():
            while wait_s := self._jobs.save_wait_s(time.monotonic()):
                self._wait(wait_s)
            self._jobs.save_begins(num_bytes, time.monotonic())
            yield

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
