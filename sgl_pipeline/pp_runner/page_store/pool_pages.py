"""The pages of a stage's pool as the bytes of objects in a store, on a CPU and on a GPU.

An object has one layer behind the other, and of each the keys of the page's tokens, then the
values, each as they lie in the pool: [S, Hkv, W] and [S, Hkv, Wv] (`kv_format.py`). With plain
numbers of equal widths a layer is [2, S, Hkv, D], and the object SGLang's `page-unified-v1`
(0.5.23, `mem_cache/pool_host/page_unified.py`).
"""

from collections.abc import Iterator, Mapping
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch

Bytes = npt.NDArray[np.uint8]
Rows = TypeVar("Rows", Bytes, torch.Tensor)


class PageCopies(Protocol):
    """Copies between pages and buffers, all in one direction; one thread uses it."""

    def begin(self, steps: Any) -> None:
        """The next copies come after `steps`, which `PoolPages.steps_so_far` gave."""

    def buffer(self) -> Bytes:
        """Memory for one object. Waits until no copy uses it any more."""

    def copy(self, layer: int, page: int, content: Bytes, start: int) -> None:
        """Begins the copy between a page of `layer` and the bytes from `start` on of `content`,
        which the last call of `buffer` gave."""

    def wait(self) -> None:
        """Returns when all copies are over."""


class PoolPages(Protocol):
    """The pages of some layers, which keep their places in the pool meanwhile; for the thread of
    the steps."""

    def copies_in(self, buffer_bytes: int) -> PageCopies:
        """Copies into pages, from buffers of that size. What a copy has filled is seen by all steps
        that are launched after `PageCopies.wait`."""

    def copies_out(self, buffer_bytes: int) -> PageCopies:
        """Copies out of pages."""

    def steps_so_far(self) -> object:
        """The steps that were launched until now, for `PageCopies.begin`."""

    def let_steps_follow(self) -> None:
        """The next steps come after all copies that have begun."""


class PageParts(Generic[Rows]):
    """The keys and values of pages.

    Args:
        parts: keys and values of each layer, each [N, bytes] (uint8), one page in a row
            (`KvPool.rows`).
    """

    def __init__(self, parts: Mapping[int, tuple[Rows, ...]]) -> None:
        self._parts: Mapping[int, tuple[Rows, ...]] = parts

    def places(self, layer: int, page: int) -> Iterator[tuple[Rows, slice]]:
        """The parts of a page of `layer`, each with its place in the page's bytes."""
        start = 0
        for part in self._parts[layer]:
            end = start + part.shape[1]
            yield part[page], slice(start, end)
            start = end
