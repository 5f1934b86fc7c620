"""The pages of a stage's pool as the bytes of objects in a store, on a CPU and on a GPU.

An object has the keys of the page's tokens, then the values, each as they lie in the pool:
[S, Hkv, W] and [S, Hkv, Wv] (`kv_format.py`). With plain numbers of equal widths this is
[2, S, Hkv, D], which is SGLang's `page-unified-v1` (0.5.23, `mem_cache/hicache_key_scheme.py`).
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
        """Memory for one object of any layer. Waits until no copy uses it any more."""

    def copy(self, layer: int, page: int, content: Bytes) -> None:
        """Begins the copy between a page and the beginning of `content`, which the last call of
        `buffer` gave."""

    def wait(self) -> None:
        """Returns when all copies are over."""


class PoolPages(Protocol):
    """The pages of some layers, which keep their places in the pool meanwhile.

    All but the sizes is for the thread of the steps.
    """

    def object_bytes(self, layer: int) -> int:
        """Bytes of an object of `layer`."""

    @property
    def largest_object_bytes(self) -> int: ...

    def copies_in(self) -> PageCopies:
        """Copies into pages. What a copy has filled is seen by all steps that are launched after
        `PageCopies.wait`."""

    def copies_out(self) -> PageCopies:
        """Copies out of pages."""

    def steps_so_far(self) -> object:
        """The steps that were launched until now, for `PageCopies.begin`."""

    def let_steps_follow(self) -> None:
        """The next steps come after all copies that have begun."""


class PageParts(Generic[Rows]):
    """The parts of objects.

    Args:
        parts: keys and values of each layer, each [N, bytes] (uint8), one page in a row
            (`KvPool.rows`).
    """

    def __init__(self, parts: Mapping[int, tuple[Rows, ...]]) -> None:
        self._parts: Mapping[int, tuple[Rows, ...]] = parts

    def object_bytes(self, layer: int) -> int:
        """See `PoolPages`."""
        return sum(part.shape[1] for part in self._parts[layer])

    @property
    def largest_object_bytes(self) -> int:
        """See `PoolPages`."""
        return max(map(self.object_bytes, self._parts))

    def places(self, layer: int, page: int) -> Iterator[tuple[Rows, slice]]:
        """The parts of a page, each with its place in the object."""
        start = 0
        for part in self._parts[layer]:
            end = start + part.shape[1]
            yield part[page], slice(start, end)
            start = end
