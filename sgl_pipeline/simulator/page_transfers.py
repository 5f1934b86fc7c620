"""Transfers of pages in virtual time: a stage's queue of them, and what a pipeline asks of the
place that its pages come from.

That place is a store (`virtual_store.py`), or pools of other servers (`room_servers.py`).
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from sgl_pipeline.pipeline.pipeline_core import PipelineCore
from sgl_pipeline.stage_plan import StagePlan
from sgl_pipeline.wire.store_orders import OfferOrder, StoreOrder, StoreReport

PageOrder = StoreOrder | OfferOrder


class PagePlace(Protocol):
    """The place beyond the pool that a pipeline's tier uses, or gives its own pages to. A
    pipeline whose requests wait asks its scheduler again after `look_s` seconds."""

    look_s: float

    @property
    def is_awaited(self) -> bool:
        """True if something is on its way that a request may be waiting for."""

    @property
    def is_open(self) -> bool:
        """True if anything is on its way, or may come from another server."""

    def next_event_s(self) -> float:
        """The moment of the next answer or report, if no step is sent until then."""

    def exchange(self, core: PipelineCore, now_s: float) -> None:
        """Gives `core` what has come by now, and does what it asks for."""

    def take(self, order: PageOrder, plan: StagePlan, taken_s: Sequence[float]) -> None:
        """An order to all stages, which stage `s` takes at `taken_s[s]`."""

    def ran(self, stage: int, start_s: float, end_s: float) -> None:
        """A step has run on a stage, which sends no report meanwhile."""


@dataclass(slots=True)
class Transfer:
    """A transfer on a stage, and the moment at which the stage can report it."""

    report: StoreReport
    done_s: float


@dataclass(slots=True)
class TransferQueue:
    """The transfers of one kind on one stage, in sequence; the next one can begin at `free_s`."""

    free_s: float = 0.0
    transfers: deque[Transfer] = field(default_factory=deque)

    def add(self, report: StoreReport, taken_s: float, seconds: float) -> None:
        """A transfer of `seconds` that the stage may begin at `taken_s`."""
        self.add_until(report, max(self.free_s, taken_s) + seconds)

    def add_until(self, report: StoreReport, done_s: float) -> None:
        """A transfer that ends at `done_s`, behind those before it."""
        self.free_s = done_s
        self.transfers.append(Transfer(report, done_s))

    def put_off(self, start_s: float, end_s: float) -> None:
        """No report is sent between these moments."""
        for transfer in self.transfers:
            if transfer.done_s >= end_s:
                return
            if transfer.done_s > start_s:
                transfer.done_s = end_s

    def take_due(self, now_s: float, transit_s: float = 0.0) -> list[Transfer]:
        """The transfers whose reports, `transit_s` on their way, are there by `now_s`."""
        due = []
        while self.transfers and self.transfers[0].done_s + transit_s <= now_s:
            due.append(self.transfers.popleft())
        return due


def reports_of(due: list[Transfer]) -> list[StoreReport]:
    """The reports of transfers of several queues, in the sequence of their ends."""
    due = sorted(due, key=lambda transfer: (transfer.done_s, transfer.report.stage))
    return [transfer.report for transfer in due]
