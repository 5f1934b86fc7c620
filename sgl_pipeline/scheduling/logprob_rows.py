"""The log-probabilities that a step yielded find their way to its requests.

Called by `StepScheduler.on_result`; the rows themselves are bytes that nobody here reads.
"""

from sgl_pipeline.errors import ProtocolError
from sgl_pipeline.microbatch import Chunk
from sgl_pipeline.requests import LogprobRows


def keep_logprobs(chunk: Chunk, rows: LogprobRows) -> None:
    """Adds what a chunk yielded to what its request has. Raises ProtocolError on a wrong count."""
    request = chunk.request
    num_due = max(0, chunk.end - max(chunk.start, request.first_logits_position))
    if rows.num_rows != num_due:
        raise ProtocolError(
            f"request {request.request_id!r} got log-probabilities of {rows.num_rows} positions, "
            f"{num_due} are due"
        )
    if num_due:
        request.logprob_runs.append(rows)
        request.num_logprob_rows += num_due
