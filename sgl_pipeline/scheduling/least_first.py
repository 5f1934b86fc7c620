"""Members by a key that changes, the one with the least key at hand."""

import heapq
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")
Key = tuple[float | str | tuple[int, ...], ...]


class LeastFirst(Generic[T]):
    """A set in the order of `key`.

    The key of a member may rise at any time, and costs nothing until the member is first; `fell`
    must be called when it may have fallen.
    """

    def __init__(self, key: Callable[[T], Key]) -> None:
        self._key = key
        # No member's key is less than its bound.
        self._bounds: dict[T, Key] = {}
        # Every member with its bound, and entries that are out of date. The number keeps members
        # from being compared.
        self._heap: list[tuple[Key, int, T]] = []
        self._num_pushed = 0

    def __len__(self) -> int:
        return len(self._bounds)

    def __iter__(self) -> Iterator[T]:
        return iter(self._bounds)

    def __contains__(self, member: T) -> bool:
        return member in self._bounds

    def add(self, member: T) -> None:
        """`member` is in it, with the key that it has now."""
        self._bounds[member] = key = self._key(member)
        self._push(key, member)
        if len(self._heap) > 2 * len(self._bounds) + 64:
            self._heap.clear()
            for one, bound in self._bounds.items():
                self._push(bound, one)

    def fell(self, member: T) -> None:
        """The key of `member` may have fallen; without effect if it is not in it."""
        if member in self._bounds and self._key(member) < self._bounds[member]:
            self.add(member)

    def discard(self, member: T) -> None:
        """`member` is not in it any more."""
        self._bounds.pop(member, None)

    def first(self) -> T | None:
        """The member with the least key; it stays. None if there is none."""
        while self._heap:
            bound, _, member = self._heap[0]
            is_member = self._bounds.get(member) == bound
            if is_member and self._key(member) == bound:
                return member
            heapq.heappop(self._heap)
            if is_member:
                self.add(member)
        return None

    def _push(self, bound: Key, member: T) -> None:
        self._num_pushed += 1
        heapq.heappush(self._heap, (bound, self._num_pushed, member))
