"""The choice of the next transfer of pages, and of the moment for a save: no I/O, clock or threads.

Transfers of one kind run in the sequence of their orders. Requests wait for loads, and none waits
for saves: so a save lets loads go first, for a bounded time, and keeps to a rate.
"""

from array import array
from collections import deque
from dataclasses import dataclass

from sgl_pipeline.errors import ProtocolError
from sgl_pipeline.object_layers import Cuts, are_cuts
from sgl_pipeline.page_hash import HASH_BYTES
from sgl_pipeline.wire.step_order import INT32
from sgl_pipeline.wire.store_orders import UINT32, LoadPages, SavePages

# A save that could go on lets loads go first for this long. Then it writes an object.
MAX_YIELD_S = 0.02
# A save that was late may catch up with the bytes of this time at once.
CATCH_UP_S = 0.01


@dataclass(frozen=True, slots=True)
class PageTransfer:
    """A `LoadPages`, which has checksums [pages * layers of the model] and the cuts of each page,
    but not where it has a `source`; or a `SavePages`, whose source is the store too."""

    transfer: int
    pages: "array[int]"
    hashes: bytes
    checksums: "array[int] | None" = None
    cuts: tuple[Cuts, ...] = ()
    source: str = ""
    offer: int = 0

    @property
    def is_load(self) -> bool:
        return self.checksums is not None

    def hash_of(self, index: int) -> bytes:
        """The page hash of `pages[index]`."""
        return self.hashes[index * HASH_BYTES : (index + 1) * HASH_BYTES]

    def checksums_of(self, index: int, layers: range) -> "array[int]":
        """The checksums of `layers` of `pages[index]` of a load from the store."""
        assert self.checksums is not None
        first = index * (len(self.checksums) // len(self.pages))
        return self.checksums[first + layers.start : first + layers.stop]


def page_transfer(order: SavePages | LoadPages, num_pages: int, num_layers: int) -> PageTransfer:
    """The transfer of `order`, for a pool of `num_pages` and a model of `num_layers`.

    Raises ProtocolError for pages that the pool does not have or whose cuts are none, and when its
    arrays do not have the same number of pages.
    """
    title = f"transfer {order.transfer}"
    pages = named_pages(title, order.pages, order.hashes, num_pages)
    if isinstance(order, SavePages):
        return PageTransfer(order.transfer, pages, order.hashes)
    checksums = _array(UINT32, order.checksums)
    if len(checksums) != (0 if order.source else len(pages) * num_layers):
        raise ProtocolError(
            f"{title} names {len(pages)} pages of {order.source or 'the store'}, with "
            f"{len(checksums)} checksums for {num_layers} layers"
        )
    cuts = order.cuts
    if not order.source and not (
        len(cuts) == len(pages) and all(are_cuts(one, num_layers) for one in cuts)
    ):
        raise ProtocolError(
            f"{title} names {len(pages)} pages whose {num_layers} layers are cut {cuts}"
        )
    return PageTransfer(
        order.transfer, pages, order.hashes, checksums, cuts, order.source, order.offer
    )


def named_pages(title: str, pages: bytes, hashes: bytes, num_pages: int) -> "array[int]":
    """The pages of an order, each of which has one of `hashes`, for a pool of `num_pages`.

    Raises ProtocolError, which begins with the order's `title`, for pages that the pool does not
    have, and for no pages or another number of hashes.
    """
    ids = _array(INT32, pages)
    if not ids or len(hashes) != len(ids) * HASH_BYTES:
        raise ProtocolError(f"{title} names {len(ids)} pages, with {len(hashes)} bytes of hashes")
    if not 0 <= min(ids) <= max(ids) < num_pages:
        raise ProtocolError(
            f"{title} names pages {min(ids)} to {max(ids)}, the pool has {num_pages}"
        )
    return ids


def _array(typecode: str, content: bytes) -> "array[int]":
    """Raises ProtocolError when `content` does not have whole elements."""
    try:
        return array(typecode, content)
    except ValueError as error:
        raise ProtocolError(f"a transfer's array cannot be read: {error}") from None


class TransferJobs:
    """The transfers that are queued, and the load and the save under way."""

    def __init__(self, save_bytes_per_s: float) -> None:
        self._save_bytes_per_s = save_bytes_per_s
        self._loads: deque[PageTransfer] = deque()
        self._saves: deque[PageTransfer] = deque()
        self._is_loading = False
        self._due_s = float("-inf")  # by the rate
        self._yields_since_s = float("-inf")

    def add(self, job: PageTransfer) -> None:
        (self._loads if job.is_load else self._saves).append(job)

    def take_loads(self) -> list[PageTransfer]:
        """Removes the loads that have not begun."""
        loads = [*self._loads]
        self._loads.clear()
        return loads

    def drop_load(self, job: PageTransfer) -> bool:
        """Removes a load; False if it has begun."""
        if job not in self._loads:
            return False
        self._loads.remove(job)
        return True

    def next_load(self) -> PageTransfer | None:
        """The next load, which is under way from here on."""
        if not self._loads:
            return None
        self._is_loading = True
        return self._loads.popleft()

    def load_ended(self) -> None:
        """The load under way is over."""
        self._is_loading = False

    def next_save(self, now_s: float) -> PageTransfer | None:
        """The next save, which waits for its turn from here on."""
        if not self._saves:
            return None
        self._yields_since_s = now_s
        return self._saves.popleft()

    def save_wait_s(self, now_s: float) -> float:
        """Seconds until the save under way may write its next object, unless loads change; 0: it
        may now."""
        must_yield = self._is_loading or bool(self._loads)
        turn_s = self._yields_since_s + MAX_YIELD_S if must_yield else now_s
        return max(0.0, self._due_s - now_s, turn_s - now_s)

    def save_begins(self, num_bytes: int, now_s: float) -> None:
        """The save under way writes an object."""
        due_s = max(self._due_s, now_s - CATCH_UP_S)
        self._due_s = due_s + num_bytes / self._save_bytes_per_s
        self._yields_since_s = now_s
