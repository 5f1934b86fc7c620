"""Virtual time: events in a heap, and pipes on which messages take a random while.

Everything random comes from one `random.Random`, and events of equal time run in the order in which
they were entered: equal seeds give equal runs, bit for bit.
"""

import heapq
from collections.abc import Callable
from random import Random
from typing import Any


class EventLoop:
    """`now_s` is the time of the event that runs, in virtual seconds."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.num_events = 0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []

    def after(self, delay_s: float, call: Callable[[], None]) -> None:
        """Runs `call` in `delay_s` from now."""
        self.at(self.now_s + delay_s, call)

    def at(self, moment_s: float, call: Callable[[], None]) -> None:
        """Runs `call` at `moment_s`, after all that was entered before for the same moment."""
        self.num_events += 1
        heapq.heappush(self._heap, (moment_s, self.num_events, call))

    def run(self, max_events: int, check: Callable[[], None]) -> None:
        """Runs events, with `check` after each, until none is left.

        Raises AssertionError when that takes more than `max_events`.
        """
        for _ in range(max_events):
            if not self._heap:
                return
            self.now_s, _, call = heapq.heappop(self._heap)
            call()
            check()
        raise AssertionError(f"not done after {max_events} events")


class DelayedPipe:
    """First in, first out, as a socket is; each message takes its own time.

    Messages of one pipe never pass each other; those of two pipes do, which is all that a network
    of sockets promises.
    """

    def __init__(
        self, loop: EventLoop, rng: Random, mean_s: float, deliver: Callable[[Any], None]
    ) -> None:
        self._loop = loop
        self._rng = rng
        self._mean_s = mean_s
        self._deliver = deliver
        self._last_s = 0.0
        self._lost_from_s = float("inf")

    def cut(self) -> None:
        """The sender has died: what is on the way is lost from some message on. Nothing comes
        behind what is lost, however often the pipe is cut."""
        lost_from_s = self._loop.now_s + self._rng.expovariate(1.0) * self._mean_s
        self._lost_from_s = min(self._lost_from_s, lost_from_s)

    def send(self, message: Any) -> None:
        """`deliver` gets `message` later, after all that were sent before."""
        arrives_s = self._loop.now_s + self._rng.expovariate(1.0) * self._mean_s
        self._last_s = max(self._last_s, arrives_s)
        # The moment itself and not the time until then, whose rounding could swap two messages.
        self._loop.at(arrives_s := self._last_s, lambda: self._arrive(message, arrives_s))

    def _arrive(self, message: Any, arrives_s: float) -> None:
        if arrives_s < self._lost_from_s:
            self._deliver(message)
