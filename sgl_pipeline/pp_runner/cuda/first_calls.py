"""Calls every FlashInfer kernel of a stage once, so that all are compiled when the stage starts.

Without it a missing compiler would end the server at the first request, and the first prompts would
wait for minutes.
"""

import torch

from sgl_pipeline.pp_runner.attention.attention_backend import AttentionBackend, AttentionShape
from sgl_pipeline.pp_runner.base.step_inputs import PagedLayout
from sgl_pipeline.pp_runner.layer_kernels.layer_backend import LayerKernels, RmsNorm, Rotation

# If the contents of the stage's pages are not known.
ONE_HEAD = AttentionShape(
    num_query_heads=1,
    num_kv_heads=1,
    head_dim=64,
    value_dim=64,
    page_size=16,
    scale=1.0,
    dtype=torch.bfloat16,
    device=torch.device("cuda"),
)


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
def call_layer_kernels(kernels: LayerKernels, shape: AttentionShape) -> None:
    """Runs norms, gate and heads on one row of zeros, and one page."""
    head_dim = shape.head_dim

    def zeros(*size: int, dtype: torch.dtype = shape.dtype) -> torch.Tensor:
        return torch.zeros(*size, dtype=dtype, device=shape.device)

    norm = RmsNorm(zeros(head_dim), 1e-6)
    kernels.norm(zeros(1, head_dim), norm)
    kernels.add_norm(zeros(1, head_dim), zeros(1, head_dim), norm)
    kernels.gate(zeros(1, 2 * head_dim))
    half = zeros(1, head_dim // 2, dtype=torch.float32)
    pages = (
        zeros(1, *shape.key_page_shape, dtype=shape.page_dtype),
        zeros(1, *shape.value_page_shape, dtype=shape.page_dtype),
    )
    kernels.place_heads(
        zeros(1, (shape.num_query_heads + 2 * shape.num_kv_heads) * head_dim),
        None,
        Rotation(half, half, interleaved=False),
        zeros(1, dtype=torch.int64),
        pages,
    )
