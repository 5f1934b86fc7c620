"""Changes the logits of a step as its requests asked: penalties, logit bias, min_new_tokens.

It is planned from the step's chunks alone, and applied to the logits before `Sampler.sample`. It
keeps nothing between steps: a row's adjustments are a function of its request's `SamplingSpec` and
output tokens, so that no retraction, restart or neighbor in the microbatch can change it.

Shapes: S sampled rows, V vocabulary size, N cells that an adjustment touches.
"""

from collections.abc import Sequence, Sized
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch

from sgl_pipeline.pp_runner.base.to_device import to_device
from sgl_pipeline.pp_runner.output.token_masks import allows_no_other
from sgl_pipeline.wire.step_order import MirroredChunk

# A cell as one int64 to sort by: which row in the upper half, the token id in the lower.
_ROW_SHIFT = 32
_TOKEN_MASK = (1 << _ROW_SHIFT) - 1


@dataclass(frozen=True, slots=True, eq=False)
class _Cells:
    """Places in the logits, each at most once: `rows` and `token_ids`, both [N] int64."""

    rows: torch.Tensor
    token_ids: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class LogitAdjustments:
    """The changes to the logits of one step. All tensors on the stage's device, numbers in fp32.

    Rules and order are SGLang's (`penaltylib/*.py`, `sampling_batch_info.py::apply_logits_bias`),
    before any temperature and for greedy rows too:

    1. A token of the output so far loses `frequency_penalty` times its count, and
       `presence_penalty` once. The prompt counts for nothing.
    2. The logit of a token of the output (again not the prompt) is divided by `repetition_penalty`
       where it is positive, multiplied where it is negative.
    3. `logit_bias` is added. 4. Until there are `min_new_tokens` output tokens, tokens that would
    stop the request get -inf,
       unless its grammar (`token_masks.py`) allows nothing else: then it is complete and may end.
       SGLang does this first; -inf does not change under 1 to 3, so the order has no effect, and
       here no earlier rule can make a NaN of it.

    Unlike SGLang, whose overlapped scheduler adds the newest token one step late and forgets all on
    a retraction, every output token counts.
    """

    penalised: _Cells
    subtracted: torch.Tensor  # [N], by rule 1
    repetition: torch.Tensor  # [N], above 0
    biased: _Cells
    bias: torch.Tensor  # [N]
    forbidden: _Cells

    @torch.inference_mode()
    def apply_to(self, logits: torch.Tensor) -> None:
        """Changes `logits` [S, V] fp32 in place."""
        rows, token_ids = self.penalised.rows, self.penalised.token_ids
        values = logits[rows, token_ids] - self.subtracted
        logits[rows, token_ids] = torch.where(
            values < 0, values * self.repetition, values / self.repetition
        )
        logits[self.biased.rows, self.biased.token_ids] += self.bias
        logits[self.forbidden.rows, self.forbidden.token_ids] = -torch.inf


def plan_logit_adjustments(
    chunks: Sequence[MirroredChunk], device: torch.device
) -> LogitAdjustments | None:
    """The adjustments of a step, or None when no sampled row has any.

    The logits' rows belong to the chunks that sample, in their order. The work grows with the
    output tokens of rows with penalties and with the token ids that other rows name, all in numpy.
    """
    sampled = [chunk for chunk in chunks if chunk.samples]
    rows = [
        row
        for row, chunk in enumerate(sampled)
        if chunk.request.changes_logits and _is_adjusted(chunk)
    ]
    if not rows:
        return None
    adjusted = [sampled[row] for row in rows]
    row_of = np.array(rows, np.int64)

    def cells(places: np.ndarray, token_ids: np.ndarray) -> _Cells:
        """The cells of `token_ids` in the rows of the chunks `adjusted[places]`."""
        return _Cells(to_device(row_of[places], device), to_device(token_ids, device))

    def numbers(values: np.ndarray) -> torch.Tensor:
        return to_device(values.astype(np.float32), device)

    keys, subtracted, repetition = _penalties(adjusted)
    biases = [chunk.request.sampling.logit_bias for chunk in adjusted]
    # A token id is exact in float64, so that one array can hold the pairs.
    flat = chain.from_iterable(chain.from_iterable(biases))
    pairs = np.fromiter(flat, np.float64).reshape(-1, 2)
    forbidden = [_forbidden_ids(chunk) for chunk in adjusted]
    return LogitAdjustments(
        penalised=cells(keys >> _ROW_SHIFT, keys & _TOKEN_MASK),
        subtracted=numbers(subtracted),
        repetition=numbers(repetition),
        biased=cells(_places(biases), pairs[:, 0].astype(np.int64)),
        bias=numbers(pairs[:, 1]),
        forbidden=cells(_places(forbidden), np.fromiter(chain.from_iterable(forbidden), np.int64)),
    )


def _is_adjusted(chunk: MirroredChunk) -> bool:
    spec = chunk.request.sampling
    return spec.penalises_output or bool(spec.logit_bias) or bool(_forbidden_ids(chunk))


def _forbidden_ids(chunk: MirroredChunk) -> tuple[int, ...]:
    spec = chunk.request.sampling
    num_outputs = chunk.start + chunk.length - chunk.request.prompt_length
    if num_outputs >= spec.min_new_tokens:
        return ()
    ids = spec.masked_token_ids
    return () if chunk.token_mask and allows_no_other(chunk.token_mask, ids) else ids


def _penalties(chunks: Sequence[MirroredChunk]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Sort keys of the distinct output tokens that are penalised, what each loses, and what divides
    it: [N] each."""
    outputs = [_penalised_ids(chunk) for chunk in chunks]
    keys, counts = np.unique(
        _places(outputs) << _ROW_SHIFT | np.concatenate(outputs), return_counts=True
    )
    specs = [chunk.request.sampling for chunk in chunks]
    penalties = np.array(
        [(spec.frequency_penalty, spec.presence_penalty, spec.repetition_penalty) for spec in specs]
    )
    frequency, presence, repetition = penalties[keys >> _ROW_SHIFT].T
    # A divisor above 0 must not become 0 in fp32.
    return keys, frequency * counts + presence, np.maximum(repetition, np.finfo(np.float32).tiny)


def _penalised_ids(chunk: MirroredChunk) -> np.ndarray:
    """The output tokens up to the chunk's end, int64; empty if the request has no penalties."""
    request = chunk.request
    if not request.sampling.penalises_output:
        return np.empty(0, np.int64)
    token_ids = np.frombuffer(request.tokens, np.int32, chunk.start + chunk.length)
    # A copy: while a view is alive the request's array could not grow.
    return token_ids[request.prompt_length :].astype(np.int64)


def _places(runs: Sequence[Sized]) -> np.ndarray:
    """The index of each run, int64, as often as the run is long."""
    return np.repeat(np.arange(len(runs), dtype=np.int64), [len(run) for run in runs])
