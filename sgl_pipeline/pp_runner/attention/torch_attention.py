"""The reference attention backend: plain torch on any device. The others are tested against it.

It serves `--stage-attention-backend torch`, or machines without a faster one. It gathers every
visible page into a contiguous copy for each layer, so it is clear rather than fast. Must never let
one request's keys or values touch another's rows.
"""

import itertools
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from sgl_pipeline.pp_runner.attention.attention_backend import AttentionShape
from sgl_pipeline.pp_runner.base.kv_format import decode
from sgl_pipeline.pp_runner.base.step_inputs import PagedLayout


@dataclass(frozen=True, slots=True, eq=False)
class _ChunkGroup:
    """C chunks of Q rows each, whose keys are padded to the longest of them: K = pages * S.

    `rows` are the group's query rows in the step. Padded entries of `pages` repeat page 0 and are
    never visible.
    """

    rows: slice
    pages: torch.Tensor  # [C, pages]
    visible: torch.Tensor  # [C, 1, Q, K], whether a row sees a key
    has_key: torch.Tensor  # [C, 1, K, 1], whether a key belongs to the chunk's request


class TorchAttention:
    """Causal attention over paged keys and values in fp32, by `scaled_dot_product_attention`.

    The decodes of a step are one padded group; each prefill chunk is a group of its own.
    """

    def __init__(self, shape: AttentionShape) -> None:
        self._shape = shape
        self._groups: list[_ChunkGroup] = []

    def plan(self, layout: PagedLayout) -> None:
        """Groups the chunks and computes which keys each row sees."""
        self._groups = []
        if layout.num_decodes:
            self._groups.append(self._group(layout, 0, layout.num_decodes))
        for chunk in range(layout.num_decodes, layout.num_chunks):
            self._groups.append(self._group(layout, chunk, chunk + 1))

    def attend(
        self, query: torch.Tensor, key_pages: torch.Tensor, value_pages: torch.Tensor
    ) -> torch.Tensor:
        """See `AttentionBackend.attend`."""
        output = torch.empty_like(query, memory_format=torch.contiguous_format)
        for group in self._groups:
            num_chunks = group.pages.shape[0]
            rows = query[group.rows].unflatten(0, (num_chunks, -1)).transpose(1, 2)
            keys, values = (  # [C, Hkv, K, D]
                decode(pages[group.pages], query.dtype).flatten(1, 2).transpose(1, 2).float()
                for pages in (key_pages, value_pages)
            )
            # These keys may belong to another request, and weight 0 does not remove a NaN.
            keys.masked_fill_(~group.has_key, 0.0)
            values.masked_fill_(~group.has_key, 0.0)
            attended = F.scaled_dot_product_attention(
                rows.float(),
                keys,
                values,
                attn_mask=group.visible,
                scale=self._shape.scale,
                enable_gqa=True,
            )
            output[group.rows] = attended.transpose(1, 2).flatten(0, 1).to(query.dtype)
        return output

    def _group(self, layout: PagedLayout, first: int, end: int) -> _ChunkGroup:
        """The group of the chunks `first` to `end` (exclusive), which have as many rows each."""
        page_ends = layout.page_indptr[first : end + 1].tolist()
        runs = [layout.page_indices[a:b] for a, b in itertools.pairwise(page_ends)]
        pages = torch.nn.utils.rnn.pad_sequence(runs, batch_first=True).long()
        kv_lengths = layout.kv_lengths[first:end].long()
        first_row, end_row = layout.query_indptr[[first, end]].tolist()
        num_rows = (end_row - first_row) // (end - first)
        # Row q of a chunk sees this many keys fewer than the chunk's last row.
        visible_keys = kv_lengths[:, None] - torch.arange(num_rows - 1, -1, -1)  # [C, Q]
        key_positions = torch.arange(pages.shape[1] * layout.page_size)
        device = self._shape.device
        return _ChunkGroup(
            rows=slice(first_row, end_row),
            pages=pages.to(device),
            visible=(key_positions < visible_keys[..., None])[:, None].to(device),
            has_key=(key_positions < kv_lengths[:, None])[:, None, :, None].to(device),
        )
