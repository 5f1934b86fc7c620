"""Copies cached pages to the store before they are evicted.

A page is saved once it is cached, once another request hits it, or when its eviction is near, by
the write policy. A save keeps its pages from eviction until all stages have reported; their number
is bounded, so pages that wait for too long are evicted unsaved, and counted.
"""

from array import array
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from itertools import islice

from sgl_pipeline.args.tier_args import WritePolicy
from sgl_pipeline.errors import ProtocolError
from sgl_pipeline.object_layers import cuts_of, written_runs
from sgl_pipeline.page_record import PageRecord
from sgl_pipeline.scheduling.page_hashing import hashes_of
from sgl_pipeline.scheduling.page_run import PageRun
from sgl_pipeline.scheduling.radix_storage import RadixStorage
from sgl_pipeline.scheduling.radix_tree import RadixNode
from sgl_pipeline.scheduling.tier_counts import TierCounts
from sgl_pipeline.wire.step_order import INT32
from sgl_pipeline.wire.store_orders import UINT32, PagesSaved, SavePages

# Pages of one order, and orders under way: one takes about as long as the pipeline is deep, and two
# fell behind a busy one in the simulator (benchmark/results/CLAIMS.md).
PAGES_PER_SAVE = 32
SAVES_AT_A_TIME = 8
# Nodes that one call looks at.
DUE_LOOK_AHEAD = 16
# Nodes next to be evicted that `write_back` looks at.
EVICTION_LOOK_AHEAD = 16


@dataclass(slots=True, eq=False)
class PageSave:
    """Pages of `node`, which is locked, on their way to the store."""

    transfer: int
    node: RadixNode
    pages: list[int]
    hashes: Sequence[bytes]
    reports: dict[int, PagesSaved] = field(default_factory=dict)


