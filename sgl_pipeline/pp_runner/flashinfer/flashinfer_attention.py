"""Paged attention on an NVIDIA GPU, by FlashInfer's wrappers (arXiv 2501.01005).

It must never run ahead of the copies of an earlier plan. Written against the sources of
flashinfer-python 0.6.18 and 0.7.2; the inputs of the wrappers are tested on CPU.
"""

from collections.abc import Callable
from functools import partial

import torch

from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.pp_runner.attention.attention_backend import AttentionShape
from sgl_pipeline.pp_runner.base.step_inputs import PagedLayout
from sgl_pipeline.pp_runner.base.stream_mark import StreamMark
from sgl_pipeline.pp_runner.flashinfer.flashinfer_graph import GraphDecodeAttention
from sgl_pipeline.pp_runner.flashinfer.flashinfer_parts import (
    FlashInferParts,
    SplitPrefill,
    Wrapper,
    plan_decodes,
    window_left,
)
from sgl_pipeline.pp_runner.flashinfer.kernel_builds import building_kernels
from sgl_pipeline.pp_runner.flashinfer.split_keys import split_keys_are_faster

_WORKSPACE_BYTES = 128 * 2**20  # FlashInfer's recommendation, for partial results of split keys
MAX_GRAPH_DECODES = 256  # the most rows of a decode graph
# The most of a card in use, an RTX PRO 6000; an H200 has 132, a B200 148.
MOST_MULTIPROCESSORS = 188
# Of FA2's prefill kernels: blocks for each multiprocessor, and the most packed rows of a block.
_FA2_BLOCKS, _FA2_TILE_ROWS = 2, 128
_DTYPES = (torch.bfloat16, torch.float16)
_HEAD_DIMS = (64, 128, 256)
# Up to here a decode kernel on the CUDA cores keeps up with the memory; above it, tensor cores.
_LARGEST_GROUP_WITHOUT_TENSOR_CORES = 2


def open_flashinfer(
    shape: AttentionShape, prefill_kernels: str, use_tensor_cores: bool | None = None
) -> FlashInferParts:
    """FlashInfer's wrappers on the device of `shape`.

    All share one workspace: their kernels follow each other on one stream. `use_tensor_cores` is
    for decodes; None: as the heads are grouped.

    Raises ConfigurationError when flashinfer or the compilers that it needs are missing, or for fa3
    on a GPU that is not a Hopper.
    """
    with building_kernels():
        import flashinfer
    is_hopper = torch.cuda.get_device_capability(shape.device)[0] == 9
    if prefill_kernels == "fa3" and not is_hopper:
        raise _no_hopper(shape.device)
    workspace = torch.zeros(workspace_bytes(shape), dtype=torch.uint8, device=shape.device)
    group = shape.num_query_heads // shape.num_kv_heads
    if use_tensor_cores is None:
        use_tensor_cores = group > _LARGEST_GROUP_WITHOUT_TENSOR_CORES

    def open_graph_decode(num_rows: int, indices: torch.Tensor) -> Wrapper:
        return flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            workspace,
            "NHD",
            use_cuda_graph=True,
            use_tensor_cores=use_tensor_cores,
            paged_kv_indptr_buffer=torch.zeros(
                num_rows + 1, dtype=torch.int32, device=shape.device
            ),
            paged_kv_indices_buffer=indices,
            paged_kv_last_page_len_buffer=torch.zeros(
                num_rows, dtype=torch.int32, device=shape.device
            ),
        )

    def open_prefill(kernels: str) -> Wrapper:
        return flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend=kernels)

    split_prefill = None
    if prefill_kernels == "auto" and is_hopper and shape.coded_dtype is None:
        card = torch.cuda.get_device_properties(shape.device)
        split_prefill = SplitPrefill(open_prefill("fa2"), card.multi_processor_count)
    return FlashInferParts(
        prefill=open_prefill(prefill_kernels),
        split_prefill=split_prefill,
        decode=flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            workspace, "NHD", use_tensor_cores=use_tensor_cores
        ),
        open_event=partial(StreamMark, shape.device),
        open_graph_decode=open_graph_decode,
    )


def _no_hopper(device: torch.device) -> ConfigurationError:
    """FlashInfer itself would compile its fa3 kernels for any GPU, and fail at the first launch."""
    major, minor = torch.cuda.get_device_capability(device)
    return ConfigurationError(
        f"--stage-prefill-kernels fa3 needs a GPU of compute capability 9 (Hopper), this is "
        f"{major}.{minor}; choose fa2 or auto"
    )


