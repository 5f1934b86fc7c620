"""The KV pages of one node of the radix tree, and where they lie.

A run is stored on a `RadixNode`. It contains neither tokens nor nodes, so the tree can split a node
without asking where its pages lie.
"""

from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class PageRun:
    """Pages of the stages' pool, as ids in token order; the cache owns them. The first `num_saved`
    of them are in the store as well (`page_saves.py`).

    `lock_count` counts the locks on prefixes that include the node: no cached child has more. The
    run may be evicted while it is 0 and no child of the node is cached. `is_offered` is true while
    the node has an entry in the eviction heap, which is never more than one.
    """

    pages: list[int]
    lock_count: int = 0
    num_cached_children: int = 0
    is_offered: bool = False
    num_saved: int = 0

    def cut_front(self, num_pages: int) -> "PageRun":
        """Moves the first `num_pages` to a new run under the same locks, and returns it.

        The new run is for a node above this run's node. The list moves with the front and only the
        rest is copied: eviction cuts short tails off long runs.
        """
        front = PageRun(self.pages, self.lock_count, num_cached_children=1)
        self.pages = front.pages[num_pages:]
        del front.pages[num_pages:]
        front.num_saved = min(self.num_saved, num_pages)
        self.num_saved -= front.num_saved
        return front
