"""One move from the wish to its end, and every way in which it does not come to that."""

from array import array
from collections.abc import Callable

import pytest

from sgl_pipeline.errors import MoveRefused, ProtocolError
from sgl_pipeline.migration.coordinator import MoveCoordinator
from sgl_pipeline.records.move_record import MoveOutcome
from sgl_pipeline.stage_plan import StagePlan
from sgl_pipeline.wire.move_orders import (
    AbandonMove,
    LayerMove,
    MoveDone,
    MoveFailed,
    MoveReady,
    PrepareMove,
    SwitchPlan,
    layer_moves,
    most_layers_held,
)

PAGES = [2, 3, 5]
SLOTS = [1, 4]
TIMEOUT_S = 10.0


def coordinator_of(*counts: int, spare: int = 1) -> MoveCoordinator:
    limits = [count + spare for count in counts]
    return MoveCoordinator(StagePlan(0, counts), limits, TIMEOUT_S)


def next_order(coordinator: MoveCoordinator, now_s: float = 0.0) -> object:
    return coordinator.next_order(now_s, lambda: PAGES, lambda: SLOTS)


def ready(stage: int, move: int = 0) -> MoveReady:
    return MoveReady(stage=stage, move=move, load_ms=5.0 + stage)


def done(stage: int, move: int = 0) -> MoveDone:
    return MoveDone(
        stage=stage,
        move=move,
        copied_bytes=100,
        patched_bytes=10 * stage,
        patch_ms=1.0 + stage,
        wait_ms=3.0 - stage,
    )


def failed(stage: int, move: int = 0) -> MoveFailed:
    return MoveFailed(stage=stage, move=move, message="no memory")


def test_the_layers_of_two_plans() -> None:
    old, new = StagePlan(0, (3, 3, 2)), StagePlan(1, (2, 3, 3))
    assert layer_moves(old, new) == (LayerMove(2, 0, 1), LayerMove(5, 1, 2))
    # The second stage has the layer that comes before the one that goes has left.
    assert most_layers_held(old, new) == (3, 4, 3)
    assert layer_moves(old, old) == ()


def test_a_move_from_the_wish_to_its_end() -> None:
    coordinator = coordinator_of(4, 3)
    assert next_order(coordinator) is None
    record = coordinator.begin([3, 4], "operator", now_s=1.0)
    new = StagePlan(1, (3, 4))
    pages, slots = (array("i", places).tobytes() for places in (PAGES, SLOTS))
    assert next_order(coordinator, 1.0) == PrepareMove(0, new, pages, slots)
    assert next_order(coordinator, 1.0) is None
    coordinator.take(ready(1), 2.0)
    assert next_order(coordinator, 2.0) is None
    assert coordinator.plan == StagePlan(0, (4, 3))
    coordinator.take(ready(0), 3.0)
    assert next_order(coordinator, 3.5) == SwitchPlan(0, new)
    assert coordinator.plan == new
    coordinator.take(done(0), 4.0)
    assert coordinator.current is record
    coordinator.take(done(1), 5.0)
    assert coordinator.current is None
    assert record.outcome is MoveOutcome.DONE
    assert (record.began_s, record.switched_s, record.ended_s) == (1.0, 3.5, 5.0)
    assert (record.copied_bytes, record.patched_bytes) == (200, 10)
    assert (record.load_ms, record.patch_ms, record.wait_ms) == (6.0, 2.0, 3.0)
    # The next one has an epoch and a number of its own.
    assert coordinator.begin([4, 3], "undo", 6.0).epoch == 2
    order = next_order(coordinator, 6.0)
    assert isinstance(order, PrepareMove) and order.move == 1


