"""The parts of FlashInfer that we use: its wrappers' calls, and a step's description for them.

This module does not import the library. Written against the sources of flashinfer-python 0.6.18 and
0.7.2.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from sgl_pipeline.pp_runner.attention.attention_backend import AttentionShape


class Wrapper(Protocol):
    """The methods of FlashInfer's two paged wrappers that we use."""

    def plan(self, *args: torch.Tensor | int, **options: Any) -> None:
        """Takes the host arrays of a step and copies them to the device."""

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: tuple[torch.Tensor, torch.Tensor],
        *,
        out: torch.Tensor,
    ) -> torch.Tensor:
        """Attention of the planned step, written to `out`."""


class Event(Protocol):
    """As `StreamMark`."""

    def record(self) -> None:
        """Marks this point of the current stream."""

    def synchronize(self) -> None:
        """Waits for the stream to pass the mark; returns at once when there is none."""


@dataclass(frozen=True, slots=True)
class SplitPrefill:
    """FA2's prefill kernels beside FA3's, and what a choice between them depends on."""

    wrapper: Wrapper
    num_multiprocessors: int  # of the card


@dataclass(frozen=True, slots=True)
class FlashInferParts:
    """The objects that use the GPU; tests replace them by recorders.

    `split_prefill` is None where there are no two kinds of prefill kernels to choose from.
    `open_graph_decode(rows, indices)` returns a decode wrapper for CUDA graphs of `rows` rows,
    which keeps page indices in `indices` (int32, on the device).
    """

    prefill: Wrapper
    decode: Wrapper
    open_event: Callable[[], Event]
    open_graph_decode: Callable[[int, torch.Tensor], Wrapper]
    split_prefill: SplitPrefill | None = None


def plan_decodes(
    wrapper: Wrapper,
    shape: AttentionShape,
    page_indptr: torch.Tensor,
    page_indices: torch.Tensor,
    last_page_lengths: torch.Tensor,
    kv_lengths: torch.Tensor,
) -> None:
    """Plans a step of C decodes on a decode wrapper.

    Args:
        page_indptr: [C + 1] int32 on the host, where the planner reads it.
        page_indices: on the device; from the host, a wrapper for graphs would wait for it.
        last_page_lengths: [C] int32 on the host.
        kv_lengths: [C] int32 on the host; they follow from the others, which takes longer.
    """
    wrapper.plan(
        page_indptr,
        page_indices,
        last_page_lengths,
        shape.num_query_heads,
        shape.num_kv_heads,
        shape.head_dim,
        shape.page_size,
        q_data_type=shape.dtype,
        kv_data_type=shape.page_dtype,
        sm_scale=shape.scale,
        window_left=window_left(shape),
        logits_soft_cap=shape.softcap,
        seq_lens=kv_lengths,
    )


def window_left(shape: AttentionShape) -> int:
    """FlashInfer's number for the keys before its own that a row sees; -1: all of them."""
    return -1 if shape.window is None else shape.window - 1
