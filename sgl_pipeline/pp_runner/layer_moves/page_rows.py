"""Pages of a layer as rows of bytes, for the transport between two stages.

A row is one page: the layer and the page's id (int64 each), its keys, its values, and zeros up to
the size that the rows of all layers have. All rows of a parcel belong to one layer. On a GPU they
are gathered and put in place by kernels in the order of the steps, and cross beside them: nothing
waits for a step, and no page is read while it is written. Untested on hardware.
"""

from collections.abc import Callable, Iterator, Sequence

import torch

from sgl_pipeline.pp_runner.attention.kv_pool import KvPool
from sgl_pipeline.pp_runner.base.download import Download, HostCopy

_HEADER_BYTES = 16
_ALIGNMENT = 16


class PageRows:
    """Packs pages of `kv_pool` into rows, and back.

    Args:
        page_bytes: of the layer with the largest pages.
        download: brings rows to the host.
        upload: brings a tensor of the host to the device; its memory may be used again at once.
    """

    def __init__(
        self,
        kv_pool: KvPool,
        page_bytes: int,
        download: Download,
        upload: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        self._kv_pool = kv_pool
        self._download, self._upload = download, upload
        self.row_bytes = row_bytes(page_bytes)

    @torch.inference_mode()
    def pack(self, layer: int, pages: Sequence[int]) -> HostCopy:
        """Rows [N, row_bytes] (uint8) of `pages` of `layer`, which is here, on their way to the
        host."""
        named = torch.tensor([(layer, page) for page in pages], dtype=torch.int64)
        header = self._upload(named)
        rows = torch.zeros((len(header), self.row_bytes), dtype=torch.uint8, device=header.device)
        rows[:, :_HEADER_BYTES].view(torch.int64).copy_(header)
        for part, of_layer in self._parts(rows, layer):
            part.copy_(of_layer[header[:, 1]])
        return self._download([rows])

    @torch.inference_mode()
    def unpack(self, rows: torch.Tensor) -> None:
        """Writes the pages in `rows` [N, row_bytes] (uint8, host), of a layer that has pages here.
        Steps that are launched from then on see them."""
        layer = int(rows[0, :_HEADER_BYTES].view(torch.int64)[0])
        placed = self._upload(rows)
        ids = placed[:, :_HEADER_BYTES].view(torch.int64)[:, 1]
        for part, of_layer in self._parts(placed, layer):
            of_layer[ids] = part

    def _parts(self, rows: torch.Tensor, layer: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The parts of `rows` with the keys and the values, each with the bytes of all of the
        layer's."""
        start = _HEADER_BYTES
        for of_layer in self._kv_pool.rows(layer):
            end = start + of_layer.shape[1]
            yield rows[:, start:end], of_layer
            start = end


def row_bytes(page_bytes: int) -> int:
    """Bytes of the row of a page that holds `page_bytes` in one layer."""
    return -(-(_HEADER_BYTES + page_bytes) // _ALIGNMENT) * _ALIGNMENT
