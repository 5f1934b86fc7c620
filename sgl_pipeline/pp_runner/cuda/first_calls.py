"""Calls every FlashInfer kernel of a stage once, so that all are compiled when the stage starts.

Called by `kernel_choice.py`. Without it a missing compiler would end the server at the first
request, and the first prompts would wait for minutes.
"""

import torch

from sgl_pipeline.pp_runner.attention.backend import AttentionBackend, AttentionShape
from sgl_pipeline.pp_runner.layer_kernels.backend import LayerKernels, RmsNorm, Rotation
from sgl_pipeline.pp_runner.step_inputs import PagedLayout

_HEAD_DIM = 64
_PAGE_SIZE = 16


def plan_decode_and_prefill(attention: AttentionBackend, shape: AttentionShape) -> None:
    """Plans a step of a decode and a prefill, of one key each; a plan loads the kernels."""
    one_each = torch.ones(2, dtype=torch.int32)
    bounds = torch.arange(3, dtype=torch.int32)
    attention.plan(
        PagedLayout(
            page_size=shape.page_size,
            num_decodes=1,
            query_indptr=bounds,
            page_indptr=bounds,
            page_indices=torch.zeros(2, dtype=torch.int32),
            last_page_lengths=one_each,
            kv_lengths=one_each,
        )
    )


@torch.inference_mode()
def call_layer_kernels(kernels: LayerKernels, dtype: torch.dtype, device: torch.device) -> None:
    """Runs norms, gate and heads on one row of zeros in `dtype` on `device`."""

    def zeros(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.zeros(*shape, dtype=dtype, device=device)

    norm = RmsNorm(zeros(_HEAD_DIM), 1e-6)
    kernels.norm(zeros(1, _HEAD_DIM), norm)
    kernels.add_norm(zeros(1, _HEAD_DIM), zeros(1, _HEAD_DIM), norm)
    kernels.gate(zeros(1, 2 * _HEAD_DIM))
    half = zeros(1, _HEAD_DIM // 2, dtype=torch.float32)
    pages = (zeros(1, _PAGE_SIZE, 1, _HEAD_DIM), zeros(1, _PAGE_SIZE, 1, _HEAD_DIM))
    slots = zeros(1, dtype=torch.int64)
    kernels.place_heads(
        zeros(1, 3 * _HEAD_DIM), None, Rotation(half, half, interleaved=False), slots, pages
    )
