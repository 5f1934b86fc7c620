"""The loads of one fake stage from one peer, page by page, as `page_store/peer_pages.py` reads."""

from collections import deque
from collections.abc import Callable

from fault_schedules.fake_offers import FakePeers
from fault_schedules.fake_session import FakeSession
from fault_schedules.faulty_store import Content

from sgl_pipeline.errors import PeerLost, StoreError
from sgl_pipeline.pp_runner.page_store.transfer_jobs import PageTransfer
from sgl_pipeline.wire.store_orders import PeerPlace

# A peer that does not answer is asked again after at most this time, and given up after the other.
ASK_AGAIN_S = 0.5
SILENCE_S = 4.0


class FakePeerReads(FakeSession):
    """From a `UseStore` that names the peer to the next interrupt.

    Args:
        ended: gets each load that is over, the number of its pages that have come, the seconds
            that it took, and what was wrong.
    """

    def __init__(
        self,
        place: PeerPlace,
        peers: FakePeers,
        layers: range,
        fill: Callable[[int, int, Content], None],
        ended: Callable[[FakeSession, PageTransfer, int, float, StoreError | None], None],
        now_s: Callable[[], float],
        after: Callable[[float, Callable[[], None]], None],
    ) -> None:
        super().__init__(layers)
        self._place, self._peers, self._fill, self._ended = place, peers, fill, ended
        self._now_s, self._after = now_s, after
        self._jobs: deque[PageTransfer] = deque()
        # That is read now, and how many of its pages have come.
        self._job: PageTransfer | None = None
        self._num_pages = 0

    def add(self, job: PageTransfer) -> None:
        """Reads what `job` names after what was asked for before."""
        self._jobs.append(job)
        if self._job is None:
            self._next()

    def end_load(self, job: PageTransfer) -> None:
        """Reads no more of a load, if it has not ended."""
        ended = StoreError("the load was ended")
        if job in self._jobs:
            self._jobs.remove(job)
            self._ended(self, job, 0, 0.0, ended)
        elif job is self._job:
            self._end(job, self._num_pages, self._now_s(), ended)

    def _next(self) -> None:
        self._job = None
        if self._jobs and not self.is_over:
            self._job, self._num_pages = self._jobs.popleft(), 0
            self._ask(self._job, 0, self._now_s())

    def _ask(self, job: PageTransfer, index: int, began_s: float) -> None:
        if index == len(job.pages):
            self._end(job, index, began_s, None)
        elif self._peers.rng.random() >= self._peers.tempo.hang_chance:
            read_s = self._peers.rng.random() * self._peers.tempo.read_s
            asked_s = self._now_s()
            self._after(read_s / 2, lambda: self._read(job, index, began_s, asked_s, read_s / 2))

    def _read(
        self, job: PageTransfer, index: int, began_s: float, asked_s: float, back_s: float
    ) -> None:
        """The question for a page has come to the peer; the answer takes `back_s`."""
        if self.is_over or job is not self._job:
            return
        try:
            contents = [self._content(job, index, layer) for layer in self.layers]
            missing = None in contents
            if missing and self._now_s() - asked_s > SILENCE_S:
                raise PeerLost(f"{self._place.name} does not answer")
        except StoreError as error:
            self._end(job, index, began_s, error)
            return
        rng = self._peers.rng
        if missing:
            again_s = rng.random() * ASK_AGAIN_S
            self._after(again_s, lambda: self._read(job, index, began_s, asked_s, back_s))
        else:
            self._after(back_s, lambda: self._take(job, index, began_s, contents))

    def _content(self, job: PageTransfer, index: int, layer: int) -> Content | None:
        for stage in self._place.stages:
            if layer in range(*stage.layers):
                return self._peers.read(stage.address, job.offer, job.hash_of(index), layer)
        raise AssertionError("no stage of the peer has the layer")

    def _take(
        self, job: PageTransfer, index: int, began_s: float, contents: list[Content | None]
    ) -> None:
        """A page has come."""
        if self.is_over or job is not self._job:
            return
        for layer, content in zip(self.layers, contents, strict=True):
            assert content is not None
            self._peers.check(job.hash_of(index), layer, content)
            self._fill(job.pages[index], layer, content)
        self._peers.num_read += 1
        self._num_pages = index + 1
        self._ask(job, index + 1, began_s)

    def _end(
        self, job: PageTransfer, num_pages: int, began_s: float, failure: StoreError | None
    ) -> None:
        self._peers.num_failed += failure is not None
        self._ended(self, job, num_pages, self._now_s() - began_s, failure)
        self._next()
