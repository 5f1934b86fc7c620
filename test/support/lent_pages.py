"""Leases of small pools, and the rows that a borrower would send."""

from array import array
from collections.abc import Sequence
from typing import Any

import torch
from support.page_transfers import DIGEST

from sgl_pipeline.pp_runner.attention.attention_backend import AttentionShape, StageAttention
from sgl_pipeline.pp_runner.attention.kv_pool import KvPool
from sgl_pipeline.pp_runner.attention.torch_attention import TorchAttention
from sgl_pipeline.pp_runner.base.kv_format import encode
from sgl_pipeline.pp_runner.lent_attention.leases import Leases
from sgl_pipeline.pp_runner.lent_attention.stage_leases import StageLeases
from sgl_pipeline.wire.attention_messages import AttendRows, LeasedChunk, PlanAttention
from sgl_pipeline.wire.lease_orders import LendPages
from sgl_pipeline.wire.step_order import INT32

Shapes = Sequence[AttentionShape]


def lease_order(
    lease: int, pages: Sequence[int], first_own: int, digest: str = DIGEST
) -> LendPages:
    return LendPages(lease, array(INT32, pages).tobytes(), first_own, digest)


def new_leases(shapes: Shapes) -> Leases:
    return Leases(shapes, lambda: StageAttention(shapes, TorchAttention))


def stage_leases(kv_pool: KvPool, shapes: Shapes, directory: str, door: str) -> StageLeases:
    return StageLeases(
        2,
        kv_pool,
        shapes,
        lambda: StageAttention(shapes, TorchAttention),
        lambda: range(len(shapes)),
        directory,
        door,
    )


def plan_of(*chunks: tuple[int, int, int], digest: str = DIGEST) -> PlanAttention:
    """Of chunks by lease, first position and length."""
    return PlanAttention(digest, tuple(LeasedChunk(*chunk) for chunk in chunks))


def random_rows(
    layer: int, shape: AttentionShape, num_rows: int, seed: int = 0, **changes: Any
) -> AttendRows:
    generator = torch.Generator().manual_seed(seed)

    def rows(num_heads: int, width: int) -> torch.Tensor:
        return torch.randn(num_rows, num_heads, width, generator=generator).to(shape.dtype)

    query = rows(shape.num_query_heads, shape.head_dim)
    keys, values = (
        encode(rows(shape.num_kv_heads, width), shape.page_dtype)
        for width in (shape.head_dim, shape.value_dim)
    )
    contents = {"query": query, "keys": keys, "values": values, "sinks": torch.empty(0)} | changes
    return AttendRows(layer, **{name: bytes_of(tensor) for name, tensor in contents.items()})


def bytes_of(tensor: torch.Tensor) -> memoryview:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().data
