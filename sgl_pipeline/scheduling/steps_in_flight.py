"""The steps that were sent to the stages and not answered yet, oldest first.

Steps are FIFO through every stage, so a result must belong to the oldest one; any other is refused
here. It never changes a request.
"""

from collections import deque
from collections.abc import Iterator, Sequence

from sgl_pipeline.errors import ProtocolError
from sgl_pipeline.microbatch import Microbatch
from sgl_pipeline.requests import LogprobRows
from sgl_pipeline.scheduling.logprob_rows import check_logprobs
from sgl_pipeline.step_work import StepWork


class StepsInFlight:
    """At most `limit` steps. Ids count up from 0; `next_id` is the next step's."""

    def __init__(self, limit: int) -> None:
        # Also the depth over which decodes are shared out: that many steps wait for each other.
        self.limit = limit
        self.next_id = 0
        self._steps: deque[Microbatch] = deque()

    def __len__(self) -> int:
        return len(self._steps)

    def __iter__(self) -> Iterator[Microbatch]:
        return iter(self._steps)

    @property
    def is_full(self) -> bool:
        return len(self._steps) >= self.limit

    @property
    def work(self) -> tuple[StepWork, ...]:
        """The work of each step."""
        return tuple([one.work for one in self._steps])

    def add(self, microbatch: Microbatch) -> None:
        """The step with `next_id` has been decided."""
        self.next_id += 1
        self._steps.append(microbatch)

    def take_result(
        self, step_id: int, token_ids: Sequence[int], logprobs: Sequence[LogprobRows]
    ) -> Microbatch:
        """Removes and returns the oldest step, whose result this must be.

        Raises ProtocolError, and removes none, when it is another step's turn or the number of
        tokens or rows is wrong.
        """
        microbatch = self._steps[0] if self._steps else None
        if microbatch is None or microbatch.step_id != step_id:
            expected = "none is in flight" if microbatch is None else f"{microbatch.step_id} is due"
            raise ProtocolError(f"the result of step {step_id} arrived, but {expected}")
        check_result(microbatch, token_ids, logprobs)
        return self._steps.popleft()

    def forget(self) -> None:
        """Forgets all steps. Their ids are not used again."""
        self._steps.clear()


def check_result(
    microbatch: Microbatch, token_ids: Sequence[int], logprobs: Sequence[LogprobRows]
) -> None:
    """Raises ProtocolError if these cannot be the tokens and rows of the step."""
    step_id = microbatch.step_id
    if len(token_ids) != microbatch.num_samples:
        raise ProtocolError(
            f"step {step_id} drew {len(token_ids)} tokens, {microbatch.num_samples} are due"
        )
    if len(logprobs) != microbatch.num_logprob_runs:
        raise ProtocolError(
            f"step {step_id} gave log-probabilities of {len(logprobs)} chunks, "
            f"{microbatch.num_logprob_runs} are due"
        )
    check_logprobs(microbatch.chunks, logprobs)
