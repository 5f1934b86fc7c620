"""The loads and saves of one fake stage with one store, page by page: the queues and the pace of
the real stage, whose threads are events here."""

from array import array
from collections.abc import Callable
from random import Random

from fault_schedules.fake_model import FakeStage
from fault_schedules.fake_session import FakeSession
from fault_schedules.faulty_store import Content, FaultyStore

from sgl_pipeline.errors import StoreError
from sgl_pipeline.object_layers import object_parts, written_runs
from sgl_pipeline.pp_runner.page_store.transfer_jobs import PageTransfer, TransferJobs
from sgl_pipeline.wire.store_orders import UINT32

# A save looks again for its turn a little after the moment at which it may have it.
LATER_S = 1e-6

After = Callable[[float, Callable[[], None]], None]


class FakeStoreSession(FakeSession):
    """From a `UseStore` that names the store to the next interrupt.

    Args:
        object_bytes: of a page of one layer.
        loaded: gets each load that is over, the number of its pages that were filled, the seconds
            that it took, and what was wrong.
        saved: gets each save that is over, the checksums of what was written, and what was wrong.
    """

    def __init__(
        self,
        store: FaultyStore,
        layers: range,
        num_layers: int,
        jobs: TransferJobs,
        pages: FakeStage,
        object_bytes: int,
        rng: Random,
        loaded: Callable[[FakeSession, PageTransfer, int, float, StoreError | None], None],
        saved: Callable[[FakeSession, PageTransfer, "array[int]", StoreError | None], None],
        now_s: Callable[[], float],
        after: After,
    ) -> None:
        super().__init__(layers)
        self.store, self._num_layers, self._jobs = store, num_layers, jobs
        self._pages, self._object_bytes, self._rng = pages, object_bytes, rng
        self._loaded, self._saved = loaded, saved
        self._now_s, self._after = now_s, after
        # The layers of each object that it writes.
        self._runs = written_runs(layers, is_grouped=store.groups_layers)
        self._is_loading = self._is_saving = False

    def add(self, job: PageTransfer) -> None:
        self._jobs.add(job)

    def start(self) -> None:
        """Goes on with what was added."""
        self._next_load()
        self._next_save()

    def _next_load(self) -> None:
        if self._is_loading or self.is_over:
            return
        job = self._jobs.next_load()
        self._is_loading = job is not None
        if job is not None:
            self._load(job, 0, self._now_s())

    def _load(self, job: PageTransfer, index: int, began_s: float) -> None:
        if index == len(job.pages):
            self._end_load(job, index, began_s, None)
            return
        if self.store.hangs():
            return
        read_s = self._rng.random() * self.store.tempo.read_s
        self._after(read_s, lambda: self._fill(job, index, began_s))

    def _fill(self, job: PageTransfer, index: int, began_s: float) -> None:
        """The objects of a page have been read."""
        if self.is_over:
            return
        try:
            for part in object_parts(job.cuts[index], (1,) * self._num_layers, self.layers):
                due = job.checksums_of(index, part.layers)
                contents = self.store.read(job.hash_of(index), part, due)
                for layer, content in zip(part.layers, contents, strict=True):
                    self._pages.pages[layer][job.pages[index]] = dict(enumerate(content))
        except StoreError as error:
            self._end_load(job, index, began_s, error)
        else:
            self._load(job, index + 1, began_s)

    def _end_load(
        self, job: PageTransfer, num_pages: int, began_s: float, failure: StoreError | None
    ) -> None:
        self._is_loading = False
        self._jobs.load_ended()
        self._loaded(self, job, num_pages, self._now_s() - began_s, failure)
        self._next_load()

    def _next_save(self) -> None:
        if self._is_saving or self.is_over:
            return
        job = self._jobs.next_save(self._now_s())
        self._is_saving = job is not None
        if job is not None:
            self._save(job, array(UINT32))

    def _save(self, job: PageTransfer, checksums: "array[int]") -> None:
        """Copies the next page, when it may."""
        if self.is_over:
            return
        index = len(checksums) // len(self.layers)
        if index == len(job.pages):
            self._end_save(job, checksums, None)
            return
        wait_s = self._jobs.save_wait_s(self._now_s())
        if wait_s > 0.0:
            self._after(wait_s + LATER_S, lambda: self._save(job, checksums))
            return
        if self.store.hangs():
            return
        self._jobs.save_begins(self._object_bytes * len(self.layers), self._now_s())
        page = job.pages[index]
        contents = [[self._pages.content(layer, page) for layer in run] for run in self._runs]
        write_s = self._rng.random() * self.store.tempo.write_s
        self._after(write_s, lambda: self._write(job, checksums, contents))

    def _write(
        self, job: PageTransfer, checksums: "array[int]", contents: list[list[Content]]
    ) -> None:
        """The objects of a page are written."""
        index = len(checksums) // len(self.layers)
        try:
            for run, of_run in zip(self._runs, contents, strict=True):
                checksums.extend(self.store.write(job.hash_of(index), run, of_run))
        except StoreError as error:
            if not self.is_over:
                self._end_save(job, checksums, error)
        else:
            self._save(job, checksums)

    def _end_save(
        self, job: PageTransfer, checksums: "array[int]", failure: StoreError | None
    ) -> None:
        self._is_saving = False
        self._saved(self, job, checksums, failure)
        self._next_save()
