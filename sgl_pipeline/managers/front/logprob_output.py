"""Log-probabilities in the twelve lists that upstream's output messages have for them.

The conventions are upstream's (`managers/scheduler_components/logprob_result_processor.py`):
entries of the prompt begin at `logprob_start_len`; the first is None, even if a token precedes it;
and all are sent at once, when the prompt has been computed. A request of no new tokens gets no
entry for a drawn token, but the highest and the chosen ids of the position after its prompt, which
`/v1/score` reads.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from sgl_pipeline.requests import LogprobRows, LogprobSpec, Request

# A row's part of an output message: the fields for which it has values.
LogprobFields = dict[str, list[Any]]

FIELDS = tuple(
    f"{side}_{kind}_logprobs_{part}"
    for side in ("input", "output")
    for kind in ("token", "top", "token_ids")
    for part in ("val", "idx")
)


class LogprobCursor:
    """The number of a request's log-probabilities that have been sent."""

    def __init__(self, request: Request) -> None:
        spec = request.logprobs
        assert spec is not None
        self._request = request
        self._spec = spec
        self._num_prompt_rows = max(0, len(request.prompt_ids) - 1 - spec.prompt_start)
        self._num_runs_sent = 0

    def next_fields(self, new_ids: Sequence[int]) -> LogprobFields:
        """All values that were not sent before; none while some of the prompt is missing.

        Args:
            new_ids: the output tokens of the same message.
        """
        request, spec = self._request, self._spec
        # The last chunk of a prompt brings one more row: the first output token's.
        if request.num_logprob_rows <= self._num_prompt_rows:
            return {}
        is_first = self._num_runs_sent == 0
        runs = request.logprob_runs[self._num_runs_sent :]
        self._num_runs_sent += len(runs)
        num_prompt = self._num_prompt_rows if is_first else 0
        columns = _columns(runs, spec)
        # The token that follows each row, if there is one.
        next_ids = request.prompt_ids[-num_prompt:] if num_prompt else []
        next_ids += new_ids
        columns["token"] = (columns["token"][0][: len(next_ids)], next_ids)
        fields = {}
        for kind, (values, ids) in columns.items():
            fields[f"output_{kind}_logprobs_val"] = values[num_prompt:]
            fields[f"output_{kind}_logprobs_idx"] = ids[num_prompt:]
            if is_first and spec.prompt_start < len(request.prompt_ids):
                first_id = request.prompt_ids[spec.prompt_start] if kind == "token" else None
                fields[f"input_{kind}_logprobs_val"] = [None, *values[:num_prompt]]
                fields[f"input_{kind}_logprobs_idx"] = [first_id, *ids[:num_prompt]]
        return fields


def logprob_columns(rows: Sequence[LogprobFields | None]) -> dict[str, list[Any] | None]:
    """The twelve lists of a message, an entry per row in each; None if no row has values."""
    if all(row is None for row in rows):
        return dict.fromkeys(FIELDS)
    return {field: [(row or {}).get(field, []) for row in rows] for field in FIELDS}


def _columns(
    runs: Sequence[LogprobRows], spec: LogprobSpec
) -> dict[str, tuple[list[Any], list[Any]]]:
    """Values and token ids of each kind that is wanted, an entry per row; "token" without ids."""
    chosen = _numbers([run.chosen for run in runs], np.float32, 1)[:, 0].tolist()
    columns: dict[str, tuple[list[Any], list[Any]]] = {"token": (chosen, [])}
    if spec.num_top:
        top = _numbers([run.top for run in runs], np.float32, spec.num_top)
        top_ids = _numbers([run.top_ids for run in runs], np.int32, spec.num_top)
        columns["top"] = (top.tolist(), top_ids.tolist())
    if spec.token_ids:
        width = len(spec.token_ids)
        of_token_ids = _numbers([run.of_token_ids for run in runs], np.float32, width)
        columns["token_ids"] = (of_token_ids.tolist(), [list(spec.token_ids)] * len(of_token_ids))
    return columns


def _numbers(parts: Sequence[bytes], dtype: type[np.generic], width: int) -> np.ndarray:
    return np.frombuffer(b"".join(parts), dtype).reshape(-1, width)
