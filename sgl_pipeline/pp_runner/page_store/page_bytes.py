"""A page of a layer as the bytes of an object in a store.

The keys of the page's tokens, then the values, each as they lie in the pool: [S, Hkv, W] and
[S, Hkv, Wv] (`kv_format.py`). With plain numbers of equal widths this is [2, S, Hkv, D], which is
SGLang's `page-unified-v1` (0.5.23, `mem_cache/hicache_key_scheme.py`).
"""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import torch

from sgl_pipeline.pp_runner.attention.kv_pool import KvPool

Bytes = npt.NDArray[np.uint8]


class PageBytes:
    """The pages of `layers`, which keep their places in the pool of a CPU meanwhile.

    Copies use no torch: its compute threads belong to the steps. NumPy lets Python go on while it
    copies.
    """

    def __init__(self, kv_pool: KvPool, layers: Iterable[int]) -> None:
        self._parts = {layer: tuple(map(_rows, kv_pool.pages(layer))) for layer in layers}

    def object_bytes(self, layer: int) -> int:
        """Bytes of an object of `layer`."""
        return sum(part.shape[1] for part in self._parts[layer])

    @property
    def largest_object_bytes(self) -> int:
        return max(map(self.object_bytes, self._parts))

    def copy_out(self, layer: int, page: int, content: Bytes) -> None:
        """Fills the beginning of `content` with a page."""
        start = 0
        for part in self._parts[layer]:
            end = start + part.shape[1]
            content[start:end] = part[page]
            start = end

    def copy_in(self, layer: int, page: int, content: Bytes) -> None:
        """Fills a page with the beginning of `content`."""
        start = 0
        for part in self._parts[layer]:
            end = start + part.shape[1]
            part[page] = content[start:end]
            start = end


def _rows(pages: torch.Tensor) -> Bytes:
    """The memory of `pages` [N, S, heads, numbers], one page in a row."""
    rows: Bytes = pages.flatten(1).view(torch.uint8).numpy()
    return rows
