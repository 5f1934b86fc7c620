"""Paged attention on an NVIDIA GPU, by FlashInfer's wrappers (arXiv 2501.01005).

Chosen by `pp_runner/device.py`; the only file that imports flashinfer. Must never run ahead of the
copies of an earlier plan. Written against the sources of flashinfer-python 0.6.18 and 0.7.2; what
the wrappers are fed is tested on CPU, the kernels themselves are untested on hardware.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.pp_runner.attention.backend import AttentionShape
from sgl_pipeline.pp_runner.step_inputs import PagedLayout

_WORKSPACE_BYTES = 128 * 2**20  # FlashInfer's recommendation, for partial results of split keys
_DTYPES = (torch.bfloat16, torch.float16)
_HEAD_DIMS = (64, 128, 256)
# Up to here a decode kernel on the CUDA cores keeps up with the memory; above it, tensor cores.
_LARGEST_GROUP_WITHOUT_TENSOR_CORES = 2


class Wrapper(Protocol):
    """What we use of FlashInfer's two paged wrappers."""

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
    """What we use of torch.cuda.Event."""

    def record(self) -> None:
        """Marks this point of the current stream."""

    def synchronize(self) -> None:
        """Waits for the stream to pass the mark; returns at once when there is none."""


@dataclass(frozen=True, slots=True)
class FlashInferParts:
    """The objects that touch the GPU; tests put recorders in their place."""

    prefill: Wrapper
    decode: Wrapper
    planned: Event


def open_flashinfer(shape: AttentionShape) -> FlashInferParts:
    """FlashInfer's wrappers on the device of `shape`.

    Both share one workspace: their kernels follow each other on one stream.

    Raises ConfigurationError when flashinfer is not installed.
    """
    try:
        import flashinfer
    except ImportError as error:
        raise ConfigurationError(
            f"flashinfer cannot be imported ({error}); install requirements for CUDA, or choose "
            "--stage-attention-backend torch"
        ) from error
    workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=shape.device)
    group = shape.num_query_heads // shape.num_kv_heads
    return FlashInferParts(
        prefill=flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD"),
        decode=flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            workspace, "NHD", use_tensor_cores=group > _LARGEST_GROUP_WITHOUT_TENSOR_CORES
        ),
        planned=torch.cuda.Event(),
    )


class FlashInferAttention:
    """The `AttentionBackend` of a CUDA stage, for bf16 or fp16 queries, keys and values.

    The first `num_decodes` chunks go to the decode wrapper, the others to the prefill wrapper; each
    is planned once a step and run once a layer. How FlashInfer splits long contexts depends on the
    whole step, so a row's result is the same in another microbatch only within rounding.

    Args:
        shape: head dim 64, 128 or 256.
        open_parts: makes the wrappers.

    Raises ConfigurationError for a dtype or head dim without a kernel, or without flashinfer.
    """

    def __init__(
        self,
        shape: AttentionShape,
        open_parts: Callable[[AttentionShape], FlashInferParts] = open_flashinfer,
    ) -> None:
        if shape.dtype not in _DTYPES or shape.head_dim not in _HEAD_DIMS:
            raise ConfigurationError(
                f"flashinfer has no kernel for {shape.dtype} with head_dim {shape.head_dim}, only "
                "for bfloat16 and float16 with 64, 128 or 256; choose --dtype bfloat16 or "
                "--stage-attention-backend torch"
            )
        self._shape = shape
        self._parts = open_parts(shape)
        self._num_decodes = 0
        self._num_rows = 0

    def plan(self, layout: PagedLayout) -> None:
        """Plans both wrappers from the host arrays. See `AttentionBackend.plan`.

        A wrapper's plan is copied to the GPU out of one pinned buffer, asynchronously. It may be
        written again only when the copy of the step before is done.
        """
        self._parts.planned.synchronize()
        self._num_decodes = layout.num_decodes
        self._num_rows = int(layout.query_indptr[-1])
        if self._num_decodes > 0:
            self._plan_decodes(layout)
        if self._num_rows > self._num_decodes:
            self._plan_prefills(layout)
        self._parts.planned.record()

    def attend(
        self, query: torch.Tensor, key_pages: torch.Tensor, value_pages: torch.Tensor
    ) -> torch.Tensor:
        """See `AttentionBackend.attend`."""
        assert query.shape[0] == self._num_rows, "attend before plan"
        query = query.contiguous()
        out = torch.empty_like(query)
        pages, decodes = (key_pages, value_pages), self._num_decodes
        if decodes > 0:
            self._parts.decode.run(query[:decodes], pages, out=out[:decodes])
        if self._num_rows > decodes:
            self._parts.prefill.run(query[decodes:], pages, out=out[decodes:])
        return out

    def _plan_decodes(self, layout: PagedLayout) -> None:
        decodes, shape = layout.num_decodes, self._shape
        self._parts.decode.plan(
            layout.page_indptr[: decodes + 1],
            layout.page_indices[: int(layout.page_indptr[decodes])],
            layout.last_page_lengths[:decodes],
            shape.num_query_heads,
            shape.num_kv_heads,
            shape.head_dim,
            shape.page_size,
            q_data_type=shape.dtype,
            kv_data_type=shape.dtype,
            sm_scale=shape.scale,
        )

    def _plan_prefills(self, layout: PagedLayout) -> None:
        decodes, shape = layout.num_decodes, self._shape
        first_page = layout.page_indptr[decodes]
        self._parts.prefill.plan(
            layout.query_indptr[decodes:] - decodes,
            layout.page_indptr[decodes:] - first_page,
            layout.page_indices[int(first_page) :],
            layout.last_page_lengths[decodes:],
            shape.num_query_heads,
            shape.num_kv_heads,
            shape.head_dim,
            shape.page_size,
            causal=True,
            q_data_type=shape.dtype,
            kv_data_type=shape.dtype,
            sm_scale=shape.scale,
        )
