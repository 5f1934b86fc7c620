"""Pages of a layer as rows of bytes, for the way between two stages.

A row is one page: the layer and the page's id (int64 each), its keys, its values, and zeros up to a
multiple of 16 bytes. The rows of a parcel are of one layer.
"""

from collections.abc import Sequence

import torch

from sgl_pipeline.pp_runner.kv_pool import KvPool

_HEADER_BYTES = 16
_ALIGNMENT = 16


class PageRows:
    """Packs pages of `kv_pool` into rows, and back."""

    def __init__(self, kv_pool: KvPool, page_bytes: int) -> None:
        self._kv_pool = kv_pool
        self._half_bytes = page_bytes // 2
        self.row_bytes = row_bytes(page_bytes)

    @torch.inference_mode()
    def pack(self, layer: int, pages: Sequence[int]) -> torch.Tensor:
        """Rows [N, row_bytes] (uint8, host) of `pages` of `layer`, which is here."""
        ids = torch.tensor(pages, dtype=torch.int64)
        rows = torch.zeros((len(ids), self.row_bytes), dtype=torch.uint8)
        header = rows[:, :_HEADER_BYTES].view(torch.int64)
        header[:, 0] = layer
        header[:, 1] = ids
        for half, of_layer in zip(self._halves(rows), self._kv_pool.pages(layer), strict=True):
            half.copy_(_bytes(of_layer)[ids.to(of_layer.device)])
        return rows

    @torch.inference_mode()
    def unpack(self, rows: torch.Tensor) -> None:
        """Writes the pages in `rows` [N, row_bytes] (uint8), of a layer that has pages here."""
        header = rows[:, :_HEADER_BYTES].view(torch.int64)
        layer, ids = int(header[0, 0]), header[:, 1]
        for half, of_layer in zip(self._halves(rows), self._kv_pool.pages(layer), strict=True):
            _bytes(of_layer)[ids.to(of_layer.device)] = half.to(of_layer.device)

    def _halves(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Where the keys and the values are in `rows`."""
        middle = _HEADER_BYTES + self._half_bytes
        return rows[:, _HEADER_BYTES:middle], rows[:, middle : middle + self._half_bytes]


def _bytes(pages: torch.Tensor) -> torch.Tensor:
    """The memory of `pages` [N, S, Hkv, W] as bytes, those of one page in a row."""
    return pages.flatten(1).view(torch.uint8)


def row_bytes(page_bytes: int) -> int:
    """Bytes of the row of a page that holds `page_bytes` in one layer."""
    return -(-(_HEADER_BYTES + page_bytes) // _ALIGNMENT) * _ALIGNMENT
