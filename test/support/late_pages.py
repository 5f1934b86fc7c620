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

    def copies_in(self, buffer_bytes: int) -> PageCopies:
        return self._late(self.copy_in, buffer_bytes, 2)

    def copies_out(self, buffer_bytes: int) -> PageCopies:
        return self._late(self.copy_out, buffer_bytes, 1)

    def _late(
        self, copy: Callable[[int, int, Bytes], None], buffer_bytes: int, num_buffers: int
    ) -> PageCopies:
        self.late.append(LateCopies(self, copy, buffer_bytes, num_buffers))
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
        self,
        pages: LatePages,
        copy: Callable[[int, int, Bytes], None],
        buffer_bytes: int,
        num_buffers: int,
    ) -> None:
        self._pages, self._copy = pages, copy
        self._buffers = cycle([np.zeros(buffer_bytes, np.uint8) for _ in range(num_buffers)])
        self._num_buffers = num_buffers
        # The copies of each buffer that was given, the newest last.
        self._begun: deque[list[tuple[int, int, Bytes]]] = deque()
        self._turn = threading.Lock()

    def begin(self, steps: int) -> None:
        self._pages.note(f"begin behind {steps}")

    def buffer(self) -> Bytes:
        self._do(self._num_buffers - 1)
        self._begun.append([])
        return next(self._buffers)

    def copy(self, layer: int, page: int, content: Bytes, start: int) -> None:
        self._pages.note("copy")
        self._begun[-1].append((layer, page, content[start:]))

    def wait(self) -> None:
        self._pages.note("wait")
        self.do_all()

    def do_all(self) -> None:
        """Carries out all that has begun."""
        self._do(0)

    def _do(self, num_left: int) -> None:
        """Leaves the copies of the newest buffers."""
        with self._turn:
            while len(self._begun) > num_left:
                for copy in self._begun.popleft():
                    self._copy(*copy)
