"""Takes back steps, and drops or owes pages, when they are lost with a stage.

Pages that the replaced stages can recompute from the log are owed (`recovery_log.py`); all other
lost pages are forgotten. Callers make sure that no request whose pages are lost has a step in
flight.
"""

from collections.abc import Iterable

from sgl_pipeline.microbatch import Microbatch
from sgl_pipeline.requests import Request, RequestState
from sgl_pipeline.scheduling.age_limit import RequestAges
from sgl_pipeline.scheduling.preemption import Preemption
from sgl_pipeline.scheduling.recovery_log import RecoveryLog
from sgl_pipeline.scheduling.request_pages import RequestPages
from sgl_pipeline.scheduling.running_requests import RunningRequests


class LostPages:
    """Clocks are the caller's, in seconds: requests that return to the queue wait from that moment.

    Args:
        log: None: nothing is ever owed. There is none in models with states, which steps that are
            taken back may have changed.
    """

    def __init__(
        self,
        running: RunningRequests,
        preemption: Preemption,
        pages: RequestPages,
        ages: RequestAges,
        log: RecoveryLog | None,
    ) -> None:
        assert log is None or not pages.state_slots.num_slots, (
            "states cannot be computed again alone"
        )
        self.log = log
        self._running = running
        self._preemption = preemption
        self._pages = pages
        self._ages = ages

    def take_back_steps(self, steps: Iterable[Microbatch]) -> None:
        """Takes back `steps`, all that are in flight: not every stage will run them.

        Requests are where their last committed step left them. They keep their pages, also those
        that such a step was to write first, and a request that has ended gives its own back.
        """
        for microbatch in steps:
            if microbatch.replays and self.log is not None:
                self.log.take_back(microbatch.replays)
            for chunk in microbatch.chunks:
                request = chunk.request
                request.steps_in_flight -= 1
                if request.state is RequestState.RUNNING:
                    request.num_scheduled = request.num_computed
                    self._running.take_back(request)
                elif request.steps_in_flight == 0:
                    self._pages.release(request)

    def lose_all(self, now_s: float) -> None:
        """All keys and values are lost: running requests return to the queue, each at its place, to
        prefill prompt and output again, and no prefix is cached any more. No page is in use then.
        """
        lost = set(self._pages.pages_in_use())
        self._drop(tuple(self._running), lost, now_s)

    def use_stages(self, num_stages: int, now_s: float) -> None:
        """`num_stages` stages begin anew, with empty logs: all pages are lost, none is owed."""
        self.lose_all(now_s)
        if self.log is not None:
            self.log.use_stages(num_stages)

    def lose_stages(self, stages: Iterable[int], now_s: float) -> None:
        """The keys and values of `stages` are lost, and of no others. Pages that these stages
        cannot recompute by themselves are forgotten; the rest is owed."""
        if self.log is None:
            self.lose_all(now_s)
            return
        # Stages that are new know nothing of leases.
        for request in [one for one in self._running if one.lease is not None]:
            self._preemption.retract(request)
        self.log.lose(stages, self._pages.pages_in_use())
        self._forget(self.log.unreachable(), now_s)

    def hand_over(self, stage: int, now_s: float) -> None:
        """Another worker fills `stage`, and has its keys, values and states, but not the rows that
        it has kept: owed pages that cannot be recomputed without these rows are forgotten."""
        if self.log is not None:
            self.log.lose_rows(stage, self._pages.pages_in_use())
            self._forget(self.log.unreachable(), now_s)

    def forget_displaced(self, now_s: float) -> None:
        """Forgets owed pages that have just become unreachable, if any."""
        if self.log is not None and self.log.has_displaced_owed:
            self._forget(self.log.unreachable(), now_s)

    def forget_owed(self, now_s: float) -> None:
        """Forgets all owed pages: no stage lacks anything any more."""
        if self.log is not None and self.log.owes:
            self._forget(self.log.all_owed(), now_s)

    def _forget(self, lost: set[int], now_s: float) -> None:
        """Forgets what the pages `lost` hold."""
        concerned = [one for one in self._running if not lost.isdisjoint(self._written_pages(one))]
        self._drop(concerned, lost, now_s)

    def _written_pages(self, request: Request) -> list[int]:
        if request.lease is not None:
            return []  # they are elsewhere
        return request.pages[: self._pages.pages_for(request.num_computed)]

    def _drop(self, concerned: Iterable[Request], lost: set[int], now_s: float) -> None:
        """The requests `concerned` return to the queue, and no prefix in `lost` is cached."""
        for request in concerned:
            self._preemption.retract(request)
        self._pages.drop_cached(lost)
        if self.log is not None:
            self.log.forgive(lost)
        self._ages.retracted(self._preemption.take_retracted(), now_s)
