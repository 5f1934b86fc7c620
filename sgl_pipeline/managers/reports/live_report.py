"""Sends the pipeline's state to the live page, a few times a second and only while a page looks.

The `PipelineState` exists anyway. Nothing here waits, and no text of a request is sent: ids, counts
and times only.
"""

from typing import Any

from sgl_pipeline.managers.channels.live_channel import (
    FOLLOWED_PREFIX,
    CarriedChunk,
    FollowedRequest,
    LiveHello,
    LiveSocket,
    LiveTick,
    QueueLine,
)
from sgl_pipeline.pipeline.open_step import OpenStep
from sgl_pipeline.pipeline.pipeline_state import PipelineState
from sgl_pipeline.records.move_record import MoveRecord
from sgl_pipeline.records.trace import StepRecord
from sgl_pipeline.requests import Request, RequestState
from sgl_pipeline.scheduling import StepScheduler
from sgl_pipeline.throttle.step_curve import step_curve

TICK_INTERVAL_S = 0.2
IDLE_INTERVAL_S = 1.0
# One look at the queue costs up to a microsecond for each request that waits.
QUEUE_INTERVAL_S = 1.0
QUEUE_INTERVAL_S_PER_REQUEST = 2e-4
QUEUE_LINES = 12
MAX_FOLLOWED = 16
_NEVER_S = float("-inf")


class LiveReport:
    """The scheduler process's end of the live page.

    Args:
        scheduler: asked why requests wait.
        facts: how the pipeline was started; JSON types only.
    """

    def __init__(self, socket: LiveSocket, scheduler: StepScheduler, facts: dict[str, Any]) -> None:
        self._socket = socket
        self._scheduler = scheduler
        self._facts = facts
        self._followed: dict[str, Request] = {}
        self._carried: list[CarriedChunk] = []
        self._last_tick_s = _NEVER_S
        self._next_queue_s = 0.0
        self._last_step = -1
        self._moves: tuple[MoveRecord, ...] | None = None
        self._num_missed = 0

    def arrived(self, request: Request) -> None:
        """A request has joined the queue."""
        if not request.request_id.startswith(FOLLOWED_PREFIX):
            return
        if self._socket.is_watched and len(self._followed) < MAX_FOLLOWED:
            self._followed[request.request_id] = request

    def booked(self, step: OpenStep) -> None:
        """The tokens of a step are known."""
        if not self._followed:
            return
        for chunk in step.microbatch.chunks:
            if chunk.request.request_id in self._followed:
                self._carried.append(
                    CarriedChunk(
                        step.microbatch.step_id,
                        chunk.request.request_id,
                        chunk.start,
                        chunk.length,
                        chunk.is_decode,
                    )
                )

    def publish(self, state: PipelineState) -> None:
        """Sends `state`, if there are viewers and it is time."""
        if self._socket.take_subscriptions():
            self._greet()
        if not self._socket.is_watched:
            self._followed.clear()
            self._carried.clear()
            return
        is_quiet = not state.has_work and not self._followed and not self._new_steps(state)
        interval_s = IDLE_INTERVAL_S if is_quiet else TICK_INTERVAL_S
        if state.now_s - self._last_tick_s >= interval_s:
            self._last_tick_s = state.now_s
            self._send_tick(state)

    def close(self) -> None:
        self._socket.close()

    def _greet(self) -> None:
        """Begins from the start: a new viewer knows nothing."""
        self._socket.send(LiveHello(self._facts))
        self._last_tick_s = _NEVER_S
        self._next_queue_s = 0.0
        self._last_step, self._moves, self._num_missed = -1, None, 0

    def _send_tick(self, state: PipelineState) -> None:
        steps = self._new_steps(state)
        moves = state.moves if state.moves != self._moves else ()
        queue = self._queue(state)
        tick = LiveTick(
            state=state.showing(steps, moves),
            queue=queue,
            curve=None if queue is None else step_curve(self._scheduler.load()),
            followed=tuple(self._describe(request) for request in self._followed.values()),
            carried=tuple(self._carried),
            missed_ticks=self._num_missed,
        )
        self._carried.clear()
        for request in tuple(self._followed.values()):
            if request.state is RequestState.FINISHED:
                del self._followed[request.request_id]
        if not self._socket.send(tick):
            # The next tick has these steps, as far as the state still has them then.
            self._num_missed += 1
            return
        self._num_missed, self._moves = 0, state.moves
        if steps:
            self._last_step = steps[-1].step_id

    def _new_steps(self, state: PipelineState) -> tuple[StepRecord, ...]:
        steps = state.recent_steps
        first = len(steps)
        while first > 0 and steps[first - 1].step_id > self._last_step:
            first -= 1
        return steps[first:]

    def _queue(self, state: PipelineState) -> tuple[QueueLine, ...] | None:
        """The first requests that wait; None while the last look is not old."""
        if state.now_s < self._next_queue_s:
            return None
        waiting = state.waiting_requests
        self._next_queue_s = state.now_s + QUEUE_INTERVAL_S + waiting * QUEUE_INTERVAL_S_PER_REQUEST
        return tuple(
            QueueLine(
                request.request_id,
                state.now_s - request.arrival_s,
                len(request.prompt_ids),
                request.num_retractions,
                explanation.rule,
                explanation.text,
                explanation.behind,
            )
            for request, explanation in self._scheduler.explain_queue(QUEUE_LINES)
        )

    def _describe(self, request: Request) -> FollowedRequest:
        explanation = self._scheduler.explain(request.request_id)
        return FollowedRequest(
            request.request_id,
            request.state.name.lower(),
            len(request.prompt_ids),
            request.cached_tokens,
            request.num_computed,
            len(request.output_ids),
            request.steps_in_flight,
            "" if explanation is None else explanation.text,
        )
