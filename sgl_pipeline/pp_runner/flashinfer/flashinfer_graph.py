"""FlashInfer's decode attention as a part of a CUDA graph, for one number of rows.

The graph is recorded with the wrapper's buffers, which each plan fills anew.
"""

import numpy as np
import torch

from sgl_pipeline.pp_runner.attention.attention_backend import AttentionShape
from sgl_pipeline.pp_runner.base.step_inputs import PagedLayout
from sgl_pipeline.pp_runner.flashinfer.flashinfer_parts import Event, Wrapper, plan_decodes


class GraphDecodeAttention:
    """The `AttentionBackend` of steps of up to `num_rows` decodes and nothing else.

    Missing rows are filled up with decodes that see one key, in `padding_page`, which belongs to no
    request.

    Args:
        wrapper: a decode wrapper in CUDA-graph mode, for `num_rows` rows.
        indices: its buffer of page references.
    """

    def __init__(
        self,
        shape: AttentionShape,
        wrapper: Wrapper,
        planned: Event,
        num_rows: int,
        padding_page: int,
        indices: torch.Tensor,
    ) -> None:
        self._shape = shape
        self._wrapper = wrapper
        self._planned = planned
        self.num_rows = num_rows
        self._padding_page = padding_page
        self._indices = indices
        # Of missing rows: their keys, each on a page of its own, and how many pages those are.
        self._ones = np.ones(num_rows, np.int32)
        self._counts = np.arange(1, num_rows + 1, dtype=np.int32)

    def fits(self, layout: PagedLayout) -> bool:
        """True if the buffers hold the step; requests may share pages, so the pool does not limit
        the number of references."""
        missing = self.num_rows - layout.num_chunks
        is_decode = layout.num_decodes == layout.num_chunks
        references = layout.page_indices.numel() + missing
        return is_decode and missing >= 0 and references <= self._indices.numel()

    def plan(self, layout: PagedLayout) -> None:
        """Fills the buffers. See `FlashInferAttention.plan` for what it waits for."""
        assert self.fits(layout), "a step that does not fit the graph"
        missing = self.num_rows - layout.num_chunks
        page_indptr, last_page_lengths = layout.page_indptr, layout.last_page_lengths
        kv_lengths, ones = layout.kv_lengths, self._ones[:missing]
        self._planned.synchronize()
        if missing:
            # Behind those that the wrapper copies.
            end = layout.page_indices.numel()
            page_indptr = _followed_by(page_indptr, end + self._counts[:missing])
            last_page_lengths = _followed_by(last_page_lengths, ones)
            kv_lengths = _followed_by(kv_lengths, ones)
            self._indices[end : end + missing].fill_(self._padding_page)
        plan_decodes(
            self._wrapper,
            self._shape,
            page_indptr,
            layout.page_indices_on(self._shape.device),
            last_page_lengths,
            kv_lengths,
        )
        self._planned.record()

    def attend(
        self,
        query: torch.Tensor,
        key_pages: torch.Tensor,
        value_pages: torch.Tensor,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `AttentionBackend.attend`; [num_rows, Hq, D]."""
        query = query.contiguous()
        out = torch.empty_like(query)
        self._wrapper.run(query, (key_pages, value_pages), out=out)
        return out


def _followed_by(numbers: torch.Tensor, more: np.ndarray) -> torch.Tensor:
    """Faster than `torch.cat` for a few."""
    return torch.from_numpy(np.concatenate((numbers.numpy(), more)))
