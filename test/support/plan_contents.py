"""Reads what a FlashInfer plan gives a card's blocks to do, out of the wrapper's own buffers.

The field orders are those of `DecodePlanInfo` and `PrefillPlanInfo` in the library's
`attention/scheduler.cuh`, 0.7.2.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch

from sgl_pipeline.pp_runner.attention.backend import AttentionShape

_DECODE_FIELDS = (
    "reserved partial_values partial_scores requests chunks outputs mask chunk_tokens graph split"
).split()
_PREFILL_FIELDS = (
    "reserved rows rows_at tile_rows requests query_tiles chunks merge outputs chunk_tokens "
    "partial_values partial_scores mask graph split"
).split()


@dataclass(frozen=True, slots=True)
class PlanContents:
    """A plan of decodes, one row each.

    `info` is what a CUDA graph holds fast; all else may change from step to step. `reads` counts,
    for (row, chunk), the blocks that read that chunk of the row's keys, `chunk_tokens` of them.
    """

    info: tuple[int, ...]
    reserved_blocks: int
    chunk_tokens: int
    reads: Counter[tuple[int, int]]
    partial_bytes: int  # of the workspace, for results of split keys


def plan_contents(wrapper: Any, shape: AttentionShape) -> PlanContents:
    """Decodes the last plan of a decode wrapper of the library, in graph mode or not."""
    info = tuple(int(number) for number in wrapper._plan_info)
    names = _PREFILL_FIELDS if wrapper.use_tensor_cores else _DECODE_FIELDS
    plan = dict(zip(names, info, strict=True))
    integers = wrapper._int_workspace_buffer

    def read(offset: int, dtype: torch.dtype, count: int) -> torch.Tensor:
        return integers[offset : offset + count * dtype.itemsize].view(dtype)

    reserved = plan["reserved"]
    requests = read(plan["requests"], torch.int32, reserved)
    chunks = read(plan["chunks"], torch.int32, reserved)
    if plan["graph"] and plan["split"]:
        valid = read(plan["mask"], torch.bool, reserved)
        requests, chunks = requests[valid], chunks[valid]
    rows_of_a_block = plan.get("tile_rows", 1)
    group = shape.num_query_heads // shape.num_kv_heads
    partial_rows = -(-reserved * rows_of_a_block // group) if "tile_rows" in plan else reserved
    scores_bytes = shape.num_query_heads * partial_rows * 4
    return PlanContents(
        info=info,
        reserved_blocks=reserved,
        chunk_tokens=int(read(plan["chunk_tokens"], torch.int32, 1)),
        reads=Counter(zip(requests.tolist(), chunks.tolist(), strict=True)),
        partial_bytes=plan["partial_scores"] + scores_bytes if plan["split"] else 0,
    )
