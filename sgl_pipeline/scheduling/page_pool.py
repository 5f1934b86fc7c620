"""The ids of the KV pages that are not in use.

One pool for the whole pipeline: a page id means the same place on every stage. The pool does not
know who holds a page, only that each is given out once.
"""

from collections.abc import Iterable


class PagePool:
    """Hands out page ids from 0 to `num_pages - 1` and takes them back."""

    def __init__(self, num_pages: int) -> None:
        self.resize(num_pages)

    def resize(self, num_pages: int) -> None:
        """Changes the size to `num_pages`; all are free."""
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._is_free = bytearray(b"\x01") * num_pages

    @property
    def num_free(self) -> int:
        return len(self._free)

    def pages_in_use(self) -> list[int]:
        """All pages that are not free, ascending; looks at each."""
        return [page for page, is_free in enumerate(self._is_free) if not is_free]

    def allocate(self, count: int) -> list[int]:
        """`count` page ids; the caller makes sure that `num_free` suffices."""
        assert 0 <= count <= len(self._free), f"{count} pages asked, {len(self._free)} are free"
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._is_free[page] = 0
        return pages

    def free(self, pages: Iterable[int]) -> None:
        """Takes back pages, each of which `allocate` gave out."""
        for page in pages:
            assert not self._is_free[page], f"page {page} was freed twice"
            self._is_free[page] = 1
            self._free.append(page)
