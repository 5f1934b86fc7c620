"""Assigns a step's log-probabilities to its requests.

The rows are bytes, which are not decoded here.
"""

from collections.abc import Iterable, Sequence

from sgl_pipeline.errors import ProtocolError
from sgl_pipeline.microbatch import Chunk
from sgl_pipeline.requests import LogprobRows, LogprobSpec

_NUMBER_BYTES = 4


def check_logprobs(chunks: Iterable[Chunk], logprobs: Iterable[LogprobRows]) -> None:
    """Raises ProtocolError if a chunk has a wrong number or length of rows.

    Args:
        logprobs: of each chunk whose request wants any, taken apart (`Chunk.apart`).
    """
    rows_of = iter(logprobs)
    for chunk in chunks:
        if chunk.request.logprobs is not None:
            for part in chunk.apart():
                _check(part, chunk.request.logprobs, next(rows_of))


def _check(chunk: Chunk, spec: LogprobSpec, rows: LogprobRows) -> None:
    num_due = _rows_due(chunk)
    name = f"request {chunk.request.request_id!r} got log-probabilities of {rows.num_rows}"
    if rows.num_rows != num_due:
        raise ProtocolError(f"{name} positions, {num_due} are due")
    if num_due and _lengths(rows) != [num_due * width for width in _row_bytes(spec)]:
        raise ProtocolError(f"{name} positions, whose arrays are not of the length asked for")


def keep_logprobs(chunk: Chunk, runs: Sequence[LogprobRows]) -> None:
    """Appends rows of a chunk to its request's: `runs` belong to the first of its parts
    (`Chunk.apart`)."""
    for part, rows in zip(chunk.apart(), runs, strict=False):
        if num_due := _rows_due(part):
            chunk.request.logprob_runs.append(rows)
            chunk.request.num_logprob_rows += num_due


def _rows_due(chunk: Chunk) -> int:
    return max(0, chunk.end - max(chunk.start, chunk.request.first_logits_position))


def _lengths(rows: LogprobRows) -> list[int]:
    return [len(one) for one in (rows.chosen, rows.top, rows.top_ids, rows.of_token_ids)]


def _row_bytes(spec: LogprobSpec) -> list[int]:
    """Bytes of one position in each array of `LogprobRows`."""
    numbers = (1, spec.num_top, spec.num_top, len(spec.token_ids))
    return [_NUMBER_BYTES * number for number in numbers]
