"""The log-probabilities that the requests of a step want, from the logits of the last stage.

Called by the last stage's `StageRunner`: planned from the step's chunks before the activations
arrive, computed after the sampler. What each row is a log-softmax of is SGLang's default
(`layers/sampler.py`, `layers/logprob_processor.py`):

- A row that a token was drawn from: of the logits after penalties, logit bias and masks, over the
  temperature, where the row is not greedy. Top-k, top-p and min-p change nothing. (SGLang asks
  whether the whole batch is greedy, which differs for top_k = 1 with a temperature; here, as
  anywhere, a row never looks at its neighbours.)
- A row of the prompt: of the logits as the model gives them.

Numbers are clamped to the lowest of fp32, which also stands where there is none, as in the row of a
NaN: JSON knows neither it nor infinity. Of equal numbers the lowest token id counts as the highest.

Shapes: S sampled rows, V vocabulary size, W wanted rows, K the most highest ones of any, C cells:
pairs of a wanted row and one of the token ids that its request names.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from sgl_pipeline.pp_runner.step_inputs import to_device
from sgl_pipeline.requests import MAX_TOP_LOGPROBS, LogprobRows, LogprobSpec
from sgl_pipeline.step_plan import MirroredChunk

# Prompt rows are computed in slices whose logits take this much, or one row: a chunk of 4,096
# tokens would take 2.5 GB at once with a vocabulary of 152k.
MAX_LOGITS_BYTES = 64 * 2**20

_LOWEST = torch.finfo(torch.float32).min
_NONE = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class _ChunkRows:
    """The wanted rows `[begin, end)` of one chunk, and what is wanted of them."""

    spec: LogprobSpec
    begin: int
    end: int


@dataclass(frozen=True, slots=True, eq=False)
class LogprobPlan:
    """What to compute in one step. Wanted rows are in chunk order, positions ascending.

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
        token_ids: Sequence[int],
    ) -> tuple[LogprobRows, ...]:
        """The rows of each chunk whose request wants log-probabilities, in chunk order.

        Args:
            logits_of: gives the logits [N, V] of rows [N, H] of the residual stream.
            hidden: the residual stream [T, H] of the whole step.
            sampled_logits: [S, V] fp32, as the sampler saw them; left as they are.
            token_ids: [S], what was drawn.
        """
        vocab_size, device = sampled_logits.shape[1], hidden.device
        table = _Table(self, vocab_size)
        if self.drawn.size:
            logits = sampled_logits[to_device(self.drawn, device)]
            if (self.temperatures != 1.0).any():
                logits /= to_device(self.temperatures, device)[:, None]
            table.fill(self.drawn_at, logits, np.array(token_ids, np.int64)[self.drawn])
        rows_at_once = max(1, MAX_LOGITS_BYTES // (4 * vocab_size))
        for start in range(0, self.prompt_rows.size, rows_at_once):
            part = slice(start, start + rows_at_once)
            logits = logits_of(hidden[to_device(self.prompt_rows[part], device)])
            table.fill(self.prompt_at[part], logits, self.next_ids[part])
        return table.rows_of_chunks()


class _Table:
    """The numbers of all wanted rows of a step, on the host."""

    def __init__(self, plan: LogprobPlan, vocab_size: int) -> None:
        num_rows = plan.chunks[-1].end
        num_top = max(chunk.spec.num_top for chunk in plan.chunks)
        self._plan = plan
        # One number for all rows, so that ties are broken alike whatever the microbatch.
        self._num_ordered = min(MAX_TOP_LOGPROBS, vocab_size) if num_top else 0
        self._chosen = np.empty(num_rows, np.float32)
        self._top = np.empty((num_rows, num_top), np.float32)
        self._top_ids = np.empty((num_rows, num_top), np.int32)
        self._of_cells = np.empty(plan.cell_ids.size, np.float32)

    def fill(self, rows: np.ndarray, logits: torch.Tensor, next_ids: np.ndarray) -> None:
        """Enters the ascending `rows`, whose logits are [len(rows), V] fp32."""
        logprobs = logits.log_softmax(dim=-1)
        device = logprobs.device
        chosen = logprobs.gather(1, to_device(next_ids, device)[:, None])
        self._chosen[rows] = _finite(chosen[:, 0])
        if self._num_ordered:
            top, top_ids = _highest(logprobs, self._num_ordered)
            num_top = self._top.shape[1]
            self._top[rows] = _finite(top[:, :num_top])
            self._top_ids[rows] = top_ids[:, :num_top].cpu().numpy()
        if self._of_cells.size:
            cells = np.flatnonzero(np.isin(self._plan.cell_rows, rows))
            local_rows = np.searchsorted(rows, self._plan.cell_rows[cells])
            cell_ids = to_device(self._plan.cell_ids[cells], device)
            of_cells = logprobs[to_device(local_rows, device), cell_ids]
            self._of_cells[cells] = _finite(of_cells)

    def rows_of_chunks(self) -> tuple[LogprobRows, ...]:
        found, first_cell = [], 0
        for chunk in self._plan.chunks:
            rows, num_top = slice(chunk.begin, chunk.end), chunk.spec.num_top
            num_rows = chunk.end - chunk.begin
            last_cell = first_cell + num_rows * len(chunk.spec.token_ids)
            found.append(
                LogprobRows(
                    num_rows=num_rows,
                    chosen=self._chosen[rows].tobytes(),
                    top=self._top[rows, :num_top].tobytes(),
                    top_ids=self._top_ids[rows, :num_top].tobytes(),
                    of_token_ids=self._of_cells[first_cell:last_cell].tobytes(),
                )
            )
            first_cell = last_cell
        return tuple(found)


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


def _finite(numbers: torch.Tensor) -> np.ndarray:
    finite: np.ndarray = numbers.nan_to_num(nan=_LOWEST, neginf=_LOWEST).cpu().numpy()
    return finite


def _highest(logprobs: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `count` highest of each row and their token ids, lower ids first where they are equal."""
    top, top_ids = logprobs.topk(count, dim=-1, sorted=False)
    top_ids, order = top_ids.sort(dim=-1)
    top, order = top.gather(1, order).sort(dim=-1, descending=True, stable=True)
    return top, top_ids.gather(1, order)
