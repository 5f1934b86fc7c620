"""The rows that a fake stage has sent: the real bookkeeping of pages, fingerprints for rows."""

from collections.abc import Iterable, Iterator, Sequence

from sgl_pipeline.wire.logged_pages import LogContents, LoggedPages, begun_pages
from sgl_pipeline.wire.step_order import MirroredChunk


class FakeLog:
    """What `pp_runner/boundary_log.BoundaryLog` does, without tensors."""

    def __init__(self, capacity: int, page_size: int) -> None:
        self._page_size = page_size
        self._pages = LoggedPages(capacity)
        self._rows: dict[tuple[int, int], int] = {}  # by slot and offset

    def begin(self, chunks: Iterable[MirroredChunk]) -> None:
        for chunk in chunks:
            if chunk.request.lease is not None:
                continue
            end = chunk.start + chunk.length
            for page in begun_pages(chunk.request.pages, chunk.start, end, self._page_size):
                self._pages.enter(page)

    def write(self, chunks: Iterable[MirroredChunk], rows: Sequence[int]) -> None:
        slots = dict(self._pages.items())
        for (page, offset), row in zip(self._places(chunks), rows, strict=True):
            if page in slots:
                self._rows[slots[page], offset] = row

    def read(self, chunks: Iterable[MirroredChunk]) -> list[int]:
        """Raises KeyError for a row that was never kept; one that was replaced is another row."""
        slots = dict(self._pages.items())
        return [self._rows[slots[page], offset] for page, offset in self._places(chunks)]

    def restore(self, contents: LogContents) -> None:
        self._pages.restore(contents)

    def _places(self, chunks: Iterable[MirroredChunk]) -> Iterator[tuple[int, int]]:
        """The page and the offset of each token."""
        for chunk in chunks:
            for position in range(chunk.start, chunk.start + chunk.length):
                place, offset = divmod(position, self._page_size)
                # All rows of a lease have the only page that it has here.
                yield chunk.request.pages[place if chunk.request.lease is None else 0], offset
