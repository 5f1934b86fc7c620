"""The link that carries pages and states from any stage to any other, for layers that move.

The stages of a move open it for that move. Cells of 16 bytes, whose contents both ends agree on
(`layer_moves/page_rows.py`), travel as the rows of activations do, through shared memory or to
another host (`open_link.py`). While steps of the old plan run, no stage waits: the source checks
whether the target keeps up, the target whether there is anything.
"""

import contextlib

import torch

from sgl_pipeline.pp_runner.layer_moves.move_site import Parcel, StageGone
from sgl_pipeline.pp_runner.links.activation_link import ActivationShape
from sgl_pipeline.pp_runner.links.buffered_link import RowInbox, RowOutbox
from sgl_pipeline.pp_runner.links.open_link import open_inbox, open_outbox

# Parcels under way at most, before the switch and of states after it: enough for a busy source
# after a step, and few for a target that must take them before it can run the layers.
MAX_UNREAD = 16
# Tags of parcels.
_MORE, _LAST = 0, 1


class StagePageLinks:
    """The page links of one stage.

    Args:
        places: its address to each stage, as in `StageAssignment.page_links`; they may be changed
            while no link is open.
        row_bytes: of a row of this link, a cell of a page or of a state.
        run_directory: of this host.
    """

    def __init__(
        self, places: tuple[str, ...], stage: int, row_bytes: int, run_directory: str
    ) -> None:
        self.places = places
        self._stage = stage
        self._shape = ActivationShape(row_bytes, torch.uint8, torch.device("cpu"))
        self._run_directory = run_directory

    def sender(self, move: int, target: int) -> "StagePageSender":
        return self.sender_at(self._address(target, move, self._stage, target))

    def receiver(self, move: int, source: int) -> "StagePageReceiver":
        return self.receiver_at(self._address(source, move, source, self._stage))

    def sender_at(self, address: str) -> "StagePageSender":
        return StagePageSender(open_outbox(address, self._shape, self._run_directory), self._shape)

    def receiver_at(self, address: str) -> "StagePageReceiver":
        return StagePageReceiver(open_inbox(address, self._shape, self._run_directory))

    def _address(self, other: int, move: int, source: int, target: int) -> str:
        return f"{self.places[other]}/pages-{move}-{source}-{target}"


class StagePageSender:
    """A `PageSender` of the cells of pages or states, [N, row_bytes] (uint8)."""

    def __init__(self, outbox: RowOutbox, shape: ActivationShape) -> None:
        self._outbox = outbox
        self._no_rows = torch.empty((0, shape.hidden_size), dtype=shape.dtype)

    def can_send(self) -> bool:
        try:
            return self._outbox.num_unread() < MAX_UNREAD
        except OSError:
            return False  # the target does not listen yet, or no more

    def send(self, parcel: Parcel[torch.Tensor]) -> None:
        """A parcel for a target that has gone is dropped: its end is noticed elsewhere."""
        rows = self._no_rows if parcel.rows is None else parcel.rows
        with contextlib.suppress(ConnectionError, FileNotFoundError):
            self._outbox.send(_LAST if parcel.is_last else _MORE, rows)

    def has_room(self) -> bool:
        with contextlib.suppress(ConnectionError, FileNotFoundError):
            return self._outbox.num_unread() < MAX_UNREAD
        return True  # parcels for a target that has gone are dropped

    def close(self) -> None:
        self._outbox.close()


class StagePageReceiver:
    """A `PageReceiver` of such rows. It listens from the beginning."""

    def __init__(self, inbox: RowInbox) -> None:
        self._inbox = inbox

    def receive(self, timeout_s: float) -> Parcel[torch.Tensor] | None:
        if not self._inbox.has_news(timeout_s):
            return None
        received = self._inbox.take()
        if received is None:
            raise StageGone
        tag, rows = received
        return Parcel(rows if len(rows) else None, rows.nbytes, is_last=tag == _LAST)

    def close(self) -> None:
        self._inbox.close()
