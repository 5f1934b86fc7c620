"""All pages of a stage reach the worker that takes it over, what was written last included."""

from array import array
from collections.abc import Callable
from random import Random

import pytest
from fault_schedules.fake_model import FakeStage
from fault_schedules.fake_moves import FakePageLinks, FakeRows, FakeSite, LoadTempo
from fault_schedules.virtual_time import DelayedPipe, EventLoop

from sgl_pipeline.errors import ProtocolError
from sgl_pipeline.pp_runner.layer_moves.layer_mover import LayerMover
from sgl_pipeline.stage_plan import StagePlan
from sgl_pipeline.wire.stage_messages import (
    FinishHandover,
    HandPagesOver,
    PagesCopied,
    PagesTaken,
    TakePagesOver,
)
from sgl_pipeline.wire.step_order import INT32

PLAN = StagePlan(0, (1, 2, 1))
LAYERS = (1, 2)
PAGES = {page: {0: 10 * page} for page in range(5)}


class Workers:
    """Two workers of stage 1, the first with pages."""

    def __init__(self) -> None:
        self.loop, self.said = EventLoop(), list[object]()
        self._links = FakePageLinks(self._pipe)
        self.leaver, self.leaver_pages = self._worker()
        self.successor, self.successor_pages = self._worker()
        for layer in LAYERS:
            self.leaver_pages.pages[layer] |= {page: dict(PAGES[page]) for page in PAGES}

    def _pipe(self, deliver: Callable[[object], None]) -> DelayedPipe:
        return DelayedPipe(self.loop, Random(1), 0.01, deliver)

    def _worker(self) -> tuple[LayerMover[FakeRows], FakeStage]:
        stage = FakeStage(1, LAYERS)
        site = FakeSite(stage, 1, PLAN, self.loop, Random(1), LoadTempo(0.0, 0.0))
        links = self._links.of_stage(1, lambda: None)
        return LayerMover(1, PLAN, site, links, self.said.append, lambda: 0.0), stage

    def work(self) -> None:
        """More often than there is something to do."""
        for _ in range(50):
            self.leaver.work()
            self.loop.run(1_000, lambda: None)
            self.successor.work()


def give(handover: int = 0) -> HandPagesOver:
    return HandPagesOver(handover, f"at-{handover}", array(INT32, PAGES).tobytes(), b"")


def test_what_a_step_writes_meanwhile_follows_at_the_end() -> None:
    workers = Workers()
    workers.successor.obey(TakePagesOver(0, "at-0"))
    workers.leaver.obey(give())
    assert workers.leaver.is_open and workers.successor.is_open
    workers.work()
    assert workers.said == [PagesCopied(1, 0)]
    for layer in LAYERS:
        workers.leaver_pages.pages[layer][3][0] = 99
    workers.leaver.wrote([3], ())
    workers.work()
    assert workers.successor_pages.pages[1][3] == {0: 30}
    workers.leaver.obey(FinishHandover(0))
    assert workers.leaver.has_rest and workers.leaver.send_rest()
    assert not workers.leaver.has_rest
    workers.work()
    assert workers.said == [PagesCopied(1, 0), PagesTaken(1, 0)]
    assert workers.successor_pages.pages == workers.leaver_pages.pages
    assert not workers.successor.is_open
    # The leaver has all that it had: it could serve on.
    assert workers.leaver_pages.pages[2][4] == PAGES[4]


def test_a_leaver_has_not_copied_before_the_other_one_listens() -> None:
    workers = Workers()
    workers.leaver.obey(HandPagesOver(0, "at-0", b"", b""))
    workers.work()
    assert workers.said == []
    workers.successor.obey(TakePagesOver(0, "at-0"))
    workers.work()
    assert workers.said == [PagesCopied(1, 0)]


def test_a_newer_handover_takes_the_place_of_one_that_came_to_nothing() -> None:
    workers = Workers()
    workers.leaver.obey(give(0))
    workers.leaver.obey(give(1))
    workers.successor.obey(TakePagesOver(1, "at-1"))
    workers.work()
    assert workers.said == [PagesCopied(1, 1)]
    with pytest.raises(ProtocolError, match=r"handover 0.* 1$"):
        workers.leaver.obey(FinishHandover(0))


def test_a_regroup_ends_it() -> None:
    workers = Workers()
    workers.successor.obey(TakePagesOver(0, "at-0"))
    workers.leaver.obey(give())
    workers.leaver.regroup(PLAN)
    assert not workers.leaver.is_open
    with pytest.raises(ProtocolError, match="to finish handover 0"):
        workers.leaver.obey(FinishHandover(0))
