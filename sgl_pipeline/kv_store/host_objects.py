"""Objects in the memory of the process that uses them: the tier between a GPU's pool and files.

No order says which pages the scheduler has forgotten. Where there is no room, an object
takes the memory of the one that was least recently used; whoever asks for that one finds it missing
and computes the page again. `host_pages.py` keeps its records by the same rule and forgets a page
first, so a record without its objects is the exception.

Memory is taken as objects come, since gigabytes at once would hold up a stage, and not page-locked:
only the buffers that a GPU copies from and to are (`pp_runner/page_store/staged_pages.py`).
"""

import logging
import mmap
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from sgl_pipeline.errors import BrokenObject, StoreFull
from sgl_pipeline.host_memory import available_memory_bytes
from sgl_pipeline.kv_store.atomic_files import Buffer

logger = logging.getLogger(__name__)

CHUNK_BYTES = 64 << 20
# Of the host's memory so much stays free, as in SGLang's HiCache (0.5.23, its reserve of 10 GiB).
MIN_FREE_BYTES = 10 << 30


class _Object(NamedTuple):
    memory: memoryview
    number: int  # of the write that made it


class HostObjects:
    """An `ObjectStore` whose objects have one layer; any thread may use it.

    In place of a checksum an object has the number of its write, which tells it from an earlier one
    of its name. A sum over its bytes would take as long again as the copy, and the memory of this
    process is no less sure than that of the pool.

    Args:
        num_pages: pages whose objects there is room for.
        available_bytes: what the host has left.
    """

    groups_layers = False  # objects of one size take each other's memory

    def __init__(
        self,
        num_pages: int,
        available_bytes: Callable[[], int] = available_memory_bytes,
    ) -> None:
        self.num_pages = num_pages
        self._available_bytes = available_bytes
        self._shelves: dict[int, _Shelf] = {}
        self._num_writes = 0
        self._turn = threading.Lock()

    def make_room(self, object_sizes: Iterable[int]) -> None:
        """Room for the pages of layers with objects of these sizes, beside that of layers that were
        here before: memory is never given back."""
        with self._turn:
            for size, num_layers in Counter(object_sizes).items():
                shelf = self._shelf(size)
                shelf.most_objects = max(shelf.most_objects, num_layers * self.num_pages)

    def write(self, name: str, parts: Sequence[Buffer]) -> list[int]:
        """Makes or replaces an object; gives the number of the write.

        Raises StoreFull where the host has no memory for a single one.
        """
        (content,) = (memoryview(part).cast("B") for part in parts)
        with self._turn:
            shelf = self._shelf(len(content))
            memory = shelf.take(name)
            memory[:] = content
            self._num_writes = (self._num_writes + 1) % 2**32
            shelf.objects[name] = _Object(memory, self._num_writes)
            return [self._num_writes]

    def read_into(
        self,
        name: str,
        parts: Sequence[Buffer],
        checksums: Sequence[int],
        num_bytes: int,
        offset: int = 0,
    ) -> None:
        """Fills a writable buffer with an object, whose checksum is the number of its write.

        Raises BrokenObject where it is not there any more.
        """
        assert offset == 0
        (content,), (number,) = (memoryview(part).cast("B") for part in parts), checksums
        with self._turn:
            objects = self._shelf(num_bytes).objects
            found = objects.get(name)
            if found is None or found.number != number:
                raise BrokenObject(f"object {name} is not in host memory any more")
            content[:] = found.memory
            objects.move_to_end(name)

    def delete(self, name: str) -> bool:
        """Removes an object, if it is there."""
        with self._turn:
            for shelf in self._shelves.values():
                if (found := shelf.objects.pop(name, None)) is not None:
                    shelf.free.append(found.memory)
        return True

    def _shelf(self, object_bytes: int) -> "_Shelf":
        if object_bytes not in self._shelves:
            self._shelves[object_bytes] = _Shelf(
                object_bytes, self.num_pages, self._available_bytes
            )
        return self._shelves[object_bytes]


class _Shelf:
    """Objects of one size, the least recently used first."""

    def __init__(
        self, object_bytes: int, most_objects: int, available_bytes: Callable[[], int]
    ) -> None:
        self.most_objects = most_objects
        self.objects: OrderedDict[str, _Object] = OrderedDict()
        self.free: list[memoryview] = []
        self._object_bytes = object_bytes
        self._available_bytes = available_bytes

    def take(self, name: str) -> memoryview:
        """The memory for an object, whose earlier one goes. Raises StoreFull."""
        if (earlier := self.objects.pop(name, None)) is not None:
            return earlier.memory
        if not self.free and len(self.objects) < self.most_objects:
            self._grow()
        if self.free:
            return self.free.pop()
        if not self.objects:
            raise StoreFull("the host has no memory left for pages")
        return self.objects.popitem(last=False)[1].memory

    def _grow(self) -> None:
        """Takes another chunk, or gives up growing where the host is short of memory."""
        num_objects = len(self.objects)
        per_chunk = max(1, CHUNK_BYTES // self._object_bytes)
        count = min(per_chunk, self.most_objects - num_objects)
        num_bytes = count * self._object_bytes
        if self._available_bytes() - num_bytes < MIN_FREE_BYTES:
            logger.warning(
                "the host is short of memory (%d GiB must be left): host memory keeps %d objects "
                "of %d bytes instead of %d; lower --hicache-ratio or --hicache-size",
                MIN_FREE_BYTES >> 30,
                num_objects,
                self._object_bytes,
                self.most_objects,
            )
            self.most_objects = num_objects
            return
        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        chunk = memoryview(mmap.mmap(-1, num_bytes, private))
        size = self._object_bytes
        self.free = [chunk[start : start + size] for start in range(0, num_bytes, size)]
