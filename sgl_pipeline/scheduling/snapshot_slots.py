"""The slots of snapshots, and which gives way where a request or a newer snapshot wants one."""

from collections.abc import Callable

from sgl_pipeline.microbatch import StateSnapshot
from sgl_pipeline.scheduling.radix_tree import RadixNode
from sgl_pipeline.scheduling.snapshot_storage import SnapshotStorage
from sgl_pipeline.scheduling.state_slots import StateSlots


class SnapshotSlots:
    """Manages the slots of snapshots: those of `storage`, and those in the lists in which running
    requests hold theirs until pages lead there; `free_pages` takes pages back that are lost with
    one.

    One that a request holds and that its decode leaves in the step that is being put together does
    not give way: that step reads it.
    """

    def __init__(
        self,
        slots: StateSlots,
        storage: SnapshotStorage,
        free_pages: Callable[[list[int]], None],
    ) -> None:
        self._slots = slots
        self._storage = storage
        self._order = storage.snapshots
        self._free_pages = free_pages
        # By slot the list that has its snapshot, the oldest first; apart from them those that were
        # left in the step that is being put together.
        self._held: dict[int, list[StateSnapshot]] = {}
        self._left: dict[int, list[StateSnapshot]] = {}
        slots.source = self

    @property
    def num_evictable(self) -> int:
        return self._order.num_evictable + len(self._held)

    def evict(self) -> None:
        """Frees the slot of the least recently used snapshot that no waiting request wants, if a
        search of `MAX_PASSED` finds one, else of one that is held, else of one that is wanted."""
        node = self._order.first_unwanted()
        if node is None and self._held:
            slot, held = next(iter(self._held.items()))
            snapshot = next(one for one in held if one.slot == slot)
            self._slots.put_back(self.let_go(held, snapshot))
            return
        self._drop(self._order.first() if node is None else node)

    def take(self) -> int | None:
        """A slot for a snapshot: a free one, or that of a snapshot in the tree that no waiting
        request wants; None: there is none."""
        if not self._slots.num_free and (node := self._order.first_unwanted()) is not None:
            self._drop(node)
        return self._slots.take_free()

    def take_after(self, cached: RadixNode) -> int | None:
        """As `take`, for the request up to whose node `cached` is cached: rather the slot of its
        last snapshot in the tree than of another's."""
        if not self._slots.num_free:
            self._order.give_up_first(cached, 0)
        return self.take()

    def hold(self, held: list[StateSnapshot], snapshot: StateSnapshot) -> None:
        """A request has `snapshot` in its list `held` from now on."""
        held.append(snapshot)
        self._held[snapshot.slot] = held

    def leave(self, held: list[StateSnapshot], snapshot: StateSnapshot) -> None:
        """As `hold`, in the step that is being put together, which begins with it."""
        held.append(snapshot)
        self._left[snapshot.slot] = held

    def let_go(self, held: list[StateSnapshot], snapshot: StateSnapshot) -> int:
        """Takes `snapshot` out of the list `held`; returns its slot."""
        held.remove(snapshot)
        del self._held[snapshot.slot]
        return snapshot.slot

    def end_step(self) -> None:
        """A step has its chunks: the next one may write to the slots that it reads."""
        self._held.update(self._left)
        self._left.clear()

    def check(self, held: dict[int, list[StateSnapshot]]) -> None:
        """Asserts that `held`, between two steps, are all that requests hold."""
        assert self._held == held and not self._left

    def _drop(self, node: RadixNode) -> None:
        self._slots.put_back(self._storage.detach(node))
        self._free_pages(self._storage.drop_useless(node))
