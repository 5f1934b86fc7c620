"""A stage hears what cannot wait, whatever it waits for, and takes all else in order."""

from collections import deque
from collections.abc import Iterable, Sequence

import pytest

from sgl_pipeline.pp_runner.worker_inbox import RegroupDue, WorkerInbox
from sgl_pipeline.stage_plan import StagePlan
from sgl_pipeline.wire.stage_messages import PoolSize, Regroup, Shutdown, StopProfile, ToWorker
from sgl_pipeline.wire.stage_orders import OrderStream, SealedOrder
from sgl_pipeline.wire.step_order import MirrorSnapshot

REGROUP = Regroup(1, StagePlan(0, (1,)), ())


class Channel:
    """Gives what has arrived, one after the other."""

    def __init__(self, messages: Sequence[ToWorker]) -> None:
        self.messages = deque(messages)
        self.waits: list[tuple[list[int], float | None]] = []

    def receive(self, timeout_ms: int | None = None) -> ToWorker | None:
        return self.messages.popleft() if self.messages else None

    def wait(self, descriptors: Iterable[int], timeout_s: float | None = None) -> None:
        self.waits.append(([*descriptors], timeout_s))


def orders(count: int) -> list[SealedOrder]:
    stream = OrderStream()
    return [stream.seal(MirrorSnapshot((), ())) for _ in range(count)]


def inbox_of(*messages: ToWorker) -> tuple[WorkerInbox, Channel]:
    channel = Channel(messages)
    return WorkerInbox(channel), channel  # type: ignore[arg-type]


def test_what_arrives_while_a_step_waits_is_taken_afterwards_and_in_order() -> None:
    first, second, third = orders(3)
    inbox, channel = inbox_of(first, StopProfile())
    inbox.attend()
    channel.messages.extend([second, third])
    assert [inbox.next() for _ in range(4)] == [first, StopProfile(), second, third]
    assert inbox.next(0) is None


def test_a_regroup_ends_the_wait_and_the_orders_before_it() -> None:
    first, second, after = orders(3)
    inbox, channel = inbox_of(first)
    inbox.attend()
    channel.messages.extend([second, StopProfile(), REGROUP, after])
    with pytest.raises(RegroupDue):
        inbox.attend()
    assert [inbox.next() for _ in range(3)] == [StopProfile(), REGROUP, after]


def test_a_shutdown_does_not_end_a_wait_for_rows_that_will_come() -> None:
    inbox, _ = inbox_of(Shutdown())
    inbox.attend()
    assert inbox.next() == Shutdown()


@pytest.mark.parametrize("ending", [REGROUP, Shutdown()], ids=["regroup", "shutdown"])
def test_a_step_that_cannot_go_on_waits_for_either_end(ending: ToWorker) -> None:
    (order,) = orders(1)
    inbox, _ = inbox_of(order, PoolSize(1), ending)
    with pytest.raises(RegroupDue):
        inbox.wait_for_the_end()
    assert [inbox.next(), inbox.next()] == [PoolSize(1), ending]


def test_it_listens_for_as_long_as_it_is_told() -> None:
    inbox, channel = inbox_of(REGROUP)
    with pytest.raises(RegroupDue):
        inbox.attend_for(0.5)
    inbox.wait_beside(7, None, 8)
    inbox.wait_beside(None, timeout_s=0.1)
    assert channel.waits == [([], 0.5), ([7, 8], None), ([], 0.1)]
