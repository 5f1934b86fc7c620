"""Pages of a CPU's pool, whose memory a thread beside the steps can read and write itself.

Copies use no torch: its compute threads belong to the steps. NumPy lets Python go on while it
copies.
"""

from collections.abc import Callable, Iterable

import numpy as np

from sgl_pipeline.pp_runner.attention.kv_pool import KvPool
from sgl_pipeline.pp_runner.page_store.pool_pages import Bytes, PageCopies, PageParts


class PageBytes(PageParts[Bytes]):
    """The `PoolPages` of a CPU."""

    def __init__(self, kv_pool: KvPool, layers: Iterable[int]) -> None:
        super().__init__(
            {layer: tuple(part.numpy() for part in kv_pool.rows(layer)) for layer in layers}
        )

    def copy_out(self, layer: int, page: int, content: Bytes) -> None:
        """Fills the beginning of `content` with a page."""
        for part, place in self.places(layer, page):
            content[place] = part

    def copy_in(self, layer: int, page: int, content: Bytes) -> None:
        """Fills a page with the beginning of `content`."""
        for part, place in self.places(layer, page):
            part[:] = content[place]

    def copies_in(self, buffer_bytes: int) -> PageCopies:
        """See `PoolPages`."""
        return _CopiesAtOnce(self.copy_in, buffer_bytes)

    def copies_out(self, buffer_bytes: int) -> PageCopies:
        """See `PoolPages`."""
        return _CopiesAtOnce(self.copy_out, buffer_bytes)

    def steps_so_far(self) -> None:
        """None: on a CPU a step is over when it was launched."""

    def let_steps_follow(self) -> None:
        """Nothing: copies are over when they have begun."""


class _CopiesAtOnce:
    """`PageCopies` that are over when `copy` returns."""

    def __init__(self, copy: Callable[[int, int, Bytes], None], buffer_bytes: int) -> None:
        self._copy = copy
        self._buffer = np.empty(buffer_bytes, dtype=np.uint8)

    def begin(self, steps: None) -> None:
        """Nothing: the steps are over."""

    def buffer(self) -> Bytes:
        return self._buffer

    def copy(self, layer: int, page: int, content: Bytes, start: int) -> None:
        self._copy(layer, page, content[start:])

    def wait(self) -> None:
        """Nothing: the copies are over."""
