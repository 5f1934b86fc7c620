"""Forbids the tokens that a request's grammar does not allow next.

Called by the last stage's `StageRunner`: planned from the step's chunks, applied to the logits
after every other adjustment, so that nothing can bring a forbidden token back. Knows no grammar:
the scheduler process compiles and matches them, and a plan carries the masks.

Shapes: S sampled rows, V vocabulary size, R rows with a mask, B bytes of a mask.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from sgl_pipeline.pp_runner.step_inputs import to_device
from sgl_pipeline.step_plan import MirroredChunk


@dataclass(frozen=True, slots=True, eq=False)
class TokenMasks:
    """The masks of a step, on the stage's device: bit `i % 8` of byte `i // 8` allows token i."""

    rows: torch.Tensor  # [R] int64
    packed: torch.Tensor  # [R, B] uint8, 8 * B >= V

    @torch.inference_mode()
    def apply_to(self, logits: torch.Tensor) -> None:
        """Sets what is not allowed to -inf in `logits` [S, V] fp32, in place."""
        bits = 1 << torch.arange(8, dtype=torch.uint8, device=logits.device)
        forbidden = (self.packed[:, :, None] & bits).eq(0).flatten(1)[:, : logits.shape[1]]
        logits[self.rows] = logits[self.rows].masked_fill(forbidden, -torch.inf)


def plan_token_masks(chunks: Sequence[MirroredChunk], device: torch.device) -> TokenMasks | None:
    """The masks of a step whose logits' rows are the chunks that sample; None when none has one."""
    masks = [chunk.token_mask for chunk in chunks if chunk.samples]
    rows = [row for row, mask in enumerate(masks) if mask]
    if not rows:
        return None
    packed = np.frombuffer(b"".join(masks), np.uint8).reshape(len(rows), -1).copy()
    return TokenMasks(to_device(np.array(rows, np.int64), device), to_device(packed, device))


def allows_no_other(mask: bytes, token_ids: Sequence[int]) -> bool:
    """Whether `mask` allows none but `token_ids`, which are distinct and of the vocabulary."""
    allowed = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")
    return bool(allowed.sum() == allowed[list(token_ids)].sum())
