"""The layer move under way in virtual time, and what its stages say of it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

from sgl_pipeline.microbatch import Microbatch
from sgl_pipeline.simulator.page_copies import MoveCosts, PageCopy
from sgl_pipeline.stage_plan import StagePlan
from sgl_pipeline.wire.move_orders import MoveDone, MoveReady, MoveReport, PrepareMove, layer_moves

_INT32_BYTES = 4


class WrittenPlaces(NamedTuple):
    """The pages and state slots that a step writes to."""

    pages: Sequence[int]
    slots: Sequence[int]

    @classmethod
    def of(cls, microbatch: Microbatch, page_size: int) -> "WrittenPlaces":
        """The places of a step with these chunks; `page_size` in tokens."""
        pages: list[int] = []
        slots: list[int] = []
        for chunk in microbatch.chunks:
            pages += chunk.request.pages[chunk.start // page_size : -(-chunk.end // page_size)]
            slots += (one.slot for one in chunk.snapshots)
            if chunk.request.state_slot is not None:
                slots.append(chunk.request.state_slot)
        return cls(pages, slots)


@dataclass(slots=True)
class VirtualMove:
    """`began_s[s]` is when stage `s` took the newest order of it."""

    costs: MoveCosts
    move: int
    began_s: list[float]
    loaded_s: list[float]
    load_s: list[float]
    copies: list[PageCopy]
    patch_s: list[float]
    wait_s: list[float]
    is_switched: bool = False
    awaiting: set[int] = field(default_factory=set)  # stages whose next step waits for pages
    answered: set[int] = field(default_factory=set)

    @classmethod
    def of(
        cls, costs: MoveCosts, order: PrepareMove, plan: StagePlan, began_s: list[float]
    ) -> "VirtualMove":
        """The move from `plan`, which stage `s` begins at `began_s[s]`."""
        num_pages = len(order.pages) // _INT32_BYTES
        slots = tuple(memoryview(order.slots).cast("i"))
        ways = [
            (way, tuple(one.layer for one in group))
            for way, group in groupby(
                layer_moves(plan, order.plan), key=lambda one: (one.source, one.target)
            )
        ]
        load_s = [0.0] * len(began_s)
        for (_, target), layers in ways:
            load_s[target] += costs.load_s(len(layers))
        loaded_s = [began + load for began, load in zip(began_s, load_s, strict=True)]
        copies = [
            PageCopy(
                costs,
                layers,
                source,
                target,
                num_pages,
                slots,
                # A target takes up nothing before the layers are there.
                begins_s=max(began_s[source], loaded_s[target]) + costs.latency_s,
            )
            for (source, target), layers in ways
        ]
        zeros = [0.0] * len(began_s)
        return cls(costs, order.move, began_s, loaded_s, load_s, copies, zeros.copy(), zeros.copy())

    def of_source(self, stage: int) -> Iterator[PageCopy]:
        return (copy for copy in self.copies if copy.source == stage)

    def of_target(self, stage: int) -> Iterator[PageCopy]:
        return (copy for copy in self.copies if copy.target == stage)

    def due(self, free_s: Sequence[float]) -> Iterator[tuple[float, int]]:
        """The moments at which stages answer that have not, if they are free from `free_s` on."""
        for stage, since_s in enumerate(free_s):
            if stage not in self.answered:
                at_s = self._done_s if self.is_switched else self._ready_s
                yield at_s(stage, since_s), stage

    def report(self, stage: int) -> MoveReport:
        """The answer of a stage."""
        if not self.is_switched:
            return MoveReady(stage=stage, move=self.move, load_ms=self.load_s[stage] * 1e3)
        return MoveDone(
            stage=stage,
            move=self.move,
            copied_bytes=int(sum(copy.copied_bytes for copy in self.of_source(stage))),
            patched_bytes=int(sum(copy.patch_bytes for copy in self.of_source(stage))),
            patch_ms=self.patch_s[stage] * 1e3,
            wait_ms=self.wait_s[stage] * 1e3,
        )

    def _ready_s(self, stage: int, free_s: float) -> float:
        ready_s = max(self.began_s[stage], self.loaded_s[stage])
        now_s = free_s
        for copy in self.of_source(stage):
            since_s = copy.looked_s if self.costs.copying == "beside" else now_s
            now_s = copy.sent_if_idle(since_s)
            ready_s = max(ready_s, now_s if copy.ready_s is None else copy.ready_s)
        return ready_s

    def _done_s(self, stage: int, free_s: float) -> float:
        done_s = self.began_s[stage]
        for copy in self.of_target(stage):
            done_s = max(done_s, copy.has_all_if_idle(free_s))
        return done_s
