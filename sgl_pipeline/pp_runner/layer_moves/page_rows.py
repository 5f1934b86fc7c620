"""Pages and states of a layer as rows of bytes, for the transport between two stages.

A row is one place of a layer, a page or the state in a slot: the layer and the place's number
(int64 each), its keys and values, or its two parts of a state, and zeros up to whole cells. All
rows of a parcel belong to one layer. Links carry cells, because rows of layers differ: a state is
often thirty times a page. On a GPU rows are gathered and put in place by kernels in the order of
the steps, and cross beside them: nothing waits for a step, and no page is read while it is written.
Untested on hardware.
"""

from collections.abc import Callable, Iterator, Sequence

import torch

from sgl_pipeline.pp_runner.attention.kv_pool import KvPool
from sgl_pipeline.pp_runner.attention.state_pool import StatePool
from sgl_pipeline.pp_runner.base.download import Download, HostCopy

# The unit of links that carry rows.
CELL_BYTES = 16
_HEADER_BYTES = 16


class PageRows:
    """Packs places of `kv_pool`, or of `state_pool` for layers with states, into rows, and back.

    Args:
        state_pool: None: no layer has states.
        download: brings rows to the host.
        upload: brings a tensor of the host to the device; its memory may be used again at once.
    """

    def __init__(
        self,
        kv_pool: KvPool,
        state_pool: StatePool | None,
        download: Download,
        upload: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        self._kv_pool = kv_pool
        self._state_pool = state_pool
        self._download, self._upload = download, upload

    def has_states(self, layer: int) -> bool:
        """True if the places of `layer` are state slots."""
        return self._state_pool is not None and self._state_pool.shape(layer) is not None

    def row_bytes(self, layer: int) -> int:
        """Bytes of a row of `layer`, which is here."""
        num_bytes = _HEADER_BYTES + sum(part.shape[1] for part in self._memory(layer))
        return -(-num_bytes // CELL_BYTES) * CELL_BYTES

    @torch.inference_mode()
    def pack(self, layer: int, places: Sequence[int]) -> HostCopy:
        """Cells [N * cells of a row, CELL_BYTES] (uint8) with the rows of `places` of `layer`,
        which is here, on their way to the host."""
        named = torch.tensor([(layer, place) for place in places], dtype=torch.int64)
        header = self._upload(named)
        shape = (len(header), self.row_bytes(layer))
        rows = torch.empty(shape, dtype=torch.uint8, device=header.device)
        rows[:, :_HEADER_BYTES].view(torch.int64).copy_(header)
        rows[:, -CELL_BYTES:].zero_()  # what a place leaves of its last cell
        for part, of_layer in self._parts(rows, layer):
            part.copy_(of_layer.index_select(0, header[:, 1]))
        return self._download([rows.view(-1, CELL_BYTES)])

    @torch.inference_mode()
    def unpack(self, cells: torch.Tensor) -> None:
        """Writes the places in `cells` (host), as `pack` makes them, of a layer that is here. Steps
        that are launched from then on see them."""
        layer = int(cells[0, :8].view(torch.int64)[0])
        placed = self._upload(cells.view(-1, self.row_bytes(layer)))
        ids = placed[:, :_HEADER_BYTES].view(torch.int64)[:, 1]
        for part, of_layer in self._parts(placed, layer):
            of_layer[ids] = part

    def _parts(self, rows: torch.Tensor, layer: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The two parts of `rows`, each with the memory of all of the layer's places; in numbers as
        wide as both allow, which are put in place several times as fast as bytes."""
        memory = self._memory(layer)
        unit = _widest_unit(memory)
        rows, start = rows.view(unit), _HEADER_BYTES // unit.itemsize
        for of_layer in memory:
            wide = of_layer.view(unit)
            end = start + wide.shape[1]
            yield rows[:, start:end], wide
            start = end

    def _memory(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Bytes of all places of `layer`, one in a row, in two parts."""
        if self._state_pool is not None and self.has_states(layer):
            return self._state_pool.rows(layer)
        return self._kv_pool.rows(layer)


def _widest_unit(parts: Sequence[torch.Tensor]) -> torch.dtype:
    """The widest integers of which all rows of `parts` (uint8) are made up."""
    units = torch.int64, torch.int32, torch.int16, torch.uint8
    return next(one for one in units if not any(part.shape[1] % one.itemsize for part in parts))