def workspace_bytes(shape: AttentionShape) -> int:
    """Bytes of the workspace that the wrappers share, of fp32 results for parts of the keys.

    A decode graph on tensor cores always splits the keys, and reserves results for whole tiles of
    16 or 64 rows, the query heads of one KV head being rows. FA2's prefill splits them where chunks
    are few, into as many blocks as the card has room for.
    """
    group = shape.num_query_heads // shape.num_kv_heads
    tile_rows = 16 if group <= 16 else 64
    num_tiles = -(-MAX_GRAPH_DECODES * group // tile_rows) + MAX_GRAPH_DECODES
    graph_rows = shape.num_query_heads * num_tiles * tile_rows
    # `PrefillSplitQOKVIndptr` of flashinfer's scheduler.cuh bounds the blocks by those of the card,
    # divided by the KV heads; `PrefillPlan` there reserves a whole tile of rows for each and every
    # query head (0.6.18; in 0.7.2 for each KV head).
    prefill_rows = group * _FA2_BLOCKS * MOST_MULTIPROCESSORS * _FA2_TILE_ROWS
    partial_results = max(graph_rows, prefill_rows) * (shape.head_dim + 1) * 4
    return max(_WORKSPACE_BYTES, partial_results + 2**20)


class FlashInferAttention:
    """The `AttentionBackend` of a CUDA stage, for bf16 or fp16 queries, keys and values, and for
    e4m3 keys and values, which have FA2 kernels only.

    The first `num_decodes` chunks go to the decode wrapper, the others to the prefill wrapper; each
    is planned once a step and run once a layer. How FlashInfer splits long contexts depends on the
    whole step, so a row's result is the same in another microbatch only within rounding.

    Args:
        shape: head dim 64, 128 or 256.
        prefill_kernels: for chunks of prompts: fa2, fa3 or auto, which on a Hopper is the faster of
            both for the chunks of each step (`split_keys.py`), elsewhere fa2.
        open_parts: makes the wrappers.

    Raises ConfigurationError for a dtype or head dim without a kernel, for prefill kernels that the
    GPU does not have, or without flashinfer.
    """

    def __init__(
        self,
        shape: AttentionShape,
        prefill_kernels: str = "auto",
        open_parts: Callable[[AttentionShape, str], FlashInferParts] = open_flashinfer,
    ) -> None:
        if shape.has_sinks or shape.value_dim != shape.head_dim:
            raise ConfigurationError(
                "flashinfer is not called for attention with sinks, or with values of "
                f"{shape.value_dim} numbers beside keys of {shape.head_dim}; choose "
                "--stage-attention-backend torch"
            )
        if shape.dtype not in _DTYPES or shape.head_dim not in _HEAD_DIMS:
            raise ConfigurationError(
                f"flashinfer has no kernel for {shape.dtype} with head_dim {shape.head_dim}, only "
                "for bfloat16 and float16 with 64, 128 or 256; choose --dtype bfloat16 or "
                "--stage-attention-backend torch"
            )
        if prefill_kernels == "fa3" and shape.coded_dtype is not None:
            raise ConfigurationError(
                f"--stage-prefill-kernels fa3 cannot read {shape.coded_dtype} keys and values "
                f"beside {shape.dtype} queries; choose fa2 or auto"
            )
        self._shape = shape
        self._parts = open_parts(shape, prefill_kernels)
        self._planned = self._parts.open_event()
        self._prefill = self._parts.prefill
        self._num_decodes = 0
        self._num_rows = 0

    def decode_for_graph(
        self, num_rows: int, padding_page: int, indices: torch.Tensor
    ) -> GraphDecodeAttention:
        """Decode attention that a CUDA graph can hold, for steps of up to `num_rows` decodes.

        Args:
            padding_page: read by the rows that a step lacks.
            indices: [any] int32 on the device, for the page references of a step; all such graphs
                may share it, because their plans follow each other.
        """
        return GraphDecodeAttention(
            self._shape,
            self._parts.open_graph_decode(num_rows, indices),
            self._parts.open_event(),
            num_rows,
            padding_page,
            indices,
        )

    def plan(self, layout: PagedLayout) -> None:
        """Plans both wrappers from the host arrays. See `AttentionBackend.plan`.

        A wrapper's plan is copied to the GPU out of one pinned buffer, asynchronously. It may be
        written again only when the copy of the step before is done.
        """
        self._planned.synchronize()
        self._num_decodes = decodes = layout.num_decodes
        self._num_rows = int(layout.query_indptr[-1])
        page_indices = layout.page_indices_on(self._shape.device)
        num_decode_pages = int(layout.page_indptr[decodes])
        if decodes > 0:
            plan_decodes(
                self._parts.decode,
                self._shape,
                layout.page_indptr[: decodes + 1],
                page_indices[:num_decode_pages],
                layout.last_page_lengths[:decodes],
                layout.kv_lengths[:decodes],
            )
        if self._num_rows > decodes:
            self._plan_prefills(layout, page_indices[num_decode_pages:])
        self._planned.record()

    def attend(
        self,
        query: torch.Tensor,
        key_pages: torch.Tensor,
        value_pages: torch.Tensor,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `AttentionBackend.attend`."""
        assert sinks is None
        query = query.contiguous()
        out = torch.empty_like(query)
        self.attend_into(query, key_pages, value_pages, out)
        return out

    def attend_into(
        self,
        query: torch.Tensor,
        key_pages: torch.Tensor,
        value_pages: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """The same, written to `out` [T, Hq, D]; it and `query` are contiguous."""
        assert query.shape[0] == self._num_rows, "attend before plan"
        pages, decodes = (key_pages, value_pages), self._num_decodes
        if decodes > 0:
            self._parts.decode.run(query[:decodes], pages, out=out[:decodes])
        if self._num_rows > decodes:
            self._prefill.run(query[decodes:], pages, out=out[decodes:])

    def _plan_prefills(self, layout: PagedLayout, page_indices: torch.Tensor) -> None:
        decodes, shape, split = layout.num_decodes, self._shape, self._parts.split_prefill
        self._prefill = self._parts.prefill
        if split is not None and split_keys_are_faster(layout, shape, split.num_multiprocessors):
            self._prefill = split.wrapper
        self._prefill.plan(
            layout.query_indptr[decodes:] - decodes,
            layout.page_indptr[decodes:] - layout.page_indptr[decodes],
            page_indices,
            layout.last_page_lengths[decodes:],
            shape.num_query_heads,
            shape.num_kv_heads,
            shape.head_dim,
            shape.page_size,
            causal=True,
            q_data_type=shape.dtype,
            kv_data_type=shape.page_dtype,
            sm_scale=shape.scale,
            window_left=window_left(shape),
            logits_soft_cap=shape.softcap,
        )