class PageSaves:
    """All that is to be saved or on its way.

    Args:
        commits: gets the record of each page whose layers are all in the store, parents first.
    """

    def __init__(
        self,
        storage: RadixStorage,
        page_size: int,
        counts: TierCounts,
        commits: list[PageRecord],
    ) -> None:
        self._storage, self._page_size = storage, page_size
        self._counts, self._commits = counts, commits
        self._due: dict[RadixNode, None] = {}
        self._saves: dict[int, PageSave] = {}
        self.last_message = ""  # of a stage that could not write

    # What comes in

    def cached(self, node: RadixNode, policy: WritePolicy) -> None:
        """`node` has got its pages."""
        if policy == "write_through":
            self._due[node] = None

    def hit(self, node: RadixNode, policy: WritePolicy) -> None:
        """A request has found the prefix that ends with `node`."""
        if policy == "write_through_selective" and node.parent is not None:
            self._due[node] = None

    def evicted(self, node: RadixNode, run: PageRun) -> None:
        """`node` is about to lose `run`."""
        above = node.parent
        if node in self._due:
            del self._due[node]
            # It may be the tail of a longer node that was cut for this eviction.
            if above is not None and above.run is not None and above.parent is not None:
                self._due[above] = None
        self._counts.unsaved_tokens += (len(run.pages) - run.num_saved) * self._page_size

    def save_before_eviction(self) -> None:
        """Saves what comes up for eviction next."""
        for node in self._storage.next_evicted(EVICTION_LOOK_AHEAD):
            if node.run is not None and node.run.num_saved < len(node.run.pages):
                self._due[node] = None

    def take(self, report: PagesSaved, num_stages: int) -> None:
        """A stage has ended a save. Raises ProtocolError for one that it was not ordered."""
        save = self._saves.get(report.transfer)
        if save is None or report.stage in save.reports or not _is_whole(report, len(save.pages)):
            raise ProtocolError(
                f"stage {report.stage} reported save {report.transfer}, which it has reported "
                "before, was never sent, or does not describe"
            )
        save.reports[report.stage] = report
        self._counts.save_s += report.busy_s
        self._counts.saved_bytes += report.num_pages * sum(report.sizes)
        if report.message:
            self.last_message = report.message
        if len(save.reports) == num_stages:
            del self._saves[report.transfer]
            self._end(save)

    # What goes out

    def next_orders(
        self, owed: Set[int], room: int, next_transfer: Callable[[], int]
    ) -> Iterator[SavePages]:
        """Starts saves, of at most `room` more pages.

        Args:
            owed: pages that some stage must compute again first. No prefix that has one is locked:
                it may be forgotten at any time.
        """
        for due in list(islice(self._due, DUE_LOOK_AHEAD)):
            if len(self._saves) == SAVES_AT_A_TIME or room <= 0:
                return
            del self._due[due]
            node = self._topmost_unsaved(due)
            if node is None:
                continue
            self._due[due] = None  # behind all others, until nothing of it is unsaved
            is_owed = owed and not owed.isdisjoint(self._storage.pages_of(node))
            if is_owed or any(one.node is node for one in self._saves.values()):
                continue
            save = self._start(node, room, next_transfer)
            room -= len(save.pages)
            hashes = b"".join(save.hashes)
            yield SavePages(save.transfer, array(INT32, save.pages).tobytes(), hashes)

    def _start(self, node: RadixNode, room: int, next_transfer: Callable[[], int]) -> PageSave:
        """Begins to save the next pages of `node`."""
        run = node.run
        assert run is not None
        first = run.num_saved
        pages = run.pages[first : first + min(PAGES_PER_SAVE, room)]
        hashes = hashes_of(node, self._page_size)[first : first + len(pages)]
        save = PageSave(next_transfer(), node, pages, hashes)
        self._storage.lock(node)
        self._saves[save.transfer] = save
        return save

    def loaded(self, path: RadixNode, num_pages: int) -> None:
        """The store has the last `num_pages` pages of the cached `path`, and all before them."""
        node: RadixNode | None = path
        while num_pages > 0 and node is not None and node.run is not None:
            run = node.run
            run.num_saved = len(run.pages)
            num_pages -= len(run.pages)
            node = node.parent

    def cancel(self) -> None:
        """Forgets the saves under way; their pages are due still."""
        for save in self._saves.values():
            self._storage.unlock(save.node)
        self._saves.clear()

    def begin(self, policy: WritePolicy) -> None:
        """Another store, or none, is used from now on; after `cancel`. It has no page yet."""
        self._due.clear()
        for node in self._storage.cached_nodes():
            assert node.run is not None
            node.run.num_saved = 0
            self.cached(node, policy)

    @property
    def saving_pages(self) -> int:
        """Pages on their way."""
        return sum(len(save.pages) for save in self._saves.values())

    def _topmost_unsaved(self, node: RadixNode) -> RadixNode | None:
        """The first node on the way from the root to `node` of which the store lacks pages."""
        found = None
        above: RadixNode | None = node
        while above is not None and above.run is not None and above.parent is not None:
            if above.run.num_saved < len(above.run.pages):
                found = above
            above = above.parent
        return found

    def _end(self, save: PageSave) -> None:
        """All stages have reported: the pages that all of them have written are in the store."""
        reports = [save.reports[stage] for stage in sorted(save.reports)]
        num_pages = min(report.num_pages for report in reports)
        sizes = tuple(size for report in reports for size in report.sizes)
        cuts = cuts_of(
            run
            for report in reports
            for run in written_runs(range(*report.layers), is_grouped=report.is_grouped)
        )
        checksums = [array(UINT32, report.checksums) for report in reports]
        for index in range(num_pages):
            of_page = b"".join(
                column[index * len(one.sizes) : (index + 1) * len(one.sizes)].tobytes()
                for column, one in zip(checksums, reports, strict=True)
            )
            self._commits.append(PageRecord(save.hashes[index], sizes, of_page, cuts))
        self._note_saved(save.node, set(save.pages[:num_pages]))
        self._counts.saved_tokens += num_pages * self._page_size
        self._storage.unlock(save.node)
        if num_pages < len(save.pages):
            # The next attempt comes with the next page that is cached there or hit.
            self._counts.num_failed_saves += 1
            self._due.pop(save.node, None)

    @staticmethod
    def _note_saved(node: RadixNode, saved: set[int]) -> None:
        """The node may have been split since its pages were sent."""
        above: RadixNode | None = node
        while saved and above is not None and above.run is not None and above.parent is not None:
            run = above.run
            while run.num_saved < len(run.pages) and run.pages[run.num_saved] in saved:
                saved.discard(run.pages[run.num_saved])
                run.num_saved += 1
            above = above.parent


def _is_whole(report: PagesSaved, num_pages: int) -> bool:
    """True if `report` has a checksum for each layer that it names."""
    first, end = report.layers
    num_layers = len(report.sizes)
    return (
        report.num_pages <= num_pages
        and end - first == num_layers
        and len(report.checksums) == 4 * report.num_pages * num_layers
    )
