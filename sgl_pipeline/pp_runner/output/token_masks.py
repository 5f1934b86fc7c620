"""Forbids the tokens that a request's grammar does not allow next.

Masks are planned from the step's chunks, and applied to the logits after every other adjustment, so
that no adjustment can bring a forbidden token back. The scheduler process compiles and matches
grammars; a plan carries only the masks.

Shapes: S sampled rows, V vocabulary size, R rows from the first with a mask to the last, B bytes of
a mask.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from sgl_pipeline.errors import ProtocolError
from sgl_pipeline.pp_runner.base.to_device import to_device
from sgl_pipeline.wire.step_order import MirroredChunk


@dataclass(frozen=True, slots=True, eq=False)
class TokenMasks:
    """The masks of the rows from `first_row` on, on the stage's device: bit `i % 8` of byte `i //
    8` allows token i. A row between them without a mask gets one that allows all tokens."""

    first_row: int
    packed: torch.Tensor  # [R, B] uint8, 8 * B >= V

    @torch.inference_mode()
    def apply_to(self, logits: torch.Tensor) -> None:
        """Sets forbidden tokens to -inf in `logits` [S, V] fp32, in place."""
        rows = logits[self.first_row : self.first_row + len(self.packed)]
        if logits.device.type == "cpu":
            # Less than half of the time that torch takes for 12 rows of 49,152.
            vocab_size = logits.shape[1]
            allowed = np.unpackbits(
                self.packed.numpy(), axis=1, count=vocab_size, bitorder="little"
            )  # with zeros where the mask ends: what it does not know is forbidden
            np.copyto(rows.numpy(), -np.inf, where=np.logical_not(allowed.view(bool)))
        else:
            rows.masked_fill_(forbidden_tokens(self.packed, logits.shape[1]), -torch.inf)


def forbidden_tokens(packed: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """The tokens [R, V] bool that the masks `packed` [R, B] uint8 do not allow."""
    bits = 1 << torch.arange(8, dtype=torch.uint8, device=packed.device)
    return (packed[:, :, None] & bits).eq(0).flatten(1)[:, :vocab_size]


def plan_token_masks(chunks: Sequence[MirroredChunk], device: torch.device) -> TokenMasks | None:
    """The masks of a step whose logits' rows are the chunks that sample; None when none has one.

    Raises ProtocolError when they have different lengths.
    """
    masks = [chunk.token_mask for chunk in chunks if chunk.samples]
    rows = [row for row, mask in enumerate(masks) if mask]
    if not rows:
        return None
    masks = masks[rows[0] : rows[-1] + 1]
    allows_all = b"\xff" * len(masks[0])
    masks = [mask or allows_all for mask in masks]
    if any(len(mask) != len(allows_all) for mask in masks):
        raise ProtocolError(f"masks of one step have {sorted(set(map(len, masks)))} bytes")
    joined = bytearray().join(masks)
    packed = np.frombuffer(joined, np.uint8).reshape(len(masks), -1)
    return TokenMasks(rows[0], to_device(packed, device))


def allows_no_other(mask: bytes, token_ids: Sequence[int]) -> bool:
    """True if `mask` allows only `token_ids`, which are distinct and of the vocabulary."""
    allowed = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")
    return bool(allowed.sum() == allowed[list(token_ids)].sum())
