"""The leases of one stage to peers, for the thread of the steps.

While pages of the stage's layers are on their way to it, its leases are held back. The door opens
with the first lease: a server that lends nothing has none.
"""

from array import array
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from sgl_pipeline.errors import ProtocolError
from sgl_pipeline.pp_runner.attention.attention_backend import AttentionShape, LayerwiseAttention
from sgl_pipeline.pp_runner.attention.kv_pool import KvPool
from sgl_pipeline.pp_runner.lent_attention.attention_server import Borrower, serve_attention
from sgl_pipeline.pp_runner.lent_attention.leases import Leases
from sgl_pipeline.pp_runner.links.stream_server import StreamServer
from sgl_pipeline.wire.lease_orders import EndLease, LeaseOrder, LendPages, PagesLent
from sgl_pipeline.wire.step_order import INT32


class StageLeases:
    """Leases that have begun, and those that are held back.

    Args:
        shapes: of all layers of the model.
        make_attention: makes the attention of all layers, for another thread than that of the
            steps.
        own_layers: gives the layers that the stage has now.
        run_directory: that of the host, where the keys are too.
        door: at which peers reach the stage.
    """

    def __init__(
        self,
        stage: int,
        kv_pool: KvPool,
        shapes: Sequence[AttentionShape],
        make_attention: Callable[[], LayerwiseAttention],
        own_layers: Callable[[], range],
        run_directory: str,
        door: str,
    ) -> None:
        self._stage, self._kv_pool, self._own_layers = stage, kv_pool, own_layers
        self._run_directory, self._door = run_directory, door
        self._leases = Leases(shapes, make_attention)
        self._server: StreamServer[Borrower] | None = None
        self._held_back: dict[int, tuple[LendPages, npt.NDArray[np.int32]]] = {}
        self._begun: list[PagesLent] = []

    @property
    def is_open(self) -> bool:
        """True if there are leases for `begin`, or reports for `take_reports`."""
        return bool(self._held_back or self._begun)

    def obey(self, order: LeaseOrder) -> None:
        """Takes a lease, or ends one. Raises ProtocolError for a lease that there is already, or
        whose pages the pool does not have."""
        if isinstance(order, EndLease):
            self._held_back.pop(order.lease, None)
            self._leases.end(order.lease)
            return
        if order.lease in self._held_back or self._leases.is_lent(order.lease):
            raise ProtocolError(f"lease {order.lease} was made twice")
        self._held_back[order.lease] = order, _pages_of(order, self._kv_pool.num_pages)

    def begin(self) -> None:
        """Begins the leases that were held back."""
        if not self._held_back:
            return
        if not self._leases.knows_layers:
            self._leases.hold(self._own_layers(), self._kv_pool)
        for order, pages in self._held_back.values():
            self._leases.lend(order.lease, order.digest, pages, order.first_own)
            self._begun.append(PagesLent(self._stage, order.lease))
        self._held_back.clear()
        if self._server is None:
            self._server = serve_attention(self._leases, self._run_directory, self._door)

    def take_reports(self) -> list[PagesLent]:
        """The reports of leases that have begun since the last call."""
        begun, self._begun = self._begun, []
        return begun

    def forget(self) -> None:
        """Ends all leases; no report comes."""
        self._held_back.clear()
        self._begun.clear()
        self._leases.forget()

    def close(self) -> None:
        """`forget`, and closes the door."""
        self.forget()
        if self._server is not None:
            self._server.close()


def _pages_of(order: LendPages, num_pages: int) -> npt.NDArray[np.int32]:
    """The pages of a lease, for a pool of `num_pages`. Raises ProtocolError for others."""
    try:
        ids = array(INT32, order.pages)
    except ValueError as error:
        raise ProtocolError(f"the pages of lease {order.lease} cannot be read: {error}") from None
    if not ids or not 0 <= min(ids) <= max(ids) < num_pages:
        raise ProtocolError(
            f"lease {order.lease} is of {len(ids)} pages {min(ids, default=0)} to "
            f"{max(ids, default=0)}, the pool has {num_pages}"
        )
    if order.first_own >= len(ids):
        raise ProtocolError(f"lease {order.lease} has no page of its own")
    return np.array(ids, np.int32)
