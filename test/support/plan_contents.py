"""Reads what a FlashInfer plan gives a card's blocks to do, out of the wrapper's own buffers.

The field orders are those of `DecodePlanInfo`, `PrefillPlanInfo` and `PrefillPlanSM90Info` in the
library's `attention/scheduler.cuh`, 0.7.2. FA2's rows are packed: the query heads of one KV head
are rows too.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch

from sgl_pipeline.pp_runner.attention.attention_backend import AttentionShape

_DECODE = (
    "reserved partial_values partial_scores requests chunks outputs mask chunk_tokens graph split"
).split()
_FA2 = (
    "reserved rows rows_at tile_rows requests query_tiles chunks merge outputs chunk_tokens "
    "partial_values partial_scores mask graph split"
).split()
_FA3 = "query_tiles queries pages query_rows keys heads work requests same_for_all_heads".split()


@dataclass(frozen=True, slots=True)
class PlanContents:
    """A plan of the decode kernel or of FA2.

    `info` is what a CUDA graph holds fast; all else may change from step to step. `blocks` counts,
    for (request, tile of its rows, chunk of its keys), the blocks that are given it. A tile has
    `tile_rows` packed rows, a chunk `chunk_tokens` keys.
    """

    info: tuple[int, ...]
    blocks: Counter[tuple[int, int, int]]
    tile_rows: int
    chunk_tokens: int
    partial_bytes: int  # of the workspace, for results of split keys


@dataclass(frozen=True, slots=True)
class HopperWork:
    """A plan of FA3: `tiles` counts (request, head, tile of 128 rows); `keys` is for each request
    how many it sees."""

    tiles: Counter[tuple[int, int, int]]
    keys: dict[int, int]


def plan_contents(wrapper: Any, shape: AttentionShape) -> PlanContents:
    """Decodes the last plan of a wrapper of the library, in graph mode or not."""
    info = tuple(int(number) for number in wrapper._plan_info)
    plan = dict(zip(_DECODE if len(info) == len(_DECODE) else _FA2, info, strict=True))
    reserved, tile_rows = plan["reserved"], plan.get("tile_rows", 1)
    requests, chunks = (_read(wrapper, plan[name], reserved) for name in ("requests", "chunks"))
    tiles = torch.zeros_like(chunks)
    if "query_tiles" in plan:
        tiles = _read(wrapper, plan["query_tiles"], reserved)
    if plan["graph"] and plan["split"]:
        valid = _read(wrapper, plan["mask"], reserved, torch.bool)
        requests, tiles, chunks = requests[valid], tiles[valid], chunks[valid]
    group = shape.num_query_heads // shape.num_kv_heads if "tile_rows" in plan else 1
    scores_bytes = shape.num_query_heads * -(-reserved * tile_rows // group) * 4
    return PlanContents(
        info=info,
        blocks=Counter(zip(requests.tolist(), tiles.tolist(), chunks.tolist(), strict=True)),
        tile_rows=tile_rows,
        chunk_tokens=int(_read(wrapper, plan["chunk_tokens"], 1)),
        partial_bytes=plan["partial_scores"] + scores_bytes if plan["split"] else 0,
    )


def hopper_work(wrapper: Any, num_multiprocessors: int) -> HopperWork:
    """Decodes the last plan of a prefill wrapper whose backend is fa3."""
    plan = dict(zip(_FA3, map(int, wrapper._plan_info), strict=True))
    assert not plan["same_for_all_heads"]
    count = int(_read(wrapper, plan["work"], num_multiprocessors + 1)[-1])
    requests, heads, tiles, keys = (
        _read(wrapper, plan[name], count).tolist()
        for name in ("requests", "heads", "query_tiles", "keys")
    )
    return HopperWork(
        tiles=Counter(zip(requests, heads, tiles, strict=True)),
        keys=dict(zip(requests, keys, strict=True)),
    )


def _read(wrapper: Any, offset: int, count: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    """[count] from the buffer that the kernels read; it is on the CPU here."""
    return wrapper._int_workspace_buffer[offset : offset + count * dtype.itemsize].view(dtype)
