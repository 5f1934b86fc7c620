"""The interface of attention backends for the decoder layers.

`pp_runner/kernel_choice.py` chooses between them. Shapes: T rows, Hq query heads, Hkv key/value
heads, D head dim, N pages, S page size, W elements of a row in a page: D, or more where pages hold
codes (kv_format.py).
"""

from dataclasses import dataclass
from typing import Protocol

import torch

from sgl_pipeline.pp_runner.base.kv_format import row_width
from sgl_pipeline.pp_runner.base.step_inputs import PagedLayout


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The numbers that a backend needs once. `scale` multiplies the scores; `dtype` is that of
    queries and outputs, and of keys and values too unless pages hold codes of `coded_dtype`
    (`kv_format.CODED_DTYPES`)."""

    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    scale: float
    dtype: torch.dtype
    device: torch.device
    coded_dtype: torch.dtype | None = None

    @property
    def page_dtype(self) -> torch.dtype:
        """The dtype of a page's elements."""
        return self.coded_dtype or self.dtype

    @property
    def page_shape(self) -> tuple[int, int, int]:
        """[S, Hkv, W] of a page of keys, and of one of values."""
        return self.page_size, self.num_kv_heads, row_width(self.head_dim, self.page_dtype)


class AttentionBackend(Protocol):
    """Causal attention over paged keys and values.

    `plan` is called once a step, `attend` once for each layer of that step, after the step's own
    keys and values were written into the pages.
    """

    def plan(self, layout: PagedLayout) -> None:
        """Prepares for the step that `layout` describes."""

    def attend(
        self, query: torch.Tensor, key_pages: torch.Tensor, value_pages: torch.Tensor
    ) -> torch.Tensor:
        """Returns [T, Hq, D] in the dtype of `query`.

        Args:
            query: [T, Hq, D], after the rotary embedding.
            key_pages: [N, S, Hkv, W] of `page_dtype`, the layer's keys (NHD layout).
            value_pages: [N, S, Hkv, W], the same.
        """
