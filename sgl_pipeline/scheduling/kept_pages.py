"""Pages that are kept for others: prefixes that other servers read, and pages without contents."""

from sgl_pipeline.scheduling.radix_demand import RadixDemand
from sgl_pipeline.scheduling.radix_storage import RadixStorage
from sgl_pipeline.scheduling.radix_tree import RadixNode, RadixTree
from sgl_pipeline.scheduling.request_pages import RequestPages


class KeptPages:
    """All that is held. Of prefixes, `num_pages` counts a page once for each of them."""

    def __init__(
        self, tree: RadixTree, demand: RadixDemand, storage: RadixStorage, pages: RequestPages
    ) -> None:
        self.num_pages = 0
        self._root, self._demand, self._storage, self._pages = tree.root, demand, storage, pages
        self._aside: list[int] = []

    def hold(self, tokens: list[int], namespace: str) -> RadixNode:
        """Keeps what is cached of `tokens` from eviction; returns its end, for `let_go`."""
        path = self._demand.want(tokens, namespace)
        match = self._storage.match(path)
        self._storage.lock(match)
        self._demand.unwant(path)
        self.num_pages += match.end // self._storage.page_size
        return match

    def let_go(self, end: RadixNode) -> None:
        """Its pages may be evicted again."""
        self._storage.unlock(end)
        self.num_pages -= end.end // self._storage.page_size

    def set_aside(self, num_pages: int) -> None:
        """Has `num_pages` pages out of use in all, or as many of them as can be had now."""
        more = min(num_pages - len(self._aside), self._pages.num_available)
        if more > 0:
            self._aside += self._pages.lend(self._root, more)
        elif more < 0:
            self._pages.take_back(self._root, self._aside[more:])
            del self._aside[more:]
