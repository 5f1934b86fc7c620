"""The first of many requests by what the radix tree has of them, kept as nodes are cached or
evicted.

A ranking mirrors the part of the tree that its requests want. All requests below a node that is
not cached have the same hit, so caching or evicting a node changes one place, however many requests
wait below it: a change costs the depth of the tree and a logarithm. Several rankings may look at
one tree; a change costs each of those that have requests below the node. It never decides between
priorities and knows nothing of age.
"""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field

from sgl_pipeline.requests import Request
from sgl_pipeline.scheduling.radix_tree import RadixNode, RadixTree

# Rank, `Request.order`, number, and what has this rank: the lowest is first.
_Entry = tuple[float, tuple[int, int, int], int, "Request | _Place"]
_URGENT = -float("inf")
# Entries that are not current are dropped when there are more of them than current ones, and these.
_SPARE_ENTRIES = 16


@dataclass(slots=True, eq=False)
class _Place:
    """The requests of one ranking that want `node`: those that want no more, and its children's.

    There is a place for each node with such requests, and so for every node above. `entries` is a
    heap with one current entry for each of these requests and places, and some of the past. `rank`
    and `number` are of its own current entry in `parent`; `first` is served first of all below.
    """

    node: RadixNode
    parent: "_Place | None"
    entries: list[_Entry] = field(default_factory=list)
    num_current: int = 0
    size: int = 0
    rank: tuple[float, tuple[int, int, int]] | None = None
    number: int = -1
    first: Request | None = None


