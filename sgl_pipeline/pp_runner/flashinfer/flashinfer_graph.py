"""FlashInfer's decode attention as a part of a CUDA graph, for one number of rows.

The graph is recorded with the wrapper's buffers, which each plan fills anew.
"""

import torch

from sgl_pipeline.pp_runner.attention.attention_backend import AttentionShape
from sgl_pipeline.pp_runner.base.step_inputs import PagedLayout
from sgl_pipeline.pp_runner.base.to_device import to_device
from sgl_pipeline.pp_runner.flashinfer.flashinfer_parts import Event, Wrapper, plan_decodes


class GraphDecodeAttention:
    """The `AttentionBackend` of steps of up to `num_rows` decodes and nothing else.

    Missing rows are filled up with decodes that see one key, in `padding_page`, which belongs to no
    request.

    Args:
        wrapper: a decode wrapper in CUDA-graph mode, for `num_rows` rows.
        max_page_references: as many as its buffer holds.
    """

    def __init__(
        self,
        shape: AttentionShape,
        wrapper: Wrapper,
        planned: Event,
        num_rows: int,
        padding_page: int,
        max_page_references: int,
    ) -> None:
        self._shape = shape
        self._wrapper = wrapper
        self._planned = planned
        self.num_rows = num_rows
        self._padding_page = padding_page
        self._max_page_references = max_page_references

    def fits(self, layout: PagedLayout) -> bool:
        """True if the buffers hold the step; requests may share pages, so the pool does not limit
        the number of references."""
        missing = self.num_rows - layout.num_chunks
        is_decode = layout.num_decodes == layout.num_chunks
        references = layout.page_indices.numel() + missing
        return is_decode and missing >= 0 and references <= self._max_page_references

    def plan(self, layout: PagedLayout) -> None:
        """Fills the buffers. See `FlashInferAttention.plan` for what it waits for."""
        assert self.fits(layout), "a step that does not fit the graph"
        missing = self.num_rows - layout.num_chunks
        more = torch.arange(1, missing + 1, dtype=torch.int32)
        indices = torch.cat(
            (
                layout.page_indices,
                torch.full((missing,), self._padding_page, dtype=torch.int32),
            )
        )
        self._planned.synchronize()
        plan_decodes(
            self._wrapper,
            self._shape,
            torch.cat((layout.page_indptr, layout.page_indptr[-1] + more)),
            to_device(indices.numpy(), self._shape.device),
            torch.cat((layout.last_page_lengths, torch.ones(missing, dtype=torch.int32))),
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
