"""A stage worker's layers, as a layer move sees them: a `MoveSite` over `StageRunner`.

Arriving weights are spare ones, or are read in a thread of their own. Weights of layers that have
left stay as spare ones while the stage has room for them: loads swing back.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from sgl_pipeline.pp_runner.base.download import HostCopy
from sgl_pipeline.pp_runner.device import make_copy, make_download
from sgl_pipeline.pp_runner.layer_moves.layer_loading import LayerLoading
from sgl_pipeline.pp_runner.layer_moves.move_site import Awaited, LeavingPages, Parcel
from sgl_pipeline.pp_runner.layer_moves.page_rows import CELL_BYTES, PageRows
from sgl_pipeline.pp_runner.stage_runner import StageRunner
from sgl_pipeline.stage_plan import StagePlan

# Copying this much on a CPU takes a fraction of a millisecond, and a cache holds it until it is
# read.
PARCEL_BYTES = 512 * 1024
# From and to a GPU each parcel costs launches, and this much crosses in half a millisecond.
GPU_PARCEL_BYTES = 16 * 2**20


@dataclass(frozen=True, slots=True, eq=False)
class _ReadPages:
    """The `LeavingPages` of a stage."""

    rows: HostCopy

    def is_read(self) -> bool:
        return self.rows.is_ready()

    def parcel(self) -> Parcel[torch.Tensor]:
        (rows,) = self.rows.tensors()
        return Parcel(rows, rows.nbytes, is_last=False)


class StageSite:
    """The layers of `runner`.

    Args:
        resident: layers whose weights stay for ever.
        max_layers: the most layers whose weights are here, except resident ones that have left.
        attend: reads the scheduler's messages for some seconds (`MoveSite.attend`).
    """

    def __init__(
        self,
        runner: StageRunner,
        resident: Iterable[int],
        max_layers: int,
        attend: Callable[[float], None],
    ) -> None:
        self._runner = runner
        self._layers = runner.held_layers
        self._resident = frozenset(resident)
        self._max_layers = max_layers
        self._attend = attend
        device = runner.device
        self._parcel_bytes = PARCEL_BYTES if device.type == "cpu" else GPU_PARCEL_BYTES
        self._rows = PageRows(
            self._layers.kv_pool,
            self._layers.state_pool,
            make_download(device),
            make_copy(device),
        )
        self._loading: LayerLoading | None = None

    @property
    def row_bytes(self) -> int:
        """Bytes of a row on the links of pages and states."""
        return CELL_BYTES

    def has_states(self, layer: int) -> bool:
        return self._rows.has_states(layer)

    def places_per_parcel(self, layer: int) -> int:
        return max(1, self._parcel_bytes // self._rows.row_bytes(layer))

    def begin_loading(self, layers: Sequence[int]) -> None:
        missing = [layer for layer in layers if layer not in self._layers.spare]
        self._make_room(len(missing), needed=layers)
        if missing:
            self._loading = LayerLoading(missing, self._layers.model.read_layer)

    def has_loaded(self) -> bool:
        if self._loading is None:
            return True
        loaded = self._loading.take()
        if loaded is None:
            return False
        self._loading = None
        for layer in loaded:
            self._layers.keep_spare(layer)
        return True

    def hold(self, layers: Iterable[int]) -> None:
        for layer in layers:
            self._layers.hold(layer)

    def drop(self, layers: Iterable[int]) -> None:
        if self._loading is not None:
            self._loading.abandon()
            self._loading = None
        for layer in layers:
            if layer in self._layers.held:
                self._layers.drop(layer, keep_weights=True)
        self._make_room(0, needed=())

    def read(self, layer: int, places: Sequence[int]) -> LeavingPages[torch.Tensor]:
        return _ReadPages(self._rows.pack(layer, places))

    def write(self, rows: torch.Tensor) -> None:
        self._rows.unpack(rows)

    def know_plan(self, plan: StagePlan) -> None:
        self._runner.know_plan(plan)

    def close(self) -> None:
        if self._loading is not None:
            self._loading.close()

    def _make_room(self, num_layers: int, needed: Sequence[int]) -> None:
        """Frees the oldest spare weights that are not `needed`, until `num_layers` may come."""
        kept = [layer for layer in self._layers.spare if layer not in self._resident]
        surplus = len(self._layers.held) + len(kept) + num_layers - self._max_layers
        for layer in [layer for layer in kept if layer not in needed][: max(0, surplus)]:
            self._layers.drop_spare(layer)

    def wait_before(self, layers: Iterable[int], incoming: Awaited) -> None:
        for layer in layers:
            self._layers.before_run(layer, incoming.wait)

    def stop_waiting(self) -> None:
        self._layers.forget_waits()

    def attend(self, timeout_s: float) -> None:
        self._attend(timeout_s)
