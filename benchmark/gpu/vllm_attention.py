"""vLLM's FA3, the attention kernel that vLLM and SGLang take on a Hopper, as a rival of ours.

Raced by `part_kernels.py`; no stage uses it. `pack_vllm_attention.py` fetches it. The calls are
those of vLLM 0.25.1's FlashAttention backend in a step without a graph: a schedule once a step,
then the kernel for each layer, over the same pages as ours.
"""

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from sgl_pipeline.pp_runner.attention.attention_backend import AttentionShape
from sgl_pipeline.pp_runner.base.step_inputs import PagedLayout

MODULE = "vllm.vllm_flash_attn.flash_attn_interface"
_FA3 = 3
_HOPPER = 9
_ANY_NUMBER_OF_SPLITS = 0  # of a request's keys: as its heuristics find best


def why_not_there(device: torch.device) -> str:
    """The reason why the rival cannot run on this device; empty where it can."""
    if device.type != "cuda":
        return "needs a GPU"
    if torch.cuda.get_device_capability(device)[0] != _HOPPER:
        return "needs compute capability 9 (Hopper)"
    try:
        importlib.import_module(MODULE)
    except ModuleNotFoundError:
        return "needs its pack: python -m benchmark.gpu.pack_vllm_attention"
    except ImportError as error:
        # Its package ends without the reason, which the module inside has.
        reason = getattr(sys.modules.get(MODULE), "FA3_UNAVAILABLE_REASON", None)
        return f"cannot be loaded: {reason or error}"
    return ""


@dataclass(frozen=True, slots=True)
class VllmFunctions:
    """The functions that we call of vLLM's interface: `schedule` is its get_scheduler_metadata,
    `attend` its flash_attn_varlen_func."""

    schedule: Callable[..., torch.Tensor]
    attend: Callable[..., torch.Tensor]


def open_vllm_functions() -> VllmFunctions:
    """The functions of the pack. Raises ImportError where there is none."""
    interface: Any = importlib.import_module(MODULE)
    return VllmFunctions(interface.get_scheduler_metadata, interface.flash_attn_varlen_func)


class VllmAttention:
    """The `AttentionBackend` over bf16 or fp16 pages, decodes and chunks of prompts alike."""

    def __init__(
        self,
        shape: AttentionShape,
        open_functions: Callable[[], VllmFunctions] = open_vllm_functions,
    ) -> None:
        self._shape = shape
        self._functions = open_functions()
        self._step: dict[str, Any] = {}

    def plan(self, layout: PagedLayout) -> None:
        """See `AttentionBackend.plan`."""
        shape, device = self._shape, self._shape.device
        longest_chunk = int(layout.query_indptr.diff().max())
        most_keys = int(layout.kv_lengths.max())
        query_ends = layout.query_indptr.to(device, non_blocking=True)
        kv_lengths = layout.kv_lengths.to(device, non_blocking=True)
        schedule = self._functions.schedule(
            batch_size=layout.num_chunks,
            max_seqlen_q=longest_chunk,
            max_seqlen_k=most_keys,
            num_heads_q=shape.num_query_heads,
            num_heads_kv=shape.num_kv_heads,
            headdim=shape.head_dim,
            cache_seqlens=kv_lengths,
            qkv_dtype=shape.dtype,
            cu_seqlens_q=query_ends,
            page_size=shape.page_size,
            causal=True,
            num_splits=_ANY_NUMBER_OF_SPLITS,
        )
        self._step = {
            "cu_seqlens_q": query_ends,
            "max_seqlen_q": longest_chunk,
            "seqused_k": kv_lengths,
            "max_seqlen_k": most_keys,
            "block_table": page_table(layout).to(device, non_blocking=True),
            "scheduler_metadata": schedule,
        }

    def attend(
        self,
        query: torch.Tensor,
        key_pages: torch.Tensor,
        value_pages: torch.Tensor,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `AttentionBackend.attend`."""
        return self._functions.attend(
            q=query,
            k=key_pages,
            v=value_pages,
            out=torch.empty_like(query),
            softmax_scale=self._shape.scale,
            causal=True,
            num_splits=_ANY_NUMBER_OF_SPLITS,
            fa_version=_FA3,
            **self._step,
        )


def page_table(layout: PagedLayout) -> torch.Tensor:
    """The pages of each chunk as a row, [C, most pages of one] int32; zeros where it has fewer."""
    counts = layout.page_indptr.diff()
    table = torch.zeros(layout.num_chunks, int(counts.max()), dtype=torch.int32)
    table[torch.arange(table.shape[1]) < counts[:, None]] = layout.page_indices
    return table
