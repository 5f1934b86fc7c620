"""The scheduler's messages as a stage takes them: in order, and one that cannot wait for a step.

While a step waits for rows or pages, which may never come, the stage reads messages here: when
another stage was lost, the scheduler sends `Regroup`. A worker is given another stage only when it
has regrouped, and waits for nothing.
"""

from collections import deque
from types import UnionType
from typing import NoReturn

from sgl_pipeline.wire.channels import WorkerEnd
from sgl_pipeline.wire.stage_messages import Regroup, Shutdown, ToWorker
from sgl_pipeline.wire.stage_orders import SealedOrder


class RegroupDue(Exception):
    """The stage must drop the order that it waits in; the inbox has the message with this order."""


class WorkerInbox:
    """Messages that came through `channel` and were not taken yet."""

    def __init__(self, channel: WorkerEnd) -> None:
        self._channel = channel
        self._arrived: deque[ToWorker] = deque()

    def next(self, timeout_ms: int | None = None) -> ToWorker | None:
        """The next message; waits for it at most `timeout_ms` (None: for ever), then gives None."""
        if self._arrived:
            return self._arrived.popleft()
        return self._channel.receive(timeout_ms)

    def attend(self) -> None:
        """Checks whether the scheduler has ordered the stage to drop the step that it waits in.
        Raises RegroupDue if so. Orders that came before are dropped here.
        """
        while (message := self._channel.receive(timeout_ms=0)) is not None:
            self._take(message, urgent=Regroup)

    def attend_for(self, seconds: float) -> None:
        """`attend` to messages that arrive within `seconds`."""
        self._channel.wait((), seconds)
        self.attend()

    def wait_beside(self, *descriptors: int | None, timeout_s: float | None = None) -> None:
        """Returns when a message or something at one of `descriptors`, where it is one, has
        arrived, or after `timeout_s` (None: never)."""
        self._channel.wait([one for one in descriptors if one is not None], timeout_s)

    def wait_for_the_end(self) -> NoReturn:
        """For a step that cannot go on: raises RegroupDue when the step was given up, or when the
        stage must leave."""
        while True:
            message = self._channel.receive()
            assert message is not None
            self._take(message, urgent=Regroup | Shutdown)

    def _take(self, message: ToWorker, urgent: type | UnionType) -> None:
        if not isinstance(message, urgent):
            self._arrived.append(message)
            return
        others = [one for one in self._arrived if not isinstance(one, SealedOrder)]
        self._arrived = deque([*others, message])
        raise RegroupDue
