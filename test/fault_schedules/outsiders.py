"""What comes to the server from outside: clients that ask and leave, operators who pause it, flush
its cache or want another plan."""

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from random import Random

from fault_schedules.fake_front import BY_CLIENT, Client, FakeFront
from fault_schedules.room_driver import RoomDriver
from fault_schedules.virtual_time import EventLoop

from sgl_pipeline.args import PipelineArgs
from sgl_pipeline.errors import MoveRefused, RequestError
from sgl_pipeline.pipeline.pipeline_core import PipelineCore
from sgl_pipeline.requests import FinishReason
from sgl_pipeline.scheduling import StepScheduler

MOST_MOVES = 12


def flush_cache(scheduler: StepScheduler, note: Callable[..., None]) -> None:
    """An operator has the cache emptied, if nobody uses it."""
    is_flushed = scheduler.flush_cache()
    note("flush", is_flushed)
    num_kept = len({*scheduler.pages_in_use()})
    assert not is_flushed or num_kept == scheduler.tier.held.num_pages, "a flush has left pages"


class Outsiders:
    """All of them, at moments drawn from `rng`.

    Args:
        turn: lets the scheduler go on after something has come.
        note: takes what happened into the run's digest.
        rooms: the server's end of the streams to others, if it has a role.
    """

    def __init__(
        self,
        core: PipelineCore,
        front: FakeFront,
        loop: EventLoop,
        rng: Random,
        args: PipelineArgs,
        *,
        num_layers: int,
        turn: Callable[[], None],
        note: Callable[..., None],
        rooms: RoomDriver | None,
    ) -> None:
        self._core = core
        self._front = front
        self._loop = loop
        self._rng = rng
        self._args = args
        self._num_layers = num_layers
        self._turn = turn
        self._note = note
        self._rooms = rooms

    def begin(self) -> None:
        """Decides when each of them comes and goes: the scheduler begins to serve now."""
        scheduler = self._core.scheduler
        for client in self._front.clients:
            client.request.arrival_s = self._loop.now_s + client.arrives_s
            self._loop.after(client.arrives_s + client.compile_s, partial(self.arrive, client))
            if client.leaves_after_s is not None:
                leaves_s = client.arrives_s + client.leaves_after_s
                self._loop.after(leaves_s, partial(self.leave, client))
        for _ in range(self._rng.choice((0, 0, 1, 3))):
            pause_s, length_s = self._rng.random() * 5.0, self._rng.random() * 2.0
            retract = self._rng.random() < 0.5
            self._loop.after(pause_s, partial(scheduler.pausing.pause, retract=retract))
            self._loop.after(pause_s + length_s, lambda: self._outside(scheduler.pausing.resume))
            flush_s = pause_s + self._rng.random() * 2.0 * length_s
            self._loop.after(flush_s, partial(flush_cache, scheduler, self._note))
        scheduling = self._args.scheduling
        has_timeouts = scheduling.waiting_timeout_s or scheduling.running_timeout_s
        if has_timeouts and self._rooms is None:  # rooms look at the clock themselves
            for second in range(1, 60):
                self._loop.after(float(second), self._turn)
        if self._args.migration.mode != "off":
            for _ in range(self._rng.randint(1, MOST_MOVES)):
                self._loop.after(self._rng.random() * 6.0, self._move_layers)

    def _move_layers(self) -> None:
        """An operator wants another plan, which may be refused: there may be no room."""
        rng, core = self._rng, self._core
        num_stages = core.plan.num_stages
        if num_stages == 1:
            return
        if rng.random() < 0.3:
            cuts = sorted(rng.sample(range(1, self._num_layers), num_stages - 1))
            counts = [end - start for start, end in pairwise((0, *cuts, self._num_layers))]
        else:
            counts = list(core.plan.layer_counts)
            source, target = rng.sample(range(num_stages), 2)
            counts[source] -= 1
            counts[target] += 1
        try:
            record = core.migration.move_to(counts, self._loop.now_s)
        except MoveRefused:
            return
        self._note(record.before, record.after)
        self._turn()
        self._loop.after(self._args.migration.timeout_s * 1.01, self._turn)

    def arrive(self, client: Client) -> None:
        """The request of `client` is here, and its grammar is known."""
        if self._front.has_ended(client):
            return  # it has left while its grammar was compiled
        self._outside(partial(self._add, client))

    def _add(self, client: Client) -> None:
        request, rooms = client.request, self._rooms
        try:
            if rooms is not None:
                rooms.check(request)
            displaced = self._core.scheduler.add(request)
        except RequestError as error:
            if rooms is not None:
                rooms.refused(request, str(error), error.status_code)
            finish = FinishReason("abort", message=str(error), status_code=error.status_code)
            self._front.end(request, finish)
        else:
            if rooms is not None:
                rooms.opened(request)
            if displaced is not None:
                assert displaced.finish is not None
                self._front.end(displaced, displaced.finish)

    def leave(self, client: Client) -> None:
        """`client` is gone."""
        if not self._front.has_ended(client):
            aborted = self._core.scheduler.abort(client.request.request_id, BY_CLIENT)
            if aborted is None and self._rooms is not None:
                self._rooms.refused(client.request, BY_CLIENT.message, 500)
            self._front.end(client.request, BY_CLIENT)
            self._outside(lambda: None)

    def _outside(self, call: Callable[[], None]) -> None:
        """Something came from outside: the scheduler takes it, and goes on."""
        call()
        self._turn()
