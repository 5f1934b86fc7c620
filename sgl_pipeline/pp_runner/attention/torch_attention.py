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
    is_seen: torch.Tensor  # [C, 1, K, 1], whether some row of the chunk does


class TorchAttention:
    """Causal attention over paged keys and values in fp32: by `scaled_dot_product_attention` where
    it has all that the shape asks for, which are not a softcap and sinks.

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
        self,
        query: torch.Tensor,
        key_pages: torch.Tensor,
        value_pages: torch.Tensor,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `AttentionBackend.attend`."""
        assert (sinks is not None) == self._shape.has_sinks
        output = query.new_empty((*query.shape[:2], self._shape.value_dim))
        for group in self._groups:
            num_chunks = group.pages.shape[0]
            rows = query[group.rows].unflatten(0, (num_chunks, -1)).transpose(1, 2)
            keys, values = (  # [C, Hkv, K, D], [C, Hkv, K, Dv]
                decode(pages[group.pages], query.dtype).flatten(1, 2).transpose(1, 2).float()
                for pages in (key_pages, value_pages)
            )
            # These keys may belong to another request, and weight 0 does not remove a NaN.
            keys.masked_fill_(~group.is_seen, 0.0)
            values.masked_fill_(~group.is_seen, 0.0)
            attended = self._attended(rows.float(), keys, values, group.visible, sinks)
            output[group.rows] = attended.transpose(1, 2).flatten(0, 1).to(query.dtype)
        return output

    def _attended(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        visible: torch.Tensor,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """[C, Hq, Q, Dv] for query [C, Hq, Q, D]."""
        softcap = self._shape.softcap
        if sinks is None and softcap is None:
            return F.scaled_dot_product_attention(
                query, keys, values, attn_mask=visible, scale=self._shape.scale, enable_gqa=True
            )
        group = self._shape.num_query_heads // self._shape.num_kv_heads
        keys, values = (each.repeat_interleave(group, dim=1) for each in (keys, values))
        scores = query @ keys.mT * self._shape.scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill(~visible, -torch.inf)
        if sinks is not None:
            sink_scores = sinks[:, None, None].expand(*scores.shape[:-1], 1)
            scores = torch.cat((scores, sink_scores), dim=-1)
        return scores.softmax(dim=-1)[..., : keys.shape[2]] @ values

    def _group(self, layout: PagedLayout, first: int, end: int) -> _ChunkGroup:
        """The group of the chunks `first` to `end` (exclusive), which have as many rows each."""
        page_ends = layout.page_indptr[first : end + 1].tolist()
        runs = [layout.page_indices[a:b] for a, b in itertools.pairwise(page_ends)]
        pages = torch.nn.utils.rnn.pad_sequence(runs, batch_first=True).long()
        kv_lengths = layout.kv_lengths[first:end].long()
        first_row, end_row = layout.query_indptr[[first, end]].tolist()
        num_rows = (end_row - first_row) // (end - first)
        # What a row sees ends with its own key: for the chunk's last row with the last one.
        ends = kv_lengths[:, None, None] - torch.arange(num_rows - 1, -1, -1)[:, None]  # [C, Q, 1]
        key_positions = torch.arange(pages.shape[1] * layout.page_size)
        visible = key_positions < ends  # [C, Q, K]
        if self._shape.window is not None:
            visible &= key_positions >= ends - self._shape.window
        device = self._shape.device
        return _ChunkGroup(
            rows=slice(first_row, end_row),
            pages=pages.to(device),
            visible=visible[:, None].to(device),
            is_seen=visible.any(dim=1)[:, None, :, None].to(device),
        )
