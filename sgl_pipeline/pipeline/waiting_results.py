"""Results that are not booked before all stages have reported their step.

Of a step with leases any stage may say that it could not use one, and what the request has drawn
then has no meaning (`wire/lease_orders.py`). Results behind it wait with it, since they are booked
in the order of their steps.
"""

from collections import deque
from collections.abc import Iterator

from sgl_pipeline.pipeline.open_step import OpenStep
from sgl_pipeline.scheduling.steps_in_flight import check_result
from sgl_pipeline.wire.stage_messages import StageReport


class WaitingResults:
    """Reports of the last stage, oldest first, each with its step."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[OpenStep, StageReport]] = deque()

    def add(self, step: OpenStep, report: StageReport) -> None:
        """The next result. Raises ProtocolError, without any other effect, for one that cannot be
        the step's: `take_due` may give it out with another stage's report."""
        assert report.token_ids is not None
        if step.leased_rows or self._waiting:
            check_result(step.microbatch, report.token_ids, report.logprobs)
        self._waiting.append((step, report))

    def take_due(self, num_stages: int) -> Iterator[tuple[OpenStep, StageReport]]:
        """The results that can be booked now."""
        while self._waiting:
            step, report = self._waiting[0]
            if step.leased_rows and len(step.timings) < num_stages:
                return
            self._waiting.popleft()
            yield step, report

    def forget(self) -> None:
        """Their steps are taken back."""
        self._waiting.clear()
