"""Decides whether a request that arrives is refused, queued, or queued in place of another one.

It ends no request itself.
"""

from sgl_pipeline.args import SchedulingArgs
from sgl_pipeline.errors import QueueFullError
from sgl_pipeline.requests import FinishReason, Request
from sgl_pipeline.scheduling.request_limits import RequestLimits
from sgl_pipeline.scheduling.waiting_queue import WaitingQueue

# SGLang's `/health` sends requests whose ids begin like this; a full queue must not fail them.
HEALTH_CHECK_PREFIX = "HEALTH_CHECK_"

# Upstream's message (scheduler.py, _abort_on_queued_limit).
DISPLACED = FinishReason(
    "abort",
    message="The request is aborted by a higher priority request.",
    status_code=503,
)


class EntryRules:
    """The rules for entering the queue."""

    def __init__(self, args: SchedulingArgs, limits: RequestLimits, waiting: WaitingQueue) -> None:
        self.limits = limits
        self._waiting = waiting
        self._max_queued_requests = args.max_queued_requests
        self._longest_output_first = args.schedule_policy == "lof"
        self._num_arrivals = 0
        self._lowest_priority = 0

    def check(self, request: Request, num_held: int) -> None:
        """Raises as `displaced_by` does, for a request that is kept outside the queue for now with
        `num_held` others. No request is displaced for it."""
        self.limits.check(request)
        limit = self._max_queued_requests
        if limit is not None and len(self._waiting) + num_held >= limit:
            raise _queue_full(len(self._waiting) + num_held, limit)

    def displaced_by(self, request: Request) -> Request | None:
        """The waiting request of lower priority that must make room in a full queue, if any.

        Raises RequestError when `request` could never be served, QueueFullError when too many wait.
        """
        self.limits.check(request)
        limit = self._max_queued_requests
        is_exempt = request.request_id.startswith(HEALTH_CHECK_PREFIX)
        if limit is None or len(self._waiting) < limit or is_exempt:
            return None
        # Without priorities none is displaced: then an overflow need not look at the queue.
        last = self._waiting.last() if request.priority > self._lowest_priority else None
        if last is None or last.priority >= request.priority:
            raise _queue_full(len(self._waiting), limit)
        return last

    def give_place(self, request: Request) -> None:
        """Sets the order of a request that is about to be queued."""
        self._lowest_priority = min(self._lowest_priority, request.priority)
        max_new_tokens = request.stops.max_new_tokens if self._longest_output_first else 0
        request.order = (-request.priority, -max_new_tokens, self._num_arrivals)
        self._num_arrivals += 1


def _queue_full(num_waiting: int, limit: int) -> QueueFullError:
    return QueueFullError(
        f"{num_waiting} requests wait already, the limit is {limit}; try again later or raise "
        "--max-queued-requests"
    )
