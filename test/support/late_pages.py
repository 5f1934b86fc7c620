"""Copies that are over only when something waits for them, as on a GPU.

`LatePages` does a copy when something waits for it, or when steps come after it; so whatever a
session reads, reports or leaves too early is wrong. It notes the sequence of calls.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable
from itertools import cycle

import numpy as np

from sgl_pipeline.pp_runner.attention.kv_pool import KvPool
from sgl_pipeline.pp_runner.page_store.page_bytes import PageBytes
from sgl_pipeline.pp_runner.page_store.pool_pages import Bytes, PageCopies


class LatePages(PageBytes):
    """The `PoolPages` of a device that is in no hurry; `calls` are noted with their thread, and the
    newest one is `newest`."""

    newest: "LatePages"

    def __init__(self, kv_pool: KvPool, layers: Iterable[int]) -> None:
        super().__init__(kv_pool, layers)
        LatePages.newest = self
        self.calls: list[tuple[str, str]] = []
        self._number = 0
        self.late: list[LateCopies] = []

    def note(self, call: str) -> None:
        self.calls.append((threading.current_thread().name, call))

    def calls_of(self, thread: str) -> list[str]:
        return [call for name, call in self.calls if name == thread]

    def copies_in(self) -> PageCopies:
        return self._late(self.copy_in, 2)

    def copies_out(self) -> PageCopies:
        return self._late(self.copy_out, 1)

    def _late(self, copy: Callable[[int, int, Bytes], None], num_buffers: int) -> PageCopies:
        self.late.append(LateCopies(self, copy, num_buffers))
        return self.late[-1]

    def steps_so_far(self) -> None:
        self._number += 1
        self.note(f"steps {self._number}")
        return self._number  # type: ignore[return-value]

    def let_steps_follow(self) -> None:
        self.note("steps follow")
        for copies in self.late:
            copies.do_all()


class LateCopies:
    def __init__(
        self, pages: LatePages, copy: Callable[[int, int, Bytes], None], num_buffers: int
    ) -> None:
        self._pages, self._copy = pages, copy
        num_bytes = pages.largest_object_bytes
        self._buffers = cycle([np.zeros(num_bytes, np.uint8) for _ in range(num_buffers)])
        self._num_buffers = num_buffers
        self._begun: deque[tuple[int, int, Bytes]] = deque()
        self._turn = threading.Lock()

    def begin(self, steps: int) -> None:
        self._pages.note(f"begin behind {steps}")

    def buffer(self) -> Bytes:
        self._do(self._num_buffers - 1)
        return next(self._buffers)

    def copy(self, layer: int, page: int, content: Bytes) -> None:
        self._pages.note("copy")
        self._begun.append((layer, page, content))

    def wait(self) -> None:
        self._pages.note("wait")
        self.do_all()

    def do_all(self) -> None:
        """Carries out all that has begun."""
        self._do(0)

    def _do(self, num_left: int) -> None:
        with self._turn:
            while len(self._begun) > num_left:
                self._copy(*self._begun.popleft())
