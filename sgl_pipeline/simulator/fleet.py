"""Several virtual pipelines in one virtual time, and the messages between them.

A message is an action at a moment. Whatever comes first happens first; where a message and a
pipeline are due at the same time, the message.
"""

import heapq
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import count

from sgl_pipeline.requests import Request
from sgl_pipeline.simulator.simulation import ServedRequest
from sgl_pipeline.simulator.virtual_pipeline import VirtualPipeline
from sgl_pipeline.simulator.workload import SimulatedRequest


class VirtualFleet(ABC):
    """Pipelines behind a router. `served` are the requests that have ended, as their clients saw
    them."""

    def __init__(self, pipelines: Sequence[VirtualPipeline]) -> None:
        self.pipelines = tuple(pipelines)
        self.served: list[ServedRequest] = []
        self._num_asked = 0
        self._messages: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = count()

    @abstractmethod
    def route(self, asked: SimulatedRequest, now_s: float) -> None:
        """Gives a request that has arrived at the router to a pipeline; `end` must follow."""

    def at(self, moment_s: float, action: Callable[[float], None]) -> None:
        """`action` happens then, and gets the moment."""
        heapq.heappush(self._messages, (moment_s, next(self._order), action))

    def run(
        self,
        workload: Iterable[SimulatedRequest],
        on_progress: Callable[[int, float], None] = lambda ended, now_s: None,
    ) -> None:
        """Serves all requests to their end; `on_progress` gets the number of those that have ended
        and the time."""
        for asked in workload:
            self._expect(asked, asked.arrival_s)
        while True:
            pipeline = min(self.pipelines, key=lambda one: one.next_turn_s)
            turn_s = pipeline.next_turn_s
            if self._messages and self._messages[0][0] <= turn_s:
                now_s, _, action = heapq.heappop(self._messages)
                action(now_s)
            elif turn_s < float("inf"):
                pipeline.turn(turn_s)
                on_progress(len(self.served), turn_s)
            else:
                break
        assert len(self.served) == self._num_asked, "requests are left, but nothing can run"
        assert all(one.is_idle for one in self.pipelines)

    def end(self, served: ServedRequest, now_s: float) -> None:
        """A client has its answer, or an error, and may ask again."""
        self.served.append(served)
        asked = served.asked
        if asked.follow_up is not None and not served.error:
            self._expect(asked.follow_up, now_s + asked.think_s)

    def _expect(self, asked: SimulatedRequest, moment_s: float) -> None:
        self._num_asked += 1
        self.at(moment_s, partial(self.route, asked))


class MixedFleet(VirtualFleet):
    """Each request is served whole by the pipeline that has the fewest."""

    def __init__(self, pipelines: Sequence[VirtualPipeline]) -> None:
        super().__init__(pipelines)
        self._loads = [0] * len(pipelines)
        for number, pipeline in enumerate(pipelines):
            pipeline.clients.on_end = partial(self._end_on, number)

    def route(self, asked: SimulatedRequest, now_s: float) -> None:
        """As `VirtualFleet`."""
        number = least(self._loads)
        self._loads[number] += 1
        self.pipelines[number].clients.expect(asked, now_s)

    def _end_on(self, number: int, request: Request, served: ServedRequest, now_s: float) -> None:
        self._loads[number] -= 1
        self.end(served, now_s)


def least(loads: Sequence[float]) -> int:
    """The place of the smallest load, the first of equal ones."""
    return min(range(len(loads)), key=lambda place: loads[place])
