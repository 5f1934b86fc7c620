"""What every attention backend offers to the decoder layers.

Implemented by `torch_attention`, `cpu_attention` and `flashinfer_attention`; chosen in
`pp_runner/kernel_choice.py`. Shapes: T rows, Hq query heads, Hkv key/value heads, D head dim, N
pages, S page size.
"""

from dataclasses import dataclass
from typing import Protocol

import torch

from sgl_pipeline.pp_runner.step_inputs import PagedLayout


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The numbers that a backend needs once. `scale` multiplies the scores."""

    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    scale: float
    dtype: torch.dtype
    device: torch.device


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
            key_pages: [N, S, Hkv, D], the layer's keys (NHD layout).
            value_pages: [N, S, Hkv, D].
        """