class PrefixRanking:
    """Requests of one priority, by longest cached prefix or in depth-first order.

    By longest cached prefix: the most cached tokens first, then by `Request.order`. In depth-first
    order: of the cached nodes below a node the one that most of these requests want is served whole
    before the next, then the requests that go on where nothing is cached, by `Request.order`. The
    walk goes on from the request that was served last. Urgent requests come before all others.
    """

    def __init__(self, rankings: "PrefixRankings", *, depth_first: bool) -> None:
        self._rankings = rankings
        self._depth_first = depth_first
        self._root = _Place(rankings.tree.root, None)
        # Where each request is entered, and the number of its entry.
        self._members: dict[Request, tuple[_Place, int]] = {}
        self._num_entries = 0
        # The walk is there: a place with requests, or the root.
        self._walk = self._root

    def __len__(self) -> int:
        return len(self._members)

    def add(self, request: Request, path: RadixNode, *, is_urgent: bool) -> None:
        """Enters a request that wants `path`."""
        place = self._root if is_urgent else self._place_of(path)
        number = self._next_number()
        self._members[request] = (place, number)
        rank = _URGENT if is_urgent else 0.0
        heapq.heappush(place.entries, (rank, request.order, number, request))
        place.num_current += 1
        self._resize(place, 1)

    def discard(self, request: Request) -> None:
        """Takes out a request, if it is here."""
        if request in self._members:
            place, _ = self._members.pop(request)
            place.num_current -= 1
            self._resize(place, -1)

    def go_on_from(self, request: Request) -> None:
        """The walk goes on from `request`, which is here and about to leave."""
        place, _ = self._members[request]
        self._walk = self._last_cached(place)

    def first(self) -> Request | None:
        """The request to serve next."""
        top = self._top(self._root)
        if top is None or not self._depth_first or top[0] == _URGENT:
            return self._root.first
        self._walk = self._last_cached(self._walk)
        return self._walk.first

    def walked_nodes(self) -> Iterator[RadixNode]:
        """The cached nodes that the walk is in, the lowest first, without the root."""
        place = self._last_cached(self._walk)
        while place.parent is not None:
            yield place.node
            place = place.parent

    # What `PrefixRankings` reports

    def changed(self, place: _Place) -> None:
        """The node of `place` was cached or evicted."""
        at: _Place | None = place
        while at is not None:
            above, before = at.parent, at.rank
            self._rerank(at)
            if at.rank == before:
                return
            at = above

    def put_between(self, upper: RadixNode, place: _Place) -> _Place:
        """A place for `upper`, which is now between the node of `place` and the one above."""
        above = place.parent
        assert above is not None
        between = _Place(upper, above, size=place.size)
        above.num_current -= 1
        place.parent, place.rank, place.number = between, None, -1
        self._rerank(place)
        self._rerank(between)
        return between

    # Inside

    def _place_of(self, path: RadixNode) -> _Place:
        missing: list[RadixNode] = []
        node, place = path, self._rankings.place(path, self)
        while place is None and node.parent is not None:
            missing.append(node)
            node = node.parent
            place = self._rankings.place(node, self)
        place = place or self._root
        for below in reversed(missing):
            place = _Place(below, place)
            self._rankings.keep(below, self, place)
        return place

    def _resize(self, place: _Place, change: int) -> None:
        at: _Place | None = place
        while at is not None:
            above = at.parent
            at.size += change
            self._rerank(at)
            at = above

    def _rerank(self, place: _Place) -> None:
        """Enters `place` anew above it where its rank has changed; drops it when it is empty."""
        top, above = self._top(place), place.parent
        if top is not None:
            best = top[3]
            place.first = best.first if isinstance(best, _Place) else best
        else:
            place.first = None
        if above is None:
            return
        if top is None:
            self._drop(place, above)
            return
        rank = self._rank_of(place, top)
        if rank != place.rank:
            above.num_current += place.rank is None
            place.rank, place.number = rank, self._next_number()
            heapq.heappush(above.entries, (*rank, place.number, place))

    def _rank_of(self, place: _Place, top: _Entry) -> tuple[float, tuple[int, int, int]]:
        """The rank of a place whose first entry is `top`, among all of the place above."""
        assert place.first is not None
        order = place.first.order
        if not place.node.is_cached:
            return 0.0, order
        if self._depth_first:
            return -float(place.size), order
        return top[0] or -float(place.node.end), order

    def _drop(self, place: _Place, above: _Place) -> None:
        above.num_current -= place.rank is not None
        if self._walk is place:
            self._walk = above
        # No reference cycle is left.
        place.parent, place.number = None, -1
        place.entries.clear()
        self._rankings.forget(place.node, self)

    def _top(self, place: _Place) -> _Entry | None:
        entries = place.entries
        if len(entries) > 2 * place.num_current + _SPARE_ENTRIES:
            entries[:] = [entry for entry in entries if self._is_current(entry, place)]
            heapq.heapify(entries)
        while entries and not self._is_current(entries[0], place):
            heapq.heappop(entries)
        return entries[0] if entries else None

    def _is_current(self, entry: _Entry, place: _Place) -> bool:
        _, _, number, item = entry
        if isinstance(item, _Place):
            return item.number == number
        return self._members.get(item) == (place, number)

    def _last_cached(self, place: _Place) -> _Place:
        while not place.node.is_cached:
            assert place.parent is not None
            place = place.parent
        return place

    def _next_number(self) -> int:
        self._num_entries += 1
        return self._num_entries


class PrefixRankings:
    """The places of all rankings over one `tree`, by node; passes on what happens to the nodes."""

    def __init__(self, tree: RadixTree) -> None:
        self.tree = tree
        self._places: dict[RadixNode, dict[PrefixRanking, _Place]] = {}

    def place(self, node: RadixNode, ranking: PrefixRanking) -> _Place | None:
        """The place of `ranking` for `node`, if there is one; none for the root."""
        return self._places.get(node, {}).get(ranking)

    def keep(self, node: RadixNode, ranking: PrefixRanking, place: _Place) -> None:
        """`ranking` has `place` for `node` from now on."""
        self._places.setdefault(node, {})[ranking] = place

    def forget(self, node: RadixNode, ranking: PrefixRanking) -> None:
        """`ranking` has no place for `node` any more."""
        places = self._places[node]
        del places[ranking]
        if not places:
            del self._places[node]

    # Reports of tree and storage

    def on_split(self, upper: RadixNode, lower: RadixNode) -> None:
        """`upper` has taken over the first tokens of `lower`."""
        for ranking, place in tuple(self._places.get(lower, {}).items()):
            self.keep(upper, ranking, ranking.put_between(upper, place))

    def on_changed(self, node: RadixNode) -> None:
        """`node` was cached or evicted."""
        for ranking, place in tuple(self._places.get(node, {}).items()):
            ranking.changed(place)
