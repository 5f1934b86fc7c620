"""From a worker's request to leave to the moment at which another worker fills its stage.

`StageRecovery` carries out the last step. A worker that was asked to leave serves on while a spare,
its successor, loads the same layers, and while the stage's pages are copied. Then no step is
decided until those in flight are done and the rest of the pages has followed: that is the pause
that clients see. Nothing is given up before its end, so a failure costs only the attempt. Does no
I/O and reads no clock.
"""

from array import array
from collections.abc import Iterator
from dataclasses import dataclass

from sgl_pipeline.args import RecoveryArgs
from sgl_pipeline.pipeline.pipeline_core import PipelineCore
from sgl_pipeline.pipeline.worker_roster import Addressed, WorkerRoster
from sgl_pipeline.wire.stage_messages import (
    FinishHandover,
    HandPagesOver,
    PagesCopied,
    PagesTaken,
    TakePagesOver,
)
from sgl_pipeline.wire.step_order import INT32


@dataclass(slots=True)
class Handover:
    """Pages on their way from `leaver` to `successor`. No step has been decided since `held_s`."""

    number: int
    stage: int
    leaver: int
    successor: int
    held_s: float | None = None
    is_copied: bool = False
    is_finishing: bool = False
    is_taken: bool = False


class StageHandovers:
    """The handovers of one pipeline, one after the other; successors load at the same time.

    Args:
        core: is held, without new steps, while the rest of the pages is on its way.
        roster: of the same pipeline.
    """

    def __init__(self, core: PipelineCore, roster: WorkerRoster, args: RecoveryArgs) -> None:
        self._core = core
        self._roster = roster
        self._args = args
        self._asked_s: dict[int, float] = {}  # when each leaver was asked to go
        self._open: Handover | None = None
        self._num_handovers = 0

    @property
    def leavers(self) -> tuple[int, ...]:
        """The workers that were asked to go and have not gone, in order of these requests."""
        return tuple(self._asked_s)

    @property
    def is_under_way(self) -> bool:
        """True if a successor loads, or takes pages over."""
        return any(self._successor_of(worker) is not None for worker in self._asked_s)

    @property
    def num_wanted_workers(self) -> int:
        """Number of leavers that have no successor."""
        return sum(self._successor_of(worker) is None for worker in self._asked_s)

    def leave(self, worker: int, now_s: float) -> None:
        """The worker was asked to go. No layer move begins before it has gone."""
        self._asked_s.setdefault(worker, now_s)
        self._core.migration.is_held = True

    def take(self, message: PagesCopied | PagesTaken) -> None:
        """Applies a report on a handover; a report on an abandoned one has no effect."""
        handover = self._open
        if handover is None or message.handover != handover.number:
            return
        if isinstance(message, PagesCopied):
            handover.is_copied = True
        else:
            handover.is_taken = True

    def go_on(self, now_s: float) -> Iterator[Addressed]:
        """The messages to workers now, while no recovery is under way."""
        if self._core.migration.is_moving:
            return
        for worker in self._asked_s:
            stage = self._roster.worker_stage(worker)
            if stage is not None and self._roster.successor_of(stage) is None:
                yield from self._roster.give_successor(stage, self._core.plan)
        if self._open is None:
            yield from self._begin()
        handover = self._open
        if handover is None or not handover.is_copied:
            return
        if handover.held_s is None:
            handover.held_s = now_s
            self._core.is_held = True
        if not handover.is_finishing and not self._core.open_steps:
            handover.is_finishing = True
            yield handover.leaver, FinishHandover(handover.number)

    def take_done(self) -> Handover | None:
        """The handover whose pages are all there, once: the successor can fill the stage."""
        handover = self._open
        if handover is None or not handover.is_taken:
            return None
        self.forget(handover.leaver)
        return handover

    def interrupt(self) -> None:
        """All stages begin anew: copied pages are of no use."""
        self._open = None
        self._core.is_held = False

    def forget(self, worker: int) -> None:
        """A worker has gone, as a leaver or otherwise; if it took part in the handover under way,
        that is given up."""
        self._asked_s.pop(worker, None)
        self._core.migration.is_held = bool(self._asked_s)
        if self._open is not None and worker in (self._open.leaver, self._open.successor):
            self.interrupt()

    def late_workers(self, now_s: float, last_reason: str) -> Iterator[tuple[int, str]]:
        """Workers that leave without a successor, and the reason to report for each; `last_reason`
        is why no worker came."""
        limit_s = self._args.join_limit_s
        for worker, asked_s in self._asked_s.items():
            if self._args.mode == "off":
                yield worker, "it was asked to leave, and stages are not replaced"
            elif now_s - asked_s > limit_s:
                why = f": {last_reason}" if last_reason else ""
                yield (
                    worker,
                    f"it was asked to leave, and no worker took its stage over within "
                    f"{limit_s:g} s (--stage-join-limit-s){why}",
                )

    def _successor_of(self, worker: int) -> int | None:
        stage = self._roster.worker_stage(worker)
        return None if stage is None else self._roster.successor_of(stage)

    def _begin(self) -> Iterator[Addressed]:
        """Starts to copy the pages of the first leaver whose successor is ready."""
        for worker in self._asked_s:
            stage, successor = self._roster.worker_stage(worker), self._successor_of(worker)
            if stage is None or successor is None or not self._roster.is_ready(successor):
                continue
            number = self._num_handovers
            self._num_handovers += 1
            self._open = Handover(number, stage, worker, successor)
            address = f"{self._roster.page_link(stage)}/handover-{number}"
            yield successor, TakePagesOver(number, address)
            scheduler = self._core.scheduler
            pages = array(INT32, scheduler.pages_in_use())
            slots = array(INT32, scheduler.state_slots.in_use())
            yield worker, HandPagesOver(number, address, pages.tobytes(), slots.tobytes())
            return
