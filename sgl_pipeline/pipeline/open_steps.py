"""The steps on their way: which report of a stage is due, and when a step's result is booked.

A result is booked when it comes, but that of a step with leases not before all stages have reported
the step: any of them may say that it could not use a lease, and what the request has drawn then has
no meaning (`wire/lease_orders.py`). Results behind it wait with it, since they are booked in the
order of their steps.
"""

from collections import deque
from collections.abc import Iterator

from sgl_pipeline.errors import ProtocolError
from sgl_pipeline.pipeline.open_step import OpenStep
from sgl_pipeline.scheduling import StepScheduler
from sgl_pipeline.scheduling.steps_in_flight import check_result
from sgl_pipeline.wire.stage_messages import StageReport


class OpenSteps:
    """The steps that some stage has not reported, or whose result waits; oldest first.

    `reported` are those that are over, until the owner takes them out.

    Args:
        scheduler: books the results.
        vocab_size: token ids must be below it; None: any are accepted.
    """

    def __init__(self, scheduler: StepScheduler, vocab_size: int | None) -> None:
        self._scheduler = scheduler
        self._vocab_size = vocab_size
        self._steps: dict[int, OpenStep] = {}
        self._first_id = 0  # of this incarnation
        # Reports of the last stage, oldest first, each with its step.
        self._results: deque[tuple[OpenStep, StageReport]] = deque()
        self.reported: list[OpenStep] = []

    def __iter__(self) -> Iterator[OpenStep]:
        return iter(self._steps.values())

    def __len__(self) -> int:
        return len(self._steps)

    def add(self, step: OpenStep) -> None:
        """The next step."""
        self._steps[step.microbatch.step_id] = step

    def take_back(self) -> None:
        """None of the steps will be booked; reports of them are late."""
        self._steps.clear()
        self._results.clear()
        self._first_id = self._scheduler.next_step_id

    def is_late(self, report: StageReport) -> bool:
        """True if the step of `report` was taken back."""
        return report.step_id < self._first_id

    def take(
        self, report: StageReport, num_stages: int, offset_s: float, now_s: float
    ) -> list[OpenStep]:
        """Applies a stage's report; returns the steps whose results are booked by it, oldest first.

        Args:
            offset_s: what moments of the stage's clock need to be moments of the driver's.

        Raises ProtocolError, without any other effect, for a report that no stage could send now.
        """
        step = self._expected(report, num_stages)
        booked: list[OpenStep] = []
        if report.token_ids is not None:
            if step.leased_rows or self._results:
                check_result(step.microbatch, report.token_ids, report.logprobs)
            self._results.append((step, report))
            if not step.leased_rows:  # a wrong one is refused before it has any effect
                booked += self._book(num_stages, now_s)
        step.timings[report.stage] = report.timing.shifted(offset_s)
        if step.leased_rows:
            step.lost_leases.update(report.lost_leases)
            booked += self._book(num_stages, now_s)
        for one in dict.fromkeys((*booked, step)):
            if one.is_booked and len(one.timings) == num_stages:
                self.reported.append(self._steps.pop(one.microbatch.step_id))
        return booked

    def _book(self, num_stages: int, now_s: float) -> Iterator[OpenStep]:
        """Books the results that are due."""
        while self._results:
            step, report = self._results[0]
            if step.leased_rows and len(step.timings) < num_stages:
                return
            self._results.popleft()
            assert report.token_ids is not None
            events = self._scheduler.on_result(
                report.step_id, report.token_ids, now_s, report.logprobs, step.lost_leases
            )
            step.finish(events, now_s)
            yield step

    def _expected(self, report: StageReport, num_stages: int) -> OpenStep:
        """The step that its stage must report next, if `report` can belong to it."""
        stage = report.stage
        name = f"stage {stage} of {num_stages} reported step {report.step_id}"
        due = (one for one in self if stage not in one.timings)
        if (step := next(due, None)) is None:
            raise ProtocolError(f"{name}, which it has reported before or was never sent")
        microbatch = step.microbatch
        if (report.step_id, report.epoch) != (microbatch.step_id, microbatch.epoch):
            raise ProtocolError(
                f"{name} of epoch {report.epoch}, {microbatch.step_id} of epoch {microbatch.epoch} "
                "was due"
            )
        is_last = stage == num_stages - 1
        if is_last != (report.token_ids is not None):
            raise ProtocolError(f"{name} {'without' if is_last else 'with'} tokens")
        if self._vocab_size is not None and max(report.token_ids or (0,)) >= self._vocab_size:
            raise ProtocolError(
                f"{name} with token {max(report.token_ids or ())}, the model has {self._vocab_size}"
            )
        if not report.timing.is_in_order:
            raise ProtocolError(f"{name} with moments out of order: {report.timing}")
        return step