@pytest.mark.parametrize(
    ("counts", "why"),
    [
        ([4, 3], "is the plan already"),
        ([7], r"\[7\] has 7 layers in 1 stages, this pipeline has 7 in 2"),
        ([4, 4], "has 8 layers in 2 stages, this pipeline has 7 in 2"),
        ([7, 0], "each stage needs at least one layer"),
        ([8, -1], "each stage needs at least one layer"),
        ([2, 5], "stage 1 would hold 5 layers during the move, it has room for 4.*spare-layers"),
    ],
)
def test_a_plan_that_is_none_is_refused_with_the_limit(counts: list[int], why: str) -> None:
    coordinator = coordinator_of(4, 3)
    with pytest.raises(MoveRefused, match=why) as refused:
        coordinator.begin(counts, "operator", 0.0)
    assert refused.value.status_code == 400
    assert coordinator.current is None and next_order(coordinator) is None


def test_a_second_move_has_to_wait() -> None:
    coordinator = coordinator_of(4, 3)
    coordinator.begin([3, 4], "operator", 0.0)
    with pytest.raises(MoveRefused, match=r"\[3, 4\] now") as refused:
        coordinator.begin([5, 2], "operator", 0.0)
    assert refused.value.status_code == 409


def test_what_a_stage_cannot_do_leaves_the_old_plan() -> None:
    coordinator = coordinator_of(4, 3)
    record = coordinator.begin([3, 4], "auto", 0.0)
    next_order(coordinator)
    coordinator.take(failed(1), 1.0)
    assert next_order(coordinator, 2.0) == AbandonMove(0)
    assert coordinator.plan == StagePlan(0, (4, 3))
    assert (record.outcome, record.reason) == (MoveOutcome.ABANDONED, "stage 1: no memory")
    assert record.ended_s == 2.0
    # The other stage's word is late, and costs the next move nothing.
    coordinator.take(ready(0), 3.0)
    coordinator.begin([3, 4], "auto", 4.0)
    next_order(coordinator, 4.0)
    coordinator.take(ready(0), 4.0)  # of move 0
    coordinator.take(ready(1, move=1), 4.0)
    assert next_order(coordinator, 4.0) is None


def test_a_slow_stage_is_not_waited_for() -> None:
    coordinator = coordinator_of(4, 3)
    record = coordinator.begin([3, 4], "operator", 0.0)
    next_order(coordinator)
    coordinator.take(ready(0), 1.0)
    assert next_order(coordinator, TIMEOUT_S) is None
    assert next_order(coordinator, TIMEOUT_S + 0.1) == AbandonMove(0)
    assert record.reason == "stages [1] were not ready after 10 s (--migration-timeout-s)"


def test_behind_the_switch_nothing_is_given_up() -> None:
    coordinator = coordinator_of(4, 3)
    coordinator.begin([3, 4], "operator", 0.0)
    next_order(coordinator)
    for stage in (0, 1):
        coordinator.take(ready(stage), 1.0)
    assert isinstance(next_order(coordinator, 1.0), SwitchPlan)
    assert next_order(coordinator, 1.0 + 100 * TIMEOUT_S) is None
    assert coordinator.current is not None


def prepared(coordinator: MoveCoordinator) -> None:
    coordinator.begin([3, 4], "operator", 0.0)
    next_order(coordinator)


def switched(coordinator: MoveCoordinator) -> None:
    prepared(coordinator)
    for stage in (0, 1):
        coordinator.take(ready(stage), 0.0)
    next_order(coordinator)


@pytest.mark.parametrize(
    ("bring_to", "report"),
    [
        (prepared, done(0)),
        (switched, ready(0)),
        (switched, failed(0)),
        (prepared, ready(0, move=9)),
    ],
    ids=["done before the switch", "ready after it", "failed after it", "of no move"],
)
def test_what_no_stage_could_say_now_is_a_protocol_error(
    bring_to: Callable[[MoveCoordinator], None], report: MoveReady | MoveDone | MoveFailed
) -> None:
    coordinator = coordinator_of(4, 3)
    bring_to(coordinator)
    with pytest.raises(ProtocolError):
        coordinator.take(report, 0.0)


def test_a_stage_answers_once() -> None:
    coordinator = coordinator_of(4, 3)
    prepared(coordinator)
    coordinator.take(ready(0), 0.0)
    with pytest.raises(ProtocolError, match=r"stage 0 .*MoveReady.* 0"):
        coordinator.take(ready(0), 0.0)
