"""The log-probabilities that the requests of a step want, from the logits of the last stage.

They are planned from the step's chunks alone, computed on the stage's device after the sampler, and
cut into chunks on the host. The input of each row's log-softmax is SGLang's default
(`layers/sampler.py`, `layers/logprob_processor.py`):

- A row that a token was drawn from: of the logits after penalties, logit bias and masks, over the
  temperature, where the row is not greedy. Top-k, top-p and min-p change nothing. (SGLang asks
  whether the whole batch is greedy, which differs for top_k = 1 with a temperature; here, as
  anywhere, a row never looks at its neighbors.)
- A row of the prompt: of the logits as the model gives them.

Numbers are clamped to the lowest of fp32, which also replaces missing numbers, as in the row of a
NaN: JSON has neither NaN nor infinity. Of equal numbers the lowest token id counts as the highest.

Shapes: S sampled rows, V vocabulary size, W wanted rows, K the most highest ones of any, C cells:
pairs of a wanted row and one of the token ids that its request names.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from sgl_pipeline.pp_runner.base.to_device import to_device
from sgl_pipeline.requests import MAX_TOP_LOGPROBS, LogprobRows, LogprobSpec
from sgl_pipeline.wire.step_order import MirroredChunk

# Prompt rows are computed in slices whose logits take this much, or one row: a chunk of 4,096
# tokens would take 2.5 GB at once with a vocabulary of 152k.
MAX_LOGITS_BYTES = 64 * 2**20

_LOWEST = torch.finfo(torch.float32).min
_NONE = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class _ChunkRows:
    """The wanted rows `[begin, end)` of one chunk, and the wanted values."""

    spec: LogprobSpec
    begin: int
    end: int


@dataclass(frozen=True, slots=True, eq=False)
class LogprobPlan:
    """The computations of one step. Wanted rows are in chunk order, positions ascending.

    Wanted row `drawn_at[i]` is the sampled row `drawn[i]`. The others are of prompts: wanted row
    `prompt_at[i]` is the step's row `prompt_rows[i]`, and `next_ids[i]` follows it. All int64.
    """

    chunks: tuple[_ChunkRows, ...]
    drawn_at: np.ndarray
    drawn: np.ndarray
    temperatures: np.ndarray  # fp32, as many as drawn
    prompt_at: np.ndarray
    prompt_rows: np.ndarray
    next_ids: np.ndarray
    cell_rows: np.ndarray  # [C], ascending
    cell_ids: np.ndarray  # [C]

    @torch.inference_mode()
    def compute(
        self,
        logits_of: Callable[[torch.Tensor], torch.Tensor],
        hidden: torch.Tensor,
        sampled_logits: torch.Tensor,
        token_ids: torch.Tensor,
    ) -> "StepLogprobs":
        """The numbers of all wanted rows; never waits for the device.

        Args:
            logits_of: gives the logits [N, V] of rows [N, H] of the residual stream.
            hidden: the residual stream [T, H] of the whole step.
            sampled_logits: [S, V] fp32, as given to the sampler; not changed.
            token_ids: [S] int64 on the device, the drawn tokens. An undecided one has no meaning:
                see `StepLogprobs.chosen_again`.
        """
        vocab_size, device = sampled_logits.shape[1], hidden.device
        parts = _Parts(self, vocab_size)
        drawn = to_device(self.drawn, device)
        drawn_ids = token_ids[drawn].clamp_min(0)
        parts.add(self.drawn_at, self.scaled(sampled_logits[drawn]), drawn_ids)
        rows_at_once = max(1, MAX_LOGITS_BYTES // (4 * vocab_size))
        for start in range(0, self.prompt_rows.size, rows_at_once):
            part = slice(start, start + rows_at_once)
            logits = logits_of(hidden[to_device(self.prompt_rows[part], device)])
            parts.add(self.prompt_at[part], logits, to_device(self.next_ids[part], device))
        return parts.joined()

    def scaled(self, logits: torch.Tensor) -> torch.Tensor:
        """The logits of the drawn rows over their temperatures; `logits` may be written to."""
        if (self.temperatures != 1.0).any():
            logits /= to_device(self.temperatures, logits.device)[:, None]
        return logits


@dataclass(frozen=True, slots=True, eq=False)
class StepLogprobs:
    """The numbers of a step, which the device may still be computing.

    `tensors` are, on the stage's device, of the wanted `rows` [W] and the `cells` [C] in that order
    (both int64, each number once): the log-probability of the token that came [W], the highest
    [W, K], their token ids [W, K], and those of the cells [C].
    """

    plan: LogprobPlan
    rows: np.ndarray
    cells: np.ndarray
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]

    def chosen_again(
        self, chosen: torch.Tensor, sampled_logits: torch.Tensor, token_ids: Sequence[int]
    ) -> torch.Tensor:
        """The first of `tensors`, `chosen` on the host, for other tokens drawn from the same
        logits; waits for the device."""
        plan, device = self.plan, sampled_logits.device
        drawn_ids = to_device(np.array(token_ids, np.int64)[plan.drawn], device)
        logprobs = plan.scaled(sampled_logits[to_device(plan.drawn, device)]).log_softmax(dim=-1)
        # The drawn rows come first in `rows`.
        return torch.cat((_of_tokens(logprobs, drawn_ids).cpu(), chosen[plan.drawn.size :]))

    def rows_of_chunks(self, on_host: Sequence[torch.Tensor]) -> tuple[LogprobRows, ...]:
        """The rows of each chunk whose request wants log-probabilities, in chunk order; `on_host`
        are `tensors` there."""
        chosen, top, top_ids = (_in_order(self.rows, numbers) for numbers in on_host[:3])
        of_cells = _in_order(self.cells, on_host[3])
        found, first_cell = [], 0
        for chunk in self.plan.chunks:
            rows, num_top = slice(chunk.begin, chunk.end), chunk.spec.num_top
            num_rows = chunk.end - chunk.begin
            last_cell = first_cell + num_rows * len(chunk.spec.token_ids)
            found.append(
                LogprobRows(
                    num_rows=num_rows,
                    chosen=chosen[rows].tobytes(),
                    top=top[rows, :num_top].tobytes(),
                    top_ids=top_ids[rows, :num_top].tobytes(),
                    of_token_ids=of_cells[first_cell:last_cell].tobytes(),
                )
            )
            first_cell = last_cell
        return tuple(found)


class _Parts:
    """A `StepLogprobs` as it is computed, slice by slice."""

    def __init__(self, plan: LogprobPlan, vocab_size: int) -> None:
        self._plan = plan
        self._num_top = max(chunk.spec.num_top for chunk in plan.chunks)
        # One number for all rows, so that ties are broken alike in any microbatch.
        self._num_ordered = min(MAX_TOP_LOGPROBS, vocab_size) if self._num_top else 0
        self._rows: list[np.ndarray] = []
        self._cells: list[np.ndarray] = []
        self._tensors: list[tuple[torch.Tensor, ...]] = []

    def add(self, rows: np.ndarray, logits: torch.Tensor, next_ids: torch.Tensor) -> None:
        """The ascending `rows`, whose logits are [len(rows), V] fp32."""
        logprobs = logits.log_softmax(dim=-1)
        top, top_ids = logprobs[:, :0], next_ids.new_empty(len(rows), 0)
        if self._num_ordered:
            top, top_ids = _highest(logprobs, self._num_ordered)
        cells, of_cells = _NONE, logprobs.new_empty(0)
        if self._plan.cell_ids.size:
            cells, of_cells = self._look_up(rows, logprobs)
        self._rows.append(rows)
        self._cells.append(cells)
        self._tensors.append(
            (
                _of_tokens(logprobs, next_ids),
                _finite(top[:, : self._num_top]),
                top_ids[:, : self._num_top].int(),
                _finite(of_cells),
            )
        )

    def _look_up(self, rows: np.ndarray, logprobs: torch.Tensor) -> tuple[np.ndarray, torch.Tensor]:
        """The cells in `rows`, and their numbers in the rows of `logprobs`."""
        plan, device = self._plan, logprobs.device
        cells = np.flatnonzero(np.isin(plan.cell_rows, rows))
        local_rows = np.searchsorted(rows, plan.cell_rows[cells])
        ids = to_device(plan.cell_ids[cells], device)
        return cells, logprobs[to_device(local_rows, device), ids]

    def joined(self) -> StepLogprobs:
        chosen, top, top_ids, of_cells = map(torch.cat, zip(*self._tensors, strict=True))
        return StepLogprobs(
            self._plan,
            np.concatenate(self._rows),
            np.concatenate(self._cells),
            (chosen, top, top_ids, of_cells),
        )


def plan_logprobs(chunks: Sequence[MirroredChunk]) -> LogprobPlan | None:
    """The plan of a step, or None when no chunk's request wants log-probabilities.

    A chunk's rows are wanted from the position `prompt_start` of its request on.
    """
    if all(chunk.request.logprobs is None for chunk in chunks):
        return None
    wanted: list[_ChunkRows] = []
    drawn_at, drawn, temperatures = [], [], []
    prompt_at, prompt_rows, next_ids, cell_rows, cell_ids = ([_NONE] for _ in range(5))
    first_row = num_sampled = begin = 0
    for chunk in chunks:
        request, spec = chunk.request, chunk.request.logprobs
        if spec is not None:
            num_rows = max(0, chunk.length - max(0, spec.prompt_start - chunk.start))
            end = begin + num_rows
            wanted.append(_ChunkRows(spec, begin, end))
            if chunk.samples:
                drawn_at.append(end - 1)
                drawn.append(num_sampled)
                is_greedy = request.sampling.is_greedy
                temperatures.append(1.0 if is_greedy else request.sampling.temperature)
            if num_prompt := num_rows - chunk.samples:
                skipped = chunk.length - num_rows
                prompt_at.append(np.arange(begin, begin + num_prompt))
                prompt_rows.append(first_row + skipped + np.arange(num_prompt))
                # A copy of the slice: while a view is alive the request's array could not grow.
                first_id = chunk.start + skipped + 1
                next_ids.append(np.array(request.tokens[first_id : first_id + num_prompt]))
            if spec.token_ids:
                cell_rows.append(np.repeat(np.arange(begin, end), len(spec.token_ids)))
                cell_ids.append(np.tile(spec.token_ids, num_rows))
            begin = end
        first_row += chunk.length
        num_sampled += chunk.samples
    return LogprobPlan(
        chunks=tuple(wanted),
        drawn_at=np.array(drawn_at, np.int64),
        drawn=np.array(drawn, np.int64),
        temperatures=np.array(temperatures, np.float32),
        prompt_at=np.concatenate(prompt_at),
        prompt_rows=np.concatenate(prompt_rows),
        next_ids=np.concatenate(next_ids),
        cell_rows=np.concatenate(cell_rows),
        cell_ids=np.concatenate(cell_ids),
    )


def _of_tokens(logprobs: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """One number of each row."""
    return _finite(logprobs.gather(1, token_ids[:, None])[:, 0])


def _finite(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.nan_to_num(nan=_LOWEST, neginf=_LOWEST)


def _in_order(places: np.ndarray, numbers: torch.Tensor) -> np.ndarray:
    """`numbers[i]` at index `places[i]`."""
    ordered: np.ndarray = np.empty_like(numbers.numpy())
    ordered[places] = numbers.numpy()
    return ordered


def _highest(logprobs: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `count` highest of each row and their token ids, lower ids first where they are equal."""
    top, top_ids = logprobs.topk(count, dim=-1, sorted=False)
    top_ids, order = top_ids.sort(dim=-1)
    top, order = top.gather(1, order).sort(dim=-1, descending=True, stable=True)
    return top, top_ids.gather(1, order)
