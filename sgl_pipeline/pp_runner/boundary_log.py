"""The rows that a stage has sent to the next one, kept as long as the log has room for their pages.

Every stage but the last has one, on a CPU. When the next stage is replaced, it computes its keys
and values again from these rows, by itself. A row is kept at the place of its token's keys and
values, by page and offset: like them, it is valid until the page is written anew.
"""

from collections.abc import Iterable

import numpy as np
import torch

from sgl_pipeline.errors import ProtocolError
from sgl_pipeline.pp_runner.links.activation_link import ActivationShape
from sgl_pipeline.wire.logged_pages import LogContents, LoggedPages, begun_pages
from sgl_pipeline.wire.step_order import MirroredChunk


class BoundaryLog:
    """Rows of at most `capacity` of the stage's `num_pages` pages.

    The memory is reserved now, and taken when it is first written to.
    """

    def __init__(
        self, capacity: int, num_pages: int, page_size: int, shape: ActivationShape
    ) -> None:
        self._page_size = page_size
        self._pages = LoggedPages(capacity)
        self._slots = np.full(num_pages, -1, np.int64)  # of each page; -1: not in the log
        self._rows = torch.empty((capacity * page_size, shape.hidden_size), dtype=shape.dtype)

    @property
    def num_bytes(self) -> int:
        """Bytes of all rows that there is room for."""
        return self._rows.nbytes

    def begin(self, chunks: Iterable[MirroredChunk]) -> None:
        """Enters the pages that the chunks of a step are the first to write to. That of a lease
        holds nothing behind its step, and its rows are not sent again."""
        for chunk in chunks:
            if chunk.request.lease is not None:
                continue
            end = chunk.start + chunk.length
            for page in begun_pages(chunk.request.pages, chunk.start, end, self._page_size):
                slot, left = self._pages.enter(page)
                if left is not None:
                    self._slots[left] = -1
                if slot is not None:
                    self._slots[page] = slot

    def write(self, slots: torch.Tensor, rows: torch.Tensor) -> None:
        """Keeps `rows` [T, H] of the tokens at `slots` [T] (`StepInputs.slots`), if their pages are
        in the log."""
        places, is_logged = self._places(slots)
        if not is_logged.all():
            places, rows = places[is_logged], rows[torch.from_numpy(is_logged)]
        self._rows.index_copy_(0, torch.from_numpy(places), rows)

    def read(self, slots: torch.Tensor) -> torch.Tensor:
        """The rows [T, H] of the tokens at `slots` [T].

        Raises ProtocolError if one was not kept.
        """
        places, is_logged = self._places(slots)
        if not is_logged.all():
            page = int(slots[int(np.argmin(is_logged))]) // self._page_size
            raise ProtocolError(
                f"the rows of page {page} were requested, which this stage does not have"
            )
        return self._rows[torch.from_numpy(places)]

    def restore(self, contents: LogContents) -> None:
        """From now on the log holds the pages of `contents`; rows that were written are kept."""
        self._pages.restore(contents)
        self._slots.fill(-1)
        for page, slot in self._pages.items():
            self._slots[page] = slot

    def _places(self, slots: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
        """The places of the rows of `slots` in the log [T], and whether each is there [T]."""
        pages, offsets = np.divmod(slots.numpy(), self._page_size)
        own = self._slots[pages]
        return own * self._page_size + offsets, own >= 0
