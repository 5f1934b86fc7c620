"""The clients of one virtual pipeline: requests that will arrive, that are served, and their times.

A request that has ended may be followed by another one of the same client.
"""

import heapq
from collections.abc import Callable
from itertools import count

from sgl_pipeline.errors import RequestError
from sgl_pipeline.requests import GREEDY, Request, Room, StopRules
from sgl_pipeline.scheduling import StepScheduler
from sgl_pipeline.simulator.simulation import ServedRequest
from sgl_pipeline.simulator.virtual_drafts import VirtualDrafts
from sgl_pipeline.simulator.workload import SimulatedRequest

# Gets a request that begins to be served, and what its client will see.
OnBegin = Callable[[Request, ServedRequest], None]
# Gets a request that has ended, what its client saw, and the moment. Without a `finish` it was
# refused.
OnEnd = Callable[[Request, ServedRequest, float], None]


class VirtualClients:
    """All requests of one pipeline.

    `on_begin` hears of each that the scheduler has taken, `on_end` of each that has ended; by
    default its follow-up arrives at the same pipeline.
    """

    def __init__(self) -> None:
        self.on_begin: OnBegin = lambda request, served: None
        self.on_end: OnEnd = self._follow_up
        self.served: list[ServedRequest] = []
        self._arrivals: list[tuple[float, int, SimulatedRequest, Room | None]] = []
        self._order = count()
        self._live: dict[Request, ServedRequest] = {}

    @property
    def num_ended(self) -> int:
        """Requests that have arrived and are served no more."""
        return len(self.served) - len(self._live)

    @property
    def next_arrival_s(self) -> float:
        """The moment of the next arrival; infinity if none is expected."""
        return self._arrivals[0][0] if self._arrivals else float("inf")

    def expect(self, asked: SimulatedRequest, moment_s: float, room: Room | None = None) -> None:
        """`asked`, or one half of it, of a `room`, will reach the scheduler at `moment_s`."""
        heapq.heappush(self._arrivals, (moment_s, next(self._order), asked, room))

    def arrive(self, scheduler: StepScheduler, now_s: float) -> None:
        """Gives `scheduler` the requests that have arrived by `now_s`."""
        while self._arrivals and self._arrivals[0][0] <= now_s:
            moment_s, number, asked, room = heapq.heappop(self._arrivals)
            served = ServedRequest(asked, moment_s)
            self.served.append(served)
            request = Request(
                request_id=str(number),
                prompt_ids=asked.prompt_ids(),
                sampling=GREEDY,
                stops=StopRules(max_new_tokens=asked.output_tokens),
                arrival_s=moment_s,
                room=room,
                tenant=asked.tenant,
            )
            try:
                scheduler.add(request)
            except RequestError as error:
                served.error = str(error)
                self.on_end(request, served, now_s)
            else:
                self._live[request] = served
                self.on_begin(request, served)

    def next_tokens(self, request: Request, num_tokens: int) -> range:
        """The tokens that the model draws next for a request; of one that has failed they are
        dropped."""
        served = self._live.get(request)
        first = 0 if served is None else served.asked.output.first + len(request.output_ids)
        return range(first, first + num_tokens)

    def drafts_of(self, request: Request) -> VirtualDrafts:
        """The drafts of a request that the scheduler serves."""
        asked = self._live[request].asked
        return VirtualDrafts(request, asked.output.first, asked.acceptance)

    def note_tokens(self, request: Request, num_new: int, now_s: float) -> None:
        """The client of `request` gets `num_new` tokens, perhaps its last."""
        served = self._live[request]
        served.token_times_s += [now_s] * num_new
        if request.finish is None:
            return
        del self._live[request]
        served.finished_s = now_s
        served.cached_tokens = request.cached_tokens
        served.loaded_tokens = request.loaded_tokens
        served.num_retractions = request.num_retractions
        self.on_end(request, served, now_s)

    def fail(self, request: Request, now_s: float) -> None:
        """The scheduler was asked to end `request`."""
        assert request.finish is not None
        served = self._live.pop(request)
        served.error = request.finish.message
        self.on_end(request, served, now_s)

    def _follow_up(self, request: Request, served: ServedRequest, now_s: float) -> None:
        if served.asked.follow_up is not None and not served.error:
            self.expect(served.asked.follow_up, now_s + served.asked.think_s)
