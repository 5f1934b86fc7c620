"""The KV pages whose rows the boundary logs hold, and their slots: kept alike by scheduler and
stages.

A stage keeps the rows that it sends (`pp_runner/boundary_log.py`) in slots of a page each. All
apply the same steps in the same sequence, so that all know the same pages; after a loss the
scheduler's `LogContents` are every stage's.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence

import msgspec

from sgl_pipeline.errors import ProtocolError

_INT32 = "i"


class LogContents(msgspec.Struct, frozen=True, array_like=True):
    """The pages, oldest first, and the slot of each, as int32 arrays."""

    pages: bytes
    slots: bytes


class LoggedPages:
    """At most `capacity` pages. A page enters when its first row is written, and the page that
    entered first makes room; what a page held before means nothing from then on."""

    def __init__(self, capacity: int) -> None:
        self._free = list(range(capacity - 1, -1, -1))
        self._slots: OrderedDict[int, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, page: int) -> bool:
        return page in self._slots

    def items(self) -> Iterator[tuple[int, int]]:
        """The pages and the slot of each."""
        return iter(self._slots.items())

    def enter(self, page: int) -> tuple[int | None, int | None]:
        """The slot of `page` from now on, and the page that had to leave it, if any; no slot where
        the capacity is 0."""
        slot = self._slots.get(page)
        if slot is not None:
            self._slots.move_to_end(page)
            return slot, None
        left = None
        if self._free:
            slot = self._free.pop()
        elif self._slots:
            left, slot = self._slots.popitem(last=False)
        else:
            return None, None
        self._slots[page] = slot
        return slot, left

    def contents(self) -> LogContents:
        pages, slots = array(_INT32, self._slots.keys()), array(_INT32, self._slots.values())
        return LogContents(pages.tobytes(), slots.tobytes())

    def restore(self, contents: LogContents) -> None:
        """Replaces everything by `contents`.

        Raises ProtocolError where these are not of a log of this capacity.
        """
        pages, slots = array(_INT32), array(_INT32)
        pages.frombytes(contents.pages)
        slots.frombytes(contents.slots)
        capacity = len(self._free) + len(self._slots)
        used = {slot for slot in slots if 0 <= slot < capacity}
        if not len(pages) == len(set(pages)) == len(slots) == len(used):
            raise ProtocolError(f"the contents are not those of a log of {capacity} pages")
        self._slots = OrderedDict(zip(pages, slots, strict=True))
        self._free = [slot for slot in range(capacity - 1, -1, -1) if slot not in used]


def begun_pages(pages: Sequence[int], start: int, end: int, page_size: int) -> Sequence[int]:
    """The pages whose first rows are among the positions `start` to `end` (exclusive) of the
    request that has `pages`: they enter the log when these positions are written."""
    return pages[-(-start // page_size) : -(-end // page_size)]


def log_page_capacity(log_mib: int, num_pages: int, page_size: int, row_bytes: int) -> int:
    """Number of pages whose rows fit into `log_mib` MiB; no more than there are."""
    return min(num_pages, (log_mib << 20) // (page_size * row_bytes))
