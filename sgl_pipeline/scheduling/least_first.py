"""Members by a key that may change, the one with the least key at hand."""

import heapq
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")
Key = tuple[float | str, ...]


class LeastFirst(Generic[T]):
    """A set in the order of `key`, which is asked when a member is added or has moved."""

    def __init__(self, key: Callable[[T], Key]) -> None:
        self._key = key
        self._keys: dict[T, Key] = {}
        # Every member with its key, and entries that are out of date. The number keeps members from
        # being compared.
        self._heap: list[tuple[Key, int, T]] = []
        self._num_pushed = 0

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[T]:
        return iter(self._keys)

    def __contains__(self, member: T) -> bool:
        return member in self._keys

    def add(self, member: T) -> None:
        """`member` is in it, with the key that it has now."""
        self._keys[member] = key = self._key(member)
        self._push(key, member)
        if len(self._heap) > 2 * len(self._keys) + 64:
            self._heap.clear()
            for one, its_key in self._keys.items():
                self._push(its_key, one)

    def moved(self, member: T) -> None:
        """The key of `member` may have changed; without effect if it is not in it."""
        if member in self._keys and self._keys[member] != self._key(member):
            self.add(member)

    def discard(self, member: T) -> None:
        """`member` is not in it any more."""
        self._keys.pop(member, None)

    def first(self) -> T | None:
        """The member with the least key; it stays. None if there is none."""
        while self._heap:
            key, _, member = self._heap[0]
            if self._keys.get(member) == key:
                return member
            heapq.heappop(self._heap)
        return None

    def _push(self, key: Key, member: T) -> None:
        self._num_pushed += 1
        heapq.heappush(self._heap, (key, self._num_pushed, member))
