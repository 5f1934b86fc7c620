"""The end of the last stage: from the residual stream to tokens and their log-probabilities.

It is planned from the step's chunks alone, and drawn when the layers are launched. Its result may
be pending: a GPU goes on with the next step while the token ids are on their way to the host. Keeps
nothing between steps.

Shapes: T rows of the step, S sampled rows, H hidden size, V vocabulary size.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from sgl_pipeline.pp_runner.base.download import Download, HostCopy
from sgl_pipeline.pp_runner.base.step_inputs import StepInputs
from sgl_pipeline.pp_runner.output.drafted_rows import rows_apart
from sgl_pipeline.pp_runner.output.logit_adjustments import plan_logit_adjustments
from sgl_pipeline.pp_runner.output.logprobs import StepLogprobs, plan_logprobs
from sgl_pipeline.pp_runner.output.sampler import DrawnTokens, Sampler
from sgl_pipeline.pp_runner.output.token_masks import plan_token_masks
from sgl_pipeline.requests import LogprobRows
from sgl_pipeline.wire.step_order import MirroredChunk

# The token of each sampled row, and the rows of each chunk whose request wants log-probabilities;
# of a chunk with drafts, for each of its sampled rows.
Outputs = tuple[tuple[int, ...], tuple[LogprobRows, ...]]


class PendingOutputs(Protocol):
    """The tokens that a step has drawn, or will draw."""

    def is_ready(self) -> bool:
        """True if `result` need not wait for the device, unless a row must be drawn again."""

    def result(self) -> Outputs:
        """Waits for the device; to be called once."""


class Tail(Protocol):
    """`plan` once a step, which needs no activations, then `draw`."""

    def plan(self, chunks: Sequence[MirroredChunk], inputs: StepInputs) -> None:
        """Builds all that does not need the activations."""

    def draw(self, hidden: torch.Tensor) -> PendingOutputs:
        """Draws from the residual stream `hidden` [T, H] of the planned step; never waits for the
        device."""


class OutputTail:
    """Logits of the sampled rows, adjusted, masked, and drawn from.

    Args:
        head: gives the logits [N, V] in fp32 of rows [N, H] of the residual stream.
        download: brings the results to the host.
    """

    def __init__(
        self,
        head: Callable[[torch.Tensor], torch.Tensor],
        device: torch.device,
        download: Download,
    ) -> None:
        self._head = head
        self._device = device
        self._download = download
        self._sampler = Sampler()

    def plan(self, chunks: Sequence[MirroredChunk], inputs: StepInputs) -> None:
        """See `Tail.plan`."""
        self._inputs = inputs
        apart = rows_apart(chunks)
        self._adjustments = plan_logit_adjustments(apart, self._device)
        self._masks = plan_token_masks(apart, self._device)
        self._logprobs = plan_logprobs(apart)

    def draw(self, hidden: torch.Tensor) -> PendingOutputs:
        """See `Tail.draw`."""
        inputs = self._inputs
        logits = self._head(hidden[inputs.sample_rows])
        if self._adjustments is not None:
            self._adjustments.apply_to(logits)
        if self._masks is not None:
            self._masks.apply_to(logits)
        drawn = self._sampler.draw(logits, inputs.sampling, inputs.sample_positions)
        tensors, logprobs = [drawn.token_ids], None
        if self._logprobs is not None:
            logprobs = self._logprobs.compute(self._head, hidden, logits, drawn.token_ids)
            tensors += logprobs.tensors
        kept = None if drawn.is_decided else logits
        return _Drawn(drawn, kept, logprobs, self._download, self._download(tensors))


@dataclass(frozen=True, slots=True, eq=False)
class _Drawn:
    """The `PendingOutputs` of an `OutputTail`; `copy` has the ids, then those of `logprobs`."""

    drawn: DrawnTokens
    logits: torch.Tensor | None  # [S, V]; None where every row is decided
    logprobs: StepLogprobs | None
    download: Download
    copy: HostCopy

    def is_ready(self) -> bool:
        return self.copy.is_ready()

    def result(self) -> Outputs:
        drawn_ids, *numbers = self.copy.tensors()
        token_ids = drawn_ids.tolist()
        if self.logits is not None:
            token_ids = self._settle(token_ids, self.logits, numbers)
        if self.logprobs is None:
            return tuple(token_ids), ()
        return tuple(token_ids), self.logprobs.rows_of_chunks(numbers)

    def _settle(
        self, drawn_ids: list[int], logits: torch.Tensor, numbers: list[torch.Tensor]
    ) -> list[int]:
        """`drawn_ids` with none undecided; corrects `numbers`, which belong to `logprobs`, if
        needed."""
        # The next steps may be launched already: not behind them.
        with self.download.beside_kernels(logits):
            token_ids = self.drawn.settle(drawn_ids)
            if self.logprobs is not None and token_ids != drawn_ids:
                numbers[0] = self.logprobs.chosen_again(numbers[0], logits, token_ids)
        return token_ids
