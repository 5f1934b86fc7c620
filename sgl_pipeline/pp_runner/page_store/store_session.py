"""The transfers between a `UseStore` and the next interrupt: two threads beside the steps.

One loads and one saves, an object at a time, through buffers of its own. So a copy to or from the
pool begins under a lock, and never while a store is waited for: ending a session waits for the copy
of one layer of a page at most.
"""

import contextlib
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Sequence

from sgl_pipeline.errors import BrokenObject, StoreError
from sgl_pipeline.kv_store.object_names import object_name
from sgl_pipeline.kv_store.page_store import ObjectStore
from sgl_pipeline.object_layers import ObjectPart, object_parts, written_runs
from sgl_pipeline.pp_runner.base.compute_threads import use_every_core
from sgl_pipeline.pp_runner.page_store.pool_pages import Bytes, PageCopies, PoolPages
from sgl_pipeline.pp_runner.page_store.transfer_jobs import PageTransfer, TransferJobs
from sgl_pipeline.wire.store_orders import UINT32, PagesLoaded, PagesSaved, StoreReport


class _SessionOver(Exception):
    """The session has ended: its threads do too."""


class StoreSession:
    """Transfers of `layers` of `stage`.

    Args:
        sizes: bytes of a page of each layer of the model.
        pages: those of `layers`.
        digest: of the store (`StorePlace`).
        done: takes each report, in the thread of its transfer; never after `end`.
    """

    def __init__(
        self,
        stage: int,
        layers: range,
        sizes: Sequence[int],
        pages: PoolPages,
        store: ObjectStore,
        digest: str,
        jobs: TransferJobs,
        done: Callable[[StoreReport], None],
    ) -> None:
        self._stage, self._layers, self._sizes = stage, layers, sizes
        self._pages, self._store, self._digest = pages, store, digest
        # The layers of each object that it writes; it reads no more of an object.
        self._written_runs = written_runs(layers, is_grouped=store.groups_layers)
        self._jobs, self._done = jobs, done
        self._is_over = False
        # The steps that the copies of a transfer come after.
        self._steps: dict[int, object] = {}
        # Guards the pool, the jobs and the end of the session.
        self._news = threading.Condition()
        buffer_bytes = max(map(self._num_bytes, self._written_runs))
        self._threads = [
            threading.Thread(target=self._run, args=(work, copies), name=name, daemon=True)
            for name, work, copies in (
                ("page loads", self._load_next, pages.copies_in(buffer_bytes)),
                ("page saves", self._save_next, pages.copies_out(buffer_bytes)),
            )
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

    def _load_next(self, copies: PageCopies) -> None:
        job = self._await_job(self._jobs.next_load)
        report = self._load(job, copies)
        with self._unless_over():
            self._jobs.load_ended()
            self._done(report)
            self._news.notify_all()

    def _save_next(self, copies: PageCopies) -> None:
        job = self._await_job(lambda: self._jobs.next_save(time.monotonic()))
        report = self._save(job, copies)
        with self._unless_over():
            self._done(report)

    def _load(self, job: PageTransfer, copies: PageCopies) -> PagesLoaded:
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
        return self._loaded(job, num_pages, time.monotonic() - started_s, failure)

    def _begin_load(self, job: PageTransfer, copies: PageCopies) -> Iterator[int]:
        """Begins the copies of a load, page by page; gives how many pages have all theirs."""
        copies.begin(self._steps.pop(job.transfer))
        parts = {cuts: [*object_parts(cuts, self._sizes, self._layers)] for cuts in {*job.cuts}}
        for index, page in enumerate(job.pages):
            for part in parts[job.cuts[index]]:
                content = copies.buffer()
                self._read(job, index, part, content)
                self._copy(part.layers, page, copies, content)
            yield index + 1

    def _read(self, job: PageTransfer, index: int, part: ObjectPart, content: Bytes) -> None:
        self._store.read_into(
            object_name(job.hash_of(index), self._digest, part.object_layers),
            [content[place].data for place in self._places(part.layers)],
            job.checksums_of(index, part.layers),
            part.num_bytes,
            part.offset,
        )

    def _save(self, job: PageTransfer, copies: PageCopies) -> PagesSaved:
        checksums, busy_s, failure = array(UINT32), 0.0, None
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
                    parts = [content[place].data for place in self._places(run)]
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
        for layer, place in zip(layers, self._places(layers), strict=True):
            with self._unless_over():
                copies.copy(layer, page, content, place.start)

    def _places(self, layers: range) -> Iterator[slice]:
        """The places of layers in a buffer, one behind the other."""
        start = 0
        for layer in layers:
            yield slice(start, start := start + self._sizes[layer])

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
            is_grouped=self._store.groups_layers,
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
