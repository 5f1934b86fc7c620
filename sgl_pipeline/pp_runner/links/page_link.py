"""The way of KV pages from any stage to any other of one host, for layers that move.

Opened by the stages of a move, for that move. Pages travel as the rows of activations do, through
buffers in shared memory (`buffered_link.py`), but nobody waits for them: the source looks whether
the target keeps up, the target whether there is anything. What a row holds is up to both ends
(`layer_moves/page_rows.py`).
"""

import contextlib

import torch

from sgl_pipeline.pp_runner.layer_moves.move_site import Parcel, StageGone
from sgl_pipeline.pp_runner.links.activation_link import ActivationShape
from sgl_pipeline.pp_runner.links.buffered_link import Inbox, Outbox
from sgl_pipeline.pp_runner.links.host_link import SharedMemory

# Parcels under way at most, before the switch: enough for what a busy source sends after a step,
# and little for a target that has to take them up before it can run the layers.
MAX_UNREAD = 16
# Tags of parcels.
_MORE, _LAST = 0, 1


class HostPageLinks:
    """The page links of one stage.

    Args:
        run_directory: where the sockets are.
        row_bytes: of one page.
    """

    def __init__(self, run_directory: str, stage: int, row_bytes: int) -> None:
        self._run_directory = run_directory
        self._stage = stage
        self._shape = ActivationShape(row_bytes, torch.uint8, torch.device("cpu"))

    def sender(self, move: int, target: int) -> "HostPageSender":
        return HostPageSender(self._path(move, self._stage, target), self._shape)

    def receiver(self, move: int, source: int) -> "HostPageReceiver":
        return HostPageReceiver(self._path(move, source, self._stage), self._shape)

    def _path(self, move: int, source: int, target: int) -> str:
        return f"{self._run_directory}/pages-{move}-{source}-{target}"


class HostPageSender:
    """A `PageSender` of rows [N, row_bytes] (uint8)."""

    def __init__(self, path: str, shape: ActivationShape) -> None:
        self._outbox = Outbox(path, SharedMemory(shape))
        self._no_rows = torch.empty((0, shape.hidden_size), dtype=shape.dtype)

    def can_send(self) -> bool:
        try:
            return self._outbox.num_unread() < MAX_UNREAD
        except OSError:
            return False  # the target does not listen yet, or no more

    def send(self, parcel: Parcel[torch.Tensor]) -> None:
        """What is sent to a target that has gone is dropped: its end is noticed elsewhere."""
        rows = self._no_rows if parcel.rows is None else parcel.rows
        with contextlib.suppress(OSError):
            self._outbox.send(_LAST if parcel.is_last else _MORE, rows)

    def close(self) -> None:
        self._outbox.close()


class HostPageReceiver:
    """A `PageReceiver` of such rows. It listens from the beginning."""

    def __init__(self, path: str, shape: ActivationShape) -> None:
        self._inbox = Inbox(path, SharedMemory(shape))

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
